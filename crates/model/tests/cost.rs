//! Costs of stages against numbers worked out by hand for the 80B shape.

mod common;

use common::Draft;
use model::{
    AttentionSpec, AttentionWeights, Bound, Cost, DeltaSpec, DeltaWeights, ExpertLayout, ExpertTensor,
    KvType, Layer, LayerKind, MatrixInfo, Mixer, Model, MoeSpec, MoeWeights, Peak, Peaks, Stage, VectorInfo,
    Weights, Work,
};
use quant::Type;
use testkit::TinyOptions;

fn matrix(ty: Type, rows: usize, cols: usize) -> MatrixInfo {
    MatrixInfo { name: String::new(), ty, rows, cols, parts: Vec::new() }
}

fn vector(len: usize) -> VectorInfo {
    VectorInfo { name: String::new(), tensor: 0, len }
}

fn layer(kind: LayerKind) -> Layer<MatrixInfo, VectorInfo> {
    let dense = |rows, cols| matrix(Type::Q5_K, rows, cols);
    let mixer = match kind {
        LayerKind::Delta => Mixer::Delta(DeltaWeights {
            qkv: dense(8192, 2048),
            z: dense(4096, 2048),
            beta_alpha: matrix(Type::Q8_0, 64, 2048),
            conv: vector(4 * 8192),
            dt_bias: vector(32),
            a: vector(32),
            norm: vector(128),
            out: dense(2048, 4096),
        }),
        LayerKind::Attention => Mixer::Attention(AttentionWeights {
            query: dense(4096, 2048),
            gate: dense(4096, 2048),
            key: dense(512, 2048),
            value: dense(512, 2048),
            query_norm: vector(256),
            key_norm: vector(256),
            out: dense(2048, 4096),
        }),
    };
    let shared = |rows, cols| matrix(Type::Q8_0, rows, cols);
    let moe = MoeWeights {
        norm: vector(2048),
        router: matrix(Type::F32, 512, 2048),
        shared_gate: shared(512, 2048),
        shared_up: shared(512, 2048),
        shared_down: shared(2048, 512),
        shared_router: vector(2048),
    };
    Layer { norm: vector(2048), mixer, moe }
}

/// The shape of the 80B with so many layers; only what costs depend on.
fn model(layers: usize) -> Model {
    let mut model = Draft::tiny(TinyOptions::default()).open().unwrap();
    let kind = |i| if i % 4 == 3 { LayerKind::Attention } else { LayerKind::Delta };
    let kinds: Vec<LayerKind> = (0..layers).map(kind).collect();
    model.weights = Weights {
        layers: kinds.iter().map(|&kind| layer(kind)).collect(),
        output_norm: vector(2048),
        output: matrix(Type::Q6_K, 151_936, 2048),
    };
    let expert = |ty, rows, cols| ExpertTensor { ty, rows, cols, tensor: 0, offset: 0, stride: 0 };
    let layout = ExpertLayout {
        gate: expert(Type::IQ2_XXS, 512, 2048),
        up: expert(Type::IQ2_XXS, 512, 2048),
        down: expert(Type::IQ2_XS, 2048, 512),
    };
    model.experts = vec![layout; layers];
    model.embedding = matrix(Type::Q5_K, 151_936, 2048);
    model.spec.layers = kinds;
    model.spec.hidden = 2048;
    model.spec.attention =
        AttentionSpec { heads: 16, kv_heads: 2, head_dim: 256, rope_dims: 64, rope_base: 1e7 };
    model.spec.delta = DeltaSpec { key_heads: 16, value_heads: 32, head_dim: 128, taps: 4 };
    model.spec.moe = MoeSpec { experts: 512, used: 10, widths: vec![512; layers], shared_width: 512 };
    model
}

fn work(rows: usize, start: usize, experts: usize) -> Work {
    Work { rows, start, kv: KvType::F16, experts, logits: 1 }
}

/// Sum over layers of the stages that multiply with weights.
fn matrices(model: &Model, work: &Work) -> Cost {
    let mixer = |layer| match model.spec.layers[layer] {
        LayerKind::Delta => [Stage::DeltaProject, Stage::DeltaOut],
        LayerKind::Attention => [Stage::AttnProject, Stage::AttnOut],
    };
    let all = |layer| mixer(layer).into_iter().chain([Stage::Route, Stage::Shared, Stage::Experts]);
    (0..model.spec.layers.len())
        .flat_map(|layer| all(layer).map(move |stage| model.cost(stage, layer, work)))
        .sum()
}

#[test]
fn matrix_work_of_the_80b_is_6_5_gflop_a_token() {
    let whole = matrices(&model(48), &work(1, 0, 10));
    assert!((whole.operations() as f64 / 1e9 - 6.5).abs() < 0.05, "{whole:?}");
    let cut = matrices(&model(8), &work(1, 0, 10));
    assert!((cut.operations() as f64 / 1e9 - 1.1).abs() < 0.05, "{cut:?}");
    // Weights of a DeltaNet layer, an attention layer, and what both have.
    let delta = (8192 + 4096 + 64 + 4096) * 2048;
    let attention = (2 * 4096 + 2 * 512 + 4096) * 2048;
    let both = 512 * 2048 + 2048 + 3 * 512 * 2048 + 10 * 3 * 512 * 2048;
    assert_eq!(cut.operations(), 2 * (6 * delta + 2 * attention + 8 * both));
    assert_eq!(cut.plain, 2 * 8 * (512 * 2048 + 2048), "router and gate of the shared expert are F32");
    let many = matrices(&model(8), &work(100, 0, 10));
    assert_eq!(many.operations(), 100 * cut.operations());
}

#[test]
fn stages_of_the_80b() {
    let model = model(4);
    let cost = |stage, layer, work| model.cost(stage, layer, &work);
    // Convolution and 32 states of 128 by 128.
    let mix = cost(Stage::DeltaMix, 0, work(1, 0, 0));
    assert_eq!(mix.plain, 2 * 4 * 8192 + 6 * 32 * 128 * 128);
    assert_eq!(mix.bytes, 4 * (4 * 8192 + 2 * (32 * 128 * 128 + 3 * 8192)));
    // A row at position 9 attends to ten positions; 16 heads of 256 meet keys, then values.
    let mix = cost(Stage::AttnMix, 3, work(1, 9, 0));
    assert_eq!((mix.plain, mix.bytes), (10 * 2 * 2 * 16 * 256, 10 * 2 * 2 * 256 * 2));
    // Rows at positions 9 and 10.
    assert_eq!(cost(Stage::AttnMix, 3, work(2, 9, 0)).plain, (10 + 11) * 4 * 4096);
    let project = cost(Stage::AttnProject, 3, work(7, 0, 0));
    assert_eq!(project.bytes, (9216 * 2048 / 256 * 176 + 7 * 2 * 512 * 2) as u64);
    let experts = cost(Stage::Experts, 0, work(100, 0, 430));
    assert_eq!(experts.quantised, 2 * 100 * 10 * 3 * 512 * 2048);
    assert_eq!(experts.bytes, 430 * 824 * 1024, "824 KiB an expert");
    assert_eq!(cost(Stage::Head, 4, work(100, 0, 0)).quantised, 2 * 151_936 * 2048, "one row of logits");
    assert_eq!(cost(Stage::Embed, 0, work(3, 0, 0)), Cost { bytes: 3 * 8 * 176, ..Cost::default() });
}

#[test]
fn the_bound_is_whatever_takes_longest() {
    let peak = |unit, rate| Peak { unit, rate };
    let peaks = Peaks {
        workers: 2,
        quantised: peak("int8", 100.0),
        plain: peak("f32", 10.0),
        bytes: 5.0,
        link: None,
    };
    let least = |quantised, plain, bytes| peaks.least_seconds(&Cost { quantised, plain, bytes });
    assert_eq!(least(400, 10, 10), (5.0, Bound::Quantised));
    assert_eq!(least(100, 40, 10), (5.0, Bound::Plain));
    assert_eq!(least(100, 10, 50), (10.0, Bound::Memory));
    assert_eq!(
        [Bound::Quantised, Bound::Plain, Bound::Memory].map(|b| peaks.name(b)),
        ["int8", "f32", "memory"]
    );
}
