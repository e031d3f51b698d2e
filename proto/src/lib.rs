//! The wire and log formats: .proto files and the code generated from them.
