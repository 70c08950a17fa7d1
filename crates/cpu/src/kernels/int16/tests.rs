//! Attention on integers of every variant against f64, and against itself among other rows.

use half::f16;
use model::GRID;

use super::{Block, Row, TILE};
use crate::kernels::Kernels;
use crate::kernels::testing::{numbers, tables};

/// Keys, values and queries of some positions of one head; a query for each of the last positions.
struct Head {
    dim: usize,
    keys: Vec<f16>,
    values: Vec<f16>,
    queries: Vec<f32>,
}

impl Head {
    fn new(positions: usize, dim: usize) -> Head {
        let half = |seed: u32, spread: bool| -> Vec<f16> {
            let numbers = numbers(positions * dim, seed).into_iter().enumerate();
            // Values of very different size from position to position.
            let size = |i: usize| if spread { [1.0, 0.01, 3.0][i / dim % 3] } else { 1.5 };
            numbers.map(|(i, x)| f16::from_f32(x * size(i))).collect()
        };
        Head {
            dim,
            keys: half(1, false),
            values: half(2, true),
            queries: numbers(positions * dim, 3).into_iter().map(|x| x * 4.0).collect(),
        }
    }

    /// Outputs of the rows `first ..` of `seen` positions, all at once: [rows][dim].
    fn attend(&self, kernels: &Kernels, first: usize, seen: usize) -> Vec<f32> {
        let (functions, dim, rows) = (kernels.int_attention, self.dim, seen - first);
        let width = dim.next_multiple_of(TILE);
        let (mut keys, mut values) = (vec![77; GRID * width], vec![77; GRID * width]);
        let (mut queries, mut weights) = (vec![77; rows * width], vec![77; rows * GRID]);
        let mut block = Block::new(width, &mut keys, &mut values);
        let scale = 1.0 / (dim as f32).sqrt();
        let of_rows = self.queries[first * dim..].chunks_exact(dim).zip(queries.chunks_exact_mut(width));
        let mut state: Vec<Row> =
            of_rows.map(|(x, query)| Row::new((functions.round)(x, query) * scale)).collect();
        let mut out = vec![0.0; rows * width];
        for start in (0..seen).step_by(GRID) {
            let part = start * dim..seen.min(start + GRID) * dim;
            (functions.pack)(&self.keys[part.clone()], &self.values[part], dim, &mut block);
            state.iter_mut().enumerate().for_each(|(i, row)| row.seen = GRID.min(first + i + 1 - start));
            (functions.weigh)(&block, &queries, &mut state, &mut weights);
            (functions.sum)(&block, &state, &weights, &mut out);
        }
        let rows = out.chunks_exact(width).zip(&state);
        rows.flat_map(|(out, row)| out[..dim].iter().map(|x| x / row.sum).collect::<Vec<_>>()).collect()
    }

    /// Output of the row at `position`.
    fn exact(&self, position: usize) -> Vec<f64> {
        let row = |x: &[f16], at: usize| -> Vec<f64> {
            x[at * self.dim..(at + 1) * self.dim].iter().map(|x| x.to_f64()).collect()
        };
        let query = &self.queries[position * self.dim..];
        let score = |at: usize| -> f64 {
            let key = row(&self.keys, at);
            key.iter().zip(query).map(|(k, &q)| k * f64::from(q)).sum::<f64>() / (self.dim as f64).sqrt()
        };
        let weights: Vec<f64> = (0..=position).map(|at| score(at).exp()).collect();
        let total: f64 = weights.iter().sum();
        let mut out = vec![0.0; self.dim];
        for (at, weight) in weights.iter().enumerate() {
            out.iter_mut().zip(row(&self.values, at)).for_each(|(out, v)| *out += weight / total * v);
        }
        out
    }
}

#[test]
fn rows_of_every_variant_are_accurate() {
    for kernels in tables() {
        for (positions, dim) in [(1, 256), (2, 20), (63, 64), (64, 72), (65, 33), (130, 256), (201, 128)] {
            let head = Head::new(positions, dim);
            let first = (positions - 1) / GRID * GRID;
            let found = head.attend(kernels, first, positions);
            for (position, found) in (first..positions).zip(found.chunks_exact(dim)) {
                let exact = head.exact(position);
                let error: f64 = found.iter().zip(&exact).map(|(a, b)| (f64::from(*a) - b).powi(2)).sum();
                let relative = (error / exact.iter().map(|x| x * x).sum::<f64>()).sqrt();
                assert!(
                    relative < 1e-3,
                    "{}: {positions} of {dim}: row {position} is off by {relative:e}",
                    kernels.variant
                );
            }
        }
    }
}

#[test]
fn a_row_has_the_same_bits_whatever_follows() {
    for kernels in tables() {
        let head = Head::new(192, 96);
        let together = head.attend(kernels, 128, 192);
        for (i, expected) in together.chunks_exact(96).enumerate() {
            let alone = head.attend(kernels, 128 + i, 129 + i);
            assert!(alone == expected, "{}: row {i}", kernels.variant);
        }
    }
}

#[test]
fn what_is_no_number_is_not_lost() {
    for kernels in tables() {
        let heads = [f16::NAN, f16::INFINITY].map(|bad| {
            let mut head = Head::new(70, 64);
            head.values[66 * 64 + 5] = bad;
            head
        });
        let [mut key, mut query] = [(); 2].map(|()| Head::new(70, 64));
        key.keys[66 * 64 + 5] = f16::NAN;
        query.queries[66 * 64 + 5] = f32::NAN;
        for head in heads.into_iter().chain([key, query]) {
            let out = head.attend(kernels, 64, 70);
            let finite = |row: usize| out[row * 64..(row + 1) * 64].iter().all(|x| x.is_finite());
            assert!(finite(0) && finite(1) && !finite(2), "{}", kernels.variant);
        }
    }
}
