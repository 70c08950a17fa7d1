//! `embed`: token ids to hidden rows.

use std::ops::Range;

use model::{Intermediate, Matrix, Result};

use crate::Context;
use crate::open::Open;

impl Context {
    /// hidden ← rows of the token embedding.
    pub(crate) fn embed(&self, open: &mut Open, rows: Range<usize>) -> Result<()> {
        let cols = open.hidden.cols;
        let hidden = &mut open.hidden.data[rows.start * cols..rows.end * cols];
        for (row, &token) in hidden.chunks_exact_mut(cols).zip(&open.pass.tokens[rows.clone()]) {
            self.model.embed(token, row)?;
        }
        let embedded = Matrix { rows: rows.len(), cols, data: hidden.to_vec() };
        open.leave([(Intermediate::Embedded, embedded)]);
        Ok(())
    }
}
