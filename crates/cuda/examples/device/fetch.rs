//! Decoding with most experts in pinned memory of the host: how fast, and where experts were found.

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use model::{Backend, Driver, ExpertSource, KvType, Limits, MappedExperts, Model, Pass, Quiet, SequenceId};
use redlite_cuda::{Cuda, Fetching, Options, PinnedExperts};
use testkit::Random;

/// Tokens that fill the slots, and tokens of a measurement, of which there are some.
const WARM: usize = 1024;
const STEPS: usize = 256;
const TIMES: usize = 5;

/// Prints tok/s of decoding with so many slots a layer, or with all experts in the GPU's memory.
pub fn run(path: &Path, slots: &[&str]) -> ExitCode {
    let model = Arc::new(Model::open(path).expect("a model"));
    let home = Arc::new(PinnedExperts::read(&model, 0).expect("pinned memory"));
    for slots in slots {
        Fetched::new(&model, slots.parse().ok().map(|slots| (home.clone(), slots))).measure();
    }
    ExitCode::SUCCESS
}

struct Fetched {
    model: Arc<Model>,
    cuda: Cuda,
    experts: Box<dyn ExpertSource>,
    name: String,
    /// Seconds of the token that took longest.
    longest: f64,
}

impl Fetched {
    /// With so many slots a layer, or all experts in the GPU's memory.
    fn new(model: &Arc<Model>, slots: Option<(Arc<PinnedExperts>, usize)>) -> Fetched {
        let weights = model.load(&mut |_, _| {}).expect("weights");
        let limits = Limits { pass_rows: 8, positions: 8192, kv: KvType::F16 };
        let options = Options { slots: slots.as_ref().map(|_| 0), ..Options::default() };
        let mut cuda = Cuda::new(model.clone(), &weights, limits, options).expect("a GPU");
        let mapped = MappedExperts::new(model).in_whole_layers();
        let Some((home, slots)) = slots else {
            return Fetched {
                model: model.clone(),
                cuda,
                experts: Box::new(mapped),
                name: "all".to_string(),
                longest: 0.0,
            };
        };
        let bytes = cuda.fetch_bytes(&home, slots * model.experts.len());
        let rows = cuda.fetch_from(home, bytes).expect("slots");
        let experts = Box::new(Fetching::new(model, mapped, rows));
        Fetched { model: model.clone(), cuda, experts, name: slots.to_string(), longest: 0.0 }
    }

    /// Seconds a token.
    fn steps(&mut self, id: SequenceId, tokens: &[u32]) -> f64 {
        let start = Instant::now();
        for token in tokens {
            let begun = Instant::now();
            let mut pass = Pass::new();
            let at = self.cuda.position(id).expect("a sequence");
            let rows = pass.push(id, at, &[*token]);
            pass.logits.push(rows.end - 1);
            let mut driver = Driver::begin(&mut self.cuda, &self.model.spec, &pass).expect("begin");
            driver.finish(&mut self.cuda, &mut *self.experts, &mut Quiet).expect("every stage");
            self.cuda.logits(driver.pass()).expect("logits");
            self.cuda.commit(driver.pass()).expect("commit");
            self.longest = self.longest.max(begun.elapsed().as_secs_f64());
        }
        start.elapsed().as_secs_f64() / tokens.len() as f64
    }

    fn measure(&mut self) {
        let id = self.cuda.create();
        let tokens = Random::new(1, "tokens").tokens(WARM + TIMES * STEPS, self.model.spec.vocab);
        self.steps(id, &tokens[..WARM]);
        self.longest = 0.0;
        let before = self.cuda.fetched();
        let mut seconds: Vec<f64> = tokens[WARM..].chunks(STEPS).map(|part| self.steps(id, part)).collect();
        let counts = self.cuda.fetched().zip(before);
        self.cuda.free(id);
        seconds.sort_by(f64::total_cmp);
        let ms = 1e3 * seconds[TIMES / 2];
        print!(
            "{:>4} slots a layer: {ms:.4} ms, {:.1} tok/s, longest {:.1} ms",
            self.name,
            1e3 / ms,
            1e3 * self.longest
        );
        if let Some((after, before)) = counts {
            let each = |i: usize| (after[i] - before[i]) as f64 / (TIMES * STEPS) as f64;
            print!("; a token finds {:.1}, misses {:.1}", each(0), each(1));
        }
        println!();
    }
}
