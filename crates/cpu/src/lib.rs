//! Backend for processors: threads, vector kernels, weights decoded on use.
//!
//! The stages of [`model::Backend`] live in files named after them (`embed`, `delta`, `attention`,
//! `moe`, `head`). Below them:
//!
//! - `gemm`: products with weights in file form, a panel decoded once for all rows of its group;
//! - `kernels`: vector code, written once, compiled for each [`Variant`], chosen at start;
//! - `calibrate`: what the machine could do at most;
//! - `team`, `pool`: threads, and how work is cut between them.
//!
//! A row's numbers depend on that row and the weights alone: not on the rows computed with it, the number of
//! threads, or the cut of a prompt into passes along the 64-position grid.

mod attention;
mod backend;
mod calibrate;
mod delta;
mod embed;
mod error;
mod gemm;
mod head;
mod kernels;
mod memory;
mod moe;
mod open;
mod pool;
mod predict;
pub mod probe;
mod team;
mod topology;

use std::sync::Arc;

use model::state::host::HostState;
use model::{Capabilities, HostSlots, Limits, Mixer, Model, ResidentWeights};

pub use error::Error;
pub use kernels::Variant;
pub use topology::physical_cores;

use kernels::Kernels;
use moe::Inner;
use open::{Buffers, Open, Room};
use pool::Pool;
use team::Team;

/// Rows of a mixer block.
const BLOCK_ROWS: usize = 2048;

/// More threads than this are a mistake of the caller.
const MOST_THREADS: usize = 1024;

/// What the user may choose.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// Threads; the physical cores available to the process if not given.
    pub threads: Option<usize>,
    /// Kernels; `REDLITE_CPU_VARIANT` or the best the processor runs if not given.
    pub variant: Option<Variant>,
    /// Whether each thread but the caller's stays on a core of its own, however many there are. Otherwise they
    /// do if there is a core for each and `REDLITE_CPU_PIN` is not 0.
    pub pin: bool,
    /// Whether activations keep single precision where they meet quantised weights. Slower; otherwise they are
    /// rounded to eight bits with one scale for every 32 of them, if the kernels gain by it
    /// ([`Variant::prefers_integers`]).
    pub exact: bool,
}

/// The backend.
pub struct Cpu {
    model: Arc<Model>,
    weights: Arc<ResidentWeights>,
    /// Convolution weights of each DeltaNet layer, transposed: [taps][channels].
    conv: Vec<Vec<f32>>,
    capabilities: Capabilities,
    limits: Limits,
    state: HostState,
    team: Team,
    passes: Vec<Option<Box<Open>>>,
    /// Buffers of passes that ended.
    spare: Vec<Buffers>,
    /// What the first halves of experts make.
    inner: Inner,
    /// Where experts may lie.
    slots: HostSlots,
    /// What the next choice of experts prefers; empty is nothing.
    route_bias: Vec<f32>,
    /// Whether experts want all rows of a pass in single precision.
    whole_norm: bool,
}

impl Cpu {
    /// A backend for `model`, whose dense weights are `weights` (of [`Model::load`]). Experts and embedding
    /// rows are read from the mapped file.
    ///
    /// # Errors
    /// If kernels are asked for that the processor cannot run, or threads cannot be started.
    pub fn new(
        model: Arc<Model>,
        weights: impl Into<Arc<ResidentWeights>>,
        limits: Limits,
        options: Options,
    ) -> Result<Cpu, Error> {
        let weights = weights.into();
        let (capabilities, team) = team(&options)?;
        Ok(Cpu {
            whole_norm: moe::wants_numbers(&model, team.exact),
            conv: transposed_convolutions(&model, &weights),
            capabilities,
            limits,
            state: HostState::new(&model.spec, limits.kv, limits.positions),
            team,
            passes: Vec::new(),
            spare: Vec::new(),
            inner: Inner::default(),
            slots: HostSlots::new(model.clone()),
            route_bias: Vec::new(),
            model,
            weights,
        })
    }

    /// Bytes of activations under `limits`, for the plan of memory; `exact` as [`is_exact`] says.
    pub fn scratch_bytes(model: &Model, limits: &Limits, exact: bool) -> u64 {
        let rows = limits.pass_rows.min(limits.positions.next_multiple_of(model::GRID));
        let room = Room { rows, block_rows: BLOCK_ROWS, whole_norm: moe::wants_numbers(model, exact) };
        (open::scratch_bytes(&model.spec, room) + moe::inner_bytes(&model.spec, rows)) as u64
    }

    /// Threads it computes with.
    pub fn threads(&self) -> usize {
        self.team.threads()
    }
}

/// What a backend with these options would be.
///
/// # Errors
/// If kernels are asked for that the processor cannot run.
pub fn capabilities(options: &Options) -> Result<Capabilities, Error> {
    let (kernels, exact) = chosen(options)?;
    Ok(capabilities_of(kernels, exact))
}

fn capabilities_of(kernels: &Kernels, exact: bool) -> Capabilities {
    Capabilities {
        name: "cpu",
        variant: kernels.variant.name().to_string(),
        kernel_version: if exact { 3 } else { 8 },
        block_rows: BLOCK_ROWS,
        smallest_chunk: 1,
    }
}

/// What this machine can do at most, measured now: [`model::Backend::peaks`] without a model.
///
/// # Errors
/// As [`Cpu::new`].
pub fn peaks(options: &Options) -> Result<Vec<model::Peaks>, Error> {
    Ok(calibrate::peaks(&mut team(options)?.1))
}

/// Whether a backend with these options keeps all activations in single precision.
///
/// # Errors
/// As [`capabilities`].
pub fn is_exact(options: &Options) -> Result<bool, Error> {
    Ok(chosen(options)?.1)
}

/// The kernels, and whether all activations keep single precision.
fn chosen(options: &Options) -> Result<(&'static Kernels, bool), Error> {
    let kernels = Kernels::choose(wanted_variant(options)?)?;
    Ok((kernels, options.exact || !kernels.variant.prefers_integers()))
}

/// The threads, and what they are.
fn team(options: &Options) -> Result<(Capabilities, Team), Error> {
    let (kernels, exact) = chosen(options)?;
    let count = options.threads.unwrap_or_else(physical_cores);
    if count == 0 || count > MOST_THREADS {
        return Err(Error::ThreadCount { found: count, most: MOST_THREADS });
    }
    let by_default = || count <= physical_cores() && std::env::var("REDLITE_CPU_PIN").as_deref() != Ok("0");
    let pin = options.pin || by_default();
    let pool = Pool::new(count, pin).map_err(|source| Error::Threads { count, source })?;
    Ok((capabilities_of(kernels, exact), Team::new(pool, kernels, exact)))
}

/// The choice of the caller, else that of the environment.
fn wanted_variant(options: &Options) -> Result<Option<Variant>, Error> {
    match (options.variant, std::env::var("REDLITE_CPU_VARIANT")) {
        (None, Ok(name)) if !name.is_empty() => match Variant::from_name(&name) {
            Some(variant) => Ok(Some(variant)),
            None => Err(Error::UnknownVariant { found: name }),
        },
        (variant, _) => Ok(variant),
    }
}

/// Lanes run along channels, so a tap's weights must lie side by side.
fn transposed_convolutions(model: &Model, weights: &ResidentWeights) -> Vec<Vec<f32>> {
    let (taps, channels) = (model.spec.delta.taps, model.spec.delta.channels());
    let transpose = |conv: &Vec<f32>| {
        let mut out = vec![0.0; taps * channels];
        for (channel, row) in conv.chunks_exact(taps).enumerate() {
            row.iter().enumerate().for_each(|(tap, &w)| out[tap * channels + channel] = w);
        }
        out
    };
    let deltas = weights.layers.iter().filter_map(|layer| match &layer.mixer {
        Mixer::Delta(delta) => Some(&delta.conv),
        Mixer::Attention(_) => None,
    });
    deltas.map(transpose).collect()
}
