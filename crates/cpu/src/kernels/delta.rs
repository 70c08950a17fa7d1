//! The gated delta rule of one value head: over the rows of one cell of the 64-position grid, or one row.
//!
//! Row t, with decay e^g, key k, value v, query q:
//!
//! ```text
//! S ← e^g S;  d = beta (v − Sᵀk);  S ← S + k dᵀ;  o = Sᵀ q
//! ```
//!
//! [`step`] does just that. [`cell`] unrolls the steps (the WY form). With G the sums of g from the start of
//! the cell, S₀ the state before it, and E[t, j] = e^(G_t − G_j):
//!
//! ```text
//! d_t + Σ_{j<t} beta_t E[t, j] (k_t · k_j) d_j = beta_t (v_t − e^G_t S₀ᵀ k_t)      solved from top to bottom
//! o_t = e^G_t S₀ᵀ q_t + Σ_{j≤t} E[t, j] (q_t · k_j) d_j
//! S after t = e^G_t S₀ + Σ_{j≤t} k_j (E[t, j] d_j)ᵀ
//! ```
//!
//! Only differences of G with t ≥ j occur, so no exponential overflows; they are taken in double precision,
//! because a difference of large sums must still be exact.
//!
//! Columns of the state are independent of each other, given the products of keys and queries. So the work
//! is done for one tile of columns after the other, [`VECTORS`] vectors wide, whose part of the state stays in the
//! first cache: a state is stored as tiles, [tiles][dim][tile columns], a matrix of values as
//! [rows][padded dim], with zeros in the padding. Every number is one sum in ascending order, whatever rows
//! are computed with it, and row t depends on rows up to t alone.

#![allow(clippy::needless_range_loop)] // indices into several arrays of registers at once

use std::ops::Range;

use model::GRID;

use super::product::Factor;
use super::rows::{dot, exps};
use super::simd::Simd;
use crate::memory::carve;

/// Vectors in a row of a tile.
pub(super) const VECTORS: usize = 4;

/// Rows solved together before the rest of the cell is subtracted.
pub(crate) const SOLVE: usize = 16;

/// Logarithm of a decay that leaves nothing: 3e-20, far below the last bit of anything it is added to. Smaller
/// ones would make products that are no normal numbers, for which processors take a hundred times as long.
const FORGOTTEN: f32 = -45.0;

/// What a cell is computed from.
pub(crate) struct Cell<'a> {
    /// Rows, at least one, at most [`GRID`].
    pub(crate) rows: usize,
    /// Numbers in a query, key or value.
    pub(crate) dim: usize,
    /// [rows][dim], normalised; queries scaled.
    pub(crate) q: &'a [f32],
    /// [rows][dim], normalised.
    pub(crate) k: &'a [f32],
    /// q · k of every row with those up to itself: [rows][GRID].
    pub(crate) qk: &'a [f32],
    /// k · k, likewise.
    pub(crate) kk: &'a [f32],
    /// beta.
    pub(crate) beta: &'a [f32; GRID],
    /// g: the logarithm of the decay, at most 0.
    pub(crate) log_decay: &'a [f32; GRID],
}

/// Numbers of work room that [`cell`] needs for tiles of `columns` columns.
pub(crate) fn room(dim: usize, columns: usize) -> usize {
    let lens = lens(dim, columns);
    lens.into_iter().map(|len| len.next_multiple_of(16)).sum()
}

/// Products with decays of queries, then of keys; d; d decayed; a tile of a state.
fn lens(dim: usize, columns: usize) -> [usize; 5] {
    [GRID * GRID, GRID * GRID, GRID * columns, GRID * columns, dim * columns]
}

/// Decays from the start of the cell and between its rows.
struct Decays {
    /// G.
    sums: [f64; GRID],
    /// e^G.
    starts: [f32; GRID],
}

impl Decays {
    #[inline(always)]
    fn new<S: Simd>(rows: usize, log_decay: &[f32; GRID]) -> Decays {
        let mut sums = [0.0; GRID];
        let mut sum = 0.0;
        for (to, &log) in sums[..rows].iter_mut().zip(log_decay) {
            sum += f64::from(log);
            *to = sum;
        }
        // Loops instead of `map`, which would not be compiled for the variant.
        let mut starts = [0.0; GRID];
        starts.iter_mut().zip(&sums).for_each(|(to, &sum)| *to = sum as f32);
        exp_all::<S>(&mut starts);
        Decays { sums, starts }
    }

    /// E[t, ·]; what stands behind t means nothing.
    #[inline(always)]
    fn row<S: Simd>(&self, t: usize) -> [f32; GRID] {
        let sum = self.sums[t];
        let mut row = [0.0; GRID];
        row.iter_mut().zip(&self.sums).for_each(|(to, other)| *to = (sum - other) as f32);
        exp_all::<S>(&mut row);
        row
    }
}

/// Decays; those below e^-45 are zero.
#[inline(always)]
fn exp_all<S: Simd>(x: &mut [f32; GRID]) {
    for i in (0..GRID).step_by(S::LANES) {
        // SAFETY: GRID is a multiple of every number of lanes.
        unsafe {
            let log = S::load(x.as_ptr().add(i));
            S::store(x.as_mut_ptr().add(i), S::unless_below(log, FORGOTTEN, exps::<S>(log)));
        }
    }
}

/// Advances `state` by a cell. `values` holds the values and then the outputs; `snapshots` are rows after which
/// the state is wanted too, as [dim][dim].
#[inline(always)]
pub(super) fn cell<S: Simd>(
    cell: &Cell,
    room: &mut [f32],
    values: &mut [f32],
    state: &mut [f32],
    snapshots: &mut [(usize, &mut [f32])],
) {
    let (rows, dim, wide) = (cell.rows, cell.dim, VECTORS * S::LANES);
    let width = dim.next_multiple_of(wide);
    assert!((1..=GRID).contains(&rows) && cell.q.len() >= rows * dim && cell.k.len() >= rows * dim);
    assert!(cell.qk.len() >= rows * GRID && cell.kk.len() >= rows * GRID);
    assert!(values.len() >= rows * width && state.len() >= dim * width);
    let [qk, kk, d, decayed, kept] = carve(room, lens(dim, wide));
    let decays = Decays::new::<S>(rows, cell.log_decay);
    for t in 0..rows {
        let row = t * GRID..(t + 1) * GRID;
        let e = decays.row::<S>(t);
        let beta = cell.beta[t];
        let (qk, kk) = (&mut qk[row.clone()], &mut kk[row.clone()]);
        qk.iter_mut().zip(&cell.qk[row.clone()]).zip(&e).for_each(|((to, x), e)| *to = x * e);
        kk.iter_mut().zip(&cell.kk[row]).zip(&e).for_each(|((to, x), e)| *to = x * e * -beta);
        qk[t + 1..].fill(0.0);
        kk[t..].fill(0.0);
    }
    for (tile, state) in state.chunks_exact_mut(dim * wide).take(width / wide).enumerate() {
        let values = &mut values[tile * wide..];
        let mut work = Tile { cell, starts: &decays.starts, width, qk, kk, d, state: state.as_ptr() };
        // SAFETY: the lengths checked above, and those of the work room.
        unsafe {
            each_block::<S, _>(0..rows, &mut Differences(&mut work, values.as_ptr()));
            solve::<S>(rows, work.kk, work.d);
            each_block::<S, _>(0..rows, &mut Outputs(&mut work, values.as_mut_ptr()));
            let columns = tile * wide..dim.min((tile + 1) * wide);
            for (last, to) in snapshots.iter_mut() {
                advance::<S>(&work, &decays, *last, decayed, kept.as_mut_ptr());
                for (to, from) in to.chunks_exact_mut(dim).zip(kept.chunks_exact(wide)) {
                    to[columns.clone()].copy_from_slice(&from[..columns.len()]);
                }
            }
            advance::<S>(&work, &decays, rows - 1, decayed, state.as_mut_ptr());
        }
    }
}

/// A tile of columns at work.
struct Tile<'a> {
    cell: &'a Cell<'a>,
    starts: &'a [f32; GRID],
    /// Numbers from a row of values to the next.
    width: usize,
    /// E[t, j] q_t · k_j, zero for j > t.
    qk: &'a [f32],
    /// −beta_t E[t, j] k_t · k_j, zero for j ≥ t.
    kk: &'a [f32],
    d: &'a mut [f32],
    state: *const f32,
}

/// Something computed for `R` rows at once.
trait Block<S: Simd> {
    /// # Safety
    /// The rows must lie inside what it works on.
    unsafe fn rows<const R: usize>(&mut self, first: usize);
}

/// Cuts rows into blocks as high as the registers allow.
#[inline(always)]
unsafe fn each_block<S: Simd, B: Block<S>>(rows: Range<usize>, block: &mut B) {
    let mut row = rows.start;
    while row < rows.end {
        // SAFETY: the caller's promise.
        unsafe {
            match (S::ROWS, rows.end - row) {
                (4, 4..) => {
                    block.rows::<4>(row);
                    row += 4;
                }
                (3, 3..) => {
                    block.rows::<3>(row);
                    row += 3;
                }
                (_, 2..) => {
                    block.rows::<2>(row);
                    row += 2;
                }
                _ => {
                    block.rows::<1>(row);
                    row += 1;
                }
            }
        }
    }
}

/// acc[r] += Σ_i a[r, i] b[i], for `count` rows of a tile b; a[r, i] lies `r` · `a_row` + `i` · `a_col` behind a.
#[inline(always)]
unsafe fn accumulate<S: Simd, const R: usize>(
    acc: &mut [[S::V; VECTORS]; R],
    count: usize,
    (a, a_row, a_col): (*const f32, usize, usize),
    b: *const f32,
) {
    // SAFETY: the caller's promise.
    unsafe {
        for i in 0..count {
            let right = load::<S>(b.add(i * VECTORS * S::LANES));
            for r in 0..R {
                let left = S::splat(*a.add(r * a_row + i * a_col));
                for c in 0..VECTORS {
                    acc[r][c] = S::fma(left, right[c], acc[r][c]);
                }
            }
        }
    }
}

#[inline(always)]
unsafe fn load<S: Simd>(from: *const f32) -> [S::V; VECTORS] {
    // A loop instead of `from_fn`, whose closure may be compiled without the features of the variant.
    let mut v = [S::splat(0.0); VECTORS];
    for c in 0..VECTORS {
        // SAFETY: the caller's promise.
        v[c] = unsafe { S::load(from.add(c * S::LANES)) };
    }
    v
}

#[inline(always)]
unsafe fn store<S: Simd>(to: *mut f32, v: [S::V; VECTORS]) {
    for c in 0..VECTORS {
        // SAFETY: the caller's promise.
        unsafe { S::store(to.add(c * S::LANES), v[c]) }
    }
}

/// d = beta (v − e^G Sᵀk); the values follow.
struct Differences<'a, 'b>(&'a mut Tile<'b>, *const f32);

impl<S: Simd> Block<S> for Differences<'_, '_> {
    #[inline(always)]
    unsafe fn rows<const R: usize>(&mut self, first: usize) {
        let Differences(tile, values) = self;
        let dim = tile.cell.dim;
        // SAFETY: rows of keys, values and d; a tile of the state.
        unsafe {
            let mut acc = [[S::splat(0.0); VECTORS]; R];
            accumulate::<S, R>(&mut acc, dim, (tile.cell.k.as_ptr().add(first * dim), dim, 1), tile.state);
            for r in 0..R {
                let row = first + r;
                let (start, beta) = (S::splat(-tile.starts[row]), S::splat(tile.cell.beta[row]));
                let v = load::<S>(values.add(row * tile.width));
                for c in 0..VECTORS {
                    acc[r][c] = S::mul(beta, S::fma(start, acc[r][c], v[c]));
                }
                store::<S>(tile.d.as_mut_ptr().add(row * VECTORS * S::LANES), acc[r]);
            }
        }
    }
}

/// o = e^G Sᵀq + Σ qk d; where the outputs go follows.
struct Outputs<'a, 'b>(&'a mut Tile<'b>, *mut f32);

impl<S: Simd> Block<S> for Outputs<'_, '_> {
    #[inline(always)]
    unsafe fn rows<const R: usize>(&mut self, first: usize) {
        let Outputs(tile, outputs) = self;
        let dim = tile.cell.dim;
        // SAFETY: rows of queries and outputs; a tile of the state; rows of d up to the last of these.
        unsafe {
            let mut acc = [[S::splat(0.0); VECTORS]; R];
            accumulate::<S, R>(&mut acc, dim, (tile.cell.q.as_ptr().add(first * dim), dim, 1), tile.state);
            for r in 0..R {
                let start = S::splat(tile.starts[first + r]);
                for c in 0..VECTORS {
                    acc[r][c] = S::mul(acc[r][c], start);
                }
            }
            let qk = (tile.qk.as_ptr().add(first * GRID), GRID, 1);
            accumulate::<S, R>(&mut acc, first + R, qk, tile.d.as_ptr());
            for r in 0..R {
                store::<S>(outputs.add((first + r) * tile.width), acc[r]);
            }
        }
    }
}

/// d of some rows += kk · d of the first `before`.
struct Subtract<'a> {
    kk: &'a [f32],
    d: *mut f32,
    before: usize,
}

impl<S: Simd> Block<S> for Subtract<'_> {
    #[inline(always)]
    unsafe fn rows<const R: usize>(&mut self, first: usize) {
        let wide = VECTORS * S::LANES;
        // SAFETY: rows of kk and d; those before end before these.
        unsafe {
            let d = self.d.add(first * wide);
            let mut acc = [[S::splat(0.0); VECTORS]; R];
            for r in 0..R {
                acc[r] = load::<S>(d.add(r * wide));
            }
            let kk = (self.kk.as_ptr().add(first * GRID), GRID, 1);
            accumulate::<S, R>(&mut acc, self.before, kk, self.d);
            for r in 0..R {
                store::<S>(d.add(r * wide), acc[r]);
            }
        }
    }
}

/// Solves for d from top to bottom, a group of rows after the other.
#[inline(always)]
unsafe fn solve<S: Simd>(rows: usize, kk: &[f32], d: &mut [f32]) {
    for first in (0..rows).step_by(SOLVE) {
        let end = rows.min(first + SOLVE);
        let d = d.as_mut_ptr();
        // SAFETY: the rows are there; kk has GRID columns.
        unsafe {
            each_block::<S, _>(first..end, &mut Subtract { kk, d, before: first });
            let kk = kk.as_ptr().add(first * GRID + first);
            for c in 0..VECTORS {
                let d = d.add((first * VECTORS + c) * S::LANES);
                match end - first {
                    SOLVE => solve_group::<S>(SOLVE, kk, d),
                    count => solve_group::<S>(count, kk, d),
                }
            }
        }
    }
}

/// Solves a group for one vector of columns: as soon as a row is done it is subtracted from those below.
#[inline(always)]
unsafe fn solve_group<S: Simd>(count: usize, kk: *const f32, d: *mut f32) {
    let mut rows = [S::splat(0.0); SOLVE];
    // SAFETY: `count` rows of kk and d, at most SOLVE.
    unsafe {
        for t in 0..count {
            rows[t] = S::load(d.add(t * VECTORS * S::LANES));
        }
        for j in 0..count {
            for t in j + 1..count {
                rows[t] = S::fma(S::splat(*kk.add(t * GRID + j)), rows[j], rows[t]);
            }
        }
        for t in 0..count {
            S::store(d.add(t * VECTORS * S::LANES), rows[t]);
        }
    }
}

/// Writes the tile of the state after row `last`, which may be where it was.
#[inline(always)]
unsafe fn advance<S: Simd>(tile: &Tile, decays: &Decays, last: usize, decayed: &mut [f32], to: *mut f32) {
    let e = decays.row::<S>(last);
    let rows = tile.d.chunks_exact(VECTORS * S::LANES).zip(decayed.chunks_exact_mut(VECTORS * S::LANES));
    for ((from, to), e) in rows.zip(&e[..last + 1]) {
        from.iter().zip(to).for_each(|(from, to)| *to = from * e);
    }
    let (k, start) = (tile.cell.k.as_ptr(), decays.starts[last]);
    let dim = tile.cell.dim;
    let mut block = Advance { k, dim, count: last + 1, start, decayed, from: tile.state, to };
    // SAFETY: the caller's promise; a state has dim rows.
    unsafe { each_block::<S, _>(0..dim, &mut block) }
}

/// S = e^G S₀ + Σ k dᵀ, by rows of the state.
struct Advance<'a> {
    k: *const f32,
    dim: usize,
    count: usize,
    start: f32,
    decayed: &'a [f32],
    from: *const f32,
    to: *mut f32,
}

impl<S: Simd> Block<S> for Advance<'_> {
    #[inline(always)]
    unsafe fn rows<const R: usize>(&mut self, first: usize) {
        let wide = VECTORS * S::LANES;
        // SAFETY: rows of a tile, columns of the keys, rows of d.
        unsafe {
            let start = S::splat(self.start);
            let mut acc = [[start; VECTORS]; R];
            for r in 0..R {
                let from = load::<S>(self.from.add((first + r) * wide));
                for c in 0..VECTORS {
                    acc[r][c] = S::mul(acc[r][c], from[c]);
                }
            }
            let keys = (self.k.add(first), 1, self.dim);
            accumulate::<S, R>(&mut acc, self.count, keys, self.decayed.as_ptr());
            for r in 0..R {
                store::<S>(self.to.add((first + r) * wide), acc[r]);
            }
        }
    }
}

/// What one row does to a state, or some columns of it.
pub(crate) struct Step<'a> {
    /// Query, normalised and scaled.
    pub(crate) q: &'a [f32],
    /// Key, normalised.
    pub(crate) k: &'a [f32],
    /// e^g.
    pub(crate) decay: f32,
    /// beta.
    pub(crate) beta: f32,
}

/// The recurrence for one row: values become outputs. The states' rows may lie apart; `from` and `to` may be
/// the same.
///
/// With a = Sᵀk and b = Sᵀq of the state before: d = beta (v − e^g a), o = e^g b + (k · q) d. So the state is
/// read twice, the second time from a near cache, and written once.
///
/// # Safety
/// Both states must have a row for every number of the key, as long as `values`; nobody else may use `to`.
#[inline(always)]
pub(super) unsafe fn step<S: Simd>(
    step: &Step,
    (from, from_stride): Factor,
    (to, to_stride): (*mut f32, usize),
    values: &mut [f32],
) {
    assert_eq!(step.q.len(), step.k.len());
    let kq = dot::<S>(step.k, step.q);
    let mut first = 0;
    // SAFETY: columns inside values and hence the states.
    unsafe {
        while first < values.len() {
            let (from, to) = ((from.add(first), from_stride), (to.add(first), to_stride));
            let values = &mut values[first..];
            // The registers hold two sums of each column.
            first += match (S::LANES, values.len() / S::LANES) {
                (16, 8..) => step_columns::<S, 8>(step, kq, from, to, values.as_mut_ptr()),
                (_, 4..) => step_columns::<S, 4>(step, kq, from, to, values.as_mut_ptr()),
                (_, 1..) => step_columns::<S, 1>(step, kq, from, to, values.as_mut_ptr()),
                _ => step_column::<S>(step, kq, from, to, &mut values[0]),
            };
        }
    }
}

#[inline(always)]
unsafe fn step_columns<S: Simd, const C: usize>(
    step: &Step,
    kq: f32,
    (from, from_stride): Factor,
    (to, to_stride): (*mut f32, usize),
    values: *mut f32,
) -> usize {
    // SAFETY: the caller's promise.
    unsafe {
        let load = |row: usize, c: usize| S::load(from.add(row * from_stride + c * S::LANES));
        let (mut a, mut b) = ([S::splat(0.0); C], [S::splat(0.0); C]);
        for (row, (&k, &q)) in step.k.iter().zip(step.q).enumerate() {
            for c in 0..C {
                let s = load(row, c);
                a[c] = S::fma(s, S::splat(k), a[c]);
                b[c] = S::fma(s, S::splat(q), b[c]);
            }
        }
        let (decay, beta) = (S::splat(step.decay), S::splat(step.beta));
        let mut d = a;
        for c in 0..C {
            let value = values.add(c * S::LANES);
            d[c] = S::mul(beta, S::fma(S::splat(-step.decay), a[c], S::load(value)));
            S::store(value, S::fma(S::splat(kq), d[c], S::mul(decay, b[c])));
        }
        for (row, &k) in step.k.iter().enumerate() {
            for c in 0..C {
                let s = S::fma(S::splat(k), d[c], S::mul(decay, load(row, c)));
                S::store(to.add(row * to_stride + c * S::LANES), s);
            }
        }
    }
    C * S::LANES
}

#[inline(always)]
unsafe fn step_column<S: Simd>(
    step: &Step,
    kq: f32,
    (from, from_stride): Factor,
    (to, to_stride): (*mut f32, usize),
    value: &mut f32,
) -> usize {
    // SAFETY: the caller's promise.
    unsafe {
        let (mut a, mut b) = (0.0, 0.0);
        for (row, (&k, &q)) in step.k.iter().zip(step.q).enumerate() {
            let s = *from.add(row * from_stride);
            (a, b) = (S::fma1(s, k, a), S::fma1(s, q, b));
        }
        let d = step.beta * S::fma1(-step.decay, a, *value);
        *value = S::fma1(kq, d, step.decay * b);
        for (row, &k) in step.k.iter().enumerate() {
            *to.add(row * to_stride) = S::fma1(k, d, step.decay * *from.add(row * from_stride));
        }
    }
    1
}
#[cfg(test)]
mod tests;
