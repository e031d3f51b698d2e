//! Log, Index and Objects: traits, one conformance suite, and their backends.
