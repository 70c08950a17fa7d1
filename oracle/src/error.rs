//! Everything that can go wrong, with the file it went wrong in.

use std::io;
use std::path::PathBuf;

/// Why a command failed. `code` gives the process its exit status.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file could not be read.
    #[error("{path}: cannot read: {source}", path = path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A file could not be written.
    #[error("{path}: cannot write: {source}", path = path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Standard output could not be written.
    #[error("standard output: {0}")]
    Stdout(#[source] io::Error),
    /// A path that llama.cpp's C interface cannot express.
    #[error("{path:?}: the path must be UTF-8 without NUL bytes")]
    Path {
        /// The path.
        path: PathBuf,
    },
    /// A file of token ids or of text with unusable content.
    #[error("{path}: {what}", path = path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// What is wrong and what is expected.
        what: String,
    },
    /// `--rows` asks for positions that the tokens do not have.
    #[error("--rows {rows}: empty or beyond the {tokens} tokens of the input")]
    Rows {
        /// The range as given.
        rows: String,
        /// Tokens in the input.
        tokens: usize,
    },
    /// llama.cpp refused a model file.
    #[error("{path}: llama.cpp cannot load it: {detail}", path = path.display())]
    Load {
        /// The model file.
        path: PathBuf,
        /// llama.cpp's own error messages.
        detail: String,
    },
    /// llama.cpp could not set up a context (usually memory).
    #[error("llama.cpp cannot create a context of {tokens} tokens: {detail}")]
    Context {
        /// Requested context length.
        tokens: usize,
        /// llama.cpp's own error messages.
        detail: String,
    },
    /// llama.cpp failed while evaluating tokens.
    #[error("llama_decode failed with code {code} at position {position}: {detail}")]
    Decode {
        /// Position of the first token of the failing batch.
        position: usize,
        /// What `llama_decode` returned.
        code: i32,
        /// llama.cpp's own error messages.
        detail: String,
    },
    /// The library was compiled for a lesser CPU than the one it runs on.
    #[error(
        "refusing to measure: this CPU has {missing}, this build of llama.cpp does not use it; \
         rebuild inside oracle/ on this machine (its .cargo/config.toml asks for the native CPU)"
    )]
    NotNative {
        /// Names of the unused instruction sets.
        missing: String,
    },
    /// An environment variable that takes threads away from OpenMP.
    #[error("refusing to measure: {0} is set and may leave OpenMP fewer threads than asked for; unset it")]
    Environment(&'static str),
    /// A file to be quantized cannot be: its header, its shapes or the request.
    #[error("{path}: cannot quantize: {detail}", path = path.display())]
    Quantize {
        /// The input file.
        path: PathBuf,
        /// The reason, naming the tensor where there is one.
        detail: String,
    },
}

impl Error {
    /// Exit status: 3 for a refused measurement, 1 for every other failure (2 is
    /// kept for wrong usage, which the argument parser reports itself).
    pub fn code(&self) -> u8 {
        match self {
            Error::NotNative { .. } | Error::Environment(_) => 3,
            _ => 1,
        }
    }
}
