//! The CUDA backend: every stage on an NVIDIA GPU.
//!
//! Kernels are CUDA C++ (`kernels/`), compiled by NVRTC for the GPU at hand when the backend starts and kept on disk.
//! The driver and the compiler are loaded at run time: a program that holds this backend starts without them, and
//! [`Cuda::new`] says what is missing.
//!
//! All weights lie in the GPU's memory in file form. Passes of many rows decode a matrix to bf16 once for all rows and
//! multiply on the tensor cores, sums in f32; passes of single rows (decode) decode blocks in registers for the same,
//! experts' as whole numbers.
//! Hence [`Capabilities::smallest_chunk`](model::Capabilities) is 2: a row alone is computed by other kernels than a
//! row among others, and only that makes a difference to its bits.
//!
//! One file for each group of stages, as in the other backends; `driver`, `compile`, `sources` and `kernels` lead from
//! the text of a kernel to its launch.

mod ahead;
mod attention;
mod backend;
mod compile;
mod delta;
mod dense;
mod driver;
mod error;
mod fetch;
mod few;
mod few_experts;
mod graph;
mod grouped;
mod head;
mod kernels;
mod largest;
mod linear;
mod link;
mod moe;
mod open;
mod pace;
mod peaks;
mod pipeline;
mod place;
mod plan;
mod presence;
mod slots;
mod sources;
mod spans;
mod state;
mod transfer;
mod uploads;
mod weights;
mod wgmma;

use std::sync::Arc;

use cudarc::driver::DriverError;
use model::{Capabilities, Limits, Model, ResidentWeights, Stage};

pub use compile::compile;
pub use dense::products;
pub use driver::count;
use driver::{Device, Event, Module, Pinned, failed};
pub use error::{Error, Result};
use fetch::Fetch;
pub use fetch::{Fetching, PinnedExperts};
use graph::Graphs;
use kernels::{Kernels, WeightKernels};
pub use kernels::{package, sources};
use largest::Candidates;
pub use largest::largest;
pub use linear::Product;
use open::{Buffers, Open, Scratch};
use pace::Pace;
pub use pipeline::Pipeline;
pub use plan::{Memory, free_memory};
use presence::Presence;
use slots::Arena;
pub use sources::{Source, Target};
use state::DeviceState;
use transfer::GpuLanes;
use uploads::Uploads;
use weights::DeviceWeights;

/// Choices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Which GPU, in the order of the driver.
    pub device: i32,
    /// Experts are not copied to the GPU: they come through slots of so many bytes, see
    /// [`Backend::slot_memory`](model::Backend::slot_memory).
    pub slots: Option<u64>,
    /// Bytes of the GPU's memory that may be taken; all that is free if not given.
    pub memory: Option<u64>,
    /// Whether passes of single rows are recorded and replayed as graphs; results are the same.
    pub graphs: bool,
    /// Whether experts' weights are decoded in passes of many rows. If not, something else is multiplied: for measuring what
    /// decoding costs. Where decoding is a kernel of its own, it stays.
    pub decode_experts: bool,
}

impl Default for Options {
    fn default() -> Options {
        Options { device: 0, slots: None, memory: None, graphs: true, decode_experts: true }
    }
}

/// A model on a GPU.
pub struct Cuda {
    model: Arc<Model>,
    capabilities: Capabilities,
    limits: Limits,
    passes: Vec<Option<Box<Open>>>,
    spare: Vec<Buffers>,
    scratch: Scratch,
    pace: Pace,
    /// Tables on their way to the GPU.
    uploads: Uploads,
    /// Whether the time of every stage is taken.
    profiling: bool,
    spans: Vec<(Stage, Event, Event)>,
    graphs: Graphs,
    /// Where logits arrive on the host, and where those picked out do.
    landing: Option<Pinned>,
    candidates: Candidates,
    options: Options,
    state: DeviceState,
    weights: DeviceWeights,
    /// Whether the GPU holds every expert.
    whole: bool,
    arenas: Vec<Arc<Arena<GpuLanes>>>,
    /// Slots that the GPU fills by itself.
    fetch: Option<Fetch>,
    inner: few_experts::Inner,
    presence: Presence,
    kernels: Kernels,
    target: Target,
    device: Arc<Device>,
}

/// Rows of a mixer block.
const BLOCK_ROWS: usize = 8192;

impl Cuda {
    /// A backend for `model`; `weights` are copied to the GPU.
    ///
    /// # Errors
    /// Every variant of [`enum@Error`], each saying what to do.
    pub fn new(
        model: Arc<Model>,
        weights: &ResidentWeights,
        limits: Limits,
        options: Options,
    ) -> Result<Cuda> {
        Cuda::part_of(&model.clone(), model, weights, limits, options)
    }

    /// A backend for `model`, which is a part of `whole`; its kernels are those of the whole.
    pub(crate) fn part_of(
        whole: &Model,
        model: Arc<Model>,
        weights: &ResidentWeights,
        limits: Limits,
        options: Options,
    ) -> Result<Cuda> {
        check(&model)?;
        let device = Device::open(options.device)?;
        let memory = Memory::new(&model, &limits);
        let needed = memory.rest() + options.slots.unwrap_or(memory.experts);
        let free = (device.free_memory()? as u64).min(options.memory.unwrap_or(u64::MAX));
        if needed > free {
            let device = options.device;
            return Err(Error::Memory { device, free: free as usize, needed: needed as usize });
        }
        let target = compile::target(device.capability, device.shared);
        let kernels = Kernels::new(&device, &target, whole, (limits.kv, options.decode_experts))?;
        let weights = DeviceWeights::new(&device, &model, weights, options.slots.is_none())?;
        let state = DeviceState::new(&device, &model.spec, limits.kv, limits.positions);
        let presence = Presence::on(options.device);
        few_experts::check(&model.spec, &weights, few_experts::Gpu::of(&device, &target, 1))?;
        let inner = few_experts::Inner::new(&device, &model.spec).map_err(failed("inner numbers"))?;
        let capabilities = Capabilities {
            name: "cuda",
            variant: format!("{} {}", target.arch, device.name),
            kernel_version: 7,
            block_rows: BLOCK_ROWS,
            smallest_chunk: 2,
        };
        Ok(Cuda {
            model,
            capabilities,
            limits,
            passes: Vec::new(),
            spare: Vec::new(),
            scratch: Scratch::default(),
            pace: Pace::default(),
            uploads: Uploads::default(),
            profiling: false,
            spans: Vec::new(),
            graphs: Graphs::default(),
            landing: None,
            candidates: Candidates::default(),
            options,
            state,
            weights,
            whole: options.slots.is_none(),
            arenas: Vec::new(),
            fetch: None,
            inner,
            presence,
            kernels,
            target,
            device,
        })
    }

    /// Whether the time of every stage call is taken from now on, with events of the GPU.
    pub fn set_profiling(&mut self, on: bool) {
        self.profiling = on;
    }

    /// Milliseconds of each stage call that was timed since the last call of this, in order. Waits.
    ///
    /// # Errors
    /// [`Error::Driver`] if work enqueued earlier failed.
    pub fn profile(&mut self) -> Result<Vec<(Stage, f32)>> {
        self.device.bind().map_err(failed("profile"))?;
        self.device.wait().map_err(failed("profile"))?;
        let spans = std::mem::take(&mut self.spans);
        spans
            .iter()
            .map(|(stage, start, end)| Ok((*stage, start.until(end).map_err(failed("profile"))?)))
            .collect()
    }
}

/// Refuses shapes the kernels were not written for.
fn check(model: &Model) -> Result<()> {
    let spec = &model.spec;
    let refuse = |what, found, expected| Err(Error::Shape { what, found, expected });
    let (delta, attention) = (spec.delta.head_dim, spec.attention.head_dim);
    if !delta.is_multiple_of(32) || delta > 128 {
        return refuse("the size of a DeltaNet head", delta, "32, 64, 96 or 128");
    }
    if !attention.is_multiple_of(32) || attention > 256 || !attention.is_power_of_two() {
        return refuse("the size of an attention head", attention, "32, 64, 128 or 256");
    }
    if spec.moe.experts > 1024 {
        return refuse("the number of experts", spec.moe.experts, "at most 1024");
    }
    if spec.hidden > 8192 {
        return refuse("the width of the model", spec.hidden, "at most 8192");
    }
    if spec.moe.used > 32 {
        return refuse("the number of experts a row chooses", spec.moe.used, "at most 32");
    }
    let widths = spec.moe.widths.iter().chain([&spec.moe.shared_width, &spec.hidden]);
    match widths.into_iter().find(|width| !width.is_multiple_of(8)) {
        Some(&width) => refuse("a width", width, "a multiple of 8"),
        None => Ok(()),
    }
}

/// Turns an error of the driver into one of a stage.
pub(crate) fn fail(stage: &'static str, layer: usize) -> impl Fn(DriverError) -> model::Error {
    move |error| model::Error::Backend { backend: "cuda", stage, layer, message: error.to_string() }
}

/// Decodes `len` weights of any type on the GPU, for checks against other decoders.
///
/// # Errors
/// Those of starting the backend.
///
/// # Panics
/// If `bytes` is not exactly what `len` weights take.
pub fn decode(ty: quant::Type, bytes: &[u8], len: usize) -> Result<Vec<f32>> {
    assert_eq!(ty.bytes(len), Some(bytes.len()), "whole blocks of {ty}");
    let device = Device::open(0)?;
    let target = compile::target(device.capability, device.shared);
    let modules: Vec<Module> = kernels::load(&device, &[Source::weights(&target, ty)])?;
    let kernels = WeightKernels::new(&modules[0])?;
    let run = || {
        let (from, to) = (device.allocate(bytes.len())?, device.allocate(4 * len)?);
        device.upload(bytes, from.at)?;
        let p = linear::Decode::new(std::iter::once((from.at, len)), to.at);
        device.launch(&kernels.decode_f32, (p.blocks(), 1, 1), 256, 0, &p)?;
        device.download(to.at, len)
    };
    run().map_err(failed("decoding"))
}
