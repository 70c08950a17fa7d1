//! What can be wrong with a vocabulary.

/// A vocabulary, or a Hugging Face tokenizer file, that cannot be used; every variant names the entry at fault.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The pre-tokenizer is not one of the two of this family.
    #[error(
        "pre-tokenizer `{0}` is not supported (known: qwen2, qwen35); splitting by another rule would give wrong ids"
    )]
    UnknownPreTokenizer(String),
    /// `kinds` does not have one entry per token.
    #[error("tokenizer.ggml.token_type has {kinds} entries for {tokens} tokens")]
    KindCount {
        /// Entries in `tokens`.
        tokens: usize,
        /// Entries in `kinds`.
        kinds: usize,
    },
    /// A number in `tokenizer.ggml.token_type` outside 1..=6.
    #[error("token {id} has type {value}; tokenizer.ggml.token_type knows 1 to 6")]
    UnknownKind {
        /// The token's id.
        id: usize,
        /// The number found.
        value: i64,
    },
    /// More tokens, or more bytes of token text, than ids and offsets can count.
    #[error("the vocabulary is too large: {0}")]
    TooLarge(String),
    /// Two ids share one string, so that the string has no single id.
    #[error("tokens {first} and {second} are both `{token}`")]
    DuplicateToken {
        /// The string.
        token: String,
        /// Lower id.
        first: u32,
        /// Higher id.
        second: u32,
    },
    /// A control or user-defined token with an empty string would match everywhere.
    #[error("control token {0} is an empty string")]
    EmptyControlToken(u32),
    /// A byte has no token of its own, so some text could not be encoded.
    #[error("no normal token stands for the single byte {0:#04x}; this is not a byte-level vocabulary")]
    MissingByte(u8),
    /// A merge is not two tokens separated by one space.
    #[error("merge {index} (`{merge}`) is not two tokens separated by one space")]
    BadMerge {
        /// Position in `merges`.
        index: usize,
        /// The entry.
        merge: String,
    },
    /// A merge names, or makes, a string that is not in the vocabulary.
    #[error("merge {index} (`{merge}`) needs token `{token}`, which the vocabulary lacks")]
    MergeOfUnknownToken {
        /// Position in `merges`.
        index: usize,
        /// The entry.
        merge: String,
        /// The missing token.
        token: String,
    },
    /// The same pair is merged twice; readers disagree on which rank counts.
    #[error("merge {index} (`{merge}`) repeats an earlier one")]
    DuplicateMerge {
        /// Position in `merges`.
        index: usize,
        /// The entry.
        merge: String,
    },
    /// `eos`, `bos` or `pad` is not an id of this vocabulary.
    #[error("{name} is token {id}, but the vocabulary has {tokens} tokens")]
    IdOutOfRange {
        /// `eos`, `bos` or `pad`.
        name: &'static str,
        /// The id.
        id: u32,
        /// Vocabulary size.
        tokens: usize,
    },
    /// A file of a Hugging Face folder is missing or unreadable.
    #[error("{path}: {message}")]
    Read {
        /// The file.
        path: String,
        /// The system's words.
        message: String,
    },
    /// A Hugging Face file is not JSON, or a field has the wrong type.
    #[error("{file}: {message}")]
    Malformed {
        /// `tokenizer.json` or `tokenizer_config.json`.
        file: &'static str,
        /// What is wrong, and where.
        message: String,
    },
    /// A Hugging Face tokenizer uses something that would change ids and is not implemented.
    #[error("tokenizer.json: {field} is {found}; {expected}")]
    Unsupported {
        /// Path of the field.
        field: &'static str,
        /// The value found, shortened.
        found: String,
        /// What is implemented.
        expected: &'static str,
    },
}
