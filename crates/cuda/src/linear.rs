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

/// Parameters of the products of single rows.
#[derive(Clone, Copy)]
#[repr(C)]
struct Gemv {
    weights: [u64; 4],
    out: [u64; 4],
    ends: [i32; 4],
    x: u64,
    up: u64,
    scale: u64,
    cols: i32,
    count: i32,
    x_stride: i32,
    out_stride: i32,
    add: i32,
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
    pub(crate) a_stride: i32,
    pub(crate) out_stride: i32,
    pub(crate) used: i32,
    pub(crate) blocks: [u64; 2],
    pub(crate) strides: [i64; 2],
    pub(crate) places: [u64; 2],
    pub(crate) list: u64,
}

/// Warps of a block of products of single rows.
pub(crate) const WARPS: usize = 8;

/// Bytes of shared memory that a row of `cols` numbers takes there.
pub(crate) fn staged(cols: usize) -> usize {
    4 * (cols + cols / 32 * 4 + 4)
}

/// Parameters without matrices.
fn gemv(x: Rows, cols: usize, stride: usize, then: Then) -> Gemv {
    Gemv {
        weights: [0; 4],
        out: [0; 4],
        ends: [0; 4],
        x: x.at,
        up: 0,
        scale: if let Then::Scale(at) = then { at } else { 0 },
        cols: cols as i32,
        count: x.count as i32,
        x_stride: cols as i32,
        out_stride: stride as i32,
        add: i32::from(then == Then::Add),
    }
}

impl Gemv {
    /// Makes `matrix` number `i`, the last one so far.
    fn put(&mut self, i: usize, matrix: Matrix, out: u64) {
        (self.weights[i], self.out[i]) = (matrix.at, out);
        let before = if i == 0 { 0 } else { self.ends[i - 1] };
        self.ends[i..].fill(before + matrix.rows as i32);
    }
}

/// What becomes of the results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Then {
    Store,
    Add,
    /// Times a number for each row, at this address.
    Scale(u64),
}

/// Rows that are multiplied, as f32 for single passes or as bf16 for others.
#[derive(Clone, Copy)]
pub(crate) struct Rows {
    pub(crate) at: u64,
    pub(crate) count: usize,
}

impl Cuda {
    /// out[r] = x[r] · weightsᵀ of several matrices, whose results lie side by side in rows of `stride` numbers.
    pub(crate) fn linear(
        &mut self,
        single: bool,
        matrices: &[Matrix],
        x: Rows,
        (out, stride): (u64, usize),
        then: Then,
    ) -> Done {
        if single {
            self.gemv(matrices, x, (out, stride), then)
        } else {
            self.gemm(matrices, x, (out, stride), then)
        }
    }

    fn gemv(&self, matrices: &[Matrix], x: Rows, (out, stride): (u64, usize), then: Then) -> Done {
        let mut column = 0;
        let mut rest = matrices;
        while let Some(first) = rest.first() {
            let same = rest.iter().take(4).take_while(|m| m.ty == first.ty).count();
            let mut p = gemv(x, first.cols, stride, then);
            for (i, matrix) in rest[..same].iter().enumerate() {
                p.put(i, *matrix, out + 4 * column as u64);
                column += matrix.rows;
            }
            self.launch_gemv(first.ty, p)?;
            rest = &rest[same..];
        }
        Ok(())
    }

    /// down · (SiLU(gate · x) ⊙ (up · x)) of single rows, times a number for each row; `room` takes the inner rows twice.
    pub(crate) fn gated_gemv(
        &self,
        [gate, up, down]: [Matrix; 3],
        x: Rows,
        room: u64,
        (out, stride): (u64, usize),
        then: Then,
    ) -> Done {
        let up_at = room + 4 * (x.count * gate.rows) as u64;
        let mut p = gemv(x, gate.cols, gate.rows, Then::Store);
        p.put(0, gate, room);
        if gate.ty == up.ty {
            p.put(1, up, up_at);
            self.launch_gemv(gate.ty, p)?;
        } else {
            self.launch_gemv(gate.ty, p)?;
            let mut p = gemv(x, up.cols, up.rows, Then::Store);
            p.put(0, up, up_at);
            self.launch_gemv(up.ty, p)?;
        }
        let inner = Rows { at: room, count: x.count };
        let mut p = gemv(inner, down.cols, stride, then);
        p.up = up_at;
        p.put(0, down, out);
        self.launch_gemv(down.ty, p)
    }

    /// Rows by fours, then what is left one by one: each row's sums are the same either way.
    fn launch_gemv(&self, ty: quant::Type, p: Gemv) -> Done {
        let kernels = self.kernels.of(ty);
        let fours = p.count / 4 * 4;
        let blocks = (p.ends[3] as usize).div_ceil(WARPS).min(4 * self.device.processors as usize);
        let launch = |kernel, rows, p: &Gemv| {
            let shared = rows * staged(p.cols as usize);
            self.device.launch(kernel, (blocks, 1, 1), 32 * WARPS, shared, p)
        };
        if fours > 0 {
            launch(&kernels.gemv_4, 4, &Gemv { count: fours, ..p })?;
        }
        if fours == p.count {
            return Ok(());
        }
        let skip = |at: u64, numbers: i32| if at == 0 { 0 } else { at + 4 * (fours * numbers) as u64 };
        let rest = Gemv {
            out: p.out.map(|at| skip(at, p.out_stride)),
            x: skip(p.x, p.x_stride),
            up: skip(p.up, p.x_stride),
            scale: skip(p.scale, 1),
            count: p.count - fours,
            ..p
        };
        launch(&kernels.gemv_1, 1, &rest)
    }

    fn gemm(&mut self, matrices: &[Matrix], x: Rows, (out, stride): (u64, usize), then: Then) -> Done {
        let b = self.decoded(matrices)?;
        let (n, k) = (matrices.iter().map(|m| m.rows).sum::<usize>(), matrices[0].cols);
        let (kernel, scale) = match then {
            Then::Store => (self.kernels.gemm_store, 0),
            Then::Add => (self.kernels.gemm_add, 0),
            Then::Scale(at) => (self.kernels.gemm_scale, at),
        };
        self.multiply(&kernel, dense((x.at, x.count), b, (out, stride), (n, k), scale))
    }

    /// SiLU(x gateᵀ) ⊙ (x upᵀ) as bf16.
    pub(crate) fn gated_gemm(&mut self, gate: Matrix, up: Matrix, x: Rows, out: u64) -> Done {
        let b = self.decoded(&[gate, up])?;
        let p = dense((x.at, x.count), b, (out, gate.rows), (gate.rows, gate.cols), 0);
        let kernel = self.kernels.gemm_gated;
        self.multiply(&kernel, p)
    }

    /// Launches products over tiles of 256 · 128, as many blocks as there are multiprocessors or tiles.
    pub(crate) fn multiply(&self, kernel: &Function, p: Gemm) -> Done {
        let (_, shared) = gemm_stages(&self.target);
        self.multiply_with(kernel, (384, shared), p)
    }

    /// The same with other threads and bytes of shared memory.
    pub(crate) fn multiply_with(
        &self,
        kernel: &Function,
        (threads, shared): (usize, usize),
        p: Gemm,
    ) -> Done {
        let tiles = match p.count {
            0 => (p.m as usize).div_ceil(256) * (p.n as usize).div_ceil(64),
            _ => usize::MAX,
        };
        let grid = tiles.min(self.device.processors as usize);
        self.device.launch(kernel, (grid, 1, 1), threads, shared, &p)
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
        self.multiply(&kernel, p)
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
        a_stride: k as i32,
        out_stride: stride as i32,
        used: 1,
        blocks: [0; 2],
        strides: [0; 2],
        places: [0; 2],
        list: 0,
    }
}
