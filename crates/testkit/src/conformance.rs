//! What every backend promises, whatever it computes with: the same tests for all of them.
//!
//! Each function panics where the promise is broken. `make` makes the backend under test.

use std::ops::Range;
use std::sync::Arc;

use model::state::PAGE;
use model::{
    Backend, Driver, Error, GRID, KvType, Limits, MappedExperts, Matrix, Model, Pass, PassId, Quiet,
    SequenceId, SnapshotRequest,
};

use crate::random::Random;
use crate::run::{Waves, ingest, relative_rms, run_pass};
use crate::tiny::{Decay, Layout, TinyModel, TinyOptions};

/// Makes a backend.
pub type Make<'a> = &'a dyn Fn(Arc<Model>, Limits) -> Box<dyn Backend>;

/// Prompt lengths around the grid.
pub const LENGTHS: [usize; 9] = [1, 2, 63, 64, 65, 127, 128, 129, 200];

const LIMITS: Limits = Limits { pass_rows: 1024, positions: 8 * PAGE, kv: KvType::F16 };

/// Relative RMS allowed between kernels of small chunks and those of others, where a backend has both.
const OTHER_KERNELS: f64 = 3e-2;

/// A backend with its model and tokens to feed it.
struct Bench {
    tiny: TinyModel,
    backend: Box<dyn Backend>,
    tokens: Vec<u32>,
}

impl Bench {
    fn new(make: Make, options: TinyOptions) -> Bench {
        let tiny = TinyModel::new(options);
        let backend = make(tiny.model.clone(), LIMITS);
        let tokens = Random::new(options.seed, "prompt").tokens(512, TinyOptions::VOCAB);
        Bench { tiny, backend, tokens }
    }

    /// Logits of these tokens, appended to a sequence in chunks.
    fn extend(&mut self, sequence: SequenceId, tokens: Range<usize>, chunk: usize) -> Matrix {
        ingest(&mut *self.backend, &self.tiny.model, &[(sequence, &self.tokens[tokens])], chunk).remove(0)
    }

    /// Logits of a prompt in a sequence of its own.
    fn cold(&mut self, tokens: Range<usize>, chunk: usize) -> Matrix {
        let sequence = self.backend.create();
        let logits = self.extend(sequence, tokens, chunk);
        self.backend.free(sequence);
        logits
    }

    fn pass(&mut self, pass: &Pass) -> Matrix {
        let model = self.tiny.model.clone();
        run_pass(&mut *self.backend, &model.spec, pass, &mut MappedExperts::new(&model), &mut Quiet)
    }

    /// DeltaNet windows and states of a sequence.
    fn recurrent(&mut self, sequence: SequenceId) -> Vec<f32> {
        self.backend.snapshot(sequence).expect("a snapshot").recurrent.to_vec()
    }
}

fn same_bits(a: &Matrix, b: &Matrix, what: &str) {
    assert_eq!((a.rows, a.cols), (b.rows, b.cols), "{what}");
    let differs = a.data.iter().zip(&b.data).position(|(a, b)| a.to_bits() != b.to_bits());
    if let Some(at) = differs {
        panic!("{what}: row {} differs, {} and {}", at / a.cols, a.data[at], b.data[at]);
    }
    assert!(a.data.iter().all(|x| x.is_finite()), "{what}: not finite");
}

fn rows(matrix: &Matrix, rows: Range<usize>) -> Matrix {
    let data = matrix.data[rows.start * matrix.cols..rows.end * matrix.cols].to_vec();
    Matrix { rows: rows.len(), cols: matrix.cols, data }
}

/// Logits do not depend on the chunk size, a multiple of the grid not smaller than the backend's smallest
/// chunk; and a prompt's first rows do not depend on the rows behind their grid cell.
pub fn chunks(make: Make) {
    let mut bench = Bench::new(make, TinyOptions::default());
    let longest = bench.cold(0..256, 1024);
    let smallest = bench.backend.capabilities().smallest_chunk;
    for length in LENGTHS {
        let whole = bench.cold(0..length, 1024);
        for chunk in [64, 128, 192] {
            // A smaller rest is merged into the chunk before it by whoever cuts.
            if length < chunk || length % chunk == 0 || length % chunk >= smallest {
                same_bits(&bench.cold(0..length, chunk), &whole, &format!("{length} tokens by {chunk}"));
            }
        }
        let cells = length / GRID * GRID;
        same_bits(&rows(&whole, 0..cells), &rows(&longest, 0..cells), &format!("first of {length} tokens"));
    }
}

/// A pass of several mixer blocks has the bits of many small passes.
pub fn blocks(make: Make) {
    let mut bench = Bench::new(make, TinyOptions { layers: 4, ..TinyOptions::default() });
    let block = bench.backend.capabilities().block_rows;
    let limits = Limits { pass_rows: 2 * block, positions: 2 * block + PAGE, ..LIMITS };
    bench.backend = make(bench.tiny.model.clone(), limits);
    bench.tokens = Random::new(2, "prompt").tokens(block + 200, TinyOptions::VOCAB);
    // The first run ends in the second block; the other lies wholly in it.
    let ids = [bench.backend.create(), bench.backend.create()];
    let prompts = [(ids[0], &bench.tokens[..block + 70]), (ids[1], &bench.tokens[block + 70..])];
    let together = ingest(&mut *bench.backend, &bench.tiny.model, &prompts, 2 * block);
    ids.iter().for_each(|id| bench.backend.free(*id));
    let chunk = GRID.max(bench.backend.capabilities().smallest_chunk);
    same_bits(&bench.cold(0..block + 70, chunk), &together[0], "a run of two blocks");
    same_bits(&bench.cold(block + 70..block + 200, chunk), &together[1], "a run behind it");
}

/// Four sequences in one pass have the logits they have alone.
pub fn batches(make: Make) {
    let mut bench = Bench::new(make, TinyOptions::default());
    let ranges = [0..129, 3..4, 10..75, 200..400];
    let alone: Vec<Matrix> = ranges.iter().map(|range| bench.cold(range.clone(), 1024)).collect();
    let ids = ranges.each_ref().map(|_| bench.backend.create());
    let prompts: Vec<(SequenceId, &[u32])> =
        ids.iter().zip(&ranges).map(|(&id, range)| (id, &bench.tokens[range.clone()])).collect();
    let together = ingest(&mut *bench.backend, &bench.tiny.model, &prompts, 1024);
    let smallest = bench.backend.capabilities().smallest_chunk;
    for ((alone, together), range) in alone.iter().zip(&together).zip(&ranges) {
        let what = format!("tokens {range:?} in a batch");
        if range.len() >= smallest {
            same_bits(together, alone, &what);
        } else {
            // Alone it is too small a chunk for the kernels of the batch.
            assert!(relative_rms(&together.data, &alone.data) < OTHER_KERNELS, "{what}");
        }
    }
    // Batched decode continues each where it is.
    let next: Vec<Matrix> = ids
        .map(|id| bench.backend.fork(id).expect("a fork"))
        .map(|fork| bench.extend(fork, 400..401, 1))
        .into();
    let prompts = ids.map(|id| (id, &bench.tokens[400..401]));
    let together = ingest(&mut *bench.backend, &bench.tiny.model, &prompts, 1);
    for (alone, together) in next.iter().zip(&together) {
        same_bits(together, alone, "batched decode");
    }
}

/// Token by token, logits and states agree with whole prompts within the given relative RMS.
pub fn decode_agrees_with_ingestion(make: Make, logits: f64, states: f64) {
    let mut bench = Bench::new(make, TinyOptions::default());
    let single = bench.backend.create();
    let mut start = 0;
    for length in LENGTHS {
        let fresh = bench.backend.create();
        let expected = bench.extend(fresh, 0..length, 1024);
        let got = bench.extend(single, start..length, 1);
        let error = relative_rms(&got.data, &rows(&expected, start..length).data);
        assert!(error <= logits, "logits after {length} tokens differ by {error:e}");
        let (got, expected) = (bench.recurrent(single), bench.recurrent(fresh));
        let error = relative_rms(&got, &expected);
        assert!(error <= states, "states after {length} tokens differ by {error:e}");
        bench.backend.free(fresh);
        start = length;
    }
}

/// Waves of few experts give the bits of all at once.
pub fn waves(make: Make) {
    let mut bench = Bench::new(make, TinyOptions::default());
    let expected = bench.cold(0..70, 1024);
    let model = bench.tiny.model.clone();
    for size in [1, 3] {
        let sequence = bench.backend.create();
        let mut pass = Pass::new();
        pass.push(sequence, 0, &bench.tokens[0..70]);
        pass.logits = (0..70).collect();
        let mut waves = Waves::new(&model, size);
        let logits = run_pass(&mut *bench.backend, &model.spec, &pass, &mut waves, &mut Quiet);
        same_bits(&logits, &expected, &format!("waves of {size}"));
    }
}

/// Forks go their own ways; host copies restore; both give the bits of an unbroken session.
pub fn forks_and_host_copies(make: Make) {
    for length in [64, 70, PAGE, PAGE + 44] {
        let mut bench = Bench::new(make, TinyOptions::default());
        let sequence = bench.backend.create();
        bench.extend(sequence, 0..length, 1024);
        let copy = bench.backend.snapshot(sequence).expect("a snapshot");
        let (one, two) = (bench.backend.fork(sequence).unwrap(), bench.backend.fork(sequence).unwrap());
        let first = bench.extend(one, 300..340, 1024);
        let other = bench.extend(two, 400..440, 1024);
        assert_ne!(first, other);
        bench.backend.free(one);
        same_bits(&bench.extend(sequence, 300..340, 1024), &first, "the original after its forks");
        let restored = bench.backend.restore(&copy).expect("our own snapshot");
        assert_eq!(bench.backend.position(restored).unwrap(), length);
        same_bits(&bench.extend(restored, 400..440, 1024), &other, "restored from the host");
    }
}

/// Snapshots in the middle of a pass leave the pass as it is. On the grid they continue with the bits of an
/// unbroken prompt, elsewhere within the given relative RMS.
pub fn snapshots(make: Make, tolerance: f64) {
    let mut bench = Bench::new(make, TinyOptions::default());
    let expected = bench.cold(0..200, 1024);
    let sequence = bench.backend.create();
    let mut pass = Pass::new();
    pass.push(sequence, 0, &bench.tokens[0..200]);
    pass.logits = (0..200).collect();
    let wanted: Vec<(usize, SequenceId)> =
        [0, 63, 99, 127, 128, 199].iter().map(|&row| (row, bench.backend.create())).collect();
    pass.snapshots = wanted.iter().map(|&(row, into)| SnapshotRequest { row, into }).collect();
    same_bits(&bench.pass(&pass), &expected, "a pass with snapshots");
    assert_eq!(bench.backend.position(sequence).unwrap(), 200);
    for (row, id) in wanted {
        let length = row + 1;
        assert_eq!(bench.backend.position(id).unwrap(), length);
        let fresh = bench.backend.create();
        bench.extend(fresh, 0..length, 1024);
        let (found, alone) = (bench.recurrent(id), bench.recurrent(fresh));
        if length >= bench.backend.capabilities().smallest_chunk {
            assert_eq!(found, alone, "state after {length} of 200 tokens");
        } else {
            let error = relative_rms(&found, &alone);
            assert!(error < OTHER_KERNELS, "state after {length} of 200 tokens: {error:e}");
        }
        bench.backend.free(fresh);
        if length < 200 {
            let rest = bench.extend(id, length..200, 1024);
            let unbroken = rows(&expected, length..200);
            if length % GRID == 0 {
                same_bits(&rest, &unbroken, &format!("continued after {length} tokens"));
            } else {
                let error = relative_rms(&rest.data, &unbroken.data);
                assert!(error <= tolerance, "continued after {length} tokens: {error:e}");
            }
        }
        bench.backend.free(id);
    }
}

/// An aborted pass leaves no trace, wherever it was.
pub fn aborts(make: Make) {
    let mut bench = Bench::new(make, TinyOptions::default());
    let expected = bench.cold(0..150, 64);
    let sequence = bench.backend.create();
    let first = bench.extend(sequence, 0..128, 64);
    same_bits(&first, &rows(&expected, 0..128), "before");
    let model = bench.tiny.model.clone();
    for steps in [0, 1, 3, 9, 24] {
        let into = bench.backend.create();
        let mut pass = Pass::new();
        pass.push(sequence, 128, &bench.tokens[300..400]);
        pass.snapshots = vec![SnapshotRequest { row: 50, into }];
        let mut driver = Driver::begin(&mut *bench.backend, &model.spec, &pass).unwrap();
        for _ in 0..steps {
            driver.advance(&mut *bench.backend, &mut MappedExperts::new(&model), &mut Quiet).unwrap();
        }
        bench.backend.abort(driver.pass());
        assert_eq!(bench.backend.position(sequence).unwrap(), 128);
        assert_eq!(bench.backend.position(into).unwrap(), 0);
        bench.backend.free(into);
    }
    same_bits(&bench.extend(sequence, 128..150, 64), &rows(&expected, 128..150), "after");
}

/// While a long pass waits between two stages, others are opened and committed.
pub fn interleaved_passes(make: Make) {
    let mut bench = Bench::new(make, TinyOptions::default());
    let (long, short) = (bench.cold(0..200, 1024), bench.cold(300..310, 1));
    let model = bench.tiny.model.clone();
    let mut experts = MappedExperts::new(&model);
    let (slow, quick) = (bench.backend.create(), bench.backend.create());
    let mut pass = Pass::new();
    pass.push(slow, 0, &bench.tokens[0..200]);
    pass.logits = (0..200).collect();
    let mut driver = Driver::begin(&mut *bench.backend, &model.spec, &pass).unwrap();
    let mut token = 300;
    while !driver.advance(&mut *bench.backend, &mut experts, &mut Quiet).unwrap().is_done() {
        if token < 310 {
            let logits = bench.extend(quick, token..token + 1, 1);
            same_bits(&logits, &rows(&short, token - 300..token - 299), "the pass in between");
            token += 1;
        }
    }
    same_bits(&bench.backend.logits(driver.pass()).unwrap().to_matrix(), &long, "the pass that waited");
    bench.backend.commit(driver.pass()).unwrap();
    assert_eq!(bench.backend.position(slow).unwrap(), 200);
}

/// However a file lays its tensors out, the bits are the same; a block behind the trunk is skipped.
pub fn layouts(make: Make) {
    let plain = TinyOptions::default();
    let expected = Bench::new(make, plain).cold(0..70, 1024);
    for options in [
        TinyOptions { layout: Layout::Legacy, ..plain },
        TinyOptions { fused_experts: true, ..plain },
        TinyOptions { mtp: true, ..plain },
    ] {
        same_bits(&Bench::new(make, options).cold(0..70, 1024), &expected, &format!("{options:?}"));
    }
    let tied = Bench::new(make, TinyOptions { tied: true, ..plain }).cold(0..70, 1024);
    assert!(relative_rms(&tied.data, &expected.data) > 0.1, "a tied model has another head");
}

/// States that decay by 1e-12 with every token stay finite and right.
pub fn strong_decay(make: Make, tolerance: f64) {
    let mut bench = Bench::new(make, TinyOptions { decay: Decay::Strong, ..TinyOptions::default() });
    let error = relative_rms(&bench.cold(0..130, 1024).data, &bench.cold(0..130, 1).data);
    assert!(error <= tolerance, "{error:e}");
}

/// Rows that want logits or hidden states get theirs, in order; others cost nothing.
pub fn wanted_rows(make: Make) {
    let mut bench = Bench::new(make, TinyOptions::default());
    let expected = bench.cold(0..70, 1024);
    let model = bench.tiny.model.clone();
    let sequence = bench.backend.create();
    let mut pass = Pass::new();
    pass.push(sequence, 0, &bench.tokens[0..70]);
    pass.logits = vec![3, 69];
    pass.hidden = vec![3, 4];
    let mut driver = Driver::begin(&mut *bench.backend, &model.spec, &pass).unwrap();
    driver.finish(&mut *bench.backend, &mut MappedExperts::new(&model), &mut Quiet).unwrap();
    let logits = bench.backend.logits(driver.pass()).unwrap().to_matrix();
    same_bits(&rows(&logits, 0..1), &rows(&expected, 3..4), "row 3");
    same_bits(&rows(&logits, 1..2), &rows(&expected, 69..70), "row 69");
    let hidden = bench.backend.hidden(driver.pass()).unwrap();
    assert_eq!((hidden.rows, hidden.cols), (2, model.spec.hidden));
    bench.backend.commit(driver.pass()).unwrap();
}

/// What a backend picks out of logits are some of them, among which are the largest and their equals; it need not.
pub fn largest(make: Make) {
    let mut bench = Bench::new(make, TinyOptions::default());
    let model = bench.tiny.model.clone();
    let sequence = bench.backend.create();
    let mut pass = Pass::new();
    pass.push(sequence, 0, &bench.tokens[0..70]);
    pass.logits = vec![0, 3, 69];
    let mut driver = Driver::begin(&mut *bench.backend, &model.spec, &pass).unwrap();
    driver.finish(&mut *bench.backend, &mut MappedExperts::new(&model), &mut Quiet).unwrap();
    let logits = bench.backend.logits(driver.pass()).unwrap().to_matrix();
    for count in [1, 2, 20, 64, TinyOptions::VOCAB, 1000] {
        let found = bench.backend.largest(driver.pass(), &[count, 0, count]).unwrap();
        assert!(found.len() == 3 && found[1].is_none(), "of each row what was wanted");
        for (index, candidates) in found.iter().enumerate() {
            let (row, Some(candidates)) = (logits.row(index), candidates) else { continue };
            let mut ids: Vec<u32> = candidates.iter().map(|candidate| candidate.id).collect();
            ids.sort_unstable();
            assert!(ids.windows(2).all(|pair| pair[0] < pair[1]), "once each");
            assert!(candidates.iter().all(|c| c.logit.to_bits() == row[c.id as usize].to_bits()));
            let mut falling = row.to_vec();
            falling.sort_unstable_by(|a, b| b.total_cmp(a));
            let least = falling[count.min(row.len()) - 1];
            let mut wanted = (0u32..).zip(row).filter(|&(_, &logit)| logit >= least);
            assert!(
                wanted.all(|(id, _)| ids.binary_search(&id).is_ok()),
                "the {count} largest of row {index}"
            );
        }
    }
    same_bits(&bench.backend.logits(driver.pass()).unwrap().to_matrix(), &logits, "logits read again");
    bench.backend.commit(driver.pass()).unwrap();
}

/// Passes that run in one go have the bits of those whose stages are called one by one, and leave the same states.
pub fn in_one_go(make: Make) {
    let mut bench = Bench::new(make, TinyOptions::default());
    let model = bench.tiny.model.clone();
    let mut experts = MappedExperts::new(&model);
    let prompt = bench.backend.create();
    bench.extend(prompt, 0..60, 1024);
    let step = |sequences: &[SequenceId], at: usize, tokens: &[u32]| {
        let mut pass = Pass::new();
        for (index, &sequence) in sequences.iter().enumerate() {
            pass.push(sequence, 60 + at, &[tokens[at + index]]);
        }
        Pass { logits: (0..sequences.len()).collect(), ..pass }
    };
    for batch in [1, 3] {
        let [one_by_one, at_once] = [(); 2].map(|()| -> Vec<SequenceId> {
            (0..batch).map(|_| bench.backend.fork(prompt).unwrap()).collect()
        });
        // So many that what has been recorded is repeated, over the end of a page.
        for at in 0..8 {
            let expected = bench.pass(&step(&one_by_one, at, &bench.tokens));
            let pass = step(&at_once, at, &bench.tokens);
            let id = Driver::run(&mut *bench.backend, &mut experts, &model.spec, &pass).unwrap();
            let found = bench.backend.logits(id).unwrap().to_matrix();
            bench.backend.commit(id).unwrap();
            same_bits(&found, &expected, &format!("{batch} rows, step {at}"));
        }
        for (a, b) in one_by_one.into_iter().zip(at_once) {
            assert_eq!(bench.recurrent(a), bench.recurrent(b), "states");
            [a, b].into_iter().for_each(|sequence| bench.backend.free(sequence));
        }
    }
}

/// Misuse is an error, never a panic, and changes nothing.
pub fn misuse(make: Make) {
    let mut bench = Bench::new(make, TinyOptions::default());
    let sequence = bench.backend.create();
    let mut pass = Pass::new();
    pass.push(sequence, 0, &bench.tokens[0..1]);
    let refused = |result: model::Result<PassId>| matches!(result, Err(Error::Pass(_)));
    let wrong_start = Pass { runs: vec![model::Run { start: 5, ..pass.runs[0].clone() }], ..pass.clone() };
    assert!(refused(bench.backend.begin(&wrong_start)));
    let unknown = Pass { tokens: vec![TinyOptions::VOCAB as u32], ..pass.clone() };
    assert!(refused(bench.backend.begin(&unknown)));
    let mut large = Pass::new();
    large.push(sequence, 0, &vec![0; LIMITS.pass_rows + 1]);
    assert!(refused(bench.backend.begin(&large)));
    assert!(bench.backend.commit(PassId(99)).is_err());
    assert!(bench.backend.embed(PassId(99), 0..1).is_err());
    bench.backend.abort(PassId(99));

    let full: Vec<SequenceId> = (0..LIMITS.positions / PAGE).map(|_| bench.backend.create()).collect();
    for id in &full {
        bench.extend(*id, 0..1, 1);
    }
    assert!(matches!(bench.backend.begin(&pass), Err(Error::ContextFull { .. })));
    bench.backend.free(full[0]);
    bench.extend(sequence, 0..1, 1);

    let mut copy = bench.backend.snapshot(sequence).unwrap();
    copy.pages.pop();
    assert!(matches!(bench.backend.restore(&copy), Err(Error::Snapshot(_))));
    bench.backend.free(full[1]);
    assert!(matches!(bench.backend.position(full[1]), Err(Error::NoSequence(_))));
}
