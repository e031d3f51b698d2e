//! Sandbox providers and the supervisor that outlives the executor.
