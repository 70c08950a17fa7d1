//! How fast a model is, and where the time goes.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use model::{Backend, KvType, Limits, MappedExperts, Model, SequenceId, Stage};
use redlite_cuda::{Cuda, Options};
use testkit::Random;

use crate::passes::Passes;

/// Rows of the largest pass.
const CHUNK: usize = 8192;

/// Repetitions, of which the median counts.
const TIMES: usize = 3;

/// Prints tok/s of prompts of the given lengths, tok/s of decoding behind them, and the time of each stage.
pub fn run(path: &Path, lengths: &[&str]) -> ExitCode {
    let lengths: Vec<usize> = lengths.iter().map(|length| length.parse().expect("a length")).collect();
    let lengths = if lengths.is_empty() { vec![512, 2048, 8192] } else { lengths };
    let model = Arc::new(Model::open(path).expect("a model"));
    let longest = lengths.iter().copied().max().unwrap_or(0) + 1024;
    let limits = Limits { pass_rows: CHUNK, positions: 3 * longest, kv: KvType::F16 };
    let start = Instant::now();
    let weights = model.load(&mut |_, _| {}).expect("weights");
    let cuda = Cuda::new(model.clone(), &weights, limits, Options::default()).expect("a GPU");
    drop(weights);
    println!(
        "{} [{}], loaded in {:.1} s",
        model.spec.name,
        cuda.capabilities().variant,
        start.elapsed().as_secs_f64()
    );
    let experts = MappedExperts::new(&model).in_whole_layers();
    let mut bench = Bench { passes: Passes { model, cuda, experts } };
    for length in lengths {
        bench.prompt(length);
        bench.decode(length, 1);
    }
    bench.decode(512, 8);
    ExitCode::SUCCESS
}

struct Bench {
    passes: Passes,
}

impl Bench {
    fn tokens(&self, len: usize) -> Vec<u32> {
        Random::new(1, "prompt").tokens(len, self.passes.model.spec.vocab)
    }

    fn pass(&mut self, runs: &[(SequenceId, &[u32])]) {
        self.passes.pass(runs, |_| ());
    }

    fn ingest(&mut self, tokens: &[u32]) -> SequenceId {
        let id = self.passes.cuda.create();
        for chunk in tokens.chunks(CHUNK) {
            self.pass(&[(id, chunk)]);
        }
        id
    }

    fn prompt(&mut self, length: usize) {
        let tokens = self.tokens(length);
        let seconds = median(TIMES + 1, || {
            let start = Instant::now();
            let id = self.ingest(&tokens);
            let seconds = start.elapsed().as_secs_f64();
            self.passes.cuda.free(id);
            seconds
        });
        println!("\nread {length} tokens: {:.1} ms, {:.0} tok/s", 1e3 * seconds, length as f64 / seconds);
        self.passes.cuda.set_profiling(true);
        let id = self.ingest(&tokens);
        self.passes.cuda.free(id);
        self.stages(1, length);
    }

    /// Decoding with `batch` sequences of `length` tokens, which go on with different tokens.
    fn decode(&mut self, length: usize, batch: usize) {
        const STEPS: usize = 32;
        let tokens = self.tokens(length);
        let first = self.ingest(&tokens);
        let ids: Vec<SequenceId> = (0..batch)
            .map(|i| if i == 0 { first } else { self.passes.cuda.fork(first).expect("a fork") })
            .collect();
        let mut step = 0;
        let mut steps = |bench: &mut Bench| {
            let start = Instant::now();
            for _ in 0..STEPS {
                step += 1;
                let token = |i: usize| [tokens[(step + 31 * i) % tokens.len()]];
                let next: Vec<[u32; 1]> = (0..batch).map(token).collect();
                let runs: Vec<(SequenceId, &[u32])> =
                    ids.iter().zip(&next).map(|(&id, token)| (id, &token[..])).collect();
                bench.pass(&runs);
            }
            start.elapsed().as_secs_f64() / STEPS as f64
        };
        steps(self);
        let seconds = median(TIMES, || steps(self));
        let rate = batch as f64 / seconds;
        println!(
            "\nwrite behind {length} tokens, {batch} sequences: {:.3} ms a step, {rate:.0} tok/s",
            1e3 * seconds
        );
        self.passes.cuda.set_profiling(true);
        steps(self);
        self.stages(STEPS, batch);
        ids.iter().for_each(|id| self.passes.cuda.free(*id));
    }

    /// Prints and ends a profile of `steps` passes of `tokens` tokens each.
    fn stages(&mut self, steps: usize, tokens: usize) {
        let mut sums: BTreeMap<Stage, (f32, usize)> = BTreeMap::new();
        for (stage, ms) in self.passes.cuda.profile().expect("a profile") {
            let entry = sums.entry(stage).or_default();
            *entry = (entry.0 + ms, entry.1 + 1);
        }
        self.passes.cuda.set_profiling(false);
        let total: f32 = sums.values().map(|(ms, _)| ms).sum();
        for (stage, (ms, calls)) in sums {
            println!(
                "  {:14} {:8.3} ms {:5.1} % {:8.2} us/token {:6} calls",
                stage.name(),
                ms / steps as f32,
                100.0 * ms / total,
                1e3 * ms / (steps * tokens) as f32,
                calls / steps
            );
        }
        println!("  {:14} {:8.3} ms", "total", total / steps as f32);
    }
}

fn median(times: usize, mut run: impl FnMut() -> f64) -> f64 {
    let mut all: Vec<f64> = (0..times).map(|_| run()).collect();
    all.sort_by(f64::total_cmp);
    all[times / 2]
}
