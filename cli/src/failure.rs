//! What went wrong, what to do next, and the exit code.

use std::{fmt, process::ExitCode};

/// A command that did not do what it was asked.
#[derive(Debug)]
pub(crate) enum Failure {
    /// It was asked in the wrong way, clap says how. Also `--help` and `--version`, which are no failures.
    Clap(clap::Error),
    /// It was asked in the wrong way.
    Usage { message: String, next: String },
    /// It failed.
    Failed { message: String, next: String },
    /// A file that it was given is not as it should be.
    Data { message: String, next: String },
    /// Something that it needs from elsewhere is not there.
    Unavailable { message: String, next: String },
    /// It did its work, and the work's result is bad. All that there is to say was printed.
    Bad,
    /// Nobody reads our output any more, which is no failure.
    BrokenPipe,
}

impl Failure {
    /// A failure, and what to do about it.
    pub(crate) fn new(message: impl Into<String>, next: impl Into<String>) -> Failure {
        Failure::Failed {
            message: message.into(),
            next: next.into(),
        }
    }

    /// A mistake of the caller's, and how to put it right.
    pub(crate) fn usage(message: impl Into<String>, next: impl Into<String>) -> Failure {
        Failure::Usage {
            message: message.into(),
            next: next.into(),
        }
    }

    /// A file that is not as it should be, and how to put it right.
    pub(crate) fn data(message: impl Into<String>, next: impl Into<String>) -> Failure {
        Failure::Data {
            message: message.into(),
            next: next.into(),
        }
    }

    /// Something elsewhere that is not there, and what to do about it.
    pub(crate) fn unavailable(message: impl Into<String>, next: impl Into<String>) -> Failure {
        Failure::Unavailable {
            message: message.into(),
            next: next.into(),
        }
    }

    /// The exit code: 0 fine, 1 failed, 2 used in the wrong way, 65 a file is bad and 69 somebody else is not there (as in sysexits.h).
    pub(crate) fn code(&self) -> u8 {
        match self {
            Failure::Clap(error) if !error.use_stderr() => 0,
            Failure::Clap(_) | Failure::Usage { .. } => 2,
            Failure::Data { .. } => 65,
            Failure::Unavailable { .. } => 69,
            Failure::Failed { .. } | Failure::Bad => 1,
            Failure::BrokenPipe => 0,
        }
    }

    /// Says it on stderr (help and version on stdout).
    pub(crate) fn tell(&self) -> ExitCode {
        match self {
            Failure::Clap(error) => {
                // If it cannot be printed there is nobody to tell.
                let _ = error.print();
            }
            Failure::Usage { .. } | Failure::Failed { .. } | Failure::Data { .. } | Failure::Unavailable { .. } => {
                eprintln!("error: {self}")
            }
            Failure::Bad | Failure::BrokenPipe => {}
        }
        ExitCode::from(self.code())
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Clap(error) => error.fmt(f),
            Failure::Usage { message, next }
            | Failure::Failed { message, next }
            | Failure::Data { message, next }
            | Failure::Unavailable { message, next } => write!(f, "{message}\n{next}"),
            Failure::Bad => f.write_str("the result is bad"),
            Failure::BrokenPipe => f.write_str("nobody reads the output"),
        }
    }
}
