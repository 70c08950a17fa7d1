//! Promise 1: the bits of a prompt's logits do not depend on threads, chunks, batch mates or waves; nor are
//! they touched by forks, snapshots and aborted passes.

use std::sync::Arc;

use model::state::KvType;
use model::{
    Backend, Driver, Limits, MappedExperts, Matrix, Model, Pass, Quiet, SequenceId, SnapshotRequest,
};
use quant::Type;
use redlite_cpu::{Cpu, Options, Variant};
use testkit::{Random, TinyModel, TinyOptions, Waves, ingest, relative_rms, run_pass};

const LENGTHS: [usize; 11] = [1, 2, 63, 64, 65, 127, 128, 129, 700, 1000, 2049];

fn backend(model: &Arc<Model>, options: Options) -> Cpu {
    let weights = model.load(&mut |_, _| {}).unwrap();
    let limits = Limits { pass_rows: 4 * 2049, positions: 4 * 4096, kv: KvType::F16 };
    Cpu::new(model.clone(), weights, limits, options).unwrap()
}

fn with_threads(model: &Arc<Model>, threads: usize) -> Cpu {
    backend(model, Options { threads: Some(threads), ..Options::default() })
}

fn prompt(len: usize, seed: u64) -> Vec<u32> {
    Random::new(seed, "prompt").tokens(len, TinyOptions::VOCAB)
}

/// Logits of a prompt in a fresh sequence.
fn logits(cpu: &mut Cpu, model: &Model, tokens: &[u32], chunk: usize) -> Matrix {
    let sequence = cpu.create();
    let out = ingest(cpu, model, &[(sequence, tokens)], chunk).remove(0);
    cpu.free(sequence);
    out
}

fn assert_same(a: &Matrix, b: &Matrix, what: &str) {
    assert_eq!((a.rows, a.cols), (b.rows, b.cols), "{what}");
    let different = a.data.iter().zip(&b.data).position(|(a, b)| a.to_bits() != b.to_bits());
    assert!(a.data.iter().all(|x| x.is_finite()), "{what}: not finite");
    assert_eq!(different.map(|at| at / a.cols), None, "{what}: first row that differs");
}

#[test]
fn bits_do_not_depend_on_threads_and_chunks() {
    let tiny = TinyModel::new(TinyOptions::default());
    let model = &tiny.model;
    let mut first = with_threads(model, 1);
    for len in LENGTHS {
        let tokens = prompt(len, 1);
        let expected = logits(&mut first, model, &tokens, 2048);
        for (threads, chunk) in [(1, 64), (2, 128), (3, 256), (7, 2048), (2, 64)] {
            let mut cpu = with_threads(model, threads);
            let found = logits(&mut cpu, model, &tokens, chunk);
            assert_same(&found, &expected, &format!("{len} tokens, {threads} threads, chunks of {chunk}"));
        }
    }
}

#[test]
fn bits_do_not_depend_on_batch_mates() {
    let tiny = TinyModel::new(TinyOptions::default());
    let model = &tiny.model;
    for len in [1, 2, 65, 129, 700] {
        let prompts: Vec<Vec<u32>> = (0..4).map(|i| prompt(len + 3 * i, i as u64)).collect();
        let mut alone = with_threads(model, 2);
        let mut batch = with_threads(model, 2);
        let sequences: Vec<SequenceId> = prompts.iter().map(|_| batch.create()).collect();
        let pairs: Vec<(SequenceId, &[u32])> =
            sequences.iter().zip(&prompts).map(|(&id, tokens)| (id, &tokens[..])).collect();
        let together = ingest(&mut batch, model, &pairs, 256);
        for (tokens, found) in prompts.iter().zip(&together) {
            let expected = logits(&mut alone, model, tokens, 2048);
            assert_same(found, &expected, &format!("{} tokens in a batch", tokens.len()));
        }
    }
}

#[test]
fn every_variant_and_weight_type_keeps_the_promise() {
    let types = [(Type::Q8_0, Type::IQ2_XXS), (Type::Q6_K, Type::IQ3_XXS), (Type::BF16, Type::Q4_K)];
    for (dense, experts) in types {
        let tiny = TinyModel::new(TinyOptions::quantised(dense, experts));
        let model = &tiny.model;
        let tokens = prompt(130, 5);
        for variant in Variant::ALL.into_iter().filter(|v| v.is_available()) {
            let with =
                |threads| Options { threads: Some(threads), variant: Some(variant), ..Options::default() };
            let expected = logits(&mut backend(model, with(1)), model, &tokens, 2048);
            let found = logits(&mut backend(model, with(3)), model, &tokens, 64);
            assert_same(&found, &expected, &format!("{variant}, {dense} and {experts}"));
        }
    }
}

#[test]
fn waves_do_not_change_bits() {
    let tiny = TinyModel::new(TinyOptions::default());
    let model = &tiny.model;
    let tokens = prompt(200, 2);
    let mut cpu = with_threads(model, 2);
    let expected = logits(&mut cpu, model, &tokens, 2048);
    for size in [1, 3, 100] {
        let sequence = cpu.create();
        let mut pass = Pass::new();
        pass.push(sequence, 0, &tokens);
        pass.logits = (0..tokens.len()).collect();
        let found = run_pass(&mut cpu, &model.spec, &pass, &mut Waves::new(model, size), &mut Quiet);
        assert_same(&found, &expected, &format!("waves of {size}"));
    }
}

#[test]
fn forks_go_their_own_ways() {
    let tiny = TinyModel::new(TinyOptions::default());
    let model = &tiny.model;
    let mut cpu = with_threads(model, 2);
    let (start, one, two) = (prompt(300, 1), prompt(64, 2), prompt(70, 3));
    let a = cpu.create();
    ingest(&mut cpu, model, &[(a, &start)], 2048);
    let b = cpu.fork(a).unwrap();
    let after_one = ingest(&mut cpu, model, &[(a, &one)], 2048).remove(0);
    let after_two = ingest(&mut cpu, model, &[(b, &two)], 2048).remove(0);

    let mut fresh = |tail: &[u32]| {
        let id = cpu.create();
        ingest(&mut cpu, model, &[(id, &start)], 2048);
        ingest(&mut cpu, model, &[(id, tail)], 2048).remove(0)
    };
    assert_same(&after_one, &fresh(&one), "the original");
    assert_same(&after_two, &fresh(&two), "the fork");
}

#[test]
fn snapshots_on_the_grid_restore_a_cold_ingestion() {
    let tiny = TinyModel::new(TinyOptions::default());
    let model = &tiny.model;
    let mut cpu = with_threads(model, 3);
    let tokens = prompt(500, 4);
    let expected = logits(&mut cpu, model, &tokens, 2048);

    let (main, at_128, at_200) = (cpu.create(), cpu.create(), cpu.create());
    let mut pass = Pass::new();
    pass.push(main, 0, &tokens);
    pass.logits = (0..500).collect();
    pass.snapshots =
        vec![SnapshotRequest { row: 199, into: at_200 }, SnapshotRequest { row: 127, into: at_128 }];
    let found = run_pass(&mut cpu, &model.spec, &pass, &mut MappedExperts::new(model), &mut Quiet);
    assert_same(&found, &expected, "snapshots leave the pass alone");

    let stored = cpu.snapshot(at_128).unwrap();
    let restored = cpu.restore(&stored).unwrap();
    assert_eq!(cpu.snapshot(restored).unwrap(), stored);
    for sequence in [at_128, restored] {
        let rest = ingest(&mut cpu, model, &[(sequence, &tokens[128..])], 2048).remove(0);
        let tail =
            Matrix { rows: 372, cols: expected.cols, data: expected.data[128 * expected.cols..].to_vec() };
        assert_same(&rest, &tail, "from the snapshot at 128 on");
    }

    // Inside a cell: the state of a prompt that ends there.
    let cold = cpu.create();
    ingest(&mut cpu, model, &[(cold, &tokens[..200])], 2048);
    assert!(cpu.snapshot(at_200).unwrap() == cpu.snapshot(cold).unwrap());
}

#[test]
fn a_snapshot_after_every_row_is_the_state_of_a_prompt_that_ends_there() {
    let tiny = TinyModel::new(TinyOptions { layers: 4, ..TinyOptions::default() });
    let model = &tiny.model;
    let mut cpu = with_threads(model, 2);
    let tokens = prompt(70, 6);
    let main = cpu.create();
    let mut pass = Pass::new();
    pass.push(main, 0, &tokens);
    let emitted: Vec<SequenceId> = tokens.iter().map(|_| cpu.create()).collect();
    pass.snapshots = emitted.iter().enumerate().map(|(row, &into)| SnapshotRequest { row, into }).collect();
    run_pass(&mut cpu, &model.spec, &pass, &mut MappedExperts::new(model), &mut Quiet);
    for (row, &id) in emitted.iter().enumerate().filter(|(row, _)| row % 9 == 0 || *row > 60) {
        let cold = cpu.create();
        ingest(&mut cpu, model, &[(cold, &tokens[..row + 1])], 2048);
        let (found, expected) = (cpu.snapshot(id).unwrap(), cpu.snapshot(cold).unwrap());
        if row % 64 == 0 {
            // A prompt that ends here has a cell of one row, which is computed as a recurrence.
            assert!(relative_rms(&found.recurrent, &expected.recurrent) < 1e-5, "after row {row}");
        } else {
            assert!(found == expected, "after row {row}");
        }
        cpu.free(cold);
    }
}

#[test]
fn an_aborted_pass_leaves_no_trace() {
    let tiny = TinyModel::new(TinyOptions::default());
    let model = &tiny.model;
    let mut cpu = with_threads(model, 2);
    let tokens = prompt(400, 7);
    let expected = logits(&mut cpu, model, &tokens, 2048);

    let sequence = cpu.create();
    ingest(&mut cpu, model, &[(sequence, &tokens[..192])], 2048);
    let before = cpu.snapshot(sequence).unwrap();
    let mut experts = MappedExperts::new(model);
    for steps in [1, 4, 9, 17] {
        let mut pass = Pass::new();
        pass.push(sequence, 192, &prompt(100, 8));
        let mut driver = Driver::begin(&mut cpu, &model.spec, &pass).unwrap();
        for _ in 0..steps {
            driver.advance(&mut cpu, &mut experts, &mut Quiet).unwrap();
        }
        cpu.abort(driver.pass());
    }
    assert_eq!(cpu.position(sequence).unwrap(), 192);
    assert!(cpu.snapshot(sequence).unwrap() == before);
    let rest = ingest(&mut cpu, model, &[(sequence, &tokens[192..])], 2048).remove(0);
    assert_same(
        &rest,
        &Matrix { rows: 208, cols: expected.cols, data: expected.data[192 * expected.cols..].to_vec() },
        "after aborted passes",
    );
}

#[test]
fn decode_steps_pass_by_a_chunk_in_flight() {
    let tiny = TinyModel::new(TinyOptions::default());
    let model = &tiny.model;
    let mut cpu = with_threads(model, 2);
    let (long, short) = (prompt(300, 9), prompt(40, 10));
    let expected = [logits(&mut cpu, model, &long, 2048), logits(&mut cpu, model, &short, 1)];

    let (slow, quick) = (cpu.create(), cpu.create());
    let mut pass = Pass::new();
    pass.push(slow, 0, &long);
    pass.logits = (0..long.len()).collect();
    let mut driver = Driver::begin(&mut cpu, &model.spec, &pass).unwrap();
    let mut experts = MappedExperts::new(model);
    let mut decoded = Matrix { rows: 0, cols: model.spec.vocab, data: Vec::new() };
    let mut step = 0;
    while !driver.progress().is_done() {
        driver.advance(&mut cpu, &mut experts, &mut Quiet).unwrap();
        if step < short.len() {
            let one = ingest(&mut cpu, model, &[(quick, &short[step..step + 1])], 1).remove(0);
            decoded.rows += 1;
            decoded.data.extend(one.data);
            step += 1;
        }
    }
    let found = cpu.logits(driver.pass()).unwrap().to_matrix();
    cpu.commit(driver.pass()).unwrap();
    assert_same(&found, &expected[0], "the chunk");
    let rows = decoded.rows;
    assert!(rows > 20);
    let head = Matrix { rows, cols: decoded.cols, data: expected[1].data[..rows * decoded.cols].to_vec() };
    assert_same(&decoded, &head, "the decode steps");
}
