//! Looking into Redis's answers without trusting their shape.

use redis::Value;

/// The elements of an array.
pub(super) fn items(value: &Value) -> Option<&[Value]> {
    match value {
        Value::Array(items) => Some(items),
        _ => None,
    }
}

/// The bytes of a string.
pub(super) fn bytes(value: &Value) -> Option<&[u8]> {
    match value {
        Value::BulkString(bytes) => Some(bytes),
        Value::SimpleString(text) => Some(text.as_bytes()),
        Value::VerbatimString { text, .. } => Some(text.as_bytes()),
        _ => None,
    }
}

/// A string that is text.
pub(super) fn text(value: &Value) -> Option<&str> {
    std::str::from_utf8(bytes(value)?).ok()
}

/// An integer.
pub(super) fn int(value: &Value) -> Option<i64> {
    match value {
        Value::Int(number) => Some(*number),
        _ => None,
    }
}

/// A string that is a number.
pub(super) fn number(value: &Value) -> Option<u64> {
    text(value)?.parse().ok()
}
