//! Two backends side by side: every intermediate of every stage and layer.

use std::collections::BTreeMap;

use model::{Backend, Driver, ExpertSource, Intermediate, Matrix, Pass, Quiet, Spec, Stage, Step};

use crate::cancel::Cancel;
use crate::compare::{Agreement, Difference};
use crate::error::{Error, Result};
use crate::ingestion::OnProgress;

/// A backend with its expert source.
pub struct Side<'a> {
    /// The backend.
    pub backend: &'a mut dyn Backend,
    /// Where its experts come from.
    pub experts: &'a mut dyn ExpertSource,
}

/// What a comparison found.
#[derive(Clone, Debug, Default)]
pub struct Parity {
    /// Differences by stage, layer and intermediate.
    pub stages: BTreeMap<(Stage, usize, Intermediate), Difference>,
    /// (row, layer) pairs whose sets of experts differ, and how many were compared.
    pub routes: (usize, usize),
    /// Agreement of the logits.
    pub logits: Agreement,
}

/// Reads `tokens` on both sides in passes of at most `rows` rows and compares after every step.
///
/// # Errors
/// Those of either backend; [`Error::Cancelled`].
pub fn parity(
    spec: &Spec,
    a: &mut Side,
    b: &mut Side,
    tokens: &[u32],
    rows: usize,
    cancel: &Cancel,
    on_progress: &mut OnProgress<'_>,
) -> Result<Parity> {
    let smaller = a.backend.capabilities().block_rows.min(b.backend.capabilities().block_rows);
    let rows = rows.min(smaller);
    let mut parity = Parity::default();
    let sequences = (a.backend.create(), b.backend.create());
    for cut in crate::chunks(0, tokens.len(), rows, 1) {
        let pass = |sequence| {
            let mut pass = Pass::new();
            pass.push(sequence, cut.start, &tokens[cut.clone()]);
            pass.logits = (0..cut.len()).collect();
            pass
        };
        let mut drivers = (
            Driver::begin(a.backend, spec, &pass(sequences.0))?,
            Driver::begin(b.backend, spec, &pass(sequences.1))?,
        );
        loop {
            if cancel.is_cancelled() {
                return Err(Error::Cancelled { read: cut.start, total: tokens.len() });
            }
            let Some(step) = drivers.0.next_step().cloned() else { break };
            advance(&mut drivers.0, a, &step)?;
            advance(&mut drivers.1, b, &step)?;
            parity.compare(&step, (&drivers.0, a), (&drivers.1, b))?;
            let progress = drivers.0.progress();
            let share = progress.done as f64 / progress.total.max(1) as f64;
            on_progress(cut.start as f64 + share * cut.len() as f64, tokens.len());
        }
        a.backend.commit(drivers.0.pass())?;
        b.backend.commit(drivers.1.pass())?;
    }
    a.backend.free(sequences.0);
    b.backend.free(sequences.1);
    Ok(parity)
}

/// Completes `step`, which may take several waves.
fn advance(driver: &mut Driver, side: &mut Side, step: &Step) -> Result<()> {
    while driver.next_step() == Some(step) {
        driver.advance(side.backend, side.experts, &mut Quiet)?;
    }
    Ok(())
}

impl Parity {
    fn compare(&mut self, step: &Step, a: (&Driver, &mut Side), b: (&Driver, &mut Side)) -> Result<()> {
        for &what in step.stage.intermediates() {
            let left = a.1.backend.read(a.0.pass(), what)?;
            let right = b.1.backend.read(b.0.pass(), what)?;
            let (Some(left), Some(right)) = (left, right) else { continue };
            match what {
                Intermediate::RouteIds => self.compare_routes(&left, &right),
                Intermediate::Logits => {
                    (0..left.rows).for_each(|row| self.logits.add(left.row(row), right.row(row)));
                }
                _ => {}
            }
            if what != Intermediate::RouteIds {
                let entry = self.stages.entry((step.stage, step.layer, what)).or_default();
                entry.add(&left.data, &right.data);
            }
        }
        Ok(())
    }

    fn compare_routes(&mut self, left: &Matrix, right: &Matrix) {
        for row in 0..left.rows {
            let set = |m: &Matrix| {
                let mut ids: Vec<u32> = m.row(row).iter().map(|&id| id as u32).collect();
                ids.sort_unstable();
                ids
            };
            self.routes.0 += usize::from(set(left) != set(right));
            self.routes.1 += 1;
        }
    }
}
