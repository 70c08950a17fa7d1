//! The interface to the engine: books of passes, and each stage handed to its file.

use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::DriverError;
use model::state::{SequenceId, Snapshot};
use model::{
    Backend, Capabilities, Error, Intermediate, Matrix, Pass, PassId, Result, SlotMemory, Stage, Wave,
};

use crate::driver::Event;
use crate::open::{Buffers, Open, attention_columns, delta_columns};
use crate::{Cuda, fail};

impl Cuda {
    /// Takes an open pass out of the books, does `work` with it and notes the stage.
    fn stage<T>(
        &mut self,
        pass: PassId,
        (stage, layer, rows): (Stage, usize, Range<usize>),
        work: impl FnOnce(&mut Cuda, &mut Open) -> Result<T>,
    ) -> Result<T> {
        let mut open = self.take(pass)?;
        let whole = matches!(stage, Stage::Experts | Stage::Head);
        let rows = if whole { 0..open.pass.rows() } else { rows };
        let fits = rows.end <= open.pass.rows() && (whole || rows.len() <= self.capabilities.block_rows);
        let result = if fits {
            self.timed((stage, layer), |cuda| work(cuda, &mut open))
        } else {
            Err(Error::Pass(format!("rows {rows:?} of a pass of {} rows", open.pass.rows())))
        };
        open.last = result.is_ok().then_some((stage, rows));
        self.passes[pass.0 as usize] = Some(open);
        result
    }

    /// Does `work` with the context current, between two events if times are taken.
    fn timed<T>(
        &mut self,
        (stage, layer): (Stage, usize),
        work: impl FnOnce(&mut Cuda) -> Result<T>,
    ) -> Result<T> {
        let fail = fail(stage.name(), layer);
        self.device.bind().map_err(&fail)?;
        let start = if self.profiling { Some(Event::record(&self.device).map_err(&fail)?) } else { None };
        let result = work(self)?;
        if let Some(start) = start {
            let end = Event::record(&self.device).map_err(&fail)?;
            self.spans.push((stage, start, end));
        }
        Ok(result)
    }

    fn take(&mut self, pass: PassId) -> Result<Box<Open>> {
        let open = self.passes.get_mut(pass.0 as usize).and_then(Option::take);
        open.ok_or_else(|| Error::Pass(format!("pass {} is not open", pass.0)))
    }

    fn get(&self, pass: PassId) -> Result<&Open> {
        let open = self.passes.get(pass.0 as usize).and_then(Option::as_ref);
        open.map(|open| &**open).ok_or_else(|| Error::Pass(format!("pass {} is not open", pass.0)))
    }

    /// Buffers for a pass: the smallest spare ones that suffice, else the largest, made larger.
    fn buffers(&mut self, rows: usize) -> Buffers {
        self.spare.sort_by_key(Buffers::rows);
        match self.spare.iter().position(|buffers| buffers.rows() >= rows) {
            Some(index) => self.spare.remove(index),
            None => self.spare.pop().unwrap_or_default(),
        }
    }

    fn bind(&self, what: &'static str) -> Result<()> {
        self.device.bind().map_err(fail(what, 0))
    }
}

impl Backend for Cuda {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn enqueues(&self) -> bool {
        true
    }

    fn create(&mut self) -> SequenceId {
        self.state.table.create()
    }

    fn fork(&mut self, sequence: SequenceId) -> Result<SequenceId> {
        self.state.table.fork(sequence)
    }

    fn free(&mut self, sequence: SequenceId) {
        self.state.table.free(sequence);
    }

    fn position(&self, sequence: SequenceId) -> Result<usize> {
        self.state.table.position(sequence)
    }

    fn snapshot(&mut self, sequence: SequenceId) -> Result<Snapshot> {
        self.bind("snapshot")?;
        self.state.snapshot(sequence)
    }

    fn restore(&mut self, snapshot: &Snapshot) -> Result<SequenceId> {
        self.bind("restore")?;
        self.state.restore(snapshot)
    }

    fn begin(&mut self, pass: &Pass) -> Result<PassId> {
        pass.check(self.model.spec.vocab)?;
        if pass.rows() > self.limits.pass_rows {
            let most = self.limits.pass_rows;
            return Err(Error::Pass(format!("{} rows, planned for at most {most}", pass.rows())));
        }
        self.bind("begin")?;
        let state = self.state.open(pass)?;
        let mut buffers = self.buffers(pass.rows());
        let single = pass.runs.iter().all(|run| run.rows.len() == 1);
        let prepared = buffers.prepare(&self.device, (&self.model.spec, &self.state), pass, &state);
        let tables = match prepared {
            Ok(tables) => tables,
            Err(error) => {
                self.state.table.abort(state);
                return Err(fail("begin", 0)(error));
            }
        };
        let (routed, grouped, last) = (0, false, None);
        let open = Open { pass: pass.clone(), state, single, last, routed, grouped, tables, buffers };
        let rotated = self.rotations(&open);
        let free = self.passes.iter().position(Option::is_none);
        let index = free.unwrap_or_else(|| {
            self.passes.push(None);
            self.passes.len() - 1
        });
        let id = PassId(index as u32);
        self.passes[index] = Some(Box::new(open));
        match rotated {
            Ok(()) => Ok(id),
            Err(error) => {
                self.abort(id);
                Err(fail("begin", 0)(error))
            }
        }
    }

    fn commit(&mut self, pass: PassId) -> Result<()> {
        let Open { pass, state, buffers, .. } = *self.take(pass)?;
        self.state.table.commit(&pass, state);
        self.spare.push(buffers);
        Ok(())
    }

    fn abort(&mut self, pass: PassId) {
        if let Ok(open) = self.take(pass) {
            let Open { state, buffers, .. } = *open;
            self.state.table.abort(state);
            self.spare.push(buffers);
        }
    }

    fn embed(&mut self, pass: PassId, rows: Range<usize>) -> Result<()> {
        let at = (Stage::Embed, 0, rows.clone());
        self.stage(pass, at, |cuda, open| cuda.embed_rows(open, rows).map_err(fail("embed", 0)))
    }

    fn delta_project(&mut self, pass: PassId, layer: usize, rows: Range<usize>) -> Result<()> {
        self.simple(pass, (Stage::DeltaProject, layer, rows), |c, o, l, r| c.delta_project_rows(o, l, r))
    }

    fn delta_mix(&mut self, pass: PassId, layer: usize, rows: Range<usize>) -> Result<()> {
        self.simple(pass, (Stage::DeltaMix, layer, rows), |c, o, l, r| c.delta_mix_rows(o, l, r))
    }

    fn delta_out(&mut self, pass: PassId, layer: usize, rows: Range<usize>) -> Result<()> {
        self.simple(pass, (Stage::DeltaOut, layer, rows), |c, o, l, r| c.delta_out_rows(o, l, r))
    }

    fn attn_project(&mut self, pass: PassId, layer: usize, rows: Range<usize>) -> Result<()> {
        self.simple(pass, (Stage::AttnProject, layer, rows), |c, o, l, r| c.attn_project_rows(o, l, r))
    }

    fn attn_mix(&mut self, pass: PassId, layer: usize, rows: Range<usize>) -> Result<()> {
        self.simple(pass, (Stage::AttnMix, layer, rows), |c, o, l, r| c.attn_mix_rows(o, l, r))
    }

    fn attn_out(&mut self, pass: PassId, layer: usize, rows: Range<usize>) -> Result<()> {
        self.simple(pass, (Stage::AttnOut, layer, rows), |c, o, l, r| c.attn_out_rows(o, l, r))
    }

    fn route(&mut self, pass: PassId, layer: usize, rows: Range<usize>) -> Result<()> {
        self.simple(pass, (Stage::Route, layer, rows), |c, o, l, r| c.route_rows(o, l, r))
    }

    fn shared(&mut self, pass: PassId, layer: usize, rows: Range<usize>) -> Result<()> {
        self.simple(pass, (Stage::Shared, layer, rows), |c, o, l, r| c.shared_rows(o, l, r))
    }

    fn routes(&mut self, pass: PassId, layer: usize) -> Result<Vec<u32>> {
        self.bind("route")?;
        self.chosen(self.get(pass)?).map_err(fail("route", layer))
    }

    fn experts(&mut self, pass: PassId, layer: usize, wave: &Wave) -> Result<()> {
        self.stage(pass, (Stage::Experts, layer, 0..0), |cuda, open| cuda.expert_rows(open, layer, wave))
    }

    fn slot_memory(&mut self, bytes: usize) -> Result<(u32, Arc<dyn SlotMemory>)> {
        self.bind("experts")?;
        self.add_arena(bytes)
    }

    fn predict(&mut self, pass: PassId, layer: usize, margin: usize) -> Result<Option<Vec<u32>>> {
        self.bind("route")?;
        let open = self.take(pass)?;
        let likely = self.likely(&open, layer, margin);
        self.passes[pass.0 as usize] = Some(open);
        likely.map_err(fail("route", layer))
    }

    fn head(&mut self, pass: PassId) -> Result<()> {
        let layer = self.model.spec.layers.len();
        self.stage(pass, (Stage::Head, layer, 0..0), |cuda, open| {
            cuda.head_rows(open).map_err(fail("head", layer))
        })
    }

    fn logits(&mut self, pass: PassId) -> Result<Matrix> {
        self.bind("head")?;
        let open = self.get(pass)?;
        match &open.last {
            Some((Stage::Head, _)) => {
                let (count, vocab) = (open.pass.logits.len(), self.model.spec.vocab);
                self.read_rows(open.buffers.logits.at(), vocab, count, vocab).map_err(fail("head", 0))
            }
            _ => Err(Error::Pass("logits are read after the head".to_string())),
        }
    }

    fn hidden(&mut self, pass: PassId) -> Result<Matrix> {
        self.bind("head")?;
        let open = self.get(pass)?;
        match &open.last {
            Some((Stage::Head, _)) => {
                let (count, hidden) = (open.pass.hidden.len(), self.model.spec.hidden);
                self.read_rows(open.buffers.wanted.at(), hidden, count, hidden).map_err(fail("head", 0))
            }
            _ => Err(Error::Pass("hidden states are read after the head".to_string())),
        }
    }

    fn read(&mut self, pass: PassId, what: Intermediate) -> Result<Option<Matrix>> {
        if what == Intermediate::Logits {
            return self.logits(pass).map(Some);
        }
        self.bind("read")?;
        let open = self.get(pass)?;
        match &open.last {
            Some((stage, rows)) if stage.intermediates().contains(&what) => {
                self.intermediate(open, what, rows.clone()).map(Some).map_err(fail(stage.name(), 0))
            }
            _ => Ok(None),
        }
    }

    fn sync(&mut self) -> Result<()> {
        self.bind("sync")?;
        self.device.wait().map_err(fail("sync", 0))
    }
}

impl Cuda {
    /// A stage that works on some rows of a layer.
    fn simple(
        &mut self,
        pass: PassId,
        (stage, layer, rows): (Stage, usize, Range<usize>),
        work: fn(&mut Cuda, &mut Open, usize, Range<usize>) -> std::result::Result<(), DriverError>,
    ) -> Result<()> {
        self.stage(pass, (stage, layer, rows.clone()), |cuda, open| {
            work(cuda, open, layer, rows).map_err(fail(stage.name(), layer))
        })
    }

    /// A value left by the stage called last, which is the one that makes it.
    fn intermediate(
        &self,
        open: &Open,
        what: Intermediate,
        rows: Range<usize>,
    ) -> std::result::Result<Matrix, DriverError> {
        use Intermediate as I;
        let (spec, buffers, count) = (&self.model.spec, &open.buffers, rows.len());
        let (delta, attention) = (&spec.delta, &spec.attention);
        let of_pass =
            |at: u64, cols: usize| self.read_rows(at + 4 * (rows.start * cols) as u64, cols, count, cols);
        let of_block = |stride: usize, first: usize, cols: usize| {
            self.read_rows(buffers.projected.at() + 4 * first as u64, stride, count, cols)
        };
        let of_delta = |first, cols| of_block(delta_columns(spec), first, cols);
        let of_attention = |first, cols| of_block(attention_columns(spec), first, cols);
        let mixed = |cols: usize| {
            let at = buffers.mixed.at();
            if open.single {
                self.read_rows(at, cols, count, cols)
            } else {
                self.read_rounded(at, count, cols)
            }
        };
        let (queries, keys, channels) = (attention.query_dim(), attention.kv_dim(), delta.channels());
        match what {
            I::Embedded | I::DeltaHidden | I::AttnHidden | I::ExpertsHidden => {
                of_pass(buffers.hidden.at(), spec.hidden)
            }
            I::RouteNorm => of_pass(buffers.norm.at(), spec.hidden),
            I::SharedOut => of_pass(buffers.sum.at(), spec.hidden),
            I::RouteWeights => of_pass(buffers.weights.at(), spec.moe.used),
            I::RouteIds => {
                let used = spec.moe.used;
                let ids: Vec<u32> =
                    self.device.download(buffers.ids.at() + 4 * (rows.start * used) as u64, count * used)?;
                Ok(Matrix { rows: count, cols: used, data: ids.iter().map(|&id| id as f32).collect() })
            }
            I::DeltaQkv => of_delta(0, channels),
            I::DeltaZ => of_delta(channels, delta.value_dim()),
            I::DeltaBetaAlpha => of_delta(channels + delta.value_dim(), 2 * delta.value_heads),
            I::DeltaMixed => mixed(delta.value_dim()),
            I::AttnQuery => of_attention(0, queries),
            I::AttnGate => of_attention(queries, queries),
            I::AttnKey => of_attention(2 * queries, keys),
            I::AttnValue => of_attention(2 * queries + keys, keys),
            I::AttnMixed => mixed(queries),
            I::Logits => unreachable!("logits are read by `logits`"),
        }
    }
}
