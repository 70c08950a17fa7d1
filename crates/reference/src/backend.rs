//! The stages as the driver calls them.

use std::collections::BTreeSet;
use std::ops::Range;

use model::state::host::HostState;
use model::{
    Backend, Candidate, Capabilities, Error, Intermediate, Matrix, MatrixView, Pass, PassId, Result,
    SequenceId, Snapshot, Wave,
};

use crate::open::Open;
use crate::{Context, Reference};

impl Reference {
    fn open(&mut self, pass: PassId) -> Result<(&Context, &mut HostState, &mut Open)> {
        let open = self.passes.get_mut(&pass.0).ok_or_else(|| no_pass(pass))?;
        Ok((&self.context, &mut self.state, open))
    }
}

fn no_pass(pass: PassId) -> Error {
    Error::Pass(format!("pass {} is not open", pass.0))
}

/// The `count` largest of a row and their equals, by falling size; what is not finite is larger than all else.
fn largest(row: &[f32], count: usize) -> Vec<Candidate> {
    let size = |c: &Candidate| if c.logit.is_finite() { c.logit } else { f32::INFINITY };
    let mut all: Vec<Candidate> = (0..).zip(row).map(|(id, &logit)| Candidate { id, logit }).collect();
    all.sort_by(|a, b| size(b).total_cmp(&size(a)));
    let least = all.get(count - 1).map_or(f32::NEG_INFINITY, size);
    all.retain(|candidate| size(candidate) >= least);
    all
}

impl Backend for Reference {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn create(&mut self) -> SequenceId {
        self.state.table_mut().create()
    }

    fn fork(&mut self, sequence: SequenceId) -> Result<SequenceId> {
        self.state.table_mut().fork(sequence)
    }

    fn free(&mut self, sequence: SequenceId) {
        self.state.table_mut().free(sequence);
    }

    fn position(&self, sequence: SequenceId) -> Result<usize> {
        self.state.table().position(sequence)
    }

    fn snapshot(&mut self, sequence: SequenceId) -> Result<Snapshot> {
        self.state.snapshot(sequence)
    }

    fn restore(&mut self, snapshot: &Snapshot) -> Result<SequenceId> {
        self.state.restore(snapshot)
    }

    fn begin(&mut self, pass: &Pass) -> Result<PassId> {
        let spec = &self.context.model.spec;
        pass.check(spec.vocab)?;
        if pass.rows() > self.limits.pass_rows {
            let (rows, limit) = (pass.rows(), self.limits.pass_rows);
            return Err(Error::Pass(format!("{rows} rows, but the plan allows {limit}")));
        }
        let open = Open::new(pass.clone(), self.state.open(pass)?, spec.hidden);
        let id = self.next_pass;
        self.next_pass = self.next_pass.wrapping_add(1);
        self.passes.insert(id, open);
        Ok(PassId(id))
    }

    fn commit(&mut self, pass: PassId) -> Result<()> {
        let open = self.passes.remove(&pass.0).ok_or_else(|| no_pass(pass))?;
        self.state.table_mut().commit(&open.pass, open.state);
        Ok(())
    }

    fn abort(&mut self, pass: PassId) {
        if let Some(open) = self.passes.remove(&pass.0) {
            self.state.table_mut().abort(open.state);
        }
    }

    fn embed(&mut self, pass: PassId, rows: Range<usize>) -> Result<()> {
        let (context, _, open) = self.open(pass)?;
        context.embed(open, rows)
    }

    fn delta_project(&mut self, pass: PassId, layer: usize, rows: Range<usize>) -> Result<()> {
        let (context, _, open) = self.open(pass)?;
        context.delta_project(open, layer, rows)
    }

    fn delta_mix(&mut self, pass: PassId, layer: usize, rows: Range<usize>) -> Result<()> {
        let (context, state, open) = self.open(pass)?;
        context.delta_mix(state, open, layer, rows)
    }

    fn delta_out(&mut self, pass: PassId, layer: usize, rows: Range<usize>) -> Result<()> {
        let (context, _, open) = self.open(pass)?;
        context.delta_out(open, layer, rows)
    }

    fn attn_project(&mut self, pass: PassId, layer: usize, rows: Range<usize>) -> Result<()> {
        let (context, state, open) = self.open(pass)?;
        context.attn_project(state, open, layer, rows)
    }

    fn attn_mix(&mut self, pass: PassId, layer: usize, rows: Range<usize>) -> Result<()> {
        let (context, state, open) = self.open(pass)?;
        context.attn_mix(state, open, layer, rows)
    }

    fn attn_out(&mut self, pass: PassId, layer: usize, rows: Range<usize>) -> Result<()> {
        let (context, _, open) = self.open(pass)?;
        context.attn_out(open, layer, rows)
    }

    fn route(&mut self, pass: PassId, layer: usize, rows: Range<usize>) -> Result<()> {
        let (context, _, open) = self.open(pass)?;
        context.route(open, layer, rows)
    }

    fn shared(&mut self, pass: PassId, layer: usize, rows: Range<usize>) -> Result<()> {
        let (context, _, open) = self.open(pass)?;
        context.shared(open, layer, rows)
    }

    fn routes(&mut self, pass: PassId, _layer: usize) -> Result<Vec<u32>> {
        let (_, _, open) = self.open(pass)?;
        let chosen: BTreeSet<u32> = open.moe.chosen.iter().flatten().map(|(expert, _)| *expert).collect();
        Ok(chosen.into_iter().collect())
    }

    fn experts(&mut self, pass: PassId, layer: usize, wave: &Wave) -> Result<()> {
        let (context, _, open) = self.open(pass)?;
        context.experts(open, layer, wave)
    }

    fn head(&mut self, pass: PassId) -> Result<()> {
        let (context, _, open) = self.open(pass)?;
        context.head(open)
    }

    fn logits(&mut self, pass: PassId) -> Result<MatrixView<'_>> {
        let (_, _, open) = self.open(pass)?;
        let logits = open.logits.as_ref().map(Matrix::view);
        logits.ok_or_else(|| Error::Pass("logits are read before `head`".to_string()))
    }

    fn largest(&mut self, pass: PassId, counts: &[usize]) -> Result<Vec<Option<Vec<Candidate>>>> {
        let logits = self.logits(pass)?;
        let of_row = |(row, &count)| (count > 0).then(|| largest(logits.row(row), count));
        Ok(counts.iter().enumerate().map(of_row).collect())
    }

    fn hidden(&mut self, pass: PassId) -> Result<Matrix> {
        let (_, _, open) = self.open(pass)?;
        let hidden = open.wanted_hidden.clone();
        hidden.ok_or_else(|| Error::Pass("hidden states are read before `head`".to_string()))
    }

    fn read(&mut self, pass: PassId, what: Intermediate) -> Result<Option<Matrix>> {
        let (_, _, open) = self.open(pass)?;
        Ok(open.left(what).cloned())
    }

    fn sync(&mut self) -> Result<()> {
        Ok(())
    }
}
