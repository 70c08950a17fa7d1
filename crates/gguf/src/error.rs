//! What can be wrong with a GGUF file, said so that the reader of the message can act.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

/// A failure to read or write a GGUF file: which file, and what is wrong with it.
#[derive(Debug, thiserror::Error)]
#[error("{}: {kind}", path.display())]
pub struct Error {
    path: PathBuf,
    kind: Box<ErrorKind>,
}

impl Error {
    pub(crate) fn new(path: &Path, kind: ErrorKind) -> Error {
        Error { path: path.to_owned(), kind: Box::new(kind) }
    }

    /// The file (or folder) at fault; `(memory)` for bytes and metadata that never were in a file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What is wrong with it.
    pub fn kind(&self) -> &ErrorKind {
        &self.kind
    }
}

/// What is wrong with a file. Offsets and lengths are in bytes, offsets from the start of the file.
///
/// Names from the file are shortened to a hundred characters, control characters in them escaped, so
/// that a hostile file cannot flood or steer a terminal.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)] // the messages explain the fields
pub enum ErrorKind {
    /// The operating system refused.
    #[error("cannot {action}: {error}")]
    Io { action: &'static str, error: io::Error },
    /// A pipe, a device, a socket.
    #[error("not a regular file; GGUF files are mapped into memory, so copy it to a disk first")]
    NotAFile,
    /// The first four bytes are not `GGUF`.
    #[error("not a GGUF file: it starts with {:?}, not \"GGUF\"", String::from_utf8_lossy(found))]
    Magic { found: [u8; 4] },
    /// Written for or on a big-endian machine.
    #[error(
        "a big-endian GGUF file; only little-endian files are read, so convert it again without that option"
    )]
    BigEndian,
    /// A version other than 2 and 3.
    #[error("GGUF version {found}; versions 2 and 3 are read{}", version_hint(*found))]
    Version { found: u32 },
    /// The file ends inside something.
    #[error(
        "{what} at byte {offset} needs {need} bytes, but the file has {left} left: it is truncated or damaged, \
         so fetch or convert it again"
    )]
    Truncated { what: String, offset: u64, need: u64, left: u64 },
    /// A count that the rest of the file cannot hold.
    #[error(
        "{what} says {count} elements of at least {each} bytes, but the file has {left} bytes left: it is \
         truncated or damaged, so fetch or convert it again"
    )]
    Count { what: String, count: u64, each: u64, left: u64 },
    /// Metadata and tensor directory larger than any real model's.
    #[error(
        "{what} at byte {offset} lies beyond the first {limit} bytes, where metadata and tensor list must end"
    )]
    HeaderTooLarge { what: String, offset: u64, limit: u64 },
    /// A string that is not UTF-8.
    #[error("{what} is not valid UTF-8 (byte {at} of the string at byte {offset})")]
    Utf8 { what: String, offset: u64, at: usize },
    /// A key of length zero.
    #[error("the key of metadata entry {index} is empty; the file is damaged or its writer is")]
    EmptyKey { index: u64 },
    /// The same key twice.
    #[error("metadata key `{key}` occurs twice; remove one, since nothing says which holds")]
    DuplicateKey { key: String },
    /// A value type that the format does not have.
    #[error("{what} has value type {id}, which GGUF does not define (0 to 12)")]
    ValueType { what: String, id: u32 },
    /// A boolean that is neither 0 nor 1.
    #[error("{what} is a bool with the byte {byte}; 0 and 1 are valid")]
    Bool { what: String, byte: u8 },
    /// Arrays of arrays of arrays ….
    #[error("{what} nests arrays more than {limit} deep")]
    Depth { what: String, limit: usize },
    /// `general.alignment` with an impossible value or type.
    #[error(
        "`general.alignment` is {found}; it must be a u32, a power of two from 8 to {most} (32 if the key is absent)"
    )]
    Alignment { found: String, most: u32 },
    /// A tensor without a name.
    #[error("the name of tensor {index} is empty; the file is damaged or its writer is")]
    EmptyTensorName { index: u64 },
    /// The same tensor twice, in one file or in two shards.
    #[error("tensor `{tensor}` occurs twice{}", first_seen(first))]
    DuplicateTensor { tensor: String, first: Option<PathBuf> },
    /// More or fewer dimensions than the format has.
    #[error("tensor `{tensor}` has {found} dimensions; 1 to 4 are valid")]
    DimCount { tensor: String, found: u32 },
    /// A dimension of zero.
    #[error("tensor `{tensor}` has a zero dimension: {}", Dims(dims))]
    ZeroDim { tensor: String, dims: Vec<u64> },
    /// More elements or bytes than fit in 63 bits.
    #[error("tensor `{tensor}` with dimensions {} overflows a 63-bit size", Dims(dims))]
    Overflow { tensor: String, dims: Vec<u64> },
    /// A row that ends inside a block.
    #[error(
        "tensor `{tensor}` has rows of {row} weights, but {ty} stores blocks of {block}; the row must be a multiple"
    )]
    PartialBlock { tensor: String, ty: quant::Type, row: u64, block: u64 },
    /// A tensor that starts between two multiples of the alignment.
    #[error(
        "tensor `{tensor}` starts at {offset} of the data section, not a multiple of the alignment {alignment}"
    )]
    Misaligned { tensor: String, offset: u64, alignment: u32 },
    /// A tensor beyond the end of the file.
    #[error(
        "tensor `{tensor}` occupies bytes {start} to {end}, but the file has {file}: it is truncated or damaged, so \
         fetch or convert it again"
    )]
    BeyondEnd { tensor: String, start: u128, end: u128, file: u64 },
    /// Two tensors that share bytes.
    #[error("tensors `{first}` and `{second}` overlap; the file is damaged")]
    Overlap { first: String, second: String },

    /// A metadata value of another type than asked for.
    #[error("metadata key `{key}` is of type {found}, where {expected} is needed")]
    WrongType { key: String, expected: &'static str, found: String },
    /// An integer that does not fit the type asked for.
    #[error("metadata key `{key}` is {found}, which does not fit {expected}")]
    OutOfRange { key: String, expected: &'static str, found: String },

    /// A folder without GGUF files.
    #[error("no .gguf file in this folder")]
    NoModel,
    /// A folder with more than one model.
    #[error("several models in this folder, so name one: {}", found.join(", "))]
    SeveralModels { found: Vec<String> },
    /// A shard that is not where its siblings are.
    #[error("shard {number} of {count} is missing: expected the file {}", expected.display())]
    MissingShard { number: u64, count: u64, expected: PathBuf },
    /// A shard whose siblings cannot be found because it was renamed.
    #[error(
        "`split.count` says this is one of {count} shards, so its name must end in -00001-of-{count:05}.gguf \
         (with its own number) for the others to be found"
    )]
    ShardName { count: u64 },
    /// File name or sibling disagree with a shard on the number of shards.
    #[error("`split.count` is {found}, but {other} says {expected}; put the shards of one model together")]
    SplitCount { found: u64, expected: u64, other: String },
    /// A shard number beyond the number of shards, or absent.
    #[error("`split.no` is {found}, where a set of {count} shards has 0 to {}", count - 1)]
    SplitNumber { found: String, count: u64 },
    /// Two shards with the same number.
    #[error("`split.no` is {number}, as in {}; each shard of a set has its own", other.display())]
    DuplicateShard { number: u64, other: PathBuf },
    /// `split.tensors.count` is not the number of tensors in all shards.
    #[error(
        "`split.tensors.count` is {declared}, but the shards hold {found} tensors; shards of different models?"
    )]
    SplitTensors { declared: u64, found: u64 },
    /// A shard given as bytes, without files beside it.
    #[error("a shard of {count} cannot be opened alone; open it as a file, beside the others")]
    ShardAlone { count: u64 },

    /// The writer was given a piece that runs over the end of its tensor, or any after the last.
    #[error("tensor `{tensor}` has {len} bytes, of which {written} are written, but {more} more were given")]
    TooManyBytes { tensor: String, len: u64, written: u64, more: u64 },
    /// The writer was finished in the middle of a tensor.
    #[error("tensor `{tensor}` has {len} bytes, but only {written} were written before the end")]
    TooFewBytes { tensor: String, len: u64, written: u64 },
    /// A tensor name longer than readers accept (writer only).
    #[error("tensor name `{tensor}` is longer than {limit} bytes, the most that readers of GGUF accept")]
    LongTensorName { tensor: String, limit: usize },
}

/// A name from a file as messages show it: shortened and without control characters.
pub(crate) fn label(name: &str) -> String {
    const LONGEST: usize = 100;
    let mut label = String::new();
    for c in name.chars().take(LONGEST) {
        match c.is_control() {
            true => label.extend(c.escape_default()),
            false => label.push(c),
        }
    }
    if name.chars().nth(LONGEST).is_some() {
        label.push('…');
    }
    label
}

fn version_hint(version: u32) -> &'static str {
    match version {
        0 | 1 => ", so convert the model again with a current tool",
        _ => "; this file needs a newer version of this program",
    }
}

fn first_seen(first: &Option<PathBuf>) -> String {
    match first {
        Some(path) => format!(", here and in {}; shards of different models?", path.display()),
        None => "; the file is damaged or its writer is".to_owned(),
    }
}

/// Dimensions as people write them: `4 × 0`.
struct Dims<'a>(&'a [u64]);

impl fmt::Display for Dims<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, dim) in self.0.iter().enumerate() {
            if i > 0 {
                f.write_str(" × ")?;
            }
            write!(f, "{dim}")?;
        }
        Ok(())
    }
}
