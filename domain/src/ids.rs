//! Opaque ids, sortable by time, and the partition of an organization.
//!
//! An id is 128 bits: 48 bits of milliseconds since the epoch, then 80 random bits. Its text is a prefix and 26 lower-case Crockford base32
//! characters, so texts sort as the times do. A run's id and a trial's id begin with their batch's: either tells its batch without a look-up.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// Crockford's alphabet, lower case.
const ALPHABET: &[u8; 32] = b"0123456789abcdefghjkmnpqrstvwxyz";

/// Characters of a 128-bit id.
const BODY: usize = 26;

/// How many partitions there are for organizations. Fixed for ever: a record carries its partition.
pub const PARTITIONS: u16 = 64;

/// The partition of what belongs to no single organization, above all the directory of API keys.
pub const DIRECTORY_PARTITION: u16 = PARTITIONS;

/// A text that is not an id of the kind asked for.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not {0} id")]
pub struct IdError(&'static str);

fn encode(bytes: &[u8; 16], out: &mut String) {
    let number = u128::from_be_bytes(*bytes);
    out.extend(
        (0..BODY)
            .rev()
            .map(|place| char::from(ALPHABET[(number >> (place * 5)) as usize & 31])),
    );
}

fn digit(byte: u8) -> Option<u8> {
    ALPHABET.iter().position(|known| *known == byte).map(|value| value as u8)
}

/// Strict: exactly 26 lower-case characters whose value fits in 128 bits.
fn decode(text: &[u8]) -> Option<[u8; 16]> {
    if text.len() != BODY || digit(text[0])? > 7 {
        return None;
    }
    let mut number = 0u128;
    for byte in text {
        number = number << 5 | u128::from(digit(*byte)?);
    }
    Some(number.to_be_bytes())
}

fn stamp(started_at_ms: u64, random: [u8; 10]) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..6].copy_from_slice(&started_at_ms.to_be_bytes()[2..]);
    bytes[6..].copy_from_slice(&random);
    bytes
}

fn stamped_ms(bytes: &[u8; 16]) -> u64 {
    let mut ms = [0; 8];
    ms[2..].copy_from_slice(&bytes[..6]);
    u64::from_be_bytes(ms)
}

/// The texts of an id type: `Display`, `FromStr` and serde all go through its one text form.
macro_rules! texts {
    ($name:ident) => {
        impl From<$name> for String {
            fn from(id: $name) -> String {
                id.to_string()
            }
        }

        impl TryFrom<String> for $name {
            type Error = IdError;

            fn try_from(text: String) -> Result<Self, IdError> {
                text.parse()
            }
        }
    };
}

macro_rules! plain_id {
    ($(#[$doc:meta])* $name:ident, $prefix:literal, $kind:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(pub [u8; 16]);

        impl $name {
            /// A new id from the time (milliseconds since the epoch; 48 bits are kept) and 80 random bits.
            pub fn new(now_ms: u64, random: [u8; 10]) -> Self {
                Self(stamp(now_ms, random))
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                let mut text = String::with_capacity($prefix.len() + BODY);
                text.push_str($prefix);
                encode(&self.0, &mut text);
                f.write_str(&text)
            }
        }

        impl FromStr for $name {
            type Err = IdError;

            fn from_str(text: &str) -> Result<Self, IdError> {
                let body = text.strip_prefix($prefix).ok_or(IdError($kind))?;
                decode(body.as_bytes()).map(Self).ok_or(IdError($kind))
            }
        }

        texts!($name);
    };
}

plain_id!(
    /// A batch: `batch_` and 26 characters.
    BatchId,
    "batch_",
    "a batch"
);
plain_id!(
    /// An organization: `org_` and 26 characters.
    OrgId,
    "org_",
    "an organization"
);
plain_id!(
    /// An API key (its name, never its secret): `key_` and 26 characters.
    KeyId,
    "key_",
    "a key"
);

impl BatchId {
    /// When the batch was started, in milliseconds since the epoch.
    pub fn started_at_ms(&self) -> u64 {
        stamped_ms(&self.0)
    }
}

/// A run: one case of a batch on one variant. `run_`, the batch's 26 characters, then 2 for the run's place in the batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct RunId {
    /// The batch that it belongs to.
    pub batch: BatchId,
    /// Its place in the batch, from 0: case-major, then variants in the request's order.
    pub run: u8,
}

/// A trial of a run. `trial_`, the batch's 26 characters, 2 for the run, 1 for the ordinal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct TrialId {
    /// The batch that it belongs to.
    pub batch: BatchId,
    /// The run's place in the batch, from 0.
    pub run: u8,
    /// Which trial of the run, from 1; below 32.
    pub ordinal: u8,
}

impl TrialId {
    /// The run that it belongs to.
    pub fn run_id(&self) -> RunId {
        RunId {
            batch: self.batch,
            run: self.run,
        }
    }
}

fn encode_run(run: u8, out: &mut String) {
    out.extend([run >> 5, run & 31].map(|value| char::from(ALPHABET[usize::from(value)])));
}

fn decode_run(text: &[u8]) -> Option<u8> {
    let value = u16::from(digit(text[0])?) << 5 | u16::from(digit(text[1])?);
    u8::try_from(value).ok()
}

impl fmt::Display for RunId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = String::from("run_");
        encode(&self.batch.0, &mut text);
        encode_run(self.run, &mut text);
        f.write_str(&text)
    }
}

impl FromStr for RunId {
    type Err = IdError;

    fn from_str(text: &str) -> Result<Self, IdError> {
        let read = || {
            let (batch, run) = text.strip_prefix("run_")?.as_bytes().split_at_checked(BODY)?;
            let batch = BatchId(decode(batch)?);
            (run.len() == 2).then(|| decode_run(run)).flatten().map(|run| Self { batch, run })
        };
        read().ok_or(IdError("a run"))
    }
}

texts!(RunId);

impl fmt::Display for TrialId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = String::from("trial_");
        encode(&self.batch.0, &mut text);
        encode_run(self.run, &mut text);
        text.push(char::from(ALPHABET[usize::from(self.ordinal & 31)]));
        f.write_str(&text)
    }
}

impl FromStr for TrialId {
    type Err = IdError;

    fn from_str(text: &str) -> Result<Self, IdError> {
        let read = || {
            let (batch, rest) = text.strip_prefix("trial_")?.as_bytes().split_at_checked(BODY)?;
            let batch = BatchId(decode(batch)?);
            let ordinal = digit(*rest.get(2)?).filter(|ordinal| *ordinal > 0 && rest.len() == 3)?;
            decode_run(rest).map(|run| Self { batch, run, ordinal })
        };
        read().ok_or(IdError("a trial"))
    }
}

texts!(TrialId);

/// The partition of an organization: the first 8 bytes (big-endian) of the SHA-256 of its id's text, modulo [`PARTITIONS`].
pub fn partition(org: &OrgId) -> u16 {
    let hash = Sha256::digest(org.to_string());
    let mut head = [0; 8];
    head.copy_from_slice(&hash[..8]);
    (u64::from_be_bytes(head) % u64::from(PARTITIONS)) as u16
}

/// The id of a variant of a case: the same for the same parts, now and in every later batch.
///
/// `variant_` and 26 base32 characters of the first 16 bytes of a SHA-256 over, in this order: organization id, case id, harness, model,
/// sandbox, profile name or none, user model or none. Each part is hashed as one byte (1 = present, 0 = none), its length in bytes as a
/// big-endian u64, and its UTF-8 bytes; a none has neither length nor bytes.
pub fn variant_id(
    org: &OrgId,
    case_id: &str,
    harness: &str,
    model: &str,
    sandbox: &str,
    profile: Option<&str>,
    user_model: Option<&str>,
) -> String {
    let org = org.to_string();
    let mut hash = Sha256::new();
    for part in [
        Some(org.as_str()),
        Some(case_id),
        Some(harness),
        Some(model),
        Some(sandbox),
        profile,
        user_model,
    ] {
        hash.update([u8::from(part.is_some())]);
        if let Some(part) = part {
            hash.update((part.len() as u64).to_be_bytes());
            hash.update(part);
        }
    }
    let digest = hash.finalize();
    let mut head = [0; 16];
    head.copy_from_slice(&digest[..16]);
    let mut text = String::from("variant_");
    encode(&head, &mut text);
    text
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::*;

    const BATCH: BatchId = BatchId([0x01, 0x99, 0x0a, 0xbc, 0xde, 0xf0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]);

    #[test]
    fn texts_are_fixed() {
        assert_eq!(BATCH.to_string(), "batch_01k45bsqqg041061050r3gg28a");
        assert_eq!(RunId { batch: BATCH, run: 99 }.to_string(), "run_01k45bsqqg041061050r3gg28a33");
        assert_eq!(
            TrialId {
                batch: BATCH,
                run: 0,
                ordinal: 10
            }
            .to_string(),
            "trial_01k45bsqqg041061050r3gg28a00a"
        );
        assert_eq!(OrgId([0; 16]).to_string(), "org_00000000000000000000000000");
        assert_eq!(OrgId([255; 16]).to_string(), "org_7zzzzzzzzzzzzzzzzzzzzzzzzz");
        assert_eq!(BATCH.started_at_ms(), 0x0199_0abc_def0);
    }

    #[test]
    fn refuses_other_texts() {
        let good = "01k45bsqqg041061050r3gg28a";
        for bad in [
            "",
            "batch_",
            "run_",
            "batch",
            good,
            &format!("run_{good}"),
            &format!("batch_{good}0"),
            "batch_é",
        ] {
            assert!(bad.parse::<BatchId>().is_err(), "{bad}");
        }
        for body in [
            "81k45bsqqg041061050r3gg28a",
            "01K45BSQQG041061050R3GG28A",
            "01k45bsqqg041061050r3gg28i",
            "01k45bsqqg041061050r3gg28",
        ] {
            assert!(format!("batch_{body}").parse::<BatchId>().is_err(), "{body}");
            assert!(format!("run_{body}00").parse::<RunId>().is_err(), "{body}");
            assert!(format!("trial_{body}001").parse::<TrialId>().is_err(), "{body}");
        }
        for tail in ["", "0", "000", "80", "0i", "é"] {
            assert!(format!("run_{good}{tail}").parse::<RunId>().is_err(), "{tail}");
        }
        for tail in ["", "00", "000", "0011", "801", "00i", "é"] {
            assert!(format!("trial_{good}{tail}").parse::<TrialId>().is_err(), "{tail}");
        }
        assert_eq!("x".parse::<OrgId>().unwrap_err().to_string(), "not an organization id");
    }

    #[test]
    fn partitions_are_fixed() {
        // Moving an organization to another partition would lose it: these numbers never change.
        let of = |last: u8| partition(&OrgId([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, last]));
        assert_eq!([0, 1, 2, 3, 4, 5].map(of), [28, 57, 12, 23, 62, 29]);
        let mut seen = [0; PARTITIONS as usize];
        (0..=255).for_each(|last| seen[usize::from(of(last))] += 1);
        assert!(seen.iter().filter(|count| **count > 0).count() > 50);
    }

    #[test]
    fn variants_differ_by_each_part() {
        let org = OrgId([1; 16]);
        let base = variant_id(&org, "case", "codex", "m", "e2b", None, None);
        assert_eq!(base, variant_id(&org, "case", "codex", "m", "e2b", None, None));
        assert!(base.starts_with("variant_") && base.len() == 34);
        for other in [
            variant_id(&OrgId([2; 16]), "case", "codex", "m", "e2b", None, None),
            variant_id(&org, "cas", "ecodex", "m", "e2b", None, None),
            variant_id(&org, "case", "codex", "m", "e2b", Some(""), None),
            variant_id(&org, "case", "codex", "m", "e2b", None, Some("")),
            variant_id(&org, "case", "codex", "m", "e2b", Some("p"), None),
            variant_id(&org, "case", "codex", "m", "e2b", None, Some("p")),
        ] {
            assert_ne!(base, other);
        }
    }

    proptest! {
        #[test]
        fn texts_round_trip_and_sort(a: [u8; 16], b: [u8; 16], run: u8, ordinal in 1u8..32) {
            let (first, second) = (BatchId(a), BatchId(b));
            prop_assert_eq!(first.to_string().parse::<BatchId>().unwrap(), first);
            prop_assert_eq!(first.cmp(&second), first.to_string().cmp(&second.to_string()));
            let run = RunId { batch: first, run };
            prop_assert_eq!(run.to_string().parse::<RunId>().unwrap(), run);
            let trial = TrialId { batch: first, run: run.run, ordinal };
            prop_assert_eq!(trial.to_string().parse::<TrialId>().unwrap(), trial);
            prop_assert_eq!(trial.run_id(), run);
            prop_assert_eq!(serde_json::from_value::<TrialId>(serde_json::to_value(trial).unwrap()).unwrap(), trial);
        }

        #[test]
        fn parsing_never_panics(text in "\\PC{0,60}") {
            let _ = (text.parse::<BatchId>(), text.parse::<RunId>(), text.parse::<TrialId>(), text.parse::<OrgId>());
        }

        #[test]
        fn time_is_kept(ms in 0u64..1 << 48, random: [u8; 10]) {
            prop_assert_eq!(BatchId::new(ms, random).started_at_ms(), ms);
        }
    }
}
