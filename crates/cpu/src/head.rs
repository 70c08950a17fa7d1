//! Stage `head`: final norm and output projection, for the rows that want logits or hidden states.

use model::{Matrix, MatrixView, ResidentWeights, Spec};

use crate::embed;
use crate::gemm::{self, Input, Product, Then};
use crate::kernels::Codes;
use crate::memory::{Out, Rows, reserve};
use crate::open::Open;
use crate::team::Team;

/// Computes hidden states and logits of the wanted rows.
pub(crate) fn head(team: &mut Team, spec: &Spec, weights: &ResidentWeights, open: &mut Open) {
    let (buffers, cols) = (&mut open.buffers, spec.hidden);
    let wanted = &mut buffers.last_rows;
    wanted.clear();
    wanted.extend(open.pass.logits.iter().chain(&open.pass.hidden));
    wanted.sort_unstable();
    wanted.dedup();
    let index: Vec<u32> = wanted.iter().map(|&row| row as u32).collect();
    buffers.last.resize(index.len() * cols, 0.0);
    let x = Rows::gather(&buffers.hidden, cols, &index);
    let per_row = Codes::per_row(cols);
    reserve(&mut buffers.last_codes, index.len() * per_row, Codes::ZERO);
    let (last, codes) = (&mut buffers.last, &mut buffers.last_codes);
    embed::norm(team, x, (&weights.output_norm, spec.rms_eps), last, codes);

    let index: Vec<u32> = open.pass.logits.iter().map(|&row| place(wanted, row) as u32).collect();
    buffers.logits.resize(index.len() * spec.vocab, 0.0);
    let out = Out::new(&mut buffers.logits, spec.vocab);
    let codes = Rows::gather(&buffers.last_codes, per_row, &index);
    let x = Input::with(team, Rows::gather(&buffers.last, cols, &index), codes, cols);
    gemm::dense(team, &[Product { weights: (&weights.output).into(), x, out, then: Then::Store }]);
}

/// The logits of the wanted rows.
pub(crate) fn logits<'a>(spec: &Spec, open: &'a Open) -> MatrixView<'a> {
    MatrixView { rows: open.pass.logits.len(), cols: spec.vocab, data: &open.buffers.logits }
}

/// The final hidden states of the rows that want them.
pub(crate) fn hidden(spec: &Spec, open: &Open) -> Matrix {
    let (buffers, cols) = (&open.buffers, spec.hidden);
    let data = open.pass.hidden.iter().flat_map(|&row| {
        let at = place(&buffers.last_rows, row) * cols;
        buffers.last[at..at + cols].iter().copied()
    });
    Matrix { rows: open.pass.hidden.len(), cols, data: data.collect() }
}

fn place(wanted: &[usize], row: usize) -> usize {
    wanted.binary_search(&row).expect("a wanted row")
}
