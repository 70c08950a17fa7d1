//! What becomes of a tile of products while it is in the first cache.

use super::int8::{Codes, GROUP, PANEL, round_group};
use super::rows;
use super::simd::Simd;

/// SiLU(gate) · up of two panels each, rounded to one group of every row's codes. `tile` is [rows][stride],
/// of which four times [`PANEL`] are used: gate, up, gate, up.
///
/// # Safety
/// As [`round_group`], for each of `codes`, of which there are as many as rows.
#[inline(always)]
pub(super) unsafe fn gated<S: Simd>(tile: &[f32], stride: usize, codes: &[*mut Codes], group: usize) {
    for (tile, &codes) in tile.chunks(stride).zip(codes) {
        let mut inner = [0.0; GROUP];
        for (inner, both) in
            inner.as_chunks_mut::<PANEL>().0.iter_mut().zip(tile.as_chunks::<PANEL>().0.as_chunks::<2>().0)
        {
            *inner = both[0];
            rows::swiglu::<S>(inner, &both[1]);
        }
        // SAFETY: the caller's promise.
        unsafe { round_group(&inner, codes, group) };
    }
}

/// to[r] ← to[r] + factors[r] · tile[r], in the first `columns` columns; `tile` is [rows][stride].
///
/// # Safety
/// Each of `to` must point to `columns` numbers which nobody else uses.
#[inline(always)]
pub(super) unsafe fn add_rows<S: Simd>(
    (tile, stride): (&[f32], usize),
    columns: usize,
    to: &[*mut f32],
    factors: &[f32],
) {
    for ((tile, &to), &factor) in tile.chunks(stride).zip(to).zip(factors) {
        let (tile, whole) = (&tile[..columns], columns / S::LANES * S::LANES);
        let factors = S::splat(factor);
        // SAFETY: columns of the tile's row and, by the caller's promise, of the other.
        unsafe {
            for i in (0..whole).step_by(S::LANES) {
                S::store(to.add(i), S::fma(factors, S::load(tile.as_ptr().add(i)), S::load(to.add(i))));
            }
            for (i, &x) in tile.iter().enumerate().skip(whole) {
                *to.add(i) = S::fma1(factor, x, *to.add(i));
            }
        }
    }
}
