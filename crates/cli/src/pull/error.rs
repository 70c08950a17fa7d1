//! Why a download failed.

use std::path::PathBuf;
use std::time::Duration;

use crate::report;

/// Why a download failed, and what to do about it.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Somebody asked to stop.
    #[error("interrupted")]
    Cancelled,
    /// The source is neither a name nor an address.
    #[error("`{0}`: {1}")]
    Source(String, &'static str),
    /// The connection: worth another try.
    #[error("{url}: {reason}")]
    Network {
        /// What was asked for.
        url: String,
        /// What went wrong.
        reason: String,
    },
    /// The server refused.
    #[error("{url}: {status}, {}", hint(*.status))]
    Status {
        /// What was asked for.
        url: String,
        /// HTTP status.
        status: u16,
        /// How long it wants to be left alone.
        retry_after: Option<Duration>,
    },
    /// The server answered something that makes no sense.
    #[error("{url}: the server's answer makes no sense: {reason}")]
    Protocol {
        /// What was asked for.
        url: String,
        /// What is odd.
        reason: String,
    },
    /// No file, or several, are meant.
    #[error("{repo} has {problem}; choose one:\n{choices}")]
    Choice {
        /// The repository.
        repo: String,
        /// Which of the two.
        problem: String,
        /// What there is, a line each.
        choices: String,
    },
    /// Nothing in it runs.
    #[error("{0} has no GGUF files; look for a repository whose name ends with -GGUF")]
    NoModel(String),
    /// Shards are missing on the server.
    #[error("{repo}: {name} is incomplete: {found} of {count} shards are there")]
    Shards {
        /// The repository.
        repo: String,
        /// The model.
        name: String,
        /// How many are there.
        found: usize,
        /// How many should be.
        count: u64,
    },
    /// The file is not what it should be.
    #[error(
        "{}: its SHA-256 is {found}, expected {expected}; what was read is deleted, try again (and tell who offers the \
         file if that happens again)",
        path.display()
    )]
    Hash {
        /// The file.
        path: PathBuf,
        /// What was read.
        found: String,
        /// What the server or the user said.
        expected: String,
    },
    /// Another file has its name.
    #[error("{}: is there already, and is another file; move it away or choose another folder with --to", .0.display())]
    Different(PathBuf),
    /// Somebody else is at it.
    #[error("{}: another download is writing it", .0.display())]
    Busy(PathBuf),
    /// Not enough room.
    #[error("{}: {} are needed, {} are free; choose another folder with --to", folder.display(), report::size(*needed), report::size(*free))]
    Space {
        /// The folder.
        folder: PathBuf,
        /// Bytes still to come.
        needed: u64,
        /// Bytes there.
        free: u64,
    },
    /// It is something else.
    #[error("{url}: what comes is no GGUF file ({kind}); is it the address of the file itself?")]
    NotGguf {
        /// What was asked for.
        url: String,
        /// What the server calls it.
        kind: String,
    },
    /// Our own files.
    #[error("{}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
}

impl Error {
    /// Whether another try may succeed.
    pub fn is_transient(&self) -> bool {
        match self {
            Error::Network { .. } => true,
            Error::Status { status, .. } => matches!(status, 408 | 425 | 429 | 500 | 502 | 503 | 504),
            _ => false,
        }
    }

    /// How long the server wants to be left alone.
    pub fn retry_after(&self) -> Duration {
        match self {
            Error::Status { retry_after: Some(wait), .. } => *wait,
            _ => Duration::ZERO,
        }
    }
}

/// What a status means for who asked.
fn hint(status: u16) -> &'static str {
    match status {
        401 => "it does not exist, or needs a token: set HF_TOKEN",
        403 => "this account has no access: accept the model's terms on its page, or set another HF_TOKEN",
        404 => "there is no such file or repository: check the name and --revision",
        416 => "the server has less of the file than was read already",
        429 => "too many requests: try again later",
        500..=599 => "the server is in trouble: try again later",
        _ => "the server refuses",
    }
}
