//! Linear layers over weights in file form.

use model::{Error, Matrix, ResidentMatrix, Result};
use quant::{Activation, Type, activation};

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
        let input = self.rounded(input, rounding);
        let mut out = Matrix {
            rows: input.matrix.rows,
            cols: self.rows,
            data: vec![0.0; input.matrix.rows * self.rows],
        };
        let mut weights = vec![0.0; self.cols];
        for (o, blocks) in self.bytes.chunks_exact(self.bytes.len() / self.rows).enumerate() {
            quant::decode(self.ty, blocks, &mut weights)
                .map_err(|source| Error::Quant { tensor: self.name.to_string(), source })?;
            let minima = activation::minima(self.ty, blocks);
            for row in 0..input.matrix.rows {
                let correction = input.sum_errors.get(row).map_or(0.0, |errors| dot(&minima, errors));
                out.data[row * self.rows + o] = (dot(&weights, input.matrix.row(row)) + correction) as f32;
            }
        }
        Ok(out)
    }

    fn rounded(&self, input: &Matrix, rounding: Rounding) -> Rounded {
        let (mut matrix, form) = (input.clone(), self.ty.activation());
        if rounding == Rounding::None {
            return Rounded { matrix, sum_errors: Vec::new() };
        }
        matrix.data.chunks_exact_mut(self.cols).for_each(|row| form.round(row));
        let sum_errors = match form {
            Activation::Q8_1 => input.data.chunks_exact(self.cols).map(activation::q8_1_sum_errors).collect(),
            _ => Vec::new(),
        };
        Rounded { matrix, sum_errors }
    }
}

/// The input of a linear layer as its products see it.
struct Rounded {
    matrix: Matrix,
    /// How far the stored sums of the blocks of each row are from those of `matrix`; empty where none are stored.
    sum_errors: Vec<Vec<f32>>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::f16;

    /// llama.cpp multiplies scales by sums of integers, and minima by the stored sums of the activations.
    #[test]
    fn minima_meet_the_stored_sums() {
        let (scale, minimum) = (f16::from_f32(0.01), f16::from_f32(-1.0));
        let mut bytes: Vec<u8> = [scale, minimum].iter().flat_map(|x| x.to_le_bytes()).collect();
        bytes.extend((0..16u8).map(|i| i | (15 - i) << 4));
        let data: Vec<f32> = (0..32).map(|i| 1.0 + (i as f32 * 0.7).sin()).collect();
        let input = Matrix { rows: 1, cols: 32, data };

        let step = input.data.iter().fold(0.0f32, |most, x| most.max(x.abs())) / 127.0;
        let integers: Vec<f32> = input.data.iter().map(|x| (x / step).round_ties_even()).collect();
        let nibbles = (0..16).chain((0..16).rev()).map(|q| q as f32);
        let products: f32 = nibbles.zip(&integers).map(|(w, x)| w * x).sum();
        let stored = f16::from_f32(step * integers.iter().sum::<f32>());
        let expected =
            scale.to_f32() * f16::from_f32(step).to_f32() * products + minimum.to_f32() * stored.to_f32();

        let linear = Linear { name: "w", ty: Type::Q4_1, rows: 1, cols: 32, bytes: &bytes };
        let out = linear.apply(&input, Rounding::LlamaCpp).unwrap().data[0];
        assert!((out - expected).abs() < 1e-5, "{out} instead of {expected}");
    }
}
