//! An open pass and its activations.

use std::ops::Range;

use model::state::OpenPass;
use model::{Error, Intermediate, Matrix, Pass, Result, Stage};

use crate::math::rms_norm_rows;

/// A pass between `begin` and `commit`.
#[derive(Debug)]
pub(crate) struct Open {
    pub pass: Pass,
    /// The state its runs read and write.
    pub state: OpenPass,
    /// The residual stream: [rows, hidden].
    pub hidden: Matrix,
    /// What the experts of the layer need from all blocks.
    pub moe: Moe,
    /// What the stage called last left, for the next stage and for whoever reads it.
    left: Vec<(Intermediate, Matrix)>,
    /// Logits of the rows that want them.
    pub logits: Option<Matrix>,
    /// Final hidden states of the rows that want them.
    pub wanted_hidden: Option<Matrix>,
}

/// Router results and sums of the layer at hand, for all rows of the pass.
#[derive(Debug)]
pub(crate) struct Moe {
    /// Input of router and experts: [rows, hidden].
    pub norm: Matrix,
    /// Chosen experts of each row with their weights, by falling weight.
    pub chosen: Vec<Vec<(u32, f32)>>,
    /// Shared expert plus the routed ones so far: [rows, hidden].
    pub sum: Matrix,
    /// (expert, row) pairs computed so far.
    pub pairs: usize,
}

pub(crate) fn zeros(rows: usize, cols: usize) -> Matrix {
    Matrix { rows, cols, data: vec![0.0; rows * cols] }
}

impl Open {
    pub fn new(pass: Pass, state: OpenPass, hidden: usize) -> Open {
        let rows = pass.rows();
        let moe = Moe {
            norm: zeros(rows, hidden),
            chosen: vec![Vec::new(); rows],
            sum: zeros(rows, hidden),
            pairs: 0,
        };
        let hidden = zeros(rows, hidden);
        Open { pass, state, hidden, moe, left: Vec::new(), logits: None, wanted_hidden: None }
    }

    /// The residual stream of `rows`, normed.
    pub fn normed(&self, rows: Range<usize>, weight: &[f32], eps: f32) -> Matrix {
        let cols = self.hidden.cols;
        let data = rms_norm_rows(&self.hidden.data[rows.start * cols..rows.end * cols], weight, eps);
        Matrix { rows: rows.len(), cols, data }
    }

    /// Adds `delta` to the residual stream and returns the sum: [rows, hidden].
    pub fn add_to_hidden(&mut self, rows: Range<usize>, delta: &Matrix) -> Matrix {
        let cols = self.hidden.cols;
        let hidden = &mut self.hidden.data[rows.start * cols..rows.end * cols];
        hidden.iter_mut().zip(&delta.data).for_each(|(hidden, delta)| *hidden += delta);
        Matrix { rows: rows.len(), cols, data: hidden.to_vec() }
    }

    /// A stage is done and leaves these values.
    pub fn leave<const N: usize>(&mut self, values: [(Intermediate, Matrix); N]) {
        self.left = values.into();
    }

    /// A value of the stage called last.
    pub fn left(&self, what: Intermediate) -> Option<&Matrix> {
        self.left.iter().find(|(left, _)| *left == what).map(|(_, matrix)| matrix)
    }

    /// Takes a value of the stage before `stage`, which must have been called on the same `rows`.
    pub fn take(
        &mut self,
        what: Intermediate,
        rows: &Range<usize>,
        (stage, layer): (Stage, usize),
    ) -> Result<Matrix> {
        let found = self.left.iter().position(|(left, matrix)| *left == what && matrix.rows == rows.len());
        match found {
            Some(index) => Ok(self.left.swap_remove(index).1),
            None => {
                Err(failure(stage, layer, format!("the stage that makes `{what}` was not called before")))
            }
        }
    }
}

/// An error of this backend.
pub(crate) fn failure(stage: Stage, layer: usize, message: String) -> Error {
    Error::Backend { backend: "reference", stage: stage.name(), layer, message }
}
