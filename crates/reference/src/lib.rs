//! The readable backend: every stage in plain, single-threaded Rust, the oracle of all others.
//!
//! Written to be read beside the equations. Activations are `f32`; every sum (dot products, norms, softmax,
//! delta rule) runs in `f64` and is rounded once. Weights stay in file form and are decoded row by row as
//! they are used. One file for each group of stages:
//!
//! - `embed`: token ids to hidden rows;
//! - `delta` and `rule`: Gated DeltaNet and its recurrence, chunked and sequential;
//! - `attention`: gated attention over the cache;
//! - `moe`: router, shared expert, routed experts;
//! - `head`: final norm and logits;
//! - `linear` and `math`: what they share.
//!
//! Every row is computed alike, whatever rows are beside it, so that bits do not depend on chunks or batches
//! as long as chunks end on the [grid](model::GRID).

mod attention;
mod backend;
mod delta;
mod embed;
mod head;
mod linear;
mod math;
mod moe;
mod open;
mod options;
mod rule;

use std::collections::BTreeMap;
use std::sync::Arc;

use model::state::host::HostState;
use model::{Capabilities, Limits, Model, ResidentWeights, Result};

use open::Open;
pub use options::{DeltaForm, Options, Rounding};

/// A model on the reference backend.
#[derive(Debug)]
pub struct Reference {
    context: Context,
    capabilities: Capabilities,
    limits: Limits,
    state: HostState,
    passes: BTreeMap<u32, Open>,
    next_pass: u32,
}

/// What all stages read and none changes.
#[derive(Debug)]
struct Context {
    model: Arc<Model>,
    weights: ResidentWeights,
    options: Options,
}

/// Rows of a mixer block: enough to decode a weight row rarely, few enough to keep buffers small.
const BLOCK_ROWS: usize = 512;

impl Reference {
    /// A backend for `model`. Copies the dense weights, still in file form, to memory of its own.
    ///
    /// # Errors
    /// [`model::Error::Quant`] for a vector that cannot be decoded.
    pub fn new(model: Arc<Model>, limits: Limits, options: Options) -> Result<Reference> {
        let weights = model.load(&mut |_, _| {})?;
        let state = HostState::new(&model.spec, limits.kv, limits.positions);
        let capabilities = Capabilities {
            name: "reference",
            variant: options.to_string(),
            kernel_version: 1,
            block_rows: BLOCK_ROWS,
            smallest_chunk: 1,
        };
        let context = Context { model, weights, options };
        Ok(Reference { context, capabilities, limits, state, passes: BTreeMap::new(), next_pass: 0 })
    }
}
