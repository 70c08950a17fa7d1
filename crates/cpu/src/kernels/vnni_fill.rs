//! Decoding blocks to panels of integers, for AVX-512 with VBMI, VBMI2 and GFNI.
//!
//! The same results as the functions of [`super::int8`], bit for bit.

#![allow(clippy::needless_range_loop)] // indices into several arrays of registers at once

use std::arch::x86_64::*;

use quant::Type;

use super::blocks::{self, Factored, Sink};
use super::int8::{COLUMNS, PANEL, Panel};
use super::lanes::{Float, Int};

/// As [`super::int8::fill`].
#[target_feature(
    enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2,gfni,avx2,fma,f16c"
)]
pub(super) fn fill(ty: Type, rows: &[&[u8]], columns: usize, panel: &mut Panel) {
    assert!(columns <= COLUMNS && rows[0].len() / ty.block_bytes() * ty.block_len() == columns);
    blocks::decode(ty, rows, &mut Store { panel, group: 0 });
}

/// Stores what is decoded.
struct Store<'a> {
    panel: &'a mut Panel,
    /// 32 columns that come next.
    group: usize,
}

impl Store<'_> {
    #[inline(always)]
    fn codes(&mut self, q: [Int; 8]) {
        let to = &mut self.panel.q[8 * self.group..][..8];
        for s in 0..8 {
            // SAFETY: 64 bytes, aligned as panels are.
            unsafe { _mm512_store_si512(to[s].as_mut_ptr().cast(), q[s]) };
        }
        self.group += 1;
    }
}

#[inline(always)]
fn store(to: &mut [f32; PANEL], x: Float) {
    // SAFETY: 16 numbers; features as in the callers.
    unsafe { _mm512_storeu_ps(to.as_mut_ptr(), x) }
}

impl Sink for Store<'_> {
    #[inline(always)]
    fn full<const N: usize>(&mut self, q: [Int; 8], scale: Float, offsets: [Float; N]) {
        store(&mut self.panel.scales[self.group], scale);
        for i in 0..N {
            store(&mut self.panel.offsets[N * self.group + i], offsets[i]);
        }
        self.codes(q);
    }

    #[inline(always)]
    fn halves(&mut self, q: [Int; 8], scales: [Float; 2]) {
        for half in 0..2 {
            store(&mut self.panel.scales[2 * self.group + half], scales[half]);
        }
        self.codes(q);
    }

    #[inline(always)]
    fn factored(&mut self, weights: &Factored, scale: Float, offsets: [Float; 2]) {
        self.full(weights.products(), scale, offsets);
    }
}

#[cfg(test)]
mod tests;
