//! The plan of a GPU's memory: what a model takes there, and where its experts will be.

use std::io::{self, IoSliceMut};
use std::ops::Range;
use std::sync::Arc;

use cuda::PinnedExperts;
use engine::Flow;
use engine::machine::{self, Spare};
use engine::plan::{Cache, CacheWish, Needs, Plan, Rates};
use experts::{Io, Reader};
use model::state::{PAGE, SnapshotShape};
use model::{Backend, GRID, Limits, Model};

use crate::args::{BackendArgs, Gpus};
use crate::cache::{Planned, Room};
use crate::cache_args::{IoName, Pin};
use crate::failure::Failure;
use crate::{cache, open, report};

/// Tokens of a chunk: enough for the products; and where every expert crosses the link once a chunk, enough to hide that.
const CHUNK: usize = 8192;
const STREAMED_CHUNK: usize = 16384;

/// What a chunk costs whatever its rows, in rows, and the position at which attention costs as much as all the rest (one H200,
/// the 80B's layers).
const CHUNK_COST: usize = 1100;
const TWICE: usize = 60_000;

/// The plan of the memory of GPUs for `model`: of what is free there, or of what the arguments allow.
///
/// [`Cache::Mapped`] means that the GPUs hold a copy of every expert.
pub fn plan(model: &Model, args: &BackendArgs, room: &Room) -> Result<Planned, Failure> {
    if args.cache.cache == CacheWish::Mapped {
        let message =
            "a GPU does not compute from the mapped file: use `--cache` with a size, `full` or `auto`";
        return Err(Failure::Usage(message.to_string()));
    }
    let there = cuda::count()?;
    let gpus = chosen(args.gpus.as_ref(), there)?;
    let planned = plan_on(model, args, room, gpus)?;
    if args.gpus.is_some() || there == 1 || args.cache.cache != CacheWish::Auto {
        return Ok(planned);
    }
    match planned.plan.cache {
        Cache::Mapped => Ok(planned),
        // Together they may hold what one cannot.
        Cache::Slots(_) => {
            Ok(plan_on(model, args, room, chosen(Some(&Gpus::All), there)?).unwrap_or(planned))
        }
    }
}

/// The numbers of the GPUs that were asked for, of those there are.
fn chosen(wish: Option<&Gpus>, there: usize) -> Result<Vec<i32>, Failure> {
    let first = |count: usize| (0..count as i32).collect();
    let missing = |number: i32| number as usize >= there;
    match wish {
        None => Ok(first(1)),
        Some(Gpus::All) => Ok(first(there)),
        Some(Gpus::First(count)) if *count <= there => Ok(first(*count)),
        Some(Gpus::These(list)) if !list.iter().copied().any(missing) => Ok(list.clone()),
        Some(_) => {
            Err(Failure::Usage(format!("`--gpus` asks for more than the {there} that the driver shows")))
        }
    }
}

/// The plan on some GPUs.
fn plan_on(model: &Model, args: &BackendArgs, room: &Room, gpus: Vec<i32>) -> Result<Planned, Failure> {
    let (spare, rates, several) = (spare(args, &gpus)?, Rates::default(), gpus.len() > 1);
    // Beside what the plan knows of: the embedding, decoded weights, one more state.
    let scratch = |limits: &Limits| {
        let shape = SnapshotShape::new(&model.spec, limits.kv);
        let kv = limits.positions.next_multiple_of(PAGE) * shape.position_len() * limits.kv.bytes();
        let known = model.dense_bytes() + (kv + 2 * shape.slot_len() * size_of::<f32>()) as u64;
        let all: u64 = memory(model, limits, &gpus).iter().map(cuda::Memory::rest).sum();
        all.saturating_sub(known)
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
    let flow = flow(gpus.len()).filter(|_| args.chunk.is_none());
    let (chunk, why) = match (args.chunk, flow) {
        (Some(chunk), _) => (chunk, "asked for"),
        (None, Some(flow)) => {
            (largest(flow, room.prompt), "the largest; they follow each other through the GPUs")
        }
        (None, None) => (CHUNK, "large enough for a GPU's products"),
    };
    let mut plan = with_chunk(chunk, why)?;
    if args.cache.cache == CacheWish::Full {
        plan.cache = Cache::Mapped;
    }
    if matches!(plan.cache, Cache::Slots(_)) && several {
        return Err(Failure::Usage(format!(
            "{} GPUs do not hold the model ({}), and only one streams experts through a cache: leave `--gpus` and \
             `--cache` out, or use more GPUs",
            gpus.len(),
            spare.limit
        )));
    }
    if matches!(plan.cache, Cache::Slots(_)) && args.chunk.is_none() {
        plan = with_chunk(STREAMED_CHUNK, "every expert crosses the link once for each").unwrap_or(plan);
    }
    if several {
        each_has_room(model, args, &plan.limits, &gpus)?;
    }
    let io = match args.cache.io {
        IoName::Direct => Io::Direct,
        IoName::Cached => Io::Cached,
        IoName::Mmap => Io::Mapped,
        // Only a file that the host can hold stays in its cache.
        IoName::Auto if holds(model) => Io::Cached,
        IoName::Auto => Io::Direct,
    };
    Ok(Planned { plan, io, rates, gpus, flow })
}

/// How chunks flow through so many GPUs that hold the whole model, if there are several.
fn flow(gpus: usize) -> Option<Flow> {
    (gpus > 1).then_some(Flow { devices: gpus, pass_cost: CHUNK_COST, twice: TWICE })
}

/// Rows of the largest chunk of a prompt that flows, if it is known.
fn largest(flow: Flow, prompt: Option<usize>) -> usize {
    let Some(prompt) = prompt else { return CHUNK / 2 };
    let cuts = flow.chunks(0, prompt, CHUNK, 1);
    cuts.iter().map(|cut| cut.len()).max().unwrap_or(GRID).next_multiple_of(GRID)
}

/// What each GPU needs.
fn memory(model: &Model, limits: &Limits, gpus: &[i32]) -> Vec<cuda::Memory> {
    cuda::Pipeline::memory(model, limits, gpus.len())
}

/// Refuses parts that do not fit their GPUs, though all of the model fits all of them.
fn each_has_room(model: &Model, args: &BackendArgs, limits: &Limits, gpus: &[i32]) -> Result<(), Failure> {
    for (&device, memory) in gpus.iter().zip(memory(model, limits, gpus)) {
        let needed = memory.rest() + memory.experts;
        let free = cuda::free_memory(device)?.min(args.cache.gpu_memory.unwrap_or(u64::MAX));
        if needed > free {
            return Err(cuda::Error::Memory { device, free: free as usize, needed: needed as usize }.into());
        }
    }
    Ok(())
}

/// Memory of some GPUs that may be taken, together.
pub fn spare(args: &BackendArgs, gpus: &[i32]) -> Result<Spare, Failure> {
    let several = gpus.len() > 1;
    let (mut bytes, mut limited) = (0, false);
    for &gpu in gpus {
        let free = cuda::free_memory(gpu)?;
        let given = args.cache.gpu_memory.filter(|&given| given <= free);
        bytes += given.unwrap_or(free);
        limited |= given.is_some();
    }
    let limit = match (limited, several) {
        (true, _) => "--gpu-memory",
        (false, true) => "the GPUs' free memory",
        (false, false) => "the GPU's free memory",
    };
    Ok(Spare { bytes, limit })
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

/// GPUs with the experts where the plan has them.
pub fn start(
    model: &Arc<Model>,
    args: &BackendArgs,
    Planned { plan, gpus, .. }: &Planned,
    quiet: bool,
) -> Result<(Box<dyn Backend>, Option<Fetched>), Failure> {
    let slots = match plan.cache {
        Cache::Mapped => None,
        Cache::Slots(bytes) => Some(bytes),
    };
    let device = gpus.first().copied().unwrap_or_default();
    let options = cuda::Options { device, slots, memory: args.cache.gpu_memory, ..cuda::Options::default() };
    if gpus.len() > 1 {
        let pipeline = cuda::Pipeline::new(model, plan.limits, options, gpus)?;
        if !quiet {
            report::say(format_args!("redlite: {}", layers_line(&pipeline.layers(), gpus)));
        }
        return Ok((Box::new(pipeline), None));
    }
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

/// Which layers are where.
pub fn layers_line(layers: &[Range<usize>], gpus: &[i32]) -> String {
    let part =
        |(layers, gpu): (&Range<usize>, &i32)| format!("{} to {} on GPU {gpu}", layers.start, layers.end - 1);
    format!("layers {}", layers.iter().zip(gpus).map(part).collect::<Vec<_>>().join(", "))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_keep_every_gpu_busy() {
        let chunk = |prompt, gpus| largest(flow(gpus).expect("several"), prompt);
        assert_eq!(flow(1), None);
        let cuts = flow(2).expect("several").chunks(0, 1 << 15, chunk(Some(1 << 15), 2), 2);
        assert_eq!(
            cuts.iter().map(|cut| cut.len()).collect::<Vec<_>>(),
            [6592, 6016, 5504, 5184, 4864, 4608]
        );
        assert_eq!(chunk(Some(1 << 17), 2), CHUNK, "large ones are faster");
        assert_eq!(chunk(Some(1000), 2), 1024, "one: a second would cost more than it spares");
        assert_eq!(chunk(Some(1), 8), 64);
        assert!(chunk(Some(1 << 15), 4) < chunk(Some(1 << 15), 2), "the more GPUs, the more chunks");
        assert_eq!(chunk(None, 2), 4096);
    }

    #[test]
    fn gpus_that_are_not_there_are_refused() {
        assert_eq!(chosen(None, 4).ok(), Some(vec![0]));
        assert_eq!(chosen(Some(&Gpus::All), 3).ok(), Some(vec![0, 1, 2]));
        assert_eq!(chosen(Some(&Gpus::First(2)), 2).ok(), Some(vec![0, 1]));
        assert_eq!(chosen(Some(&Gpus::These(vec![1, 1])), 2).ok(), Some(vec![1, 1]));
        for wish in [Gpus::First(3), Gpus::These(vec![0, 2])] {
            assert!(chosen(Some(&wish), 2).is_err_and(|error| error.to_string().contains("the 2 that")));
        }
    }

    #[test]
    fn layers_are_named() {
        let layers = [0..24, 24..48];
        assert_eq!(layers_line(&layers, &[0, 1]), "layers 0 to 23 on GPU 0, 24 to 47 on GPU 1");
    }
}
