//! How long to wait before trying again: exponential, jittered. The only place that knows the crate `backoff`.

use std::time::Duration;

use backoff::{ExponentialBackoff, ExponentialBackoffBuilder, backoff::Backoff as _};

/// Pauses between tries that grow to a limit, each up to a half longer or shorter by chance.
pub(crate) struct Pauses {
    policy: ExponentialBackoff,
    longest: Duration,
}

impl Pauses {
    /// From `first` on, doubling, up to `longest`.
    pub(crate) fn new(first: Duration, longest: Duration) -> Self {
        let policy = ExponentialBackoffBuilder::new()
            .with_initial_interval(first)
            .with_max_interval(longest)
            .with_multiplier(2.0)
            .with_randomization_factor(0.5)
            .with_max_elapsed_time(None)
            .build();
        Self { policy, longest }
    }

    /// The next pause. There is always one: who counts tries does so himself.
    pub(crate) fn next(&mut self) -> Duration {
        self.policy.next_backoff().unwrap_or(self.longest)
    }

    /// It worked: the next pause is a short one again.
    pub(crate) fn reset(&mut self) {
        self.policy.reset();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_a_limit_and_never_end() {
        let (first, longest) = (Duration::from_millis(100), Duration::from_secs(2));
        let mut pauses = Pauses::new(first, longest);
        for (try_number, expected) in [100, 200, 400, 800, 1_600, 2_000, 2_000].into_iter().enumerate() {
            let pause = pauses.next().as_millis();
            assert!(
                (expected / 2..=expected * 3 / 2 + 1).contains(&pause),
                "try {try_number}: {pause} ms"
            );
        }
        pauses.reset();
        assert!(pauses.next() <= first * 2);
    }

    /// catalogue 43: workers that lost the same scheduler in the same moment do not ask again in the same moments.
    #[test]
    fn pauses_differ_from_worker_to_worker() {
        for tries in [1, 4, 7] {
            let nth = |_| {
                let mut pauses = Pauses::new(Duration::from_millis(100), Duration::from_secs(2));
                (0..tries).map(|_| pauses.next()).last().unwrap_or_default()
            };
            let mut waits: Vec<Duration> = (0..200).map(nth).collect();
            waits.sort_unstable();
            let (first, last) = (waits[0], waits[199]);
            // By chance between a half and one and a half: 200 of them fill most of that.
            assert!(last - first > (first + last) / 3, "try {tries}: from {first:?} to {last:?}");
            let middle = waits[149] - waits[50];
            assert!(middle > (last - first) / 4, "try {tries}: half of them within {middle:?}");
        }
    }
}
