//! What a kernel asks of a vector unit.

use half::f16;

/// A vector of `LANES` numbers and the operations on it.
///
/// Kernels are written once over this trait, inlined whole into functions compiled with the features of one
/// variant (see [`super::table`]). Nothing outside such a function may name an implementation whose features
/// the processor lacks.
pub(super) trait Simd {
    /// The vector.
    type V: Copy;
    /// Numbers in it.
    const LANES: usize;
    /// Input rows of the register tile of a product; the registers hold it times four weight rows.
    const ROWS: usize;

    /// The same number in every lane.
    fn splat(x: f32) -> Self::V;

    /// LANES numbers at `from`, however aligned.
    ///
    /// # Safety
    /// They must be readable.
    unsafe fn load(from: *const f32) -> Self::V;

    /// As [`Simd::load`], of numbers in half precision.
    ///
    /// # Safety
    /// As there.
    unsafe fn load_half(from: *const f16) -> Self::V;

    /// Stores LANES numbers at `to`, however aligned.
    ///
    /// # Safety
    /// They must be writable.
    unsafe fn store(to: *mut f32, v: Self::V);

    /// a · b + c, in the same way in every lane and as [`Simd::fma1`].
    fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V;

    /// a · b + c of numbers.
    fn fma1(a: f32, b: f32, c: f32) -> f32;

    /// The sum of the lanes of each vector, all four in the same order.
    fn sums(v: [Self::V; 4]) -> [f32; 4];

    /// a + b.
    fn add(a: Self::V, b: Self::V) -> Self::V;

    /// a · b.
    fn mul(a: Self::V, b: Self::V) -> Self::V;

    /// a / b.
    fn div(a: Self::V, b: Self::V) -> Self::V;

    /// About 1 / x, to 2 units in the last place; 0 where that is below the normal numbers, if it likes.
    fn inverse(x: Self::V) -> Self::V;

    /// The larger in each lane, `b` where one of them is no number.
    fn max(a: Self::V, b: Self::V) -> Self::V;

    /// The smaller in each lane, `b` where one of them is no number.
    fn min(a: Self::V, b: Self::V) -> Self::V;

    /// 2^n, given 1.5 · 2^23 + n for whole n from −126 to 127.
    fn power(shifted: Self::V) -> Self::V;

    /// `v`, but 0 where `x` is below `limit`.
    fn unless_below(x: Self::V, limit: f32, v: Self::V) -> Self::V;

    /// Asks for the cache line at `from`, which will be read soon; it need not be readable.
    fn prefetch(from: *const f32);
}

/// Vectors as arrays, for every processor.
pub(super) struct Portable;

/// Contraction where the instruction exists, two roundings elsewhere: a call of the software version would
/// take longer than everything around it.
const HAS_FMA: bool = cfg!(any(target_arch = "aarch64", target_feature = "fma"));

impl Simd for Portable {
    type V = [f32; 4];
    const LANES: usize = 4;
    const ROWS: usize = 2;

    #[inline(always)]
    fn splat(x: f32) -> [f32; 4] {
        [x; 4]
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> [f32; 4] {
        // SAFETY: the caller's promise.
        unsafe { from.cast::<[f32; 4]>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn load_half(from: *const f16) -> [f32; 4] {
        // SAFETY: the caller's promise.
        unsafe { from.cast::<[f16; 4]>().read_unaligned() }.map(f16::to_f32)
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, v: [f32; 4]) {
        // SAFETY: the caller's promise.
        unsafe { to.cast::<[f32; 4]>().write_unaligned(v) }
    }

    #[inline(always)]
    fn fma(a: [f32; 4], b: [f32; 4], c: [f32; 4]) -> [f32; 4] {
        std::array::from_fn(|i| Self::fma1(a[i], b[i], c[i]))
    }

    #[inline(always)]
    fn fma1(a: f32, b: f32, c: f32) -> f32 {
        if HAS_FMA { a.mul_add(b, c) } else { a * b + c }
    }

    #[inline(always)]
    fn sums(v: [[f32; 4]; 4]) -> [f32; 4] {
        v.map(|v| (v[0] + v[2]) + (v[1] + v[3]))
    }

    #[inline(always)]
    fn add(a: [f32; 4], b: [f32; 4]) -> [f32; 4] {
        std::array::from_fn(|i| a[i] + b[i])
    }

    #[inline(always)]
    fn mul(a: [f32; 4], b: [f32; 4]) -> [f32; 4] {
        std::array::from_fn(|i| a[i] * b[i])
    }

    #[inline(always)]
    fn div(a: [f32; 4], b: [f32; 4]) -> [f32; 4] {
        std::array::from_fn(|i| a[i] / b[i])
    }

    #[inline(always)]
    fn inverse(x: [f32; 4]) -> [f32; 4] {
        x.map(|x| 1.0 / x)
    }

    #[inline(always)]
    fn max(a: [f32; 4], b: [f32; 4]) -> [f32; 4] {
        std::array::from_fn(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }

    #[inline(always)]
    fn min(a: [f32; 4], b: [f32; 4]) -> [f32; 4] {
        std::array::from_fn(|i| if a[i] < b[i] { a[i] } else { b[i] })
    }

    #[inline(always)]
    fn power(shifted: [f32; 4]) -> [f32; 4] {
        shifted.map(|x| f32::from_bits((x.to_bits() << 23).wrapping_add(127 << 23)))
    }

    #[inline(always)]
    fn unless_below(x: [f32; 4], limit: f32, v: [f32; 4]) -> [f32; 4] {
        std::array::from_fn(|i| if x[i] < limit { 0.0 } else { v[i] })
    }

    #[inline(always)]
    fn prefetch(_: *const f32) {}
}
