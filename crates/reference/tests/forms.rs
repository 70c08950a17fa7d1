//! The two forms of the delta rule against each other, and the rounding of activations.

use std::sync::Arc;

use model::{Backend, Intermediate, KvType, LayerKind, Limits, MappedExperts, Model, Pass};
use quant::Type;
use redlite_reference::{DeltaForm, Options, Reference, Rounding};
use testkit::{Random, Recorder, TinyModel, TinyOptions, relative_rms, run_pass};

/// Everything a prompt leaves: the value of each stage, then the final states.
fn run(model: &Arc<Model>, options: Options, length: usize) -> (Recorder, Vec<f32>) {
    let limits = Limits { pass_rows: 256, positions: 256, kv: KvType::F32 };
    let mut backend = Reference::new(model.clone(), limits, options).unwrap();
    let mut pass = Pass::new();
    let sequence = backend.create();
    pass.push(sequence, 0, &Random::new(7, "prompt").tokens(length, TinyOptions::VOCAB));
    pass.logits = (0..length).collect();
    let mut recorder = Recorder::default();
    run_pass(&mut backend, &model.spec, &pass, &mut MappedExperts::new(model), &mut recorder);
    (recorder, backend.snapshot(sequence).unwrap().recurrent.to_vec())
}

#[test]
fn chunked_agrees_with_sequential_at_every_depth() {
    let tiny = TinyModel::new(TinyOptions { layers: 16, ..TinyOptions::default() });
    let spec = &tiny.model.spec;
    for length in [2, 65, 200] {
        let sequential = Options { delta: DeltaForm::Sequential, ..Options::default() };
        let (expected, expected_states) = run(&tiny.model, sequential, length);
        let (got, states) = run(&tiny.model, Options::default(), length);
        for layer in 0..spec.layers.len() {
            let of = |r: &Recorder| r.get(Intermediate::ExpertsHidden, layer).data.clone();
            let error = relative_rms(&of(&got), &of(&expected));
            assert!(error <= 1e-5, "{length} tokens, hidden rows of layer {layer}: {error:e}");
        }
        for layer in (0..spec.layers.len()).filter(|&layer| spec.layers[layer] == LayerKind::Delta) {
            let len = states.len() / spec.delta_layers();
            let part = spec.ordinal(layer) * len..(spec.ordinal(layer) + 1) * len;
            let error = relative_rms(&states[part.clone()], &expected_states[part]);
            assert!(error <= 1e-5, "{length} tokens, state of layer {layer}: {error:e}");
        }
    }
}

#[test]
fn rounding_concerns_inputs_of_quantised_layers_alone() {
    let rounded = Options { rounding: Rounding::LlamaCpp, ..Options::default() };
    let exact = TinyModel::new(TinyOptions::default());
    let logits = |model, options| run(model, options, 5).0.get(Intermediate::Logits, 5).data.clone();
    assert_eq!(logits(&exact.model, rounded), logits(&exact.model, Options::default()));

    // Eight bits are off by 1 / (127 · sqrt(12)) of the largest number of a block, about 3 deviations.
    let tiny = TinyModel::new(TinyOptions { dense: Type::Q8_0, ..TinyOptions::default() });
    let (rounded, exact) = (run(&tiny.model, rounded, 5).0, run(&tiny.model, Options::default(), 5).0);
    for (what, smallest, largest) in
        [(Intermediate::DeltaQkv, 2e-3, 2e-2), (Intermediate::Embedded, 0.0, 0.0)]
    {
        let error = relative_rms(&rounded.get(what, 0).data, &exact.get(what, 0).data);
        assert!((smallest..=largest).contains(&error), "{what}: {error:e}");
    }
}
