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
use crate::kernels::{ExpertKernels, Kernels};
use crate::linear::{Gemm, Rows, Then, dense};
use crate::open::Open;
use crate::sources::{few_window, gemm_stages, table_bytes};
use crate::weights::{Experts, Matrix, Triplet};

type Done = Result<(), DriverError>;

/// One bit for each expert.
type Mask = [u32; 32];

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
struct Group {
    counts: u64,
    starts: u64,
    next: u64,
    ids: u64,
    sorted: u64,
    experts: i32,
    pairs: i32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Tiles {
    counts: u64,
    starts: u64,
    list: u64,
    tiles: u64,
    count: u64,
    listed: i32,
    tile_rows: i32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct DecodeExperts {
    from: u64,
    to: u64,
    stride: i64,
    places: u64,
    to_stride: i64,
    groups: i64,
    list: u64,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Shuffle {
    from: u64,
    to: u64,
    fours: i32,
}

/// Parameters of the products of pairs with blocks of experts.
#[derive(Clone, Copy)]
#[repr(C)]
struct Pairs {
    x: u64,
    out: u64,
    weights: u64,
    pairs: u64,
    tiles: u64,
    count: u64,
    blocks: [u64; 2],
    strides: [i64; 2],
    places: [u64; 2],
    n: i32,
    k: i32,
    used: i32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Sum {
    mask: Mask,
    pairs: u64,
    ids: u64,
    order: u64,
    sum: u64,
    hidden: u64,
    cols: i32,
    used: i32,
    last: i32,
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

/// Rows of a tile of the products of experts that are decoded before.
const TILE_ROWS: usize = 256;

/// Up to so many pairs of an expert, on the average, are few.
const FEW_PAIRS: usize = 48;

/// Rows of so many numbers, or multiples, are shuffled for products with blocks.
const SHUFFLED: usize = 256;

/// Decoded experts take at most this many bytes at a time.
const MOST_DECODED: usize = 1 << 30;

/// Bytes of decoded gate and up matrices of one expert of a layer.
fn pair_bytes(spec: &Spec, width: usize) -> usize {
    4 * width * spec.hidden
}

/// Bytes of the experts that are decoded at a time.
pub(crate) fn decoded_bytes(spec: &Spec) -> usize {
    let width = spec.moe.widths.iter().copied().max().unwrap_or(0);
    (pair_bytes(spec, width) * spec.moe.experts).min(MOST_DECODED)
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
            return self.route_single(open, layer);
        }
        let (buffers, offset) = (&open.buffers, rows.start as u64);
        if rows.start == 0 {
            device.zero(buffers.counts.at(), 4 * spec.moe.experts)?;
        }
        let at = offset * spec.hidden as u64;
        let split = self.scratch.split.take(&device, 6 * count * spec.hidden)?;
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
        self.gated_gemm(gate, up, Rows { at: buffers.rounded.at() + 2 * at, count }, inner)?;
        self.gemm(&[down], Rows { at: inner, count }, (to, spec.hidden), Then::Scale(share))
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

    fn experts_grouped(
        &mut self,
        open: &mut Open,
        triplet: Triplet,
        list: &[u32],
        (mask, last): (Mask, bool),
    ) -> Done {
        let (spec, rows, device) = (self.model.clone(), open.pass.rows(), self.device.clone());
        let (used, hidden, width) = (spec.spec.moe.used, spec.spec.hidden, triplet[0].rows);
        let pairs = rows * used;
        self.scratch.inner.take(&device, 2 * pairs * width)?;
        self.scratch.pairs.take(&device, 2 * pairs * hidden)?;
        self.group(open, pairs)?;
        match self.pair_kernels(triplet, pairs) {
            Some(kernels) => self.experts_fused(open, triplet, kernels, list)?,
            None => {
                let most = (MOST_DECODED / pair_bytes(&spec.spec, width)).clamp(1, 1024);
                for part in list.chunks(most) {
                    self.experts_decoded(open, triplet, part)?;
                }
            }
        }
        let buffers = &open.buffers;
        let p = Sum {
            mask,
            pairs: self.scratch.pairs.at(),
            ids: buffers.ids.at(),
            order: buffers.order.at(),
            sum: buffers.sum.at(),
            hidden: buffers.hidden.at(),
            cols: hidden as i32,
            used: used as i32,
            last: i32::from(last),
        };
        device.launch(&self.kernels.sum_pairs, (rows, (hidden / 8).div_ceil(256), 1), 256, 0, &p)
    }

    /// Sorts the pass's pairs by expert, once for all waves of a layer.
    fn group(&self, open: &mut Open, pairs: usize) -> Done {
        if open.grouped {
            return Ok(());
        }
        let experts = self.model.spec.moe.experts;
        let [counts, starts, next] = counts(open, experts);
        let p = Group {
            counts,
            starts,
            next,
            ids: open.buffers.ids.at(),
            sorted: open.buffers.sorted.at(),
            experts: experts as i32,
            pairs: pairs as i32,
        };
        self.device.launch(&self.kernels.group_starts, (1, 1, 1), 1024, 0, &p)?;
        self.device.launch(&self.kernels.group_pairs, (pairs.div_ceil(256), 1, 1), 256, 0, &p)?;
        open.grouped = true;
        Ok(())
    }

    /// Kernels for gate and up, and for down, that decode as they multiply, if there are any for a layer's matrices.
    fn pair_kernels(&self, [gate, up, down]: Triplet, pairs: usize) -> Option<[ExpertKernels; 2]> {
        let whole = gate.cols.is_multiple_of(SHUFFLED) && gate.rows.is_multiple_of(SHUFFLED);
        let few = pairs <= FEW_PAIRS * self.model.spec.moe.experts;
        let of = |ty: Type| Some(self.kernels.experts_of(ty)?[usize::from(!few)]);
        if whole && gate.ty == up.ty { Some([of(gate.ty)?, of(down.ty)?]) } else { None }
    }

    /// Lists experts and the tiles of their pairs on the GPU.
    fn list_tiles(&mut self, open: &Open, list: &[u32], tile_rows: usize) -> Result<Tiles, DriverError> {
        let (spec, device) = (self.model.clone(), self.device.clone());
        let (spec, pairs) = (&spec.spec, open.pass.rows() * self.model.spec.moe.used);
        let at = self.scratch.list.take(&device, 4 * 1024)?;
        device.upload(list, at)?;
        let most = pairs / tile_rows + spec.moe.experts + 1;
        let count = self.scratch.tiles.take(&device, 16 * (most + 1))?;
        let [counts, starts, _] = counts(open, spec.moe.experts);
        let tiles = Tiles {
            counts,
            starts,
            list: at,
            tiles: count + 16,
            count,
            listed: list.len() as i32,
            tile_rows: tile_rows as i32,
        };
        device.launch(&self.kernels.group_tiles, (1, 1, 1), 1024, 0, &tiles)?;
        Ok(tiles)
    }

    /// Outputs of the pairs of some experts, decoded as they are multiplied.
    fn experts_fused(
        &mut self,
        open: &Open,
        [gate, up, down]: Triplet,
        [gated_by, down_by]: [ExpertKernels; 2],
        list: &[u32],
    ) -> Done {
        let (device, buffers, rows) = (self.device.clone(), &open.buffers, open.pass.rows());
        let (hidden, width) = (gate.cols, gate.rows);
        let tiles = self.list_tiles(open, list, gated_by.tiles.pairs)?;
        let x = self.scratch.shuffled.take(&device, 2 * rows * hidden)?;
        let fours = rows * hidden / 8;
        let shuffle = Shuffle { from: buffers.rounded.at(), to: x, fours: fours as i32 };
        device.launch(&self.kernels.shuffle_rows, (fours.div_ceil(256), 1, 1), 256, 0, &shuffle)?;
        let into = Pairs {
            x,
            out: self.scratch.inner.at(),
            weights: buffers.weights.at(),
            pairs: buffers.sorted.at(),
            tiles: tiles.tiles,
            count: tiles.count,
            blocks: [gate.at, up.at],
            strides: [gate.stride as i64, up.stride as i64],
            places: [gate.places, up.places],
            n: width as i32,
            k: hidden as i32,
            used: self.model.spec.moe.used as i32,
        };
        let out = Pairs {
            x: into.out,
            out: self.scratch.pairs.at(),
            blocks: [down.at; 2],
            strides: [down.stride as i64; 2],
            places: [down.places; 2],
            n: hidden as i32,
            k: width as i32,
            ..into
        };
        self.multiply_grouped(&gated_by.gated, (gated_by.tiles.threads, gated_by.shared), into)?;
        self.multiply_grouped(&down_by.down, (down_by.tiles.threads, down_by.shared), out)
    }

    /// Outputs of the pairs of some experts: gate and up, then down, decoded before they are multiplied.
    fn experts_decoded(&mut self, open: &Open, [gate, up, down]: Triplet, list: &[u32]) -> Done {
        let (used, hidden, width) = (self.model.spec.moe.used, self.model.spec.hidden, gate.rows);
        let tiles = self.list_tiles(open, list, TILE_ROWS)?;
        let buffers = &open.buffers;
        let grouped = |p: Gemm| Gemm {
            pairs: buffers.sorted.at(),
            tiles: tiles.tiles,
            count: tiles.count,
            used: used as i32,
            ..p
        };
        let (inner, to) = (self.scratch.inner.at(), self.scratch.pairs.at());
        let into = grouped(dense((buffers.rounded.at(), 0), 0, (inner, width), (width, hidden), 0));
        let out = grouped(dense((inner, 0), 0, (to, hidden), (hidden, width), buffers.weights.at()));
        let (listed, launch) = ((tiles.list, list.len()), (384, gemm_stages(&self.target).1));
        let (b, matrix) = self.decode_experts(&[gate, up], listed)?;
        self.multiply_grouped(&self.kernels.gemm_experts_gated, launch, Gemm { b, matrix, ..into })?;
        let (b, matrix) = self.decode_experts(&[down], listed)?;
        self.multiply_grouped(&self.kernels.gemm_experts_down, launch, Gemm { b, matrix, ..out })
    }

    /// Matrices of listed experts as bf16, those of an expert one after the other. Returns where, and the numbers
    /// from one expert to the next.
    fn decode_experts(
        &mut self,
        matrices: &[Experts],
        (list, listed): (u64, usize),
    ) -> Result<(u64, i64), DriverError> {
        let one = matrices[0].rows * matrices[0].cols;
        let stride = matrices.len() * one;
        let room = self.scratch.weights.take(&self.device, 2 * stride * listed)?;
        for (i, matrix) in matrices.iter().enumerate() {
            let groups = one / 8;
            let p = DecodeExperts {
                from: matrix.at,
                to: room + 2 * (i * one) as u64,
                stride: matrix.stride as i64,
                places: matrix.places,
                to_stride: stride as i64,
                groups: groups as i64,
                list,
            };
            let kernel = &self.kernels.of(matrix.ty).decode_experts;
            self.device.launch(kernel, (groups.div_ceil(256), listed, 1), 256, 0, &p)?;
        }
        Ok((room, stride as i64))
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

/// Addresses of the pairs of each expert, where they begin, and the same counted up.
fn counts(open: &Open, experts: usize) -> [u64; 3] {
    [0, 1, 2].map(|i| open.buffers.counts.at() + 4 * (i * experts) as u64)
}
