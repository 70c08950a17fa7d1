//! A tensor of the new file as row ranges of the checkpoint's tensors.

use crate::checkpoint::{Checkpoint, Stored};
use crate::error::Error;

/// What happens to every element on the way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Map {
    /// Nothing.
    Keep,
    /// x + 1: checkpoints store the weights of zero-centred norms without their 1.
    PlusOne,
    /// −exp(x): the decay rate, stored as its logarithm.
    NegExp,
}

impl Map {
    fn apply(self, values: &mut [f32]) {
        match self {
            Map::Keep => {}
            Map::PlusOne => values.iter_mut().for_each(|x| *x += 1.0),
            // In f64, so that the rounded result does not depend on a library's f32 exponential.
            Map::NegExp => values.iter_mut().for_each(|x| *x = -f64::from(*x).exp() as f32),
        }
    }
}

/// Consecutive rows of one stored tensor.
struct Piece<'a> {
    stored: &'a Stored,
    /// The first element.
    first: u64,
    /// The row of the new tensor it starts at.
    at: u64,
}

/// Rows of stored tensors, one after the other.
pub(crate) struct Gather<'a> {
    columns: u64,
    pieces: Vec<Piece<'a>>,
    rows: u64,
    map: Map,
}

impl<'a> Gather<'a> {
    /// No rows yet, of `columns` elements each.
    pub(crate) fn new(columns: u64, map: Map) -> Gather<'a> {
        Gather { columns, pieces: Vec::new(), rows: 0, map }
    }

    /// Appends rows `first..first + rows` of `stored`, seen as rows of this gather's width.
    pub(crate) fn push(&mut self, stored: &'a Stored, first: u64, rows: u64) {
        self.pieces.push(Piece { stored, first: first * self.columns, at: self.rows });
        self.rows += rows;
    }

    /// Number of rows.
    pub(crate) fn rows(&self) -> u64 {
        self.rows
    }

    /// Refuses sources whose elements cannot be converted.
    pub(crate) fn check_dtypes(&self, checkpoint: &Checkpoint) -> Result<(), Error> {
        self.pieces.iter().try_for_each(|piece| checkpoint.check_dtype(piece.stored))
    }

    /// Reads whole rows from row `first` on.
    pub(crate) fn read(&self, checkpoint: &Checkpoint, first: u64, out: &mut [f32]) -> Result<(), Error> {
        let mut row = first;
        let mut rest = &mut *out;
        let mut index = self.pieces.partition_point(|piece| piece.at <= first) - 1;
        while !rest.is_empty() {
            let piece = &self.pieces[index];
            let end = self.pieces.get(index + 1).map_or(self.rows, |next| next.at);
            let rows = (end - row).min(rest.len() as u64 / self.columns);
            let (part, remaining) = rest.split_at_mut((rows * self.columns) as usize);
            checkpoint.read(piece.stored, piece.first + (row - piece.at) * self.columns, part)?;
            (rest, row, index) = (remaining, row + rows, index + 1);
        }
        self.map.apply(out);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_window_of_rows_is_read() {
        // Two tensors of 6 and 4 rows of 2; elements count up from 0 and from 100.
        let dir = tempfile::tempdir().unwrap();
        let header = r#"{"a":{"dtype":"F32","shape":[6,2],"data_offsets":[0,48]},"b":{"dtype":"F32","shape":[4,2],"data_offsets":[48,80]}}"#;
        let elements = (0..12).chain(100..108).map(|x| x as f32);
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.extend(elements.flat_map(f32::to_le_bytes));
        std::fs::write(dir.path().join("model.safetensors"), bytes).unwrap();
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        let (a, b) = (checkpoint.get("a").unwrap(), checkpoint.get("b").unwrap());

        let mut gather = Gather::new(2, Map::PlusOne);
        gather.push(a, 4, 2);
        gather.push(b, 1, 1);
        gather.push(a, 0, 3);
        gather.push(b, 0, 4);
        let rows = [8, 10, 102, 0, 2, 4, 100, 102, 104, 106].map(|x| x as f32 + 1.0);
        assert_eq!(gather.rows(), rows.len() as u64);
        for first in 0..rows.len() {
            for end in first + 1..=rows.len() {
                let mut out = vec![0.0; 2 * (end - first)];
                gather.read(&checkpoint, first as u64, &mut out).unwrap();
                let expected: Vec<f32> = rows[first..end].iter().flat_map(|&x| [x, x + 1.0]).collect();
                assert_eq!(out, expected, "rows {first}..{end}");
            }
        }
    }
}
