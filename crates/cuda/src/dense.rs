//! Products of many rows with one matrix on Hopper (`dense.cu`), whose tiles the copy engine brings and stores.

use std::ffi::c_void;

use cudarc::driver::{DriverError, sys};

use crate::driver::{Buffer, Device, Function, Module, failed};
use crate::error::Result;
use crate::linear::{Gemm, Product, dense};
use crate::sources::{Source, Target};
use crate::{compile, kernels};

/// A kind of tiles (`Kind` of the kernels).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Kind {
    /// Groups of four warps, each with 64 rows of a tile.
    groups: usize,
    /// Rows of weights of a tile.
    width: usize,
    /// Blocks that share a multiprocessor: while one stores, another multiplies.
    blocks: usize,
    /// What a step of 64 columns takes, and what storing a tile takes, in 10 ns of an H200.
    step: usize,
    store: usize,
}

const KINDS: [Kind; 3] = [
    Kind { groups: 2, width: 256, blocks: 1, step: 62, store: 500 },
    Kind { groups: 2, width: 128, blocks: 2, step: 32, store: 250 },
    Kind { groups: 1, width: 128, blocks: 1, step: 30, store: 130 },
];

/// Names of the kernels: of every product, of every kind.
const NAMES: [[&str; KINDS.len()]; 5] = [
    ["dense_store_128x256", "dense_store_128x128", "dense_store_64x128"],
    ["dense_add_128x256", "dense_add_128x128", "dense_add_64x128"],
    ["dense_scale_128x256", "dense_scale_128x128", "dense_scale_64x128"],
    ["dense_gated_128x256", "dense_gated_128x128", "dense_gated_64x128"],
    ["dense_split_128x256", "dense_split_128x128", "dense_split_64x128"],
];

const STEP: usize = 64;

/// Bytes of a warp's buffer for sums on their way out.
const PUT_BYTES: usize = 16 * 128;

impl Kind {
    fn rows(self) -> usize {
        64 * self.groups
    }

    /// Columns of the results that a tile has.
    fn columns(self, product: Product) -> usize {
        if product == Product::Gated { self.width / 2 } else { self.width }
    }

    fn tiles(self, product: Product, p: &Gemm) -> usize {
        (p.m as usize).div_ceil(self.rows()) * (p.n as usize).div_ceil(self.columns(product))
    }

    /// What a product takes with `processors` multiprocessors.
    fn time(self, product: Product, p: &Gemm, processors: usize) -> usize {
        let products = if product == Product::Split { 3 } else { 1 };
        let steps = (p.k as usize).div_ceil(STEP) * products;
        let tiles = self.tiles(product, p).div_ceil(processors);
        tiles * steps * self.step + tiles.div_ceil(self.blocks) * self.store
    }

    /// Shared memory of a block, where one alone can have `room`: as many stages as fit, each with two barriers, and buffers
    /// of sums, two for a warp that has nobody beside it.
    fn shared(self, room: usize) -> usize {
        const OF_SYSTEM: usize = 1024; // taken of each block
        let buffers = if self.blocks > 1 { 1 } else { 2 };
        let (stage, put) =
            ((self.rows() + self.width) * STEP * 2 + 16, self.groups * 4 * buffers * PUT_BYTES);
        ((room + OF_SYSTEM) / self.blocks - OF_SYSTEM - put) / stage * stage + put
    }
}

/// Parameters of the kernels.
#[derive(Clone, Copy)]
#[repr(C)]
struct Dense {
    a: [sys::CUtensorMap; 2],
    b: [sys::CUtensorMap; 2],
    out: sys::CUtensorMap,
    scale: u64,
    m: i32,
    n: i32,
    k: i32,
}

/// The kernels of every product.
pub(crate) struct DenseKernels {
    by: [[Function; KINDS.len()]; 5],
    /// Shared memory a block can have.
    room: usize,
}

impl DenseKernels {
    pub(crate) fn new(module: &Module, target: &Target) -> Result<DenseKernels> {
        let mut by = Vec::new();
        for names in NAMES {
            let mut kinds = Vec::new();
            for name in names {
                kinds.push(module.function(name).map_err(failed(name))?.early());
            }
            by.push(kinds.try_into().unwrap_or_else(|_| unreachable!("a function for every name")));
        }
        let by = by.try_into().unwrap_or_else(|_| unreachable!("kernels of every product"));
        Ok(DenseKernels { by, room: target.shared })
    }

    /// Whether rows of the results begin where the copy engine can store.
    pub(crate) fn can(&self, product: Product, p: &Gemm) -> bool {
        let size = if product == Product::Gated { 2 } else { 4 };
        (p.out_stride as usize * size).is_multiple_of(16) && p.out.is_multiple_of(16)
    }

    /// Launches a product by the tiles that take the shortest time; the bits are the same with all.
    pub(crate) fn multiply(
        &self,
        device: &Device,
        product: Product,
        p: &Gemm,
    ) -> std::result::Result<(), DriverError> {
        let processors = device.processors as usize;
        let best = (0..KINDS.len()).min_by_key(|&i| KINDS[i].time(product, p, processors));
        self.launch(device, best.expect("there are some"), product, p)
    }

    fn launch(
        &self,
        device: &Device,
        index: usize,
        product: Product,
        p: &Gemm,
    ) -> std::result::Result<(), DriverError> {
        let (kind, kernel) = (KINDS[index], &self.by[product as usize][index]);
        let (m, n, k) = (p.m as u64, p.n as u64, p.k as u64);
        let parts = if product == Product::Split { 2 } else { 1 };
        let factor = |at: u64, rows: u64, box_rows: usize| {
            let part = |at| map(BF16, at, [k, rows], 2 * k * parts, [STEP, box_rows]);
            Ok::<_, DriverError>([part(at)?, part(at + (parts - 1) * 2 * k)?])
        };
        let gated = product == Product::Gated;
        let (ty, size, columns) = if gated { (BF16, 2, 64) } else { (F32, 4, 32) };
        let all = Dense {
            a: factor(p.a, m, kind.rows())?,
            b: factor(p.b, if gated { 2 * n } else { n }, kind.width / 2)?,
            out: map(ty, p.out, [n, m], size * p.out_stride as u64, [columns, 16])?,
            scale: p.scale,
            m: p.m,
            n: p.n,
            k: p.k,
        };
        let blocks = kind.tiles(product, p).min(kind.blocks * device.processors as usize);
        let threads = 128 * kind.groups + 32;
        device.launch(kernel, (blocks, 1, 1), threads, kind.shared(self.room), &all)
    }
}

const BF16: sys::CUtensorMapDataType = sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
const F32: sys::CUtensorMapDataType = sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT32;

/// What the copy engine has to know to bring and store boxes of a matrix, whose rows of 128 bytes are swizzled in shared
/// memory: how many columns and rows there are, the bytes from a row to the next, columns and rows of a box.
fn map(
    ty: sys::CUtensorMapDataType,
    at: u64,
    lens: [u64; 2],
    stride: u64,
    box_lens: [usize; 2],
) -> std::result::Result<sys::CUtensorMap, DriverError> {
    let box_lens = box_lens.map(|len| len as u32);
    let mut map = sys::CUtensorMap { opaque: [0; 16] };
    // SAFETY: the lists have two numbers, that of strides one, and live during the call; it only writes the map. What
    // the map names is used by kernels alone, whose callers name parts of living buffers.
    unsafe {
        sys::cuTensorMapEncodeTiled(
            &mut map,
            ty,
            2,
            at as *mut c_void,
            lens.as_ptr(),
            &stride,
            box_lens.as_ptr(),
            [1, 1].as_ptr(),
            sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    }
    .result()?;
    Ok(map)
}

/// What every kind of tiles makes of factors [m, k] and [n, k] (of [`Product::Gated`] [2 n, k]; of [`Product::Split`]
/// [m, 2, k] and [n, 2, k]) on top of `before` [m, n], for checks against other products. Nothing on GPUs that multiply
/// otherwise.
///
/// # Errors
/// Those of starting the backend.
///
/// # Panics
/// If there are fewer numbers than that.
pub fn products(
    product: Product,
    [a, b]: [&[u16]; 2],
    (scale, before): (&[f32], &[f32]),
    [m, n, k]: [usize; 3],
) -> Result<Vec<Vec<f32>>> {
    let parts = if product == Product::Split { 2 } else { 1 };
    let gated = product == Product::Gated;
    assert!(
        a.len() >= m * k * parts && b.len() >= n * k * if gated { 2 } else { parts },
        "numbers of both factors"
    );
    assert!(scale.len() >= m && before.len() >= m * n, "a number for each row and each result");
    let device = Device::open(0)?;
    let target = compile::target(device.capability, device.shared);
    let Some(source) = Source::dense(&target) else { return Ok(Vec::new()) };
    let modules = kernels::load(&device, &[source])?;
    let kernels = DenseKernels::new(&modules[0], &target)?;
    let upload = |numbers: &[u16]| {
        let buffer = device.allocate(2 * numbers.len())?;
        device.upload(numbers, buffer.at)?;
        Ok::<Buffer, DriverError>(buffer)
    };
    let run = |index: usize| {
        let (a, b) = (upload(a)?, upload(b)?);
        let (row_scale, out) = (device.allocate(4 * m)?, device.allocate(4 * m * n)?);
        device.upload(scale, row_scale.at)?;
        device.upload(before, out.at)?;
        let p = dense((a.at, m), b.at, (out.at, n), (n, k), row_scale.at);
        kernels.launch(&device, index, product, &p)?;
        if gated {
            let out: Vec<u16> = device.download(out.at, m * n)?;
            return Ok(out.iter().map(|&bits| f32::from_bits(u32::from(bits) << 16)).collect());
        }
        device.download(out.at, m * n)
    };
    (0..KINDS.len()).map(run).collect::<std::result::Result<_, DriverError>>().map_err(failed("multiplying"))
}
