//! Agreement with Hugging Face Transformers on the tiny model of `fixtures/`.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use forge::{Control, ConvertOptions, Layout, convert};
use model::{Intermediate, KvType, Limits, MappedExperts, Matrix, Model, Pass};
use redlite_reference::{DeltaForm, Options, Reference};
use serde_json::Value;
use testkit::{Recorder, run_pass};

/// Transformers computes in float32; its distance from its own float64 run is up to 2e-4.
const TOLERANCE: f64 = 5e-4;

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures")
}

fn reference_values(folder: &str) -> Value {
    let text = std::fs::read_to_string(fixtures().join(folder).join("reference.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
}

fn tokens(sequence: &Value) -> Vec<u32> {
    numbers(&sequence["tokens"]).into_iter().map(|x| x as u32).collect()
}

/// The tiny model, converted with the configuration in another folder. All its weights are exact in BF16,
/// which is what conversion makes of matrices.
fn open(config: &str, layout: Layout) -> Arc<Model> {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let name = format!("redlite-fixture-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
    let folder = std::env::temp_dir().join(name);
    std::fs::create_dir(&folder).unwrap();
    for file in ["model.safetensors", "tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(fixtures().join("tiny").join(file), folder.join(file)).unwrap();
    }
    std::fs::copy(fixtures().join(config).join("config.json"), folder.join("config.json")).unwrap();
    let path = folder.join("tiny.gguf");
    let options = ConvertOptions { layout, threads: 1, ..ConvertOptions::default() };
    convert(&folder, &path, &options, &mut |_| Control::Continue).unwrap();
    let model = Model::open(&path).unwrap();
    // It stays mapped.
    std::fs::remove_dir_all(&folder).unwrap();
    Arc::new(model)
}

struct Bench {
    model: Arc<Model>,
    backend: Reference,
}

impl Bench {
    fn new(model: Arc<Model>, delta: DeltaForm) -> Bench {
        let limits = Limits { pass_rows: 256, positions: 4096, kv: KvType::F32 };
        let options = Options { delta, ..Options::default() };
        Bench { backend: Reference::new(model.clone(), limits, options).unwrap(), model }
    }

    /// Logits of every token, and every intermediate.
    fn run(&mut self, tokens: &[u32]) -> (Matrix, Recorder) {
        let sequence = model::Backend::create(&mut self.backend);
        let mut pass = Pass::new();
        pass.push(sequence, 0, tokens);
        pass.logits = (0..tokens.len()).collect();
        let mut recorder = Recorder::default();
        let mut experts = MappedExperts::new(&self.model);
        let logits = run_pass(&mut self.backend, &self.model.spec, &pass, &mut experts, &mut recorder);
        (logits, recorder)
    }
}

fn largest_difference(got: &[f32], expected: &[f64]) -> f64 {
    assert_eq!(got.len(), expected.len());
    got.iter().zip(expected).map(|(&a, b)| (f64::from(a) - b).abs()).fold(0.0, f64::max)
}

/// The best token and how far it is ahead.
fn best(row: &[f32]) -> (usize, f32) {
    let top = (0..row.len()).rev().max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap();
    let second = row.iter().enumerate().filter(|(i, _)| *i != top).map(|(_, &x)| x).fold(f32::MIN, f32::max);
    (top, row[top] - second)
}

/// Last logits, every argmax and margin, and the mean loss of every sequence.
fn check_sequences(bench: &mut Bench, values: &Value) {
    for sequence in values["sequences"].as_array().unwrap() {
        let tokens = tokens(sequence);
        let (logits, _) = bench.run(&tokens);
        let error =
            largest_difference(logits.row(tokens.len() - 1), &numbers(&sequence["last_logits_float64"]));
        assert!(error <= TOLERANCE, "{} tokens: last logits differ by {error:e}", tokens.len());
        let expected = numbers(&sequence["argmax"]).into_iter().zip(numbers(&sequence["margin"]));
        for (row, (token, margin)) in expected.enumerate() {
            let (top, ahead) = best(logits.row(row));
            assert!(top == token as usize || margin < 2.0 * TOLERANCE, "argmax of row {row}");
            assert!((f64::from(ahead) - margin).abs() <= 2.0 * TOLERANCE, "margin of row {row}");
        }
        if let Some(expected) = sequence["nll_mean"].as_f64() {
            let nll = |row: usize| {
                let sum: f64 = logits.row(row).iter().map(|&x| f64::from(x).exp()).sum();
                sum.ln() - f64::from(logits.row(row)[tokens[row + 1] as usize])
            };
            let mean = (0..tokens.len() - 1).map(nll).sum::<f64>() / (tokens.len() - 1) as f64;
            assert!((mean - expected).abs() < TOLERANCE, "mean loss {mean}, expected {expected}");
        }
    }
}

#[test]
fn logits_agree_in_both_forms_and_layouts() {
    let values = reference_values("tiny");
    for (layout, delta) in [(Layout::Split, DeltaForm::Chunked), (Layout::Legacy, DeltaForm::Sequential)] {
        check_sequences(&mut Bench::new(open("tiny", layout), delta), &values);
    }
    let tied = open("tiny-tied", Layout::Split);
    assert!(tied.tied);
    check_sequences(&mut Bench::new(tied, DeltaForm::Chunked), &reference_values("tiny-tied"));
}

#[test]
fn router_chooses_the_same_experts() {
    let values = reference_values("tiny");
    let router = &values["router"];
    let sequence = &values["sequences"][router["sequence"].as_u64().unwrap() as usize];
    let mut bench = Bench::new(open("tiny", Layout::Split), DeltaForm::Chunked);
    let (_, recorder) = bench.run(&tokens(sequence));
    for (layer, expected) in router["layers"].as_array().unwrap().iter().enumerate() {
        let ids = recorder.get(Intermediate::RouteIds, layer);
        let weights = recorder.get(Intermediate::RouteWeights, layer);
        for row in 0..ids.rows {
            let experts = numbers(&expected["experts"][row]);
            assert_eq!(largest_difference(ids.row(row), &experts), 0.0, "layer {layer}, row {row}");
            let all = numbers(&expected["probabilities"][row]);
            let chosen: Vec<f64> = experts.iter().map(|&expert| all[expert as usize]).collect();
            let sum: f64 = chosen.iter().sum();
            let renormalised: Vec<f64> = chosen.iter().map(|p| p / sum).collect();
            let error = largest_difference(weights.row(row), &renormalised);
            assert!(error < 1e-4, "layer {layer}, row {row}: weights differ by {error:e}");
        }
    }
}

#[test]
fn every_layer_agrees() {
    let values = reference_values("tiny");
    let layers = &values["layers"];
    let tokens = tokens(&values["sequences"][layers["sequence"].as_u64().unwrap() as usize]);
    let mut bench = Bench::new(open("tiny", Layout::Split), DeltaForm::Chunked);
    let (_, recorder) = bench.run(&tokens);
    for (layer, expected) in layers["layers"].as_array().unwrap().iter().enumerate() {
        let hidden = recorder.get(Intermediate::ExpertsHidden, layer);
        let error = largest_difference(hidden.row(tokens.len() - 1), &numbers(&expected["hidden"]));
        assert!(error <= TOLERANCE, "layer {layer}: hidden rows differ by {error:e}");
    }
}

#[test]
fn final_hidden_states_agree() {
    let values = reference_values("tiny");
    let expected = &values["final_norm"];
    let tokens = tokens(&values["sequences"][expected["sequence"].as_u64().unwrap() as usize]);
    let Bench { model, mut backend } = Bench::new(open("tiny", Layout::Split), DeltaForm::Chunked);
    let backend: &mut dyn model::Backend = &mut backend;
    let mut pass = Pass::new();
    pass.push(backend.create(), 0, &tokens);
    pass.hidden = (0..tokens.len()).collect();
    let mut driver = model::Driver::begin(backend, &model.spec, &pass).unwrap();
    driver.finish(backend, &mut MappedExperts::new(&model), &mut model::Quiet).unwrap();
    let hidden = backend.hidden(driver.pass()).unwrap();
    for (row, expected) in expected["hidden"].as_array().unwrap().iter().enumerate() {
        let error = largest_difference(hidden.row(row), &numbers(expected));
        assert!(error <= TOLERANCE, "row {row}: {error:e}");
    }
}

#[test]
fn greedy_continuations_agree() {
    let mut bench = Bench::new(open("tiny", Layout::Split), DeltaForm::Chunked);
    for run in reference_values("tiny")["greedy"].as_array().unwrap() {
        assert!(run["min_margin"].as_f64().unwrap() > 2.0 * TOLERANCE);
        let mut next: Vec<u32> = numbers(&run["prompt_ids"]).into_iter().map(|x| x as u32).collect();
        let sequence = model::Backend::create(&mut bench.backend);
        for expected in numbers(&run["next_ids"]) {
            let prompt: (_, &[u32]) = (sequence, &next);
            let logits = testkit::ingest(&mut bench.backend, &bench.model, &[prompt], 64).remove(0);
            let (token, _) = best(logits.row(logits.rows - 1));
            assert_eq!(token, expected as usize);
            next = vec![token as u32];
        }
    }
}
