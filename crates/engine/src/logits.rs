//! What is kept of the logits behind a token: as little as the choice of the next one depends on.

use model::Candidate;

/// What a choice depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Needed {
    /// The logits of all tokens.
    All,
    /// So many of the largest.
    Largest(usize),
}

/// Logits at one place. Whoever asks for those behind a token hands in the ones before it, whose memory is used again.
#[derive(Clone, Debug, PartialEq)]
pub enum Logits {
    /// One a token id.
    All(Vec<f32>),
    /// Candidates in no particular order, among which are the largest.
    Largest(Vec<Candidate>),
}

impl Default for Logits {
    fn default() -> Logits {
        Logits::All(Vec::new())
    }
}

/// Logits whose maximum is taken together.
const BLOCK: usize = 64;

/// Numbers that are checked, then copied while they are in the first cache.
const PIECE: usize = 4096;

impl Logits {
    /// All of them.
    ///
    /// # Panics
    /// If others than [`Needed::All`] were asked for.
    pub(crate) fn all(&self) -> &[f32] {
        match self {
            Logits::All(logits) => logits,
            Logits::Largest(_) => panic!("all logits are needed where some of the largest were asked for"),
        }
    }

    /// Takes what a backend has picked out. False if one of the candidates is not finite.
    pub(crate) fn take_candidates(&mut self, candidates: Vec<Candidate>) -> bool {
        let finite = candidates.iter().all(|candidate| candidate.logit.is_finite());
        *self = Logits::Largest(candidates);
        finite
    }

    /// Takes what is `needed` of `row`, one logit a token id. False if one of them is not finite.
    pub(crate) fn take(&mut self, row: &[f32], needed: Needed) -> bool {
        match needed {
            Needed::All => {
                let mut kept = if let Logits::All(kept) = self { std::mem::take(kept) } else { Vec::new() };
                kept.clear();
                let finite = row.chunks(PIECE).all(|piece| {
                    kept.extend_from_slice(piece);
                    are_finite(piece)
                });
                *self = Logits::All(kept);
                finite
            }
            Needed::Largest(count) => {
                let mut kept =
                    if let Logits::Largest(kept) = self { std::mem::take(kept) } else { Vec::new() };
                let finite = largest(row, count, &mut kept);
                *self = Logits::Largest(kept);
                finite
            }
        }
    }
}

/// Whether all are finite.
pub(crate) fn are_finite(numbers: &[f32]) -> bool {
    const EXPONENT: u32 = 0x7f80_0000;
    // Without an early end, so that several are looked at with one instruction.
    !numbers.iter().fold(false, |bad, x| bad | (x.to_bits() & EXPONENT == EXPONENT))
}

/// Puts at least the `count` largest of `row` (all, if there are fewer) into `out`, by ascending id, but for −∞: those not
/// below the `count`th largest of the blocks' maxima. Returns whether all numbers are finite; where one is NaN, `out` says
/// nothing.
pub(crate) fn largest(row: &[f32], count: usize, out: &mut Vec<Candidate>) -> bool {
    out.clear();
    let mut finite = true;
    let maxima: Vec<f32> = (row.chunks(BLOCK))
        .map(|block| {
            finite &= are_finite(block);
            maximum(block)
        })
        .collect();
    let least = if count < maxima.len() {
        let mut sorted = maxima.clone();
        *sorted.select_nth_unstable_by(count.saturating_sub(1), |a, b| b.total_cmp(a)).1
    } else {
        f32::MIN
    };
    let least = least.max(f32::MIN);
    for (block, numbers) in row.chunks(BLOCK).enumerate().filter(|&(block, _)| maxima[block] >= least) {
        let candidates = (block * BLOCK..).zip(numbers).filter(|&(_, &logit)| logit >= least);
        out.extend(candidates.map(|(id, &logit)| Candidate { id: id as u32, logit }));
    }
    finite
}

/// The largest of a block; −∞ if it is empty.
fn maximum(block: &[f32]) -> f32 {
    const LANES: usize = 8;
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (whole, rest) = block.as_chunks::<LANES>();
    for numbers in whole {
        lanes = std::array::from_fn(|lane| larger(lanes[lane], numbers[lane]));
    }
    lanes.iter().chain(rest).copied().fold(f32::NEG_INFINITY, larger)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Different numbers, with equals among them.
    fn row(len: usize) -> Vec<f32> {
        (0..len).map(|i| ((i * 7919) % 1009) as f32 / 16.0 - 40.0).collect()
    }

    #[test]
    fn the_largest_and_their_equals_are_among_the_candidates() {
        for len in [1, 7, 63, 64, 65, 128, 1000, 5000] {
            let row = row(len);
            let mut sorted = row.clone();
            sorted.sort_by(|a, b| b.total_cmp(a));
            for count in [1, 2, 20, 63, 64, 65, 1000, usize::MAX] {
                let mut found = vec![Candidate { id: 9, logit: 9.0 }];
                assert!(largest(&row, count, &mut found));
                assert!(found.windows(2).all(|pair| pair[0].id < pair[1].id), "ascending, none of before");
                assert!(found.iter().all(|c| c.logit == row[c.id as usize]));
                let least = sorted[count.min(len) - 1];
                let expected = row.iter().filter(|&&logit| logit >= least).count();
                let there = found.iter().filter(|c| c.logit >= least).count();
                assert_eq!(there, expected, "{count} of {len}");
            }
        }
        let mut found = Vec::new();
        largest(&row(5000), 1, &mut found);
        assert!(found.len() < 20, "{} where one is wanted", found.len());
    }

    #[test]
    fn what_is_forbidden_is_no_candidate() {
        let mut row = row(200);
        row[3..190].fill(f32::NEG_INFINITY);
        let mut found = Vec::new();
        for count in [1, 50, 300] {
            largest(&row, count, &mut found);
            assert!(found.iter().all(|c| c.logit.is_finite()), "{count}");
        }
        assert_eq!(found.len(), 13);
        largest(&[f32::NEG_INFINITY; 100], 1, &mut found);
        assert_eq!(found, []);
    }

    #[test]
    fn a_number_that_is_not_finite_is_found_wherever_it_is() {
        let mut kept = Logits::default();
        for len in [1, 63, 64, 65, 4095, 4096, 4097, 5000] {
            for needed in [Needed::All, Needed::Largest(1), Needed::Largest(64)] {
                assert!(kept.take(&row(len), needed), "{len}");
                for at in [0, len / 2, len - 1] {
                    for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                        let mut row = row(len);
                        row[at] = bad;
                        assert!(!kept.take(&row, needed), "{bad} at {at} of {len}, {needed:?}");
                    }
                }
            }
        }
        assert!(kept.take(&[f32::MAX, f32::MIN, -0.0, f32::MIN_POSITIVE / 2.0], Needed::All));
        assert_eq!(kept.all()[..2], [f32::MAX, f32::MIN]);
    }
}
