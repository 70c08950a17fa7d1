//! `redlite logits`: logits or any named intermediate as .npy.

use std::ops::Range;

use engine::{LogitRows, Request, npy};
use model::{Backend, Intermediate, LayerKind, Matrix, Observer, PassId, Spec, Stage, Step};

use crate::args::LogitsArgs;
use crate::failure::{Failure, Outcome};
use crate::report::Bar;
use crate::{interrupt, open, prompt};

/// Runs the command.
pub fn run(args: &LogitsArgs) -> Result<Outcome, Failure> {
    let wanted = args.name.as_deref().map(parse_name).transpose()?;
    let opened = open::model(&args.model)?;
    open::refuse_input(&args.output, &opened.model.gguf)?;
    let tokens = prompt::tokens(&args.tokens, &opened.tokenizer)?;
    let cancel = interrupt::on_ctrl_c()?;
    let rows = args.rows.clone().unwrap_or(0..tokens.len());
    if rows.end > tokens.len() {
        let count = tokens.len();
        let (start, end) = (rows.start, rows.end);
        return Err(Failure::Usage(format!(
            "--rows {start}..{end} ends beyond the {count} tokens of the text"
        )));
    }
    let tokens = &tokens[..rows.end];
    if let Some((what, layer)) = wanted {
        check_layer(what, layer, &opened.model.spec)?;
    }
    let context = args.backend.context.unwrap_or(tokens.len()).max(1);
    let mut engine = open::start(&opened.model, &args.backend, context, false)?.engine;
    let mut session = engine.open();
    let bar = Bar::tokens("reading", tokens.len(), false);
    let mut progress = |done: f64, _| bar.set(done as u64);
    let mut request = Request { on_progress: Some(&mut progress), cancel, ..Request::default() };

    if let Some((what, layer)) = wanted {
        let mut dump = Dump { what, layer, rows: rows.clone(), start: 0, found: Matrix::default() };
        request.logits = LogitRows::None;
        request.observer = Some(&mut dump);
        engine.ingest(&mut session, tokens, &mut request)?;
        bar.finish();
        return dump.write(args);
    }
    let mut file = npy::Writer::create(&args.output, rows.len(), opened.model.spec.vocab)?;
    let mut failure = Ok(());
    let mut write = |_: usize, logits: &[f32]| {
        if failure.is_ok() {
            failure = file.row(logits);
        }
    };
    request.logits = LogitRows::Range(rows);
    request.on_logits = Some(&mut write);
    engine.ingest(&mut session, tokens, &mut request)?;
    bar.finish();
    failure?;
    file.finish()?;
    Ok(Outcome::Success)
}

/// `STAGE.LAYER`, where the stage may have a suffix of its own.
fn parse_name(name: &str) -> Result<(Intermediate, usize), Failure> {
    let parsed = match name.rsplit_once('.') {
        Some((stage, layer)) => layer.parse().ok().zip(Intermediate::from_name(stage)),
        None => None,
    };
    let whole = || Intermediate::from_name(name).filter(|what| *what == Intermediate::Embedded);
    parsed.map(|(layer, what)| (what, layer)).or_else(|| whole().map(|what| (what, 0))).ok_or_else(|| {
        let names: Vec<&str> =
            Intermediate::all().filter(|i| *i != Intermediate::Logits).map(Intermediate::name).collect();
        Failure::Usage(format!("`{name}` is not STAGE.LAYER; stages are {}", names.join(", ")))
    })
}

/// Refuses an intermediate that the layer does not have, before anything is computed.
fn check_layer(what: Intermediate, layer: usize, spec: &Spec) -> Result<(), Failure> {
    let stage = Stage::ALL.into_iter().find(|stage| stage.intermediates().contains(&what));
    let of_kind = |kind| spec.layers.get(layer) == Some(&kind);
    let exists = match stage {
        Some(Stage::DeltaProject | Stage::DeltaMix | Stage::DeltaOut) => of_kind(LayerKind::Delta),
        Some(Stage::AttnProject | Stage::AttnMix | Stage::AttnOut) => of_kind(LayerKind::Attention),
        Some(Stage::Embed) => layer == 0,
        Some(Stage::Head) | None => false,
        Some(Stage::Route | Stage::Shared | Stage::Experts) => layer < spec.layers.len(),
    };
    if exists {
        return Ok(());
    }
    let attends = |&layer: &usize| spec.layers[layer] == LayerKind::Attention;
    let attending: Vec<String> = (0..spec.layers.len()).filter(attends).map(|i| i.to_string()).collect();
    Err(Failure::Usage(format!(
        "layer {layer} has no `{what}`: there are {} layers, of which {} attend and the others are DeltaNet",
        spec.layers.len(),
        attending.join(", ")
    )))
}

/// Collects one intermediate of one layer.
struct Dump {
    what: Intermediate,
    layer: usize,
    rows: Range<usize>,
    /// Tokens of the chunks before the current one.
    start: usize,
    found: Matrix,
}

impl Observer for Dump {
    fn after(
        &mut self,
        step: &Step,
        _: std::time::Duration,
        backend: &mut dyn Backend,
        pass: PassId,
    ) -> Result<(), model::Error> {
        if step.layer != self.layer || !step.stage.intermediates().contains(&self.what) {
            return Ok(());
        }
        let Some(matrix) = backend.read(pass, self.what)? else { return Ok(()) };
        for row in 0..matrix.rows {
            if self.rows.contains(&self.start) {
                self.found.rows += 1;
                self.found.cols = matrix.cols;
                self.found.data.extend_from_slice(matrix.row(row));
            }
            self.start += 1;
        }
        Ok(())
    }
}

impl Dump {
    fn write(self, args: &LogitsArgs) -> Result<Outcome, Failure> {
        if self.found.rows == 0 {
            let reason = format!(
                "this backend does not keep `{}`: it computes the stages around it as one",
                self.what
            );
            return Err(Failure::Usage(reason));
        }
        let mut file = npy::Writer::create(&args.output, self.found.rows, self.found.cols)?;
        for row in 0..self.found.rows {
            file.row(self.found.row(row))?;
        }
        file.finish()?;
        Ok(Outcome::Success)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_carry_their_layer() {
        assert_eq!(parse_name("delta.mix.3").unwrap(), (Intermediate::DeltaMixed, 3));
        assert_eq!(parse_name("route.ids.11").unwrap(), (Intermediate::RouteIds, 11));
        assert_eq!(parse_name("embed").unwrap(), (Intermediate::Embedded, 0));
        assert!(parse_name("delta.mix").is_err());
        assert!(parse_name("nonsense.1").is_err());
    }
}
