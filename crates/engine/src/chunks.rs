//! How a prompt is cut into passes.

use std::ops::Range;

use model::GRID;

/// Cuts `len` tokens that start at absolute position `start` into chunks of at most `chunk` tokens
/// (rounded down to the grid, at least one cell), as few as that allows and of about the same size: a pass that
/// reads all experts for a few rows could not hide it. Cuts lie on the absolute 64-position grid, whatever the
/// chunk size, so that the same rows always meet in the same block. A tail smaller than `smallest` joins
/// its neighbour, which then exceeds `chunk` by less than `smallest`.
///
/// Returns ranges of `0..len`.
pub fn chunks(start: usize, len: usize, chunk: usize, smallest: usize) -> Vec<Range<usize>> {
    let most = (chunk / GRID * GRID).max(GRID);
    // The first chunk may be shorter than the others, by what the start is behind the grid.
    let count = (start % GRID + len).div_ceil(most).max(1);
    let chunk = (start % GRID + len).div_ceil(count).next_multiple_of(GRID).min(most);
    let mut cuts = Vec::new();
    let mut from = 0;
    while from < len {
        let end = (start + from + chunk) / GRID * GRID - start;
        let end = if end + smallest > len { len } else { end };
        cuts.push(from..end);
        from = end;
    }
    cuts
}

/// Passes that flow through several devices, each of which has some of the layers.
///
/// A pass costs what its rows cost and something beside them; a row costs the more the further back it is, since it attends
/// to all before it. Each device does its share of every pass, and waits for others for `devices - 1` times its share of the
/// longest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flow {
    /// How many there are, at least one.
    pub devices: usize,
    /// What a pass costs beside its rows, in rows at the first position.
    pub pass_cost: usize,
    /// The position at which a row costs twice what one at the first does, at least 1.
    pub twice: usize,
}

impl Flow {
    /// As [`chunks`], but of about the same cost instead of the same size, and as many as take about the shortest time.
    pub fn chunks(&self, start: usize, len: usize, chunk: usize, smallest: usize) -> Vec<Range<usize>> {
        if len == 0 {
            return Vec::new();
        }
        let most = (chunk / GRID * GRID).max(GRID);
        let all = self.cost(start, start + len) - self.pass_cost as f64;
        // Of passes without largest size so many would be best.
        let best = ((self.devices - 1) as f64 * all / self.pass_cost.max(1) as f64).sqrt() as usize;
        let fewest = (start % GRID + len).div_ceil(most).max(1);
        let cuts =
            (fewest..=fewest.max(best) + 1).filter_map(|count| self.cut(start, len, most, smallest, count));
        let time = |cuts: &Vec<Range<usize>>| {
            let costs = || cuts.iter().map(|cut| self.cost(start + cut.start, start + cut.end));
            costs().sum::<f64>() + (self.devices - 1) as f64 * costs().fold(0.0, f64::max)
        };
        let shortest = cuts.min_by(|a, b| time(a).total_cmp(&time(b)));
        shortest.unwrap_or_else(|| chunks(start, len, chunk, smallest))
    }

    /// What a pass from one position to another costs.
    fn cost(&self, from: usize, to: usize) -> f64 {
        let (from, to) = (from as f64, to as f64);
        self.pass_cost as f64 + (to - from) * (1.0 + (to + from) / (2 * self.twice) as f64)
    }

    /// `count` chunks that cost about the same, as far as so many of at most `most` tokens are enough.
    fn cut(
        &self,
        start: usize,
        len: usize,
        most: usize,
        smallest: usize,
        count: usize,
    ) -> Option<Vec<Range<usize>>> {
        let (end, twice) = (start + len, self.twice as f64);
        let (mut cuts, mut from) = (Vec::new(), start);
        for left in (1..=count).rev() {
            let share = (self.cost(from, end) - self.pass_cost as f64) / left as f64;
            let to = ((twice + from as f64).powi(2) + 2.0 * twice * share).sqrt() - twice;
            let to = (to as usize + GRID / 2).min(from + most) / GRID * GRID;
            let to = to.max((from / GRID + 1) * GRID);
            let to = if left == 1 && end - from <= most || to + smallest > end { end } else { to };
            cuts.push(from - start..to - start);
            from = to;
            if from == end {
                return Some(cuts);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(range: Range<usize>) -> Vec<Range<usize>> {
        std::iter::once(range).collect()
    }

    #[test]
    fn cuts_lie_on_the_grid() {
        assert_eq!(chunks(0, 200, 128, 1), [0..128, 128..200]);
        assert_eq!(chunks(0, 200, 100, 1), [0..64, 64..128, 128..192, 192..200], "100 rounds down to 64");
        assert_eq!(chunks(70, 200, 64, 1), [0..58, 58..122, 122..186, 186..200]);
        assert_eq!(chunks(0, 64, 64, 1), one(0..64));
        assert_eq!(chunks(63, 1, 2048, 1), one(0..1));
        assert_eq!(chunks(0, 0, 2048, 1), Vec::<Range<usize>>::new());
    }

    #[test]
    fn chunks_are_about_the_same_size() {
        assert_eq!(chunks(0, 9000, 8192, 1), [0..4544, 4544..9000]);
        assert_eq!(chunks(10, 9000, 8192, 1), [0..4534, 4534..9000]);
        assert_eq!(chunks(0, 2049, 2048, 1), [0..1088, 1088..2049]);
        assert_eq!(chunks(1, 4096, 2048, 1).len(), 3, "a start off the grid costs a cut");
        assert_eq!(chunks(0, 8192, 2048, 1), [0..2048, 2048..4096, 4096..6144, 6144..8192]);
    }

    #[test]
    fn small_tails_join_their_neighbour() {
        assert_eq!(chunks(0, 130, 64, 8), [0..64, 64..130]);
        assert_eq!(chunks(0, 136, 64, 8), [0..64, 64..128, 128..136]);
        assert_eq!(chunks(60, 5, 64, 8), one(0..5));
    }

    const TWO: Flow = Flow { devices: 2, pass_cost: 840, twice: 60_000 };

    #[test]
    fn chunks_that_flow_cost_about_the_same() {
        let cuts = TWO.chunks(0, 1 << 15, 8192, 2);
        let costs: Vec<f64> = cuts.iter().map(|cut| TWO.cost(cut.start, cut.end)).collect();
        let (least, most) =
            (costs.iter().copied().fold(f64::MAX, f64::min), costs.iter().copied().fold(0.0, f64::max));
        assert!(cuts.len() == 7 && most < 1.02 * least, "{cuts:?}: {costs:?}");
        assert!(
            cuts.windows(2).all(|pair| pair[0].len() > pair[1].len()),
            "the further back, the fewer rows: {cuts:?}"
        );
        // What comes behind a long conversation is cut alike.
        let behind = TWO.chunks(1 << 17, 1 << 13, 8192, 2);
        assert!(behind.len() > TWO.chunks(0, 1 << 13, 8192, 2).len(), "{behind:?}");
        assert_eq!(TWO.chunks(0, 100, 8192, 2), one(0..100), "a second pass would cost more than it spares");
        assert!(TWO.chunks(100, 0, 8192, 2).is_empty());
    }

    #[test]
    fn no_alike_chunks_flow_faster() {
        for flow in [TWO, Flow { devices: 8, ..TWO }, Flow { devices: 3, twice: 5000, ..TWO }] {
            let time = |start: usize, cuts: &[Range<usize>]| {
                let cost = |cut: &Range<usize>| {
                    let rows: f64 = (start + cut.start..start + cut.end)
                        .map(|at| 1.0 + at as f64 / flow.twice as f64)
                        .sum();
                    rows + flow.pass_cost as f64
                };
                let longest = cuts.iter().map(cost).fold(0.0, f64::max);
                cuts.iter().map(cost).sum::<f64>() + longest * (flow.devices - 1) as f64
            };
            for (start, len) in [(0, 1), (0, 3000), (100, 8192), (0, 20_000), (40_000, 20_000), (0, 1 << 17)]
            {
                let found = time(start, &flow.chunks(start, len, 8192, 2));
                let alike =
                    (GRID..=8192).step_by(4 * GRID).map(|chunk| time(start, &chunks(start, len, chunk, 2)));
                let best = alike.fold(f64::MAX, f64::min);
                assert!(found <= 1.005 * best, "{flow:?} {len} tokens behind {start}: {found}, alike {best}");
            }
        }
    }

    #[test]
    fn every_token_is_in_one_chunk() {
        for start in [0, 1, 63, 64, 1000] {
            for len in [1, 2, 63, 64, 65, 129, 1000] {
                for chunk in [1, 64, 100, 512] {
                    for smallest in [1, 16] {
                        let flow = Flow { pass_cost: 10, twice: 300, ..TWO };
                        for cuts in
                            [chunks(start, len, chunk, smallest), flow.chunks(start, len, chunk, smallest)]
                        {
                            assert_eq!(cuts[0].start, 0);
                            assert_eq!(cuts.last().unwrap().end, len);
                            let grid = |w: &[Range<usize>]| {
                                w[0].end == w[1].start && (start + w[0].end).is_multiple_of(GRID)
                            };
                            assert!(cuts.windows(2).all(grid));
                            assert!(
                                cuts.iter().all(|c| c.len() < chunk.max(GRID) + smallest && !c.is_empty())
                            );
                        }
                    }
                }
            }
        }
    }
}
