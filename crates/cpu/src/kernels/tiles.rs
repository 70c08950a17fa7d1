//! Products of integers in registers, written once for vector units that multiply bytes in different ways.
//!
//! A tile is some rows of activations times a panel. Integer sums of a run stay in registers; the numbers they
//! are added to lie in the output, which is in the first cache and touched once a run. The same results as
//! [`super::int8::product`], bit for bit.

#![allow(clippy::needless_range_loop)] // indices into several arrays of registers at once

use super::int8::{Codes, Form, PANEL, Panel};
use super::product::Target;

/// A vector of 32-bit sums, and what goes into and out of it.
///
/// As with [`super::simd::Simd`], methods are inlined into functions compiled with the features they use.
pub(super) trait Lanes {
    /// Integer sums, a lane for each weight row.
    type Sums: Copy;
    /// A row's activations in 16 columns.
    type X: Copy;
    /// A number for each weight row.
    type Numbers: Copy;
    /// Vectors for all rows of a panel.
    const VECTORS: usize;

    /// The same sum in every lane.
    fn splat(sum: i32) -> Self::Sums;

    /// Sixteen activations at `from`.
    ///
    /// # Safety
    /// They must be readable as long as the result is used.
    unsafe fn x(from: *const i8) -> Self::X;

    /// Numbers at `from`, one for every lane.
    ///
    /// # Safety
    /// They must be readable.
    unsafe fn numbers(from: *const f32) -> Self::Numbers;

    /// −[`super::int8::MAGIC`] · scale
    fn magic(scale: Self::Numbers) -> Self::Numbers;

    /// to ← (sums as numbers · scale + magic) · factor + to
    ///
    /// # Safety
    /// `to` must point to a number for every lane, which nobody else uses.
    unsafe fn join(sums: Self::Sums, scale: (Self::Numbers, Self::Numbers), factor: f32, to: *mut f32);

    /// to ← offset · factor + to
    ///
    /// # Safety
    /// As for [`Lanes::join`].
    unsafe fn shift(offset: Self::Numbers, factor: f32, to: *mut f32);
}

/// A way to multiply bytes.
pub(super) trait Dots {
    /// The vectors it works on.
    type Lanes: Lanes;
    /// Weights of a vector's rows in 16 columns, ready to be multiplied.
    type Weights: Copy;
    /// Rows of a tile, at most 5: as many as registers hold the sums of.
    const ROWS: usize;

    /// What the sum of a run begins with, given the start of its activations ([`Codes::starts`]).
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
    x: &[*const Codes],
    panels: &[&Panel],
    (out, stride): Target,
    (groups, form): (usize, Form),
    add: bool,
) {
    for (p, panel) in panels.iter().enumerate() {
        // SAFETY: the caller's promise.
        unsafe {
            let out = (out.add(p * PANEL), stride);
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
    x: &[*const Codes],
    panel: &Panel,
    (out, stride): Target,
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
            let out = (out.add(first * stride), stride);
            match rows.len() {
                1 => tile::<D, V, RUNS, HALVES, 1>(rows, panel, out, shape, add),
                2 => tile::<D, V, RUNS, HALVES, 2>(rows, panel, out, shape, add),
                3 => tile::<D, V, RUNS, HALVES, 3>(rows, panel, out, shape, add),
                4 => tile::<D, V, RUNS, HALVES, 4>(rows, panel, out, shape, add),
                5 if D::ROWS == 5 => tile::<D, V, RUNS, HALVES, 5>(rows, panel, out, shape, add),
                _ => unreachable!("tiles are not higher than registers allow"),
            }
        }
        first = end;
    }
}

/// The register tile, T rows times a panel: out [T][stride] (+)= x · panel.
#[inline(always)]
unsafe fn tile<D: Dots, const V: usize, const RUNS: usize, const HALVES: usize, const T: usize>(
    x: &[*const Codes],
    panel: &Panel,
    (out, stride): Target,
    (groups, form): (usize, Form),
    add: bool,
) {
    const { assert!(V == D::Lanes::VECTORS && PANEL.is_multiple_of(V)) };
    let width = PANEL / V;
    let x: [*const Codes; T] = std::array::from_fn(|t| x[t]);
    // SAFETY: groups below `groups`, columns of the panel, numbers of the output, as the caller promised.
    unsafe {
        if !add {
            x.iter().enumerate().for_each(|(t, _)| out.add(t * stride).write_bytes(0, PANEL));
        }
        for run in 0..groups * RUNS {
            let start = |t: usize| {
                let starts = match RUNS {
                    2 => (&raw const (*x[t]).half_starts).cast::<i32>(),
                    _ => (&raw const (*x[t]).starts).cast::<i32>(),
                };
                D::Lanes::splat(D::start(starts.add(run).read(), form))
            };
            let mut sums = [[start(0); V]; T];
            for t in 1..T {
                sums[t] = [start(t); V];
            }
            for half in 0..HALVES {
                let half = run * HALVES + half;
                let columns = panel.q.as_ptr().add(4 * half).cast::<u8>();
                let x_of = |t: usize| D::Lanes::x((&raw const (*x[t]).q).cast::<i8>().add(16 * half));
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
            for v in 0..V {
                let scale = D::Lanes::numbers(panel.scales[run].as_ptr().add(v * width));
                let scale = (scale, D::Lanes::magic(scale));
                for t in 0..T {
                    let factor = (&raw const (*x[t]).scales).cast::<f32>().add(run / RUNS).read();
                    D::Lanes::join(sums[t][v], scale, factor, out.add(t * stride + v * width));
                }
            }
            for index in run * form.offsets..(run + 1) * form.offsets {
                for v in 0..V {
                    let offset = D::Lanes::numbers(panel.offsets[index].as_ptr().add(v * width));
                    for t in 0..T {
                        let factors = match form.offsets {
                            2 => (&raw const (*x[t]).half_sums).cast::<f32>(),
                            _ => (&raw const (*x[t]).sums).cast::<f32>(),
                        };
                        D::Lanes::shift(offset, factors.add(index).read(), out.add(t * stride + v * width));
                    }
                }
            }
        }
    }
}
