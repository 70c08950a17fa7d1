//! The plan of a GPU's memory: what a model takes there, and where its experts will be.

use std::io::{self, IoSliceMut};
use std::sync::Arc;

use cuda::PinnedExperts;
use engine::machine::{self, Spare};
use engine::plan::{Cache, CacheWish, Plan};
use experts::Reader;
use model::{Backend, Limits, Model};

use crate::args::BackendArgs;
use crate::cache_args::Pin;
use crate::failure::Failure;
use crate::{cache, open, report};

/// The plan of the GPU's memory for `model`: of what is free there, or of what the arguments allow.
///
/// [`Cache::Mapped`] means that the GPU holds a copy of every expert.
pub fn plan(model: &Model, args: &BackendArgs, limits: &Limits) -> Result<Plan, Failure> {
    if args.cache.cache == CacheWish::Mapped {
        let message =
            "a GPU does not compute from the mapped file: use `--cache` with a size, `full` or `auto`";
        return Err(Failure::Usage(message.to_string()));
    }
    let spare = spare(args)?;
    let memory = cuda::Memory::new(model, limits);
    let mut plan = Plan::new(model, limits, (0, cache::floor(model)), args.cache.cache, None)?;
    // What the plan does not know of: the embedding, decoded weights, one more state.
    plan.scratch = memory.rest().saturating_sub(plan.dense + plan.kv + plan.state);
    plan.choose(cache::floor(model), args.cache.cache, Some(&spare))?;
    match (plan.cache, args.cache.cache) {
        (Cache::Slots(bytes), CacheWish::Full) if bytes >= plan.experts => plan.cache = Cache::Mapped,
        _ => {}
    }
    Ok(plan)
}

/// Memory of the GPU that may be taken.
pub fn spare(args: &BackendArgs) -> Result<Spare, Failure> {
    let free = cuda::free_memory(0);
    match (args.cache.gpu_memory, free) {
        (Some(given), Ok(free)) if free < given => Ok(Spare { bytes: free, limit: "the GPU's free memory" }),
        (Some(given), _) => Ok(Spare { bytes: given, limit: "--gpu-memory" }),
        (None, Ok(free)) => Ok(Spare { bytes: free, limit: "the GPU's free memory" }),
        (None, Err(error)) => Err(error.into()),
    }
}

/// What a GPU that fetches experts by itself needs beside the backend.
pub struct Fetched {
    /// All experts.
    pub home: Arc<PinnedExperts>,
    /// Bytes of slots that large passes stream through.
    pub window: u64,
    /// Rows of a pass whose experts the GPU fetches by itself.
    pub rows: usize,
}

/// A GPU with the experts where the plan has them.
pub fn start(
    model: &Arc<Model>,
    args: &BackendArgs,
    plan: &Plan,
    limits: Limits,
    quiet: bool,
) -> Result<(Box<dyn Backend>, Option<Fetched>), Failure> {
    let slots = match plan.cache {
        Cache::Mapped => None,
        Cache::Slots(bytes) => Some(bytes),
    };
    let options = cuda::Options { slots, memory: args.cache.gpu_memory, ..cuda::Options::default() };
    let weights = open::load(model, quiet)?;
    let mut backend = cuda::Cuda::new(model.clone(), &weights, limits, options)?;
    drop(weights);
    let window = window(model);
    let Some(fetches) = slots.and_then(|bytes| bytes.checked_sub(window)).filter(|&rest| rest >= window)
    else {
        return Ok((Box::new(backend), None));
    };
    if !pins(model, args.cache.pin) {
        return Ok((Box::new(backend), None));
    }
    if !quiet {
        report::say(format_args!("redlite: {} of experts in pinned memory", report::size(plan.experts)));
    }
    let home = Arc::new(PinnedExperts::read(model, options.device)?);
    let rows = backend.fetch_from(home.clone(), fetches, args.cache.look_ahead.0)?;
    Ok((Box::new(backend), Some(Fetched { home, window, rows })))
}

/// Bytes of slots that large passes stream through while the rest is the GPU's own: a layer and a half of experts.
fn window(model: &Model) -> u64 {
    let layers = model.experts.len().max(1) as u64;
    (model.expert_bytes() / layers * 3 / 2).max(cache::floor(model))
}

/// Whether all experts are kept in pinned memory.
fn pins(model: &Model, pin: Pin) -> bool {
    match pin {
        Pin::On => true,
        Pin::Off => false,
        Pin::Auto => machine::spare_memory().is_some_and(|spare| model.expert_bytes() <= spare.bytes / 5 * 4),
    }
}

/// Experts in pinned memory as a reader of the file.
pub struct PinnedReader(pub Arc<PinnedExperts>);

impl Reader for PinnedReader {
    fn alignment(&self) -> usize {
        1
    }

    fn read(&self, shard: usize, offset: u64, buffers: &mut [IoSliceMut<'_>], _: usize) -> io::Result<()> {
        let len = buffers.iter().map(|buffer| buffer.len()).sum();
        let mut from = self.0.bytes(shard, offset, len).ok_or(io::ErrorKind::UnexpectedEof)?;
        for buffer in buffers {
            let (part, rest) = from.split_at(buffer.len());
            buffer.copy_from_slice(part);
            from = rest;
        }
        Ok(())
    }
}
