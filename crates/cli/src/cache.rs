//! Experts in bounded memory: how much, read how, and what is said about it.

use std::sync::Arc;
use std::time::Duration;

use engine::Flow;
use engine::machine::Spare;
use engine::plan::{Cache, CacheWish, Needs, Plan, Rates, SMALL_ROWS, Writing};
use experts::{Io, Layout, Loan, Monitor, Options, Stats, Store, reader};
use model::{Backend, CopyStats, ExpertSource, Limits, MappedExperts, Model};

use serde_json::{Value, json};

use crate::args::{BackendArgs, BackendName};
use crate::bench::Replay;
use crate::cache_args::{CacheArgs, IoName};
use crate::calibration::{self, Calibration, Disk};
use crate::failure::Failure;
use crate::{gpu, report};

/// What an engine will have to hold.
#[derive(Clone, Copy, Debug)]
pub struct Room {
    /// Most tokens of a session.
    pub context: usize,
    /// Positions over all sessions.
    pub positions: usize,
    /// Tokens of the prompt, if they are known.
    pub prompt: Option<usize>,
    /// Whether many prompts are to come.
    pub lasting: bool,
}

/// A plan, and how experts are read.
pub struct Planned {
    /// The plan.
    pub plan: Plan,
    /// The reader.
    pub io: Io,
    /// What the machine reaches, as far as it is known.
    pub rates: Rates,
    /// The GPUs that compute.
    pub gpus: Vec<i32>,
    /// How chunks flow through them, if they do.
    pub flow: Option<Flow>,
}

/// How the CPU computes, by the arguments.
pub fn cpu_options(args: &BackendArgs) -> cpu::Options {
    cpu::Options { threads: args.threads, exact: args.exact, ..cpu::Options::default() }
}

/// Threads that compute, where that is known.
pub fn threads(args: &BackendArgs) -> Option<usize> {
    (args.backend == BackendName::Cpu).then(|| args.threads.unwrap_or_else(cpu::physical_cores))
}

/// Memory that may be taken: what the arguments say, else what the machine can spare.
pub fn spare(args: &CacheArgs) -> Option<Spare> {
    let given = args.memory.map(|bytes| Spare { bytes, limit: "--memory" });
    given.or_else(engine::machine::spare_memory)
}

/// The plan for `model` on this machine, or with the memory that `spare` says.
pub fn plan(
    model: &Model,
    args: &BackendArgs,
    room: &Room,
    spare: Option<Spare>,
) -> Result<Planned, Failure> {
    if args.backend == BackendName::Cuda {
        return gpu::plan(model, args, room);
    }
    // The reference computes from the mapped file.
    let is_cpu = args.backend == BackendName::Cpu;
    let cache = match args.cache.cache {
        CacheWish::Auto if !is_cpu => CacheWish::Mapped,
        wish => wish,
    };
    let exact = is_cpu.then(|| cpu::is_exact(&cpu_options(args))).transpose()?;
    let scratch = |limits: &Limits| exact.map_or(0, |exact| cpu::Cpu::scratch_bytes(model, limits, exact));
    let needs = Needs {
        positions: room.positions,
        context: room.context,
        kv: args.kv.into(),
        prompt: room.prompt,
        // Chunks are chosen by what the CPU's memory and speed allow.
        chunk: (args.chunk.map(|chunk| (chunk, "asked for")))
            .or((!is_cpu).then_some((engine::Options::default().chunk, "the usual size"))),
        scratch: &scratch,
        shares: is_cpu,
        floor: floor(model),
        cache,
        lasting: room.lasting,
    };
    let (mut calibration, name) = (Calibration::load(), calibration::model_name(model));
    let capabilities = is_cpu.then(|| cpu::capabilities(&cpu_options(args))).transpose()?;
    let rates = |calibration: &Calibration, disk| match &capabilities {
        Some(capabilities) => {
            Rates { hits: calibration.hits(&name), ..calibration.rates(capabilities, threads(args), disk) }
        }
        None => Rates::default(),
    };
    let make = |rates: Rates, io| {
        let plan = Plan::new(model, &needs, spare.as_ref(), &rates)?;
        Ok::<_, Failure>(Planned { plan, io, rates, gpus: Vec::new(), flow: None })
    };
    let resident = make(rates(&calibration, None), Io::Cached)?;
    let disk = match resident.plan.cache {
        Cache::Mapped => None,
        Cache::Slots(_) => disk(model, args, &mut calibration),
    };
    let with = |io| make(rates(&calibration, disk.map(|disk| (disk, io))), io);
    match args.cache.io {
        IoName::Direct => with(Io::Direct),
        IoName::Cached => with(Io::Cached),
        IoName::Mmap => with(Io::Mapped),
        // Direct reads leave the processors and the file cache to others, so they may be a little slower.
        IoName::Auto if disk.is_some_and(|disk| disk.direct.is_some()) => {
            let (direct, cached) = (with(Io::Direct)?, with(Io::Cached)?);
            let is_good = direct.plan.seconds_per_row() <= 1.02 * cached.plan.seconds_per_row();
            Ok(if is_good { direct } else { cached })
        }
        IoName::Auto => with(Io::Cached),
    }
}

/// Rates of the model's disk: measured now where the faster reader is asked for, since that depends on what the file
/// cache holds, else those known.
fn disk(model: &Model, args: &BackendArgs, calibration: &mut Calibration) -> Option<Disk> {
    let file = model.gguf.shards().first()?.path();
    let known = calibration.disk(file);
    if known.is_some() && args.cache.io != IoName::Auto {
        return known;
    }
    let readers = usize::from(args.cache.readers);
    let (direct, cached) = reader::measure(file, 2 * readers.max(4), readers).ok()?;
    let disk = Disk { direct, cached };
    if known.is_none() {
        calibration.note_disk(file, disk);
        calibration.store();
    }
    Some(disk)
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
        Cache::Slots(bytes) if plan.lent > 0 => format!(
            "cache of {} for {experts} of experts, {} of it lent to large chunks",
            report::size(bytes),
            report::size(plan.lent)
        ),
        Cache::Slots(bytes) => format!("cache of {} for {experts} of experts", report::size(bytes)),
    };
    let warning =
        plan.warning.as_ref().map_or(String::new(), |warning| format!("\nredlite: warning: {warning}"));
    format!(
        "redlite: {cache}: {}; chunks of {}: {}; the rest takes {}{}{warning}",
        plan.reason,
        plan.chunk,
        plan.chunk_reason,
        report::size(plan.without_experts()),
        expectation(plan).map_or(String::new(), |text| format!("; expected {text}")),
    )
}

/// Rates that can be expected, if any.
pub fn expectation(plan: &Plan) -> Option<String> {
    let ingestion = plan.expected.ingestion.map(|rate| format!("{rate:.0} tok/s read"));
    let decode = plan.expected.decode.map(|Writing { rate, hits, measured }| {
        let found = match measured {
            _ if hits >= 1.0 => String::new(),
            true => format!(" if {:.0} % are found, as measured with this model", 100.0 * hits),
            false => format!(" if {:.0} % are found (assumed; `redlite experts` measures it)", 100.0 * hits),
        };
        format!("{rate:.1} tok/s written{found}")
    });
    let parts: Vec<String> = ingestion.into_iter().chain(decode).collect();
    (!parts.is_empty()).then(|| parts.join(", "))
}

/// Experts as the plan has them, and a view of the store, if it is one.
pub fn source(
    model: &Arc<Model>,
    backend: &mut dyn Backend,
    (args, planned): (&CacheArgs, &Planned),
    fetched: Option<gpu::Fetched>,
) -> Result<(Box<dyn ExpertSource + Send>, Option<Monitor>), Failure> {
    let (source, monitor) = unforced(model, backend, (args, planned), fetched)?;
    let Some((like, bytes)) = args.replay else { return Ok((source, monitor)) };
    let own = || monitor.as_ref().map(|monitor| monitor.layout().clone());
    let layout = match bytes {
        Some(bytes) => Some(Layout::new(model, Some(bytes), reader::DIRECT_BLOCK)?),
        None => own(),
    };
    let layout = layout.ok_or_else(|| {
        Failure::Usage("--trace-hits needs a cache to find them in: --cache or --trace-cache".to_string())
    })?;
    Ok((Box::new(Replay::new(source, model, layout, like)), monitor))
}

/// As [`source`], with experts as the routers choose them.
fn unforced(
    model: &Arc<Model>,
    backend: &mut dyn Backend,
    (args, planned): (&CacheArgs, &Planned),
    fetched: Option<gpu::Fetched>,
) -> Result<(Box<dyn ExpertSource + Send>, Option<Monitor>), Failure> {
    let plan = &planned.plan;
    let budget = match plan.cache {
        Cache::Mapped => {
            let mapped = MappedExperts::new(model);
            let mapped = if backend.enqueues() { mapped.in_whole_layers() } else { mapped };
            return Ok((Box::new(mapped), None));
        }
        Cache::Slots(bytes) if bytes >= plan.experts => None,
        Cache::Slots(bytes) => Some(bytes),
    };
    let options = Options {
        budget,
        loan: (plan.lent > 0).then_some(Loan { bytes: plan.lent, rows: SMALL_ROWS }),
        io: planned.io,
        readers: args.readers.into(),
        look_ahead: args.look_ahead.0,
        route_bias: args.route_bias.unwrap_or(0.0),
        trace: args.trace,
        ..Options::default()
    };
    if options.route_bias != 0.0 {
        report::say(format_args!(
            "redlite: warning: --route-bias {} prefers experts in the cache: answers change, and depend on what it holds",
            options.route_bias
        ));
    }
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
            let seconds = copied.seconds - copied_before.seconds;
            let (found, fetched) =
                (copied.found - copied_before.found, copied.fetched - copied_before.fetched);
            (after.since(before), CopyStats { bytes, seconds, found, fetched })
        })
    }

    /// The share of experts that single tokens found in the cache in the last phase, if there is one.
    pub fn found(&self) -> Option<f64> {
        let (stats, _) = self.phases().last()?;
        (stats.wanted() > 0).then(|| stats.hits as f64 / stats.wanted() as f64)
    }

    /// A line for each phase, given their names and times; none without a store.
    pub fn lines<const N: usize>(&self, phases: [(&str, Duration); N]) -> Vec<String> {
        let line = |((stats, copies), (name, time)): ((Stats, CopyStats), (&str, Duration))| {
            let copied = copies_of(&copies, time);
            // Where the GPU fetches by itself there is nothing else to tell.
            match copied.strip_prefix("; ").filter(|_| stats.loads == 0 && stats.wanted() == 0) {
                Some(copied) => format!("load, {name}: {copied}"),
                None => line_of(name, &stats, time) + &copied,
            }
        };
        self.phases().zip(phases).map(line).collect()
    }

    /// The phases as JSON: reading, writing.
    pub fn json(&self) -> Option<Value> {
        let phase = |(stats, copies): (Stats, CopyStats)| {
            let mut value = stats_json(&stats);
            value["copied_bytes"] = copies.bytes.into();
            value["copy_seconds"] = copies.seconds.into();
            value["gpu_found"] = copies.found.into();
            value["gpu_fetched"] = copies.fetched.into();
            value
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
            "; the GPU found {:.1} % of {all} experts in its slots and fetched {}",
            100.0 * copies.found as f64 / all as f64,
            copies.fetched
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

/// What a store did, as JSON.
fn stats_json(stats: &Stats) -> Value {
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
        "loans": stats.loans,
    })
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
