//! Products of integers for AVX-512 with VNNI.
//!
//! The same results as the functions of [`super::int8`], bit for bit.

#![allow(clippy::needless_range_loop)] // indices into several arrays of registers at once

use std::arch::x86_64::*;

use super::int8::{Form, GROUP, Group, PANEL, Panel};

/// Rows of the register tile; the registers hold them times two panels, as integers and as numbers.
const ROWS: usize = 6;

/// As [`super::int8::product`].
///
/// # Safety
/// As there; the processor must have AVX-512 with VNNI.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma")]
pub(super) unsafe fn product(
    x: &[*const Group],
    panels: &[(&Panel, *mut f32)],
    (groups, form): (usize, Form),
    add: bool,
) {
    // SAFETY: the caller's promise.
    unsafe {
        match (panels, form.halves, form.offset) {
            (&[a, b], false, false) => tiles::<2, false, false>(x, [a, b], groups, add),
            (&[a, b], false, true) => tiles::<2, false, true>(x, [a, b], groups, add),
            (&[a, b], true, false) => tiles::<2, true, false>(x, [a, b], groups, add),
            (&[a, b], true, true) => tiles::<2, true, true>(x, [a, b], groups, add),
            (panels, false, false) => {
                panels.iter().for_each(|&a| tiles::<1, false, false>(x, [a], groups, add))
            }
            (panels, false, true) => {
                panels.iter().for_each(|&a| tiles::<1, false, true>(x, [a], groups, add))
            }
            (panels, true, false) => {
                panels.iter().for_each(|&a| tiles::<1, true, false>(x, [a], groups, add))
            }
            (panels, true, true) => panels.iter().for_each(|&a| tiles::<1, true, true>(x, [a], groups, add)),
        }
    }
}

/// Cuts rows into tiles of about equal height: a low last one would leave the multipliers waiting.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma")]
unsafe fn tiles<const P: usize, const HALVES: bool, const OFFSET: bool>(
    x: &[*const Group],
    panels: [(&Panel, *mut f32); P],
    groups: usize,
    add: bool,
) {
    let count = x.len().div_ceil(ROWS);
    let mut first = 0;
    for index in 0..count {
        let end = (index + 1) * x.len() / count;
        let rows = &x[first..end];
        // SAFETY: rows of x and of the outputs, as the caller promised.
        unsafe {
            let to = panels.map(|(panel, out)| (panel, out.add(first * PANEL)));
            match rows.len() {
                1 => tile::<P, 1, HALVES, OFFSET>(rows, to, groups, add),
                2 => tile::<P, 2, HALVES, OFFSET>(rows, to, groups, add),
                3 => tile::<P, 3, HALVES, OFFSET>(rows, to, groups, add),
                4 => tile::<P, 4, HALVES, OFFSET>(rows, to, groups, add),
                5 => tile::<P, 5, HALVES, OFFSET>(rows, to, groups, add),
                _ => tile::<P, 6, HALVES, OFFSET>(rows, to, groups, add),
            }
        }
        first = end;
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma")]
unsafe fn tile<const P: usize, const T: usize, const HALVES: bool, const OFFSET: bool>(
    x: &[*const Group],
    panels: [(&Panel, *mut f32); P],
    groups: usize,
    add: bool,
) {
    let x: [*const Group; T] = std::array::from_fn(|t| x[t]);
    let (runs, steps) = if HALVES { (2, 4) } else { (1, 8) };
    // SAFETY: groups below `groups`, columns of the panels, numbers of the outputs, as the caller promised.
    unsafe {
        let mut acc = [[_mm512_setzero_ps(); T]; P];
        if add {
            for p in 0..P {
                for t in 0..T {
                    acc[p][t] = _mm512_loadu_ps(panels[p].1.add(t * PANEL));
                }
            }
        }
        for g in 0..groups {
            for run in 0..runs {
                let mut sums = [[_mm512_setzero_si512(); T]; P];
                for t in 0..T {
                    let group = &*x[t].add(g);
                    let start = if HALVES { group.half_starts[run] } else { group.start };
                    for p in 0..P {
                        sums[p][t] = _mm512_set1_epi32(start);
                    }
                }
                for step in 0..steps {
                    let step = run * steps + step;
                    let mut weights = [_mm512_setzero_si512(); P];
                    for p in 0..P {
                        let q = panels[p].0.q.as_ptr().add(g * (GROUP / 4) + step);
                        weights[p] = _mm512_load_si512(q.cast());
                    }
                    for t in 0..T {
                        let four = (*x[t].add(g)).q.as_ptr().add(4 * step).cast::<i32>().read();
                        let four = _mm512_set1_epi32(four);
                        for p in 0..P {
                            sums[p][t] = _mm512_dpbusd_epi32(sums[p][t], weights[p], four);
                        }
                    }
                }
                for p in 0..P {
                    let panel = panels[p].0;
                    let scale = _mm512_load_ps(panel.scales.as_ptr().add(g * runs + run).cast());
                    let offset = _mm512_load_ps(panel.offsets.as_ptr().add(g * runs + run).cast());
                    for t in 0..T {
                        let group = &*x[t].add(g);
                        let both = _mm512_mul_ps(scale, _mm512_set1_ps(group.scale));
                        acc[p][t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[p][t]), both, acc[p][t]);
                        if OFFSET {
                            let sum = if HALVES { group.half_sums[run] } else { group.sum };
                            acc[p][t] = _mm512_fmadd_ps(offset, _mm512_set1_ps(sum), acc[p][t]);
                        }
                    }
                }
            }
        }
        for p in 0..P {
            for t in 0..T {
                _mm512_storeu_ps(panels[p].1.add(t * PANEL), acc[p][t]);
            }
        }
    }
}

/// Asks for a cache line.
pub(super) fn prefetch(bytes: *const u8) {
    // SAFETY: a hint, harmless for any address.
    unsafe { _mm_prefetch::<_MM_HINT_T1>(bytes.cast()) };
}
