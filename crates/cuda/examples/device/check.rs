//! Agreement with `quant`, with the promises of every backend, and with the reference.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use crate::{cache, pipeline, rows};

use engine::parity::{Parity, Side, parity};
use engine::{Cancel, Engine, Request};
use model::{Backend, Intermediate, KvType, Limits, MappedExperts, Model};
use quant::Type;
use redlite_cuda::{Cuda, Options, Product};
use reference::Reference;
use testkit::conformance::Make;
use testkit::{Decay, Layout, Random, TinyModel, TinyOptions, conformance};

/// Relative RMS allowed of any stage of a small random model: factors are bf16, and so are the errors of all layers
/// before it.
const TOLERANCE: f64 = 8e-2;

/// The same of the delta rule's output. A first token's is its value times query · key, brought to length 1: where
/// that product almost vanishes, its rounding shows.
const NORMED: f64 = 0.3;

/// The same behind a near tie of experts that was decided the other way.
pub(crate) const OTHER_EXPERTS: f64 = 0.5;

/// Relative RMS allowed between a prompt read at once and token by token, near ties included.
pub(crate) const OTHER_KERNELS: f64 = 0.1;

/// Runs every check, or those whose names begin with one of `only`.
pub fn run(model: &Path, only: &[&str]) -> ExitCode {
    let mut failures = 0;
    let mut check = |name: &str, work: &dyn Fn() -> String| {
        if !only.is_empty() && !only.iter().any(|prefix| name.starts_with(prefix)) {
            return;
        }
        let start = std::time::Instant::now();
        match catch_unwind(AssertUnwindSafe(work)) {
            Ok(result) => println!("ok    {name:28} {:6.2} s  {result}", start.elapsed().as_secs_f64()),
            Err(_) => {
                failures += 1;
                println!("FAIL  {name}");
            }
        }
    };
    for ty in Type::all() {
        check(&format!("decode {ty}"), &|| decode(ty));
    }
    for rows in [1, 63, 64, 65, 300, 4170] {
        check(&format!("products {rows} rows"), &|| products(rows));
    }
    for cols in [1, 63, 64, 65, 8192, 8193, 151_936] {
        check(&format!("largest of {cols}"), &|| largest(cols));
    }
    for (name, work) in suite(&|model, limits| Box::new(cuda(&model, limits))) {
        check(&format!("suite {name}"), &|| {
            work();
            String::new()
        });
    }
    for length in [1, 2, 63, 64, 65, 127, 129, 300, 600] {
        check(&format!("stages {length} tokens"), &|| stages(TinyOptions::default(), length, KvType::F16));
    }
    for (name, options) in shapes() {
        check(&format!("stages {name}"), &|| stages(options, 70, KvType::F32));
    }
    for (length, kv) in
        [(1, KvType::F16), (64, KvType::F16), (200, KvType::F16), (600, KvType::F16), (600, KvType::F32)]
    {
        check(&format!("heads of 256, {length} tokens, {kv:?}"), &|| stages(wide(), length, kv));
    }
    check("heads of 256, bits", &|| {
        let tiny = TinyModel::new(wide());
        bits(&tiny.model, &Random::new(3, "prompt").tokens(600, TinyOptions::VOCAB))
    });
    for ty in Type::all().filter(|&ty| quant::can_encode(ty)) {
        let options = TinyOptions::quantised(ty, ty);
        check(&format!("type {ty}"), &|| stages(options, 70, KvType::F16) + &stages(options, 1, KvType::F16));
    }
    // The shared expert's table beside experts without one.
    for (dense, experts) in [(Type::IQ4_NL, Type::F32), (Type::IQ4_XS, Type::Q6_K)] {
        let options = TinyOptions::quantised(dense, experts);
        check(&format!("types {dense} and {experts}"), &|| stages(options, 1, KvType::F16));
    }
    check("model logits", &|| logits(model));
    check("model text", &|| greedy_text(model));
    check("model bits", &|| {
        let model = open(model);
        bits(&model, &prompt(&model, 1500))
    });
    rows::checks(&mut check);
    cache::checks(model, &mut check);
    pipeline::checks(model, &mut check);
    if failures == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

pub(crate) fn cuda(model: &Arc<Model>, limits: Limits) -> Cuda {
    let weights = model.load(&mut |_, _| {}).expect("weights");
    Cuda::new(model.clone(), &weights, limits, Options::default()).expect("a GPU")
}

pub(crate) fn limits(positions: usize, kv: KvType) -> Limits {
    Limits { pass_rows: positions, positions, kv }
}

/// Every weight of random blocks has the bits that `quant` gives it.
fn decode(ty: Type) -> String {
    let len = ty.block_len().max(8) * 512;
    let mut random = Random::new(1, ty.name());
    let mut bytes: Vec<u8> = (0..ty.bytes(len).expect("whole blocks")).map(|_| random.bits() as u8).collect();
    if quant::can_encode(ty) {
        let weights = random.normals(len / 2, 0.1);
        let mut half = Vec::new();
        quant::encode(ty, &weights, None, &mut half).expect("a type that can be encoded");
        bytes[..half.len()].copy_from_slice(&half);
    }
    let mut expected = vec![0.0; len];
    quant::decode(ty, &bytes, &mut expected).expect("whole blocks");
    let found = redlite_cuda::decode(ty, &bytes, len).expect("a GPU");
    for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
        let same = found.to_bits() == expected.to_bits() || (found.is_nan() && expected.is_nan());
        assert!(same, "{ty}: weight {i} is {found}, not {expected}");
    }
    format!("{len} weights")
}

/// Products of many rows agree with sums in f64, the same bits by all kinds of tiles; widths that fill no tile.
fn products(m: usize) -> String {
    let mut random = Random::new(m as u64, "factors");
    let mut compared = 0;
    for [n, k] in [[136, 72], [520, 328]] {
        let mut bf16 = |len: usize| -> Vec<u16> {
            random.normals(len, 1.0).iter().map(|x| (x.to_bits() >> 16) as u16).collect()
        };
        let (a, b) = (bf16(2 * m * k), bf16(2 * n * k));
        let (scale, before) = (random.normals(m, 1.0), random.normals(m * n, 1.0));
        for product in [Product::Store, Product::Add, Product::Scale, Product::Gated, Product::Split] {
            let parts = if product == Product::Split { 2 } else { 1 };
            // Part p of row r of a factor.
            let part = |x: &[u16], r: usize, p: usize| -> Vec<f64> {
                let at = (r * parts + p) * k;
                x[at..at + k].iter().map(|&bits| f64::from(f32::from_bits(u32::from(bits) << 16))).collect()
            };
            let dot = |(r, p): (usize, usize), (c, q): (usize, usize)| -> f64 {
                part(&a, r, p).iter().zip(part(&b, c, q)).map(|(x, y)| x * y).sum()
            };
            // As many rows and columns as show that all are where they belong.
            let rows: Vec<usize> = (0..m).step_by(1 + m / 500).collect();
            let columns: Vec<usize> = (0..n).step_by(7).chain([n - 1]).collect();
            let expected =
                rows.iter().flat_map(|&r| columns.iter().map(move |&c| (r, c))).map(|(r, c)| match product {
                    Product::Store => dot((r, 0), (c, 0)),
                    Product::Add => f64::from(before[r * n + c]) + dot((r, 0), (c, 0)),
                    Product::Scale => f64::from(scale[r]) * dot((r, 0), (c, 0)),
                    Product::Gated => {
                        let gate = dot((r, 0), (c, 0));
                        gate / (1.0 + (-gate).exp()) * dot((r, 0), (c + n, 0))
                    }
                    Product::Split => dot((r, 0), (c, 0)) + dot((r, 1), (c, 0)) + dot((r, 1), (c, 1)),
                });
            let expected: Vec<f64> = expected.collect();
            let found =
                redlite_cuda::products(product, [&a, &b], (&scale, &before), [m, n, k]).expect("a GPU");
            for (kind, all) in found.iter().enumerate() {
                assert!(
                    all.iter().map(|x| x.to_bits()).eq(found[0].iter().map(|x| x.to_bits())),
                    "{product:?} {kind}"
                );
            }
            let Some(found) = found.first() else { continue };
            let picked = rows.iter().flat_map(|&r| columns.iter().map(move |&c| f64::from(found[r * n + c])));
            let (mut errors, mut squares) = (0.0, 0.0);
            for (x, y) in picked.zip(&expected) {
                (errors, squares) = (errors + (x - y) * (x - y), squares + y * y);
            }
            let error = (errors / squares).sqrt();
            let limit = if product == Product::Gated { 4e-3 } else { 1e-5 };
            assert!(error < limit, "{product:?} of {m} rows, {n} columns, {k} deep is off by {error:.1e}");
            compared += expected.len();
        }
    }
    format!("{compared} results")
}

/// What is picked out of rows are numbers that are there, once each, and the `count` largest and their equals are among them.
fn largest(cols: usize) -> String {
    let mut random = Random::new(cols as u64, "logits");
    let plain = random.normals(cols, 3.0);
    let rounded: Vec<f32> = plain.iter().map(|x| x.round()).collect();
    let near: Vec<f32> = plain.iter().map(|x| 20.0 + 1e-4 * x).collect();
    let [mut broken, mut infinite, mut least] = [(); 3].map(|()| plain.clone());
    broken[cols / 2] = f32::NAN;
    infinite[0] = f32::INFINITY;
    least[cols - 1] = f32::NEG_INFINITY;
    let rows = [plain, rounded, near, broken, infinite, least].concat();
    let mut most = 0;
    for count in [1, 2, 20, 64] {
        let found = redlite_cuda::largest(&rows, cols, &[count; 6]).expect("a GPU");
        for (row, found) in rows.chunks(cols).zip(found) {
            let found = found.expect("few that are alike");
            let mut ids: Vec<u32> = found.iter().map(|candidate| candidate.id).collect();
            let are_there = found.iter().all(|c| c.logit.to_bits() == row[c.id as usize].to_bits());
            assert!(are_there, "numbers of the row");
            ids.sort_unstable();
            assert!(ids.windows(2).all(|pair| pair[0] < pair[1]), "once each");
            let sizes: Vec<f32> =
                row.iter().map(|&x| if x.is_finite() { x } else { f32::INFINITY }).collect();
            let mut falling = sizes.clone();
            falling.sort_unstable_by(|a, b| b.total_cmp(a));
            let least = falling[count.min(cols) - 1];
            let missing = (0u32..).zip(&sizes).find(|(id, size)| **size >= least && !ids.contains(id));
            assert!(missing.is_none(), "{missing:?} is among the {count} largest of {cols}");
            most = most.max(found.len());
        }
    }
    // Zeros of both signs are equals, of which there is room for some.
    let zeros: Vec<f32> = (0..cols).map(|at| if at % 2 == 0 { 0.0 } else { -0.0 }).collect();
    let all = [zeros.clone(), zeros.clone(), zeros].concat();
    let found = redlite_cuda::largest(&all, cols, &[0, 1, 65]).expect("a GPU");
    let lengths: Vec<Option<usize>> = found.iter().map(|row| row.as_ref().map(Vec::len)).collect();
    assert_eq!(lengths, [None, (cols <= 256).then_some(cols), None], "all that are equal, or nothing");
    format!("at most {most} candidates")
}

type Check<'a> = (&'static str, Box<dyn Fn() + 'a>);

/// What every backend promises, of those that `make` makes.
pub(crate) fn suite(make: Make<'_>) -> Vec<Check<'_>> {
    vec![
        ("chunks", Box::new(|| conformance::chunks(make))),
        ("blocks", Box::new(|| conformance::blocks(make))),
        ("batches", Box::new(|| conformance::batches(make))),
        (
            "decode",
            Box::new(|| conformance::decode_agrees_with_ingestion(make, OTHER_KERNELS, OTHER_KERNELS)),
        ),
        ("waves", Box::new(|| conformance::waves(make))),
        ("forks", Box::new(|| conformance::forks_and_host_copies(make))),
        ("snapshots", Box::new(|| conformance::snapshots(make, OTHER_KERNELS))),
        ("aborts", Box::new(|| conformance::aborts(make))),
        ("interleaved passes", Box::new(|| conformance::interleaved_passes(make))),
        ("layouts", Box::new(|| conformance::layouts(make))),
        ("strong decay", Box::new(|| conformance::strong_decay(make, OTHER_KERNELS))),
        ("wanted rows", Box::new(|| conformance::wanted_rows(make))),
        ("largest", Box::new(|| conformance::largest(make))),
        ("in one go", Box::new(|| conformance::in_one_go(make))),
        ("misuse", Box::new(|| conformance::misuse(make))),
    ]
}

fn shapes() -> Vec<(&'static str, TinyOptions)> {
    let base = TinyOptions::default();
    vec![
        ("legacy, tied", TinyOptions { layout: Layout::Legacy, tied: true, ..base }),
        ("fused experts", TinyOptions { fused_experts: true, mtp: true, ..base }),
        ("strong decay", TinyOptions { decay: Decay::Strong, ..base }),
        ("odd widths", TinyOptions { hidden: 72, width: 40, head: 64, ..base }),
        ("heads of 128", TinyOptions { hidden: 256, width: 136, head: 128, ..base }),
    ]
}

/// Attention heads as those of the family's files, for which there are kernels of their own.
fn wide() -> TinyOptions {
    TinyOptions { attention_head: Some(256), layers: 4, ..TinyOptions::default() }
}

/// Compares every intermediate with the reference and returns the worst.
fn compare(model: &Arc<Model>, tokens: &[u32], kv: KvType) -> Parity {
    let limits = limits(tokens.len().max(64), kv);
    let mut reference =
        Reference::new(model.clone(), limits, reference::Options::default()).expect("weights");
    let mut cuda = cuda(model, limits);
    let mut experts = [MappedExperts::new(model), MappedExperts::new(model)];
    let [a, b] = &mut experts;
    let mut left = Side { backend: &mut reference, experts: a };
    let mut right = Side { backend: &mut cuda, experts: b };
    let cancel = Cancel::default();
    parity(&model.spec, &mut left, &mut right, tokens, 512, &cancel, &mut |_, _| {}).expect("both run")
}

fn worst(parity: &Parity) -> (f64, String) {
    // Logits and weights of rows that chose other experts say nothing about arithmetic.
    let errors = parity.stages.iter().filter(|((.., what), _)| *what != Intermediate::RouteWeights);
    let errors =
        errors.map(|((_, layer, what), error)| (error.relative_rms(), format!("{what} of layer {layer}")));
    errors.max_by(|a, b| a.0.total_cmp(&b.0)).expect("there are stages")
}

fn stages(options: TinyOptions, length: usize, kv: KvType) -> String {
    let tiny = TinyModel::new(options);
    let tokens = Random::new(3, "prompt").tokens(length, TinyOptions::VOCAB);
    let parity = compare(&tiny.model, &tokens, kv);
    let (error, place) = worst(&parity);
    let (differ, compared) = parity.routes;
    let result = format!("rms {error:.1e} ({place}), routes {differ}/{compared}; ");
    for ((_, layer, what), difference) in &parity.stages {
        let limit = match what {
            _ if differ > 0 => OTHER_EXPERTS,
            Intermediate::DeltaMixed => NORMED,
            _ => TOLERANCE,
        };
        let error = difference.relative_rms();
        assert!(error < limit, "{what} of layer {layer} is off by {error:.1e}; {result}");
    }
    // Of a few choices one may be a near tie.
    assert!(differ * 20 <= compared.max(20), "{result}");
    result
}

/// A text that stays what it is.
const TEXT: &str = include_str!("../../../../LICENSE-APACHE");

pub(crate) fn open(model: &Path) -> Arc<Model> {
    Arc::new(Model::open(model).expect("a model"))
}

pub(crate) fn prompt(model: &Model, len: usize) -> Vec<u32> {
    let tokenizer = text_of(model);
    let mut tokens = tokenizer.encode_text(TEXT);
    tokens.truncate(len);
    tokens
}

fn text_of(model: &Model) -> text::Tokenizer {
    let vocabulary = model::vocabulary(model.gguf.metadata()).expect("a vocabulary");
    text::Tokenizer::new(vocabulary).expect("a tokenizer")
}

/// KL and top-1 of a text against the reference.
fn logits(path: &Path) -> String {
    let model = open(path);
    let tokens = prompt(&model, 1500);
    let parity = compare(&model, &tokens, KvType::F16);
    let l = &parity.logits;
    let (error, place) = worst(&parity);
    let result = format!(
        "{} positions: mean KL {:.2e} (largest {:.2e}), top-1 {:.3} %, routes {}/{}, worst stage {error:.1e} ({place})",
        l.positions,
        l.kl_mean(),
        l.kl_max,
        100.0 * l.top_share(),
        parity.routes.0,
        parity.routes.1
    );
    assert!(l.kl_mean() <= 2e-3 && l.top_share() >= 0.99, "{result}");
    result
}

/// The most likely continuation, and how clear each choice was.
fn greedy(backend: Box<dyn Backend>, model: &Arc<Model>, tokens: &[u32], count: usize) -> Vec<(u32, f32)> {
    let options = engine::Options { chunk: 2048, context: tokens.len() + count };
    let mut engine = Engine::new(model.clone(), backend, Box::new(MappedExperts::new(model)), options);
    let mut session = engine.open();
    let mut logits = engine.ingest(&mut session, tokens, &mut Request::default()).expect("a prompt").logits;
    let mut out = Vec::new();
    for _ in 0..count {
        let best = engine::compare::argmax(&logits);
        let others = logits.iter().enumerate().filter(|(i, _)| *i != best);
        let second = others.map(|(_, &x)| x).fold(f32::NEG_INFINITY, f32::max);
        out.push((best as u32, logits[best] - second));
        logits = engine.step(&mut session, best as u32, &Cancel::default()).expect("a step");
    }
    out
}

/// 200 tokens of greedy text are those of the reference up to a near tie.
fn greedy_text(path: &Path) -> String {
    let model = open(path);
    let tokens = prompt(&model, 200);
    let limits = limits(512, KvType::F16);
    let reference = Reference::new(model.clone(), limits, reference::Options::default()).expect("weights");
    let expected = greedy(Box::new(reference), &model, &tokens, 200);
    let found = greedy(Box::new(cuda(&model, limits)), &model, &tokens, 200);
    match found.iter().zip(&expected).position(|(a, b)| a.0 != b.0) {
        None => "200 tokens are equal".to_string(),
        Some(at) => {
            let margin = expected[at].1;
            // One is at most 1.22 times as likely as the other.
            assert!(margin < 0.2, "token {at} differs where the reference's margin is {margin}");
            format!("equal up to token {at}, a near tie (margin {margin:.3})")
        }
    }
}

/// The same prompt gives the same bits again, whatever the chunks.
fn bits(model: &Arc<Model>, tokens: &[u32]) -> String {
    let run = |chunk: usize| {
        let options = engine::Options { chunk, context: 2048 };
        let backend = Box::new(cuda(model, limits(2048, KvType::F16)));
        let mut engine = Engine::new(model.clone(), backend, Box::new(MappedExperts::new(model)), options);
        let mut session = engine.open();
        let mut logits =
            engine.ingest(&mut session, tokens, &mut Request::default()).expect("a prompt").logits;
        for token in [5, 6, 7] {
            logits.extend(engine.step(&mut session, token, &Cancel::default()).expect("a step"));
        }
        logits.iter().map(|x| x.to_bits()).collect::<Vec<u32>>()
    };
    let first = run(2048);
    for chunk in [64, 512, 2048] {
        assert!(run(chunk) == first, "chunks of {chunk}");
    }
    "chunks of 64, 512, 2048, and repeats".to_string()
}
