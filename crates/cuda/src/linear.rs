//! Products of rows and weight matrices.

use cudarc::driver::DriverError;

use crate::Cuda;
use crate::driver::Function;
use crate::sources::gemm_stages;
use crate::weights::Matrix;

type Done = Result<(), DriverError>;

/// Parameters of `decode_f32` and `decode_bf16`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Decode {
    pub(crate) from: u64,
    pub(crate) to: u64,
    pub(crate) groups: i64,
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

/// Parameters of the products of many rows.
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
    pub(crate) out_stride: i32,
    pub(crate) used: i32,
}

/// What becomes of the results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Then {
    Store,
    Add,
    /// Times a number for each row, at this address.
    Scale(u64),
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
        then: Then,
    ) -> Done {
        let b = self.decoded(matrices)?;
        let (n, k) = (matrices.iter().map(|m| m.rows).sum::<usize>(), matrices[0].cols);
        let (kernel, scale) = match then {
            Then::Store => (self.kernels.gemm_store, 0),
            Then::Add => (self.kernels.gemm_add, 0),
            Then::Scale(at) => (self.kernels.gemm_scale, at),
        };
        self.multiply(&kernel, 128, dense((x.at, x.count), b, (out, stride), (n, k), scale))
    }

    /// SiLU(x gateᵀ) ⊙ (x upᵀ) as bf16.
    pub(crate) fn gated_gemm(&mut self, gate: Matrix, up: Matrix, x: Rows, out: u64) -> Done {
        let b = self.decoded(&[gate, up])?;
        let p = dense((x.at, x.count), b, (out, gate.rows), (gate.rows, gate.cols), 0);
        let kernel = self.kernels.gemm_gated;
        self.multiply(&kernel, 64, p)
    }

    /// Launches a product that is not grouped over tiles of `width` columns, as many blocks as there are multiprocessors or
    /// tiles.
    fn multiply(&self, kernel: &Function, width: usize, p: Gemm) -> Done {
        // Rows of a tile, and what a step of one takes: half of its time goes to columns of weights.
        const HEIGHTS: [(usize, usize); 3] = [(256, 16), (128, 10), (64, 8)];
        let processors = self.device.processors as usize;
        let tiles = |rows: usize| (p.m as usize).div_ceil(rows) * (p.n as usize).div_ceil(width);
        let time = |&&(rows, step): &&(usize, usize)| tiles(rows).div_ceil(processors) * step;
        let (rows, _) = HEIGHTS.iter().min_by_key(time).expect("there are some");
        let (_, shared) = gemm_stages(&self.target);
        let p = Gemm { tile_rows: *rows as i32, ..p };
        self.device.launch(kernel, (tiles(*rows).min(processors), 1, 1), 384, shared, &p)
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

    /// Matrices of one width as bf16, their rows one after the other.
    fn decoded(&mut self, matrices: &[Matrix]) -> Result<u64, DriverError> {
        let numbers: usize = matrices.iter().map(|m| m.rows * m.cols).sum();
        let at = self.scratch.weights.take(&self.device, 2 * numbers)?;
        let mut to = at;
        for matrix in matrices {
            let groups = matrix.rows * matrix.cols / 8;
            let p = Decode { from: matrix.at, to, groups: groups as i64 };
            let kernel = &self.kernels.of(matrix.ty).decode_bf16;
            self.device.launch(kernel, (groups.div_ceil(256), 1, 1), 256, 0, &p)?;
            to += 16 * groups as u64;
        }
        Ok(at)
    }

    /// out = x · matrixᵀ nearly as exact as f32: both as sums of two bf16, x as low | high | high.
    pub(crate) fn split_gemm(&mut self, matrix: Matrix, x: Rows, (out, stride): (u64, usize)) -> Done {
        let b = self.scratch.weights.take(&self.device, 6 * matrix.rows * matrix.cols)?;
        let p = DecodeSplit { from: matrix.at, to: b, rows: matrix.rows as i32, cols: matrix.cols as i32 };
        let groups = matrix.rows * matrix.cols / 8;
        let kernel = &self.kernels.of(matrix.ty).decode_split;
        self.device.launch(kernel, (groups.div_ceil(256), 1, 1), 256, 0, &p)?;
        let p = dense((x.at, x.count), b, (out, stride), (matrix.rows, 3 * matrix.cols), 0);
        let kernel = self.kernels.gemm_store;
        self.multiply(&kernel, 128, p)
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
        out_stride: stride as i32,
        used: 1,
    }
}
