//! Reader and writer of the GGUF container: metadata, tensor directory, split files.
//!
//! This crate knows the container. It does not know what a model is.
//!
//! - [`Gguf::open`] maps a model (one file, a set of shards, or a folder) and checks every size in it
//!   before use: what it returns can be read without further checks;
//! - [`Metadata`] holds the key-value pairs, with getters whose errors name the key;
//! - [`Writer`] streams a model of any size to disk and leaves nothing behind when it fails;
//! - [`Header::parse`] reads one file from a slice of bytes.
//!
//! ```no_run
//! # fn main() -> Result<(), gguf::Error> {
//! let model = gguf::Gguf::open("model-00002-of-00003.gguf".as_ref())?;
//! let layers = model.metadata().u32("qwen3next.block_count")?;
//! for tensor in model.tensors() {
//!     println!("{} {:?} {}: {} bytes", tensor.name, tensor.dims, tensor.ty, model.bytes(tensor).len());
//! }
//! # Ok(())
//! # }
//! ```
//!
//! Files are untrusted. A broken one yields an [`Error`] that names the file, the field or tensor, and
//! what was found; memory is only allocated for elements that the bytes left in the file can hold.
//! Layout of the format: the GGUF document of the ggml project, versions 2 and 3, little-endian.

mod cursor;
mod error;
mod file;
mod header;
mod metadata;
mod split;
mod tensor;
mod value;
mod writer;

pub use error::{Error, ErrorKind};
pub use file::{Gguf, Shard};
pub use header::{ALIGNMENT, Header, MAX_ALIGNMENT, MAX_DEPTH, MAX_HEADER};
pub use metadata::Metadata;
pub use split::shard_of;
pub use tensor::{TensorInfo, TensorType};
pub use value::{Array, Strings, Value};
pub use writer::{TensorDecl, Writer};
