//! The statistics of a calibration. Pure; none of them gives a number that is none: what is not defined is `None`.

use serde::Serialize;

/// Standard deviations on each side of a 95 % interval of a normal distribution.
const Z: f64 = 1.959_963_984_540_054;
/// Resamples of a bootstrap: the ends of a 95 % interval have 50 of them outside each, and move little from seed to seed.
const RESAMPLES: usize = 2_000;
/// The least share of resamples for which the statistic must be defined; fewer would be another population.
const DEFINED: f64 = 0.95;

/// Where the true value is, with 95 % confidence.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Interval {
    /// Its lower end.
    pub low: f64,
    /// Its upper end.
    pub high: f64,
}

/// How often each pair of labels occurred: rows are one rater's, columns the other's.
pub(super) type Table = Vec<Vec<u64>>;

/// Cohen's kappa of a square table, with its large-sample standard error (Fleiss, Cohen & Everitt 1969, which does not assume that the raters are
/// independent, as the older formula of Cohen 1960 does). `None` where both raters use one and the same label only: agreement by chance is
/// certain then, and there is nothing beyond it.
pub(super) fn kappa(table: &Table) -> Option<(f64, f64)> {
    let n = table.iter().flatten().sum::<u64>() as f64;
    if n == 0.0 {
        return None;
    }
    let share = |row: usize, column: usize| table[row][column] as f64 / n;
    let labels = 0..table.len();
    let rows: Vec<f64> = labels
        .clone()
        .map(|row| labels.clone().map(|column| share(row, column)).sum())
        .collect();
    let columns: Vec<f64> = labels
        .clone()
        .map(|column| labels.clone().map(|row| share(row, column)).sum())
        .collect();
    let observed: f64 = labels.clone().map(|label| share(label, label)).sum();
    let chance: f64 = labels.clone().map(|label| rows[label] * columns[label]).sum();
    // Counted, because sums of shares are not exact.
    let used = |label: usize| table[label].iter().sum::<u64>() > 0 || table.iter().any(|row| row[label] > 0);
    if labels.clone().filter(|label| used(*label)).count() < 2 {
        return None;
    }
    let kappa = (observed - chance) / (1.0 - chance);
    let off = 1.0 - kappa;
    let mut sum = 0.0;
    for row in labels.clone() {
        for column in labels.clone() {
            sum += match row == column {
                true => share(row, row) * (1.0 - (rows[row] + columns[row]) * off).powi(2),
                false => off.powi(2) * share(row, column) * (columns[row] + rows[column]).powi(2),
            };
        }
    }
    let variance = (sum - (kappa - chance * off).powi(2)) / (n * (1.0 - chance).powi(2));
    // Where all agree it is zero, or a hair below it.
    Some((kappa, variance.max(0.0).sqrt()))
}

/// Around an estimate of a coefficient, which lies between -1 and 1.
pub(super) fn around(estimate: f64, error: f64) -> Interval {
    Interval {
        low: (estimate - Z * error).max(-1.0),
        high: (estimate + Z * error).min(1.0),
    }
}

/// Wilson's interval of a share: of `n` independent observations with the mean `share`. It has a width for 0 and 1, too.
pub(super) fn wilson(share: f64, n: usize) -> Option<Interval> {
    if n == 0 {
        return None;
    }
    let n = n as f64;
    let z2 = Z * Z / n;
    let middle = (share + z2 / 2.0) / (1.0 + z2);
    let half = Z / (1.0 + z2) * (share * (1.0 - share) / n + z2 / (4.0 * n)).sqrt();
    Some(Interval {
        low: (middle - half).max(0.0),
        high: (middle + half).min(1.0),
    })
}

/// Spearman's rank correlation; equal values share the mean of their ranks. `None` where one side does not vary.
pub(super) fn spearman(pairs: &[(f64, f64)]) -> Option<f64> {
    let left = ranks(pairs.iter().map(|pair| pair.0).collect());
    let right = ranks(pairs.iter().map(|pair| pair.1).collect());
    let mean = (pairs.len() as f64 + 1.0) / 2.0;
    let (mut both, mut squares) = (0.0, (0.0, 0.0));
    for (left, right) in left.iter().zip(&right) {
        let (left, right) = (left - mean, right - mean);
        both += left * right;
        squares = (squares.0 + left * left, squares.1 + right * right);
    }
    // Ranks are halves, so these sums are exact: a side that does not vary gives zero.
    (squares.0 > 0.0 && squares.1 > 0.0).then(|| (both / (squares.0 * squares.1).sqrt()).clamp(-1.0, 1.0))
}

fn ranks(values: Vec<f64>) -> Vec<f64> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|a, b| values[*a].total_cmp(&values[*b]));
    let mut ranks = vec![0.0; values.len()];
    let mut begin = 0;
    for equal in order.chunk_by(|a, b| values[*a] == values[*b]) {
        let end = begin + equal.len();
        for index in equal {
            ranks[*index] = (begin + 1 + end) as f64 / 2.0;
        }
        begin = end;
    }
    ranks
}

/// The percentile interval of a statistic over resampled `values`. `None` where it is not defined for nearly all resamples.
pub(super) fn bootstrap<T: Copy>(values: &[T], seed: u64, statistic: impl Fn(&[T]) -> Option<f64>) -> Option<Interval> {
    let mut random = Random(seed);
    let mut resample = Vec::with_capacity(values.len());
    let mut found = Vec::with_capacity(RESAMPLES);
    for _ in 0..RESAMPLES {
        resample.clear();
        resample.extend(values.iter().map(|_| values[random.below(values.len())]));
        found.extend(statistic(&resample));
    }
    if (found.len() as f64) < DEFINED * RESAMPLES as f64 {
        return None;
    }
    found.sort_by(f64::total_cmp);
    let at = |share: f64| found[((found.len() - 1) as f64 * share).round() as usize];
    Some(Interval {
        low: at(0.025),
        high: at(0.975),
    })
}

/// SplitMix64: the same numbers for a seed in every version of this program, which a library's generator does not promise.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    /// Below `bound`, which is small enough that the lowest numbers being likelier by a hair does not matter.
    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::*;

    fn rounded(value: f64) -> f64 {
        (value * 10_000.0).round() / 10_000.0
    }

    /// SAS/STAT User's Guide, The FREQ Procedure, Getting Started, "Agreement Study": two dermatologists rate 88 patients as terrible, poor, marginal or
    /// clear. Published there: kappa 0.3449, 95 % confidence limits 0.2030 and 0.4868 (by the variance of Fleiss, Cohen & Everitt 1969).
    #[test]
    fn kappa_of_a_published_example() {
        let skin = vec![vec![10, 4, 1, 0], vec![5, 10, 12, 2], vec![2, 4, 12, 5], vec![0, 2, 6, 13]];
        let (kappa, error) = kappa(&skin).unwrap();
        let interval = around(kappa, error);
        assert_eq!([kappa, interval.low, interval.high].map(rounded), [0.3449, 0.2030, 0.4868]);
        // What Cohen's formula of 1960 gives instead: the published limits tell the two apart.
        let (observed, chance) = (45.0 / 88.0, 1.0 - (1.0 - 45.0 / 88.0) / (1.0 - kappa));
        let older = (observed * (1.0 - observed) / 88.0_f64).sqrt() / (1.0 - chance);
        assert_eq!([error, older].map(rounded), [0.0724, 0.0714]);
    }

    #[test]
    fn kappa_at_its_ends() {
        let check = |table: &[&[u64]], expected: Option<(f64, f64)>| {
            let table: Table = table.iter().map(|row| row.to_vec()).collect();
            assert_eq!(
                kappa(&table).map(|(kappa, error)| (rounded(kappa), rounded(error))),
                expected,
                "{table:?}"
            );
        };
        check(&[], None);
        check(&[&[0, 0], &[0, 0]], None);
        check(&[&[7]], None);
        check(&[&[0, 0], &[0, 3]], None);
        check(&[&[5, 0], &[0, 5]], Some((1.0, 0.0)));
        check(&[&[0, 5], &[5, 0]], Some((-1.0, 0.0)));
        // One rater says always the same: as good as chance.
        check(&[&[6, 0], &[4, 0]], Some((0.0, 0.0)));
        check(&[&[5, 5], &[5, 5]], Some((0.0, 0.2236)));
    }

    /// Newcombe, Statistics in Medicine 17 (1998), 857-872, table I, method 3 (Wilson's score): 81/263, 15/148, 0/20, 1/29.
    #[test]
    fn intervals_of_shares_as_published() {
        for (hits, n, low, high) in [
            (81.0, 263, 0.2553, 0.3662),
            (15.0, 148, 0.0624, 0.1605),
            (0.0, 20, 0.0, 0.1611),
            (1.0, 29, 0.0061, 0.1718),
        ] {
            let interval = wilson(hits / n as f64, n).unwrap();
            assert_eq!([interval.low, interval.high].map(rounded), [low, high], "{hits}/{n}");
        }
        assert_eq!(wilson(0.5, 0), None);
    }

    #[test]
    fn rank_correlations() {
        let check = |pairs: &[(f64, f64)], expected: Option<f64>| assert_eq!(spearman(pairs).map(rounded), expected, "{pairs:?}");
        check(&[], None);
        check(&[(1.0, 2.0)], None);
        check(&[(1.0, 2.0), (2.0, 2.0)], None);
        check(&[(1.0, 10.0), (2.0, 100.0), (3.0, 1000.0)], Some(1.0));
        check(&[(1.0, 3.0), (2.0, 2.0), (3.0, 1.0)], Some(-1.0));
        // IQ and hours of television, the example of Wikipedia's "Spearman's rank correlation coefficient": -29/165.
        let iq = [106.0, 100.0, 86.0, 101.0, 99.0, 103.0, 97.0, 113.0, 112.0, 110.0];
        let hours = [7.0, 27.0, 2.0, 50.0, 28.0, 29.0, 20.0, 12.0, 6.0, 17.0];
        check(&iq.into_iter().zip(hours).collect::<Vec<_>>(), Some(rounded(-29.0 / 165.0)));
        // Ties: ranks 1, 2.5, 2.5, 4 against 1, 2, 3.5, 3.5.
        check(&[(1.0, 1.0), (2.0, 2.0), (2.0, 3.0), (3.0, 3.0)], Some(0.8333));
    }

    #[test]
    fn a_seed_gives_one_interval() {
        let pairs: Vec<_> = (0..40).map(|index| (f64::from(index), f64::from(index * 7 % 11))).collect();
        let interval = bootstrap(&pairs, 1, spearman).unwrap();
        assert_eq!(bootstrap(&pairs, 1, spearman), Some(interval));
        assert_ne!(bootstrap(&pairs, 2, spearman), Some(interval));
        let estimate = spearman(&pairs).unwrap();
        assert!(interval.low < estimate && estimate < interval.high);
        // Half of the resamples of two are one pair twice.
        assert_eq!(bootstrap(&pairs[..2], 1, spearman), None);
    }

    proptest! {
        #[test]
        fn no_number_is_none(cells in prop::collection::vec(0u64..4, 9), pairs in prop::collection::vec((0i8..4, 0i8..3), 0..12), hits in 0usize..9, n in 1usize..9) {
            let table: Table = cells.chunks(3).map(<[u64]>::to_vec).collect();
            if let Some((kappa, error)) = kappa(&table) {
                let interval = around(kappa, error);
                prop_assert!((-1.0..=1.0).contains(&kappa) && error.is_finite());
                prop_assert!(interval.low <= kappa && kappa <= interval.high);
            }
            let pairs: Vec<_> = pairs.into_iter().map(|(left, right)| (f64::from(left), f64::from(right))).collect();
            if let Some(rho) = spearman(&pairs) {
                prop_assert!((-1.0..=1.0).contains(&rho));
            }
            let share = hits.min(n) as f64 / n as f64;
            let interval = wilson(share, n).unwrap();
            prop_assert!(interval.low <= share + 1e-12 && share <= interval.high + 1e-12 && interval.low < interval.high);
        }

        #[test]
        fn kappa_does_not_care_which_rater_is_which(cells in prop::collection::vec(0u64..9, 9)) {
            let table: Table = cells.chunks(3).map(<[u64]>::to_vec).collect();
            let turned: Table = (0..3).map(|row| (0..3).map(|column| table[column][row]).collect()).collect();
            let rounded = |table| kappa(table).map(|(kappa, error)| (rounded(kappa), rounded(error)));
            prop_assert_eq!(rounded(&table), rounded(&turned));
        }
    }
}
