//! What was written: the table an operation returns.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

use quant::Type;

use crate::tensors::Class;

/// What one operation wrote.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Summary {
    /// The finished file.
    pub path: PathBuf,
    /// Bytes of tensor data in it.
    pub bytes: u64,
    /// One line per tensor class and type, by class.
    pub lines: Vec<Line>,
    /// Tensors whose rows are no whole number of blocks of the type asked for.
    pub fallbacks: Vec<Fallback>,
    /// Tensors of the input that were left out on purpose (the MTP block of a checkpoint).
    pub skipped: Vec<String>,
}

/// All tensors of one class that have one type.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Line {
    /// The class.
    pub class: Class,
    /// The type.
    pub ty: Type,
    /// How many tensors.
    pub tensors: u64,
    /// How many weights.
    pub weights: u64,
    /// How many bytes.
    pub bytes: u64,
    /// √(Σ(w − ŵ)² / Σw²) of the encoded weights ŵ against the input w; `None` where nothing was encoded, or
    /// the type holds the input as it is.
    pub rms_error: Option<f64>,
}

/// A tensor that could not have the type asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fallback {
    /// The tensor.
    pub tensor: String,
    /// Weights in one of its rows.
    pub columns: u64,
    /// The type asked for.
    pub wanted: Type,
    /// The type it has.
    pub used: Type,
}

/// Prints the table with aligned columns, then the fallbacks and what was skipped.
impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:<16} {:<8} {:>7} {:>16} {:>16} {:>9}",
            "class", "type", "tensors", "weights", "bytes", "rms error"
        )?;
        for line in &self.lines {
            let error = line.rms_error.map_or("-".to_owned(), |error| format!("{error:.3e}"));
            writeln!(
                f,
                "{:<16} {:<8} {:>7} {:>16} {:>16} {:>9}",
                line.class.name(),
                line.ty,
                line.tensors,
                line.weights,
                line.bytes,
                error
            )?;
        }
        for fallback in &self.fallbacks {
            let Fallback { tensor, columns, wanted, used } = fallback;
            let block = wanted.block_len();
            writeln!(
                f,
                "{tensor}: {used}, because rows of {columns} are not whole {wanted} blocks of {block}"
            )?;
        }
        if let Some(first) = self.skipped.first() {
            writeln!(f, "skipped {} tensor(s), such as {first}", self.skipped.len())?;
        }
        Ok(())
    }
}

/// Squared error and squared norm of encoded weights.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Loss {
    pub(crate) error: f64,
    pub(crate) norm: f64,
}

impl Loss {
    /// The loss of `decoded` against `weights`.
    pub(crate) fn of(weights: &[f32], decoded: &[f32]) -> Loss {
        let mut loss = Loss::default();
        for (&w, &d) in weights.iter().zip(decoded) {
            loss.error += (f64::from(w) - f64::from(d)).powi(2);
            loss.norm += f64::from(w).powi(2);
        }
        loss
    }

    /// Adds another part.
    pub(crate) fn add(&mut self, other: Loss) {
        self.error += other.error;
        self.norm += other.norm;
    }
}

/// Collects lines.
#[derive(Default)]
pub(crate) struct Tally(BTreeMap<(Class, Type), (Line, Option<Loss>)>);

impl Tally {
    /// Adds one tensor.
    pub(crate) fn add(&mut self, class: Class, ty: Type, weights: u64, bytes: u64, loss: Option<Loss>) {
        let empty = Line { class, ty, tensors: 0, weights: 0, bytes: 0, rms_error: None };
        let (line, total) = self.0.entry((class, ty)).or_insert((empty, None));
        line.tensors += 1;
        line.weights += weights;
        line.bytes += bytes;
        if let Some(loss) = loss {
            total.get_or_insert_default().add(loss);
        }
    }

    /// The finished lines.
    pub(crate) fn lines(self) -> Vec<Line> {
        let rms = |loss: Loss| if loss.norm > 0.0 { (loss.error / loss.norm).sqrt() } else { 0.0 };
        self.0.into_values().map(|(line, loss)| Line { rms_error: loss.map(rms), ..line }).collect()
    }
}
