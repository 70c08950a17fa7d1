//! Passes of single rows, put off until somebody waits for them and then enqueued at once: as a recorded graph if every
//! stage is there, else one by one. Where nothing about experts changes, a recorded pass is not even put off ([`Cuda::repeat_all`]).
//!
//! A graph names memory and nothing that changes from token to token: tokens, positions, pages and slots are read from
//! tables on the GPU. One serves all positions with the same number of provided parts. The kernels are those of
//! passes that are not put off, so bits are the same.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::DriverError;
use model::{LayerKind, PlacedExpert, Result, Slot, Stage, Wave};

use crate::driver::Graph;
use crate::few::FEW;
use crate::open::Open;
use crate::{Cuda, fail};

/// A stage call.
#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub(crate) stage: Stage,
    pub(crate) layer: usize,
    pub(crate) rows: Range<usize>,
    /// Of [`Stage::Experts`].
    pub(crate) wave: Option<Wave>,
}

/// What graphs are told apart by: rows, provided parts of positions, whether there are logits, and all memory they name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Key {
    rows: usize,
    parts: usize,
    logits: usize,
    /// Backends on the GPU, which say how many blocks may wait for one another.
    present: usize,
    memory: u64,
}

/// Recorded passes.
#[derive(Default)]
pub(crate) struct Graphs {
    /// The one used last is last. `None`: was run once, which gave it all its memory.
    known: Vec<(Key, Option<Graph>)>,
    /// Of each layer, the wave last seen to be the whole layer in the file's copy.
    whole: Vec<Option<Arc<[PlacedExpert]>>>,
}

/// Graphs that are kept: eight numbers of rows at some lengths.
const MOST: usize = 32;

impl Cuda {
    /// Whether a pass may be put off.
    pub(crate) fn can_defer(&self, open: &Open) -> bool {
        let rows = open.pass.rows();
        let logits = open.pass.logits.iter().copied().eq(0..rows) || open.pass.logits.is_empty();
        let snapshots = open.state.runs.iter().any(|run| !run.snapshots.is_empty());
        let plain = open.pass.hidden.is_empty() && logits && !snapshots;
        self.options.graphs && !self.profiling && open.single && rows <= FEW && plain
    }

    /// Whether a call can be part of a graph.
    pub(crate) fn can_record(&mut self, call: &Call) -> bool {
        let Some(wave) = &call.wave else { return true };
        // Experts that come and go by the host's word are told with each wave.
        let here = self.whole || self.fetch.is_some();
        if !here || !wave.last || wave.experts.len() != self.model.spec.moe.experts {
            return false;
        }
        self.graphs.whole.resize(self.model.spec.layers.len(), None);
        let seen = &mut self.graphs.whole[call.layer];
        if seen.as_ref().is_some_and(|seen| Arc::ptr_eq(seen, &wave.experts)) {
            return true;
        }
        let whole = (0..)
            .zip(&*wave.experts)
            .all(|(i, placed)| placed.expert == i && placed.slot.arena == Slot::FILE);
        *seen = whole.then(|| wave.experts.clone());
        whole
    }

    /// Enqueues what was put off.
    pub(crate) fn flush(&mut self, open: &mut Open) -> Result<()> {
        let Some(calls) = open.deferred.take() else { return Ok(()) };
        if !self.is_complete(open, &calls) {
            return self.run_all(open, &calls);
        }
        let key = self.key(open);
        if self.replay(key)? {
            return Ok(());
        }
        let Some(index) = self.graphs.known.iter().position(|(known, _)| *known == key) else {
            self.run_all(open, &calls)?;
            // The first run may have taken memory.
            self.remember(self.key(open), None);
            return Ok(());
        };
        self.graphs.known.remove(index);
        let graph = self.record(open, &calls).map_err(fail("graph", 0))?;
        self.remember(key, Some(graph));
        self.replay(key).map(drop)
    }

    /// Enqueues the graph of a pass, if there is one.
    fn replay(&mut self, key: Key) -> Result<bool> {
        let is_its = |(known, graph): &(Key, Option<Graph>)| *known == key && graph.is_some();
        let Some(index) = self.graphs.known.iter().position(is_its) else { return Ok(false) };
        self.graphs.known[index..].rotate_left(1);
        let graph = self.graphs.known.last().and_then(|(_, graph)| graph.as_ref());
        graph.map_or(Ok(()), |graph| self.device.replay(graph)).map_err(fail("graph", 0)).map(|()| true)
    }

    /// Enqueues the graph of a pass with logits of which nothing has been called yet, if there is one.
    pub(crate) fn repeat_all(&mut self, open: &mut Open) -> Result<bool> {
        let untouched = open.deferred.as_ref().is_some_and(Vec::is_empty);
        if !untouched || open.pass.logits.is_empty() || !self.replay(self.key(open))? {
            return Ok(false);
        }
        open.deferred = None;
        open.last = Some((Stage::Head, 0..open.pass.rows()));
        Ok(true)
    }

    fn remember(&mut self, key: Key, graph: Option<Graph>) {
        if self.graphs.known.len() >= MOST {
            self.graphs.known.remove(0);
        }
        self.graphs.known.push((key, graph));
    }

    fn record(&mut self, open: &mut Open, calls: &[Call]) -> std::result::Result<Graph, DriverError> {
        let device = self.device.clone();
        device.record(|| {
            self.rotations(open)?;
            calls.iter().try_for_each(|call| self.enqueue(open, call))
        })
    }

    /// Everything one by one.
    fn run_all(&mut self, open: &mut Open, calls: &[Call]) -> Result<()> {
        self.rotations(open).map_err(fail("begin", 0))?;
        calls
            .iter()
            .try_for_each(|call| self.enqueue(open, call).map_err(fail(call.stage.name(), call.layer)))
    }

    /// Whether the calls are all stages of a pass in their order.
    fn is_complete(&self, open: &Open, calls: &[Call]) -> bool {
        use Stage as S;
        const DELTA: [Stage; 6] =
            [S::DeltaProject, S::DeltaMix, S::DeltaOut, S::Route, S::Shared, S::Experts];
        const ATTENTION: [Stage; 6] =
            [S::AttnProject, S::AttnMix, S::AttnOut, S::Route, S::Shared, S::Experts];
        let layers = &self.model.spec.layers;
        let all = layers.iter().enumerate().flat_map(|(layer, kind)| {
            let stages = if *kind == LayerKind::Delta { DELTA } else { ATTENTION };
            stages.map(|stage| (stage, layer))
        });
        let head = (!open.pass.logits.is_empty()).then_some((S::Head, layers.len()));
        let embed = self.model.has_start().then_some((S::Embed, 0));
        let expected = embed.into_iter().chain(all).chain(head);
        calls.iter().map(|call| (call.stage, call.layer)).eq(expected)
    }

    fn key(&self, open: &Open) -> Key {
        let mut hasher = DefaultHasher::new();
        open.buffers.addresses().for_each(|at| at.hash(&mut hasher));
        self.scratch.addresses().for_each(|at| at.hash(&mut hasher));
        let (rows, logits, memory) = (open.pass.rows(), open.pass.logits.len(), hasher.finish());
        Key { rows, parts: open.parts, logits, present: self.presence.count(), memory }
    }
}
