//! Times as the contract writes them: `2026-09-03T10:00:00.000Z`, from and to milliseconds since the epoch.

const MS_PER_DAY: u64 = 86_400_000;

/// The last millisecond of the year 9999, beyond which a year has more than four digits.
pub const MAX_MS: u64 = 253_402_300_799_999;

/// The text of a time; one beyond the year 9999 is written as its last millisecond.
pub fn format(ms: u64) -> String {
    let ms = ms.min(MAX_MS);
    let (year, month, day) = civil_from_days((ms / MS_PER_DAY) as i64);
    let rest = ms % MS_PER_DAY;
    let (hour, minute, second, milli) = (rest / 3_600_000, rest / 60_000 % 60, rest / 1000 % 60, rest % 1000);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{milli:03}Z")
}

/// The time of a text in exactly the form that [`format`] writes; none for any other text, or before the epoch.
pub fn parse(text: &str) -> Option<u64> {
    let bytes = text.as_bytes();
    let shape = b"0000-00-00T00:00:00.000Z";
    let fits = bytes.len() == shape.len()
        && bytes
            .iter()
            .zip(shape)
            .all(|(byte, form)| if *form == b'0' { byte.is_ascii_digit() } else { byte == form });
    if !fits {
        return None;
    }
    let number = |from: usize, to: usize| bytes[from..to].iter().fold(0i64, |sum, digit| sum * 10 + i64::from(digit - b'0'));
    let (year, month, day) = (number(0, 4), number(5, 7), number(8, 10));
    let days = days_from_civil(year, month, day);
    let clock = number(11, 13) * 3_600_000 + number(14, 16) * 60_000 + number(17, 19) * 1000 + number(20, 23);
    let ms = u64::try_from(days * MS_PER_DAY as i64 + clock).ok()?;
    // A date or a time of day that does not exist comes back as another one.
    (format(ms) == text).then_some(ms)
}

/// The civil date of a day counted from 1970-01-01 (Howard Hinnant's algorithm: the year begins in March, so the leap day is its last).
fn civil_from_days(days: i64) -> (i64, i64, i64) {
    let shifted = days + 719_468;
    let era = shifted.div_euclid(146_097);
    let day_of_era = shifted.rem_euclid(146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    (year_of_era + era * 400 + i64::from(month <= 2), month, day)
}

fn days_from_civil(year: i64, month: i64, day: i64) -> i64 {
    let year = year - i64::from(month <= 2);
    let era = year.div_euclid(400);
    let year_of_era = year.rem_euclid(400);
    let shifted_month = (month + 9) % 12;
    let day_of_year = (153 * shifted_month + 2) / 5 + day - 1;
    era * 146_097 + year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year - 719_468
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn known_times() {
        for (ms, text) in [
            (0, "1970-01-01T00:00:00.000Z"),
            (951_782_400_000, "2000-02-29T00:00:00.000Z"),
            (1_788_429_600_000, "2026-09-03T10:00:00.000Z"),
            (4_107_542_399_999, "2100-02-28T23:59:59.999Z"),
            (4_107_542_400_000, "2100-03-01T00:00:00.000Z"),
            (MAX_MS, "9999-12-31T23:59:59.999Z"),
        ] {
            assert_eq!(format(ms), text);
            assert_eq!(parse(text), Some(ms));
        }
        assert_eq!(format(u64::MAX), format(MAX_MS));
    }

    #[test]
    fn other_texts() {
        for text in [
            "",
            "2026-09-03",
            "2026-09-03T10:00:00Z",
            "2026-09-03T10:00:00.000+00:00",
            "2026-02-29T00:00:00.000Z",
            "2026-13-01T00:00:00.000Z",
            "2026-00-01T00:00:00.000Z",
            "2026-01-01T24:00:00.000Z",
            "2026-01-01T00:60:00.000Z",
            "1969-12-31T23:59:59.999Z",
            "2026-01-01T00:00:00.00éZ",
        ] {
            assert_eq!(parse(text), None, "{text}");
        }
    }

    proptest! {
        #[test]
        fn round_trips_and_sorts(a in 0..=MAX_MS, b in 0..=MAX_MS) {
            prop_assert_eq!(parse(&format(a)), Some(a));
            prop_assert_eq!(a.cmp(&b), format(a).cmp(&format(b)));
        }
    }
}
