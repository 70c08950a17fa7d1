//! Decoding blocks to panels of integers, for AVX-512 with VBMI and GFNI.
//!
//! The same results as the functions of [`super::int8`], bit for bit.

use std::arch::x86_64::*;

use quant::Type;

use super::blocks::{self, Sink};
use super::int8::{self, COLUMNS, ORDER, PANEL, Panel};
use super::lanes::{Float, Int, Table, look, transposed, zero};

/// As [`int8::fill`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,gfni,avx2,fma,f16c")]
pub(super) fn fill(ty: Type, rows: &[&[u8]], columns: usize, panel: &mut Panel) {
    if !blocks::knows(ty) {
        return fill_by_tables(ty, rows, columns, panel);
    }
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
    fn full(&mut self, q: [Int; 8], scale: Float, offset: Option<Float>) {
        store(&mut self.panel.scales[self.group], scale);
        if let Some(offset) = offset {
            store(&mut self.panel.offsets[self.group], offset);
        }
        self.codes(q);
    }

    #[inline(always)]
    fn halves(&mut self, q: [Int; 8], scales: [Float; 2], offsets: Option<[Float; 2]>) {
        for half in 0..2 {
            store(&mut self.panel.scales[2 * self.group + half], scales[half]);
            if let Some(offsets) = offsets {
                store(&mut self.panel.offsets[2 * self.group + half], offsets[half]);
            }
        }
        self.codes(q);
    }
}

/// As [`int8::fill`], for every type.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,gfni,avx2,fma,f16c")]
pub(super) fn fill_by_tables(ty: Type, rows: &[&[u8]], columns: usize, panel: &mut Panel) {
    int8::fill(ty, rows, columns, panel, |natural, columns, panel| transpose(natural, columns, panel));
}

/// As [`int8::transpose`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
fn transpose(natural: &[[u8; COLUMNS]; PANEL], columns: usize, panel: &mut Panel) {
    static ORDERED: Table<64> = {
        let mut index = [0; 64];
        let mut i = 0;
        while i < 64 {
            index[i] = (i / 16 * 16 + ORDER[i % 16]) as u8;
            i += 1;
        }
        Table(index)
    };
    // SAFETY: 64 bytes; the last piece may be half a vector, whose other half lies inside the arrays too,
    // because they have a multiple of 64 columns.
    unsafe {
        for first in (0..columns).step_by(64) {
            let mut rows = [zero(); 16];
            for (row, natural) in rows.iter_mut().zip(natural) {
                *row = look(_mm512_loadu_si512(natural.as_ptr().add(first).cast()), ORDERED.piece(0));
            }
            let columns = transposed(rows);
            for (c, column) in columns.into_iter().enumerate() {
                _mm512_store_si512(panel.q.as_mut_ptr().add(first / 4 + c).cast(), column);
            }
        }
    }
}
