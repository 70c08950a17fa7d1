//! Stages `route`, `shared`, `experts`: the mixture of experts.

use std::ops::Range;

use cudarc::driver::DriverError;
use model::{Spec, Stage, Wave};

use crate::head::Norm;
use crate::linear::{Gemm, Rows, Then, WARPS, dense, staged};
use crate::open::Open;
use crate::weights::{Experts, Triplet};
use crate::{Cuda, fail};

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
struct ExpertDot {
    mask: Mask,
    weights: [u64; 2],
    stride: [i64; 2],
    places: [u64; 2],
    out: u64,
    x: u64,
    ids: u64,
    rows: i32,
    cols: i32,
    used: i32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct ExpertDown {
    mask: Mask,
    weights: u64,
    stride: i64,
    places: u64,
    x: u64,
    up: u64,
    ids: u64,
    order: u64,
    chosen: u64,
    sum: u64,
    hidden: u64,
    rows: i32,
    cols: i32,
    used: i32,
    last: i32,
}

/// Rows of a tile of the products of many rows.
const TILE_ROWS: usize = 256;

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

impl Cuda {
    pub(crate) fn route_rows(&mut self, open: &mut Open, layer: usize, rows: Range<usize>) -> Done {
        let (spec, device) = (self.model.clone(), self.device.clone());
        let (spec, weights) = (&spec.spec, &self.weights.dense.layers[layer].moe);
        let (router, count) = (weights.router, rows.len());
        let (buffers, offset) = (&open.buffers, rows.start as u64);
        if rows.start == 0 {
            device.zero(buffers.counts.at(), 4 * spec.moe.experts)?;
        }
        let at = offset * spec.hidden as u64;
        let split =
            if open.single { 0 } else { self.scratch.split.take(&device, 6 * count * spec.hidden)? };
        let logits = self.scratch.logits.take(&device, 4 * count * spec.moe.experts)?;
        let norm = Norm {
            x: buffers.hidden.at() + 4 * at,
            weight: weights.norm,
            out: buffers.norm.at() + 4 * at,
            rounded: if open.single { 0 } else { buffers.rounded.at() + 2 * at },
            split,
            dot: weights.shared_router,
            share: buffers.share.at() + 4 * offset,
            ..Norm::default()
        };
        self.norm(count, norm)?;
        if open.single {
            let x = Rows { at: norm.out, count };
            self.linear(true, &[router], x, (logits, spec.moe.experts), Then::Store)?;
        } else {
            self.split_gemm(router, Rows { at: split, count }, (logits, spec.moe.experts))?;
        }
        let used = offset * spec.moe.used as u64;
        let p = Route {
            logits,
            ids: buffers.ids.at() + 4 * used,
            weights: buffers.weights.at() + 4 * used,
            order: buffers.order.at() + 4 * used,
            counts: buffers.counts.at(),
            rows: count as i32,
            experts: spec.moe.experts as i32,
            used: spec.moe.used as i32,
        };
        self.choose(&p)?;
        open.routed = rows.end;
        open.grouped = false;
        Ok(())
    }

    /// The experts of each row, given the router's logits.
    pub(crate) fn choose(&self, p: &Route) -> Done {
        const WARPS: usize = 4; // a row each
        let shared = WARPS * 4 * (p.experts + 2 * p.used) as usize;
        let grid = ((p.rows as usize).div_ceil(WARPS), 1, 1);
        self.device.launch(&self.kernels.route, grid, 32 * WARPS, shared, p)
    }

    pub(crate) fn shared_rows(&mut self, open: &Open, layer: usize, rows: Range<usize>) -> Done {
        let (spec, device) = (self.model.clone(), self.device.clone());
        let (spec, weights) = (&spec.spec, &self.weights.dense.layers[layer].moe);
        let (gate, up, down) = (weights.shared_gate, weights.shared_up, weights.shared_down);
        let (buffers, count, width) = (&open.buffers, rows.len(), gate.rows);
        let at = (rows.start * spec.hidden) as u64;
        // Inner rows, for single rows those of gate and up.
        let inner = self.scratch.inner.take(&device, 8 * count * width)?;
        let (to, share) = (buffers.sum.at() + 4 * at, buffers.share.at() + 4 * rows.start as u64);
        let out = (to, spec.hidden);
        if open.single {
            let x = Rows { at: buffers.norm.at() + 4 * at, count };
            return self.gated_gemv([gate, up, down], x, inner, out, Then::Scale(share));
        }
        self.gated_gemm(gate, up, Rows { at: buffers.rounded.at() + 2 * at, count }, inner)?;
        self.linear(false, &[down], Rows { at: inner, count }, out, Then::Scale(share))
    }

    /// Experts that rows of the pass have chosen. Waits.
    pub(crate) fn chosen(&self, open: &Open) -> Result<Vec<u32>, DriverError> {
        let counts: Vec<i32> = self.device.download(open.buffers.counts.at(), self.model.spec.moe.experts)?;
        Ok((0..).zip(counts).filter(|(_, count)| *count > 0).map(|(expert, _)| expert).collect())
    }

    pub(crate) fn expert_rows(&mut self, open: &mut Open, layer: usize, wave: &Wave) -> model::Result<()> {
        let refuse = |message: String| {
            Err(model::Error::Backend { backend: "cuda", stage: Stage::Experts.name(), layer, message })
        };
        let rows = open.pass.rows();
        if open.routed != rows {
            return refuse(format!("{} of {rows} rows have been routed", open.routed));
        }
        let (triplet, slots) = self.place(open, layer, wave)?;
        let mut mask = [0u32; 32];
        wave.experts.iter().for_each(|placed| mask[placed.expert as usize / 32] |= 1 << (placed.expert % 32));
        let done = if open.single {
            self.experts_single(open, triplet, (mask, wave.last))
        } else {
            let list: Vec<u32> = wave.experts.iter().map(|placed| placed.expert).collect();
            self.experts_grouped(open, triplet, &list, (mask, wave.last))
        };
        done.map_err(fail(Stage::Experts.name(), layer))?;
        let noted = slots.map_or(Ok(()), |slots| slots.enqueued());
        noted.or_else(|error| refuse(error.to_string()))
    }

    fn experts_single(&mut self, open: &Open, [gate, up, down]: Triplet, (mask, last): (Mask, bool)) -> Done {
        let (spec, rows) = (self.model.clone(), open.pass.rows());
        let (used, hidden, width) = (spec.spec.moe.used, spec.spec.hidden, gate.rows);
        let (device, buffers, pairs) = (self.device.clone(), &open.buffers, rows * used);
        let inner = self.scratch.inner.take(&device, 8 * pairs * width)?;
        let up_at = inner + 4 * (pairs * width) as u64;
        let launch = |matrices: [Option<Experts>; 2], out: u64| {
            let [first, second] = matrices;
            let first = first.expect("at least one");
            let p = ExpertDot {
                mask,
                weights: [first.at, second.map_or(0, |second| second.at)],
                stride: [first.stride as i64, second.map_or(0, |second| second.stride as i64)],
                places: [first.places, second.map_or(0, |second| second.places)],
                out,
                x: buffers.norm.at(),
                ids: buffers.ids.at(),
                rows: width as i32,
                cols: hidden as i32,
                used: used as i32,
            };
            let kernel = &self.kernels.of(first.ty).expert_dot;
            let grid = (width.div_ceil(2 * WARPS), pairs, 1);
            device.launch(kernel, grid, 32 * WARPS, staged(hidden), &p)
        };
        let fused = gate.ty == up.ty;
        if fused {
            launch([Some(gate), Some(up)], inner)?;
        } else {
            launch([Some(gate), None], inner)?;
            launch([Some(up), None], up_at)?;
        }
        let p = ExpertDown {
            mask,
            weights: down.at,
            stride: down.stride as i64,
            places: down.places,
            x: inner,
            up: if fused { 0 } else { up_at },
            ids: buffers.ids.at(),
            order: buffers.order.at(),
            chosen: buffers.weights.at(),
            sum: buffers.sum.at(),
            hidden: buffers.hidden.at(),
            rows: hidden as i32,
            cols: width as i32,
            used: used as i32,
            last: i32::from(last),
        };
        let grid = (hidden.div_ceil(WARPS).min(2 * device.processors as usize), rows, 1);
        let kernel = &self.kernels.of(down.ty).expert_down;
        device.launch(kernel, grid, 32 * WARPS, used * staged(width), &p)
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
        let most = (MOST_DECODED / pair_bytes(&spec.spec, width)).clamp(1, 1024);
        for part in list.chunks(most) {
            self.experts_decoded(open, triplet, part)?;
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
        device.launch(&self.kernels.sum_pairs, (rows, (hidden / 2).div_ceil(256), 1), 256, 0, &p)
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

    /// Outputs of the pairs of some experts: gate and up, then down; decoded as they are multiplied, or else before.
    fn experts_decoded(&mut self, open: &Open, [gate, up, down]: Triplet, list: &[u32]) -> Done {
        let (spec, device, listed) = (self.model.clone(), self.device.clone(), list.len());
        let (used, hidden, width) = (spec.spec.moe.used, spec.spec.hidden, gate.rows);
        let (buffers, pairs) = (&open.buffers, open.pass.rows() * used);
        let at = self.scratch.list.take(&device, 4 * 1024)?;
        device.upload(list, at)?;
        let most = pairs / TILE_ROWS + spec.spec.moe.experts + 1;
        let count = self.scratch.tiles.take(&device, 16 * (most + 1))?;
        let [counts, starts, _] = counts(open, spec.spec.moe.experts);
        let tiles = Tiles {
            counts,
            starts,
            list: at,
            tiles: count + 16,
            count,
            listed: listed as i32,
            tile_rows: TILE_ROWS as i32,
        };
        device.launch(&self.kernels.group_tiles, (1, 1, 1), 1024, 0, &tiles)?;

        let grouped = |p: Gemm| Gemm {
            pairs: buffers.sorted.at(),
            tiles: tiles.tiles,
            count,
            used: used as i32,
            list: at,
            ..p
        };
        let (inner, to) = (self.scratch.inner.at(), self.scratch.pairs.at());
        let into = grouped(dense((buffers.rounded.at(), 0), 0, (inner, width), (width, hidden), 0));
        let out = grouped(dense((inner, 0), 0, (to, hidden), (hidden, width), buffers.weights.at()));
        let listed = (at, listed);
        match self.kernels.experts_of(gate.ty).filter(|_| gate.ty == up.ty) {
            Some(kernels) => {
                let strides = [gate.stride as i64, up.stride as i64];
                let places = [gate.places, up.places];
                let p = Gemm { blocks: [gate.at, up.at], strides, places, ..into };
                self.multiply_with(&kernels.gated, (512, kernels.shared), p)?;
            }
            None => {
                let (b, matrix) = self.decode_experts(&[gate, up], listed)?;
                self.multiply(&self.kernels.gemm_experts_gated, Gemm { b, matrix, ..into })?;
            }
        }
        match self.kernels.experts_of(down.ty) {
            Some(kernels) => {
                let strides = [down.stride as i64; 2];
                let p = Gemm { blocks: [down.at; 2], strides, places: [down.places; 2], ..out };
                self.multiply_with(&kernels.down, (512, kernels.shared), p)
            }
            None => {
                let (b, matrix) = self.decode_experts(&[down], listed)?;
                self.multiply(&self.kernels.gemm_experts_down, Gemm { b, matrix, ..out })
            }
        }
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

/// Addresses of the pairs of each expert, where they begin, and the same counted up.
fn counts(open: &Open, experts: usize) -> [u64; 3] {
    [0, 1, 2].map(|i| open.buffers.counts.at() + 4 * (i * experts) as u64)
}
