//! Products of integers in registers, written once for vector units that multiply bytes in different ways.
//!
//! A tile is some rows of activations times a panel. Integer sums of a run stay in registers; the numbers they
//! are added to lie in the output, which is in the first cache and touched once a run. The same results as
//! [`super::int8::product`], bit for bit.

#![allow(clippy::needless_range_loop)] // indices into several arrays of registers at once

use super::int8::{Form, Group, PANEL, Panel};

/// A vector of 32-bit sums, and what goes into and out of it.
///
/// As with [`super::simd::Simd`], methods are inlined into functions compiled with the features they use.
pub(super) trait Lanes {
    /// Integer sums, a lane for each weight row.
    type Sums: Copy;
    /// A row's activations in 16 columns.
    type X: Copy;
    /// Vectors for all rows of a panel.
    const VECTORS: usize;

    /// The same sum in every lane.
    fn splat(sum: i32) -> Self::Sums;

    /// Sixteen activations at `from`.
    ///
    /// # Safety
    /// They must be readable as long as the result is used.
    unsafe fn x(from: *const i8) -> Self::X;

    /// to ← sums · (scale · factor) + to
    ///
    /// # Safety
    /// `scale` and `to` must point to a number for every lane, `to` to numbers that nobody else uses.
    unsafe fn join(sums: Self::Sums, scale: *const f32, factor: f32, to: *mut f32);

    /// to ← offset · factor + to
    ///
    /// # Safety
    /// As for [`Lanes::join`].
    unsafe fn shift(offset: *const f32, factor: f32, to: *mut f32);
}

/// A way to multiply bytes.
pub(super) trait Dots {
    /// The vectors it works on.
    type Lanes: Lanes;
    /// Weights of a vector's rows in 16 columns, ready to be multiplied.
    type Weights: Copy;
    /// Rows of a tile, at most 5: as many as registers hold the sums of.
    const ROWS: usize;

    /// What the sum of a run begins with whose activations have this [`Group::start`].
    fn start(start: i32, form: Form) -> i32;

    /// Four vectors of weights at `from`, 4 · [`PANEL`] bytes apart.
    ///
    /// # Safety
    /// They must be readable.
    unsafe fn weights(from: *const u8, form: Form) -> Self::Weights;

    /// Adds 16 products to every lane.
    fn add(sums: Sums<Self>, weights: Self::Weights, x: X<Self>) -> Sums<Self>;
}

pub(super) type Sums<D> = <<D as Dots>::Lanes as Lanes>::Sums;
pub(super) type X<D> = <<D as Dots>::Lanes as Lanes>::X;

/// As [`super::int8::product`].
///
/// # Safety
/// As there; the processor must have what `D` needs.
#[inline(always)]
pub(super) unsafe fn product<D: Dots, const V: usize>(
    x: &[*const Group],
    panels: &[(&Panel, *mut f32)],
    (groups, form): (usize, Form),
    add: bool,
) {
    // SAFETY: the caller's promise.
    unsafe {
        for &(panel, out) in panels {
            match form.halves {
                false => rows::<D, V, 1, 2>(x, panel, out, (groups, form), add),
                true => rows::<D, V, 2, 1>(x, panel, out, (groups, form), add),
            }
        }
    }
}

/// As [`product`], for one panel with `RUNS` runs of `HALVES` times 16 columns in a group.
#[inline(always)]
unsafe fn rows<D: Dots, const V: usize, const RUNS: usize, const HALVES: usize>(
    x: &[*const Group],
    panel: &Panel,
    out: *mut f32,
    shape: (usize, Form),
    add: bool,
) {
    // Tiles of about equal height: a low last one would leave the multipliers waiting.
    let count = x.len().div_ceil(D::ROWS);
    let mut first = 0;
    for index in 0..count {
        let end = (index + 1) * x.len() / count;
        let rows = &x[first..end];
        // SAFETY: rows of x and of the output, as the caller promised.
        unsafe {
            let out = out.add(first * PANEL);
            if !add {
                out.write_bytes(0, rows.len() * PANEL);
            }
            match rows.len() {
                1 => tile::<D, V, RUNS, HALVES, 1>(rows, panel, out, shape),
                2 => tile::<D, V, RUNS, HALVES, 2>(rows, panel, out, shape),
                3 => tile::<D, V, RUNS, HALVES, 3>(rows, panel, out, shape),
                4 => tile::<D, V, RUNS, HALVES, 4>(rows, panel, out, shape),
                5 if D::ROWS == 5 => tile::<D, V, RUNS, HALVES, 5>(rows, panel, out, shape),
                _ => unreachable!("tiles are not higher than registers allow"),
            }
        }
        first = end;
    }
}

/// Adds the products of `T` rows, over all columns, to `out`: [T][PANEL].
#[inline(always)]
unsafe fn tile<D: Dots, const V: usize, const RUNS: usize, const HALVES: usize, const T: usize>(
    x: &[*const Group],
    panel: &Panel,
    out: *mut f32,
    (groups, form): (usize, Form),
) {
    const { assert!(V == D::Lanes::VECTORS && PANEL.is_multiple_of(V)) };
    let width = PANEL / V;
    let x: [*const Group; T] = std::array::from_fn(|t| x[t]);
    // SAFETY: groups below `groups`, columns of the panel, numbers of the output, as the caller promised.
    unsafe {
        for g in 0..groups {
            for run in 0..RUNS {
                let start = |t: usize| {
                    let group = &*x[t].add(g);
                    let start = if RUNS == 2 { group.half_starts[run] } else { group.start };
                    D::Lanes::splat(D::start(start, form))
                };
                let mut sums = [[start(0); V]; T];
                for t in 1..T {
                    sums[t] = [start(t); V];
                }
                for half in run..run + HALVES {
                    let columns = panel.q.as_ptr().add((2 * g + half) * 4).cast::<u8>();
                    let x_of =
                        |t: usize| D::Lanes::x((&raw const (*x[t].add(g)).q).cast::<i8>().add(16 * half));
                    let mut sixteen = [x_of(0); T];
                    for t in 1..T {
                        sixteen[t] = x_of(t);
                    }
                    for v in 0..V {
                        let weights = D::weights(columns.add(v * 4 * width), form);
                        for t in 0..T {
                            sums[t][v] = D::add(sums[t][v], weights, sixteen[t]);
                        }
                    }
                }
                let scales = panel.scales.as_ptr().add(g * RUNS + run).cast::<f32>();
                for t in 0..T {
                    let factor = (*x[t].add(g)).scale;
                    for v in 0..V {
                        let to = out.add(t * PANEL + v * width);
                        D::Lanes::join(sums[t][v], scales.add(v * width), factor, to);
                    }
                }
                if form.offset {
                    let offsets = panel.offsets.as_ptr().add(g * RUNS + run).cast::<f32>();
                    for t in 0..T {
                        let group = &*x[t].add(g);
                        let factor = if RUNS == 2 { group.half_sums[run] } else { group.sum };
                        for v in 0..V {
                            let to = out.add(t * PANEL + v * width);
                            D::Lanes::shift(offsets.add(v * width), factor, to);
                        }
                    }
                }
            }
        }
    }
}
