//! The gated delta rule of one value head.
//!
//! With state S [key, value], decay exp(g) ≤ 1 and step beta, a token does
//!
//! ```text
//! S ← exp(g) S        d = beta (v − Sᵀk)        S ← S + k dᵀ        o = Sᵀq
//! ```
//!
//! [`sequential`] does just that. [`chunked`] handles up to 64 tokens at once. Unrolled from the state S₀
//! before the chunk, with G_i = g_0 + … + g_i:
//!
//! ```text
//! d_i = beta_i (v_i − exp(G_i) S₀ᵀk_i − Σ_{j<i} exp(G_i − G_j) (k_j·k_i) d_j)
//! o_i = exp(G_i) S₀ᵀq_i + Σ_{j≤i} exp(G_i − G_j) (k_j·q_i) d_j
//! S   = exp(G_n) S₀ + Σ_j exp(G_n − G_j) k_j d_jᵀ
//! ```
//!
//! The first line is the unit lower triangular system of the WY representation, solved by forward
//! substitution. Only differences G_i − G_j with j ≤ i are exponentiated: they are never positive, so that
//! nothing overflows however fast a state decays. There is no padding: a short chunk has fewer rows.

use crate::math::{add_scaled, dot};

/// Tokens of one value head, with the query and key of its key head.
#[derive(Debug)]
pub(crate) struct HeadRows {
    /// Numbers in a query, key or value.
    pub dim: usize,
    /// Normed and scaled queries: [rows, dim].
    pub q: Vec<f32>,
    /// Normed keys: [rows, dim].
    pub k: Vec<f32>,
    /// Values: [rows, dim].
    pub v: Vec<f32>,
    /// Logarithm of each token's decay, ≤ 0.
    pub g: Vec<f64>,
    /// Size of each token's step.
    pub beta: Vec<f64>,
}

impl HeadRows {
    fn q(&self, row: usize) -> &[f32] {
        &self.q[row * self.dim..][..self.dim]
    }

    fn k(&self, row: usize) -> &[f32] {
        &self.k[row * self.dim..][..self.dim]
    }

    fn v(&self, row: usize) -> impl Iterator<Item = f64> {
        self.v[row * self.dim..][..self.dim].iter().map(|&v| f64::from(v))
    }
}

/// Token by token. `state` is [dim, dim]; returns o: [rows, dim].
pub(crate) fn sequential(state: &mut [f32], head: &HeadRows) -> Vec<f32> {
    let mut out = Vec::with_capacity(head.v.len());
    for row in 0..head.g.len() {
        let decay = head.g[row].exp();
        state.iter_mut().for_each(|s| *s = (decay * f64::from(*s)) as f32);
        let mut d = transposed_times(state, head.k(row));
        d.iter_mut().zip(head.v(row)).for_each(|(d, v)| *d = head.beta[row] * (v - *d));
        for (s, &k) in state.chunks_exact_mut(head.dim).zip(head.k(row)) {
            s.iter_mut().zip(&d).for_each(|(s, d)| *s = (f64::from(*s) + f64::from(k) * d) as f32);
        }
        out.extend(transposed_times(state, head.q(row)).iter().map(|&o| o as f32));
    }
    out
}

/// All rows at once. `state` is [dim, dim]; returns o: [rows, dim].
pub(crate) fn chunked(state: &mut [f32], head: &HeadRows) -> Vec<f32> {
    let dim = head.dim;
    let total: Vec<f64> = (head.g.iter())
        .scan(0.0, |sum, g| {
            *sum += g;
            Some(*sum)
        })
        .collect();
    // What is left at token `to` of what token `from` wrote.
    let left = |from: usize, to: usize| (total[to] - total[from]).exp();

    let mut d: Vec<Vec<f64>> = Vec::with_capacity(total.len());
    for (i, g) in total.iter().enumerate() {
        let mut new: Vec<f64> = head.v(i).collect();
        add_scaled(&mut new, -g.exp(), transposed_times(state, head.k(i)));
        for (j, earlier) in d.iter().enumerate() {
            let weight = left(j, i) * dot(head.k(j), head.k(i));
            add_scaled(&mut new, -weight, earlier.iter().copied());
        }
        new.iter_mut().for_each(|d| *d *= head.beta[i]);
        d.push(new);
    }

    let mut out = Vec::with_capacity(head.v.len());
    for (i, g) in total.iter().enumerate() {
        let mut o = vec![0.0; dim];
        add_scaled(&mut o, g.exp(), transposed_times(state, head.q(i)));
        for (j, d) in d[..=i].iter().enumerate() {
            add_scaled(&mut o, left(j, i) * dot(head.k(j), head.q(i)), d.iter().copied());
        }
        out.extend(o.iter().map(|&o| o as f32));
    }

    let last = total.len() - 1;
    for (i, s) in state.chunks_exact_mut(dim).enumerate() {
        let mut new = vec![0.0; dim];
        add_scaled(&mut new, total[last].exp(), s.iter().map(|&s| f64::from(s)));
        for (j, d) in d.iter().enumerate() {
            add_scaled(&mut new, left(j, last) * f64::from(head.k(j)[i]), d.iter().copied());
        }
        s.iter_mut().zip(&new).for_each(|(s, &new)| *s = new as f32);
    }
    out
}

/// stateᵀ · x: [dim].
fn transposed_times(state: &[f32], x: &[f32]) -> Vec<f64> {
    let mut sum = vec![0.0; x.len()];
    for (row, &x) in state.chunks_exact(x.len()).zip(x) {
        add_scaled(&mut sum, f64::from(x), row.iter().map(|&s| f64::from(s)));
    }
    sum
}
