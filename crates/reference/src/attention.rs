//! `attn.project`, `attn.mix`, `attn.out`: a gated attention layer.

use std::ops::Range;

use half::slice::HalfFloatSliceExt;
use model::state::host::{HostState, Rows, Side};
use model::state::{PAGE, PageId};
use model::{AttentionSpec, AttentionWeights, Intermediate, Matrix, Mixer, ResidentMatrix, Result, Stage};

use crate::Context;
use crate::linear::Linear;
use crate::math::{add_scaled, dot, rms_norm_rows, sigmoid, softmax};
use crate::open::{Open, failure, zeros};

impl Context {
    fn attention(&self, layer: usize, stage: Stage) -> Result<&AttentionWeights<ResidentMatrix, Vec<f32>>> {
        match &self.weights.layers[layer].mixer {
            Mixer::Attention(weights) => Ok(weights),
            Mixer::Delta(_) => Err(failure(stage, layer, "this is a DeltaNet layer".to_string())),
        }
    }

    /// n = norm(hidden); q, gate, k, v = projections of n; q and k normed per head and rotated; k and v
    /// stored, rounded to the KV type.
    pub(crate) fn attn_project(
        &self,
        state: &mut HostState,
        open: &mut Open,
        layer: usize,
        rows: Range<usize>,
    ) -> Result<()> {
        let weights = self.attention(layer, Stage::AttnProject)?;
        let (spec, eps) = (&self.model.spec.attention, self.model.spec.rms_eps);
        let norm = open.normed(rows.clone(), &self.weights.layers[layer].norm, eps);
        let project = |matrix: &ResidentMatrix| Linear::from(matrix).apply(&norm, self.options.rounding);
        let (mut query, gate) = (project(&weights.query)?, project(&weights.gate)?);
        let (mut key, value) = (project(&weights.key)?, project(&weights.value)?);
        query.data = rms_norm_rows(&query.data, &weights.query_norm, eps);
        key.data = rms_norm_rows(&key.data, &weights.key_norm, eps);

        let ordinal = self.model.spec.ordinal(layer);
        for (index, part) in open.pass.runs_in(rows.clone()) {
            for row in part {
                let position = open.pass.runs[index].position(row);
                let pages = &open.state.runs[index].pages;
                let row = row - rows.start;
                rotate(spec, position, &mut query.data[row * spec.query_dim()..][..spec.query_dim()]);
                rotate(spec, position, &mut key.data[row * spec.kv_dim()..][..spec.kv_dim()]);
                for (side, matrix) in [(Side::Key, &key), (Side::Value, &value)] {
                    for (head, numbers) in matrix.row(row).chunks_exact(spec.head_dim).enumerate() {
                        state.store(pages, position, (ordinal, side, head), numbers);
                    }
                }
            }
        }
        open.leave([
            (Intermediate::AttnQuery, query),
            (Intermediate::AttnGate, gate),
            (Intermediate::AttnKey, key),
            (Intermediate::AttnValue, value),
        ]);
        Ok(())
    }

    /// softmax(q·k / sqrt(head_dim)) v over the keys up to the row's position, times sigmoid(gate).
    pub(crate) fn attn_mix(
        &self,
        state: &HostState,
        open: &mut Open,
        layer: usize,
        rows: Range<usize>,
    ) -> Result<()> {
        let here = (Stage::AttnMix, layer);
        let query = open.take(Intermediate::AttnQuery, &rows, here)?;
        let gate = open.take(Intermediate::AttnGate, &rows, here)?;
        let (spec, ordinal) = (&self.model.spec.attention, self.model.spec.ordinal(layer));
        let group = spec.heads / spec.kv_heads;
        let mut mixed = zeros(rows.len(), spec.query_dim());
        for (index, part) in open.pass.runs_in(rows.clone()) {
            let (run, pages) = (&open.pass.runs[index], &open.state.runs[index].pages);
            let context = run.position(part.end - 1) + 1;
            for kv_head in 0..spec.kv_heads {
                let read = |side| gather(state, pages, (ordinal, side, kv_head), context * spec.head_dim);
                let (keys, values) = (read(Side::Key), read(Side::Value));
                for row in part.clone() {
                    let seen = (run.position(row) + 1) * spec.head_dim;
                    let row = row - rows.start;
                    for head in kv_head * group..(kv_head + 1) * group {
                        let columns = head * spec.head_dim..(head + 1) * spec.head_dim;
                        let q = &query.row(row)[columns.clone()];
                        let o = attend(q, &keys[..seen], &values[..seen]);
                        let gate = &gate.row(row)[columns.clone()];
                        let out = &mut mixed.data[row * spec.query_dim()..][columns];
                        for ((out, o), &gate) in out.iter_mut().zip(o).zip(gate) {
                            *out = (o * sigmoid(gate.into())) as f32;
                        }
                    }
                }
            }
        }
        open.leave([(Intermediate::AttnMixed, mixed)]);
        Ok(())
    }

    /// hidden ← hidden + out · mixed.
    pub(crate) fn attn_out(&self, open: &mut Open, layer: usize, rows: Range<usize>) -> Result<()> {
        let weights = self.attention(layer, Stage::AttnOut)?;
        let mixed: Matrix = open.take(Intermediate::AttnMixed, &rows, (Stage::AttnOut, layer))?;
        let out = Linear::from(&weights.out).apply(&mixed, self.options.rounding)?;
        let hidden = open.add_to_hidden(rows, &out);
        open.leave([(Intermediate::AttnHidden, hidden)]);
        Ok(())
    }
}

/// Rotates the leading dimensions of every head of a row, pair (i, i + rope_dims / 2) by the angle
/// position · base^(−2i / rope_dims).
fn rotate(spec: &AttentionSpec, position: usize, row: &mut [f32]) {
    let half = spec.rope_dims / 2;
    for i in 0..half {
        let frequency = spec.rope_base.powf(-2.0 * i as f64 / spec.rope_dims as f64);
        let (sin, cos) = (position as f64 * frequency).sin_cos();
        for head in row.chunks_exact_mut(spec.head_dim) {
            let (x, y) = (f64::from(head[i]), f64::from(head[i + half]));
            head[i] = (x * cos - y * sin) as f32;
            head[i + half] = (x * sin + y * cos) as f32;
        }
    }
}

/// The first `len` numbers of the keys or values of one head of a sequence: [positions, head_dim].
fn gather(
    state: &HostState,
    pages: &[PageId],
    (ordinal, side, head): (usize, Side, usize),
    len: usize,
) -> Vec<f32> {
    let mut out = vec![0.0; len];
    let page_len = PAGE * state.shape().head_dim;
    for (out, &page) in out.chunks_mut(page_len).zip(pages) {
        match state.rows(page, ordinal, side, head) {
            Rows::F16(numbers) => numbers[..out.len()].convert_to_f32_slice(out),
            Rows::F32(numbers) => out.copy_from_slice(&numbers[..out.len()]),
        }
    }
    out
}

/// softmax(q·k / sqrt(dim)) v for one query over keys and values [positions, dim].
fn attend(query: &[f32], keys: &[f32], values: &[f32]) -> Vec<f64> {
    let dim = query.len();
    let scale = 1.0 / (dim as f64).sqrt();
    let mut weights: Vec<f64> = keys.chunks_exact(dim).map(|key| dot(query, key) * scale).collect();
    softmax(&mut weights);
    let mut out = vec![0.0; dim];
    for (weight, value) in weights.iter().zip(values.chunks_exact(dim)) {
        add_scaled(&mut out, *weight, value.iter().map(|&v| f64::from(v)));
    }
    out
}
