//! Stages `route`, `shared`, `experts`: the mixture of experts.

use std::ops::Range;

use cudarc::driver::DriverError;
use model::{Spec, Wave};
use quant::Type;

use crate::Cuda;
use crate::driver::Device;
use crate::few::{
    FEW, FewExperts, FewMatrix, Input, Output, SLACK, THREADS, TILE, UP_THREADS, UP_WARPS, row_of_x,
};
use crate::head::Norm;
use crate::kernels::Kernels;
use crate::linear::Rows;
use crate::open::Open;
use crate::sources::{few_window, table_bytes};
use crate::weights::{Matrix, Triplet};

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

#[derive(Clone, Copy)]
#[repr(C)]
struct ExpertsUp {
    mask: Mask,
    gate: FewExperts,
    up: FewExperts,
    logits: u64,
    x: u64,
    ids: u64,
    weights: u64,
    order: u64,
    out: u64,
    width: i32,
    cols: i32,
    experts: i32,
    used: i32,
    logits_stride: i32,
    count: i32,
    buffers: i32,
    room_at: i32,
    table_at: [i32; 2],
    keys_at: i32,
    tiles_at: i32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct ExpertsDown {
    mask: Mask,
    down: FewExperts,
    shared: FewMatrix,
    x: u64,
    gate: u64,
    up: u64,
    share: u64,
    ids: u64,
    order: u64,
    weights: u64,
    sum: u64,
    hidden: u64,
    rows: i32,
    cols: i32,
    used: i32,
    shared_cols: i32,
    inner_stride: i32,
    count: i32,
    first: i32,
    last: i32,
    abreast: i32,
    buffers: i32,
    by: i32,
    room_at: i32,
    table_at: [i32; 2],
    tiles_at: i32,
}

/// Shared memory of experts that are multiplied at a time, with few rows.
const ABREAST_BYTES: usize = 64 << 10;

/// Blocks of `experts_up` that a multiprocessor has registers for.
const UP_BLOCKS: usize = 3;

/// Shared memory of a block of `experts_up` and of `experts_down` beside what is asked for: their own, and the system's.
const UP_STATIC: usize = 3 * 8 * 32 * 4 + 1024;
const DOWN_STATIC: usize = 8 * 32 * 16 + 1024;

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
            return self.route_single(open, layer);
        }
        let (buffers, offset) = (&open.buffers, rows.start as u64);
        if rows.start == 0 {
            device.zero(buffers.counts.at(), 4 * spec.moe.experts)?;
        }
        let at = offset * spec.hidden as u64;
        let split = self.scratch.split.take(&device, 4 * count * spec.hidden)?;
        let logits = self.scratch.logits.take(&device, 4 * count * spec.moe.experts)?;
        let norm = Norm {
            x: buffers.hidden.at() + 4 * at,
            weight: weights.norm,
            out: buffers.norm.at() + 4 * at,
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
    /// share. The choice of experts is left to `experts_up`.
    fn route_single(&mut self, open: &mut Open, layer: usize) -> Done {
        let (device, rows) = (self.device.clone(), open.pass.rows());
        let weights = &self.weights.dense.layers[layer].moe;
        let columns = Gates::of(&self.model.spec, weights.shared_gate.rows);
        open.buffers.gates.take(&device, 4 * rows * columns.stride)?;
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
        } else {
            let list: Vec<u32> = wave.experts.iter().map(|placed| placed.expert).collect();
            self.experts_grouped(open, triplet, &list, (mask, wave.last))?;
        }
        slots.map_or(Ok(()), |slots| slots.enqueued())
    }

    fn experts_single(
        &mut self,
        open: &mut Open,
        (layer, [gate, up, down]): (usize, Triplet),
        (mask, last): (Mask, bool),
    ) -> Done {
        let (spec, rows, device) = (self.model.clone(), open.pass.rows(), self.device.clone());
        let spec = &spec.spec;
        let (used, hidden, width) = (spec.moe.used, spec.hidden, gate.rows);
        let shared = self.weights.dense.layers[layer].moe.shared_down;
        let columns = Gates::of(spec, shared.cols);
        let inner = self.scratch.inner.take(&device, 2 * rows * used * width)?;
        let buffers = &open.buffers;
        let tables = |first: Type, second: Type, at: usize| {
            let end = at + table_bytes(first);
            let second_at = if first == second { at } else { end };
            ([at as i32, second_at as i32], if first == second { end } else { end + table_bytes(second) })
        };
        let tile = |ty: Type, cols: usize| TILE * few_window(ty.bytes(cols).expect("whole blocks"));

        let room_at = row_of_x(hidden);
        let (table_at, keys_at) = tables(gate.ty, up.ty, room_at + 4 * UP_WARPS * TILE);
        let items = width.div_ceil(TILE) * used * rows;
        let tiles_at = keys_at + 4 * UP_WARPS.min(rows) * spec.moe.experts;
        let of_tile = tile(gate.ty, hidden) + tile(up.ty, hidden);
        let needed = |buffers: usize| tiles_at + buffers * of_tile + SLACK;
        // As many blocks as a multiprocessor holds of those that run ahead by a tile; one buffer where each has one tile.
        let fitting = |buffers: usize| (device.shared / (needed(buffers) + UP_STATIC)).min(UP_BLOCKS);
        let ahead = if items > UP_BLOCKS * device.processors as usize && fitting(2) > 0 { 2 } else { 1 };
        let blocks = items.min(fitting(ahead).max(1) * device.processors as usize);
        let p = ExpertsUp {
            mask,
            gate: self.few_experts(gate),
            up: self.few_experts(up),
            logits: buffers.gates.at(),
            x: buffers.rounded.at(),
            ids: buffers.ids.at(),
            weights: buffers.weights.at(),
            order: buffers.order.at(),
            out: inner,
            width: width as i32,
            cols: hidden as i32,
            experts: spec.moe.experts as i32,
            used: used as i32,
            logits_stride: columns.stride as i32,
            count: rows as i32,
            buffers: ahead as i32,
            room_at: room_at as i32,
            table_at,
            keys_at: keys_at as i32,
            tiles_at: tiles_at as i32,
        };
        device.launch(&self.kernels.experts_up, (blocks, 1, 1), UP_THREADS, needed(ahead), &p)?;

        let steps = width.div_ceil(128);
        let of_one = tile(down.ty, width) + row_of_x(width) + 4 * steps * TILE;
        let abreast = (ABREAST_BYTES / of_one).clamp(1, used);
        let room_at = abreast * row_of_x(width) + row_of_x(shared.cols);
        let room = 4 * TILE * (abreast * steps + shared.cols.div_ceil(128));
        let (table_at, tiles_at) = tables(down.ty, shared.ty, room_at + room);
        let of_part = abreast * tile(down.ty, width);
        let shared_bytes =
            |buffers: usize| tiles_at + tile(shared.ty, shared.cols) + buffers * of_part + SLACK;
        let parts = rows.min(FEW) * used.div_ceil(abreast);
        let ahead = if parts > 1 && shared_bytes(2) + DOWN_STATIC <= device.shared { 2 } else { 1 };
        let words = few_window(down.ty.bytes(width).expect("whole blocks")) / 16;
        let p = ExpertsDown {
            mask,
            down: self.few_experts(down),
            shared: self.few_matrix(shared, 0),
            x: inner,
            gate: buffers.gates.at() + 4 * columns.gate as u64,
            up: buffers.gates.at() + 4 * columns.up as u64,
            share: buffers.gates.at() + 4 * columns.share as u64,
            ids: buffers.ids.at(),
            order: buffers.order.at(),
            weights: buffers.weights.at(),
            sum: buffers.sum.at(),
            hidden: buffers.hidden.at(),
            rows: hidden as i32,
            cols: width as i32,
            used: used as i32,
            shared_cols: shared.cols as i32,
            inner_stride: columns.stride as i32,
            count: rows as i32,
            first: i32::from(!open.summed),
            last: i32::from(last),
            abreast: abreast as i32,
            buffers: ahead as i32,
            by: words.next_power_of_two().min(32) as i32,
            room_at: room_at as i32,
            table_at,
            tiles_at: tiles_at as i32,
        };
        open.summed = true;
        let grid = (hidden.div_ceil(TILE), rows.div_ceil(FEW), 1);
        device.launch(&self.kernels.experts_down, grid, THREADS, shared_bytes(ahead), &p)
    }
}

/// Columns of what single rows get from a layer's second norm: router's logits | gate | up of the shared expert | its share.
struct Gates {
    gate: usize,
    up: usize,
    share: usize,
    stride: usize,
}

impl Gates {
    /// For a shared expert of `width` inner numbers.
    fn of(spec: &Spec, width: usize) -> Gates {
        let gate = spec.moe.experts;
        Gates {
            gate,
            up: gate + width,
            share: gate + 2 * width,
            stride: (gate + 2 * width + 1).next_multiple_of(4),
        }
    }
}
