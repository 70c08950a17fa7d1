//! Layers on several GPUs: the promises of every backend, the bits of one GPU, and how much faster it is.

use std::ops::Range;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use engine::{Cancel, Engine, Request, Session};
use model::{Backend, Driver, KvType, Limits, MappedExperts, Model, Pass, Quiet, SequenceId};
use redlite_cuda::{Options, Pipeline};
use testkit::Random;

use crate::check::{cuda, limits, open, prompt, suite};

/// Runs `check` for parts on one GPU, and on two where they are.
pub fn checks(path: &Path, check: &mut dyn FnMut(&str, &dyn Fn() -> String)) {
    let mut all: Vec<Vec<i32>> = vec![vec![0, 0], vec![0; 3]];
    if redlite_cuda::count().is_ok_and(|count| count > 1) {
        all.extend([vec![0, 1], vec![1, 0, 1]]);
    }
    for gpus in all {
        for (name, work) in suite(&|model, limits| Box::new(pipeline(&model, limits, &gpus))) {
            check(&format!("pipeline {gpus:?} {name}"), &|| {
                work();
                String::new()
            });
        }
        check(&format!("pipeline {gpus:?} bits"), &|| bits(path, &gpus));
    }
}

fn pipeline(model: &Arc<Model>, limits: Limits, gpus: &[i32]) -> Pipeline {
    Pipeline::new(model, limits, Options::default(), gpus).expect("GPUs")
}

fn engine(model: &Arc<Model>, backend: Box<dyn Backend>, chunk: usize, context: usize) -> Engine {
    let experts = MappedExperts::new(model).in_whole_layers();
    Engine::new(model.clone(), backend, Box::new(experts), engine::Options { chunk, context })
}

/// Logits of a prompt's last token and of some steps behind it.
fn logits(engine: &mut Engine, session: &mut Session, tokens: &[u32]) -> Vec<u32> {
    let mut logits = engine.ingest(session, tokens, &mut Request::default()).expect("a prompt").logits;
    for &token in &tokens[..8] {
        logits.extend(engine.step(session, token, &Cancel::default()).expect("a step"));
    }
    logits.iter().map(|x| x.to_bits()).collect()
}

/// Prompts, steps and states copied to the host are those of one GPU, whatever the chunks.
fn bits(path: &Path, gpus: &[i32]) -> String {
    let model = open(path);
    let tokens = prompt(&model, 1500);
    let of = |backend: Box<dyn Backend>, chunk: usize| {
        let mut engine = engine(&model, backend, chunk, 2048);
        let mut session = engine.open();
        logits(&mut engine, &mut session, &tokens)
    };
    let limits = limits(2048, KvType::F16);
    let expected = of(Box::new(cuda(&model, limits)), 2048);
    for chunk in [64, 320, 2048] {
        let found = of(Box::new(pipeline(&model, limits, gpus)), chunk);
        assert!(found == expected, "chunks of {chunk}");
    }
    let (mut one, mut several) = (cuda(&model, limits), pipeline(&model, limits, gpus));
    let read = |backend: &mut dyn Backend| {
        let id = backend.create();
        testkit::ingest(backend, &model, &[(id, &tokens[..300])], 128);
        backend.snapshot(id).expect("a state")
    };
    let (first, second) = (read(&mut one), read(&mut several));
    assert!(first == second, "states differ");
    let go_on = |backend: &mut dyn Backend, state| {
        let id = backend.restore(state).expect("a state of one is one of the other");
        testkit::ingest(backend, &model, &[(id, &tokens[300..400])], 100).remove(0).data
    };
    assert!(go_on(&mut one, &second) == go_on(&mut several, &first), "logits behind a state of the other");
    "chunks of 64, 320, 2048, steps, states".to_string()
}

/// Repetitions, of which the median counts.
const TIMES: usize = 3;

/// Rows of chunks.
const ONE: usize = 8192;
const ONE_CHUNKS: [usize; 2] = [4096, ONE];
const SEVERAL: [usize; 4] = [2048, 4096, 5504, 8192];

/// Prints tok/s on one GPU and on two, and whether the logits have the same bits.
pub fn run(path: &Path, lengths: &[&str]) -> ExitCode {
    let lengths: Vec<usize> = lengths.iter().map(|length| length.parse().expect("a length")).collect();
    let lengths = if lengths.is_empty() { vec![8192, 32_768] } else { lengths };
    let model = Arc::new(Model::open(path).expect("a model"));
    let positions = lengths.iter().copied().max().unwrap_or(0) + 1024;
    let limits = Limits { pass_rows: ONE + 64, positions: 2 * positions, kv: KvType::F16 };
    let started = Instant::now();
    let one = cuda(&model, limits);
    println!("{} [{}], loaded in {:.1} s", model.spec.name, one.capabilities().variant, seconds(started));
    let expected = measure(&model, Box::new(one), &lengths, &ONE_CHUNKS);
    let there = redlite_cuda::count().expect("a driver");
    let gpus: [i32; 2] = [0, i32::from(there > 1)];
    let started = Instant::now();
    let two = pipeline(&model, limits, &gpus);
    println!("\nGPUs {gpus:?}: layers {:?}, loaded in {:.1} s", two.layers(), seconds(started));
    let found = measure(&model, Box::new(two), &lengths, &SEVERAL);
    let same = found.iter().all(|(length, logits)| {
        expected.iter().any(|(other, expected)| length == other && logits == expected)
    });
    println!("\nbits of logits, after prompts and steps: {}", if same { "the same" } else { "DIFFERENT" });
    if same { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Prints tok/s, and returns the logits that were read: for each measurement its prompt length and bits.
fn measure(
    model: &Arc<Model>,
    backend: Box<dyn Backend>,
    lengths: &[usize],
    chunks: &[usize],
) -> Vec<(usize, Vec<u32>)> {
    let mut bench = Bench {
        model: model.clone(),
        backend,
        experts: MappedExperts::new(model).in_whole_layers(),
        tokens: Random::new(1, "prompt").tokens(1 << 18, model.spec.vocab),
    };
    let mut out = Vec::new();
    for (&chunk, &length) in chunks.iter().flat_map(|chunk| lengths.iter().map(move |length| (chunk, length)))
    {
        let (mut times, mut logits) = (Vec::new(), Vec::new());
        for _ in 0..=TIMES {
            let id = bench.backend.create();
            let started = Instant::now();
            logits = bench.read(id, length, chunk);
            times.push(seconds(started));
            logits.extend((0..8).flat_map(|step| bench.step(id, step)));
            bench.backend.free(id);
        }
        times[1..].sort_by(f64::total_cmp);
        let time = times[1 + TIMES / 2];
        let rate = length as f64 / time;
        println!("read {length} tokens in chunks of {chunk}: {:.1} ms, {rate:.0} tok/s", 1e3 * time);
        out.push((length, logits));
    }
    bench.write();
    out
}

/// A backend and what is read.
struct Bench {
    model: Arc<Model>,
    backend: Box<dyn Backend>,
    experts: MappedExperts,
    tokens: Vec<u32>,
}

impl Bench {
    /// Reads `length` tokens as the engine does, and returns the bits of the last one's logits.
    fn read(&mut self, id: SequenceId, length: usize, chunk: usize) -> Vec<u32> {
        let mut logits = Vec::new();
        for start in (0..length).step_by(chunk) {
            let end = length.min(start + chunk);
            logits = self.pass(id, start..end, end == length);
        }
        logits
    }

    fn step(&mut self, id: SequenceId, index: usize) -> Vec<u32> {
        self.pass(id, index..index + 1, true)
    }

    fn pass(&mut self, id: SequenceId, tokens: Range<usize>, last: bool) -> Vec<u32> {
        let mut pass = Pass::new();
        let rows = pass.push(id, self.backend.position(id).expect("a sequence"), &self.tokens[tokens]);
        pass.logits.extend(last.then_some(rows.end - 1));
        let mut driver = Driver::begin(&mut *self.backend, &self.model.spec, &pass).expect("begin");
        driver.finish(&mut *self.backend, &mut self.experts, &mut Quiet).expect("every stage");
        let logits = if last {
            self.backend.logits(driver.pass()).expect("logits").data.to_vec()
        } else {
            self.backend.keep_pace().expect("no failure");
            Vec::new()
        };
        self.backend.commit(driver.pass()).expect("commit");
        logits.iter().map(|x| x.to_bits()).collect()
    }

    /// Prints the time of a step behind 512 tokens.
    fn write(&mut self) {
        const STEPS: usize = 64;
        let id = self.backend.create();
        self.read(id, 512, 512);
        let mut times: Vec<f64> = Vec::new();
        for index in 0..STEPS {
            let started = Instant::now();
            self.step(id, index);
            times.push(seconds(started));
        }
        times.sort_by(f64::total_cmp);
        let time = times[STEPS / 2];
        println!("write behind 512 tokens: {:.3} ms a token, {:.0} tok/s", 1e3 * time, 1.0 / time);
        self.backend.free(id);
    }
}

fn seconds(since: Instant) -> f64 {
    since.elapsed().as_secs_f64()
}
