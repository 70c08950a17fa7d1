//! Products of integers for AVX-512 with VNNI.
//!
//! The same results as the functions of [`super::int8`], bit for bit.

#![allow(clippy::needless_range_loop)] // indices into several arrays of registers at once

use std::arch::x86_64::*;

use super::int8::{Ahead, Codes, Form, GROUPS, MAGIC, PANEL, Panel};
use super::product::Target;

/// Rows of the register tile; the registers hold them times two panels, as integers and as numbers.
const ROWS: usize = 6;

/// As [`super::int8::product`].
///
/// # Safety
/// As there; the processor must have AVX-512 with VNNI.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma")]
pub(super) unsafe fn product(
    x: &[*const Codes],
    panels: &[&Panel],
    (out, stride): Target,
    (groups, form): (usize, Form),
    add: bool,
    ahead: Ahead,
) {
    let (pairs, last) = panels.as_chunks::<2>();
    // SAFETY: the caller's promise.
    unsafe {
        for (i, &pair) in pairs.iter().enumerate() {
            let out = (out.add(i * 2 * PANEL), stride);
            match (form.halves, form.offsets) {
                (true, _) => tiles::<2, true, 0>(x, pair, out, groups, add, ahead),
                (false, 0) => tiles::<2, false, 0>(x, pair, out, groups, add, ahead),
                (false, 1) => tiles::<2, false, 1>(x, pair, out, groups, add, ahead),
                (false, _) => tiles::<2, false, 2>(x, pair, out, groups, add, ahead),
            }
        }
        for &panel in last {
            let out = (out.add(pairs.len() * 2 * PANEL), stride);
            match (form.halves, form.offsets) {
                (true, _) => tiles::<1, true, 0>(x, [panel], out, groups, add, ahead),
                (false, 0) => tiles::<1, false, 0>(x, [panel], out, groups, add, ahead),
                (false, 1) => tiles::<1, false, 1>(x, [panel], out, groups, add, ahead),
                (false, _) => tiles::<1, false, 2>(x, [panel], out, groups, add, ahead),
            }
        }
    }
}

/// Cuts rows into tiles of about equal height: a low last one would leave the multipliers waiting.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma")]
unsafe fn tiles<const P: usize, const HALVES: bool, const OFFSETS: usize>(
    x: &[*const Codes],
    panels: [&Panel; P],
    (out, stride): Target,
    groups: usize,
    add: bool,
    ahead: Ahead,
) {
    let count = x.len().div_ceil(ROWS);
    let per_group = ahead.count().div_ceil(count * groups);
    let mut first = 0;
    for index in 0..count {
        let end = (index + 1) * x.len() / count;
        let rows = &x[first..end];
        // Behind the last rows the next panels begin with the first ones.
        let next = if end < x.len() { &x[end..] } else { x };
        let ahead = (&ahead, index * groups * per_group, per_group);
        // SAFETY: rows of x and of the output, as the caller promised.
        unsafe {
            let out = (out.add(first * stride), stride);
            match rows.len() {
                1 => tile::<P, 1, HALVES, OFFSETS>((rows, next), panels, out, groups, add, ahead),
                2 => tile::<P, 2, HALVES, OFFSETS>((rows, next), panels, out, groups, add, ahead),
                3 => tile::<P, 3, HALVES, OFFSETS>((rows, next), panels, out, groups, add, ahead),
                4 => tile::<P, 4, HALVES, OFFSETS>((rows, next), panels, out, groups, add, ahead),
                5 => tile::<P, 5, HALVES, OFFSETS>((rows, next), panels, out, groups, add, ahead),
                _ => tile::<P, 6, HALVES, OFFSETS>((rows, next), panels, out, groups, add, ahead),
            }
        }
        first = end;
    }
}

/// The register tile, T rows times P panels: out [T][stride] (+)= x · panels.
///
/// A step multiplies four columns: P loads of weights [PANEL][4], T broadcasts of activations, T · P
/// vpdpbusd. A run ends with two multiply-adds for each of the T · P vectors, and one for each offset. Meanwhile the
/// codes of the rows that come `next` are asked for, and some lines of what is decoded later: `per_group` in a
/// group, from `first` on.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma")]
unsafe fn tile<const P: usize, const T: usize, const HALVES: bool, const OFFSETS: usize>(
    (x, next): (&[*const Codes], &[*const Codes]),
    panels: [&Panel; P],
    (out, stride): Target,
    groups: usize,
    add: bool,
    (ahead, first, per_group): (&Ahead, usize, usize),
) {
    /// What a group's step of the loop asks for, so that all groups ask for all.
    const AHEAD: usize = Codes::HOT_BYTES / GROUPS;
    let x: [*const Codes; T] = std::array::from_fn(|t| x[t]);
    let next: [*const i8; T] = std::array::from_fn(|t| next[t.min(next.len() - 1)].cast());
    let (runs, steps) = if HALVES { (2, 4) } else { (1, 8) };
    // SAFETY: groups below `groups`, columns of the panels, numbers of the output, as the caller promised.
    unsafe {
        let mut acc = [[_mm512_setzero_ps(); T]; P];
        if add {
            for p in 0..P {
                for t in 0..T {
                    acc[p][t] = _mm512_loadu_ps(out.add(t * stride + p * PANEL));
                }
            }
        }
        for g in 0..groups {
            for next in next {
                _mm_prefetch::<_MM_HINT_T0>(next.wrapping_add(AHEAD * g));
            }
            for line in first + g * per_group..(first + (g + 1) * per_group).min(ahead.count()) {
                _mm_prefetch::<_MM_HINT_T1>(ahead.line(line).cast());
            }
            for run in 0..runs {
                let index = g * runs + run;
                let mut sums = [[_mm512_setzero_si512(); T]; P];
                for t in 0..T {
                    let start = if HALVES {
                        (&raw const (*x[t]).half_starts).cast::<i32>().add(index).read()
                    } else {
                        (&raw const (*x[t]).starts).cast::<i32>().add(index).read()
                    };
                    for p in 0..P {
                        sums[p][t] = _mm512_set1_epi32(start);
                    }
                }
                for step in index * steps..(index + 1) * steps {
                    let mut weights = [_mm512_setzero_si512(); P];
                    for p in 0..P {
                        weights[p] = _mm512_load_si512(panels[p].q.as_ptr().add(step).cast());
                    }
                    for t in 0..T {
                        let four = (&raw const (*x[t]).q).cast::<i32>().add(step).read();
                        let four = _mm512_set1_epi32(four);
                        for p in 0..P {
                            sums[p][t] = _mm512_dpbusd_epi32(sums[p][t], weights[p], four);
                        }
                    }
                }
                let mut scales = [_mm512_setzero_ps(); P];
                let mut magic = scales;
                for p in 0..P {
                    scales[p] = _mm512_load_ps(panels[p].scales.as_ptr().add(index).cast());
                    magic[p] = _mm512_mul_ps(scales[p], _mm512_set1_ps(-MAGIC));
                }
                for t in 0..T {
                    let scale = (&raw const (*x[t]).scales).cast::<f32>().add(g).read();
                    for p in 0..P {
                        let products = _mm512_castsi512_ps(sums[p][t]);
                        let products = _mm512_fmadd_ps(products, scales[p], magic[p]);
                        acc[p][t] = _mm512_fmadd_ps(products, _mm512_set1_ps(scale), acc[p][t]);
                    }
                }
            }
            for index in g * OFFSETS..(g + 1) * OFFSETS {
                let mut offsets = [_mm512_setzero_ps(); P];
                for p in 0..P {
                    offsets[p] = _mm512_load_ps(panels[p].offsets.as_ptr().add(index).cast());
                }
                for t in 0..T {
                    let sum = if OFFSETS == 1 {
                        (&raw const (*x[t]).sums).cast::<f32>().add(index).read()
                    } else {
                        (&raw const (*x[t]).half_sums).cast::<f32>().add(index).read()
                    };
                    for p in 0..P {
                        acc[p][t] = _mm512_fmadd_ps(offsets[p], _mm512_set1_ps(sum), acc[p][t]);
                    }
                }
            }
        }
        for p in 0..P {
            for t in 0..T {
                _mm512_storeu_ps(out.add(t * stride + p * PANEL), acc[p][t]);
            }
        }
    }
}

/// Asks for the cache lines of `len` bytes.
pub(super) fn prefetch(bytes: *const u8, len: usize) {
    for at in (0..len).step_by(64) {
        // SAFETY: a hint, harmless for any address.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(bytes.wrapping_add(at).cast()) };
    }
}

/// Copies numbers past the caches, if they begin and end with cache lines.
///
/// # Panics
/// If there is not the same number of both.
#[target_feature(enable = "avx512f")]
pub(super) fn stream(from: &[f32], to: &mut [f32]) {
    assert_eq!(from.len(), to.len());
    if !from.len().is_multiple_of(16) || !to.as_ptr().cast::<__m512>().is_aligned() {
        return to.copy_from_slice(from);
    }
    for i in (0..from.len()).step_by(16) {
        // SAFETY: a vector at i lies inside both; the target is aligned.
        unsafe { _mm512_stream_ps(to.as_mut_ptr().add(i), _mm512_loadu_ps(from.as_ptr().add(i))) };
    }
}
