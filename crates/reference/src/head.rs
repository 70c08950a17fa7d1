//! `head`: final norm and output projection, for the rows that want them.

use model::{Intermediate, Matrix, Result};

use crate::Context;
use crate::linear::Linear;
use crate::math::rms_norm;
use crate::open::Open;

impl Context {
    /// logits = output · norm(hidden), hidden states = norm(hidden).
    pub(crate) fn head(&self, open: &mut Open) -> Result<()> {
        let normed = |rows: &[usize]| {
            let norm = |&row: &usize| {
                rms_norm(open.hidden.row(row), &self.weights.output_norm, self.model.spec.rms_eps)
            };
            let data = rows.iter().flat_map(norm).collect();
            Matrix { rows: rows.len(), cols: open.hidden.cols, data }
        };
        let hidden = normed(&open.pass.hidden);
        let logits =
            Linear::from(&self.weights.output).apply(&normed(&open.pass.logits), self.options.rounding)?;
        open.wanted_hidden = Some(hidden);
        open.logits = Some(logits.clone());
        open.leave([(Intermediate::Logits, logits)]);
        Ok(())
    }
}
