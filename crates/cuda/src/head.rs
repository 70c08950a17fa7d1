//! Stages `embed` and `head`; norms of rows, which every layer begins with.

use std::ops::Range;

use cudarc::driver::DriverError;
use half::{bf16, f16};
use model::Matrix;

use crate::few::{Input, Output};
use crate::linear::{Product, Rows};
use crate::open::Open;
use crate::{Cuda, weights};

type Done = Result<(), DriverError>;

/// Parameters of `embed`.
#[derive(Clone, Copy)]
#[repr(C)]
struct Embed {
    table: u64,
    tokens: u64,
    out: u64,
    cols: i32,
}

/// Parameters of `rms_norm`; addresses of what is not wanted are 0.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct Norm {
    pub(crate) x: u64,
    pub(crate) index: u64,
    pub(crate) weight: u64,
    pub(crate) out: u64,
    pub(crate) rounded: u64,
    pub(crate) split: u64,
    pub(crate) dot: u64,
    pub(crate) share: u64,
    pub(crate) rows: i32,
    pub(crate) cols: i32,
    pub(crate) eps: f32,
}

/// Rows of a block of `rms_norm`.
const NORM_WARPS: usize = 4;

impl Cuda {
    pub(crate) fn embed_rows(&self, open: &Open, rows: Range<usize>) -> Done {
        let weights::Matrix { ty, cols, at, .. } = self.weights.embedding;
        let p = Embed {
            table: at,
            tokens: open.tables.tokens + 4 * rows.start as u64,
            out: open.buffers.hidden.at() + 4 * (rows.start * cols) as u64,
            cols: cols as i32,
        };
        self.device.launch(&self.kernels.of(ty).embed, (rows.len(), 1, 1), 128, 0, &p)
    }

    /// Norms of `count` rows.
    pub(crate) fn norm(&self, count: usize, p: Norm) -> Done {
        let spec = &self.model.spec;
        let p = Norm { rows: count as i32, cols: spec.hidden as i32, eps: spec.rms_eps, ..p };
        let blocks = count.div_ceil(NORM_WARPS);
        self.device.launch(&self.kernels.rms_norm, (blocks, 1, 1), 32 * NORM_WARPS, 0, &p)
    }

    /// The input of a layer's projections: norms of `rows` of the residual stream, as bf16.
    pub(crate) fn mixer_input(
        &self,
        open: &Open,
        layer: usize,
        rows: &Range<usize>,
    ) -> Result<Rows, DriverError> {
        let offset = (rows.start * self.model.spec.hidden) as u64;
        let rounded = open.buffers.rounded.at() + 2 * offset;
        let x = open.buffers.hidden.at() + 4 * offset;
        self.norm(
            rows.len(),
            Norm { x, weight: self.weights.dense.layers[layer].norm, rounded, ..Norm::default() },
        )?;
        Ok(Rows { at: rounded, count: rows.len() })
    }

    /// The same for products with few rows, which norm by themselves.
    pub(crate) fn few_input(&self, open: &Open, layer: usize, rows: &Range<usize>) -> (Input, usize) {
        let x = open.buffers.hidden.at() + 4 * (rows.start * self.model.spec.hidden) as u64;
        let weight = self.weights.dense.layers[layer].norm;
        (Input::Norm { x, index: 0, weight, normed: 0, rounded: 0 }, rows.len())
    }

    pub(crate) fn head_rows(&mut self, open: &mut Open) -> Done {
        let (spec, device) = (&self.model.spec, self.device.clone());
        let (logits, hidden) = (open.pass.logits.len(), open.pass.hidden.len());
        let buffers = &mut open.buffers;
        let norm = Norm { x: buffers.hidden.at(), weight: self.weights.dense.output_norm, ..Norm::default() };
        if hidden > 0 {
            let out = buffers.wanted.take(&device, 4 * hidden * spec.hidden)?;
            self.norm(hidden, Norm { index: open.tables.hidden, out, ..norm })?;
        }
        if logits == 0 {
            return Ok(());
        }
        let to = buffers.logits.take(&device, 4 * logits * spec.vocab)?;
        let (output, stride) = (self.weights.dense.output, spec.vocab);
        if open.single {
            let (index, weight) = (open.tables.logits, self.weights.dense.output_norm);
            let input = Input::Norm { x: norm.x, index, weight, normed: 0, rounded: 0 };
            let output = Output { matrix: output, out: to, exact: false };
            return self.few(&[output], (input, logits), stride, false);
        }
        let rounded = buffers.last_rounded.take(&device, 2 * logits * spec.hidden)?;
        self.norm(logits, Norm { index: open.tables.logits, rounded, ..norm })?;
        self.gemm(&[output], Rows { at: rounded, count: logits }, (to, stride), Product::Store)
    }

    /// f32 rows of the GPU: `count` rows of `cols` columns that lie `stride` apart.
    pub(crate) fn read_rows(
        &self,
        at: u64,
        stride: usize,
        count: usize,
        cols: usize,
    ) -> Result<Matrix, DriverError> {
        let all: Vec<f32> =
            self.device.download(at, if count == 0 { 0 } else { (count - 1) * stride + cols })?;
        let data = if stride == cols {
            all
        } else {
            (0..count).flat_map(|row| all[row * stride..][..cols].iter().copied()).collect()
        };
        Ok(Matrix { rows: count, cols, data })
    }

    /// Rows of 16-bit numbers of the GPU, one after the other, each turned to f32 by `number`.
    fn read_short(
        &self,
        (at, count, cols): (u64, usize, usize),
        number: impl Fn(u16) -> f32,
    ) -> Result<Matrix, DriverError> {
        let all: Vec<u16> = self.device.download(at, count * cols)?;
        Ok(Matrix { rows: count, cols, data: all.into_iter().map(number).collect() })
    }

    /// bf16 rows of the GPU, one after the other.
    pub(crate) fn read_rounded(&self, at: u64, count: usize, cols: usize) -> Result<Matrix, DriverError> {
        self.read_short((at, count, cols), |bits| bf16::from_bits(bits).to_f32())
    }

    /// f16 rows of the GPU, one after the other.
    pub(crate) fn read_half(&self, at: u64, count: usize, cols: usize) -> Result<Matrix, DriverError> {
        self.read_short((at, count, cols), |bits| f16::from_bits(bits).to_f32())
    }
}
