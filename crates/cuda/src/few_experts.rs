//! Experts of passes of single rows.

use quant::Type;

use crate::Cuda;
use crate::few::{FEW, FewExperts, SLACK, SPAN, TILE};
use crate::moe::{Done, Gates, Mask};
use crate::open::Open;
use crate::sources::{few_window, whole_table_bytes};
use crate::weights::{Experts, Triplet};

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
    shared_gate: u64,
    shared_up: u64,
    shared_out: u64,
    width: i32,
    cols: i32,
    experts: i32,
    used: i32,
    logits_stride: i32,
    count: i32,
    shared_cols: i32,
    stages: i32,
    stage_bytes: i32,
    table_at: [i32; 2],
    planes_at: i32,
    keys_at: i32,
    room_at: i32,
    stages_at: i32,
    unused: i32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct ExpertsDown {
    mask: Mask,
    down: FewExperts,
    shared: FewExperts,
    x: u64,
    shared_x: u64,
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
    share_stride: i32,
    count: i32,
    first: i32,
    last: i32,
    stages: i32,
    stage_bytes: i32,
    table_at: [i32; 2],
    room_at: i32,
    shared_at: i32,
    stages_at: i32,
    shared_bytes: i32,
}

/// Warps that share the columns of an item of `experts_up`, and items at a time in a block of it, at most.
const PARTS: usize = 4;
const GROUPS: usize = 5;

/// Bytes of the sums of a round of their items, and of what those are.
const ROUND_BYTES: usize = 8 * (PARTS * TILE + 1) * 4;

/// Rows of x of such a block, at most.
const ROWS_OF_BLOCK: usize = 8;

/// Warps of a block of `experts_down`, at most.
const DOWN_WARPS: usize = 22;

/// Bytes of planes of a span of x.
const PLANES: usize = 544;

/// Bytes of zeros that shared memory begins with.
const ZEROS: usize = 256;

/// Shared memory of a block beside what is asked for: the kernels' own, and the system's.
const STATIC: usize = 8 << 10;

/// Bytes of where a step's rows come from, and of what it is.
const ROWS_BYTES: usize = 144;

/// Bytes of `rows` rows of `spans` spans in shared memory; plain numbers are read where they lie.
fn staged(ty: Type, rows: usize, spans: usize) -> usize {
    if ty.block_len() == 1 { 0 } else { rows * few_window(ty.bytes(spans * SPAN).expect("whole blocks")) }
}

/// Where tables of two types lie, and where they end.
fn tables(first: Type, second: Type, shared: usize) -> ([i32; 2], usize) {
    let end = ZEROS + whole_table_bytes(first, shared);
    let (second_at, end) =
        if first == second { (ZEROS, end) } else { (end, end + whole_table_bytes(second, shared)) };
    ([ZEROS as i32, second_at as i32], end)
}

impl Cuda {
    /// A wave of experts of single rows, and with the first one the shared expert.
    pub(crate) fn experts_single(
        &mut self,
        open: &mut Open,
        (layer, [gate, up, down]): (usize, Triplet),
        (mask, last): (Mask, bool),
    ) -> Done {
        let (rows, width) = (open.pass.rows(), gate.rows);
        let moe = self.model.spec.moe.clone();
        let shared = self.weights.dense.layers[layer].moe.shared_down;
        let inner =
            self.scratch.inner.take(&self.device.clone(), 4 * rows * (moe.used * width + shared.cols))?;
        let shared_inner = inner + 4 * (rows * moe.used * width) as u64;
        self.few_experts_up(open, (gate, up), mask, (inner, shared_inner, shared.cols))?;
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
        self.few_experts_down(open, (down, shared), mask, (inner, shared_inner), (first, last))
    }

    fn few_experts_up(
        &self,
        open: &Open,
        (gate, up): (Experts, Experts),
        mask: Mask,
        (out, shared_out, shared_cols): (u64, u64, usize),
    ) -> Done {
        let (spec, rows, buffers) = (&self.model.spec, open.pass.rows(), &open.buffers);
        let (used, cols, width) = (spec.moe.used, spec.hidden, gate.rows);
        let columns = Gates::of(spec, shared_cols);
        let of_row = width.div_ceil(8) * used;
        let items = of_row * rows;
        let (table_at, planes_at) = tables(gate.ty, up.ty, self.target.shared);
        let spans = cols.div_ceil(SPAN * PARTS);
        let planes = PARTS * spans * PLANES;
        let stage_bytes = ROWS_BYTES + staged(gate.ty, 8, spans) + staged(up.ty, 8, spans);
        let processors = self.device.processors as usize;
        // Neighbouring items, of not more rows than a block can choose for.
        let rows_of_block = |groups: usize| {
            let each = items.div_ceil(processors).max(groups);
            ROWS_OF_BLOCK.min(PARTS * groups).min(rows).min((each - 1) / of_row + 2)
        };
        let keys_bytes = |groups: usize| (4 * rows_of_block(groups) * spec.moe.experts).next_multiple_of(16);
        let needed = |groups: usize, stages: usize| {
            planes_at
                + groups * (planes + ROUND_BYTES + PARTS * stages * stage_bytes)
                + keys_bytes(groups)
                + SLACK
        };
        let fits = |groups: usize, stages: usize| needed(groups, stages) + STATIC <= self.device.shared;
        let most = GROUPS.min(items.div_ceil(processors));
        let groups = (1..=most).rev().find(|&groups| fits(groups, 2)).unwrap_or(1);
        let stages = if fits(groups, 3) { 3 } else { 2 };
        // A block that can choose for all rows can take any number of items.
        let of_block = rows_of_block(groups);
        let limit = if of_block == rows { items } else { ((of_block - 1) * of_row).max(groups) };
        let blocks = items.div_ceil(groups).min(processors).max(items.div_ceil(limit));
        let keys_at = planes_at + groups * planes;
        let room_at = keys_at + keys_bytes(groups);
        let p = ExpertsUp {
            mask,
            gate: self.few_experts(gate),
            up: self.few_experts(up),
            logits: buffers.gates.at(),
            x: buffers.rounded.at(),
            ids: buffers.ids.at(),
            weights: buffers.weights.at(),
            order: buffers.order.at(),
            out,
            shared_gate: buffers.gates.at() + 4 * columns.gate as u64,
            shared_up: buffers.gates.at() + 4 * columns.up as u64,
            shared_out,
            width: width as i32,
            cols: cols as i32,
            experts: spec.moe.experts as i32,
            used: used as i32,
            logits_stride: columns.stride as i32,
            count: rows as i32,
            shared_cols: shared_cols as i32,
            stages: stages as i32,
            stage_bytes: stage_bytes as i32,
            table_at,
            planes_at: planes_at as i32,
            keys_at: keys_at as i32,
            room_at: room_at as i32,
            stages_at: (room_at + groups * ROUND_BYTES) as i32,
            unused: 0,
        };
        let (kernel, threads) = (&self.kernels.experts_up, 32 * PARTS * groups);
        self.device.launch(kernel, (blocks, 1, 1), threads, needed(groups, stages), &p)
    }

    fn few_experts_down(
        &self,
        open: &Open,
        (down, shared): (Experts, Experts),
        mask: Mask,
        (x, shared_x): (u64, u64),
        (first, last): (bool, bool),
    ) -> Done {
        let (spec, rows, buffers) = (&self.model.spec, open.pass.rows(), &open.buffers);
        let columns = Gates::of(spec, shared.cols);
        let steps = spec.moe.used * down.cols.div_ceil(SPAN) + shared.cols.div_ceil(SPAN);
        let (table_at, room_at) = tables(down.ty, shared.ty, self.target.shared);
        let shared_at = room_at + 4 * rows.min(FEW) * steps * TILE;
        let shared_bytes = ROWS_BYTES + staged(shared.ty, TILE, 1);
        let stages_at = shared_at + shared.cols.div_ceil(SPAN) * shared_bytes;
        let stage_bytes = ROWS_BYTES + staged(down.ty, TILE, 1) + 4 * SPAN;
        let needed = |warps: usize, stages: usize| stages_at + warps * stages * stage_bytes + SLACK;
        let fits = |warps: usize, stages: usize| needed(warps, stages) + STATIC <= self.device.shared;
        let most = DOWN_WARPS.min(steps);
        let warps = (1..=most).rev().find(|&warps| fits(warps, 2)).unwrap_or(1);
        let stages = if fits(warps, 3) { 3 } else { 2 };
        let p = ExpertsDown {
            mask,
            down: self.few_experts(down),
            shared: self.few_experts(shared),
            x,
            shared_x,
            share: buffers.gates.at() + 4 * columns.share as u64,
            ids: buffers.ids.at(),
            order: buffers.order.at(),
            weights: buffers.weights.at(),
            sum: buffers.sum.at(),
            hidden: buffers.hidden.at(),
            rows: spec.hidden as i32,
            cols: down.cols as i32,
            used: spec.moe.used as i32,
            shared_cols: shared.cols as i32,
            share_stride: columns.stride as i32,
            count: rows as i32,
            first: i32::from(first),
            last: i32::from(last),
            stages: stages as i32,
            stage_bytes: stage_bytes as i32,
            table_at,
            room_at: room_at as i32,
            shared_at: shared_at as i32,
            stages_at: stages_at as i32,
            shared_bytes: shared_bytes as i32,
        };
        let grid = (spec.hidden.div_ceil(TILE), rows.div_ceil(FEW), 1);
        self.device.launch(&self.kernels.experts_down, grid, 32 * warps, needed(warps, stages), &p)
    }
}
