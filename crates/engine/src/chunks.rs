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

    #[test]
    fn every_token_is_in_one_chunk() {
        for start in [0, 1, 63, 64, 1000] {
            for len in [1, 2, 63, 64, 65, 129, 1000] {
                for chunk in [1, 64, 100, 512] {
                    for smallest in [1, 16] {
                        let cuts = chunks(start, len, chunk, smallest);
                        assert_eq!(cuts[0].start, 0);
                        assert_eq!(cuts.last().unwrap().end, len);
                        assert!(
                            cuts.windows(2).all(|w| w[0].end == w[1].start && (start + w[0].end) % GRID == 0)
                        );
                        assert!(cuts.iter().all(|c| c.len() < chunk.max(GRID) + smallest && !c.is_empty()));
                    }
                }
            }
        }
    }
}
