//! The plan of a GPU's memory: what a model takes there, and where its experts will be.

use engine::machine::Spare;
use engine::plan::{Cache, CacheWish, Plan};
use model::{Limits, Model};

use crate::args::BackendArgs;
use crate::cache;
use crate::failure::Failure;

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

/// How the backend is to be started for a plan.
pub fn options(plan: &Plan, args: &BackendArgs) -> cuda::Options {
    let slots = match plan.cache {
        Cache::Mapped => None,
        Cache::Slots(bytes) => Some(bytes),
    };
    cuda::Options { slots, memory: args.cache.gpu_memory, ..cuda::Options::default() }
}
