//! Products of few rows, for AVX-512 with VNNI: weights are multiplied as they are decoded.
//!
//! The same results as decoding a panel and multiplying with it, bit for bit: the same runs, in the same order.

#![allow(clippy::needless_range_loop)] // indices into several arrays of registers at once

use std::arch::x86_64::*;

use quant::Type;

use super::blocks::{self, Factored, Sink};
use super::int8::{Codes, GROUP, GROUPS, MAGIC, MAGIC_BITS, PANEL};
use super::lanes::{Float, Int, left, low_high};

/// out[r, n] = Σ over whole rows of up to [`PANEL`] weights; `x` has at most four rows, `out` is
/// [rows][stride], of which [`PANEL`] columns are stored. Asks for as many bytes from `ahead` on as the weights have.
///
/// # Safety
/// Every `x[r]` must point to the codes of a row as long as the weights'. The processor must have the features.
///
/// # Panics
/// If the number of rows or the lengths do not fit.
#[target_feature(
    enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2,gfni,avx2,fma,f16c"
)]
pub(super) unsafe fn gemv(
    ty: Type,
    rows: &[&[u8]],
    x: &[*const Codes],
    out: (&mut [f32], usize),
    ahead: *const u8,
) {
    // SAFETY: the caller's promise.
    unsafe {
        match *x {
            [a] => multiply(ty, rows, [a], out, ahead),
            [a, b] => multiply(ty, rows, [a, b], out, ahead),
            [a, b, c] => multiply(ty, rows, [a, b, c], out, ahead),
            [a, b, c, d] => multiply(ty, rows, [a, b, c, d], out, ahead),
            _ => unreachable!("one to four rows"),
        }
    }
}

/// With `T` rows.
///
/// # Safety
/// As [`gemv`].
#[target_feature(
    enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2,gfni,avx2,fma,f16c"
)]
unsafe fn multiply<const T: usize>(
    ty: Type,
    rows: &[&[u8]],
    x: [*const Codes; T],
    (out, stride): (&mut [f32], usize),
    ahead: *const u8,
) {
    let step = PANEL * GROUP * ty.block_bytes() / ty.block_len();
    let mut sink = Multiply { x, group: 0, acc: [_mm512_setzero_ps(); T], ahead, step };
    blocks::decode(ty, rows, &mut sink);
    for (acc, out) in sink.acc.into_iter().zip(out.chunks_mut(stride)) {
        let out: &mut [f32; PANEL] = out.first_chunk_mut().expect("a panel's columns");
        // SAFETY: 16 numbers.
        unsafe { _mm512_storeu_ps(out.as_mut_ptr(), acc) };
    }
}

/// Multiplies what is decoded.
struct Multiply<const T: usize> {
    /// Codes of the group that comes next.
    x: [*const Codes; T],
    /// Which of theirs it is.
    group: usize,
    acc: [Float; T],
    /// What to ask for next.
    ahead: *const u8,
    /// Bytes of 32 columns of a panel.
    step: usize,
}

impl<const T: usize> Multiply<T> {
    /// Sums of products of steps of four columns from `first` of the group on, on top of `start`.
    ///
    /// # Safety
    /// `x` must point to codes.
    #[inline(always)]
    unsafe fn sums(q: &[Int], first: usize, x: *const Codes, start: i32) -> Int {
        // SAFETY: the caller's promise; only reached from functions with the features.
        unsafe {
            let mut sums = _mm512_set1_epi32(start);
            for s in 0..q.len() {
                let four = (&raw const (*x).q).cast::<i32>().add(first + s).read();
                sums = _mm512_dpbusd_epi32(sums, q[s], _mm512_set1_epi32(four));
            }
            sums
        }
    }

    /// Moves on.
    #[inline(always)]
    fn next(&mut self) {
        for at in (0..self.step).step_by(64) {
            // SAFETY: a hint, harmless for any address.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(self.ahead.wrapping_add(at).cast()) };
        }
        self.ahead = self.ahead.wrapping_add(self.step);
        self.group += 1;
        if self.group == GROUPS {
            self.group = 0;
            for t in 0..T {
                self.x[t] = self.x[t].wrapping_add(1);
            }
        }
    }

    /// Adds a run, whose sums began at the bits of [`MAGIC`], and its offsets.
    ///
    /// # Safety
    /// `x` must point to codes; features as in the callers.
    #[inline(always)]
    unsafe fn add<const N: usize>(&mut self, t: usize, sums: Int, scale: Float, offsets: [Float; N]) {
        // SAFETY: the caller's promise; only reached from functions with the features.
        unsafe {
            let (x, g) = (self.x[t], self.group);
            let magic = _mm512_mul_ps(scale, _mm512_set1_ps(-MAGIC));
            let products = _mm512_fmadd_ps(_mm512_castsi512_ps(sums), scale, magic);
            let scale = (&raw const (*x).scales).cast::<f32>().add(g).read();
            self.acc[t] = _mm512_fmadd_ps(products, _mm512_set1_ps(scale), self.acc[t]);
            for i in 0..N {
                let sums = match N {
                    1 => (&raw const (*x).sums).cast::<f32>(),
                    _ => (&raw const (*x).half_sums).cast::<f32>(),
                };
                let sum = _mm512_set1_ps(sums.add(N * g + i).read());
                self.acc[t] = _mm512_fmadd_ps(offsets[i], sum, self.acc[t]);
            }
        }
    }
}

impl<const T: usize> Sink for Multiply<T> {
    #[inline(always)]
    fn full<const N: usize>(&mut self, q: [Int; 8], scale: Float, offsets: [Float; N]) {
        for t in 0..T {
            // SAFETY: there are as many groups as runs of 32 columns, by the promise to `gemv`.
            unsafe {
                let (x, g) = (self.x[t], self.group);
                let start = (&raw const (*x).starts).cast::<i32>().add(g).read();
                let sums = Self::sums(&q, GROUP / 4 * g, x, start);
                self.add(t, sums, scale, offsets);
            }
        }
        self.next();
    }

    #[inline(always)]
    fn halves(&mut self, q: [Int; 8], scales: [Float; 2]) {
        for t in 0..T {
            for half in 0..2 {
                // SAFETY: as above.
                unsafe {
                    let (x, g) = (self.x[t], self.group);
                    let start = (&raw const (*x).half_starts).cast::<i32>().add(2 * g + half).read();
                    let (first, q) = (GROUP / 4 * g + 4 * half, &q[4 * half..][..4]);
                    let sums = Self::sums(q, first, x, start);
                    self.add(t, sums, scales[half], []);
                }
            }
        }
        self.next();
    }

    /// Multiplying every weight costs more than multiplying the sums of few rows, which fit sixteen bits: the same
    /// integers.
    #[inline(always)]
    fn factored(&mut self, weights: &Factored, scale: Float, offsets: [Float; 2]) {
        let (q, factors) = weights.parts();
        for t in 0..T {
            let mut sums = factors;
            for half in 0..2 {
                // SAFETY: as above.
                unsafe {
                    let (x, g) = (self.x[t], self.group);
                    let (first, q) = (GROUP / 4 * g + 4 * half, &q[4 * half..][..4]);
                    let of_half = Self::sums(q, first, x, 0);
                    sums = if half == 0 { of_half } else { low_high(sums, left(of_half, 16)) };
                }
            }
            // SAFETY: as above.
            unsafe {
                let sums = _mm512_dpwssd_epi32(_mm512_set1_epi32(MAGIC_BITS), sums, factors);
                self.add(t, sums, scale, offsets);
            }
        }
        self.next();
    }
}
