//! Experts of passes of single rows.

mod layout;

use std::sync::Arc;

use cudarc::driver::DriverError;
use model::{Mixer, Spec};

use crate::driver::{Buffer, Device};
use crate::fetch::Keep;
use crate::few::{FEW, FewExperts, TILE};
use crate::moe::{Done, Gates, Mask};
use crate::open::Open;
use crate::weights::{DeviceWeights, Experts, Matrix, Triplet};
use crate::{Cuda, Error};

pub(crate) use layout::{Gpu, LINE};
use layout::{Layout, PARTS, STATIC, Shape};

/// Parameters of `few_experts`.
#[derive(Clone, Copy)]
#[repr(C)]
struct Single {
    mask: Mask,
    gate: FewExperts,
    up: FewExperts,
    down: FewExperts,
    shared: FewExperts,
    logits: u64,
    x: u64,
    ids: u64,
    weights: u64,
    order: u64,
    inner: u64,
    shared_gate: u64,
    shared_up: u64,
    share: u64,
    sum: u64,
    hidden: u64,
    launches: u64,
    ahead: [Ahead; 4],
    inner_room: i32,
    width: i32,
    cols: i32,
    experts: i32,
    used: i32,
    gates_stride: i32,
    count: i32,
    shared_cols: i32,
    first: i32,
    last: i32,
    aligned: i32,
    layout: Layout,
    keep: Keep,
}

/// Bytes that are brought to the second cache while experts are computed, so many by each block.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Ahead {
    at: u64,
    bytes: u32,
    share: u32,
}

impl Ahead {
    fn of(matrix: Matrix, blocks: usize) -> Ahead {
        let bytes = (matrix.rows * matrix.ty.bytes(matrix.cols).expect("rows are whole blocks")) & !15;
        let bytes = bytes.min(AHEAD);
        let share = bytes.div_ceil(blocks).next_multiple_of(16);
        Ahead { at: matrix.at, bytes: bytes as u32, share: share as u32 }
    }
}

/// Bytes of a matrix that are brought ahead, at most: what memory has time for behind the experts' own.
const AHEAD: usize = 6_000_000;

/// The bits of an inner number that is not there yet.
const MARK: u32 = u32::MAX;

/// Where inner numbers of single rows' experts are handed from block to block.
pub(crate) struct Inner {
    /// Of two launches, which have a half by turns, as all others leave it: full of marks; behind them, what counts launches.
    memory: Buffer,
    /// Numbers of a half.
    room: usize,
}

impl Inner {
    /// For any layer of a model.
    pub(crate) fn new(device: &Arc<Device>, spec: &Spec) -> Result<Inner, DriverError> {
        let widest = spec.moe.widths.iter().copied().max().unwrap_or(0);
        let room = FEW * (spec.moe.used * widest + spec.hidden.next_multiple_of(4));
        let memory = device.allocate(4 * (2 * room + 2))?;
        device.upload(&vec![MARK; 2 * room], memory.at)?;
        device.zero(memory.at + 8 * room as u64, 8)?;
        Ok(Inner { memory, room })
    }
}

/// Whether the matrices of all experts lie one behind the other in words of 16 bytes, as the GPU has them where all experts are there.
fn is_aligned(experts: &Experts) -> bool {
    let places = [experts.at, experts.stride];
    experts.places == 0 && experts.ty.block_len() > 1 && places.iter().all(|at| at.is_multiple_of(16))
}

/// Refuses layers of which not even one row's experts fit a block's shared memory.
pub(crate) fn check(spec: &Spec, weights: &DeviceWeights, gpu: Gpu) -> crate::Result<()> {
    for (triplet, layer) in weights.experts.iter().zip(&weights.dense.layers) {
        let shared = &layer.moe.shared_down;
        let found = Shape::of(spec, *triplet, (shared.ty, shared.cols)).layout(gpu).1 + STATIC;
        if found > gpu.shared {
            let what = "the shared memory that the experts of a layer take, in bytes";
            let expected =
                "no more than a block of this GPU has; other GPUs have more, or use `--backend cpu`";
            return Err(Error::Shape { what, found, expected });
        }
    }
    Ok(())
}

impl Cuda {
    /// A wave of experts of single rows, and with the first one the shared expert.
    pub(crate) fn experts_single(
        &mut self,
        open: &mut Open,
        (layer, triplet): (usize, Triplet),
        (mask, last): (Mask, bool),
    ) -> Done {
        let rows = open.pass.rows();
        let shared = self.weights.dense.layers[layer].moe.shared_down;
        let shared = Experts {
            ty: shared.ty,
            rows: shared.rows,
            cols: shared.cols,
            at: shared.at,
            stride: 0,
            places: 0,
        };
        let first = !open.summed;
        open.summed = true;
        let shape = Shape::of(&self.model.spec, triplet, (shared.ty, shared.cols));
        let gpu = Gpu::of(&self.device, &self.target, self.presence.count());
        let mut row = 0;
        while row < rows {
            let fitting = shape.most_rows(rows - row, gpu);
            let matrices = (triplet, shared);
            self.few_experts_rows(open, (layer, matrices), (row, fitting, gpu), (mask, first, last))?;
            row += fitting.0.rows;
        }
        Ok(())
    }

    /// The same of the rows of a shape, from `row` on.
    fn few_experts_rows(
        &self,
        open: &Open,
        (layer, ([gate, up, down], shared)): (usize, (Triplet, Experts)),
        (row, (shape, layout, bytes), gpu): (usize, (Shape, Layout, usize), Gpu),
        (mask, first, last): (Mask, bool, bool),
    ) -> Done {
        let (spec, buffers, count) = (&self.model.spec, &open.buffers, shape.rows);
        let columns = Gates::of(spec, shared.cols);
        let (used, hidden) = (spec.moe.used, spec.hidden);
        let gates = buffers.gates.at() + 4 * (row * columns.stride) as u64;
        let chosen = 4 * (row * used) as u64;
        let rows = 4 * (row * hidden) as u64;
        // All blocks have to be there at once: they wait for one another's numbers.
        let blocks = match count {
            1 => gpu.processors.min(shape.items().max(hidden.div_ceil(TILE))),
            _ => count * layout.row_jobs as usize,
        };
        let p = Single {
            mask,
            gate: self.few_experts(gate),
            up: self.few_experts(up),
            down: self.few_experts(down),
            shared: self.few_experts(shared),
            logits: gates,
            x: buffers.rounded.at() + rows / 2,
            ids: buffers.ids.at() + chosen,
            weights: buffers.weights.at() + chosen,
            order: buffers.order.at() + chosen,
            inner: self.inner.memory.at,
            shared_gate: gates + 4 * columns.gate as u64,
            shared_up: gates + 4 * columns.up as u64,
            share: gates + 4 * columns.share as u64,
            sum: buffers.sum.at() + rows,
            hidden: buffers.hidden.at() + rows,
            launches: self.inner.memory.at + 8 * self.inner.room as u64,
            ahead: if count == 1 { self.ahead(layer + 1, blocks) } else { Default::default() },
            inner_room: self.inner.room as i32,
            width: gate.rows as i32,
            cols: hidden as i32,
            experts: spec.moe.experts as i32,
            used: used as i32,
            gates_stride: columns.stride as i32,
            count: count as i32,
            shared_cols: shared.cols as i32,
            first: i32::from(first),
            last: i32::from(last),
            aligned: i32::from([gate, up].iter().all(is_aligned)),
            layout,
            keep: self.keep(open, layer, gate),
        };
        let warps = PARTS * layout.groups as usize;
        let (kernel, warps) = match count {
            1 => (&self.kernels.few_experts, warps + 1),
            _ => (&self.kernels.more_experts, warps),
        };
        self.device.launch(kernel, (blocks, 1, 1), 32 * warps, bytes, &p)
    }

    /// Of the matrices that a layer begins with: what the kernel behind the layer before reads.
    fn ahead(&self, layer: usize, blocks: usize) -> [Ahead; 4] {
        let mut ahead = [Ahead::default(); 4];
        let matrices = match self.weights.dense.layers.get(layer).map(|layer| &layer.mixer) {
            Some(Mixer::Delta(weights)) => vec![weights.qkv, weights.z],
            Some(Mixer::Attention(weights)) => vec![weights.query, weights.gate, weights.key, weights.value],
            None => vec![],
        };
        for (to, matrix) in ahead.iter_mut().zip(matrices) {
            *to = Ahead::of(matrix, blocks);
        }
        ahead
    }
}
