//! The evalgrid binary: demo, serve, one subcommand per role, and the client commands.
