//! Stages `route`, `shared`, `experts`: the mixture of experts.

use std::ops::Range;

use cudarc::driver::DriverError;
use model::{Spec, Wave};
use quant::Type;

use crate::Cuda;
use crate::driver::Device;
use crate::few::{Input, Output};
use crate::head::Norm;
use crate::kernels::Kernels;
use crate::linear::Rows;
use crate::open::Open;
use crate::weights::Matrix;

pub(crate) type Done = Result<(), DriverError>;

/// One bit for each expert.
pub(crate) type Mask = [u32; 32];

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Route {
    pub(crate) logits: u64,
    pub(crate) ids: u64,
    pub(crate) weights: u64,
    pub(crate) order: u64,
    pub(crate) counts: u64,
    pub(crate) rows: i32,
    pub(crate) experts: i32,
    pub(crate) used: i32,
    pub(crate) stride: i32,
}

impl Kernels {
    /// Chooses experts, as many as asked for, to wherever is asked for.
    pub(crate) fn choose(&self, device: &Device, p: &Route) -> Done {
        const WARPS: usize = 4; // a row each
        let keys = 4 * WARPS * p.experts as usize;
        device.launch(&self.route, ((p.rows as usize).div_ceil(WARPS), 1, 1), 32 * WARPS, keys, p)
    }
}

impl Cuda {
    pub(crate) fn route_rows(&mut self, open: &mut Open, layer: usize, rows: Range<usize>) -> Done {
        let (spec, device) = (self.model.clone(), self.device.clone());
        let (spec, weights) = (&spec.spec, &self.weights.dense.layers[layer].moe);
        let (router, count) = (weights.router, rows.len());
        open.routed = rows.end;
        (open.grouped, open.summed) = (false, false);
        if open.single {
            self.foresee(open, layer + 1)?;
            return self.route_single(open, layer);
        }
        let (buffers, offset) = (&open.buffers, rows.start as u64);
        if rows.start == 0 {
            device.zero(buffers.counts.at(), 8 * spec.moe.experts)?;
        }
        let at = offset * spec.hidden as u64;
        let split = self.scratch.split.take(&device, 4 * count * spec.hidden)?;
        let logits = self.scratch.logits.take(&device, 4 * count * spec.moe.experts)?;
        let norm = Norm {
            x: buffers.hidden.at() + 4 * at,
            weight: weights.norm,
            rounded: buffers.rounded.at() + 2 * at,
            split,
            dot: weights.shared_router,
            share: buffers.share.at() + 4 * offset,
            ..Norm::default()
        };
        self.norm(count, norm)?;
        self.split_gemm(router, Rows { at: split, count }, (logits, spec.moe.experts))?;
        self.choose(open, rows, (logits, spec.moe.experts))
    }

    /// Chooses the experts of rows whose logits lie `stride` numbers apart.
    fn choose(&self, open: &Open, rows: Range<usize>, (logits, stride): (u64, usize)) -> Done {
        let (moe, buffers, count) = (&self.model.spec.moe, &open.buffers, rows.len());
        let used = 4 * (rows.start * moe.used) as u64;
        let p = Route {
            logits,
            ids: buffers.ids.at() + used,
            weights: buffers.weights.at() + used,
            order: buffers.order.at() + used,
            counts: buffers.counts.at(),
            rows: count as i32,
            experts: moe.experts as i32,
            used: moe.used as i32,
            stride: stride as i32,
        };
        self.kernels.choose(&self.device, &p)
    }

    /// Everything that multiplies a layer's second norm, of single rows: router, gate and up of the shared expert, and its
    /// share. The choice of experts is left to `few_experts`.
    fn route_single(&mut self, open: &mut Open, layer: usize) -> Done {
        let (device, rows) = (self.device.clone(), open.pass.rows());
        let weights = &self.weights.dense.layers[layer].moe;
        let columns = Gates::of(&self.model.spec, weights.shared_gate.rows);
        let layers = self.model.spec.layers.len();
        open.buffers.gates.turn(&device, (layer, layers), (rows, 4 * columns.stride))?;
        open.buffers.norm.take(&device, 4 * rows * self.model.spec.hidden)?;
        let buffers = &open.buffers;
        let at = |column: usize| buffers.gates.at() + 4 * column as u64;
        let share =
            Matrix { ty: Type::F32, rows: 1, cols: self.model.spec.hidden, at: weights.shared_router };
        let outputs = [
            Output { matrix: weights.router, out: at(0), exact: true },
            Output { matrix: share, out: at(columns.share), exact: true },
            Output { matrix: weights.shared_gate, out: at(columns.gate), exact: false },
            Output { matrix: weights.shared_up, out: at(columns.up), exact: false },
        ];
        let input = Input::Norm {
            x: buffers.hidden.at(),
            index: 0,
            weight: weights.norm,
            normed: buffers.norm.at(),
            rounded: buffers.rounded.at(),
        };
        self.few(&outputs, (input, rows), columns.stride, false)
    }

    pub(crate) fn shared_rows(&mut self, open: &Open, layer: usize, rows: Range<usize>) -> Done {
        if open.single {
            return Ok(()); // with the routed ones
        }
        let (spec, device) = (self.model.clone(), self.device.clone());
        let (spec, weights) = (&spec.spec, &self.weights.dense.layers[layer].moe);
        let (gate, up, down) = (weights.shared_gate, weights.shared_up, weights.shared_down);
        let (buffers, count, width) = (&open.buffers, rows.len(), gate.rows);
        let at = (rows.start * spec.hidden) as u64;
        let inner = self.scratch.inner.take(&device, 2 * count * width)?;
        let (to, share) = (buffers.sum.at() + 4 * at, buffers.share.at() + 4 * rows.start as u64);
        let x = Rows { at: buffers.rounded.at() + 2 * at, count };
        self.gated_network([gate, up, down], x, inner, (to, share))
    }

    /// Makes sure that the choice of a pass of single rows has been stored.
    pub(crate) fn chosen_single(&self, open: &Open) -> Done {
        let (spec, buffers) = (&self.model.spec, &open.buffers);
        self.device.zero(buffers.counts.at(), 4 * spec.moe.experts)?;
        let columns = Gates::of(spec, self.model.spec.moe.shared_width);
        self.choose(open, 0..open.pass.rows(), (buffers.gates.at(), columns.stride))
    }

    /// Experts that rows of the pass have chosen. Waits.
    pub(crate) fn chosen(&self, open: &Open) -> Result<Vec<u32>, DriverError> {
        if open.single {
            self.chosen_single(open)?;
        }
        let counts: Vec<i32> = self.device.download(open.buffers.counts.at(), self.model.spec.moe.experts)?;
        Ok((0..).zip(counts).filter(|(_, count)| *count > 0).map(|(expert, _)| expert).collect())
    }

    pub(crate) fn expert_rows(&mut self, open: &mut Open, layer: usize, wave: &Wave) -> Done {
        let mut mask = [0u32; 32];
        wave.experts.iter().for_each(|placed| mask[placed.expert as usize / 32] |= 1 << (placed.expert % 32));
        let (triplet, slots) = self.place(open, layer, wave)?;
        if open.single {
            self.experts_single(open, (layer, triplet), (mask, wave.last))?;
            if wave.last && layer + 1 == self.model.spec.layers.len() {
                self.settle_fetched(open)?;
            }
        } else {
            let list: Vec<u32> = wave.experts.iter().map(|placed| placed.expert).collect();
            self.experts_grouped(open, triplet, &list, (mask, wave.last))?;
        }
        slots.map_or(Ok(()), |slots| slots.enqueued())
    }
}

/// Columns of what single rows get from a layer's second norm: router's logits | gate | up of the shared expert | its share.
pub(crate) struct Gates {
    pub(crate) gate: usize,
    pub(crate) up: usize,
    pub(crate) share: usize,
    pub(crate) stride: usize,
}

impl Gates {
    /// For a shared expert of `width` inner numbers.
    pub(crate) fn of(spec: &Spec, width: usize) -> Gates {
        let gate = spec.moe.experts.next_multiple_of(4);
        Gates {
            gate,
            up: gate + width,
            share: gate + 2 * width,
            stride: (gate + 2 * width + 1).next_multiple_of(4),
        }
    }
}
