//! Products of rows and weight matrices.

use cudarc::driver::DriverError;

use crate::Cuda;
use crate::dense::{DenseKernels, Heads};
use crate::driver::Function;
use crate::sources::gemm_stages;
use crate::weights::Matrix;

type Done = Result<(), DriverError>;

/// Matrices that one launch of `decode_f32` or `decode_bf16` can take.
const MOST_MATRICES: usize = 4;

/// Parameters of `decode_f32` and `decode_bf16`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Decode {
    from: [u64; MOST_MATRICES],
    ends: [i64; MOST_MATRICES],
    to: u64,
}

impl Decode {
    /// Of matrices that begin at these addresses and have so many weights, to rooms one behind the other.
    pub(crate) fn new(matrices: impl Iterator<Item = (u64, usize)>, to: u64) -> Decode {
        let (mut p, mut end) = (Decode { from: [0; MOST_MATRICES], ends: [0; MOST_MATRICES], to }, 0);
        let mut matrices = matrices.fuse();
        for i in 0..MOST_MATRICES {
            let (at, weights) = matrices.next().unwrap_or((0, 0));
            end += weights as i64 / 8;
            (p.from[i], p.ends[i]) = (at, end);
        }
        p
    }

    /// Blocks of 256 threads that a launch takes.
    pub(crate) fn blocks(&self) -> usize {
        (self.ends[MOST_MATRICES - 1] as usize).div_ceil(256)
    }
}

/// Parameters of `decode_split`.
#[derive(Clone, Copy)]
#[repr(C)]
struct DecodeSplit {
    from: u64,
    to: u64,
    rows: i32,
    cols: i32,
}

/// Parameters of the products of many rows (`gemm.cu`).
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Gemm {
    pub(crate) a: u64,
    pub(crate) b: u64,
    pub(crate) out: u64,
    pub(crate) scale: u64,
    pub(crate) pairs: u64,
    pub(crate) tiles: u64,
    pub(crate) count: u64,
    pub(crate) matrix: i64,
    pub(crate) m: i32,
    pub(crate) n: i32,
    pub(crate) k: i32,
    pub(crate) tile_rows: i32,
    pub(crate) a_stride: i32,
    pub(crate) b_stride: i32,
    pub(crate) out_stride: i32,
    pub(crate) used: i32,
}

/// A product of many rows with one matrix, and what becomes of the results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Product {
    /// Stored.
    Store,
    /// Added to what is there.
    Add,
    /// Times a number for each row.
    Scale,
    /// SiLU of the results of the first half of the weights' rows, times those of the other half.
    Gated,
    /// Of factors that are sums of two bf16.
    Split,
}

impl Product {
    /// Bytes of a number of the results: bf16 of gated products, else f32.
    pub(crate) fn result_bytes(self) -> u64 {
        if self == Product::Gated { 2 } else { 4 }
    }
}

/// Rows that are multiplied, bf16.
#[derive(Clone, Copy)]
pub(crate) struct Rows {
    pub(crate) at: u64,
    pub(crate) count: usize,
}

impl Cuda {
    /// out[r] = x[r] · weightsᵀ of several matrices, whose results lie side by side in rows of `stride` numbers.
    pub(crate) fn gemm(
        &mut self,
        matrices: &[Matrix],
        x: Rows,
        (out, stride): (u64, usize),
        product: Product,
    ) -> Done {
        let p = self.side_by_side(matrices, x, (out, stride))?;
        self.multiply(product, p)
    }

    /// The product with several matrices, which are decoded.
    fn side_by_side(&mut self, matrices: &[Matrix], x: Rows, out: (u64, usize)) -> Result<Gemm, DriverError> {
        let b = self.decoded(matrices)?;
        let (n, k) = (matrices.iter().map(|m| m.rows).sum::<usize>(), matrices[0].cols);
        Ok(dense((x.at, x.count), b, out, (n, k), 0))
    }

    /// The projections of an attention layer, heads finished, if there is a kernel for that. Returns whether there is.
    pub(crate) fn gemm_heads(
        &mut self,
        matrices: &[Matrix],
        x: Rows,
        (out, stride): (u64, usize),
        heads: &Heads,
    ) -> Result<bool, DriverError> {
        let can = DenseKernels::can_finish(&self.model.spec.attention, self.limits.kv);
        if !can || self.kernels.dense.is_none() {
            return Ok(false);
        }
        let p = self.side_by_side(matrices, x, (out, stride))?;
        let kernels = self.kernels.dense.as_ref().expect("asked above");
        kernels.multiply_heads(&self.device, &p, heads)?;
        Ok(true)
    }

    /// out[r] = scale[r] · (SiLU(x[r] gateᵀ) ⊙ (x[r] upᵀ)) downᵀ; `inner` has room for what is multiplied last, as bf16.
    pub(crate) fn gated_network(
        &mut self,
        [gate, up, down]: [Matrix; 3],
        x: Rows,
        inner: u64,
        (out, scale): (u64, u64),
    ) -> Done {
        let b = self.decoded(&[gate, up, down])?;
        let p = dense((x.at, x.count), b, (inner, gate.rows), (gate.rows, gate.cols), 0);
        self.multiply(Product::Gated, p)?;
        let b = b + 2 * (gate.rows * gate.cols + up.rows * up.cols) as u64;
        let p = dense((inner, x.count), b, (out, down.rows), (down.rows, down.cols), scale);
        self.multiply(Product::Scale, p)
    }

    /// Launches a product that is not grouped.
    fn multiply(&self, product: Product, p: Gemm) -> Done {
        match &self.kernels.dense {
            Some(kernels) if kernels.can(product, &p) => kernels.multiply(&self.device, product, &p),
            _ => self.multiply_anywhere(product, p),
        }
    }

    /// By the kernels that all GPUs have, some rows after others, so that theirs stay in the L2 cache while columns of weights
    /// go by: over tiles of some columns, as many blocks as there are multiprocessors or tiles.
    fn multiply_anywhere(&self, product: Product, p: Gemm) -> Done {
        const AT_ONCE: usize = 4096;
        // Rows of a tile, and what a step of one takes: half of its time goes to columns of weights.
        const HEIGHTS: [(usize, usize); 3] = [(256, 16), (128, 10), (64, 8)];
        let (kernel, width, thirds) = match product {
            Product::Store => (&self.kernels.gemm_store, 128, 1),
            Product::Add => (&self.kernels.gemm_add, 128, 1),
            Product::Scale => (&self.kernels.gemm_scale, 128, 1),
            Product::Gated => (&self.kernels.gemm_gated, 64, 1),
            Product::Split => (&self.kernels.gemm_split, 128, 3),
        };
        let processors = self.device.processors as usize;
        let (_, shared) = gemm_stages(&self.target);
        for first in (0..p.m as usize).step_by(AT_ONCE) {
            let m = (p.m as usize - first).min(AT_ONCE);
            let tiles = |rows: usize| m.div_ceil(rows) * (p.n as usize).div_ceil(width);
            let time = |&&(rows, step): &&(usize, usize)| tiles(rows).div_ceil(processors) * step;
            let (rows, _) = HEIGHTS.iter().min_by_key(time).expect("there are some");
            let part = Gemm {
                a: p.a + 2 * first as u64 * p.a_stride as u64,
                out: p.out + product.result_bytes() * first as u64 * p.out_stride as u64,
                scale: p.scale + 4 * first as u64,
                m: m as i32,
                tile_rows: *rows as i32,
                k: thirds * p.k,
                ..p
            };
            self.device.launch(kernel, (tiles(*rows).min(processors), 1, 1), 384, shared, &part)?;
        }
        Ok(())
    }

    /// Launches a grouped product, a block for each multiprocessor.
    pub(crate) fn multiply_grouped<P: Copy>(
        &self,
        kernel: &Function,
        (threads, shared): (usize, usize),
        p: P,
    ) -> Done {
        self.device.launch(kernel, (self.device.processors as usize, 1, 1), threads, shared, &p)
    }

    /// Matrices as bf16, one after the other.
    fn decoded(&mut self, matrices: &[Matrix]) -> Result<u64, DriverError> {
        let numbers: usize = matrices.iter().map(|m| m.rows * m.cols).sum();
        let at = self.scratch.weights.take(&self.device, 2 * numbers)?;
        let mut to = at;
        for some in matrices.chunk_by(|a, b| a.ty == b.ty).flat_map(|same| same.chunks(MOST_MATRICES)) {
            let p = Decode::new(some.iter().map(|m| (m.at, m.rows * m.cols)), to);
            let kernel = &self.kernels.of(some[0].ty).decode_bf16;
            self.device.launch(kernel, (p.blocks(), 1, 1), 256, 0, &p)?;
            to += some.iter().map(|m| 2 * m.rows * m.cols).sum::<usize>() as u64;
        }
        Ok(at)
    }

    /// out = x · matrixᵀ nearly as exact as f32: both as sums of two bf16, x as low and high.
    pub(crate) fn split_gemm(&mut self, matrix: Matrix, x: Rows, (out, stride): (u64, usize)) -> Done {
        let b = self.scratch.weights.take(&self.device, 4 * matrix.rows * matrix.cols)?;
        let p = DecodeSplit { from: matrix.at, to: b, rows: matrix.rows as i32, cols: matrix.cols as i32 };
        let groups = matrix.rows * matrix.cols / 8;
        let kernel = &self.kernels.of(matrix.ty).decode_split;
        self.device.launch(kernel, (groups.div_ceil(256), 1, 1), 256, 0, &p)?;
        let p = dense((x.at, x.count), b, (out, stride), (matrix.rows, matrix.cols), 0);
        let stride = 2 * p.k;
        self.multiply(Product::Split, Gemm { a_stride: stride, b_stride: stride, ..p })
    }
}

/// Parameters of a product that is not grouped; rows of `a` are as long as k.
pub(crate) fn dense(
    (a, m): (u64, usize),
    b: u64,
    (out, stride): (u64, usize),
    (n, k): (usize, usize),
    scale: u64,
) -> Gemm {
    Gemm {
        a,
        b,
        out,
        scale,
        pairs: 0,
        tiles: 0,
        count: 0,
        matrix: 0,
        m: m as i32,
        n: n as i32,
        k: k as i32,
        tile_rows: 0,
        a_stride: k as i32,
        b_stride: k as i32,
        out_stride: stride as i32,
        used: 1,
    }
}
