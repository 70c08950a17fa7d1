//! `route`, `shared`, `experts`: the mixture of experts.

use std::ops::Range;

use model::{ExpertTensor, Intermediate, Matrix, PlacedExpert, Result, Slot, Stage, Wave};

use crate::Context;
use crate::linear::Linear;
use crate::math::{dot, sigmoid, silu, softmax};
use crate::open::{Open, failure};

impl Context {
    /// n = norm(hidden); softmax over all experts; the largest ones, ties to the lower number, with weights
    /// that sum to 1.
    pub(crate) fn route(&self, open: &mut Open, layer: usize, rows: Range<usize>) -> Result<()> {
        let (spec, weights) = (&self.model.spec, &self.weights.layers[layer].moe);
        let norm = open.normed(rows.clone(), &weights.norm, spec.rms_eps);
        let logits = Linear::from(&weights.router).apply(&norm, self.options.rounding)?;
        let used = spec.moe.used;
        for row in 0..rows.len() {
            open.moe.chosen[rows.start + row] = choose(logits.row(row), used);
        }
        let chosen = &open.moe.chosen[rows.clone()];
        let matrix = |f: fn(&(u32, f32)) -> f32| Matrix {
            rows: rows.len(),
            cols: used,
            data: chosen.iter().flatten().map(f).collect(),
        };
        let (ids, chosen_weights) = (matrix(|pair| pair.0 as f32), matrix(|pair| pair.1));
        open.moe.norm.data[rows.start * spec.hidden..rows.end * spec.hidden].copy_from_slice(&norm.data);
        open.leave([
            (Intermediate::RouteNorm, norm),
            (Intermediate::RouteIds, ids),
            (Intermediate::RouteWeights, chosen_weights),
        ]);
        Ok(())
    }

    /// sum ← sigmoid(n · shared_router) · down(SiLU(gate n) ⊙ up n).
    pub(crate) fn shared(&self, open: &mut Open, layer: usize, rows: Range<usize>) -> Result<()> {
        let weights = &self.weights.layers[layer].moe;
        let norm = open.take(Intermediate::RouteNorm, &rows, (Stage::Shared, layer))?;
        let (gate, up) = (Linear::from(&weights.shared_gate), Linear::from(&weights.shared_up));
        let mut out = self.expert([gate, up, Linear::from(&weights.shared_down)], &norm)?;
        for (row, out) in out.data.chunks_exact_mut(norm.cols).enumerate() {
            let share = sigmoid(dot(norm.row(row), &weights.shared_router));
            out.iter_mut().for_each(|out| *out = (f64::from(*out) * share) as f32);
        }
        open.moe.sum.data[rows.start * out.cols..rows.end * out.cols].copy_from_slice(&out.data);
        open.moe.pairs = 0;
        open.leave([(Intermediate::SharedOut, out)]);
        Ok(())
    }

    /// sum ← sum + weight · expert(n) for each expert of the wave and each row that chose it; after the last
    /// wave hidden ← hidden + sum.
    pub(crate) fn experts(&self, open: &mut Open, layer: usize, wave: &Wave) -> Result<()> {
        for placed in &*wave.experts {
            self.routed_expert(open, layer, placed)?;
        }
        if wave.last {
            let rows = open.pass.rows();
            let (pairs, chosen) = (open.moe.pairs, rows * self.model.spec.moe.used);
            if pairs != chosen {
                let message = format!("the waves had {pairs} pairs of expert and row, chosen were {chosen}");
                return Err(failure(Stage::Experts, layer, message));
            }
            let sum = std::mem::take(&mut open.moe.sum);
            let hidden = open.add_to_hidden(0..rows, &sum);
            open.moe.sum = sum;
            open.leave([(Intermediate::ExpertsHidden, hidden)]);
        }
        Ok(())
    }

    fn routed_expert(&self, open: &mut Open, layer: usize, placed: &PlacedExpert) -> Result<()> {
        let moe = &mut open.moe;
        let weight_of =
            |row: &[(u32, f32)]| row.iter().find(|(id, _)| *id == placed.expert).map(|pair| pair.1);
        let pairs: Vec<(usize, f32)> = (moe.chosen.iter().enumerate())
            .filter_map(|(row, chosen)| Some((row, weight_of(chosen)?)))
            .collect();
        if pairs.is_empty() {
            return Ok(());
        }
        let matrices = self.placed_matrices(layer, placed)?;
        let data = pairs.iter().flat_map(|(row, _)| moe.norm.row(*row)).copied().collect();
        let out = self.expert(matrices, &Matrix { rows: pairs.len(), cols: moe.norm.cols, data })?;
        for (index, &(row, weight)) in pairs.iter().enumerate() {
            let sum = &mut moe.sum.data[row * out.cols..(row + 1) * out.cols];
            sum.iter_mut().zip(out.row(index)).for_each(|(sum, out)| *sum += weight * out);
        }
        moe.pairs += pairs.len();
        Ok(())
    }

    /// Gate, up and down of an expert, where its slot says.
    fn placed_matrices(&self, layer: usize, placed: &PlacedExpert) -> Result<[Linear<'_>; 3]> {
        let (slot, layout) = (&placed.slot, &self.model.experts[layer]);
        if slot.arena != Slot::FILE {
            let message =
                format!("expert {} is in arena {}, not in the mapped file", placed.expert, slot.arena);
            return Err(failure(Stage::Experts, layer, message));
        }
        let at = |offset: u64, tensor: &ExpertTensor| Linear {
            name: &self.model.gguf.tensors()[tensor.tensor].name,
            ty: tensor.ty,
            rows: tensor.rows,
            cols: tensor.cols,
            bytes: self.model.file_bytes(offset, tensor.bytes()),
        };
        Ok([at(slot.gate, &layout.gate), at(slot.up, &layout.up), at(slot.down, &layout.down)])
    }

    /// down(SiLU(gate n) ⊙ up n): [rows, hidden].
    fn expert(&self, [gate, up, down]: [Linear<'_>; 3], norm: &Matrix) -> Result<Matrix> {
        let mut inner = gate.apply(norm, self.options.rounding)?;
        let up = up.apply(norm, self.options.rounding)?;
        for (gate, &up) in inner.data.iter_mut().zip(&up.data) {
            *gate = (silu((*gate).into()) * f64::from(up)) as f32;
        }
        down.apply(&inner, self.options.rounding)
    }
}

/// The `used` most probable experts with their renormalised weights, by falling weight, ties to the lower
/// number.
fn choose(logits: &[f32], used: usize) -> Vec<(u32, f32)> {
    let mut probabilities: Vec<f64> = logits.iter().map(|&x| x.into()).collect();
    softmax(&mut probabilities);
    let mut order: Vec<usize> = (0..logits.len()).collect();
    // Stable: equal ones stay in ascending order.
    order.sort_by(|&a, &b| probabilities[b].total_cmp(&probabilities[a]));
    order.truncate(used);
    let sum: f64 = order.iter().map(|&expert| probabilities[expert]).sum();
    order.iter().map(|&expert| (expert as u32, (probabilities[expert] / sum) as f32)).collect()
}

#[cfg(test)]
mod tests {
    use super::choose;

    fn ids(chosen: &[(u32, f32)]) -> Vec<u32> {
        chosen.iter().map(|pair| pair.0).collect()
    }

    #[test]
    fn ties_go_to_the_lower_expert_and_weights_sum_to_one() {
        assert_eq!(ids(&choose(&[1.0, 2.0, 1.0, 2.0], 3)), [1, 3, 0]);
        let chosen = choose(&[3.0f32.ln(), -1e30, 0.0, f32::MIN], 2);
        assert_eq!(ids(&chosen), [0, 2]);
        assert!((chosen[0].1 - 0.75).abs() < 1e-6 && (chosen[1].1 - 0.25).abs() < 1e-6);
    }
}
