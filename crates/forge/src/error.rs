//! What can go wrong while a model file is made.

use std::path::PathBuf;

use quant::Type;

/// Why a model file could not be made. No variant leaves an output file behind.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An input file could not be opened or read.
    #[error("cannot read {path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A JSON file of the checkpoint does not parse.
    #[error("{path} is not valid JSON: {source}")]
    Json {
        /// The file.
        path: PathBuf,
        /// Where and why.
        source: serde_json::Error,
    },
    /// The directory holds no weights this crate can read.
    #[error(
        "{0} holds neither model.safetensors nor model.safetensors.index.json: give the directory of a \
         downloaded checkpoint"
    )]
    NoWeights(PathBuf),
    /// A safetensors file breaks its own format.
    #[error("{path}: {what}: the file is damaged, download it again")]
    Safetensors {
        /// The file.
        path: PathBuf,
        /// Which rule is broken, naming the tensor where one is concerned.
        what: String,
    },
    /// The configuration asks for something this converter does not know.
    #[error("{path}: {key}: {what}")]
    Config {
        /// `config.json`, or another file of the checkpoint.
        path: PathBuf,
        /// The key at fault.
        key: String,
        /// What is wrong and what would be accepted.
        what: String,
    },
    /// Tensors that the configuration demands are not in the checkpoint.
    #[error("the checkpoint lacks {count} tensor(s) that its config.json demands: {names}")]
    MissingTensors {
        /// How many.
        count: usize,
        /// The first few names.
        names: String,
    },
    /// Tensors nobody asked for: converting without them would change the model.
    #[error("the checkpoint holds {count} tensor(s) of unknown meaning: {names}")]
    UnknownTensors {
        /// How many.
        count: usize,
        /// The first few names.
        names: String,
    },
    /// A tensor's shape contradicts the configuration.
    #[error("tensor {name} has shape {found:?}, but config.json implies {expected:?}")]
    Shape {
        /// The tensor.
        name: String,
        /// Its shape in the checkpoint, slowest dimension first.
        found: Vec<u64>,
        /// The shape that was expected.
        expected: Vec<u64>,
    },
    /// A tensor's element type cannot be converted.
    #[error("tensor {name} is stored as {dtype}: only BF16, F16 and F32 checkpoints can be converted")]
    Dtype {
        /// The tensor.
        name: String,
        /// Its type as the file calls it.
        dtype: String,
    },
    /// A type that can be read but not written.
    #[error("weights cannot be encoded as {ty}; types that can be written: {known}")]
    CannotEncode {
        /// The type asked for.
        ty: Type,
        /// Every type there is an encoder for.
        known: String,
    },
    /// A tensor of the input whose type this build does not know.
    #[error("tensor {name} has the unknown type id {id}: it cannot be decoded")]
    UnknownType {
        /// The tensor.
        name: String,
        /// Its type's id in the file.
        id: u32,
    },
    /// An option, or a combination of options, that makes no model.
    #[error("{option}: {what}")]
    Option {
        /// The option at fault.
        option: String,
        /// What is wrong and what would be accepted.
        what: String,
    },
    /// The blocks of one tensor could not be decoded or encoded.
    #[error("tensor {name}: {source}")]
    Quant {
        /// The tensor.
        name: String,
        /// What the codec said.
        source: quant::Error,
    },
    /// The container could not be read or written.
    #[error(transparent)]
    Gguf(#[from] gguf::Error),
    /// The checkpoint's tokenizer is not one we can write down.
    #[error("{path}: {source}")]
    Tokenizer {
        /// `tokenizer.json`.
        path: PathBuf,
        /// What is unsupported in it.
        source: text::Error,
    },
    /// The thread pool could not be started.
    #[error("cannot start {threads} threads: {source}")]
    Threads {
        /// How many were asked for.
        threads: usize,
        /// What the system said.
        source: rayon::ThreadPoolBuildError,
    },
    /// The caller's progress function asked to stop.
    #[error("cancelled: no file was written")]
    Cancelled,
}

impl Error {
    /// An [`Error::Option`] from anything printable.
    pub(crate) fn option(option: impl Into<String>, what: impl Into<String>) -> Error {
        Error::Option { option: option.into(), what: what.into() }
    }
}

/// The first few of `names`, comma-separated, for an error message.
pub(crate) fn some_of(names: &[String]) -> String {
    const SHOWN: usize = 5;
    let mut text = names.iter().take(SHOWN).map(String::as_str).collect::<Vec<_>>().join(", ");
    if names.len() > SHOWN {
        text.push_str(", …");
    }
    text
}
