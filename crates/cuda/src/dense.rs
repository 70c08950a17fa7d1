//! Products of many rows with one matrix on Hopper (`dense.cu`), whose tiles the copy engine brings and stores.

use std::ffi::c_void;

use cudarc::driver::{DriverError, sys};
use model::{AttentionSpec, KvType};

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
    /// What a step of 64 columns takes, and what storing a tile takes, in 10 ns of an H200.
    step: usize,
    store: usize,
}

const KINDS: [Kind; 3] = [
    Kind { groups: 2, width: 256, step: 62, store: 500 },
    Kind { groups: 2, width: 128, step: 32, store: 260 },
    Kind { groups: 1, width: 128, step: 30, store: 130 },
];

/// The same of the projections of an attention layer, whose tiles have a head's columns (`heads.cu`).
const HEAD_KINDS: [(&str, Kind); 2] = [
    ("dense_heads_128x256", Kind { groups: 2, width: 256, step: 62, store: 450 }),
    ("dense_heads_64x256", Kind { groups: 1, width: 256, step: 40, store: 250 }),
];

/// Numbers of a head, and those that are rotated, of the layers these are for.
const HEAD: usize = 256;
const TURNED: usize = 64;

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

    fn tiles(self, product: Product, p: &Gemm) -> usize {
        (p.m as usize).div_ceil(self.rows()) * (p.n as usize).div_ceil(self.columns(product))
    }

    /// What a product takes with `processors` multiprocessors.
    fn time(self, product: Product, p: &Gemm, processors: usize) -> usize {
        let products = if product == Product::Split { 3 } else { 1 };
        let steps = (p.k as usize).div_ceil(STEP) * products;
        self.tiles(product, p).div_ceil(processors) * (steps * self.step + self.store)
    }

    /// Threads of a block: those that multiply, and a warp that brings what they do.
    fn threads(self) -> usize {
        128 * self.groups + 32
    }

    fn parameters(self, product: Product, p: &Gemm) -> std::result::Result<Dense, DriverError> {
        let (m, n, k) = (p.m as u64, p.n as u64, p.k as u64);
        let parts = if product == Product::Split { 2 } else { 1 };
        let factor = |at: u64, rows: u64, box_rows: usize| {
            let part = |at| map(BF16, at, [k, rows], 2 * k * parts, [STEP, box_rows]);
            Ok::<_, DriverError>([part(at)?, part(at + (parts - 1) * 2 * k)?])
        };
        let gated = product == Product::Gated;
        let (ty, columns) = if gated { (BF16, 64) } else { (F32, 32) };
        Ok(Dense {
            a: factor(p.a, m, self.rows())?,
            b: factor(p.b, if gated { 2 * n } else { n }, self.width / 2)?,
            out: map(ty, p.out, [n, m], product.result_bytes() * p.out_stride as u64, [columns, 16])?,
            scale: p.scale,
            m: p.m,
            n: p.n,
            k: p.k,
        })
    }

    /// Shared memory of a block, of which there is `room`: as many stages as fit, each with two barriers, and the buffers of
    /// sums.
    fn shared(self, room: usize) -> usize {
        let (stage, put) = ((self.rows() + self.width) * STEP * 2 + 16, self.groups * 4 * PUT_BYTES);
        (room - put) / stage * stage + put
    }
}

/// The place in `kinds` of what takes the shortest time.
fn fastest(kinds: &[Kind], product: Product, p: &Gemm, processors: usize) -> usize {
    (0..kinds.len()).min_by_key(|&i| kinds[i].time(product, p, processors)).expect("there are some")
}

/// Parameters of the kernels.
#[derive(Clone, Copy)]
#[repr(C, align(128))]
struct Dense {
    a: [sys::CUtensorMap; 2],
    b: [sys::CUtensorMap; 2],
    out: sys::CUtensorMap,
    scale: u64,
    m: i32,
    n: i32,
    k: i32,
}

/// What becomes of the projections of an attention layer: queries as f16, keys and values in their pages too.
#[derive(Clone, Copy)]
pub(crate) struct Heads {
    pub(crate) queries: u64,
    /// Norms of queries and of keys.
    pub(crate) norms: [u64; 2],
    pub(crate) rotations: u64,
    pub(crate) pages: u64,
    pub(crate) positions: u64,
    pub(crate) eps: f32,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) layer: usize,
}

/// Parameters of the kernels that finish heads.
#[derive(Clone, Copy)]
#[repr(C)]
struct DenseHeads {
    dense: Dense,
    queries: sys::CUtensorMap,
    norms: [u64; 2],
    rotations: u64,
    pages: u64,
    positions: u64,
    eps: f32,
    heads: i32,
    kv_heads: i32,
    layer: i32,
}

/// The kernels of every product.
pub(crate) struct DenseKernels {
    by: [[Function; KINDS.len()]; 5],
    heads: [Function; HEAD_KINDS.len()],
    /// Shared memory a block can have.
    room: usize,
}

impl DenseKernels {
    pub(crate) fn new(module: &Module, target: &Target) -> Result<DenseKernels> {
        let mut by = Vec::new();
        for names in NAMES {
            let mut kinds = Vec::new();
            for name in names {
                kinds.push(module.early(name).map_err(failed(name))?);
            }
            by.push(kinds.try_into().unwrap_or_else(|_| unreachable!("a function for every name")));
        }
        let by = by.try_into().unwrap_or_else(|_| unreachable!("kernels of every product"));
        let head = |(name, _)| module.early(name).map_err(failed(name));
        let [large, small] = HEAD_KINDS.map(head);
        Ok(DenseKernels { by, heads: [large?, small?], room: target.shared })
    }

    /// Whether rows of the results begin where the copy engine can store.
    pub(crate) fn can(&self, product: Product, p: &Gemm) -> bool {
        (p.out_stride as u64 * product.result_bytes()).is_multiple_of(16) && p.out.is_multiple_of(16)
    }

    /// Launches a product by the tiles that take the shortest time; the bits are the same with all.
    pub(crate) fn multiply(
        &self,
        device: &Device,
        product: Product,
        p: &Gemm,
    ) -> std::result::Result<(), DriverError> {
        self.launch(device, fastest(&KINDS, product, p, device.processors as usize), product, p)
    }

    fn launch(
        &self,
        device: &Device,
        index: usize,
        product: Product,
        p: &Gemm,
    ) -> std::result::Result<(), DriverError> {
        let (kind, kernel) = (KINDS[index], &self.by[product as usize][index]);
        let all = kind.parameters(product, p)?;
        self.launch_tiles(device, (kind, kernel), kind.tiles(product, p), &all)
    }

    /// As many blocks as there are multiprocessors or tiles.
    fn launch_tiles<P: Copy>(
        &self,
        device: &Device,
        (kind, kernel): (Kind, &Function),
        tiles: usize,
        parameters: &P,
    ) -> std::result::Result<(), DriverError> {
        let blocks = tiles.min(device.processors as usize);
        device.launch(kernel, (blocks, 1, 1), kind.threads(), kind.shared(self.room), parameters)
    }

    /// Whether heads like these are finished by kernels that multiply.
    pub(crate) fn can_finish(attention: &AttentionSpec, kv: KvType) -> bool {
        attention.head_dim == HEAD && attention.rope_dims == TURNED && kv == KvType::F16
    }

    /// Launches the projections of an attention layer. A row's bits are the same whatever the tiles.
    pub(crate) fn multiply_heads(
        &self,
        device: &Device,
        p: &Gemm,
        heads: &Heads,
    ) -> std::result::Result<(), DriverError> {
        let kinds = HEAD_KINDS.map(|(_, kind)| kind);
        let index = fastest(&kinds, Product::Store, p, device.processors as usize);
        let kind = kinds[index];
        let columns = (heads.heads * HEAD) as u64;
        let all = DenseHeads {
            dense: kind.parameters(Product::Store, p)?,
            queries: map(F16, heads.queries, [columns, p.m as u64], 2 * columns, [64, 16])?,
            norms: heads.norms,
            rotations: heads.rotations,
            pages: heads.pages,
            positions: heads.positions,
            eps: heads.eps,
            heads: heads.heads as i32,
            kv_heads: heads.kv_heads as i32,
            layer: heads.layer as i32,
        };
        self.launch_tiles(device, (kind, &self.heads[index]), kind.tiles(Product::Store, p), &all)
    }
}

const F16: sys::CUtensorMapDataType = sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
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

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(product: Product, m: usize, n: usize, k: usize) -> usize {
        fastest(&KINDS, product, &dense((0, m), 0, (0, n), (n, k), 0), 132)
    }

    #[test]
    fn tiles_are_as_large_as_keeps_all_multiprocessors_busy() {
        // The widths of the 80B; what was fastest of the three on an H200.
        for (m, project, out, gated, split) in [(64, 2, 2, 2, 2), (512, 1, 2, 2, 2), (4096, 0, 0, 0, 1)] {
            assert_eq!(chosen(Product::Store, m, 12_352, 2048), project, "{m} rows");
            assert_eq!(chosen(Product::Add, m, 2048, 4096), out, "{m} rows");
            assert_eq!(chosen(Product::Gated, m, 512, 2048), gated, "{m} rows");
            assert_eq!(chosen(Product::Split, m, 512, 2048), split, "{m} rows");
        }
        assert_eq!(chosen(Product::Scale, 8192, 2048, 512), 0);
    }

    #[test]
    fn a_block_has_room_for_its_ring_and_its_sums() {
        let room = Target::named("sm_90a").shared;
        for kind in KINDS.into_iter().chain(HEAD_KINDS.map(|(_, kind)| kind)) {
            let stages =
                (kind.shared(room) - kind.groups * 4 * PUT_BYTES) / ((kind.rows() + kind.width) * 128 + 16);
            assert!(kind.shared(room) <= room && stages >= 4, "{kind:?}");
        }
    }
}
