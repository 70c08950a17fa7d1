//! What passes work in, at the 80B's widths.

use model::{AttentionSpec, DeltaSpec, KvType, LayerKind, Limits, Model, MoeSpec};
use quant::Type;
use redlite_cpu::Cpu;
use testkit::{TinyModel, TinyOptions};

/// A model whose experts are of type `experts`, with the widths of the 80B where activations depend on them.
fn model(experts: Type) -> Model {
    let tiny = TinyOptions { hidden: 256, width: 256, experts, ..TinyOptions::default() };
    let mut model = Model::open(TinyModel::new(tiny).path()).unwrap();
    let layers = model.spec.layers.len();
    model.spec.layers = vec![LayerKind::Delta; layers];
    model.spec.hidden = 2048;
    model.spec.vocab = 151_936;
    model.spec.attention =
        AttentionSpec { heads: 16, kv_heads: 2, head_dim: 256, rope_dims: 64, rope_base: 1e7 };
    model.spec.delta = DeltaSpec { key_heads: 16, value_heads: 32, head_dim: 128, taps: 4 };
    model.spec.moe = MoeSpec { experts: 512, used: 10, widths: vec![512; layers], shared_width: 512 };
    model
}

fn scratch(model: &Model, rows: usize, exact: bool) -> u64 {
    let limits = Limits { positions: 1 << 20, kv: KvType::F16, pass_rows: rows };
    Cpu::scratch_bytes(model, &limits, exact)
}

#[test]
fn a_block_takes_less_than_600_mib_and_a_further_row_less_than_24_kb() {
    let model = model(Type::Q8_0);
    let block = scratch(&model, 2048, false);
    assert!(block <= 600 << 20, "{block}");
    for rows in [4096, 16_384] {
        let each = (scratch(&model, rows, false) - block) / (rows as u64 - 2048);
        assert!(each <= 24_000, "{each} bytes a row");
    }
    // Rows in single precision are kept where experts want them.
    let norm = 2048 * size_of::<f32>() as u64;
    for (model, exact) in [(&model, true), (&self::model(Type::BF16), false)] {
        let more = scratch(model, 16_384, exact) - scratch(&self::model(Type::Q8_0), 16_384, false);
        assert_eq!(more, (16_384 - 2048) * norm);
    }
}
