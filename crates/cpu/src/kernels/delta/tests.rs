//! The delta rule of every variant against the recurrence in f64.

use model::GRID;

use super::{Cell, Step, room};
use crate::kernels::testing::{numbers, tables};

/// Inputs of some rows of one head.
struct Rows {
    dim: usize,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    beta: [f32; GRID],
    log_decay: [f32; GRID],
}

impl Rows {
    fn new(rows: usize, dim: usize, decay: f32) -> Rows {
        let unit = |seed| {
            let mut x = numbers(GRID * dim, seed);
            for row in x.chunks_exact_mut(dim) {
                let norm = row.iter().map(|x| x * x).sum::<f32>().sqrt();
                row.iter_mut().for_each(|x| *x /= norm);
            }
            x
        };
        let (mut beta, mut log_decay) = ([0.0; GRID], [0.0; GRID]);
        beta.copy_from_slice(&numbers(GRID, 4));
        log_decay.copy_from_slice(&numbers(GRID, 5));
        beta[..rows].iter_mut().for_each(|x| *x = (*x + 1.0) / 2.0);
        log_decay[..rows].iter_mut().for_each(|x| *x = (*x - 1.0) / 2.0 * decay);
        Rows { dim, q: unit(1), k: unit(2), v: numbers(rows * dim, 3), beta, log_decay }
    }

    /// Outputs, and the states after every row.
    fn exact(&self, state: &[f32]) -> (Vec<f64>, Vec<Vec<f64>>) {
        let dim = self.dim;
        let mut s: Vec<f64> = state.iter().map(|&s| f64::from(s)).collect();
        let (mut outputs, mut states) = (Vec::new(), Vec::new());
        for (t, v) in self.v.chunks_exact(dim).enumerate() {
            let at = |x: &[f32], i: usize| f64::from(x[t * dim + i]);
            s.iter_mut().for_each(|s| *s *= f64::from(self.log_decay[t]).exp());
            let column =
                |s: &[f64], x: &[f32], c: usize| -> f64 { (0..dim).map(|i| s[i * dim + c] * at(x, i)).sum() };
            let d: Vec<f64> = (0..dim)
                .map(|c| f64::from(self.beta[t]) * (f64::from(v[c]) - column(&s, &self.k, c)))
                .collect();
            for i in 0..dim {
                (0..dim).for_each(|c| s[i * dim + c] += at(&self.k, i) * d[c]);
            }
            outputs.extend((0..dim).map(|c| column(&s, &self.q, c)));
            states.push(s.clone());
        }
        (outputs, states)
    }
}

fn relative(found: impl IntoIterator<Item = f32>, exact: &[f64]) -> f64 {
    let found: Vec<f64> = found.into_iter().map(f64::from).collect();
    assert_eq!(found.len(), exact.len());
    let error: f64 = found.iter().zip(exact).map(|(a, b)| (a - b) * (a - b)).sum();
    (error / exact.iter().map(|b| b * b).sum::<f64>()).sqrt()
}

#[test]
fn a_cell_is_the_recurrence() {
    for kernels in tables() {
        for (rows, dim, decay) in
            [(64, 128, 0.1), (64, 128, 30.0), (63, 64, 1.0), (17, 20, 0.0), (2, 5, 0.5), (33, 72, 27.6)]
        {
            let (wide, input) = (kernels.state_columns, Rows::new(rows, dim, decay));
            let width = dim.next_multiple_of(wide);
            let before = numbers(dim * dim, 6);
            let (outputs, states) = input.exact(&before);
            // Products with garbage where nobody should look.
            let products = |x: &[f32]| -> Vec<f32> {
                let dot = |t: usize, j: usize| (0..dim).map(|i| x[t * dim + i] * input.k[j * dim + i]).sum();
                (0..rows * GRID)
                    .map(|at| if at % GRID <= at / GRID { dot(at / GRID, at % GRID) } else { f32::NAN })
                    .collect()
            };
            let (qk, kk) = (products(&input.q), products(&input.k));
            let tiled = |row: usize, c: usize| (c / wide * dim + row) * wide + c % wide;
            let mut state = vec![0.0; dim * width];
            let mut values = vec![0.0; rows * width];
            for (at, &s) in before.iter().enumerate() {
                state[tiled(at / dim, at % dim)] = s;
            }
            for (to, from) in values.chunks_exact_mut(width).zip(input.v.chunks_exact(dim)) {
                to[..dim].copy_from_slice(from);
            }
            let cell = Cell {
                rows,
                dim,
                q: &input.q,
                k: &input.k,
                qk: &qk,
                kk: &kk,
                beta: &input.beta,
                log_decay: &input.log_decay,
            };
            let (mut first, mut last) = (vec![0.0; dim * dim], vec![0.0; dim * dim]);
            let mut snapshots = [(rows / 2, &mut first[..]), (rows - 1, &mut last[..])];
            let mut work = vec![f32::NAN; room(dim, wide)];
            (kernels.delta_cell)(&cell, &mut work, &mut values, &mut state, &mut snapshots);

            let what = format!("{}: {rows} rows of {dim}, decay {decay}", kernels.variant);
            let found: Vec<f32> = (0..dim * dim).map(|at| state[tiled(at / dim, at % dim)]).collect();
            assert_eq!(found, last, "{what}");
            let rows_of = |x: &[f32]| -> Vec<f32> {
                x.chunks_exact(width).flat_map(|row| row[..dim].to_vec()).collect()
            };
            assert!(relative(rows_of(&values), &outputs) < 2e-6, "{what}: outputs");
            assert!(relative(found, &states[rows - 1]) < 2e-6, "{what}: state");
            assert!(relative(first, &states[rows / 2]) < 2e-6, "{what}: snapshot");
            let padding = values.chunks_exact(width).flat_map(|row| &row[dim..]);
            assert!(padding.into_iter().all(|&x| x == 0.0), "{what}: padding");
        }
    }
}

#[test]
fn a_step_is_the_recurrence_and_the_same_in_tiles() {
    for kernels in tables() {
        for dim in [1, 20, 64, 100, 128] {
            let input = Rows::new(1, dim, 1.0);
            let before = numbers(dim * dim, 6);
            let (outputs, states) = input.exact(&before);
            let (decay, beta) = (input.log_decay[0].exp(), input.beta[0]);
            let step = Step { q: &input.q[..dim], k: &input.k[..dim], decay, beta };
            let (mut after, mut values) = (vec![0.0; dim * dim], input.v.clone());
            // SAFETY: two states of dim rows of dim numbers.
            unsafe {
                (kernels.delta_step)(&step, (before.as_ptr(), dim), (after.as_mut_ptr(), dim), &mut values)
            };
            let what = format!("{}: {dim}", kernels.variant);
            assert!(relative(values.iter().copied(), &outputs) < 2e-6, "{what}: output");
            assert!(relative(after.iter().copied(), &states[0]) < 2e-6, "{what}: state");

            // Eight columns at a time, in place.
            let (mut place, mut parts) = (before.clone(), input.v.clone());
            for (i, part) in parts.chunks_mut(8).enumerate() {
                let start = place[i * 8..].as_mut_ptr();
                // SAFETY: dim rows of these columns.
                unsafe { (kernels.delta_step)(&step, (start, dim), (start, dim), part) };
            }
            assert!(relative(parts.iter().copied(), &outputs) < 2e-6, "{what}: output of parts");
            assert!(relative(place.iter().copied(), &states[0]) < 2e-6, "{what}: state of parts");
        }
    }
}
