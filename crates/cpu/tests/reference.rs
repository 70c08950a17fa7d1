//! Every stage against the readable backend, at every length, in every variant this machine runs.

use std::sync::Arc;

use model::state::KvType;
use model::{Backend, Driver, Intermediate, Limits, MappedExperts, Matrix, Model, Pass};
use quant::Type;
use redlite_cpu::{Cpu, Options, Variant};
use reference::Reference;
use testkit::{Decay, Layout, Random, Recorder, TinyModel, TinyOptions, ingest, relative_rms, run_pass};

const LIMITS: Limits = Limits { pass_rows: 2048, positions: 4096, kv: KvType::F32 };

fn cpu(model: &Arc<Model>, variant: Option<Variant>) -> Cpu {
    let options = Options { threads: Some(3), variant, exact: true, ..Options::default() };
    Cpu::new(model.clone(), model.load(&mut |_, _| {}).unwrap(), LIMITS, options).unwrap()
}

fn reference(model: &Arc<Model>) -> Reference {
    Reference::new(model.clone(), LIMITS, reference::Options::default()).unwrap()
}

fn prompt(len: usize) -> Vec<u32> {
    Random::new(3, "prompt").tokens(len, TinyOptions::VOCAB)
}

/// Runs a prompt, after a first part of `before` tokens, and keeps every intermediate.
fn record(backend: &mut dyn Backend, model: &Model, tokens: &[u32], before: usize) -> (Recorder, Matrix) {
    let sequence = backend.create();
    if before > 0 {
        ingest(backend, model, &[(sequence, &tokens[..before])], 2048);
    }
    let mut pass = Pass::new();
    pass.push(sequence, before, &tokens[before..]);
    pass.logits = (0..pass.rows()).collect();
    let mut recorder = Recorder::default();
    let logits = run_pass(backend, &model.spec, &pass, &mut MappedExperts::new(model), &mut recorder);
    backend.free(sequence);
    (recorder, logits)
}

/// Largest relative error allowed of any intermediate: single precision, through the layers before it.
const TOLERANCE: f64 = 2e-5;

fn compare(model: &Arc<Model>, variant: Option<Variant>, tokens: &[u32], before: usize) {
    let (found, logits) = record(&mut cpu(model, variant), model, tokens, before);
    let (expected, expected_logits) = record(&mut reference(model), model, tokens, before);
    let what = format!("{} tokens after {before}", tokens.len() - before);
    assert_eq!(found.values.len(), expected.values.len(), "{what}: intermediates kept");
    for ((step, name, found), (other, same, expected)) in found.values.iter().zip(&expected.values) {
        assert_eq!((step, name), (other, same));
        let error = relative_rms(&found.data, &expected.data);
        let limit = if *name == Intermediate::RouteIds { 0.0 } else { TOLERANCE };
        assert!(error <= limit, "{what}: `{name}` of layer {} is off by {error:e}", step.layer);
    }
    assert!(relative_rms(&logits.data, &expected_logits.data) <= TOLERANCE, "{what}");
}

#[test]
fn stages_agree_at_every_length() {
    let tiny = TinyModel::new(TinyOptions::default());
    for len in [1, 2, 63, 64, 65, 127, 128, 129, 300] {
        compare(&tiny.model, None, &prompt(len), 0);
    }
    // Continued off the grid, by one row and by several.
    for (len, before) in [(101, 100), (67, 65), (300, 100)] {
        compare(&tiny.model, None, &prompt(len), before);
    }
}

#[test]
fn stages_agree_in_every_variant() {
    let tiny = TinyModel::new(TinyOptions::default());
    for variant in Variant::ALL.into_iter().filter(|v| v.is_available()) {
        compare(&tiny.model, Some(variant), &prompt(129), 0);
        compare(&tiny.model, Some(variant), &prompt(66), 65);
    }
}

#[test]
fn stages_agree_for_every_layout() {
    let base = TinyOptions::default();
    let others = [
        TinyOptions { layout: Layout::Legacy, tied: true, ..base },
        TinyOptions { fused_experts: true, mtp: true, ..base },
        TinyOptions { decay: Decay::Strong, ..base },
        TinyOptions { head: 20, hidden: 72, width: 44, ..base },
        TinyOptions::quantised(Type::Q6_K, Type::IQ2_XS),
    ];
    for options in others {
        compare(&TinyModel::new(options).model, None, &prompt(70), 0);
    }
}

#[test]
fn states_agree_and_decode_follows_ingestion() {
    let tiny = TinyModel::new(TinyOptions::default());
    let model = &tiny.model;
    let tokens = prompt(200);
    let run = |backend: &mut dyn Backend, chunk: usize| {
        let sequence = backend.create();
        let logits = ingest(backend, model, &[(sequence, &tokens)], chunk).remove(0);
        (logits, backend.snapshot(sequence).unwrap())
    };
    let (expected, expected_state) = run(&mut reference(model), 2048);
    let (block, block_state) = run(&mut cpu(model, None), 2048);
    let (single, single_state) = run(&mut cpu(model, None), 1);
    for (logits, state) in [(&block, &block_state), (&single, &single_state)] {
        assert!(relative_rms(&logits.data, &expected.data) < TOLERANCE);
        assert!(relative_rms(&state.recurrent, &expected_state.recurrent) < TOLERANCE);
    }
    assert!(relative_rms(&single_state.recurrent, &block_state.recurrent) < TOLERANCE);
}

#[test]
fn hidden_states_and_logits_are_those_of_the_rows_that_want_them() {
    let tiny = TinyModel::new(TinyOptions::default());
    let model = &tiny.model;
    let mut cpu = cpu(model, None);
    let tokens = prompt(40);
    let mut run = |logits: Vec<usize>, hidden: Vec<usize>| {
        let sequence = cpu.create();
        let mut pass = Pass { logits, hidden, ..Pass::new() };
        pass.push(sequence, 0, &tokens);
        let mut driver = Driver::begin(&mut cpu, &model.spec, &pass).unwrap();
        let mut experts = MappedExperts::new(model);
        driver.finish(&mut cpu, &mut experts, &mut model::Quiet).unwrap();
        let out = (cpu.logits(driver.pass()).unwrap().to_matrix(), cpu.hidden(driver.pass()).unwrap());
        cpu.commit(driver.pass()).unwrap();
        out
    };
    let (all, all_hidden) = run((0..40).collect(), (0..40).collect());
    let (some, some_hidden) = run(vec![3, 39], vec![0, 3, 20]);
    assert_eq!((some.row(0), some.row(1)), (all.row(3), all.row(39)));
    assert_eq!(some_hidden.rows, 3);
    for (i, row) in [0, 3, 20].into_iter().enumerate() {
        assert_eq!(some_hidden.row(i), all_hidden.row(row));
    }
}

#[test]
fn misuse_is_refused() {
    let tiny = TinyModel::new(TinyOptions { layers: 1, ..TinyOptions::default() });
    let model = &tiny.model;
    let mut cpu = cpu(model, None);
    let sequence = cpu.create();
    let mut large = Pass::new();
    large.push(sequence, 0, &prompt(2049));
    assert!(cpu.begin(&large).unwrap_err().to_string().contains("2049 rows"));
    let closed = model::PassId(7);
    assert!(cpu.embed(closed, 0..1).unwrap_err().to_string().contains("not open"));
    let mut pass = Pass::new();
    pass.push(sequence, 0, &prompt(3));
    let id = cpu.begin(&pass).unwrap();
    assert!(cpu.embed(id, 0..4).is_err());
    assert!(cpu.logits(id).is_err());
    let elsewhere = model::Slot { arena: 5, gate: 0, up: 0, down: 0 };
    let placed = model::PlacedExpert { expert: 0, slot: elsewhere };
    let wave = model::Wave { experts: [placed].into(), last: true };
    cpu.embed(id, 0..3).unwrap();
    cpu.route(id, 0, 0..3).unwrap();
    assert!(cpu.experts(id, 0, &wave).unwrap_err().to_string().contains("arena 5"));
    let options = Options { threads: Some(0), ..Options::default() };
    let weights = model.load(&mut |_, _| {}).unwrap();
    assert!(Cpu::new(model.clone(), weights, LIMITS, options).is_err());
}
