//! The half of `redlite parity` that compares with logits stored as .npy.

use std::collections::BTreeMap;
use std::path::Path;

use engine::compare::{Agreement, Difference};
use engine::parity::Parity;
use engine::{Cancel, Engine, LogitRows, Options, Request, npy};
use model::{Intermediate, MappedExperts, Stage};

use crate::args::{BackendName, ParityArgs};
use crate::failure::Failure;
use crate::open::{self, Opened};
use crate::parity::{limits, options};
use crate::report;

/// Compares the logits of `backend` with those at `path`, which are the base.
pub fn with_backend(
    args: &ParityArgs,
    opened: &Opened,
    backend: BackendName,
    path: &Path,
    tokens: &[u32],
    cancel: Cancel,
) -> Result<Parity, Failure> {
    let mut base = open(path, opened)?;
    let rows = base.rows();
    if rows != tokens.len() {
        report::say(format_args!(
            "redlite: warning: {} has {rows} rows, the text {} tokens: comparing the first {}",
            path.display(),
            tokens.len(),
            rows.min(tokens.len())
        ));
    }
    let rows = rows.min(tokens.len());
    let backend = open::backend(&opened.model, backend, options(args), limits(args, rows), args.json)?;
    let experts = Box::new(MappedExperts::new(&opened.model));
    let options = Options { chunk: args.chunk, context: rows };
    let mut engine = Engine::new(opened.model.clone(), backend, experts, options);
    let mut session = engine.open();
    let mut compared = Compared::new(opened);
    let mut failure = Ok(());
    let mut compare = |_: usize, row: &[f32]| {
        if failure.is_ok() {
            failure = base.row(&mut compared.base);
            compared.add(row);
        }
    };
    let mut request = Request {
        logits: LogitRows::Range(0..rows),
        on_logits: Some(&mut compare),
        cancel,
        ..Request::default()
    };
    engine.ingest(&mut session, &tokens[..rows], &mut request)?;
    failure?;
    Ok(compared.into_parity())
}

/// Compares two files of logits, the first of which is the base.
pub fn with_stored(opened: &Opened, a: &Path, b: &Path, limit: usize) -> Result<Parity, Failure> {
    let (mut base, mut other) = (open(a, opened)?, open(b, opened)?);
    let mut compared = Compared::new(opened);
    let mut row = vec![0.0; opened.model.spec.vocab];
    for _ in 0..base.rows().min(other.rows()).min(limit) {
        base.row(&mut compared.base)?;
        other.row(&mut row)?;
        compared.add(&row);
    }
    Ok(compared.into_parity())
}

/// Opens a file of logits of this model.
fn open(path: &Path, opened: &Opened) -> Result<npy::Reader, Failure> {
    let reader = npy::Reader::open(path)?;
    let (cols, vocab) = (reader.cols(), opened.model.spec.vocab);
    if cols != vocab {
        let reason = format!("{}: {cols} columns, the model has {vocab} tokens", path.display());
        return Err(Failure::Usage(reason));
    }
    Ok(reader)
}

/// What was found so far.
struct Compared {
    /// Logits of the base at the position at hand.
    base: Vec<f32>,
    logits: Agreement,
    difference: Difference,
    layers: usize,
}

impl Compared {
    fn new(opened: &Opened) -> Compared {
        let spec = &opened.model.spec;
        let (logits, difference) = (Agreement::default(), Difference::default());
        Compared { base: vec![0.0; spec.vocab], logits, difference, layers: spec.layers.len() }
    }

    /// Adds a row of the other side.
    fn add(&mut self, row: &[f32]) {
        self.logits.add(&self.base, row);
        self.difference.add(&self.base, row);
    }

    fn into_parity(self) -> Parity {
        let head = (Stage::Head, self.layers, Intermediate::Logits);
        let stages = BTreeMap::from([(head, self.difference)]);
        Parity { logits: self.logits, stages, ..Parity::default() }
    }
}
