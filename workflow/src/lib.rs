//! The state machine: organizations, batches, runs, trials, steps, leases, custody. No I/O, no clock, no randomness, no tokio.
