//! Row kernels of every variant of this machine against f64.

use crate::kernels::testing::tables;

#[test]
fn exponentials_are_accurate_and_bounded() {
    for kernels in tables() {
        let inputs: Vec<f32> = (-8720..8790).map(|i| i as f32 / 100.0 + 0.001_7).collect();
        let mut found = inputs.clone();
        (kernels.exp)(&mut found);
        for (x, y) in inputs.iter().zip(&found) {
            let exact = f64::from(*x).exp();
            let error = (f64::from(*y) - exact).abs() / exact;
            assert!(error < 2.5e-7, "{}: e^{x} off by {error:e}", kernels.variant);
        }
        let mut edges = [0.0, -0.0, -87.4, -1e30, f32::NEG_INFINITY, 1e30, f32::INFINITY, f32::NAN];
        (kernels.exp)(&mut edges);
        assert_eq!(edges[..5], [1.0, 1.0, 0.0, 0.0, 0.0], "{}", kernels.variant);
        assert!(edges[5] > 1e38 && edges[5].is_finite() && edges[6] == edges[5] && edges[7].is_nan());
    }
}

#[test]
fn an_online_softmax_is_that_of_all_blocks() {
    let scores: Vec<f32> = (0..150).map(|i| ((i * 37) % 101) as f32 / 5.0 - 9.0).collect();
    let exact: f64 = scores.iter().map(|&s| f64::from(s / 4.0).exp()).sum();
    for kernels in tables() {
        let (mut largest, mut sum) = (f32::NEG_INFINITY, 0.0);
        for block in scores.chunks(64) {
            let (new, correction, part) = (kernels.softmax_block)(&mut block.to_vec(), 0.25, largest);
            (largest, sum) = (new, sum * correction + part);
        }
        let found = f64::from(sum) * f64::from(largest).exp();
        assert!((found / exact - 1.0).abs() < 1e-6, "{}: {found} {exact}", kernels.variant);
    }
}

#[test]
fn norms_and_gates_of_odd_lengths() {
    let numbers = |len: usize, seed: usize| -> Vec<f32> {
        (0..len).map(|i| ((i * 7 + seed * 13) % 29) as f32 / 10.0 - 1.4).collect()
    };
    let silu = |x: f32| f64::from(x) / (1.0 + (-f64::from(x)).exp());
    for kernels in tables() {
        for len in [1, 5, 16, 33, 128] {
            let (x, w, z) = (numbers(len, 1), numbers(len, 2), numbers(len, 3));
            let squares: f64 = x.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
            let rms = (squares / len as f64 + 1e-6).sqrt();
            let near = |found: f32, exact: f64| (f64::from(found) - exact).abs() < 3e-6;
            let mut normed = vec![0.0; len];
            (kernels.rms_norm)(&x, &w, 1e-6, &mut normed);
            let mut gated = vec![0.0; len];
            (kernels.gated_norm)(&x, &w, 1e-6, &z, &mut gated);
            let mut product = x.clone();
            (kernels.swiglu)(&mut product, &z);
            for i in 0..len {
                let exact = f64::from(x[i]) / rms * f64::from(w[i]);
                assert!(near(normed[i], exact) && near(gated[i], exact * silu(z[i])), "{i} of {len}");
                assert!(near(product[i], silu(x[i]) * f64::from(z[i])));
            }
        }
    }
}
