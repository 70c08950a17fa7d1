//! Stage `embed`: token ids to hidden rows; norms of rows, the other thing every layer begins with.

use std::ops::Range;

use model::{Model, Result};

use crate::gemm;
use crate::kernels::Codes;
use crate::memory::{Out, Rows};
use crate::open::Open;
use crate::team::Team;

/// Decodes the embedding rows of the tokens.
pub(crate) fn embed(team: &mut Team, model: &Model, open: &mut Open, rows: Range<usize>) -> Result<()> {
    let cols = model.spec.hidden;
    let out = Out::new(&mut open.buffers.hidden, cols);
    let tokens = &open.pass.tokens;
    let failure = std::sync::Mutex::new(None);
    team.split(rows.len(), |part, _| {
        for row in part.map(|row| rows.start + row) {
            // SAFETY: each row belongs to one member.
            let to = unsafe { out.part(row, 0, cols) };
            if let Err(error) = model.embed(tokens[row], to) {
                *failure.lock().expect("nobody panics with it") = Some(error);
            }
        }
    });
    failure.into_inner().expect("nobody panics with it").map_or(Ok(()), Err)
}

/// RMS norm of some rows: `out` has a row for each row of `x`, and so has `codes`, where it goes as integers if
/// products want them.
pub(crate) fn norm(
    team: &mut Team,
    x: Rows,
    (weight, eps): (&[f32], f32),
    out: &mut [f32],
    codes: &mut [Codes],
) {
    let (kernels, cols) = (team.kernels, weight.len());
    let rounds = gemm::rounds(team, cols);
    let (out, codes) = (Out::new(out, cols), Out::new(codes, Codes::per_row(cols)));
    team.split(x.count(), |part, _| {
        for row in part {
            // SAFETY: each row belongs to one member.
            let to = unsafe { out.part(row, 0, cols) };
            (kernels.rms_norm)(x.row(row, cols), weight, eps, to);
            if rounds {
                // SAFETY: as above.
                (kernels.round)(to, unsafe { codes.part(row, 0, Codes::per_row(cols)) });
            }
        }
    });
}
