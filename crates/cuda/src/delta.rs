//! Stages `delta.project`, `delta.mix`, `delta.out`: a Gated DeltaNet layer.

use std::ops::Range;

use cudarc::driver::DriverError;
use model::{DeltaWeights, GRID, Mixer};

use crate::Cuda;
use crate::few::{Input, Output, side_by_side};
use crate::linear::{Product, Rows};
use crate::open::{Open, delta_columns};
use crate::sources::{prepare_shared, scan_shared, scan_stages};
use crate::weights::Matrix;

type Done = Result<(), DriverError>;

#[derive(Clone, Copy)]
#[repr(C)]
struct Shape {
    key_heads: i32,
    value_heads: i32,
    taps: i32,
    stride: i32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Convolve {
    shape: Shape,
    projected: u64,
    window: u64,
    weights: u64,
    out: u64,
    rows: i32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Window {
    shape: Shape,
    projected: u64,
    old: u64,
    window: u64,
    rows: i32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Prepare {
    shape: Shape,
    projected: u64,
    mixed: u64,
    a: u64,
    dt_bias: u64,
    u: u64,
    w: u64,
    p: u64,
    decay: u64,
    first_offset: i32,
    rows: i32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Scan {
    shape: Shape,
    mixed: u64,
    u: u64,
    w: u64,
    p: u64,
    decay: u64,
    state: u64,
    out: u64,
    first_offset: i32,
    rows: i32,
    cells: i32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Tail {
    shape: Shape,
    projected: u64,
    o: u64,
    weight: u64,
    out: u64,
    eps: f32,
    rows: i32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Single {
    shape: Shape,
    projected: u64,
    weights: u64,
    a: u64,
    dt_bias: u64,
    from: u64,
    to: u64,
    offset: i64,
    norm: u64,
    out: u64,
    eps: f32,
}

/// Threads of a block of `delta_single`.
const SINGLE_THREADS: usize = 512;

/// Rows that `delta_split` takes at most: more are work enough for all multiprocessors with a head in a block.
const MOST_SPLIT: usize = 2;

/// Some rows of one sequence, and the state they start from and leave.
struct Stretch {
    /// Address of the layer's part of the slot: window, then states.
    slot: u64,
    /// Rows of the block.
    rows: Range<usize>,
    /// Position of the first.
    position: usize,
    /// Whether their outputs are wanted.
    wanted: bool,
}

impl Cuda {
    fn delta_weights(&self, layer: usize) -> DeltaWeights<Matrix, u64> {
        match &self.weights.dense.layers[layer].mixer {
            Mixer::Delta(weights) => weights.clone(),
            Mixer::Attention(_) => panic!("a DeltaNet stage was called for an attention layer"),
        }
    }

    fn delta_shape(&self) -> Shape {
        let delta = &self.model.spec.delta;
        Shape {
            key_heads: delta.key_heads as i32,
            value_heads: delta.value_heads as i32,
            taps: delta.taps as i32,
            stride: delta_columns(&self.model.spec) as i32,
        }
    }

    pub(crate) fn delta_project_rows(&mut self, open: &Open, layer: usize, rows: Range<usize>) -> Done {
        let DeltaWeights { qkv, z, beta_alpha, .. } = self.delta_weights(layer);
        let (out, stride) = (open.buffers.projected.at(), delta_columns(&self.model.spec));
        if open.single {
            let outputs = side_by_side(&[qkv, z, beta_alpha], out);
            let [qkv, z, beta_alpha] = outputs[..] else { unreachable!("three matrices") };
            let outputs = [qkv, z, Output { exact: true, ..beta_alpha }];
            return self.few(&outputs, self.few_input(open, layer, &rows), stride, false);
        }
        let x = self.mixer_input(open, layer, &rows)?;
        self.gemm(&[qkv, z, beta_alpha], x, (out, stride), Product::Store)
    }

    pub(crate) fn delta_out_rows(&mut self, open: &Open, layer: usize, rows: Range<usize>) -> Done {
        self.mixer_output(open, self.delta_weights(layer).out, rows)
    }

    /// hidden += mixed · weightsᵀ.
    pub(crate) fn mixer_output(&mut self, open: &Open, matrix: Matrix, rows: Range<usize>) -> Done {
        let hidden = self.model.spec.hidden;
        let to = open.buffers.hidden.at() + 4 * (rows.start * hidden) as u64;
        let x = Rows { at: open.buffers.mixed.at(), count: rows.len() };
        if open.single {
            let output = Output { matrix, out: to, exact: false };
            return self.few(&[output], (Input::Numbers(x.at), x.count), hidden, true);
        }
        self.gemm(&[matrix], x, (to, hidden), Product::Add)
    }

    pub(crate) fn delta_mix_rows(&mut self, open: &Open, layer: usize, rows: Range<usize>) -> Done {
        if open.single {
            return self.delta_mix_single(open, layer, rows);
        }
        let (offset, len) = self.state.layer(self.model.spec.ordinal(layer));
        let bytes = 4 * len;
        let at = |slot: u64| slot + 4 * offset as u64;
        for (index, part) in open.pass.runs_in(rows.clone()) {
            let (run, state) = (&open.pass.runs[index], &open.state.runs[index]);
            let to = at(self.state.slot(state.to));
            if part.start == run.rows.start {
                match state.from {
                    Some(from) => self.device.copy(at(self.state.slot(from)), to, bytes)?,
                    None => self.device.zero(to, bytes)?,
                }
            }
            let stretch = |slot: u64, part: Range<usize>, wanted: bool| Stretch {
                slot,
                position: run.position(part.start),
                rows: part.start - rows.start..part.end - rows.start,
                wanted,
            };
            let mut done = part.start;
            for cell in run.cells(part.clone()) {
                // A state wanted in the middle of a cell takes the cell's first rows once more, on a copy.
                for &(row, slot) in state.snapshots.iter().filter(|(row, _)| cell.contains(row)) {
                    self.advance(open, layer, &stretch(to, done..cell.start, true))?;
                    done = cell.start;
                    let copy = at(self.state.slot(slot));
                    self.device.copy(to, copy, bytes)?;
                    self.advance(open, layer, &stretch(copy, cell.start..row + 1, false))?;
                }
            }
            self.advance(open, layer, &stretch(to, done..part.end, true))?;
        }
        self.delta_tail(open, layer, rows.len())
    }

    /// Convolution and delta rule over some rows of a sequence.
    fn advance(&mut self, open: &Open, layer: usize, stretch: &Stretch) -> Done {
        let count = stretch.rows.len();
        if count == 0 {
            return Ok(());
        }
        let (device, spec) = (self.device.clone(), self.model.clone());
        let (spec, shape, weights) = (&spec.spec.delta, self.delta_shape(), self.delta_weights(layer));
        let (heads, dim) = (spec.value_heads, spec.head_dim);
        let offset = stretch.position % GRID;
        let cells = (offset + count).div_ceil(GRID);
        let scratch = &mut self.scratch;
        let mixed = scratch.convolved.take(&device, 2 * count * spec.channels())?;
        let u = scratch.u.take(&device, 2 * cells * heads * GRID * dim)?;
        let w = scratch.w.take(&device, 2 * cells * heads * GRID * dim)?;
        let p = scratch.p.take(&device, 2 * cells * heads * GRID * GRID)?;
        let decay = scratch.decay.take(&device, 4 * cells * heads * GRID)?;
        let out =
            scratch.out.take(&device, 4 * open.pass.rows().min(crate::BLOCK_ROWS) * spec.value_dim())?;
        let first = stretch.rows.start;
        let projected = open.buffers.projected.at() + 4 * (first * shape.stride as usize) as u64;
        let (rows, first_offset) = (count as i32, offset as i32);

        let convolve =
            Convolve { shape, projected, window: stretch.slot, weights: weights.conv, out: mixed, rows };
        let grid = (2 * spec.key_heads + heads, count.div_ceil(64), 1);
        device.launch(&self.kernels.delta_convolve, grid, 128, 0, &convolve)?;
        let prepare = Prepare {
            shape,
            projected,
            mixed,
            a: weights.a,
            dt_bias: weights.dt_bias,
            u,
            w,
            p,
            decay,
            first_offset,
            rows,
        };
        device.launch(&self.kernels.delta_prepare, (cells, heads, 1), 128, prepare_shared(dim), &prepare)?;
        let scan = Scan {
            shape,
            mixed,
            u,
            w,
            p,
            decay,
            state: stretch.slot + 4 * self.state.window() as u64,
            out: if stretch.wanted { out + 4 * (first * spec.value_dim()) as u64 } else { 0 },
            first_offset,
            rows,
            cells: cells as i32,
        };
        let shared = scan_shared(dim, scan_stages(&self.target, dim));
        device.launch(&self.kernels.delta_scan, (heads, dim / 32, 1), 256, shared, &scan)?;
        let window = Window { shape, projected, old: stretch.slot, window: stretch.slot, rows };
        device.launch(&self.kernels.delta_window, (spec.channels().div_ceil(128), 1, 1), 128, 0, &window)
    }

    /// Gated norms of the delta rule's outputs.
    fn delta_tail(&self, open: &Open, layer: usize, count: usize) -> Done {
        let spec = &self.model.spec;
        let p = Tail {
            shape: self.delta_shape(),
            projected: open.buffers.projected.at(),
            o: self.scratch.out.at(),
            weight: self.delta_weights(layer).norm,
            out: open.buffers.mixed.at(),
            eps: spec.rms_eps,
            rows: count as i32,
        };
        let grid = (spec.delta.value_heads, count.div_ceil(4), 1);
        self.device.launch(&self.kernels.delta_tail, grid, 128, 0, &p)
    }

    fn delta_mix_single(&self, open: &Open, layer: usize, rows: Range<usize>) -> Done {
        let spec = &self.model.spec;
        let (offset, len) = self.state.layer(spec.ordinal(layer));
        let weights = self.delta_weights(layer);
        let p = Single {
            shape: self.delta_shape(),
            projected: open.buffers.projected.at(),
            weights: weights.conv,
            a: weights.a,
            dt_bias: weights.dt_bias,
            from: open.tables.from + 8 * rows.start as u64,
            to: open.tables.to + 8 * rows.start as u64,
            offset: offset as i64,
            norm: weights.norm,
            out: open.buffers.mixed.at(),
            eps: spec.rms_eps,
        };
        let (heads, dim, count) = (spec.delta.value_heads, spec.delta.head_dim, rows.len());
        // Which kernel decides on no bit.
        let split = self.kernels.delta_split.as_ref().filter(|_| count <= MOST_SPLIT);
        let (kernel, parts) = split.map_or((&self.kernels.delta_single, 1), |kernel| (kernel, dim / 32));
        self.device.launch(kernel, (heads, parts, count), SINGLE_THREADS, 0, &p)?;
        for state in &open.state.runs[rows] {
            for &(_, slot) in &state.snapshots {
                let at = |slot| self.state.slot(slot) + 4 * offset as u64;
                self.device.copy(at(state.to), at(slot), 4 * len)?;
            }
        }
        Ok(())
    }
}
