//! The gRPC service: committer, dispatch, leases, timers, reaper and read side.
