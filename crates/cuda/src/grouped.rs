//! Routed experts of passes of many rows: pairs of row and expert, grouped by expert.

use cudarc::driver::DriverError;
use model::Spec;
use quant::Type;

use crate::Cuda;
use crate::kernels::ExpertKernels;
use crate::linear::{Gemm, dense};
use crate::moe::{Done, Mask};
use crate::open::Open;
use crate::sources::gemm_stages;
use crate::weights::{Experts, Triplet};

#[derive(Clone, Copy)]
#[repr(C)]
struct Group {
    counts: u64,
    taken: u64,
    ids: u64,
    sorted: u64,
    places: u64,
    from: u64,
    weights: u64,
    experts: i32,
    pairs: i32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Tiles {
    counts: u64,
    list: u64,
    tiles: u64,
    count: u64,
    experts: i32,
    listed: i32,
    tile_rows: i32,
    from: u64,
    to: u64,
    fours: i32,
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
    places: u64,
    ids: u64,
    order: u64,
    sum: u64,
    hidden: u64,
    cols: i32,
    used: i32,
    last: i32,
}

/// Pairs that a block of `group_pairs` sorts.
const SORTED: usize = 4 * 1024;

/// Rows of a tile of the products of experts that are decoded before.
const TILE_ROWS: usize = 256;

/// Up to so many pairs of an expert, on the average, are few.
const FEW_PAIRS: usize = 72;

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

impl Cuda {
    /// Adds a wave's experts to the rows that chose them.
    pub(crate) fn experts_grouped(
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
        let kernels = self.pair_kernels(triplet, pairs);
        match kernels {
            Some(kernels) => self.experts_fused(open, triplet, kernels, list)?,
            None => {
                let most = (MOST_DECODED / pair_bytes(&spec.spec, width)).clamp(1, 1024);
                for part in list.chunks(most) {
                    self.experts_decoded(open, triplet, part)?;
                }
            }
        }
        let (buffers, [_, places, _]) = (&open.buffers, sorted(open, pairs));
        let p = Sum {
            mask,
            pairs: self.scratch.pairs.at(),
            places: if kernels.is_some() { places } else { 0 },
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
        let [sorted, places, weights] = sorted(open, pairs);
        let counts = open.buffers.counts.at();
        let p = Group {
            counts,
            taken: counts + 4 * experts as u64,
            ids: open.buffers.ids.at(),
            sorted,
            places,
            from: open.buffers.weights.at(),
            weights,
            experts: experts as i32,
            pairs: pairs as i32,
        };
        self.device.launch(&self.kernels.group_pairs, (pairs.div_ceil(SORTED), 1, 1), 1024, 0, &p)?;
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

    /// Lists experts and the tiles of their pairs on the GPU; where `shuffled` says, rows of x in the order in which products with
    /// blocks take them.
    fn list_tiles(
        &mut self,
        open: &Open,
        list: &[u32],
        tile_rows: usize,
        shuffled: Option<u64>,
    ) -> Result<Tiles, DriverError> {
        let (spec, device) = (self.model.clone(), self.device.clone());
        let (spec, pairs) = (&spec.spec, open.pass.rows() * self.model.spec.moe.used);
        let at = self.scratch.list.take(&device, 4 * 1024)?;
        if self.scratch.listed != list {
            device.upload(list, at)?;
            self.scratch.listed = list.to_vec();
        }
        let most = pairs / tile_rows + spec.moe.experts + 1;
        let count = self.scratch.tiles.take(&device, 16 * (most + 1))?;
        let fours = shuffled.map_or(0, |_| open.pass.rows() * spec.hidden / 8);
        let tiles = Tiles {
            counts: open.buffers.counts.at(),
            list: at,
            tiles: count + 16,
            count,
            experts: spec.moe.experts as i32,
            listed: list.len() as i32,
            tile_rows: tile_rows as i32,
            from: open.buffers.rounded.at(),
            to: shuffled.unwrap_or(0),
            fours: fours as i32,
        };
        device.launch(&self.kernels.group_tiles, (1 + fours.div_ceil(1024), 1, 1), 1024, 0, &tiles)?;
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
        let (device, rows) = (self.device.clone(), open.pass.rows());
        let (hidden, width) = (gate.cols, gate.rows);
        let [pairs, _, weights] = sorted(open, rows * self.model.spec.moe.used);
        let x = self.scratch.shuffled.take(&device, 2 * rows * hidden)?;
        let tiles = self.list_tiles(open, list, gated_by.tiles.pairs, Some(x))?;
        let into = Pairs {
            x,
            out: self.scratch.inner.at(),
            weights,
            pairs,
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
        let tiles = self.list_tiles(open, list, TILE_ROWS, None)?;
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

/// Addresses of the pass's pairs by ascending expert, of the place of each in that order, and of their weights in it.
fn sorted(open: &Open, pairs: usize) -> [u64; 3] {
    [0, 1, 2].map(|i| open.buffers.sorted.at() + 4 * (i * pairs) as u64)
}
