//! Kernels, and the choice among their variants.
//!
//! Every kernel is written once, generic over [`simd::Simd`], and compiled once for each variant. A table of
//! function pointers is chosen when the backend starts; the stages see nothing but the table.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx2_fill;
#[cfg(target_arch = "x86_64")]
mod blocks;
mod conv;
mod decode;
mod delta;
#[cfg(target_arch = "aarch64")]
mod dotprod;
mod finish;
mod int16;
mod int8;
#[cfg(target_arch = "x86_64")]
mod lanes;
#[cfg(target_arch = "aarch64")]
mod neon;
mod product;
mod rows;
mod simd;
#[cfg(test)]
mod testing;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod tiles;
mod unpack;
#[cfg(target_arch = "x86_64")]
mod vnni;
#[cfg(target_arch = "x86_64")]
mod vnni_attention;
#[cfg(target_arch = "x86_64")]
mod vnni_fill;
#[cfg(target_arch = "x86_64")]
mod vnni_finish;
#[cfg(target_arch = "x86_64")]
mod vnni_gemv;
#[cfg(target_arch = "x86_64")]
mod x86;

#[cfg(target_arch = "aarch64")]
use std::arch::is_aarch64_feature_detected;
use std::fmt;

use half::f16;
use quant::Type;

use crate::error::Error;
pub(crate) use conv::Convolution;
pub(crate) use delta::{Cell, Step, room as cell_room};
pub(crate) use int8::{Ahead, Codes, Form, GROUP, GROUPS, PANEL, Panel};
pub(crate) use int16::{Block, IntAttention, Row, TILE, WIDEST};
use product::{Factor, Target};
pub(crate) use unpack::{form, is_integer};

/// Rows that [`Kernels::gemv`] takes at most.
pub(crate) const GEMV_ROWS: usize = 4;

/// A set of instructions that kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Variant {
    /// AVX-512 with its integer dot products (F, BW, DQ, VL, VNNI, VBMI, VBMI2) and GFNI.
    Vnni,
    /// AVX-512 with its integer dot products, but without VBMI or GFNI.
    VnniBase,
    /// AVX2 with FMA, F16C, and the integer dot products of AVX-VNNI.
    Avx2Vnni,
    /// AVX-512 (F, BW, DQ, VL), multiplying bytes as with AVX2.
    Avx512,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// NEON with dot products of bytes.
    NeonDotprod,
    /// What every aarch64 processor has.
    Neon,
    /// What every processor of the target has.
    Portable,
}

impl Variant {
    /// Every variant, the best one first.
    pub const ALL: [Variant; 8] = [
        Variant::Vnni,
        Variant::VnniBase,
        Variant::Avx2Vnni,
        Variant::Avx512,
        Variant::Avx2,
        Variant::NeonDotprod,
        Variant::Neon,
        Variant::Portable,
    ];

    /// Its name, as users type it.
    pub fn name(self) -> &'static str {
        match self {
            Variant::Vnni => "avx512-vnni",
            Variant::VnniBase => "avx512-vnni-base",
            Variant::Avx2Vnni => "avx2-vnni",
            Variant::Avx512 => "avx512",
            Variant::Avx2 => "avx2",
            Variant::NeonDotprod => "neon-dotprod",
            Variant::Neon => "neon",
            Variant::Portable => "portable",
        }
    }

    /// The variant called `name`.
    pub fn from_name(name: &str) -> Option<Variant> {
        Variant::ALL.into_iter().find(|variant| variant.name() == name)
    }

    /// Whether products of integers are faster than those of numbers with it.
    pub fn prefers_integers(self) -> bool {
        !matches!(self, Variant::Neon | Variant::Portable)
    }

    /// Whether this machine can run it.
    pub fn is_available(self) -> bool {
        table(self).is_some()
    }
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The kernels of a variant. Shapes and meaning are described where the kernels are written.
#[derive(Clone, Copy)]
pub(crate) struct Kernels {
    /// Which.
    pub(crate) variant: Variant,
    /// Whole blocks to numbers.
    pub(crate) decode: fn(Type, &[u8], &mut [f32]),
    /// Halves to numbers.
    pub(crate) widen: fn(&[f16], &mut [f32]),
    /// Products with rows: see [`product::dot_form`].
    pub(crate) dot_form: DotForm,
    /// The same with weights in half precision.
    pub(crate) dot_half: DotForm<f16>,
    /// Activations to integers: see [`int8::round`].
    pub(crate) round: fn(&[f32], &mut [Codes]),
    /// Whole blocks of up to a panel's rows to integers: see [`int8::fill`].
    pub(crate) fill: Fill,
    /// Asks for the cache lines of some bytes that will be read soon.
    pub(crate) prefetch: fn(*const u8, usize),
    /// Copies numbers that will not be read soon.
    pub(crate) stream: fn(&[f32], &mut [f32]),
    /// Products of integers: see [`int8::product`].
    pub(crate) int_product: IntProduct,
    /// SiLU(gate) · up to integers: see [`finish::gated`].
    pub(crate) gated: Gated,
    /// Rows added to others: see [`finish::add_rows`].
    pub(crate) add_rows: AddRows,
    /// Products of integers for up to [`GEMV_ROWS`] rows, where there is a kernel for them: type, weight rows, x,
    /// out [rows][PANEL], bytes that will be needed next.
    pub(crate) gemv: Option<Gemv>,
    /// Products with columns: see [`product::sum_form`].
    pub(crate) sum_form: SumForm,
    /// The same with a right factor in half precision.
    pub(crate) sum_half: SumForm<f16>,
    /// Σ a · b.
    pub(crate) dot: fn(&[f32], &[f32]) -> f32,
    /// RMS norm: x, weight, eps, out.
    pub(crate) rms_norm: fn(&[f32], &[f32], f32, &mut [f32]),
    /// RMS norm times SiLU(gate): x, weight, eps, gate, out.
    pub(crate) gated_norm: GatedNorm,
    /// gate ← SiLU(gate) · up.
    pub(crate) swiglu: fn(&mut [f32], &[f32]),
    /// x ← x · scale · sigmoid(gate).
    pub(crate) gate: fn(&mut [f32], f32, &[f32]),
    /// A convolution, SiLU and L2 norm: see [`conv::convolve`].
    pub(crate) convolve: Convolve,
    /// Gates of the delta rule: see [`conv::gates`].
    pub(crate) gates: fn(&mut [f32], &mut [f32], (f32, f32)),
    /// x ← e^x.
    pub(crate) exp: fn(&mut [f32]),
    /// A block of an online softmax: scores, scale, largest so far; returns largest, correction, sum.
    pub(crate) softmax_block: SoftmaxBlock,
    /// Attention on integers.
    pub(crate) int_attention: &'static IntAttention,
    /// Columns of a tile of a state.
    pub(crate) state_columns: usize,
    /// The delta rule for the rows of a cell: see [`delta::cell`].
    pub(crate) delta_cell: DeltaCell,
    /// The delta rule for one row: see [`delta::step`].
    pub(crate) delta_step: DeltaStep,
}

/// x, w, (n, k), out, whether to add.
type DotForm<T = f32> = unsafe fn(&[*const f32], Factor<T>, (usize, usize), Target, bool);
/// (rows, k, n), a, b, out, whether to add.
type SumForm<T = f32> = unsafe fn((usize, usize, usize), Factor, Factor<T>, Target, bool);
/// type, blocks of each row, columns, panel.
type Fill = fn(Type, &[&[u8]], usize, &mut Panel);
/// x, panels, out, (groups, form), whether to add, what is decoded later.
type IntProduct = unsafe fn(&[*const Codes], &[&Panel], Target, (usize, Form), bool, Ahead);
/// tile, its stride, codes of each row, group.
type Gated = unsafe fn(&[f32], usize, &[*mut Codes], usize);
/// (tile, its stride), columns, rows to add to, factor of each.
type AddRows = unsafe fn((&[f32], usize), usize, &[*mut f32], &[f32]);
pub(crate) type Gemv = unsafe fn(Type, &[&[u8]], &[*const Codes], (&mut [f32], usize), *const u8);
type GatedNorm = fn(&[f32], &[f32], f32, &[f32], &mut [f32]);
/// what, samples, out.
type Convolve = unsafe fn(&Convolution, &[*const f32], Target);
type SoftmaxBlock = fn(&mut [f32], f32, f32) -> (f32, f32, f32);
/// cell, work room, values and outputs, state, snapshots.
type DeltaCell = fn(&Cell, &mut [f32], &mut [f32], &mut [f32], &mut [(usize, &mut [f32])]);
/// row, state before, state behind, values and outputs.
type DeltaStep = unsafe fn(&Step, Factor, Target, &mut [f32]);

impl Kernels {
    /// The table of the wanted variant, or the best one this machine runs.
    pub(crate) fn choose(wanted: Option<Variant>) -> Result<&'static Kernels, Error> {
        match wanted {
            Some(variant) => table(variant).ok_or(Error::VariantUnavailable { variant }),
            None => Ok(Variant::ALL.into_iter().find_map(table).expect("portable kernels always run")),
        }
    }
}

/// A table: every generic kernel, compiled with the given features for the given vectors. A macro, because
/// features are attributes of functions.
macro_rules! kernels {
    ($simd:ty, $variant:expr $(, $features:literal)?) => {{
        $(#[target_feature(enable = $features)])?
        fn decode_(ty: Type, bytes: &[u8], out: &mut [f32]) {
            decode::decode(ty, bytes, out);
        }
        $(#[target_feature(enable = $features)])?
        fn widen(from: &[f16], to: &mut [f32]) {
            decode::widen(from, to);
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn dot_form(
            x: &[*const f32], w: Factor, shape: (usize, usize), out: Target, add: bool,
        ) {
            // SAFETY: the caller's promise is the same.
            unsafe { product::dot_form::<$simd, f32>(x, w, shape, out, add) }
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn dot_half(
            x: &[*const f32], w: Factor<f16>, shape: (usize, usize), out: Target, add: bool,
        ) {
            // SAFETY: the caller's promise is the same.
            unsafe { product::dot_form::<$simd, f16>(x, w, shape, out, add) }
        }
        $(#[target_feature(enable = $features)])?
        fn round(x: &[f32], out: &mut [Codes]) {
            int8::round(x, out);
        }
        $(#[target_feature(enable = $features)])?
        fn fill(ty: Type, rows: &[&[u8]], columns: usize, panel: &mut Panel) {
            int8::fill(ty, rows, columns, panel);
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn int_product(
            x: &[*const Codes], panels: &[&Panel], out: Target, shape: (usize, Form), add: bool, ahead: Ahead,
        ) {
            // SAFETY: the caller's promise is the same.
            unsafe { int8::product(x, panels, out, shape, add, ahead) }
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn gated(tile: &[f32], stride: usize, codes: &[*mut Codes], group: usize) {
            // SAFETY: the caller's promise is the same.
            unsafe {
                let round = |x: &_, codes, group| int8::round_group(x, codes, group);
                finish::gated::<$simd>((tile, stride), (codes, group), round)
            }
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn add_rows(tile: (&[f32], usize), columns: usize, to: &[*mut f32], factors: &[f32]) {
            // SAFETY: the caller's promise is the same.
            unsafe { finish::add_rows::<$simd>(tile, columns, to, factors) }
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn sum_form(
            shape: (usize, usize, usize), a: Factor, b: Factor, out: Target, add: bool,
        ) {
            // SAFETY: the caller's promise is the same.
            unsafe { product::sum_form::<$simd, f32>(shape, a, b, out, add) }
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn sum_half(
            shape: (usize, usize, usize), a: Factor, b: Factor<f16>, out: Target, add: bool,
        ) {
            // SAFETY: the caller's promise is the same.
            unsafe { product::sum_form::<$simd, f16>(shape, a, b, out, add) }
        }
        $(#[target_feature(enable = $features)])?
        fn dot(a: &[f32], b: &[f32]) -> f32 {
            rows::dot::<$simd>(a, b)
        }
        $(#[target_feature(enable = $features)])?
        fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
            rows::rms_norm::<$simd>(x, weight, eps, out);
        }
        $(#[target_feature(enable = $features)])?
        fn gated_norm(x: &[f32], weight: &[f32], eps: f32, gate: &[f32], out: &mut [f32]) {
            rows::gated_norm::<$simd>(x, weight, eps, gate, out);
        }
        $(#[target_feature(enable = $features)])?
        fn swiglu(gate: &mut [f32], up: &[f32]) {
            rows::swiglu::<$simd>(gate, up);
        }
        $(#[target_feature(enable = $features)])?
        fn gate(x: &mut [f32], scale: f32, gate: &[f32]) {
            rows::gate::<$simd>(x, scale, gate);
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn convolve(conv: &Convolution, samples: &[*const f32], out: Target) {
            // SAFETY: the caller's promise is the same.
            unsafe { conv::convolve::<$simd>(conv, samples, out) }
        }
        $(#[target_feature(enable = $features)])?
        fn gates(beta: &mut [f32], alpha: &mut [f32], head: (f32, f32)) {
            conv::gates::<$simd>(beta, alpha, head);
        }
        $(#[target_feature(enable = $features)])?
        fn exp(x: &mut [f32]) {
            x.iter_mut().for_each(|x| *x = rows::exp::<$simd>(*x));
        }
        $(#[target_feature(enable = $features)])?
        fn softmax_block(scores: &mut [f32], scale: f32, largest: f32) -> (f32, f32, f32) {
            rows::softmax_block::<$simd>(scores, scale, largest)
        }
        $(#[target_feature(enable = $features)])?
        fn weigh(block: &Block, queries: &[i16], rows: &mut [Row], weights: &mut [i16]) {
            int16::weigh::<$simd>(block, queries, rows, weights);
        }
        $(#[target_feature(enable = $features)])?
        fn sum(block: &Block, rows: &[Row], weights: &[i16], out: &mut [f32]) {
            int16::sum::<$simd>(block, rows, weights, out);
        }
        $(#[target_feature(enable = $features)])?
        fn delta_cell(
            cell: &Cell, room: &mut [f32], values: &mut [f32], state: &mut [f32],
            snapshots: &mut [(usize, &mut [f32])],
        ) {
            delta::cell::<$simd>(cell, room, values, state, snapshots);
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn delta_step(step: &Step, from: Factor, to: Target, values: &mut [f32]) {
            // SAFETY: the caller's promise is the same.
            unsafe { delta::step::<$simd>(step, from, to, values) }
        }
        // SAFETY (of every call): `table` hands this out only where the features are.
        #[allow(unused_unsafe, clippy::undocumented_unsafe_blocks)]
        Kernels {
            variant: $variant,
            decode: |ty, bytes, out| unsafe { decode_(ty, bytes, out) },
            widen: |from, to| unsafe { widen(from, to) },
            dot_form,
            dot_half,
            round: |x, out| unsafe { round(x, out) },
            fill: |ty, rows, columns, panel| unsafe { fill(ty, rows, columns, panel) },
            prefetch: |_, _| (),
            stream: |from, to| to.copy_from_slice(from),
            int_product,
            gated,
            add_rows,
            gemv: None,
            sum_form,
            sum_half,
            dot: |a, b| unsafe { dot(a, b) },
            rms_norm: |x, weight, eps, out| unsafe { rms_norm(x, weight, eps, out) },
            gated_norm: |x, weight, eps, z, out| unsafe { gated_norm(x, weight, eps, z, out) },
            swiglu: |x, up| unsafe { swiglu(x, up) },
            gate: |x, scale, z| unsafe { gate(x, scale, z) },
            convolve,
            gates: |beta, alpha, head| unsafe { gates(beta, alpha, head) },
            exp: |x| unsafe { exp(x) },
            softmax_block: |scores, scale, largest| unsafe { softmax_block(scores, scale, largest) },
            int_attention: &IntAttention {
                is_fast: false,
                round: int16::round,
                pack: int16::pack,
                weigh: |block, queries, rows, weights| unsafe { weigh(block, queries, rows, weights) },
                sum: |block, rows, weights, out| unsafe { sum(block, rows, weights, out) },
            },
            state_columns: delta::VECTORS * <$simd as simd::Simd>::LANES,
            delta_cell: |cell, room, values, state, snapshots| unsafe {
                delta_cell(cell, room, values, state, snapshots)
            },
            delta_step,
        }
    }};
}

static PORTABLE: Kernels = kernels!(simd::Portable, Variant::Portable);

#[cfg(target_arch = "x86_64")]
static AVX2: Kernels = Kernels {
    // SAFETY: `table` hands this out only where the features are.
    fill: |ty, rows, columns, panel| unsafe { avx2_fill::fill(ty, rows, columns, panel) },
    prefetch: vnni::prefetch,
    int_product: avx2::product,
    ..kernels!(x86::Avx2, Variant::Avx2, "avx2,fma,f16c")
};

#[cfg(target_arch = "x86_64")]
static AVX2_VNNI: Kernels = Kernels { variant: Variant::Avx2Vnni, int_product: avx2::product_vnni, ..AVX2 };

#[cfg(target_arch = "x86_64")]
static AVX512: Kernels = Kernels {
    fill: AVX2.fill,
    prefetch: vnni::prefetch,
    // SAFETY: `table` hands this out only where the features are.
    stream: |from, to| unsafe { vnni::stream(from, to) },
    int_product: avx2::product,
    ..kernels!(x86::Avx512, Variant::Avx512, "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
};

#[cfg(target_arch = "x86_64")]
static VNNI_BASE: Kernels = Kernels {
    variant: Variant::VnniBase,
    // SAFETY: `table` hands this out only where the features are.
    round: |x, out| unsafe { vnni_finish::round(x, out) },
    int_product: vnni::product,
    int_attention: &vnni_attention::FUNCTIONS,
    gated: vnni_finish::gated,
    ..AVX512
};

#[cfg(target_arch = "x86_64")]
static VNNI: Kernels = Kernels {
    variant: Variant::Vnni,
    // SAFETY: `table` hands this out only where the features are.
    fill: |ty, rows, columns, panel| unsafe { vnni_fill::fill(ty, rows, columns, panel) },
    gemv: Some(vnni_gemv::gemv),
    ..VNNI_BASE
};

/// The table of a variant, if this machine can run it.
#[cfg(target_arch = "x86_64")]
fn table(variant: Variant) -> Option<&'static Kernels> {
    let avx2 = is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c");
    let avx512 = avx2
        && is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl");
    let base = avx512 && is_x86_feature_detected!("avx512vnni");
    let vnni = base
        && is_x86_feature_detected!("avx512vbmi")
        && is_x86_feature_detected!("avx512vbmi2")
        && is_x86_feature_detected!("gfni");
    match variant {
        Variant::Vnni => vnni.then_some(&VNNI),
        Variant::VnniBase => base.then_some(&VNNI_BASE),
        Variant::Avx2Vnni => (avx2 && is_x86_feature_detected!("avxvnni")).then_some(&AVX2_VNNI),
        Variant::Avx512 => avx512.then_some(&AVX512),
        Variant::Avx2 => avx2.then_some(&AVX2),
        Variant::Portable => Some(&PORTABLE),
        Variant::NeonDotprod | Variant::Neon => None,
    }
}

#[cfg(target_arch = "aarch64")]
static NEON: Kernels =
    Kernels { fill: neon::fill, prefetch: neon::prefetch, ..kernels!(neon::Neon, Variant::Neon) };

#[cfg(target_arch = "aarch64")]
static NEON_DOTPROD: Kernels =
    Kernels { variant: Variant::NeonDotprod, int_product: dotprod::product, ..NEON };

/// The table of a variant, if this machine can run it.
#[cfg(target_arch = "aarch64")]
fn table(variant: Variant) -> Option<&'static Kernels> {
    match variant {
        Variant::NeonDotprod => is_aarch64_feature_detected!("dotprod").then_some(&NEON_DOTPROD),
        Variant::Neon => Some(&NEON),
        Variant::Portable => Some(&PORTABLE),
        Variant::Vnni | Variant::VnniBase | Variant::Avx2Vnni | Variant::Avx512 | Variant::Avx2 => None,
    }
}

/// The table of a variant, if this machine can run it.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn table(variant: Variant) -> Option<&'static Kernels> {
    (variant == Variant::Portable).then_some(&PORTABLE)
}
