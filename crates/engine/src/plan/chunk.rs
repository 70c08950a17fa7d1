//! How many rows of a prompt go through the experts together.
//!
//! Every pass over a layer reads its experts once (what the cache does not keep of them) and decodes them once, whatever
//! its rows. Larger chunks mean fewer passes, and more computing that reading hides behind; they take memory
//! that the cache could have. Bits are the same whatever the chunk.

use model::GRID;

/// Smallest chunk that is chosen for a longer prompt.
const SMALLEST: usize = 512;

/// Largest chunk that is chosen.
pub const LARGEST: usize = 16_384;

/// Chunks at least so large until it is known what a pass costs whatever its rows.
const USUAL: usize = 2048;

/// Rows for which chunks are compared when no prompt is known.
const TYPICAL: usize = LARGEST;

/// A smaller chunk is taken if it costs at most this much more time.
const TOLERANCE: f64 = 1.03;

/// What a pass over the model takes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PassTime {
    /// Seconds for each row.
    pub row: f64,
    /// Seconds whatever the rows: decoding weights, handing bytes over.
    pub pass: f64,
    /// Seconds of reading that computing may hide.
    pub load: f64,
}

impl PassTime {
    /// Seconds of computing `rows` rows.
    pub fn compute(&self, rows: usize) -> f64 {
        self.row * rows as f64 + self.pass
    }

    /// Whether reading is hidden.
    pub fn hides(&self, rows: usize) -> bool {
        self.load <= self.compute(rows)
    }

    /// Seconds of a prompt in chunks of `rows` rows, all alike.
    fn prompt(&self, prompt: usize, rows: usize) -> f64 {
        let passes = prompt.div_ceil(rows);
        let rows = prompt.div_ceil(passes);
        passes as f64 * self.compute(rows).max(self.load)
    }
}

/// Sizes of chunks to choose among, ascending, for a prompt of so many tokens (if it is known) and room for `positions`:
/// those that cut it into equal parts, or powers of two.
pub(super) fn candidates(prompt: Option<usize>, positions: usize, knows_pass: bool) -> Vec<usize> {
    let smallest = if knows_pass { SMALLEST } else { USUAL };
    let mut sizes: Vec<usize> = match prompt {
        Some(prompt) if prompt <= smallest => vec![prompt.next_multiple_of(GRID)],
        Some(prompt) => {
            let parts = (1..=prompt.div_ceil(smallest)).map(|n| prompt.div_ceil(n).next_multiple_of(GRID));
            parts.filter(|&rows| rows <= LARGEST).collect()
        }
        None => (0..)
            .map(|n| SMALLEST << n)
            .take_while(|&rows| rows <= LARGEST && rows < 2 * positions.max(SMALLEST))
            .filter(|&rows| rows >= smallest.min(positions.next_power_of_two()))
            .collect(),
    };
    sizes.sort_unstable();
    sizes.dedup();
    sizes
}

/// The smallest of some chunks that takes hardly longer than the fastest: its index. `None` if there are none.
pub(super) fn choose(prompt: Option<usize>, options: &[(usize, PassTime)]) -> Option<usize> {
    let prompt = prompt.unwrap_or(TYPICAL);
    let time = |&(rows, time): &(usize, PassTime)| time.prompt(prompt, rows);
    let best = options.iter().map(time).min_by(f64::total_cmp)?;
    options.iter().position(|option| time(option) <= best * TOLERANCE)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The choice for a prompt when a row takes 2 ms, a pass 0.5 s, reading `load` seconds.
    fn chosen(prompt: Option<usize>, load: f64) -> usize {
        let sizes = candidates(prompt, 32_768, true);
        let options: Vec<_> =
            sizes.iter().map(|&rows| (rows, PassTime { row: 2e-3, pass: 0.5, load })).collect();
        sizes[choose(prompt, &options).unwrap()]
    }

    #[test]
    fn prompts_are_cut_into_equal_parts_on_the_grid() {
        assert_eq!(candidates(Some(100), 4096, true), [128]);
        assert_eq!(candidates(Some(1500), 4096, true), [512, 768, 1536]);
        assert_eq!(candidates(Some(1500), 4096, false), [1536]);
        assert_eq!(candidates(Some(9000), 16_384, false), [1856, 2304, 3008, 4544, 9024]);
        assert!(candidates(Some(100_000), 1 << 17, true).iter().all(|&rows| rows <= LARGEST));
        assert_eq!(candidates(None, 4096, true), [512, 1024, 2048, 4096]);
        assert_eq!(candidates(None, 4096, false), [2048, 4096]);
        assert_eq!(candidates(None, 100, false), [512]);
        assert_eq!(candidates(None, 1 << 20, false), [2048, 4096, 8192, 16_384]);
    }

    #[test]
    fn what_hides_reading_is_enough() {
        // With nothing to read, the pass's own cost decides: 0.5 s are 3 % of 8192 rows' time.
        assert_eq!(chosen(Some(16_384), 0.0), 8192);
        // 20 s of reading hide behind 9,750 rows, so a prompt of twice as many takes two passes.
        assert_eq!(chosen(Some(20_000), 20.0), 10_048);
        // The disk decides: as few passes as there may be, each as small as that allows.
        assert_eq!(chosen(Some(20_000), 100.0), 10_048);
        assert_eq!(chosen(Some(16_000), 100.0), 16_000);
        assert_eq!(chosen(None, 100.0), LARGEST);
        assert_eq!(chosen(Some(300), 100.0), 320);
        assert_eq!(choose(Some(300), &[]), None);
    }

    #[test]
    fn a_prompt_takes_what_its_passes_take() {
        let time = PassTime { row: 1.0, pass: 10.0, load: 60.0 };
        assert!(!time.hides(49) && time.hides(50));
        assert_eq!(time.prompt(100, 100), 110.0);
        assert_eq!(time.prompt(100, 64), 120.0, "two passes of 50 rows");
        assert_eq!(time.prompt(100, 25), 240.0, "reading four times");
    }
}
