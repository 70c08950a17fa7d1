//! Watching which experts tokens choose, and what the look-ahead would have named.

use std::time::Duration;

use experts::simulate::{Chosen, Trace};
use model::{Backend, Intermediate, Observer, PassId, Spec, Stage, Step};

/// Notes the choices of every row, and for single rows the look-ahead's guess of the next layer.
pub struct Recorder {
    /// Everything so far.
    pub trace: Trace,
    /// How often each expert was chosen, by layer.
    pub counts: Vec<Vec<u64>>,
    /// Experts beyond a row's choice that a guess may name.
    pub margin: usize,
    /// Tokens of passes that are complete.
    before: usize,
    rows: usize,
    /// What the guess for the next layer names: without and with the margin.
    guess: Option<[Vec<u32>; 2]>,
    /// By layer: experts chosen by single rows, and those named without and with the margin.
    named: Vec<[u64; 3]>,
}

impl Recorder {
    /// For a model.
    pub fn new(spec: &Spec, margin: usize) -> Recorder {
        let layers = spec.layers.len();
        Recorder {
            trace: Trace::default(),
            counts: vec![vec![0; spec.moe.experts]; layers],
            margin,
            before: 0,
            rows: 0,
            guess: None,
            named: vec![[0; 3]; layers],
        }
    }

    /// Shares of the experts chosen by single rows that had been named, without and with the margin.
    pub fn recall(&self) -> [f64; 2] {
        let sum = self.named.iter().fold([0; 3], |sum, layer| [0, 1, 2].map(|at| sum[at] + layer[at]));
        [sum[1], sum[2]].map(|named| named as f64 / sum[0].max(1) as f64)
    }

    /// The same for each layer; the first one cannot be guessed.
    pub fn recall_by_layer(&self) -> Vec<[f64; 2]> {
        let share =
            |layer: &[u64; 3]| [layer[1], layer[2]].map(|named| named as f64 / layer[0].max(1) as f64);
        self.named.iter().skip(1).map(share).collect()
    }

    fn note(&mut self, layer: usize, token: usize, used: Vec<u32>) {
        let tokens = &mut self.trace.tokens;
        if tokens.len() <= token {
            tokens.resize(token + 1, Vec::new());
        }
        used.iter().for_each(|&expert| self.counts[layer][expert as usize] += 1);
        let mut predicted = Vec::new();
        if let Some([top, more]) = self.guess.take() {
            let count = |named: &[u32]| used.iter().filter(|expert| named.contains(expert)).count() as u64;
            let found = [used.len() as u64, count(&top), count(&more)];
            self.named[layer].iter_mut().zip(found).for_each(|(sum, found)| *sum += found);
            predicted = more;
        }
        tokens[token].push(Chosen { used, predicted });
    }
}

impl Observer for Recorder {
    fn after(
        &mut self,
        step: &Step,
        _: Duration,
        backend: &mut dyn Backend,
        pass: PassId,
    ) -> model::Result<()> {
        match step.stage {
            Stage::Embed if step.rows.start == 0 => {
                self.before += std::mem::take(&mut self.rows);
                self.rows = step.rows.end;
            }
            Stage::Embed => self.rows = step.rows.end,
            Stage::Route => {
                if let Some(ids) = backend.read(pass, Intermediate::RouteIds)? {
                    for row in 0..ids.rows {
                        let mut used: Vec<u32> = ids.row(row).iter().map(|&id| id as u32).collect();
                        used.sort_unstable();
                        self.note(step.layer, self.before + step.rows.start + row, used);
                    }
                }
            }
            // The backend can predict between the shared expert and the next layer.
            Stage::Shared if self.rows == 1 && step.layer + 1 < self.counts.len() => {
                let top = backend.predict(pass, step.layer + 1, 0)?;
                let more = backend.predict(pass, step.layer + 1, self.margin)?;
                self.guess = top.zip(more).map(|(top, more)| [top, more]);
            }
            _ => {}
        }
        Ok(())
    }
}
