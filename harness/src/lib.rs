//! How each agent is started and read.
