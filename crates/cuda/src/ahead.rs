//! Look-ahead: which experts the next layer will probably choose.

use cudarc::driver::DriverError;

use crate::Cuda;
use crate::head::Norm;
use crate::linear::{Rows, Then};
use crate::moe::Route;
use crate::open::Open;

impl Cuda {
    /// The norm and router of a layer on the hidden rows as they are now: each row's `used + margin` most likely
    /// experts, as the ascending union over all rows. Waits. `None` where rows do not fit one block.
    pub(crate) fn likely(
        &mut self,
        open: &Open,
        layer: usize,
        margin: usize,
    ) -> Result<Option<Vec<u32>>, DriverError> {
        let (model, device, rows) = (self.model.clone(), self.device.clone(), open.pass.rows());
        if rows > crate::BLOCK_ROWS {
            return Ok(None);
        }
        let (hidden, experts) = (model.spec.hidden, model.spec.moe.experts);
        let count = (model.spec.moe.used + margin).min(experts);
        let router = self.weights.dense.layers[layer].moe.router;
        let parts = [4 * hidden, 6 * hidden, 4 * experts, 4 * count, 4 * count, 4 * count];
        let mut at = self.scratch.ahead.take(&device, rows * parts.iter().sum::<usize>())?;
        let [normed, split, logits, ids, weights, order] = parts.map(|bytes| {
            at += (rows * bytes) as u64;
            at - (rows * bytes) as u64
        });
        let norm = Norm {
            x: open.buffers.hidden.at(),
            weight: self.weights.dense.layers[layer].moe.norm,
            out: normed,
            split: if open.single { 0 } else { split },
            ..Norm::default()
        };
        self.norm(rows, norm)?;
        if open.single {
            self.linear(true, &[router], Rows { at: normed, count: rows }, (logits, experts), Then::Store)?;
        } else {
            self.split_gemm(router, Rows { at: split, count: rows }, (logits, experts))?;
        }
        let p = Route {
            logits,
            ids,
            weights,
            order,
            counts: 0,
            rows: rows as i32,
            experts: experts as i32,
            used: count as i32,
        };
        self.choose(&p)?;
        let mut likely: Vec<u32> = device.download(ids, rows * count)?;
        likely.sort_unstable();
        likely.dedup();
        Ok(Some(likely))
    }
}
