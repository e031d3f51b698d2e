//! A trial, step by step.
