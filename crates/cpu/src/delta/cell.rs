//! The gated delta rule over the rows of one cell of the 64-position grid, for one head.
//!
//! Row t, with decay e^g, key k, value v, query q:
//!
//! ```text
//! S ← e^g S;  d = beta (v − Sᵀk);  S ← S + k dᵀ;  o = Sᵀ q
//! ```
//!
//! A cell of one row does just that. For more rows the steps are unrolled (the WY form). With G the sums of g
//! from the start of the cell, S₀ the state before it, and E[t, j] = e^(G_t − G_j):
//!
//! ```text
//! d_t + Σ_{j<t} beta_t E[t, j] (k_t · k_j) d_j = beta_t (v_t − e^G_t S₀ᵀ k_t)      solved from top to bottom
//! o_t = e^G_t S₀ᵀ q_t + Σ_{j≤t} E[t, j] (q_t · k_j) d_j
//! S after t = e^G_t S₀ + Σ_{j≤t} E[t, j] k_j d_jᵀ
//! ```
//!
//! Only differences of G with t ≥ j occur, so no exponential overflows; they are taken in double precision,
//! because a difference of large sums must still be exact. Row t depends on rows up to t alone, in an order
//! that does not depend on how many follow.

use model::GRID;

use crate::kernels::Kernels;
use crate::memory::Aligned;
use crate::open::carve;

/// Rows solved together before the rest of their group is subtracted.
const SOLVE: usize = 16;

/// What scales a row's update.
#[derive(Clone, Copy)]
pub(super) struct Gates {
    /// g: the logarithm of the decay, at most 0.
    pub(super) log_decay: f32,
    /// beta.
    pub(super) beta: f32,
}

/// A cell at work.
pub(super) struct Cell<'a> {
    kernels: &'static Kernels,
    dim: usize,
    rows: usize,
    beta: [f32; GRID],
    log_decay: [f32; GRID],
    /// G.
    sums: [f64; GRID],
    /// [rows][dim] each.
    q: &'a mut [f32],
    k: &'a mut [f32],
    v: &'a mut [f32],
    d: &'a mut [f32],
    out: &'a mut [f32],
    /// E: [rows][GRID].
    decays: &'a mut [f32],
    /// [rows][GRID].
    scores: &'a mut [f32],
    /// Keys as columns: [dim][GRID].
    columns: &'a mut [f32],
    solved: bool,
}

impl<'a> Cell<'a> {
    /// An empty cell in `work`.
    pub(super) fn new(kernels: &'static Kernels, dim: usize, work: &'a mut Aligned) -> Cell<'a> {
        let (matrix, square) = (GRID * dim, GRID * GRID);
        let lens = [matrix, matrix, matrix, matrix, matrix, square, square, matrix];
        work.reserve(lens.iter().map(|len| len.next_multiple_of(16)).sum());
        let [q, k, v, d, out, decays, scores, columns] = carve(work, lens);
        let (beta, log_decay, sums) = ([0.0; GRID], [0.0; GRID], [0.0; GRID]);
        let (rows, solved) = (0, false);
        Cell { kernels, dim, rows, beta, log_decay, sums, q, k, v, d, out, decays, scores, columns, solved }
    }

    /// Appends a row: query, key, value.
    pub(super) fn push(&mut self, (q, k, v): (&[f32], &[f32], &[f32]), gates: Gates) {
        let (row, at) = (self.rows, self.rows * self.dim);
        self.q[at..at + self.dim].copy_from_slice(q);
        self.k[at..at + self.dim].copy_from_slice(k);
        self.v[at..at + self.dim].copy_from_slice(v);
        self.beta[row] = gates.beta;
        self.log_decay[row] = gates.log_decay;
        let before = if row > 0 { self.sums[row - 1] } else { 0.0 };
        self.sums[row] = before + f64::from(gates.log_decay);
        self.rows += 1;
    }

    /// Output of row `row`, after [`Cell::run`].
    pub(super) fn output(&self, row: usize) -> &[f32] {
        &self.out[row * self.dim..][..self.dim]
    }

    /// Advances `state` by the whole cell and computes the outputs.
    pub(super) fn run(&mut self, state: &mut [f32]) {
        if self.rows == 1 {
            return self.step(state);
        }
        self.solve(state);
        self.outputs(state);
        self.advance(self.rows - 1, state);
    }

    /// Writes the state after row `row` to `to`, given the state before the cell; before [`Cell::run`]. It is
    /// the state of a cell that ends with that row, unless that is the first.
    pub(super) fn state_after(&mut self, row: usize, state: &[f32], to: &mut [f32]) {
        to.copy_from_slice(state);
        if self.rows == 1 {
            return self.step(to);
        }
        self.solve(state);
        self.advance(row, to);
    }

    /// The only row, as a recurrence.
    fn step(&mut self, state: &mut [f32]) {
        let row = ..self.dim;
        let qkv = (&self.q[row], &self.k[row], &self.v[row]);
        let mut decay = [self.log_decay[0]];
        (self.kernels.exp)(&mut decay);
        let (d, out) = (&mut self.d[row], &mut self.out[row]);
        (self.kernels.delta_step)(state, qkv, (decay[0], self.beta[0]), d, out);
    }

    /// E and d of all rows.
    fn solve(&mut self, state: &[f32]) {
        if self.solved {
            return;
        }
        self.solved = true;
        let (rows, dim) = (self.rows, self.dim);
        for t in 0..rows {
            let exponents = &mut self.decays[t * GRID..][..t + 1];
            for (e, sum) in exponents.iter_mut().zip(&self.sums) {
                *e = (self.sums[t] - sum) as f32;
            }
            (self.kernels.exp)(exponents);
        }
        let starts = self.starts();
        // SAFETY: matrices of GRID rows, of which `rows` are used; the state is [dim][dim].
        unsafe {
            let (k, d) = (self.k.as_ptr(), self.d.as_mut_ptr());
            (self.kernels.sum_form)((rows, dim, dim), (k, dim), (state.as_ptr(), dim), (d, dim), false);
        }
        for (t, &start) in starts[..rows].iter().enumerate() {
            let row = t * dim..(t + 1) * dim;
            for (d, v) in self.d[row.clone()].iter_mut().zip(&self.v[row]) {
                *d = self.beta[t] * (v - start * *d);
            }
        }
        self.key_scores(false);
        for t in 0..rows {
            let decays = &self.decays[t * GRID..][..t];
            for (score, e) in self.scores[t * GRID..].iter_mut().zip(decays) {
                *score *= -self.beta[t] * e;
            }
        }
        for group in (0..rows).step_by(SOLVE) {
            let end = rows.min(group + SOLVE);
            self.subtract(group..end, 0..group);
            (group + 1..end).for_each(|t| self.subtract(t..t + 1, group..t));
        }
    }

    /// d of the rows `to` += (negative) scores · d of the rows `from`, which lie before them.
    fn subtract(&mut self, to: std::ops::Range<usize>, from: std::ops::Range<usize>) {
        let dim = self.dim;
        let (before, behind) = self.d.split_at_mut(to.start * dim);
        let scores = &self.scores[to.start * GRID + from.start..];
        let shape = (to.len(), from.len(), dim);
        let b = &before[from.start * dim..];
        // SAFETY: scores have GRID columns; `from` lies before `to`, and both inside the cell.
        unsafe {
            let out = behind.as_mut_ptr();
            (self.kernels.sum_form)(shape, (scores.as_ptr(), GRID), (b.as_ptr(), dim), (out, dim), true);
        }
    }

    /// Outputs of all rows, after [`Cell::solve`].
    fn outputs(&mut self, state: &[f32]) {
        let (rows, dim) = (self.rows, self.dim);
        // SAFETY: as in `solve`.
        unsafe {
            let (q, out) = (self.q.as_ptr(), self.out.as_mut_ptr());
            (self.kernels.sum_form)((rows, dim, dim), (q, dim), (state.as_ptr(), dim), (out, dim), false);
        }
        let starts = self.starts();
        self.key_scores(true);
        for (t, &start) in starts[..rows].iter().enumerate() {
            self.out[t * dim..(t + 1) * dim].iter_mut().for_each(|o| *o *= start);
            let (scores, beyond) = self.scores[t * GRID..(t + 1) * GRID].split_at_mut(t + 1);
            scores.iter_mut().zip(&self.decays[t * GRID..]).for_each(|(score, e)| *score *= e);
            beyond.fill(0.0);
        }
        for group in (0..rows).step_by(SOLVE) {
            let end = rows.min(group + SOLVE);
            let scores = &self.scores[group * GRID..];
            let out = &mut self.out[group * dim..];
            // SAFETY: scores have GRID columns; d and out have `rows` rows.
            unsafe {
                let (a, b, out) = (scores.as_ptr(), self.d.as_ptr(), out.as_mut_ptr());
                (self.kernels.sum_form)((end - group, end, dim), (a, GRID), (b, dim), (out, dim), true);
            }
        }
    }

    /// Makes `state`, that before the cell, the state after row `last`; after [`Cell::solve`].
    fn advance(&mut self, last: usize, state: &mut [f32]) {
        let (rows, dim) = (last + 1, self.dim);
        let decays = &self.decays[last * GRID..][..rows];
        for (j, key) in self.k.chunks_exact(dim).take(rows).enumerate() {
            for (i, k) in key.iter().enumerate() {
                self.columns[i * GRID + j] = k * decays[j];
            }
        }
        let start = self.starts()[last];
        state.iter_mut().for_each(|s| *s *= start);
        // SAFETY: columns are [dim][GRID], d has `rows` rows, the state is [dim][dim].
        unsafe {
            let (a, b, out) = (self.columns.as_ptr(), self.d.as_ptr(), state.as_mut_ptr());
            (self.kernels.sum_form)((dim, rows, dim), (a, GRID), (b, dim), (out, dim), true);
        }
    }

    /// scores = k kᵀ, or q kᵀ.
    fn key_scores(&mut self, of_queries: bool) {
        let (rows, dim) = (self.rows, self.dim);
        let x = if of_queries { &self.q[..] } else { &self.k[..] };
        let mut starts = [std::ptr::null(); GRID];
        for (start, row) in starts.iter_mut().zip(x.chunks_exact(dim)) {
            *start = row.as_ptr();
        }
        let n = rows.next_multiple_of(4);
        // SAFETY: keys have GRID rows, at least n; scores have as many columns.
        unsafe {
            let (w, out) = (self.k.as_ptr(), self.scores.as_mut_ptr());
            (self.kernels.dot_form)(&starts[..rows], (w, dim), (n, dim), (out, GRID), false);
        }
    }

    /// e^G of every row.
    fn starts(&self) -> [f32; GRID] {
        let mut starts = self.sums.map(|sum| sum as f32);
        (self.kernels.exp)(&mut starts);
        starts
    }
}
