//! Makes model files: conversion from checkpoints, requantisation, synthetic models.
//!
//! - [`convert`] turns a Hugging Face directory of `Qwen3NextForCausalLM` into a GGUF file;
//! - [`quantize`] rewrites a GGUF file with other types;
//! - [`synth`] makes a model of random weights with sane statistics, of any size, at the speed of the disk.
//!
//! All three stream: memory holds a few megabytes of weights per thread, whatever the size of the model. The file
//! does not depend on the number of threads, appears under its name only when it is complete, and is gone when the
//! operation fails or the caller's progress function cancels it.

mod checkpoint;
mod config;
mod convert;
mod error;
mod gather;
mod mix;
mod output;
mod progress;
mod quantize;
mod shape;
mod summary;
mod synth;
mod tensors;
mod vocabulary;

pub use convert::{ConvertOptions, convert};
pub use error::Error;
pub use mix::{ExpertPart, LayerType, Mix};
pub use progress::{Control, OnProgress, Progress};
pub use quantize::{QuantizeOptions, quantize};
pub use shape::{ARCHITECTURE, Layout, Shape};
pub use summary::{Fallback, Line, Summary};
pub use synth::{Recipe, SynthOptions, synth};
pub use tensors::Class;
pub use vocabulary::MIN_VOCABULARY;
