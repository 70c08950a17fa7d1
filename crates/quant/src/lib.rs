//! Block formats of GGUF weights: what a block looks like, how to decode it, how to encode it.
//!
//! This crate knows bytes and numbers. It knows neither files nor models.
//!
//! - [`Type`] names every format and its block geometry;
//! - [`decode()`] turns blocks into `f32`, bit-identical to the format's published definition;
//! - [`encode()`] searches for the blocks that lose least;
//! - [`activation`] rounds activations as the integer kernels of llama.cpp do;
//! - [`codebook`] holds the tables the IQ and MXFP4 formats refer to.

pub mod activation;
pub mod codebook;
pub mod decode;
mod encode;
mod error;
mod types;

pub use activation::Activation;
pub use decode::decode;
pub use encode::{can_encode, encode};
pub use error::Error;
pub use types::Type;
