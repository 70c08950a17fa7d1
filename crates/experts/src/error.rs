//! Errors of making a store.

use std::io;
use std::path::PathBuf;

/// A result whose error is [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// Why a store cannot be made. Failures of later reads are [`model::Error::Load`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The budget does not hold what one wave of experts needs.
    #[error(
        "a cache of {budget} bytes is too small: at least {needed} bytes are needed, three times the {used} experts \
         of a token"
    )]
    Budget {
        /// Bytes that were allowed.
        budget: u64,
        /// Bytes that would do.
        needed: u64,
        /// Experts of a token.
        used: usize,
    },

    /// A file of the model cannot be opened for reading experts.
    #[error("{}: {action}: {source}", file.display())]
    File {
        /// The file.
        file: PathBuf,
        /// What was tried.
        action: &'static str,
        /// What the system said.
        source: io::Error,
    },

    /// The model has no file to read from.
    #[error("the model is not in a file: experts can only be used where they are (`--io mmap`)")]
    NoFile,

    /// Reader threads cannot be started.
    #[error("cannot start {count} reader threads: {source}")]
    Threads {
        /// Threads asked for.
        count: usize,
        /// What the system said.
        source: io::Error,
    },

    /// The backend has no memory for slots.
    #[error(transparent)]
    Model(#[from] model::Error),
}
