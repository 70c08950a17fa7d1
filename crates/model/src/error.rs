//! Errors of loading and running a model.

use std::io;
use std::path::PathBuf;

use quant::Type;

/// A result whose error is [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// Why a file is not a model we can run, or why running it failed.
///
/// Messages show strings of the file shortened and without control characters, so that a hostile file can
/// neither flood nor steer a terminal.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The container itself is broken.
    #[error(transparent)]
    Gguf(#[from] gguf::Error),

    /// Block data that cannot be decoded.
    #[error("tensor `{tensor}`: {source}")]
    Quant {
        /// The tensor.
        tensor: String,
        /// What the decoder said.
        source: quant::Error,
    },

    /// The file holds another kind of model.
    #[error("architecture `{}` is not supported: this program runs `qwen3next` models", label(.found))]
    Architecture {
        /// `general.architecture` of the file.
        found: String,
    },

    /// A metadata key the model cannot do without.
    #[error("metadata key `{key}` is missing: the file does not say {meaning}")]
    MissingKey {
        /// The key.
        key: String,
        /// What the key would tell, in words.
        meaning: &'static str,
    },

    /// A metadata key whose value makes no sense or asks for what is not supported.
    #[error("metadata key `{key}` is {found}; expected {expected}")]
    BadKey {
        /// The key.
        key: String,
        /// The value in the file.
        found: String,
        /// What would be accepted.
        expected: String,
    },

    /// A tensor the shape demands and the file lacks.
    #[error(
        "tensor `{name}` is missing: it should be {expected}; the file is incomplete or of another layout"
    )]
    MissingTensor {
        /// The name.
        name: String,
        /// The expected shape, row-major.
        expected: String,
    },

    /// A tensor of another shape than the metadata implies.
    #[error("tensor `{name}` is {found}, but the metadata implies {expected}")]
    TensorShape {
        /// The name.
        name: String,
        /// Shape in the file, row-major.
        found: String,
        /// Shape the metadata implies, row-major.
        expected: String,
    },

    /// Tensors whose types cannot be decoded.
    #[error("unsupported tensor types: {}", list_types(.tensors))]
    UnsupportedTypes {
        /// Name and type id of each.
        tensors: Vec<(String, u32)>,
    },

    /// Tensors that change the mathematics in a way that is not implemented.
    #[error("unsupported tensors that change the result: {}; refusing to compute without them", list(.names.iter()))]
    UnsupportedTensors {
        /// Their names.
        names: Vec<String>,
    },

    /// A tensor of a type that is not allowed in its place.
    #[error("tensor `{name}` has type {found}; expected {expected}")]
    TensorType {
        /// The name.
        name: String,
        /// Its type.
        found: Type,
        /// What would be accepted.
        expected: &'static str,
    },

    /// The tokenizer's arrays or the chat template.
    #[error("tokenizer of the file: {0}")]
    Text(#[from] text::Error),

    /// A pass that contradicts itself or the sequences it names.
    #[error("invalid pass: {0}")]
    Pass(String),

    /// A sequence that was freed or never existed.
    #[error("sequence {0} does not exist")]
    NoSequence(u32),

    /// The memory planned for keys and values is used up.
    #[error(
        "no room for more context: all {pages} pages of {page_positions} positions are in use; \
         free a sequence or start with a larger context"
    )]
    ContextFull {
        /// Pages in the plan.
        pages: usize,
        /// Positions in a page.
        page_positions: usize,
    },

    /// A stored state that does not belong to this model or is damaged.
    #[error("stored state refused: {0}")]
    Snapshot(String),

    /// Bytes of experts that could not be read from the file.
    #[error("{}: tensor `{tensor}`: cannot read {len} bytes at offset {offset}: {source}", file.display())]
    Load {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// Where in the file.
        offset: u64,
        /// How much was wanted.
        len: u64,
        /// What the system said.
        source: io::Error,
    },

    /// A failure inside a backend.
    #[error("backend `{backend}`, stage {stage}, layer {layer}: {message}")]
    Backend {
        /// Name of the backend.
        backend: &'static str,
        /// Name of the stage.
        stage: &'static str,
        /// The layer, 0-based.
        layer: usize,
        /// What happened.
        message: String,
    },
}

fn list_types(tensors: &[(String, u32)]) -> String {
    listed(tensors.iter().map(|(name, id)| format!("`{}` (type id {id})", label(name))))
}

/// Names of tensors, the first few of them.
pub(crate) fn list(names: impl ExactSizeIterator<Item = impl AsRef<str>>) -> String {
    listed(names.map(|name| format!("`{}`", label(name.as_ref()))))
}

fn listed(items: impl ExactSizeIterator<Item = String>) -> String {
    const SHOWN: usize = 8;
    let more = items.len().saturating_sub(SHOWN);
    let tail = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!("{}{tail}", items.take(SHOWN).collect::<Vec<_>>().join(", "))
}

/// A string from a file as messages show it: at most a hundred characters, control characters escaped.
pub(crate) fn label(text: &str) -> String {
    const LONGEST: usize = 100;
    let mut label = String::new();
    for c in text.chars().take(LONGEST) {
        match c.is_control() {
            true => label.extend(c.escape_default()),
            false => label.push(c),
        }
    }
    if text.chars().nth(LONGEST).is_some() {
        label.push('…');
    }
    label
}
