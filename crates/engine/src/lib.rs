//! Sessions over a backend: chunked ingestion, decoding, sampling, stopping.
//!
//! - [`Engine`] owns a backend and its expert source and runs passes on them;
//! - [`Session`] is a conversation's tokens and the state behind them;
//! - [`Ingestion`] reads a prompt in chunks and can stop between any two stages;
//! - [`Sessions`] finds the deepest checkpoint for a prompt, and keeps them within a budget;
//! - [`Store`] keeps sessions on disk, so that they survive a restart;
//! - [`Scheduler`] runs several requests on one engine, without one starving another;
//! - [`Generation`] turns logits into text, one token at a time;
//! - [`Constraint`] says which tokens an answer may have where;
//! - [`Profile`] says where the time went, stage by stage, and what the work would cost at least;
//! - [`perplexity()`], [`parity`] and [`compare`] say how good and how alike results are.

mod cancel;
mod chunks;
pub mod compare;
mod constraint;
mod engine;
mod error;
mod generation;
mod ingestion;
mod logits;
pub mod machine;
pub mod npy;
pub mod parity;
mod perplexity;
pub mod plan;
mod prefix;
mod profile;
mod sampler;
mod scheduler;
mod sessions;
mod store;

pub use cancel::Cancel;
pub use chunks::{Flow, chunks};
pub use constraint::{Constraint, TokenMask};
pub use engine::{Engine, Options, Session, Step};
pub use error::{Error, Result};
pub use generation::{Finish, Generation, GenerationOptions, Logprobs, Token};
pub use ingestion::{Ingested, Ingestion, LogitRows, OnCheckpoint, OnLogits, OnProgress, Request};
pub use logits::{Logits, Needed};
pub use perplexity::{Perplexity, Visit, perplexity};
pub use profile::{Profile, StageProfile};
pub use sampler::{Sampler, Sampling};
pub use scheduler::{Event, Job, Phase, QueueFull, Report, Scheduler, SchedulerOptions, SchedulerStats};
pub use sessions::{Miss, Reuse, SessionOptions, SessionStats, Sessions};
pub use store::{Fingerprint, Store};
