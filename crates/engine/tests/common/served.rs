//! A scheduler over the small trained model, and requests to it.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use engine::{
    Cancel, Engine, Error, Event, GenerationOptions, Job, Options, Report, Reuse, Sampling, Scheduler,
    SchedulerOptions, SessionOptions, Sessions, Store,
};
use model::{ExpertSource, KvType, MappedExperts, Model};
use text::Tokenizer;

/// Room for everything these tests keep.
pub const AMPLE: u64 = 512 << 20;

/// Context of a session.
pub const CONTEXT: usize = 5120;

/// An engine with room for `parallel` sessions and the checkpoints of `options`.
pub fn engine_for(model: &Arc<Model>, options: &SessionOptions, parallel: usize) -> Engine {
    let positions = parallel * CONTEXT + Sessions::positions(&model.spec, options);
    engine_with(model, positions, Box::new(MappedExperts::new(model)))
}

/// An engine with room for so many positions and experts from `source`.
pub fn engine_with(model: &Arc<Model>, positions: usize, source: Box<dyn ExpertSource + Send>) -> Engine {
    let backend = super::backend("cpu-int8", model, positions);
    let options = Options { chunk: 512, context: CONTEXT };
    Engine::new(model.clone(), backend, source, options)
}

/// A scheduler whose checkpoints may take `budget` bytes.
pub fn scheduler(budget: u64, options: SchedulerOptions) -> Scheduler {
    scheduler_with(budget, options, |_| None)
}

/// As [`scheduler`], with a store for the engine.
pub fn scheduler_with(
    budget: u64,
    options: SchedulerOptions,
    store: impl FnOnce(&mut Engine) -> Option<Store>,
) -> Scheduler {
    let model = super::pocket();
    let tokenizer = Tokenizer::new(model::vocabulary(model.gguf.metadata()).unwrap()).unwrap();
    let kept = SessionOptions { budget, spacing: 1024, kv: KvType::F32 };
    let mut engine = engine_for(&model, &kept, options.parallel);
    let mut sessions = Sessions::new(&engine, kept);
    if let Some(store) = store(&mut engine) {
        sessions = sessions.with_store(store);
    }
    Scheduler::new(engine, sessions, Arc::new(tokenizer), options)
}

/// One turn reads one step of a prompt: everything is deterministic.
pub fn step_by_step(parallel: usize) -> SchedulerOptions {
    SchedulerOptions { parallel, queue: 4, slice: Duration::ZERO }
}

/// What a request has heard so far.
#[derive(Clone, Default)]
pub struct Heard(Arc<Mutex<Log>>);

/// Events, sorted.
#[derive(Default)]
pub struct Log {
    /// How the prompt was found.
    pub reuse: Option<Reuse>,
    /// Prompt tokens there.
    pub progress: usize,
    /// Ids and the bits of their probabilities.
    pub answer: Vec<(u32, u32)>,
    /// The end.
    pub report: Option<Report>,
    /// Another end.
    pub error: Option<Error>,
}

impl Heard {
    /// Looks at the log.
    pub fn log<T>(&self, look: impl FnOnce(&Log) -> T) -> T {
        look(&self.0.lock().unwrap())
    }

    /// Whether the request has ended.
    pub fn ended(&self) -> bool {
        self.log(|log| log.report.is_some() || log.error.is_some())
    }

    /// Tokens read for this request.
    pub fn read(&self) -> usize {
        self.log(|log| log.reuse.unwrap().read)
    }

    /// Ids of the answer.
    pub fn ids(&self) -> Vec<u32> {
        self.log(|log| log.answer.iter().map(|(id, _)| *id).collect())
    }
}

/// A greedy request for exactly `max_tokens` tokens.
pub fn job(tokens: &[u32], boundaries: &[usize], max_tokens: usize) -> (Job, Heard, Cancel) {
    let (heard, cancel) = (Heard::default(), Cancel::new());
    let log = heard.clone();
    let options = GenerationOptions {
        sampling: Sampling::greedy(),
        max_tokens,
        ignore_eos: true,
        logprobs: Some(0),
        ..GenerationOptions::default()
    };
    let listener = Box::new(move |event| {
        let mut log = log.0.lock().unwrap();
        assert!(log.report.is_none() && log.error.is_none(), "nothing follows the end");
        match event {
            Event::Started(reuse) => log.reuse = Some(reuse),
            Event::Progress { done, .. } => log.progress = done,
            Event::Token(token) => log.answer.push((token.id, token.logprobs.unwrap().chosen.to_bits())),
            Event::Finished(report) => log.report = Some(report),
            Event::Failed(error) => log.error = Some(error),
        }
    });
    let boundaries = boundaries.to_vec();
    (Job { tokens: tokens.to_vec(), boundaries, options, cancel: cancel.clone(), listener }, heard, cancel)
}

/// Runs until nothing is left to do.
pub fn settle(scheduler: &mut Scheduler) {
    while !scheduler.is_idle() {
        scheduler.turn();
    }
}

/// One request, alone.
pub fn ask(scheduler: &mut Scheduler, tokens: &[u32], boundaries: &[usize], max_tokens: usize) -> Heard {
    let (job, heard, _) = job(tokens, boundaries, max_tokens);
    scheduler.submit(job).unwrap();
    settle(scheduler);
    assert!(
        heard.log(|log| log.error.is_none()),
        "{:?}",
        heard.log(|log| log.error.as_ref().map(|e| e.to_string()))
    );
    heard
}

/// Made-up text: `len` tokens that depend on `seed`.
pub fn words(seed: u64, len: usize) -> Vec<u32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as u32 % 4000 + 8
    };
    (0..len).map(|_| next()).collect()
}
