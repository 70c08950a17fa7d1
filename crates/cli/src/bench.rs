//! `redlite bench`: how fast a model is read and written, and where the time goes.

mod ab;
pub mod args;
mod kernels;
mod replay;
mod report;
mod roofline;
mod stats;

pub use replay::Replay;
pub use report::{peak_line, peaks_json};

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use engine::plan::{self, Plan};
use engine::{Cancel, Engine, LogitRows, Logits, Profile, Request, Sampler, Sampling, Session, Step};
use experts::Monitor;
use model::{KvType, Model, Peaks};

use crate::args::BackendName;
use crate::cache::{self, Loads, Room};
use crate::calibration::{Calibration, Reading};
use crate::failure::{Failure, Outcome};
use crate::interrupt;
use crate::open;
use crate::report::Bar;

use args::BenchArgs;
use stats::Samples;

/// Runs the command.
pub fn run(args: &BenchArgs) -> Result<Outcome, Failure> {
    let (drawing, probe) = (&args.roofline, &args.probe);
    // Not clap's business: it forgets what an option requires where that would conflict with the model.
    let part_of_a_probe =
        probe.ty.is_some() || probe.down.is_some() || probe.rows.is_some() || probe.ablate.is_some();
    if probe.kernels.is_none() && part_of_a_probe {
        return Err(Failure::Usage("--type, --down, --rows and --ablate belong to --kernels".to_string()));
    }
    if args.replay.trace_hits.is_some() && args.backend.backend == BackendName::Cuda {
        let reason = "--trace-hits chooses experts instead of the router, which a GPU asks by itself; measure a file whose \
                      experts are used unevenly (`redlite synth --skew 0.8`)";
        return Err(Failure::Usage(reason.to_string()));
    }
    match (args.probe.kernels, &args.ab.ab, &args.model) {
        (Some(probe), _, _) => kernels::run(args, probe),
        (None, Some(flags), _) => ab::run(args, flags),
        (None, None, Some(path)) => measure(args, path),
        (None, None, None) => match (&drawing.roofline, &drawing.from) {
            (Some(svg), Some(json)) => roofline::from_file(svg, json),
            _ => Err(Failure::Usage("a model is needed".to_string())),
        },
    }
}

/// Tokens after which hardly an expert of hundreds has not been used.
const FILLING: usize = 1024;

/// Measures a model.
fn measure(args: &BenchArgs, path: &Path) -> Result<Outcome, Failure> {
    let shapes = shapes(args)?;
    let cancel = interrupt::on_ctrl_c()?;
    let fail = |source| Failure::Model { path: path.to_path_buf(), source };
    let model = Arc::new(Model::open(path).map_err(fail)?);
    let mut bench = Bench::start(args, model, &shapes, cancel)?;
    let mut rows = Vec::with_capacity(shapes.len());
    for shape in shapes {
        rows.push(bench.measure(shape)?);
    }
    bench.calibrate(&rows);
    let results = Results { args, path, bench: &bench, rows };
    if let Some(svg) = &args.roofline.roofline {
        roofline::draw(svg, &results.json())?;
    }
    results.print()?;
    Ok(Outcome::Success)
}

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Test {
    /// A prompt is read.
    Prompt,
    /// Tokens are read one by one, the logits of each are computed.
    Generate,
}

impl Test {
    /// Its name in tables and JSON.
    fn name(self) -> &'static str {
        match self {
            Test::Prompt => "prompt",
            Test::Generate => "gen",
        }
    }
}

/// A test of some tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shape {
    test: Test,
    tokens: usize,
}

/// The tests the arguments ask for: each prompt length once, then generation.
fn shapes(args: &BenchArgs) -> Result<Vec<Shape>, Failure> {
    let mut shapes: Vec<Shape> = Vec::new();
    let prompts = args.prompt.iter().map(|&tokens| Shape { test: Test::Prompt, tokens });
    for shape in prompts.chain([Shape { test: Test::Generate, tokens: args.generate }]) {
        if shape.tokens > 0 && !shapes.contains(&shape) {
            shapes.push(shape);
        }
    }
    if shapes.is_empty() {
        return Err(Failure::Usage("nothing to measure: --prompt and --gen are both 0".to_string()));
    }
    Ok(shapes)
}

/// A row of the table.
struct Row {
    shape: Shape,
    /// Tokens a second.
    rates: Samples,
    /// Seconds of the run in the middle.
    seconds: f64,
    /// The stages of that run, or of one of its own where watching costs time.
    profile: Option<Profile>,
    /// What was loaded in all runs that count, and their seconds.
    loads: Option<(Loads, Duration)>,
}

/// What a bench produced.
struct Results<'a> {
    args: &'a BenchArgs,
    path: &'a Path,
    bench: &'a Bench<'a>,
    rows: Vec<Row>,
}

/// An engine to be measured.
struct Bench<'a> {
    args: &'a BenchArgs,
    engine: Engine,
    model: Arc<Model>,
    /// A session of `depth` tokens that every measurement continues.
    base: Session,
    peaks: Vec<Peaks>,
    name: &'static str,
    variant: String,
    threads: Option<usize>,
    plan: Plan,
    /// A view of the cache of experts, if there is one.
    monitor: Option<Monitor>,
    cancel: Cancel,
}

impl<'a> Bench<'a> {
    /// Loads the model, measures the machine, reads the tokens before the measurement.
    fn start(
        args: &'a BenchArgs,
        model: Arc<Model>,
        shapes: &[Shape],
        cancel: Cancel,
    ) -> Result<Self, Failure> {
        let longest = shapes.iter().map(|shape| shape.tokens).max().unwrap_or(0);
        // A fork of a session that does not end between pages has a copy of the last one.
        let fork = if args.depth == 0 { 0 } else { model::state::PAGE };
        let needed = args.depth.saturating_add(longest).saturating_add(fork);
        let context = args.backend.context.unwrap_or(needed.max(FILLING));
        if context < needed {
            return Err(engine::Error::ContextOverflow { needed, context }.into());
        }
        let threads = cache::threads(&args.backend);
        let prompts = shapes.iter().filter(|shape| shape.test == Test::Prompt).map(|shape| shape.tokens);
        let room = Room { context, positions: context, prompt: prompts.max(), lasting: true };
        let mut backend = args.backend.clone();
        backend.cache.replay = args.replay.likeness(&backend.cache, args.seed);
        let started = open::start_for(&model, &backend, room, args.json)?;
        let mut engine = started.engine;
        let peaks = if args.no_profile { Vec::new() } else { engine.backend().peaks() };
        let name = engine.backend().capabilities().name;
        let (base, variant) = (engine.open(), started.variant);
        let (plan, monitor) = (started.plan, started.monitor);
        let mut bench =
            Bench { args, engine, model, base, peaks, name, variant, threads, plan, monitor, cancel };
        bench.fill()?;
        bench.read_depth()?;
        Ok(bench)
    }

    /// Has experts read that have slots of their own and are read once only, which is no part of a measurement.
    fn fill(&mut self) -> Result<(), Failure> {
        if self.monitor.is_none() || self.plan.streamed > 0 {
            return Ok(());
        }
        let tokens = FILLING.min(self.plan.limits.positions);
        let base = std::mem::replace(&mut self.base, self.engine.open());
        let result = self.read_unmeasured(tokens, "filling");
        self.engine.close(std::mem::replace(&mut self.base, base));
        result
    }

    fn read_depth(&mut self) -> Result<(), Failure> {
        if self.args.depth == 0 {
            return Ok(());
        }
        self.read_unmeasured(self.args.depth, "depth")
    }

    /// Appends so many random tokens to the base, which are not those of any measurement.
    fn read_unmeasured(&mut self, tokens: usize, what: &'static str) -> Result<(), Failure> {
        let bar = Bar::tokens(what, tokens, self.args.json);
        let ids = random_ids(!self.args.seed, tokens, self.model.spec.vocab);
        let mut progress = |done: f64, _| bar.set(done as u64);
        let mut request = Request {
            logits: LogitRows::None,
            on_progress: Some(&mut progress),
            cancel: self.cancel.clone(),
            ..Request::default()
        };
        let result = self.engine.ingest(&mut self.base, &ids, &mut request);
        bar.finish();
        Ok(result.map(|_| ())?)
    }

    /// Notes what was reached, if that is what the machine can reach: all experts in place, nothing else in the
    /// way of the measurement.
    fn calibrate(&mut self, rows: &[Row]) {
        if self.plan.streamed > 0 || self.args.depth > 0 || self.args.backend.backend != BackendName::Cpu {
            return;
        }
        let mut calibration = Calibration::load();
        let (capabilities, threads) = (self.engine.backend().capabilities().clone(), self.threads);
        self.peaks.iter().for_each(|peaks| calibration.note_peaks(&capabilities, peaks));
        let (model, kv) = (&self.model, self.kv());
        // What fits a processor's caches says nothing about models that do not.
        if model.expert_bytes() + model.dense_bytes() < SMALLEST_MODEL {
            return calibration.store();
        }
        let of = |test| rows.iter().filter(move |row| row.shape.test == test);
        let readings: Vec<Reading> = of(Test::Prompt)
            .filter(|row| row.shape.tokens >= SHORTEST_PROMPT)
            .map(|row| {
                let cost = plan::cost(model, kv, (0, row.shape.tokens), model.spec.moe.experts);
                let passes = row.shape.tokens.div_ceil(self.plan.chunk);
                Reading { passes, seconds: row.seconds, operations: cost.operations() as f64 }
            })
            .collect();
        calibration.note_reading(model, &capabilities, threads, &readings);
        for row in of(Test::Generate) {
            let cost = plan::cost(model, kv, (row.shape.tokens / 2, 1), model.spec.moe.used);
            calibration.note_tokens(&capabilities, threads, &cost, row.seconds / row.shape.tokens as f64);
        }
        calibration.store();
    }

    fn kv(&self) -> KvType {
        self.args.backend.kv.into()
    }

    /// Measures one shape: once for nothing, then as often as asked for.
    fn measure(&mut self, shape: Shape) -> Result<Row, Failure> {
        let what = match shape.test {
            Test::Prompt => "reading",
            Test::Generate => "writing",
        };
        // Watching costs nothing where calls return when their work is done.
        let watch = !self.args.no_profile;
        let own = watch && self.engine.backend().enqueues();
        let runs = self.args.repeat + 1 + usize::from(own);
        let bar = Bar::tokens(what, shape.tokens * runs, self.args.json);
        let (mut seconds, mut profiles, mut before_runs) = (Vec::new(), Vec::new(), None);
        for run in 0..runs {
            let before = run * shape.tokens;
            let hear = |done: f64| bar.set((before as f64 + done) as u64);
            let extra = run > self.args.repeat;
            let mut profile = (watch && (extra || !own)).then(|| self.profile());
            // Others each time where there is a cache, which would have just what is needed.
            let turn = if self.monitor.is_some() { run as u64 } else { 0 };
            let seed = self.args.seed.wrapping_add(turn);
            let ids = random_ids(seed, shape.tokens, self.model.spec.vocab);
            if run == 1 {
                before_runs = self.monitor.clone().map(|monitor| Loads::new(Some(monitor)));
            }
            let time = self.once(shape.test, &ids, profile.as_mut(), &hear)?;
            if run > 0 {
                profiles.extend(profile);
                if !extra {
                    seconds.push(time);
                }
            }
        }
        bar.finish();
        let loads = before_runs.map(|mut loads: Loads| {
            loads.mark();
            (loads, Duration::from_secs_f64(seconds.iter().sum()))
        });
        let middle = stats::middle(&seconds).unwrap_or(0);
        let profile = if own { profiles.pop() } else { profiles.into_iter().nth(middle) };
        if let Some((stage, computed, wanted)) = profile.iter().flat_map(|p| p.skipped(shape.tokens)).next() {
            return Err(Failure::Usage(format!(
                "`{stage}` computed {computed} of {wanted} rows: this would not be the time of the whole prompt"
            )));
        }
        let rates = seconds.iter().map(|seconds| shape.tokens as f64 / seconds.max(1e-9)).collect();
        let rates = Samples::new(rates).expect("at least one measurement");
        Ok(Row { shape, rates, seconds: seconds[middle], profile, loads })
    }

    fn profile(&self) -> Profile {
        Profile::new(&self.model, self.kv(), self.args.depth)
    }

    /// One run; seconds from the first token to the last logits.
    fn once(
        &mut self,
        test: Test,
        ids: &[u32],
        profile: Option<&mut Profile>,
        hear: &dyn Fn(f64),
    ) -> Result<f64, Failure> {
        let mut session = self.engine.fork(&self.base)?;
        let began = Instant::now();
        let result = self.read(&mut session, test, ids, profile, hear);
        let seconds = began.elapsed().as_secs_f64();
        let read = session.len() - self.base.len();
        self.engine.close(session);
        result?;
        assert_eq!(read, ids.len(), "an ingestion that succeeds reads every token");
        Ok(seconds)
    }

    fn read(
        &mut self,
        session: &mut Session,
        test: Test,
        ids: &[u32],
        mut profile: Option<&mut Profile>,
        hear: &dyn Fn(f64),
    ) -> Result<(), Failure> {
        let step = match (test, &profile) {
            (Test::Prompt, _) => ids.len(),
            (Test::Generate, None) => return self.write(session, ids, hear),
            (Test::Generate, Some(_)) => 1,
        };
        for (index, part) in ids.chunks(step).enumerate() {
            let mut progress = |done: f64, _| hear((index * step) as f64 + done);
            let mut request = Request {
                on_progress: Some(&mut progress),
                cancel: self.cancel.clone(),
                ..Request::default()
            };
            if let Some(profile) = profile.as_deref_mut() {
                request.observer = Some(profile);
            }
            self.engine.ingest(session, part, &mut request)?;
        }
        Ok(())
    }

    /// Reads tokens one by one, and chooses one behind each as an answer does, though not to go on with it.
    fn write(&mut self, session: &mut Session, ids: &[u32], hear: &dyn Fn(f64)) -> Result<(), Failure> {
        let mut sampler = Sampler::new(Sampling::default())?;
        let mut logits = Logits::default();
        for (index, &token) in ids.iter().enumerate() {
            if self.cancel.is_cancelled() {
                return Err(engine::Error::Cancelled { read: index, total: ids.len() }.into());
            }
            let needed = sampler.needed();
            self.engine.step_all(&mut [Step { session, token, needed, logits: &mut logits }])?;
            sampler.choose_from(&logits);
            hear(index as f64 + 1.0);
        }
        Ok(())
    }
}

/// Shorter prompts choose only some of the experts and are bound by reading them: what they take says little about a
/// row of a long one.
const SHORTEST_PROMPT: usize = 512;
/// Bytes of the smallest model whose speed is one of the machine.
const SMALLEST_MODEL: u64 = 512 << 20;

/// Uniform token ids from a SplitMix64 sequence.
fn random_ids(seed: u64, count: usize, vocabulary: usize) -> Vec<u32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    };
    (0..count).map(|_| ((u128::from(next()) * vocabulary as u128) >> 64) as u32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_repeat_with_the_seed_and_cover_the_vocabulary() {
        let ids = random_ids(7, 1000, 10);
        assert_eq!(ids, random_ids(7, 1000, 10));
        assert_ne!(ids, random_ids(8, 1000, 10));
        assert!((0..10).all(|id| ids.contains(&id)) && ids.iter().all(|&id| id < 10));
    }
}
