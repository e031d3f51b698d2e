//! End-to-end, crash and hostile-input tests across crates, against the real binary.
