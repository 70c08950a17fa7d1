//! The interface to the engine: books of passes, and each stage handed to its file.

use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::DriverError;
use model::state::{SequenceId, Snapshot, SnapshotShape};
use model::{
    Backend, Candidate, Capabilities, Error, Intermediate, Matrix, MatrixView, Pass, PassId, Peaks, Result,
    SlotMemory, Stage, Wave,
};

use crate::attention::provided;
use crate::driver::{Event, failed};
use crate::graph::Call;
use crate::open::{Buffers, Open, attention_columns, delta_columns};
use crate::{Cuda, fail, peaks};

impl Cuda {
    /// Calls a stage, or puts the call off.
    fn call(&mut self, pass: PassId, call: Call) -> Result<()> {
        let mut open = self.take(pass)?;
        let whole = matches!(call.stage, Stage::Experts | Stage::Head);
        let rows = if whole { 0..open.pass.rows() } else { call.rows.clone() };
        let fits = rows.end <= open.pass.rows() && (whole || rows.len() <= self.capabilities.block_rows);
        let at = (call.stage, rows.clone());
        let result = if fits {
            self.now_or_later(&mut open, Call { rows, ..call })
        } else {
            Err(Error::Pass(format!("rows {rows:?} of a pass of {} rows", open.pass.rows())))
        };
        open.last = result.is_ok().then_some(at);
        self.passes[pass.0 as usize] = Some(open);
        result
    }

    fn now_or_later(&mut self, open: &mut Open, call: Call) -> Result<()> {
        if open.deferred.is_some() {
            if self.can_record(&call) {
                open.deferred.get_or_insert_default().push(call);
                return Ok(());
            }
            self.bind("graph")?;
            self.flush(open)?;
        }
        let (stage, layer) = (call.stage, call.layer);
        if let Some(wave) = &call.wave {
            self.check_wave(open, layer, wave)?;
        }
        self.timed((stage, layer), |cuda| cuda.enqueue(open, &call).map_err(fail(stage.name(), layer)))
    }

    /// The work of a stage.
    pub(crate) fn enqueue(&mut self, open: &mut Open, call: &Call) -> std::result::Result<(), DriverError> {
        let Call { layer, rows, wave, .. } = call.clone();
        match call.stage {
            Stage::Embed => {
                self.embed_rows(open, rows)?;
                self.foresee(open, 0)
            }
            Stage::DeltaProject => self.delta_project_rows(open, layer, rows),
            Stage::DeltaMix => self.delta_mix_rows(open, layer, rows),
            Stage::DeltaOut => self.delta_out_rows(open, layer, rows),
            Stage::AttnProject => self.attn_project_rows(open, layer, rows),
            Stage::AttnMix => self.attn_mix_rows(open, layer, rows),
            Stage::AttnOut => self.attn_out_rows(open, layer, rows),
            Stage::Route => self.route_rows(open, layer, rows),
            Stage::Shared => self.shared_rows(open, layer, rows),
            Stage::Experts => self.expert_rows(open, layer, &wave.expect("experts come with a wave")),
            Stage::Head => {
                self.head_rows(open)?;
                self.settled(open)
            }
        }
    }

    /// Enqueues what was put off of a pass, with the context current.
    pub(crate) fn settle(&mut self, pass: PassId, what: &'static str) -> Result<()> {
        self.bind(what)?;
        let mut open = self.take(pass)?;
        let result = self.flush(&mut open);
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

    pub(crate) fn get(&self, pass: PassId) -> Result<&Open> {
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

    fn peaks(&mut self) -> Vec<Peaks> {
        // Without them a measurement is worth as much, and its table shorter.
        let measured = self.device.bind().map_err(failed("peaks"));
        measured.and_then(|()| peaks::measure(&self.device, &self.target)).into_iter().collect()
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
        let (device, about) = (&self.device, (&self.model.spec, &self.state));
        let prepared = buffers.prepare((device, &mut self.uploads), about, pass, &state);
        let tables = match prepared {
            Ok(tables) => tables,
            Err(error) => {
                self.state.table.abort(state);
                return Err(fail("begin", 0)(error));
            }
        };
        let longest = pass.runs.iter().map(|run| run.start).max().unwrap_or(0);
        let mut open = Open {
            pass: pass.clone(),
            state,
            single,
            last: None,
            routed: 0,
            grouped: false,
            summed: false,
            parts: provided(longest + 1),
            deferred: None,
            tables,
            buffers,
        };
        open.deferred = self.can_defer(&open).then(Vec::new);
        let rotated = if open.deferred.is_some() { Ok(()) } else { self.rotations(&open) };
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
        self.settle(pass, "commit")?;
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
            self.wait_for_foreseen();
        }
    }

    fn embed(&mut self, pass: PassId, rows: Range<usize>) -> Result<()> {
        self.call(pass, Call { stage: Stage::Embed, layer: 0, rows, wave: None })
    }

    fn delta_project(&mut self, pass: PassId, layer: usize, rows: Range<usize>) -> Result<()> {
        self.call(pass, Call { stage: Stage::DeltaProject, layer, rows, wave: None })
    }

    fn delta_mix(&mut self, pass: PassId, layer: usize, rows: Range<usize>) -> Result<()> {
        self.call(pass, Call { stage: Stage::DeltaMix, layer, rows, wave: None })
    }

    fn delta_out(&mut self, pass: PassId, layer: usize, rows: Range<usize>) -> Result<()> {
        self.call(pass, Call { stage: Stage::DeltaOut, layer, rows, wave: None })
    }

    fn attn_project(&mut self, pass: PassId, layer: usize, rows: Range<usize>) -> Result<()> {
        self.call(pass, Call { stage: Stage::AttnProject, layer, rows, wave: None })
    }

    fn attn_mix(&mut self, pass: PassId, layer: usize, rows: Range<usize>) -> Result<()> {
        self.call(pass, Call { stage: Stage::AttnMix, layer, rows, wave: None })
    }

    fn attn_out(&mut self, pass: PassId, layer: usize, rows: Range<usize>) -> Result<()> {
        self.call(pass, Call { stage: Stage::AttnOut, layer, rows, wave: None })
    }

    fn route(&mut self, pass: PassId, layer: usize, rows: Range<usize>) -> Result<()> {
        self.call(pass, Call { stage: Stage::Route, layer, rows, wave: None })
    }

    fn shared(&mut self, pass: PassId, layer: usize, rows: Range<usize>) -> Result<()> {
        self.call(pass, Call { stage: Stage::Shared, layer, rows, wave: None })
    }

    fn routes(&mut self, pass: PassId, layer: usize) -> Result<Vec<u32>> {
        self.settle(pass, "route")?;
        self.chosen(self.get(pass)?).map_err(fail("route", layer))
    }

    fn experts(&mut self, pass: PassId, layer: usize, wave: &Wave) -> Result<()> {
        self.call(pass, Call { stage: Stage::Experts, layer, rows: 0..0, wave: Some(wave.clone()) })
    }

    fn repeat(&mut self, pass: PassId) -> Result<bool> {
        self.bind("graph")?;
        let mut open = self.take(pass)?;
        let result = self.repeat_all(&mut open);
        self.passes[pass.0 as usize] = Some(open);
        result
    }

    fn slot_memory(&mut self, bytes: usize) -> Result<(u32, Arc<dyn SlotMemory>)> {
        self.bind("experts")?;
        self.add_arena(bytes)
    }

    fn predict(&mut self, pass: PassId, layer: usize, margin: usize) -> Result<Option<Vec<u32>>> {
        self.settle(pass, "route")?;
        let open = self.take(pass)?;
        let likely = self.likely(&open, layer, margin);
        self.passes[pass.0 as usize] = Some(open);
        likely.map_err(fail("route", layer))
    }

    fn head(&mut self, pass: PassId) -> Result<()> {
        let layer = self.model.spec.layers.len();
        self.call(pass, Call { stage: Stage::Head, layer, rows: 0..0, wave: None })
    }

    fn logits(&mut self, pass: PassId) -> Result<MatrixView<'_>> {
        let (rows, cols, at) = self.logits_of(pass)?;
        let data = self.land(at, rows * cols).map_err(fail("head", 0))?;
        Ok(MatrixView { rows, cols, data })
    }

    fn largest(&mut self, pass: PassId, counts: &[usize]) -> Result<Vec<Option<Vec<Candidate>>>> {
        let (_, cols, at) = self.logits_of(pass)?;
        self.pick((at, cols), counts).map_err(fail("head", 0))
    }

    fn hidden(&mut self, pass: PassId) -> Result<Matrix> {
        self.settle(pass, "head")?;
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
            return self.logits(pass).map(|logits| Some(logits.to_matrix()));
        }
        self.settle(pass, "read")?;
        let open = self.get(pass)?;
        match &open.last {
            Some((stage, rows)) if stage.intermediates().contains(&what) => {
                self.intermediate(open, what, rows.clone()).map_err(fail(stage.name(), 0))
            }
            _ => Ok(None),
        }
    }

    fn sync(&mut self) -> Result<()> {
        self.bind("sync")?;
        self.pace.clear();
        self.device.wait().map_err(fail("sync", 0))
    }

    /// The next chunk is enqueued while this one is computed, so that the GPU does not wait for the host.
    fn keep_pace(&mut self) -> Result<()> {
        self.pace.keep(&self.device, 1).map_err(fail("sync", 0))
    }
}

impl Cuda {
    /// The dimensions of the states of its sequences.
    pub(crate) fn snapshot_shape(&self) -> SnapshotShape {
        self.state.shape
    }

    /// Rows, columns and address of the logits of a pass, which are on their way.
    fn logits_of(&mut self, pass: PassId) -> Result<(usize, usize, u64)> {
        self.settle(pass, "head")?;
        let open = self.get(pass)?;
        match &open.last {
            Some((Stage::Head, _)) => {
                Ok((open.pass.logits.len(), self.model.spec.vocab, open.buffers.logits.at()))
            }
            _ => Err(Error::Pass("logits are read after the head".to_string())),
        }
    }

    /// Numbers of the GPU, copied to pinned memory that is used again. Waits.
    fn land(&mut self, at: u64, len: usize) -> std::result::Result<&[f32], DriverError> {
        if self.landing.as_ref().is_none_or(|landing| landing.bytes < 4 * len) {
            self.landing = Some(self.device.pinned(4 * len)?);
        }
        let landing = self.landing.as_mut().expect("just made");
        self.device.download_to(at, len, landing)
    }

    /// A value left by the stage called last, which is the one that makes it.
    fn intermediate(
        &self,
        open: &Open,
        what: Intermediate,
        rows: Range<usize>,
    ) -> std::result::Result<Option<Matrix>, DriverError> {
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
        let mixed = |cols: usize| self.read_rounded(buffers.mixed.at(), count, cols);
        if open.single && matches!(what, I::RouteWeights | I::RouteIds) {
            self.chosen_single(open)?;
        }
        let (queries, keys, channels) = (attention.query_dim(), attention.kv_dim(), delta.channels());
        let found = match what {
            // Computed together with what comes next.
            I::SharedOut | I::AttnQuery | I::AttnKey if open.single => return Ok(None),
            I::Embedded | I::DeltaHidden | I::AttnHidden | I::ExpertsHidden => {
                of_pass(buffers.hidden.at(), spec.hidden)
            }
            I::RouteNorm if open.single => of_pass(buffers.norm.at(), spec.hidden),
            I::RouteNorm => self.read_rounded(
                buffers.rounded.at() + 2 * (rows.start * spec.hidden) as u64,
                count,
                spec.hidden,
            ),
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
            // Only what products take is stored.
            I::AttnQuery => self.read_half(buffers.mixed.at(), count, queries),
            I::AttnGate => of_attention(queries, queries),
            I::AttnKey => of_attention(2 * queries, keys),
            I::AttnValue => of_attention(2 * queries + keys, keys),
            I::AttnMixed => mixed(queries),
            I::Logits => unreachable!("logits are read by `logits`"),
        };
        found.map(Some)
    }
}
