//! Experts in bounded memory: how much, read how, and what is said about it.

use std::sync::Arc;
use std::time::Duration;

use engine::machine::Spare;
use engine::plan::{Cache, CacheWish, Needs, Plan, Rates};
use experts::{Io, Layout, Monitor, Options, Stats, Store, reader};
use model::{Backend, ExpertSource, Limits, MappedExperts, Model};

use serde_json::{Value, json};

use crate::args::{BackendArgs, BackendName};
use crate::bench::Replay;
use crate::cache_args::{CacheArgs, IoName};
use crate::calibration::{Calibration, Disk};
use crate::failure::Failure;
use crate::report;

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
}

/// How the CPU computes, by the arguments.
pub fn cpu_options(args: &BackendArgs) -> cpu::Options {
    cpu::Options { threads: args.threads, exact: args.exact, ..cpu::Options::default() }
}

/// Threads that compute, where that is known.
pub fn threads(args: &BackendArgs) -> Option<usize> {
    (args.backend == BackendName::Cpu).then(|| args.threads.unwrap_or_else(cpu::physical_cores))
}

/// The plan for `model` on this machine, or with the memory that `spare` says.
pub fn plan(
    model: &Model,
    args: &BackendArgs,
    room: &Room,
    spare: Option<Spare>,
) -> Result<Planned, Failure> {
    // The others compute from the mapped file.
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
        chunk: args.chunk.or((!is_cpu).then_some(engine::Options::default().chunk)),
        scratch: &scratch,
        floor: floor(model),
        cache,
        lasting: room.lasting,
    };
    let mut calibration = Calibration::load();
    let capabilities = is_cpu.then(|| cpu::capabilities(&cpu_options(args))).transpose()?;
    let rates = |calibration: &Calibration, disk| match &capabilities {
        Some(capabilities) => calibration.rates(capabilities, threads(args), disk),
        None => Rates::default(),
    };
    let make = |rates: Rates, io| {
        let plan = Plan::new(model, &needs, spare.as_ref(), &rates)?;
        Ok::<_, Failure>(Planned { plan, io, rates })
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
fn floor(model: &Model) -> u64 {
    match Layout::new(model, Some(0), reader::DIRECT_BLOCK) {
        Err(experts::Error::Budget { needed, .. }) => needed,
        _ => 0,
    }
}

/// One line: what was chosen and why.
pub fn line(plan: &Plan) -> String {
    let experts = report::size(plan.experts);
    let cache = match plan.cache {
        Cache::Mapped => format!("experts ({experts}) from the mapped file"),
        Cache::Slots(bytes) if bytes >= plan.experts => format!("a slot for every expert ({experts})"),
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
    let decode = plan.expected.decode.map(|(rate, hits)| {
        let found = if hits < 1.0 { format!(" if {:.0} % are found", 100.0 * hits) } else { String::new() };
        format!("{rate:.1} tok/s written{found}")
    });
    let parts: Vec<String> = ingestion.into_iter().chain(decode).collect();
    (!parts.is_empty()).then(|| parts.join(", "))
}

/// Experts as the plan has them, and a view of the store, if it is one.
pub fn source(
    model: &Arc<Model>,
    backend: &mut dyn Backend,
    args: &CacheArgs,
    planned: &Planned,
) -> Result<(Box<dyn ExpertSource + Send>, Option<Monitor>), Failure> {
    let (source, monitor) = unforced(model, backend, args, planned)?;
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
    args: &CacheArgs,
    planned: &Planned,
) -> Result<(Box<dyn ExpertSource + Send>, Option<Monitor>), Failure> {
    let plan = &planned.plan;
    let budget = match plan.cache {
        Cache::Mapped => return Ok((Box::new(MappedExperts::new(model)), None)),
        Cache::Slots(bytes) if bytes >= plan.experts => None,
        Cache::Slots(bytes) => Some(bytes),
    };
    let options = Options {
        budget,
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
    let store = Store::new(model, backend, options)?;
    let monitor = store.monitor();
    Ok((Box::new(store), Some(monitor)))
}

/// What was loaded in each phase of a run.
#[derive(Default)]
pub struct Loads {
    monitor: Option<Monitor>,
    marks: Vec<Stats>,
}

impl Loads {
    /// Nothing so far.
    pub fn new(monitor: Option<Monitor>) -> Loads {
        let marks = monitor.iter().map(Monitor::stats).collect();
        Loads { monitor, marks }
    }

    /// The store, if there is one.
    pub fn monitor(&self) -> Option<&Monitor> {
        self.monitor.as_ref()
    }

    /// A phase ends.
    pub fn mark(&mut self) {
        self.marks.extend(self.monitor.iter().map(Monitor::stats));
    }

    fn phases(&self) -> impl Iterator<Item = Stats> + '_ {
        self.marks.windows(2).map(|pair| pair[1].since(&pair[0]))
    }

    /// A line for each phase, given their names and times; none without a store.
    pub fn lines<const N: usize>(&self, phases: [(&str, Duration); N]) -> Vec<String> {
        self.phases().zip(phases).map(|(stats, (name, time))| line_of(name, &stats, time)).collect()
    }

    /// The phases as JSON: reading, writing.
    pub fn json(&self) -> Option<Value> {
        self.monitor.is_some().then(|| self.phases().map(|stats| stats_json(&stats)).collect())
    }
}

/// What a store did, as JSON.
pub fn stats_json(stats: &Stats) -> Value {
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
    })
}

/// Bytes, loads, how busy the readers were, how long computation waited, and where experts were found.
pub fn line_of(name: &str, stats: &Stats, time: Duration) -> String {
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
