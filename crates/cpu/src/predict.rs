//! Look-ahead: which experts the next layer will probably choose.

use model::{MoeWeights, ResidentMatrix, Spec};

use crate::gemm::{self, Input, Product, Then};
use crate::memory::{Aligned, Out, Rows, carve};
use crate::open::Open;
use crate::team::Team;

/// The norm and router of a layer on the hidden rows as they are now: each row's `used + margin` largest
/// logits, as the ascending union over all rows. `None` where rows do not fit one block.
///
/// Shapes: hidden [rows, hidden], logits [rows, experts]. The scratch block is free between `shared` and the
/// next layer's first stage; nothing else of the pass is touched.
pub(crate) fn predict(
    team: &mut Team,
    spec: &Spec,
    weights: &MoeWeights<ResidentMatrix, Vec<f32>>,
    open: &mut Open,
    margin: usize,
) -> Option<Vec<u32>> {
    let (rows, cols, experts) = (open.pass.rows(), spec.hidden, spec.moe.experts);
    if rows > crate::BLOCK_ROWS {
        return None;
    }
    let mut norm = Aligned::default();
    norm.reserve(rows * cols);
    let [logits] = carve(&mut open.buffers.block, crate::moe::router_parts(spec, rows));
    let kernels = team.kernels;
    for row in 0..rows {
        let from = &open.buffers.hidden[row * cols..(row + 1) * cols];
        (kernels.rms_norm)(from, &weights.norm, spec.rms_eps, &mut norm[row * cols..(row + 1) * cols]);
    }
    let x = Input::exact(Rows::new(&norm, cols, rows));
    let out = Out::new(logits, experts);
    gemm::dense(team, &[Product { weights: (&weights.router).into(), x, out, then: Then::Store }]);

    let count = (spec.moe.used + margin).min(experts);
    let mut likely = vec![false; experts];
    let mut order: Vec<u32> = Vec::with_capacity(experts);
    for logits in logits.chunks_exact(experts) {
        order.clear();
        order.extend(0..experts as u32);
        if count < experts {
            order.select_nth_unstable_by(count, |&a, &b| logits[b as usize].total_cmp(&logits[a as usize]));
        }
        order[..count].iter().for_each(|&expert| likely[expert as usize] = true);
    }
    Some((0..experts as u32).filter(|&expert| likely[expert as usize]).collect())
}
