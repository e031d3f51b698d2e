//! A number as JavaScript knows it: one double, written without a fraction where it has none.

use serde::{Deserialize, Serialize, Serializer};

/// A double whose JSON form is `3`, not `3.0`, so that what we hash and send looks as a JavaScript client would write it.
#[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd, Deserialize)]
#[serde(transparent)]
pub struct Number(pub f64);

/// The largest integer that a double holds without gaps (2^53 - 1).
pub const MAX_SAFE_INTEGER: i64 = 9_007_199_254_740_991;

impl Number {
    /// The value as an integer, where it is one that a double holds exactly.
    pub fn as_integer(self) -> Option<i64> {
        let exact = self.0.fract() == 0.0 && self.0.abs() <= MAX_SAFE_INTEGER as f64;
        exact.then_some(self.0 as i64)
    }
}

impl From<f64> for Number {
    fn from(value: f64) -> Self {
        Self(value)
    }
}

impl From<u64> for Number {
    fn from(value: u64) -> Self {
        Self(value as f64)
    }
}

impl Serialize for Number {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.as_integer() {
            Some(integer) => serializer.serialize_i64(integer),
            None => serializer.serialize_f64(self.0),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn integers_have_no_fraction() {
        for (value, text) in [
            (0.0, "0"),
            (-0.0, "0"),
            (1.0, "1"),
            (0.5, "0.5"),
            (1_700_000_000_000.25, "1700000000000.25"),
        ] {
            assert_eq!(serde_json::to_string(&Number(value)).unwrap(), text);
            assert_eq!(serde_json::from_str::<Number>(text).unwrap(), Number(value));
        }
    }
}
