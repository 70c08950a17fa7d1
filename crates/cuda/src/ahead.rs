//! Look-ahead: which experts the next layer will probably choose.

use cudarc::driver::DriverError;

use crate::Cuda;
use crate::few::{Input, Output};
use crate::head::Norm;
use crate::linear::Rows;
use crate::moe::Route;
use crate::open::Open;

/// Most experts that are chosen for a row at once.
const MOST: usize = 32;

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
        let (hidden, experts, used) = (model.spec.hidden, model.spec.moe.experts, model.spec.moe.used);
        let count = (used + margin).min(experts).min(MOST.max(used));
        let moe = &self.weights.dense.layers[layer].moe;
        let (router, weight) = (moe.router, moe.norm);
        let parts = [4 * hidden, 4 * experts, 4 * count, 4 * count, 4 * count];
        let mut at = self.scratch.ahead.take(&device, rows * parts.iter().sum::<usize>())?;
        let [split, logits, ids, weights, order] = parts.map(|bytes| {
            at += (rows * bytes) as u64;
            at - (rows * bytes) as u64
        });
        let x = open.buffers.hidden.at();
        if open.single {
            let input = Input::Norm { x, index: 0, weight, normed: 0, rounded: 0 };
            let output = Output { matrix: router, out: logits, exact: true };
            self.few(&[output], (input, rows), experts, false)?;
        } else {
            self.norm(rows, Norm { x, weight, split, ..Norm::default() })?;
            self.split_gemm(router, Rows { at: split, count: rows }, (logits, experts))?;
        }
        let route = Route {
            logits,
            ids,
            weights,
            order,
            counts: 0,
            rows: rows as i32,
            experts: experts as i32,
            used: count as i32,
            stride: experts as i32,
        };
        self.kernels.choose(&device, &route)?;
        let mut likely: Vec<u32> = device.download(ids, rows * count)?;
        likely.sort_unstable();
        likely.dedup();
        Ok(Some(likely))
    }
}
