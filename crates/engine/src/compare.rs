//! How far two rows of logits, or two matrices, are from one another.

/// Natural logarithm of the sum of exponentials, in f64.
pub fn log_sum_exp(logits: &[f32]) -> f64 {
    let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&x| f64::from(x - top).exp()).sum();
    f64::from(top) + sum.ln()
}

/// Index of the largest value, the lowest one of equals.
///
/// # Panics
/// If there are none.
pub fn argmax(values: &[f32]) -> usize {
    (0..values.len())
        .reduce(|best, i| if values[i] > values[best] { i } else { best })
        .expect("a row has values")
}

/// Kullback-Leibler divergence in nats from the distribution of `base` to that of `other`; infinite if one of
/// them is none because a logit is not a number.
pub fn kl(base: &[f32], other: &[f32]) -> f64 {
    let (norm_base, norm_other) = (log_sum_exp(base), log_sum_exp(other));
    let terms = base.iter().zip(other).map(|(&b, &o)| {
        let log_base = f64::from(b) - norm_base;
        log_base.exp() * (log_base - (f64::from(o) - norm_other))
    });
    let sum: f64 = terms.sum();
    // Rounding may leave a tiny negative sum where the two are equal.
    if sum.is_nan() { f64::INFINITY } else { sum.max(0.0) }
}

/// Agreement of logits over many positions.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Agreement {
    /// Positions compared.
    pub positions: usize,
    /// Positions whose most likely token is the same.
    pub same_top: usize,
    /// Sum of the divergences, nats.
    pub kl_sum: f64,
    /// Largest divergence, nats.
    pub kl_max: f64,
    /// Largest difference of a logit.
    pub max_error: f64,
}

impl Agreement {
    /// Adds one position.
    pub fn add(&mut self, base: &[f32], other: &[f32]) {
        let divergence = kl(base, other);
        self.positions += 1;
        self.same_top += usize::from(argmax(base) == argmax(other));
        self.kl_sum += divergence;
        self.kl_max = self.kl_max.max(divergence);
        let errors = base.iter().zip(other).map(|(&b, &o)| f64::from((b - o).abs()));
        self.max_error = errors.fold(self.max_error, f64::max);
    }

    /// Mean divergence, nats a position.
    pub fn kl_mean(&self) -> f64 {
        self.kl_sum / self.positions.max(1) as f64
    }

    /// Share of positions whose most likely token is the same.
    pub fn top_share(&self) -> f64 {
        self.same_top as f64 / self.positions.max(1) as f64
    }
}

/// Difference of two sets of numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Difference {
    /// Largest absolute difference.
    pub max_error: f64,
    /// Sum of squared differences.
    pub error_squares: f64,
    /// Sum of squares of the first set.
    pub squares: f64,
}

impl Difference {
    /// Adds numbers.
    pub fn add(&mut self, base: &[f32], other: &[f32]) {
        for (&b, &o) in base.iter().zip(other) {
            let error = f64::from(b) - f64::from(o);
            // A NaN in one of them must not vanish in a maximum.
            self.max_error = if error.is_nan() { f64::INFINITY } else { self.max_error.max(error.abs()) };
            self.error_squares += if error.is_nan() { f64::INFINITY } else { error * error };
            self.squares += f64::from(b) * f64::from(b);
        }
    }

    /// Root mean square of the differences over that of the first set.
    pub fn relative_rms(&self) -> f64 {
        (self.error_squares / self.squares.max(f64::MIN_POSITIVE)).sqrt()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn divergence_of_known_distributions() {
        let base = [0.5f32.ln(), 0.5f32.ln()];
        let other = [0.25f32.ln(), 0.75f32.ln()];
        let expected = 0.5 * (0.5f64 / 0.25).ln() + 0.5 * (0.5f64 / 0.75).ln();
        assert!((kl(&base, &other) - expected).abs() < 1e-7);
        let shifted = base.map(|x| x + 100.0);
        assert!(kl(&base, &shifted) < 1e-6, "a constant added to all logits changes nothing");
        assert_eq!(argmax(&[1.0, 3.0, 3.0]), 1);
    }

    #[test]
    fn not_a_number_is_never_agreement() {
        let mut difference = Difference::default();
        difference.add(&[1.0, f32::NAN], &[1.0, 2.0]);
        assert_eq!(difference.max_error, f64::INFINITY);
        for (base, other) in [([1.0, f32::NAN], [1.0, 2.0]), ([1.0, 2.0], [f32::NAN, 2.0])] {
            assert_eq!(kl(&base, &other), f64::INFINITY);
        }
    }
}
