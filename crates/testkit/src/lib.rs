//! Tiny models and runs of them, for the tests of backends.
//!
//! - [`TinyModel`]: a random model of a few thousand weights, written as a GGUF file and opened again;
//! - [`ingest`]: prompts through any backend, cut into chunks and batched, all logits back;
//! - [`Waves`]: an expert source that hands out few experts at a time.
//! - [`conformance`]: what every backend promises, as tests.
//!
//! Everything is deterministic, and everything panics where a test would.

pub mod conformance;
mod random;
mod run;
mod tiny;

pub use random::Random;
pub use run::{Recorder, Waves, ingest, relative_rms, run_pass};
pub use tiny::{Decay, Layout, TinyModel, TinyOptions};
