//! The small trained model against Hugging Face Transformers, which ran on the decoded weights of the same
//! file (`fixtures/pocket/reference.json`).

mod common;

use common::{backend, engine, pocket, repository};
use engine::parity::{Side, parity};
use engine::{
    Cancel, Engine, Flow, Generation, GenerationOptions, Ingested, LogitRows, Options, Request, Sampling,
};
use model::{Intermediate, MappedExperts, Observer};
use serde_json::Value;
use text::Tokenizer;

/// Transformers computes in f32 too; the last bits differ.
const TOLERANCE: f64 = 2e-3;

fn reference_values() -> Value {
    let text = std::fs::read_to_string(repository("fixtures/pocket/reference.json")).unwrap();
    let values: Value = serde_json::from_str(&text).unwrap();
    let size = std::fs::metadata(repository("models/pocket.gguf")).unwrap().len();
    assert_eq!(values["file"]["bytes"], size, "the reference was made from another file");
    values
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
}

/// Remembers the experts of the last row of every layer.
#[derive(Default)]
struct Experts(Vec<Vec<u32>>);

impl Observer for Experts {
    fn after(
        &mut self,
        step: &model::Step,
        _: std::time::Duration,
        backend: &mut dyn model::Backend,
        pass: model::PassId,
    ) -> model::Result<()> {
        if step.stage == model::Stage::Route {
            let ids = backend.read(pass, Intermediate::RouteIds)?.unwrap();
            self.0.truncate(step.layer);
            self.0.push(ids.row(ids.rows - 1).iter().map(|&id| id as u32).collect());
        }
        Ok(())
    }
}

fn check_sequences(name: &str) {
    let mut engine = engine(name, &pocket(), Options { chunk: 256, context: 1024 });
    for sequence in reference_values()["sequences"].as_array().unwrap() {
        let tokens = ids(&sequence["tokens"]);
        let (argmax, margin) = (ids(&sequence["argmax"]), numbers(&sequence["margin"]));
        let mut session = engine.open();
        let mut experts = Experts::default();
        let mut check = |row: usize, logits: &[f32]| {
            let best = engine::compare::argmax(logits) as u32;
            assert!(best == argmax[row] || margin[row] < TOLERANCE, "{name}: argmax at {row}");
        };
        let mut request = Request {
            logits: LogitRows::Range(0..tokens.len()),
            on_logits: Some(&mut check),
            observer: Some(&mut experts),
            ..Request::default()
        };
        let last = engine.ingest(&mut session, &tokens, &mut request).unwrap().logits;
        engine.close(session);
        for (id, logit) in
            ids(&sequence["last_top20_ids"]).iter().zip(numbers(&sequence["last_top20_logits"]))
        {
            let error = (f64::from(last[*id as usize]) - logit).abs();
            assert!(error <= TOLERANCE, "{name}: {} tokens, logit of {id} is off by {error}", tokens.len());
        }
        let expected = sequence["last_top4_experts"].as_array().unwrap();
        assert_eq!(experts.0.len(), expected.len());
        for (layer, (found, expected)) in experts.0.iter().zip(expected).enumerate() {
            assert_eq!(*found, ids(expected), "{name}: experts of layer {layer}");
        }
    }
}

#[test]
fn the_reference_agrees_with_transformers() {
    check_sequences("reference");
}

#[test]
fn the_cpu_backend_agrees_with_transformers() {
    check_sequences("cpu");
}

/// Greedy text equals that of Transformers as long as its margins exceed the error of the arithmetic.
#[test]
fn greedy_text_agrees_with_transformers() {
    let model = pocket();
    let tokenizer = Tokenizer::new(model::vocabulary(model.gguf.metadata()).unwrap()).unwrap();
    let mut engine = engine("cpu", &model, Options { chunk: 2048, context: 256 });
    let mut compared = 0;
    for case in reference_values()["greedy"].as_array().unwrap() {
        assert!(case["min_margin"].as_f64().unwrap() > TOLERANCE);
        let prompt = ids(&case["prompt_ids"]);
        let text = case["prompt"].as_str().unwrap();
        assert_eq!(tokenizer.encode_raw_with_specials(text), prompt, "the same tokens for {text:?}");
        let mut session = engine.open();
        let logits = engine.ingest(&mut session, &prompt, &mut Request::default()).unwrap().logits;
        let expected = ids(&case["next_ids"]);
        let options = GenerationOptions {
            sampling: Sampling::greedy(),
            max_tokens: expected.len(),
            ..GenerationOptions::default()
        };
        let mut generation = Generation::new(&tokenizer, logits, &options).unwrap();
        let mut found = Vec::new();
        while let Some(token) =
            generation.next(&mut engine, &mut session, &tokenizer, &Cancel::new()).unwrap()
        {
            found.push(token.id);
        }
        assert_eq!(found, expected, "after {text:?}");
        compared += found.len();
        engine.close(session);
    }
    assert!(compared > 100);
}

fn fixture_tokens() -> Vec<u32> {
    ids(&reference_values()["sequences"][2]["tokens"])
}

#[test]
fn the_cpu_backend_agrees_with_the_reference_stage_by_stage() {
    let model = pocket();
    let tokens = fixture_tokens();
    let (mut a, mut b) = (backend("reference", &model, 1024), backend("cpu", &model, 1024));
    let (mut experts, mut others) = (MappedExperts::new(&model), MappedExperts::new(&model));
    let mut a = Side { backend: &mut *a, experts: &mut experts };
    let mut b = Side { backend: &mut *b, experts: &mut others };
    let result = parity(&model.spec, &mut a, &mut b, &tokens, 256, &Cancel::new(), &mut |_, _| ()).unwrap();
    assert_eq!(result.routes, (0, tokens.len() * model.spec.layers.len()));
    assert_eq!((result.logits.positions, result.logits.same_top), (tokens.len(), tokens.len()));
    assert!(result.logits.kl_mean() < 1e-8, "{}", result.logits.kl_mean());
    let count = result.stages.len();
    assert!(count > 8 * 8, "{count} intermediates were compared");
    for ((stage, layer, what), difference) in &result.stages {
        let error = difference.relative_rms();
        assert!(error < 1e-4, "{stage} {layer} {what}: {error}");
    }
}

fn all_logits(engine: &mut Engine, tokens: &[u32]) -> Vec<f32> {
    let mut session = engine.open();
    let mut all = Vec::new();
    let mut collect = |_: usize, row: &[f32]| all.extend_from_slice(row);
    let mut request = Request {
        logits: LogitRows::Range(0..tokens.len()),
        on_logits: Some(&mut collect),
        ..Request::default()
    };
    engine.ingest(&mut session, tokens, &mut request).unwrap();
    engine.close(session);
    all
}

/// Bits do not depend on how a prompt was cut, on real routing and real activations.
#[test]
fn logits_do_not_depend_on_the_chunk() {
    let model = pocket();
    let tokens = fixture_tokens();
    for name in ["cpu", "cpu-int8"] {
        let mut base: Option<Vec<f32>> = None;
        for chunk in [64, 128, 256, 2048] {
            let mut engine = engine(name, &model, Options { chunk, context: 1024 });
            let logits = all_logits(&mut engine, &tokens[..300]);
            let base = base.get_or_insert_with(|| logits.clone());
            let same = base.iter().zip(&logits).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(same, "{name}, chunk {chunk}");
        }
    }
}

/// Rounding activations to eight bits costs what `docs/architecture.md` says.
#[test]
fn rounded_activations_hardly_move_the_predictions() {
    let model = pocket();
    let tokens = fixture_tokens();
    let (mut a, mut b) = (backend("cpu", &model, 1024), backend("cpu-int8", &model, 1024));
    let (mut experts, mut others) = (MappedExperts::new(&model), MappedExperts::new(&model));
    let mut a = Side { backend: &mut *a, experts: &mut experts };
    let mut b = Side { backend: &mut *b, experts: &mut others };
    let result = parity(&model.spec, &mut a, &mut b, &tokens, 256, &Cancel::new(), &mut |_, _| ()).unwrap();
    let logits = &result.logits;
    let best = cpu::Variant::ALL.into_iter().find(|variant| variant.is_available());
    let rounds = best.is_some_and(cpu::Variant::prefers_integers);
    assert_eq!(logits.kl_mean() > 1e-7, rounds, "activations are rounded where that is faster");
    assert!(logits.kl_mean() < 1e-3, "{}", logits.kl_mean());
    assert!(logits.top_share() > 0.98, "{}", logits.top_share());
}

#[test]
fn chunks_that_flow_are_cut_by_cost_and_change_no_bits() {
    let model = pocket();
    let options = Options { chunk: 128, context: 1024 };
    let tokens: Vec<u32> = (0..700).map(|i| (i * 37 + 11) % 1000).collect();
    let read = |flow: Option<Flow>| {
        let mut reader = engine("cpu", &model, options).flowing(flow);
        let mut session = reader.open();
        let mut all = Vec::new();
        // Also behind others, where rows cost more.
        for part in [&tokens[..300], &tokens[300..]] {
            all.push(reader.ingest(&mut session, part, &mut Request::default()).unwrap());
        }
        all
    };
    let alike = read(None);
    let flow = Flow { devices: 3, pass_cost: 10, twice: 200 };
    let flowing = read(Some(flow));
    let counts = |all: &[Ingested]| -> Vec<usize> { all.iter().map(|read| read.chunks).collect() };
    assert_eq!(counts(&alike), [3, 4]);
    let cuts = |start, len| flow.chunks(start, len, 128, 1).len();
    assert_eq!(counts(&flowing), [cuts(0, 300), cuts(300, 400)]);
    assert!(counts(&flowing)[0] > 3, "passes are cheap beside rows that are far back");
    for (flowing, alike) in flowing.iter().zip(&alike) {
        assert_eq!(flowing.logits, alike.logits);
    }
}
