//! Medians and their spread.

/// Samples of the same thing, ascending, at least one.
#[derive(Clone, Debug, PartialEq)]
pub struct Samples(Vec<f64>);

impl Samples {
    /// Sorts them; `None` if there are none.
    pub fn new(mut samples: Vec<f64>) -> Option<Samples> {
        samples.sort_by(f64::total_cmp);
        (!samples.is_empty()).then_some(Samples(samples))
    }

    /// The middle one, or the mean of the middle two.
    pub fn median(&self) -> f64 {
        let (half, samples) = (self.0.len() / 2, &self.0);
        if samples.len() % 2 == 1 { samples[half] } else { (samples[half - 1] + samples[half]) / 2.0 }
    }

    /// The smallest.
    pub fn min(&self) -> f64 {
        self.0[0]
    }

    /// The largest.
    pub fn max(&self) -> f64 {
        self.0[self.0.len() - 1]
    }

    /// From the smallest to the largest, as a share of the median.
    pub fn spread(&self) -> f64 {
        (self.max() - self.min()) / self.median()
    }

    /// All of them, ascending.
    pub fn all(&self) -> &[f64] {
        &self.0
    }
}

/// Index of the sample in the middle, the lower of two.
pub fn middle(samples: &[f64]) -> Option<usize> {
    let mut order: Vec<usize> = (0..samples.len()).collect();
    order.sort_by(|&a, &b| samples[a].total_cmp(&samples[b]));
    order.get(samples.len().saturating_sub(1) / 2).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples(list: &[f64]) -> Samples {
        Samples::new(list.to_vec()).unwrap()
    }

    #[test]
    fn medians_and_spread() {
        assert!(Samples::new(Vec::new()).is_none());
        let odd = samples(&[9.0, 1.0, 2.0]);
        assert_eq!((odd.median(), odd.min(), odd.max(), odd.spread()), (2.0, 1.0, 9.0, 4.0));
        assert_eq!(samples(&[4.0, 1.0, 9.0, 2.0]).median(), 3.0);
        assert_eq!((samples(&[7.0]).median(), samples(&[7.0]).spread()), (7.0, 0.0));
        assert_eq!(odd.all(), [1.0, 2.0, 9.0]);
    }

    #[test]
    fn the_sample_in_the_middle_is_found_where_it_stands() {
        assert_eq!(middle(&[]), None);
        assert_eq!(middle(&[9.0, 1.0, 2.0]), Some(2));
        assert_eq!(middle(&[9.0, 1.0, 2.0, 4.0]), Some(2), "the lower of two");
    }
}
