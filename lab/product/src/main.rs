//! Versions of the integer product, timed in shares of the integer peak, which is measured before every run:
//! one thread, CPU time, medians. 2,048 columns, 256 weight rows, decoded beforehand.
//!
//! Versions of the kernel: `converted` (activations and their scales side by side in 64 bytes; integer sums
//! converted, times the product of both scales, added), `magic` (what the backend ships: integers apart from
//! scales, no conversion). Versions of the loop over 2,040 rows: `pair` (all rows for two panels, then the
//! next two), `set` (48 rows for all 16 panels, then the next 48; what the backend ships).

#![allow(clippy::needless_range_loop)] // indices into several arrays of registers at once

#[path = "../../../crates/cpu/src/kernels"]
#[allow(dead_code)] // what the backend alone uses
mod kernels {
    mod blocks;
    pub(crate) mod int8;
    mod lanes;
    mod product;
    mod simd;
    pub(crate) mod unpack;
    mod vnni;
    mod vnni_fill;

    use int8::{COLUMNS, Codes, Form, GROUP, PANEL, Panel};
    use quant::Type;

    use super::Group;

    pub(crate) fn fill(ty: Type, rows: &[&[u8]], panel: &mut Panel) {
        // SAFETY: features checked in `main`.
        unsafe { vnni_fill::fill(ty, rows, COLUMNS, panel) }
    }

    pub(crate) fn round(x: &[f32], out: &mut [Codes]) {
        int8::round(x, out);
    }

    /// The same numbers with their scales beside them.
    pub(crate) fn groups(codes: &Codes) -> Vec<Group> {
        let magic = int8::MAGIC.to_bits() as i32;
        let group = |g: usize| Group {
            q: std::array::from_fn(|i| codes.q[GROUP * g + i]),
            scale: codes.scales[g],
            start: codes.starts[g] - magic,
            half_starts: codes.half_starts[g].map(|start| start - magic),
            sum: codes.sums[g],
        };
        (0..int8::GROUPS).map(group).collect()
    }

    /// Weights, scales and offsets of a panel.
    pub(crate) fn parts(panel: &Panel) -> (*const u8, *const f32, *const f32) {
        (panel.q.as_ptr().cast(), panel.scales.as_ptr().cast(), panel.offsets.as_ptr().cast())
    }

    /// As [`vnni::product`].
    ///
    /// # Safety
    /// As there.
    pub(crate) unsafe fn product(
        x: &[*const Codes],
        panels: &[&Panel],
        out: (*mut f32, usize),
        shape: (usize, Form),
        add: bool,
    ) {
        // SAFETY: features checked in `main`, the rest by the caller.
        unsafe { vnni::product(x, panels, out, shape, add, int8::Ahead::NONE) }
    }

    pub(crate) const WIDTH: usize = PANEL;
}

use std::arch::x86_64::*;

use clock::{Random, STEP, dot_products, now};
use kernels::int8::{COLUMNS, Codes, Form, GROUPS, Panel};
use kernels::{WIDTH, unpack};
use quant::Type;

const K: usize = 2048;
const BLOCKS: usize = K / COLUMNS;
const PANELS: usize = 16;
const CHUNK: usize = 48;

/// 32 activations, their scale and sums.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Group {
    q: [i8; 32],
    scale: f32,
    start: i32,
    half_starts: [i32; 2],
    sum: f32,
}

/// vpdpbusd from registers: multiply-adds a second.
#[target_feature(enable = "avx512f,avx512vnni")]
fn peak() -> f64 {
    const STEPS: usize = 200_000;
    let start = now();
    dot_products(STEPS);
    (STEPS * STEP) as f64 / (now() - start)
}

/// Six rows times two panels: out [T][2 · WIDTH].
///
/// # Safety
/// `x` points to the groups of a block each, `out` to the products of as many rows.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni,fma")]
unsafe fn converted<const T: usize, const HALVES: bool, const OFFSET: bool>(
    x: &[*const Group],
    panels: [&Panel; 2],
    out: *mut f32,
    add: bool,
) {
    let x: [*const Group; T] = std::array::from_fn(|t| x[t]);
    let parts = panels.map(kernels::parts);
    let (runs, steps) = if HALVES { (2, 4) } else { (1, 8) };
    // SAFETY: the caller's promise.
    unsafe {
        let mut acc = [[_mm512_setzero_ps(); T]; 2];
        if add {
            for (p, acc) in acc.iter_mut().enumerate() {
                for (t, acc) in acc.iter_mut().enumerate() {
                    *acc = _mm512_loadu_ps(out.add((2 * t + p) * WIDTH));
                }
            }
        }
        for g in 0..GROUPS {
            for run in 0..runs {
                let mut sums = [[_mm512_setzero_si512(); T]; 2];
                for t in 0..T {
                    let x = &*x[t].add(g);
                    let start = _mm512_set1_epi32(if HALVES { x.half_starts[run] } else { x.start });
                    (sums[0][t], sums[1][t]) = (start, start);
                }
                for step in run * steps..(run + 1) * steps {
                    let mut weights = [_mm512_setzero_si512(); 2];
                    for p in 0..2 {
                        weights[p] = _mm512_load_si512(parts[p].0.add((8 * g + step) * 64).cast());
                    }
                    for t in 0..T {
                        let four = (*x[t].add(g)).q.as_ptr().add(4 * step).cast::<i32>().read();
                        for p in 0..2 {
                            sums[p][t] = _mm512_dpbusd_epi32(sums[p][t], weights[p], _mm512_set1_epi32(four));
                        }
                    }
                }
                for p in 0..2 {
                    let scale = _mm512_load_ps(parts[p].1.add((g * runs + run) * WIDTH));
                    let offset = _mm512_load_ps(parts[p].2.add((g * runs + run) * WIDTH));
                    for t in 0..T {
                        let x = &*x[t].add(g);
                        let both = _mm512_mul_ps(scale, _mm512_set1_ps(x.scale));
                        acc[p][t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[p][t]), both, acc[p][t]);
                        if OFFSET {
                            acc[p][t] = _mm512_fmadd_ps(offset, _mm512_set1_ps(x.sum), acc[p][t]);
                        }
                    }
                }
            }
        }
        for (p, acc) in acc.iter().enumerate() {
            for (t, acc) in acc.iter().enumerate() {
                _mm512_storeu_ps(out.add((2 * t + p) * WIDTH), *acc);
            }
        }
    }
}

/// Panels [PANELS][BLOCKS] of random blocks.
fn panels(ty: Type, random: &mut Random) -> Vec<Panel> {
    let row_bytes = ty.bytes(COLUMNS).expect("whole blocks");
    let mut panels = vec![Panel::ZERO; PANELS * BLOCKS];
    for panel in &mut panels {
        // Small bytes: scales are small numbers, whatever part of them a byte is.
        let bytes: Vec<u8> = (0..WIDTH * row_bytes).map(|_| random.next() as u8 & 0x2f).collect();
        let rows: Vec<&[u8]> = bytes.chunks_exact(row_bytes).collect();
        kernels::fill(ty, &rows, panel);
    }
    panels
}

/// All rows of `codes` by the backend's kernel: `chunk` rows for all panels at a time.
fn magic(codes: &[Codes], panels: &[Panel], form: Form, chunk: usize, set: usize, tile: &mut [f32]) {
    for first in (0..PANELS).step_by(set) {
        for rows in codes.chunks(chunk * BLOCKS) {
            for block in 0..BLOCKS {
                let x: Vec<*const Codes> =
                    rows.chunks_exact(BLOCKS).map(|row| &raw const row[block]).collect();
                for pair in (first..first + set).step_by(2) {
                    let both = [pair, pair + 1].map(|panel| &panels[panel * BLOCKS + block]);
                    let out = tile[(pair - first) * WIDTH..].as_mut_ptr();
                    // SAFETY: rows of codes, room for them; features checked in `main`.
                    unsafe { kernels::product(&x, &both, (out, set * WIDTH), (GROUPS, form), block > 0) };
                }
            }
        }
    }
}

/// As [`magic`] by the older kernel, two panels at a time, six rows at a time.
fn old(groups: &[Group], panels: &[Panel], form: Form, tile: &mut [f32]) {
    let per_row = BLOCKS * GROUPS;
    for pair in (0..PANELS).step_by(2) {
        for rows in groups.chunks(6 * per_row) {
            for block in 0..BLOCKS {
                let x: Vec<*const Group> =
                    rows.chunks_exact(per_row).map(|row| row[block * GROUPS..].as_ptr()).collect();
                let both = [pair, pair + 1].map(|panel| &panels[panel * BLOCKS + block]);
                let (out, add) = (tile.as_mut_ptr(), block > 0);
                // SAFETY: rows of groups, room for them; features checked in `main`.
                unsafe {
                    match (form.halves, form.offsets) {
                        (false, 0) => converted::<6, false, false>(&x, both, out, add),
                        (false, 1) => converted::<6, false, true>(&x, both, out, add),
                        (true, 0) => converted::<6, true, false>(&x, both, out, add),
                        _ => unreachable!("not among the types measured"),
                    }
                }
            }
        }
    }
}

fn main() {
    for feature in [is_x86_feature_detected!("avx512vnni"), is_x86_feature_detected!("avx512vbmi")] {
        assert!(feature && is_x86_feature_detected!("gfni"), "AVX-512 with VNNI, VBMI and GFNI is needed");
    }
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let mut tile = vec![0.0; CHUNK * PANELS * WIDTH];
    println!("share of the peak, median of 7   | converted | magic: pair | set of 16");
    for rows in [6, 24, 48, 2040] {
        let numbers: Vec<f32> =
            (0..rows * K).map(|_| random.next() as u32 as f32 / u32::MAX as f32 * 2.0 - 1.0).collect();
        let mut codes = vec![Codes::ZERO; rows * BLOCKS];
        kernels::round(&numbers, &mut codes);
        let groups: Vec<Group> = codes.iter().flat_map(kernels::groups).collect();
        for (ty, what) in [(Type::IQ2_XXS, "plain"), (Type::Q5_K, "offsets"), (Type::IQ2_XS, "halves")] {
            let (panels, form) = (panels(ty, &mut random), unpack::form(ty));
            let repeat = (480 / rows).max(1);
            let macs = (repeat * rows * K * PANELS * WIDTH) as f64;
            let mut share = |version: &mut dyn FnMut(&mut [f32])| {
                let mut shares: Vec<f64> = (0..8)
                    .map(|_| {
                        // SAFETY: features checked above.
                        let peak = unsafe { peak() };
                        let start = now();
                        (0..repeat).for_each(|_| version(&mut tile));
                        macs / (now() - start) / peak
                    })
                    .collect();
                shares[1..].sort_by(f64::total_cmp);
                shares[4]
            };
            let a = share(&mut |tile| old(&groups, &panels, form, tile));
            let b = share(&mut |tile| magic(&codes, &panels, form, CHUNK, 2, tile));
            let c = share(&mut |tile| magic(&codes, &panels, form, CHUNK, PANELS, tile));
            println!("{rows:5} rows  {what:8} {:8}     | {a:9.3} | {b:11.3} | {c:9.3}", ty.name());
        }
    }
}
