//! Products of many rows with one matrix on Hopper (`dense.cu`), whose tiles the copy engine brings and stores.

use std::ffi::c_void;

use cudarc::driver::{DriverError, sys};

use crate::driver::{Device, Function, Module, failed};
use crate::error::Result;
use crate::linear::{Gemm, Product};
use crate::sources::Target;

/// A kind of tiles and clusters (`Kind` of the kernels).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Kind {
    /// Groups of four warps, each with 64 rows of a tile.
    groups: usize,
    /// Rows of weights of a tile.
    width: usize,
    /// Tiles of a cluster below one another, and beside.
    below: usize,
    beside: usize,
    /// What a step of 64 columns takes, and what storing a tile takes, in some unit.
    step: usize,
    store: usize,
}

const KINDS: [Kind; 3] = [
    Kind { groups: 2, width: 256, below: 2, beside: 1, step: 20, store: 60 },
    Kind { groups: 2, width: 128, below: 2, beside: 1, step: 12, store: 30 },
    Kind { groups: 1, width: 128, below: 2, beside: 1, step: 9, store: 30 },
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

/// Bytes of a warp's two buffers for sums on their way out.
const PUT_BYTES: usize = 2 * 16 * 128;

impl Kind {
    fn rows(self) -> usize {
        64 * self.groups
    }

    /// Columns of the results that a tile has.
    fn columns(self, product: Product) -> usize {
        if product == Product::Gated { self.width / 2 } else { self.width }
    }

    /// Tiles of clusters for a product.
    fn tiles(self, product: Product, p: &Gemm) -> usize {
        (p.m as usize).div_ceil(self.rows() * self.below)
            * (p.n as usize).div_ceil(self.columns(product) * self.beside)
    }

    /// What a product takes with `processors` multiprocessors.
    fn time(self, product: Product, p: &Gemm, processors: usize) -> usize {
        let clusters = processors / (self.below * self.beside);
        let products = if product == Product::Split { 3 } else { 1 };
        let steps = (p.k as usize).div_ceil(STEP) * products;
        self.tiles(product, p).div_ceil(clusters) * (steps * self.step + self.store)
    }

    /// Shared memory of a block, of which there is `room`: as many stages as fit, each with two barriers, and the buffers of
    /// sums.
    fn shared(self, room: usize) -> usize {
        let (stage, put) = ((self.rows() + self.width) * STEP * 2 + 16, self.groups * 4 * PUT_BYTES);
        (room - put) / stage * stage + put
    }
}

/// Parameters of the kernels.
#[derive(Clone, Copy)]
#[repr(C)]
struct Dense {
    a: sys::CUtensorMap,
    b: sys::CUtensorMap,
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
        let index = best.expect("there are some");
        let (kind, kernel) = (KINDS[index], &self.by[product as usize][index]);
        let (m, n, k) = (p.m as u64, p.n as u64, p.k as u64);
        let parts = if product == Product::Split { 2 } else { 1 };
        let factor = |at: u64, rows: u64, box_rows: usize| {
            map(BF16, at, &[k, parts, rows], &[2 * k, 2 * k * parts], &[STEP, 1, box_rows])
        };
        let gated = product == Product::Gated;
        let (ty, size, columns) = if gated { (BF16, 2, 64) } else { (F32, 4, 32) };
        let all = Dense {
            a: factor(p.a, m, kind.rows() / kind.beside)?,
            b: factor(p.b, if gated { 2 * n } else { n }, kind.width / 2)?,
            out: map(ty, p.out, &[n, m], &[size * p.out_stride as u64], &[columns, 16])?,
            scale: p.scale,
            m: p.m,
            n: p.n,
            k: p.k,
        };
        let cluster = kind.below * kind.beside;
        let clusters = kind.tiles(product, p).min(processors / cluster);
        let threads = 128 * kind.groups + 32;
        device.launch(kernel, (clusters * cluster, 1, 1), threads, kind.shared(self.room), &all)
    }
}

const BF16: sys::CUtensorMapDataType = sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
const F32: sys::CUtensorMapDataType = sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT32;

/// What the copy engine has to know to bring and store boxes of numbers, in rows of 128 bytes that are swizzled in shared
/// memory: how many numbers there are in each direction, innermost first, the bytes from one to the next in all but the
/// first, and how many of them a box has.
fn map(
    ty: sys::CUtensorMapDataType,
    at: u64,
    lens: &[u64],
    strides: &[u64],
    box_lens: &[usize],
) -> std::result::Result<sys::CUtensorMap, DriverError> {
    assert!(lens.len() == box_lens.len() && strides.len() + 1 == lens.len(), "as many as directions");
    let (box_lens, ones): (Vec<u32>, Vec<u32>) = box_lens.iter().map(|&len| (len as u32, 1)).unzip();
    let mut map = sys::CUtensorMap { opaque: [0; 16] };
    // SAFETY: the lists are as long as the driver is told and live during the call; it only writes the map. What the
    // map names is used by kernels alone, whose callers name parts of living buffers.
    unsafe {
        sys::cuTensorMapEncodeTiled(
            &mut map,
            ty,
            lens.len() as u32,
            at as *mut c_void,
            lens.as_ptr(),
            strides.as_ptr(),
            box_lens.as_ptr(),
            ones.as_ptr(),
            sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    }
    .result()?;
    Ok(map)
}
