//! What a model of the Qwen3-Next family is: its shape, its weights, the state of a sequence, and the
//! interface every backend implements.
//!
//! This crate knows neither how a stage is computed nor where expert bytes come from.
//!
//! - [`Spec`]: the shape, read from metadata and checked;
//! - [`Model`]: a file whose tensors have been found, checked and given typed names ([`Weights`]);
//! - [`Pass`]: one call of the model, for one or many sequences and one or thousands of rows;
//! - [`Backend`]: the stages over a pass, with opaque buffers;
//! - [`Cost`], [`Peaks`]: what a stage costs at least, what a machine can do at most;
//! - [`Driver`]: the loop over stages, one resumable step at a time;
//! - [`state`]: reference-counted KV pages and recurrent states.

mod backend;
mod cost;
mod driver;
mod error;
mod experts;
mod model;
mod pages;
mod pass;
mod slots;
mod spec;
mod stage;
pub mod state;
mod vocabulary;
mod weights;

pub use backend::{
    Backend, Candidate, Capabilities, Limits, Matrix, MatrixView, PassId, PlacedExpert, Slot, Wave,
};
pub use cost::{Bound, Cost, Peak, Peaks, Work};
pub use driver::{Driver, Observer, Progress, Quiet};
pub use error::{Error, Result};
pub use experts::{ExpertSource, LayerCall, MappedExperts};
pub use model::{Model, ResidentWeights};
pub use pages::{prefer_huge_pages, trim};
pub use pass::{GRID, Pass, Run, SnapshotRequest};
pub use slots::{CopySpan, CopyStats, Fill, HostArena, HostSlots, SlotMemory};
pub use spec::{AttentionSpec, DeltaSpec, LayerKind, MoeSpec, Spec};
pub use stage::{Intermediate, Stage, Step};
pub use state::{KvType, SequenceId, Snapshot};
pub use vocabulary::vocabulary;
pub use weights::{
    AttentionWeights, DeltaWeights, ExpertLayout, ExpertTensor, Layer, MatrixInfo, Mixer, MoeWeights, Part,
    ResidentMatrix, VectorInfo, Weights,
};
