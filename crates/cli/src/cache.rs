//! Experts in bounded memory: how much, read how, and what is said about it.

use std::sync::Arc;
use std::time::Duration;

use engine::machine::Spare;
use engine::plan::{Cache, Plan};
use experts::{Io, Layout, Monitor, Options, Stats, Store, reader};
use model::{Backend, CopyStats, ExpertSource, Limits, MappedExperts, Model};

use serde_json::{Value, json};

use crate::args::{BackendArgs, BackendName};
use crate::cache_args::{CacheArgs, IoName};
use crate::failure::Failure;
use crate::{gpu, report};

/// The plan of memory for `model` on this machine, or with the memory that `spare` says.
pub fn plan(
    model: &Model,
    args: &BackendArgs,
    limits: &Limits,
    spare: Option<Spare>,
) -> Result<Plan, Failure> {
    use engine::plan::CacheWish;
    if args.backend == BackendName::Cuda {
        return gpu::plan(model, args, limits);
    }
    // The reference computes from the mapped file.
    let is_cpu = args.backend == BackendName::Cpu;
    let wish = match args.cache.cache {
        CacheWish::Auto if !is_cpu => CacheWish::Mapped,
        wish => wish,
    };
    let scratch = if is_cpu { cpu::Cpu::scratch_bytes(&model.spec, limits) } else { 0 };
    let floor = floor(model);
    Ok(Plan::new(model, limits, (scratch, floor), wish, spare.as_ref())?)
}

/// Bytes of the smallest cache that works, whatever the reader.
pub fn floor(model: &Model) -> u64 {
    match Layout::new(model, Some(0), reader::DIRECT_BLOCK) {
        Err(experts::Error::Budget { needed, .. }) => needed,
        _ => 0,
    }
}

/// One line: what was chosen and why.
pub fn line(plan: &Plan, backend: BackendName) -> String {
    let experts = report::size(plan.experts);
    let cache = match plan.cache {
        Cache::Mapped if backend == BackendName::Cuda => format!("all experts ({experts}) on the GPU"),
        Cache::Mapped => format!("experts ({experts}) from the mapped file"),
        Cache::Slots(bytes) if bytes >= plan.experts => format!("a slot for every expert ({experts})"),
        Cache::Slots(bytes) => format!("cache of {} for {experts} of experts", report::size(bytes)),
    };
    let warning =
        plan.warning.as_ref().map_or(String::new(), |warning| format!("\nredlite: warning: {warning}"));
    format!(
        "redlite: {cache}: {}; the rest takes {}{warning}",
        plan.reason,
        report::size(plan.without_experts())
    )
}

/// Experts as the plan has them, and a view of the store, if it is one.
pub fn source(
    model: &Arc<Model>,
    backend: &mut dyn Backend,
    (args, plan): (&CacheArgs, &Plan),
    fetched: Option<gpu::Fetched>,
) -> Result<(Box<dyn ExpertSource + Send>, Option<Monitor>), Failure> {
    let budget = match plan.cache {
        Cache::Mapped => return Ok((Box::new(MappedExperts::new(model)), None)),
        Cache::Slots(bytes) if bytes >= plan.experts => None,
        Cache::Slots(bytes) => Some(bytes),
    };
    let options = Options {
        budget,
        io: io(model, args.io),
        readers: args.readers.into(),
        look_ahead: args.look_ahead.0,
        trace: args.trace,
        ..Options::default()
    };
    let Some(fetched) = fetched else {
        let store = Store::new(model, backend, options)?;
        let monitor = store.monitor();
        return Ok((Box::new(store), Some(monitor)));
    };
    let options = Options { budget: Some(fetched.window), ..options };
    let reader = Box::new(gpu::PinnedReader(fetched.home));
    let store = Store::with_reader(model, backend, options, reader)?;
    let monitor = store.monitor();
    Ok((Box::new(cuda::Fetching::new(model, store, fetched.rows)), Some(monitor)))
}

/// The reader asked for, or the faster one: a few large reads of each tell. Direct reads leave the file cache to
/// others, so they may be a little slower.
fn io(model: &Model, name: IoName) -> Io {
    match name {
        IoName::Direct => Io::Direct,
        IoName::Cached => Io::Cached,
        IoName::Mmap => Io::Mapped,
        IoName::Auto => match reader::measure(model.gguf.shards()[0].path(), 6) {
            Ok((Some(direct), cached)) if direct >= 0.8 * cached => Io::Direct,
            _ => Io::Cached,
        },
    }
}

/// What was loaded in each phase of a run.
#[derive(Default)]
pub struct Loads {
    monitor: Option<Monitor>,
    marks: Vec<(Stats, CopyStats)>,
}

impl Loads {
    /// Nothing so far.
    pub fn new(monitor: Option<Monitor>) -> Loads {
        let mut loads = Loads { monitor, marks: Vec::new() };
        loads.mark();
        loads
    }

    /// The store, if there is one.
    pub fn monitor(&self) -> Option<&Monitor> {
        self.monitor.as_ref()
    }

    /// A phase ends.
    pub fn mark(&mut self) {
        let now = |monitor: &Monitor| (monitor.stats(), monitor.copies().unwrap_or_default());
        self.marks.extend(self.monitor.iter().map(now));
    }

    fn phases(&self) -> impl Iterator<Item = (Stats, CopyStats)> + '_ {
        self.marks.windows(2).map(|pair| {
            let [(before, copied_before), (after, copied)] = pair else { unreachable!("windows of two") };
            let bytes = copied.bytes - copied_before.bytes;
            let copies = CopyStats {
                bytes,
                seconds: copied.seconds - copied_before.seconds,
                found: copied.found - copied_before.found,
                fetched: copied.fetched - copied_before.fetched,
                fetched_ahead: copied.fetched_ahead - copied_before.fetched_ahead,
            };
            (after.since(before), copies)
        })
    }

    /// A line for each phase, given their names and times; none without a store.
    pub fn lines<const N: usize>(&self, phases: [(&str, Duration); N]) -> Vec<String> {
        let line = |((stats, copies), (name, time)): ((Stats, CopyStats), (&str, Duration))| {
            line_of(name, &stats, time) + &copies_of(&copies, time)
        };
        self.phases().zip(phases).map(line).collect()
    }

    /// The phases as JSON: reading, writing.
    pub fn json(&self) -> Option<Value> {
        let phase = |(stats, copies): (Stats, CopyStats)| {
            json!({
                "experts": stats.loads,
                "bytes": stats.bytes,
                "reader_seconds": stats.busy.as_secs_f64(),
                "wait_seconds": stats.wait.as_secs_f64(),
                "hits": stats.hits,
                "ahead": stats.ahead,
                "misses": stats.misses,
                "predicted": stats.predicted,
                "predicted_loads": stats.predicted_loads,
                "predicted_used": stats.predicted_used,
                "predicted_cancelled": stats.predicted_cancelled,
                "predicted_wasted": stats.predicted_wasted,
                "copied_bytes": copies.bytes,
                "copy_seconds": copies.seconds,
                "gpu_found": copies.found,
                "gpu_fetched": copies.fetched,
                "gpu_fetched_ahead": copies.fetched_ahead,
            })
        };
        self.monitor.is_some().then(|| self.phases().map(phase).collect())
    }
}

/// Bytes copied to the GPU, how fast, and how busy the link was; nothing if there were none.
fn copies_of(copies: &CopyStats, time: Duration) -> String {
    let by_itself = copies.found + copies.fetched;
    let fetched = match by_itself {
        0 => String::new(),
        all => format!(
            "; the GPU found {:.1} % of {all} experts in its slots and fetched {}, {} more ahead",
            100.0 * copies.found as f64 / all as f64,
            copies.fetched,
            copies.fetched_ahead,
        ),
    };
    if copies.bytes == 0 {
        return fetched;
    }
    format!(
        "{fetched}; copied to the GPU {} at {:.1} GB/s, busy {:.1} % of the time",
        report::size(copies.bytes),
        copies.bytes as f64 / copies.seconds.max(1e-9) / 1e9,
        100.0 * copies.seconds / time.as_secs_f64().max(1e-9),
    )
}

/// Bytes, loads, how busy the readers were, how long computation waited, and where experts were found.
fn line_of(name: &str, stats: &Stats, time: Duration) -> String {
    let seconds = time.as_secs_f64().max(1e-9);
    let share = |part: u64, whole: u64| 100.0 * part as f64 / whole.max(1) as f64;
    let mut line = format!(
        "load, {name}: {} in {} experts, {:.2} GB/s over the time; readers busy {:.2} s, computation waited {:.2} s \
         ({:.1} %); found {:.1} %, read ahead {:.1} %, missed {:.1} %",
        report::size(stats.bytes),
        stats.loads,
        stats.bytes as f64 / seconds / 1e9,
        stats.busy.as_secs_f64(),
        stats.wait.as_secs_f64(),
        100.0 * stats.wait.as_secs_f64() / seconds,
        share(stats.hits, stats.wanted()),
        share(stats.ahead + stats.predicted_used, stats.wanted()),
        share(stats.misses, stats.wanted()),
    );
    if stats.predicted > 0 {
        line += &format!(
            "; look-ahead read {}: {:.1} % used, {} given up in time",
            stats.predicted_loads,
            share(stats.predicted_used, stats.predicted_loads - stats.predicted_cancelled),
            stats.predicted_cancelled,
        );
    }
    line
}
