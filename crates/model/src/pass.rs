//! A pass: one call of the model.

use std::ops::Range;

use crate::error::{Error, Result};
use crate::state::SequenceId;

/// Positions of the absolute grid on which delta-rule blocks and attention key blocks lie.
///
/// Whatever the chunk size, rows of one grid cell meet in the same block, so that bits do not depend on
/// how a prompt was cut.
pub const GRID: usize = 64;

/// Consecutive tokens of one sequence inside a [`Pass`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Run {
    /// The sequence the tokens are appended to.
    pub sequence: SequenceId,
    /// Position of the first token; must be the present length of the sequence.
    pub start: usize,
    /// Rows of the pass these tokens occupy.
    pub rows: Range<usize>,
}

/// A wish to keep the state of a sequence as it is right after one row of the pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SnapshotRequest {
    /// The row after which the state is taken.
    pub row: usize,
    /// An empty sequence that becomes the state: it shares the KV pages, owns the recurrent state.
    pub into: SequenceId,
}

/// One call of the model: a list of runs, and what is wanted of them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pass {
    /// Token ids, one a row.
    pub tokens: Vec<u32>,
    /// Runs in row order; together they cover every row, and no sequence appears twice.
    pub runs: Vec<Run>,
    /// Rows that want logits, ascending.
    pub logits: Vec<usize>,
    /// Rows that want their final hidden state (after the output norm), ascending.
    pub hidden: Vec<usize>,
    /// States to keep.
    pub snapshots: Vec<SnapshotRequest>,
}

impl Pass {
    /// An empty pass.
    pub fn new() -> Pass {
        Pass::default()
    }

    /// Appends a run of `tokens` to `sequence`, whose present length is `start`. Returns its rows.
    pub fn push(&mut self, sequence: SequenceId, start: usize, tokens: &[u32]) -> Range<usize> {
        let rows = self.tokens.len()..self.tokens.len() + tokens.len();
        self.tokens.extend_from_slice(tokens);
        self.runs.push(Run { sequence, start, rows: rows.clone() });
        rows
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.tokens.len()
    }

    /// Checks that runs cover the rows in order, wishes name existing rows, and tokens exist.
    ///
    /// # Errors
    /// [`Error::Pass`] saying what contradicts what.
    pub fn check(&self, vocab: usize) -> Result<()> {
        let bad = |text: String| Err(Error::Pass(text));
        let mut next = 0;
        for (i, run) in self.runs.iter().enumerate() {
            if run.rows.start != next || run.rows.is_empty() {
                return bad(format!("run {i} covers rows {:?}, expected to start at {next}", run.rows));
            }
            if self.runs[..i].iter().any(|other| other.sequence == run.sequence) {
                return bad(format!("sequence {} appears twice", run.sequence.0));
            }
            next = run.rows.end;
        }
        if next != self.rows() || next == 0 {
            return bad(format!("runs cover {next} rows of {}", self.rows()));
        }
        if let Some(token) = self.tokens.iter().find(|&&t| t as usize >= vocab) {
            return bad(format!("token id {token} is not in the vocabulary of {vocab}"));
        }
        for (what, rows) in [("logits", &self.logits), ("hidden", &self.hidden)] {
            if !rows.is_sorted_by(|a, b| a < b) || rows.last().is_some_and(|&r| r >= next) {
                return bad(format!("rows that want {what} must ascend and be below {next}"));
            }
        }
        match self.snapshots.iter().find(|s| s.row >= next) {
            Some(s) => bad(format!("snapshot after row {} of {next}", s.row)),
            None => Ok(()),
        }
    }

    /// Cuts the rows into blocks of at most `max` rows. Inside a run, cuts lie on the [`GRID`] of
    /// absolute positions, so that no grid cell is torn apart.
    ///
    /// # Panics
    /// If `max` is smaller than the grid.
    pub fn blocks(&self, max: usize) -> Vec<Range<usize>> {
        assert!(max >= GRID, "a block holds at least one grid cell");
        let mut blocks = Vec::new();
        let mut open = 0..0;
        for piece in self.runs.iter().flat_map(run_cells) {
            if piece.end - open.start > max {
                blocks.push(open.clone());
                open = piece.start..piece.start;
            }
            open.end = piece.end;
        }
        blocks.push(open);
        blocks
    }

    /// The runs that meet `rows`, each with the rows it has there.
    pub fn runs_in(&self, rows: Range<usize>) -> impl Iterator<Item = (usize, Range<usize>)> + '_ {
        self.runs.iter().enumerate().filter_map(move |(i, run)| {
            let part = run.rows.start.max(rows.start)..run.rows.end.min(rows.end);
            (!part.is_empty()).then_some((i, part))
        })
    }
}

/// The rows of `run`, cut at the absolute grid.
pub(crate) fn run_cells(run: &Run) -> impl Iterator<Item = Range<usize>> + '_ {
    let mut row = run.rows.start;
    std::iter::from_fn(move || {
        if row == run.rows.end {
            return None;
        }
        let position = run.start + (row - run.rows.start);
        let end = (row + GRID - position % GRID).min(run.rows.end);
        let cell = row..end;
        row = end;
        Some(cell)
    })
}

impl Run {
    /// The rows of this run between `rows.start` and `rows.end`, cut at the absolute grid: the blocks of
    /// the chunked delta rule.
    pub fn cells(&self, rows: Range<usize>) -> impl Iterator<Item = Range<usize>> + '_ {
        run_cells(self).filter_map(move |cell| {
            let part = cell.start.max(rows.start)..cell.end.min(rows.end);
            (!part.is_empty()).then_some(part)
        })
    }

    /// Position of `row`.
    pub fn position(&self, row: usize) -> usize {
        self.start + row - self.rows.start
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pass(runs: &[(usize, usize)]) -> Pass {
        let mut pass = Pass::new();
        for (i, &(start, len)) in runs.iter().enumerate() {
            pass.push(SequenceId(i as u32), start, &vec![0; len]);
        }
        pass
    }

    fn one(range: Range<usize>) -> Vec<Range<usize>> {
        std::iter::once(range).collect()
    }

    #[test]
    fn blocks_are_cut_on_the_absolute_grid() {
        assert_eq!(pass(&[(0, 200)]).blocks(128), [0..128, 128..200]);
        // Starts at position 60: the first cell has four rows, so a block of 128 ends at row 68.
        assert_eq!(pass(&[(60, 200)]).blocks(128), [0..68, 68..196, 196..200]);
        assert_eq!(pass(&[(7, 1), (100, 1), (0, 1)]).blocks(64), one(0..3));
        assert_eq!(pass(&[(0, 64), (0, 65)]).blocks(64), [0..64, 64..128, 128..129]);
        assert_eq!(pass(&[(5, 1)]).blocks(2048), one(0..1));
    }

    #[test]
    fn cells_do_not_depend_on_the_block() {
        let pass = pass(&[(60, 200)]);
        let run = &pass.runs[0];
        let whole: Vec<_> = run.cells(0..200).collect();
        let cut: Vec<_> =
            pass.blocks(64).into_iter().flat_map(|b| run.cells(b).collect::<Vec<_>>()).collect();
        assert_eq!(whole, cut);
        assert_eq!(whole, [0..4, 4..68, 68..132, 132..196, 196..200]);
    }

    #[test]
    fn contradictions_are_refused() {
        assert!(Pass::new().check(10).is_err(), "empty");
        let mut good = pass(&[(0, 3), (4, 2)]);
        good.logits = vec![2, 4];
        good.check(10).unwrap();
        let twice = Pass {
            runs: vec![good.runs[0].clone(), Run { sequence: SequenceId(0), ..good.runs[1].clone() }],
            ..good.clone()
        };
        assert!(twice.check(10).unwrap_err().to_string().contains("twice"));
        let unsorted = Pass { logits: vec![2, 2], ..good.clone() };
        assert!(unsorted.check(10).is_err());
        let outside = Pass { tokens: vec![0, 0, 10, 0, 0], ..good };
        assert!(outside.check(10).unwrap_err().to_string().contains("token id 10"));
    }
}
