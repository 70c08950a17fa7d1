//! Linear layers over weights in file form.

use model::{Error, Matrix, ResidentMatrix, Result};
use quant::Type;

use crate::math::dot;
use crate::options::Rounding;

/// A weight matrix in file form: [rows = outputs, cols = inputs].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Linear<'a> {
    pub name: &'a str,
    pub ty: Type,
    pub rows: usize,
    pub cols: usize,
    pub bytes: &'a [u8],
}

impl<'a> From<&'a ResidentMatrix> for Linear<'a> {
    fn from(matrix: &'a ResidentMatrix) -> Linear<'a> {
        let ResidentMatrix { name, ty, rows, cols, bytes } = matrix;
        Linear { name, ty: *ty, rows: *rows, cols: *cols, bytes }
    }
}

impl Linear<'_> {
    /// input · weightsᵀ: [n, cols] to [n, rows]. Each row of weights is decoded once and met by all rows of
    /// the input.
    pub fn apply(&self, input: &Matrix, rounding: Rounding) -> Result<Matrix> {
        assert_eq!(input.cols, self.cols, "`{}` got rows of another width", self.name);
        let mut input = input.clone();
        if rounding == Rounding::LlamaCpp {
            input.data.chunks_exact_mut(self.cols).for_each(|row| self.ty.activation().round(row));
        }
        let mut out = Matrix { rows: input.rows, cols: self.rows, data: vec![0.0; input.rows * self.rows] };
        let mut weights = vec![0.0; self.cols];
        for (o, blocks) in self.bytes.chunks_exact(self.bytes.len() / self.rows).enumerate() {
            quant::decode(self.ty, blocks, &mut weights)
                .map_err(|source| Error::Quant { tensor: self.name.to_string(), source })?;
            for row in 0..input.rows {
                out.data[row * self.rows + o] = dot(&weights, input.row(row)) as f32;
            }
        }
        Ok(out)
    }
}
