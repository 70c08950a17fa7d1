//! The plan of a GPU's memory: what a model takes there, and where its experts will be.

use std::io::{self, IoSliceMut};
use std::sync::Arc;

use cuda::PinnedExperts;
use engine::machine::{self, Spare};
use engine::plan::{Cache, CacheWish, Needs, Plan, Rates};
use experts::{Io, Reader};
use model::state::{PAGE, SnapshotShape};
use model::{Backend, Limits, Model};

use crate::args::BackendArgs;
use crate::cache::{Planned, Room};
use crate::cache_args::{IoName, Pin};
use crate::failure::Failure;
use crate::{cache, open, report};

/// Tokens of a chunk: enough for the products; and where every expert crosses the link once a chunk, enough to hide that.
const CHUNK: usize = 8192;
const STREAMED_CHUNK: usize = 16384;

/// The plan of the GPU's memory for `model`: of what is free there, or of what the arguments allow.
///
/// [`Cache::Mapped`] means that the GPU holds a copy of every expert.
pub fn plan(model: &Model, args: &BackendArgs, room: &Room) -> Result<Planned, Failure> {
    if args.cache.cache == CacheWish::Mapped {
        let message =
            "a GPU does not compute from the mapped file: use `--cache` with a size, `full` or `auto`";
        return Err(Failure::Usage(message.to_string()));
    }
    let (spare, rates) = (spare(args)?, Rates::default());
    // Beside what the plan knows of: the embedding, decoded weights, one more state.
    let scratch = |limits: &Limits| {
        let shape = SnapshotShape::new(&model.spec, limits.kv);
        let kv = limits.positions.next_multiple_of(PAGE) * shape.position_len() * limits.kv.bytes();
        let known = model.dense_bytes() + (kv + 2 * shape.slot_len() * size_of::<f32>()) as u64;
        cuda::Memory::new(model, limits).rest().saturating_sub(known)
    };
    let with_chunk = |chunk, why| {
        let needs = Needs {
            positions: room.positions,
            context: room.context,
            kv: args.kv.into(),
            prompt: room.prompt,
            chunk: Some((chunk, why)),
            scratch: &scratch,
            // Slots have memory of their own there.
            shares: false,
            floor: cache::floor(model),
            cache: args.cache.cache,
            // What fits is copied as a whole.
            lasting: false,
        };
        Plan::new(model, &needs, Some(&spare), &rates)
    };
    let mut plan = match args.chunk {
        Some(chunk) => with_chunk(chunk, "asked for"),
        None => with_chunk(CHUNK, "large enough for a GPU's products"),
    }?;
    if args.cache.cache == CacheWish::Full {
        plan.cache = Cache::Mapped;
    }
    if matches!(plan.cache, Cache::Slots(_)) && args.chunk.is_none() {
        plan = with_chunk(STREAMED_CHUNK, "every expert crosses the link once for each").unwrap_or(plan);
    }
    let io = match args.cache.io {
        IoName::Direct => Io::Direct,
        IoName::Cached => Io::Cached,
        IoName::Mmap => Io::Mapped,
        // Only a file that the host can hold stays in its cache.
        IoName::Auto if holds(model) => Io::Cached,
        IoName::Auto => Io::Direct,
    };
    Ok(Planned { plan, io, rates })
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

/// Bytes of the host's memory that are pinned: what copies come from, or all experts besides.
pub fn pinned(model: &Model, args: &BackendArgs, plan: &Plan) -> u64 {
    let all = if fetches(model, args, plan).is_some() { plan.experts } else { 0 };
    cuda::Memory::new(model, &plan.limits).pinned + all
}

/// Bytes of slots that the GPU fetches experts to by itself, if the host keeps all of them in pinned memory.
fn fetches(model: &Model, args: &BackendArgs, plan: &Plan) -> Option<u64> {
    let Cache::Slots(bytes) = plan.cache else { return None };
    let (window, pins) = (window(model), pins(model, args.cache.pin));
    bytes.checked_sub(window).filter(|&rest| rest >= window && pins)
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
    quiet: bool,
) -> Result<(Box<dyn Backend>, Option<Fetched>), Failure> {
    let slots = match plan.cache {
        Cache::Mapped => None,
        Cache::Slots(bytes) => Some(bytes),
    };
    let options = cuda::Options { slots, memory: args.cache.gpu_memory, ..cuda::Options::default() };
    let weights = open::load(model, quiet)?;
    let mut backend = cuda::Cuda::new(model.clone(), &weights, plan.limits, options)?;
    drop(weights);
    let Some(fetches) = fetches(model, args, plan) else { return Ok((Box::new(backend), None)) };
    if !quiet {
        report::say(format_args!("redlite: {} of experts in pinned memory", report::size(plan.experts)));
    }
    let home = Arc::new(PinnedExperts::read(model, options.device)?);
    let rows = backend.fetch_from(home.clone(), fetches)?;
    Ok((Box::new(backend), Some(Fetched { home, window: window(model), rows })))
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
        Pin::Auto => holds(model),
    }
}

/// Whether the host can hold all experts and has some memory left.
fn holds(model: &Model) -> bool {
    machine::spare_memory().is_some_and(|spare| model.expert_bytes() <= spare.bytes / 5 * 4)
}

/// Experts in pinned memory as a reader of the file.
pub struct PinnedReader(pub Arc<PinnedExperts>);

impl Reader for PinnedReader {
    fn alignment(&self) -> usize {
        1
    }

    fn bytes(&self, shard: usize, offset: u64, len: usize) -> Option<&[u8]> {
        self.0.bytes(shard, offset, len)
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
