//! Single rows of several sequences: the bits of each alone, and what a prompt comes to that ends with its token.

use model::{Backend, KvType, MappedExperts, SequenceId};
use quant::Type;
use testkit::{Random, TinyModel, TinyOptions};

use crate::check::{OTHER_EXPERTS, OTHER_KERNELS, cuda, limits};
use crate::passes::Passes;

/// Tokens before the rows: ends and beginnings of steps, of blocks and of pages of keys; more than one step in a part.
const BEFORE: [usize; 8] = [1, 31, 32, 63, 255, 256, 1000, 4200];

/// Rows of each sequence, one after the other.
const STEPS: usize = 3;

/// Most rows of a pass of single rows.
const MOST: usize = 8;

/// Runs `check` for heads of all sizes, and those of the family's files; for experts of all types, and widths of several spans.
pub fn checks(check: &mut dyn FnMut(&str, &dyn Fn() -> String)) {
    let shapes = [(32, 32), (64, 64), (96, 64), (128, 128), (128, 256)];
    for (delta, attention) in shapes {
        for kv in [KvType::F16, KvType::F32] {
            let options = TinyOptions {
                hidden: 2 * delta,
                width: 2 * delta,
                head: delta,
                attention_head: Some(attention),
                layers: 4,
                ..TinyOptions::default()
            };
            check(&format!("rows, heads of {delta} and {attention}, {kv:?}"), &|| rows(options, kv));
        }
    }
    for ty in Type::all().filter(|&ty| quant::can_encode(ty)) {
        let options = TinyOptions { layers: 2, ..TinyOptions::quantised(Type::Q8_0, ty) };
        check(&format!("several {ty}"), &|| several(options));
    }
    // A warp has one span of x, two, or more; an expert one span of inner numbers or several, whole or not.
    for (hidden, width) in [(64, 32), (288, 160), (1312, 544), (2048, 512), (2304, 800), (4096, 288)] {
        let options =
            TinyOptions { hidden, width, layers: 2, ..TinyOptions::quantised(Type::Q8_0, Type::Q8_0) };
        check(&format!("several of {hidden} and {width}"), &|| several(options));
    }
}

/// Passes of two to eight rows give each the bits that it has alone.
fn several(options: TinyOptions) -> String {
    let tiny = TinyModel::new(options);
    let mut rows = Passes {
        model: tiny.model.clone(),
        cuda: cuda(&tiny.model, limits(3 * MOST * 256, KvType::F16)),
        experts: MappedExperts::new(&tiny.model),
    };
    let tokens = Random::new(5, "prompt").tokens(MOST + 1, TinyOptions::VOCAB);
    let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<u32>>();
    let (mut ids, mut alone) = (Vec::new(), Vec::new());
    for i in 0..MOST {
        let id = rows.cuda.create();
        rows.pass(&[(id, &tokens[..=i])], |_| ());
        let copy = rows.cuda.fork(id).expect("a fork");
        alone.push(rows.pass(&[(copy, &tokens[i + 1..i + 2])], bits).remove(0));
        rows.cuda.free(copy);
        ids.push(id);
    }
    for count in 2..=MOST {
        let copies: Vec<SequenceId> =
            ids[..count].iter().map(|&id| rows.cuda.fork(id).expect("a fork")).collect();
        let runs: Vec<(SequenceId, &[u32])> =
            copies.iter().enumerate().map(|(i, &id)| (id, &tokens[i + 1..i + 2])).collect();
        for (i, found) in rows.pass(&runs, bits).iter().enumerate() {
            assert!(*found == alone[i], "row {i} of {count}");
        }
        for id in copies {
            rows.cuda.free(id);
        }
    }
    format!("2 to {MOST} rows")
}

fn rows(options: TinyOptions, kv: KvType) -> String {
    let tiny = TinyModel::new(options);
    let positions: usize = BEFORE.iter().map(|len| (len + STEPS).next_multiple_of(256)).sum();
    let mut rows = Passes {
        model: tiny.model.clone(),
        cuda: cuda(&tiny.model, limits(2 * positions, kv)),
        experts: MappedExperts::new(&tiny.model),
    };
    let tokens = |i: usize| Random::new(i as u64, "prompt").tokens(BEFORE[i] + STEPS, TinyOptions::VOCAB);
    let all: Vec<Vec<u32>> = (0..BEFORE.len()).map(tokens).collect();
    let (mut apart, mut alone, mut together) = (Vec::new(), Vec::new(), Vec::new());
    let mut ids = Vec::new();
    for (tokens, before) in all.iter().zip(BEFORE) {
        let id = rows.cuda.create();
        rows.pass(&[(id, &tokens[..before])], |_| ());
        ids.push(rows.cuda.fork(id).expect("a fork"));
        alone.push(
            (before..before + STEPS)
                .map(|at| rows.pass(&[(id, &tokens[at..=at])], <[f32]>::to_vec).remove(0))
                .collect(),
        );
        rows.cuda.free(id);
        let whole = rows.cuda.create();
        let expected = rows.pass(&[(whole, &tokens[..])], <[f32]>::to_vec).remove(0);
        rows.cuda.free(whole);
        let found: &Vec<Vec<f32>> = &alone[alone.len() - 1];
        apart.push(relative(&found[STEPS - 1], &expected));
    }
    for step in 0..STEPS {
        let next = ids.iter().zip(&all).zip(BEFORE);
        let runs: Vec<(SequenceId, &[u32])> =
            next.map(|((&id, tokens), before)| (id, &tokens[before + step..=before + step])).collect();
        together.push(rows.pass(&runs, <[f32]>::to_vec));
    }
    for (i, alone) in alone.iter().enumerate() {
        for (step, alone) in alone.iter().enumerate() {
            let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<u32>>();
            assert!(bits(alone) == bits(&together[step][i]), "row {step} behind {} tokens", BEFORE[i]);
        }
    }
    // Some may have chosen other experts, behind a near tie.
    apart.sort_by(f64::total_cmp);
    let (median, worst) = (apart[BEFORE.len() / 2], apart[BEFORE.len() - 1]);
    let count = BEFORE.len() * STEPS;
    let result = format!("{count} rows, alone and together; {median:.1e}, {worst:.1e} from prompts");
    assert!(median < OTHER_KERNELS && worst < OTHER_EXPERTS, "{result}");
    result
}

/// How far two rows are apart, relative RMS.
fn relative(found: &[f32], expected: &[f32]) -> f64 {
    let squares = |x: &mut dyn Iterator<Item = f32>| x.map(|x| f64::from(x).powi(2)).sum::<f64>();
    let apart = squares(&mut found.iter().zip(expected).map(|(x, y)| x - y));
    (apart / squares(&mut expected.iter().copied())).sqrt()
}
