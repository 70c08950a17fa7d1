//! `delta.project`, `delta.mix`, `delta.out`: a Gated DeltaNet layer.

use std::ops::Range;

use model::state::host::HostState;
use model::{DeltaSpec, DeltaWeights, Intermediate, Matrix, Mixer, Result, Run, Stage, state::OpenRun};

use crate::Context;
use crate::linear::Linear;
use crate::math::{l2_norm, rms_norm_rows, sigmoid, silu, softplus};
use crate::open::{Open, failure, zeros};
use crate::options::DeltaForm;
use crate::rule::{self, HeadRows};

type Weights = DeltaWeights<model::ResidentMatrix, Vec<f32>>;

impl Context {
    fn delta(&self, layer: usize, stage: Stage) -> Result<&Weights> {
        match &self.weights.layers[layer].mixer {
            Mixer::Delta(weights) => Ok(weights),
            Mixer::Attention(_) => Err(failure(stage, layer, "this layer attends".to_string())),
        }
    }

    /// n = norm(hidden); q | k | v, z, beta | alpha = projections of n.
    pub(crate) fn delta_project(&self, open: &mut Open, layer: usize, rows: Range<usize>) -> Result<()> {
        let weights = self.delta(layer, Stage::DeltaProject)?;
        let norm = open.normed(rows, &self.weights.layers[layer].norm, self.model.spec.rms_eps);
        let rounding = self.options.rounding;
        open.leave([
            (Intermediate::DeltaQkv, Linear::from(&weights.qkv).apply(&norm, rounding)?),
            (Intermediate::DeltaZ, Linear::from(&weights.z).apply(&norm, rounding)?),
            (Intermediate::DeltaBetaAlpha, Linear::from(&weights.beta_alpha).apply(&norm, rounding)?),
        ]);
        Ok(())
    }

    /// Convolution, delta rule, gated norm; advances the state of every run in `rows`.
    pub(crate) fn delta_mix(
        &self,
        state: &mut HostState,
        open: &mut Open,
        layer: usize,
        rows: Range<usize>,
    ) -> Result<()> {
        let here = (Stage::DeltaMix, layer);
        let mixer = DeltaLayer {
            spec: &self.model.spec.delta,
            weights: self.delta(layer, Stage::DeltaMix)?,
            form: self.options.delta,
            ordinal: self.model.spec.ordinal(layer),
            first_row: rows.start,
            qkv: open.take(Intermediate::DeltaQkv, &rows, here)?,
            beta_alpha: open.take(Intermediate::DeltaBetaAlpha, &rows, here)?,
        };
        let z = open.take(Intermediate::DeltaZ, &rows, here)?;
        let mut heads = Vec::with_capacity(z.data.len());
        for (index, part) in open.pass.runs_in(rows.clone()) {
            heads.extend(mixer.run(state, &open.pass.runs[index], &open.state.runs[index], part));
        }
        // The norm first, then the gate.
        let mut mixed = zeros(z.rows, z.cols);
        mixed.data = rms_norm_rows(&heads, &mixer.weights.norm, self.model.spec.rms_eps);
        for (mixed, &z) in mixed.data.iter_mut().zip(&z.data) {
            *mixed = (f64::from(*mixed) * silu(z.into())) as f32;
        }
        open.leave([(Intermediate::DeltaMixed, mixed)]);
        Ok(())
    }

    /// hidden ← hidden + out · mixed.
    pub(crate) fn delta_out(&self, open: &mut Open, layer: usize, rows: Range<usize>) -> Result<()> {
        let weights = self.delta(layer, Stage::DeltaOut)?;
        let mixed = open.take(Intermediate::DeltaMixed, &rows, (Stage::DeltaOut, layer))?;
        let out = Linear::from(&weights.out).apply(&mixed, self.options.rounding)?;
        let hidden = open.add_to_hidden(rows, &out);
        open.leave([(Intermediate::DeltaHidden, hidden)]);
        Ok(())
    }
}

/// One layer over one block of rows.
struct DeltaLayer<'a> {
    spec: &'a DeltaSpec,
    weights: &'a Weights,
    form: DeltaForm,
    /// The layer's number among DeltaNet layers.
    ordinal: usize,
    /// The block's first row.
    first_row: usize,
    /// [rows of the block, channels].
    qkv: Matrix,
    /// [rows of the block, 2·value_heads].
    beta_alpha: Matrix,
}

impl DeltaLayer<'_> {
    /// Advances one sequence by the rows `part`; returns o: [rows, value_dim].
    fn run(&self, state: &mut HostState, run: &Run, open: &OpenRun, part: Range<usize>) -> Vec<f32> {
        if part.start == run.rows.start {
            state.copy_recurrent(open.from, open.to, self.ordinal);
        }
        let mut out = Vec::new();
        for cell in run.cells(part) {
            // A state wanted in the middle of a cell takes the cell's first rows once more, on a copy.
            for &(row, slot) in open.snapshots.iter().filter(|(row, _)| cell.contains(row)) {
                state.copy_recurrent(Some(open.to), slot, self.ordinal);
                self.advance(state.recurrent_mut(slot, self.ordinal), cell.start..row + 1);
            }
            out.extend(self.advance(state.recurrent_mut(open.to, self.ordinal), cell));
        }
        out
    }

    /// Convolution and delta rule over the rows of one grid cell, from and to a state
    /// (window [taps − 1, channels], states [value_heads, head_dim, head_dim]); returns o: [rows, value_dim].
    fn advance(&self, (window, states): (&mut [f32], &mut [f32]), rows: Range<usize>) -> Vec<f32> {
        let rows = rows.start - self.first_row..rows.end - self.first_row;
        let channels = self.spec.channels();
        let new = &self.qkv.data[rows.start * channels..rows.end * channels];
        let inputs = [&*window, new].concat();
        window.copy_from_slice(&inputs[new.len()..]);
        let mixed = self.convolve(&inputs, rows.len());

        let dim = self.spec.head_dim;
        let mut out = zeros(rows.len(), self.spec.value_dim());
        for (head, state) in states.chunks_exact_mut(dim * dim).enumerate() {
            let input = self.head_rows(&mixed, head, rows.clone());
            let o = match self.form {
                DeltaForm::Chunked => rule::chunked(state, &input),
                DeltaForm::Sequential => rule::sequential(state, &input),
            };
            for (out, o) in out.data.chunks_exact_mut(out.cols).zip(o.chunks_exact(dim)) {
                out[head * dim..][..dim].copy_from_slice(o);
            }
        }
        out.data
    }

    /// SiLU of the causal depthwise convolution: `inputs` [taps − 1 + rows, channels] to [rows, channels].
    fn convolve(&self, inputs: &[f32], rows: usize) -> Matrix {
        let (channels, taps) = (self.spec.channels(), self.spec.taps);
        let mut out = zeros(rows, channels);
        for row in 0..rows {
            for channel in 0..channels {
                let tap = |tap: usize| {
                    let weight = self.weights.conv[channel * taps + tap];
                    f64::from(weight) * f64::from(inputs[(row + tap) * channels + channel])
                };
                out.data[row * channels + channel] = silu((0..taps).map(tap).sum()) as f32;
            }
        }
        out
    }

    /// What value head `head` reads of the convolved rows q | k | v. It uses key head `head / r` where each
    /// key head serves r value heads in a row.
    fn head_rows(&self, mixed: &Matrix, head: usize, rows: Range<usize>) -> HeadRows {
        let (spec, dim) = (self.spec, self.spec.head_dim);
        let key_head = head / (spec.value_heads / spec.key_heads);
        let columns = |start: usize| (0..mixed.rows).map(move |row| &mixed.row(row)[start..start + dim]);
        let norm = |start: usize, factor: f64| {
            columns(start).flat_map(|x| l2_norm(x, factor, DeltaSpec::L2_EPS)).collect()
        };
        let beta_alpha = |row: usize, offset: usize| f64::from(self.beta_alpha.row(row)[offset + head]);
        let (a, dt_bias) = (f64::from(self.weights.a[head]), f64::from(self.weights.dt_bias[head]));
        HeadRows {
            dim,
            q: norm(key_head * dim, 1.0 / (dim as f64).sqrt()),
            k: norm(spec.key_dim() + key_head * dim, 1.0),
            v: columns(2 * spec.key_dim() + head * dim).flatten().copied().collect(),
            g: rows.clone().map(|row| a * softplus(beta_alpha(row, spec.value_heads) + dt_bias)).collect(),
            beta: rows.map(|row| sigmoid(beta_alpha(row, 0))).collect(),
        }
    }
}
