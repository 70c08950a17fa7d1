//! Products of few rows, for AVX-512 with VNNI: weights are multiplied as they are decoded.
//!
//! The same results as decoding a panel and multiplying with it, bit for bit: the same runs, in the same order.

#![allow(clippy::needless_range_loop)] // indices into several arrays of registers at once

use std::arch::x86_64::*;

use quant::Type;

use super::blocks::{self, Sink};
use super::int8::{GROUP, Group, PANEL};
use super::lanes::{Float, Int};

/// out[r, n] = Σ over whole rows of up to [`PANEL`] weights; `x` has at most four rows, `out` is
/// [rows][PANEL]. Asks for as many bytes from `ahead` on as the weights have.
///
/// # Safety
/// Every `x[r]` must point to the groups of a row as long as the weights'. The processor must have the features.
///
/// # Panics
/// If the number of rows or the lengths do not fit.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,gfni,avx2,fma,f16c")]
pub(super) unsafe fn gemv(ty: Type, rows: &[&[u8]], x: &[*const Group], out: &mut [f32], ahead: *const u8) {
    // SAFETY: the caller's promise.
    unsafe {
        match *x {
            [a] => multiply(ty, rows, [a], out, ahead),
            [a, b] => multiply(ty, rows, [a, b], out, ahead),
            [a, b, c] => multiply(ty, rows, [a, b, c, c], out, ahead),
            [a, b, c, d] => multiply(ty, rows, [a, b, c, d], out, ahead),
            _ => unreachable!("one to four rows"),
        }
    }
}

/// With `T` rows, of which as many are stored as `out` has room for.
///
/// # Safety
/// As [`gemv`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,gfni,avx2,fma,f16c")]
unsafe fn multiply<const T: usize>(
    ty: Type,
    rows: &[&[u8]],
    x: [*const Group; T],
    out: &mut [f32],
    ahead: *const u8,
) {
    let step = PANEL * GROUP * ty.block_bytes() / ty.block_len();
    let mut sink = Multiply { x, acc: [_mm512_setzero_ps(); T], ahead, step };
    blocks::decode(ty, rows, &mut sink);
    for (acc, out) in sink.acc.into_iter().zip(out.as_chunks_mut::<PANEL>().0) {
        // SAFETY: 16 numbers.
        unsafe { _mm512_storeu_ps(out.as_mut_ptr(), acc) };
    }
}

/// Multiplies what is decoded.
struct Multiply<const T: usize> {
    /// Groups that come next.
    x: [*const Group; T],
    acc: [Float; T],
    /// What to ask for next.
    ahead: *const u8,
    /// Bytes of 32 columns of a panel.
    step: usize,
}

impl<const T: usize> Multiply<T> {
    /// Products of steps of four columns from `first` on, on top of `start`.
    ///
    /// # Safety
    /// `x` must point to a group.
    #[inline(always)]
    unsafe fn sums(q: &[Int], first: usize, x: *const Group, start: i32) -> Float {
        // SAFETY: the caller's promise; only reached from functions with the features.
        unsafe {
            let mut sums = _mm512_set1_epi32(start);
            for s in 0..q.len() {
                let four = (*x).q.as_ptr().add(4 * (first + s)).cast::<i32>().read();
                sums = _mm512_dpbusd_epi32(sums, q[s], _mm512_set1_epi32(four));
            }
            _mm512_cvtepi32_ps(sums)
        }
    }

    /// Moves on.
    #[inline(always)]
    fn next(&mut self) {
        for at in (0..self.step).step_by(64) {
            // SAFETY: a hint, harmless for any address.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(self.ahead.wrapping_add(at).cast()) };
        }
        self.ahead = self.ahead.wrapping_add(self.step);
        for t in 0..T {
            self.x[t] = self.x[t].wrapping_add(1);
        }
    }

    /// Adds a run.
    ///
    /// # Safety
    /// Features as in the callers.
    #[inline(always)]
    unsafe fn add(&mut self, t: usize, sums: Float, scale: Float, offset: Option<(Float, f32)>) {
        // SAFETY: `x` points to a group; only reached from functions with the features.
        unsafe {
            let both = _mm512_mul_ps(scale, _mm512_set1_ps((*self.x[t]).scale));
            self.acc[t] = _mm512_fmadd_ps(sums, both, self.acc[t]);
            if let Some((offset, sum)) = offset {
                self.acc[t] = _mm512_fmadd_ps(offset, _mm512_set1_ps(sum), self.acc[t]);
            }
        }
    }
}

impl<const T: usize> Sink for Multiply<T> {
    #[inline(always)]
    fn full(&mut self, q: [Int; 8], scale: Float, offset: Option<Float>) {
        for t in 0..T {
            // SAFETY: there are as many groups as runs of 32 columns, by the promise to `gemv`.
            unsafe {
                let x = self.x[t];
                let sums = Self::sums(&q, 0, x, (*x).start);
                self.add(t, sums, scale, offset.map(|offset| (offset, (*x).sum)));
            }
        }
        self.next();
    }

    #[inline(always)]
    fn halves(&mut self, q: [Int; 8], scales: [Float; 2], offsets: Option<[Float; 2]>) {
        for t in 0..T {
            for half in 0..2 {
                // SAFETY: as above.
                unsafe {
                    let x = self.x[t];
                    let sums = Self::sums(&q[4 * half..][..4], 4 * half, x, (*x).half_starts[half]);
                    self.add(
                        t,
                        sums,
                        scales[half],
                        offsets.map(|offsets| (offsets[half], (*x).half_sums[half])),
                    );
                }
            }
        }
        self.next();
    }
}
