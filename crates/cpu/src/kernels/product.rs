//! Matrix products in registers.
//!
//! Two forms, by what lies contiguous in the right factor: [`dot_form`] for weights (a row is an output,
//! lanes run along the sum) and [`sum_form`] (lanes run along the outputs). In both, the order in which a
//! number is summed depends on the length of the sum alone: neither on the rows and columns computed with it
//! nor on its place among them.

#![allow(clippy::needless_range_loop)] // indices into several arrays of registers at once

use std::ops::Range;

use half::f16;

use super::simd::Simd;

/// A factor: its first number, and the distance of its rows.
pub(super) type Factor<T = f32> = (*const T, usize);

/// Numbers in half precision from a load to the one that is prepared meanwhile: 4 KiB.
const AHEAD: usize = 2048;

/// A number as it lies in memory; all become f32 exactly.
pub(super) trait Number: Copy {
    /// LANES of them.
    ///
    /// # Safety
    /// They must be readable.
    unsafe fn load<S: Simd>(from: *const Self) -> S::V;

    /// One of them.
    fn single(self) -> f32;
}

impl Number for f32 {
    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const f32) -> S::V {
        // SAFETY: the caller's promise.
        unsafe { S::load(from) }
    }

    #[inline(always)]
    fn single(self) -> f32 {
        self
    }
}

impl Number for f16 {
    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const f16) -> S::V {
        // Numbers in half precision are read from memory, once.
        S::prefetch(from.wrapping_add(AHEAD).cast());
        // SAFETY: the caller's promise.
        unsafe { S::load_half(from) }
    }

    #[inline(always)]
    fn single(self) -> f32 {
        self.to_f32()
    }
}

/// A result: its first number, and the distance of its rows.
pub(super) type Target = (*mut f32, usize);

/// out[r, n] (+)= Σ_k x[r][k] · w[n, k], for n below `n`, a multiple of four.
///
/// Lane l sums k ≡ l, then the lanes are added, then what is left of k one by one.
///
/// # Safety
/// `x[r]` must point to `k` numbers, `w` to `n` rows of `k` numbers, `out` to a row of `n` numbers for each
/// x, which nobody else uses.
#[inline(always)]
pub(super) unsafe fn dot_form<S: Simd, T: Number>(
    x: &[*const f32],
    w: Factor<T>,
    (n, k): (usize, usize),
    (out, out_stride): Target,
    add: bool,
) {
    let whole = x.len() / S::ROWS * S::ROWS;
    // SAFETY: the tiles below divide the rows of x and out between them.
    unsafe {
        let mut r = 0;
        while r < whole {
            let (x, out) = (&x[r..r + S::ROWS], (out.add(r * out_stride), out_stride));
            match S::ROWS {
                4 => dot_rows::<S, T, 4, 4>(x, w, (0..n, k), out, add),
                3 => dot_rows::<S, T, 3, 4>(x, w, (0..n, k), out, add),
                _ => dot_rows::<S, T, 2, 4>(x, w, (0..n, k), out, add),
            }
            r += S::ROWS;
        }
        let (x, out) = (&x[whole..], (out.add(whole * out_stride), out_stride));
        match x.len() {
            3 => dot_rows::<S, T, 3, 4>(x, w, (0..n, k), out, add),
            2 => dot_rows::<S, T, 2, 4>(x, w, (0..n, k), out, add),
            1 => {
                // More weight rows at once, for as many sums in flight as the multipliers need.
                let wide = n / 8 * 8;
                dot_rows::<S, T, 1, 8>(x, w, (0..wide, k), out, add);
                dot_rows::<S, T, 1, 4>(x, w, (wide..n, k), out, add);
            }
            _ => {}
        }
    }
}

/// As [`dot_form`], for `R` rows and the outputs `columns`, `C` at a time.
#[inline(always)]
unsafe fn dot_rows<S: Simd, T: Number, const R: usize, const C: usize>(
    x: &[*const f32],
    (w, w_stride): Factor<T>,
    (columns, k): (Range<usize>, usize),
    (out, out_stride): Target,
    add: bool,
) {
    let x: [*const f32; R] = std::array::from_fn(|r| x[r]);
    let whole = k / S::LANES * S::LANES;
    for first in columns.step_by(C) {
        // SAFETY: indices stay below k, n and the rows, as the caller promised.
        unsafe {
            let w = w.add(first * w_stride);
            let mut acc = [[S::splat(0.0); C]; R];
            let mut i = 0;
            while i < whole {
                let rows: [S::V; R] = std::array::from_fn(|r| S::load(x[r].add(i)));
                for c in 0..C {
                    let weights = T::load::<S>(w.add(c * w_stride + i));
                    for r in 0..R {
                        acc[r][c] = S::fma(rows[r], weights, acc[r][c]);
                    }
                }
                i += S::LANES;
            }
            for r in 0..R {
                for c in (0..C).step_by(4) {
                    let mut sums = S::sums([acc[r][c], acc[r][c + 1], acc[r][c + 2], acc[r][c + 3]]);
                    for (j, sum) in sums.iter_mut().enumerate() {
                        for i in whole..k {
                            let weight = (*w.add((c + j) * w_stride + i)).single();
                            *sum = S::fma1(*x[r].add(i), weight, *sum);
                        }
                    }
                    let out = out.add(r * out_stride + first + c);
                    for (j, sum) in sums.into_iter().enumerate() {
                        let old = if add { *out.add(j) } else { 0.0 };
                        *out.add(j) = old + sum;
                    }
                }
            }
        }
    }
}

/// out[r, n] (+)= Σ_k a[r, k] · b[k, n], summed one k after the other.
///
/// # Safety
/// `a` must point to `rows` rows of `k` numbers, `b` to `k` rows of `n`, `out` to `rows` rows of `n` numbers
/// which nobody else uses.
#[inline(always)]
pub(super) unsafe fn sum_form<S: Simd, T: Number>(
    (rows, k, n): (usize, usize, usize),
    (a, a_stride): Factor,
    (b, b_stride): Factor<T>,
    (out, out_stride): Target,
    add: bool,
) {
    let mut r = 0;
    while r < rows {
        // SAFETY: rows r .. r + 4, or r alone, lie inside the factors.
        unsafe {
            let (a, b) = ((a.add(r * a_stride), a_stride), (b, b_stride));
            let out = (out.add(r * out_stride), out_stride);
            if rows - r >= S::ROWS && S::ROWS == 4 {
                sum_rows::<S, T, 4, 4>((k, n), a, b, out, add);
                r += 4;
            } else if rows - r >= 2 {
                sum_rows::<S, T, 2, 4>((k, n), a, b, out, add);
                r += 2;
            } else {
                sum_rows::<S, T, 1, 8>((k, n), a, b, out, add);
                r += 1;
            }
        }
    }
}

/// As [`sum_form`], for `R` rows, `C` vectors of outputs at a time.
#[inline(always)]
unsafe fn sum_rows<S: Simd, T: Number, const R: usize, const C: usize>(
    (k, n): (usize, usize),
    (a, a_stride): Factor,
    (b, b_stride): Factor<T>,
    (out, out_stride): Target,
    add: bool,
) {
    let mut first = 0;
    // SAFETY: columns below n, rows below R and k, as the caller promised.
    unsafe {
        while first + C * S::LANES <= n {
            sum_tile::<S, T, R, C>(
                k,
                (a, a_stride),
                (b.add(first), b_stride),
                (out.add(first), out_stride),
                add,
            );
            first += C * S::LANES;
        }
        while first + S::LANES <= n {
            sum_tile::<S, T, R, 1>(
                k,
                (a, a_stride),
                (b.add(first), b_stride),
                (out.add(first), out_stride),
                add,
            );
            first += S::LANES;
        }
        for r in 0..R {
            for c in first..n {
                let out = out.add(r * out_stride + c);
                let mut sum = if add { *out } else { 0.0 };
                for i in 0..k {
                    let right = (*b.add(i * b_stride + c)).single();
                    sum = S::fma1(*a.add(r * a_stride + i), right, sum);
                }
                *out = sum;
            }
        }
    }
}

#[inline(always)]
unsafe fn sum_tile<S: Simd, T: Number, const R: usize, const C: usize>(
    k: usize,
    (a, a_stride): Factor,
    (b, b_stride): Factor<T>,
    (out, out_stride): Target,
    add: bool,
) {
    // SAFETY: the tile lies inside the factors, as the caller promised.
    unsafe {
        let mut acc = [[S::splat(0.0); C]; R];
        if add {
            for r in 0..R {
                for c in 0..C {
                    acc[r][c] = S::load(out.add(r * out_stride + c * S::LANES));
                }
            }
        }
        for i in 0..k {
            let right: [S::V; C] = std::array::from_fn(|c| T::load::<S>(b.add(i * b_stride + c * S::LANES)));
            for r in 0..R {
                let left = S::splat(*a.add(r * a_stride + i));
                for c in 0..C {
                    acc[r][c] = S::fma(left, right[c], acc[r][c]);
                }
            }
        }
        for r in 0..R {
            for c in 0..C {
                S::store(out.add(r * out_stride + c * S::LANES), acc[r][c]);
            }
        }
    }
}
