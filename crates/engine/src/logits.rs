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
