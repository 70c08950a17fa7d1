//! Convolution and gates of every variant against f64.

use super::Convolution;
use crate::kernels::testing::tables;

#[test]
fn convolutions_of_odd_shapes() {
    for kernels in tables() {
        for (rows, taps, dim) in [(1, 4, 128), (64, 4, 20), (5, 1, 33), (7, 3, 16), (3, 6, 7)] {
            let number = |i: usize| ((i * 7919) % 211) as f32 / 60.0 - 1.7;
            let samples: Vec<Vec<f32>> =
                (0..rows + taps - 1).map(|s| (0..dim).map(|i| number(s * dim + i)).collect()).collect();
            let starts: Vec<*const f32> = samples.iter().map(|row| row.as_ptr()).collect();
            let weights: Vec<f32> = (0..taps * dim).map(|i| number(3 * i + 1) / 2.0).collect();
            for norm in [None, Some((1e-6, 0.25))] {
                let conv = Convolution { weights: (weights.as_ptr(), dim), taps, dim, norm };
                let stride = dim + 3;
                let mut out = vec![9.0; rows * stride];
                // SAFETY: rows of dim numbers everywhere.
                unsafe { (kernels.convolve)(&conv, &starts, (out.as_mut_ptr(), stride)) };
                for (row, out) in out.chunks_exact(stride).enumerate() {
                    let exact: Vec<f64> = (0..dim)
                        .map(|i| {
                            let product = |tap: usize| {
                                f64::from(samples[row + tap][i]) * f64::from(weights[tap * dim + i])
                            };
                            let x: f64 = (0..taps).map(product).sum();
                            x / (1.0 + (-x).exp())
                        })
                        .collect();
                    let squares: f64 = exact.iter().map(|x| x * x).sum();
                    let scale = norm.map_or(1.0, |(eps, factor): (f32, f32)| {
                        f64::from(factor) / (squares + f64::from(eps)).sqrt()
                    });
                    for (found, exact) in out.iter().zip(&exact) {
                        let error = (f64::from(*found) - exact * scale).abs();
                        assert!(error < 3e-6, "{}: {rows} {taps} {dim}: {error:e}", kernels.variant);
                    }
                    assert!(out[dim..].iter().all(|&x| x == 9.0), "behind the row");
                }
            }
        }
    }
}

#[test]
fn gates_are_accurate_everywhere() {
    let inputs: Vec<f32> =
        (-480..480).map(|i| i as f32 / 8.0).chain([-100.0, -88.0, 88.0, 100.0].repeat(4)).collect();
    for kernels in tables() {
        let (mut beta, mut alpha) = (inputs.clone(), inputs.clone());
        (kernels.gates)(&mut beta, &mut alpha, (-0.75, 0.5));
        for ((x, beta), alpha) in inputs.iter().zip(&beta).zip(&alpha) {
            let x = f64::from(*x);
            let exact = 1.0 / (1.0 + (-x).exp());
            assert!((f64::from(*beta) - exact).abs() < 1e-6 * exact + 1e-37, "sigmoid of {x}: {beta}");
            let exact = -0.75 * if x + 0.5 > 50.0 { x + 0.5 } else { (x + 0.5).exp().ln_1p() };
            assert!(
                (f64::from(*alpha) - exact).abs() < 1e-6 * exact.abs() + 1e-37,
                "softplus of {x}: {alpha}"
            );
        }
    }
}
