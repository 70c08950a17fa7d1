//! What a token takes in all, by how it is chosen: the stages, what is wanted of the logits, and the choice.

use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use engine::{Engine, LogitRows, Logits, Needed, Request, Sampler, Sampling, Session, Step};
use model::{KvType, Limits, MappedExperts};
use testkit::Random;

use crate::check::{cuda, open};

/// Tokens before those that are written, and steps of a run.
const BEFORE: usize = 512;
const STEPS: usize = 64;

/// Runs of each way, in turn with the others.
const TIMES: usize = 7;

/// Rows written together.
const BATCHES: [usize; 2] = [1, 8];

/// Prints milliseconds of a step for each way of choosing.
pub fn run(path: &Path) -> ExitCode {
    let model = open(path);
    let context = BEFORE + STEPS * (2 + TIMES * 5) * BATCHES.len();
    let limits = Limits { pass_rows: 2048, positions: 9 * context, kv: KvType::F16 };
    let (cuda, experts) = (cuda(&model, limits), MappedExperts::new(&model).in_whole_layers());
    let options = engine::Options { chunk: 2048, context };
    let mut engine = Engine::new(model.clone(), Box::new(cuda), Box::new(experts), options);
    let tokens = Random::new(1, "prompt").tokens(BEFORE, model.spec.vocab);
    let mut first = engine.open();
    let mut request = Request { logits: LogitRows::None, ..Request::default() };
    engine.ingest(&mut first, &tokens, &mut request).expect("a prompt");
    let penalties = Sampling { repeat_penalty: 1.1, ..Sampling::default() };
    let ways = [
        ("greedy", Sampling::greedy(), None),
        ("sampled", Sampling::default(), None),
        ("sampled, all logits", Sampling::default(), Some(Needed::All)),
        ("penalties", penalties, None),
        ("top-k 1000", Sampling { top_k: 1000, ..Sampling::default() }, None),
    ];
    for batch in BATCHES {
        let mut sessions: Vec<Session> = (0..batch).map(|_| engine.fork(&first).expect("a fork")).collect();
        let mut times = vec![Vec::new(); ways.len()];
        for turn in 0..=TIMES {
            for (way, times) in ways.iter().zip(&mut times) {
                let seconds = steps(&mut engine, &mut sessions, &tokens, (way.1, way.2));
                times.extend((turn > 0).then_some(seconds));
            }
        }
        for ((name, ..), mut times) in ways.iter().zip(times) {
            times.sort_by(f64::total_cmp);
            let [least, median] = [times[0], times[TIMES / 2]].map(|seconds| 1e3 * seconds);
            println!("{batch} sequences, {name:20} {median:.4} ms a step, least {least:.4}");
        }
        sessions.into_iter().for_each(|session| engine.close(session));
    }
    ExitCode::SUCCESS
}

/// Seconds of a step, of some that go on with tokens of their own, not those that were chosen.
fn steps(
    engine: &mut Engine,
    sessions: &mut [Session],
    tokens: &[u32],
    (sampling, needed): (Sampling, Option<Needed>),
) -> f64 {
    let count = sessions.len();
    let mut samplers: Vec<Sampler> = (0..count).map(|_| Sampler::new(sampling).expect("settings")).collect();
    let mut logits = vec![Logits::default(); count];
    let began = Instant::now();
    for step in 0..STEPS {
        let all = sessions.iter_mut().zip(&mut logits).zip(&samplers).enumerate();
        let mut steps: Vec<Step> = all
            .map(|(index, ((session, logits), sampler))| {
                let token = tokens[(step + 31 * index) % tokens.len()];
                Step { session, token, needed: needed.unwrap_or_else(|| sampler.needed()), logits }
            })
            .collect();
        engine.step_all(&mut steps).expect("a step");
        for (sampler, logits) in samplers.iter_mut().zip(&logits) {
            sampler.choose_from(logits);
        }
    }
    began.elapsed().as_secs_f64() / STEPS as f64
}
