//! The loop over stages, as a state machine that can stop between any two steps.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::backend::{Backend, PassId, PlacedExpert, Wave};
use crate::error::Result;
use crate::model::Model;
use crate::pass::Pass;
use crate::spec::{LayerKind, Spec};
use crate::stage::{Stage, Step};

/// Where the bytes of routed experts come from.
pub trait ExpertSource {
    /// Whether [`ExpertSource::start`] must be told which experts the rows chose. Reading routes waits
    /// for the backend, so a source that has every expert in place says no.
    fn needs_routes(&self) -> bool;

    /// A layer begins. `used` are the experts its rows chose, ascending; `None` if not asked for.
    fn start(&mut self, layer: usize, used: Option<&[u32]>) -> Result<()>;

    /// The next wave of the layer, its bytes in place until the next call. The last one says so.
    fn wave(&mut self) -> Result<Wave>;
}

/// The mapped file as a source: every expert is in place, the operating system fetches it.
#[derive(Clone, Debug)]
pub struct MappedExperts {
    layers: Vec<Arc<[PlacedExpert]>>,
    layer: usize,
}

impl MappedExperts {
    /// All experts of `model`.
    pub fn new(model: &Model) -> MappedExperts {
        let layers = (0..model.spec.layers.len()).map(|layer| model.mapped_experts(layer).into()).collect();
        MappedExperts { layers, layer: 0 }
    }
}

impl ExpertSource for MappedExperts {
    fn needs_routes(&self) -> bool {
        false
    }

    fn start(&mut self, layer: usize, _used: Option<&[u32]>) -> Result<()> {
        self.layer = layer;
        Ok(())
    }

    fn wave(&mut self) -> Result<Wave> {
        Ok(Wave { experts: self.layers[self.layer].clone(), last: true })
    }
}

/// Watches a pass: profile, dumps, parity.
pub trait Observer {
    /// A step has been called; the backend can be read. `elapsed` is the time of its calls (experts may take
    /// several), which is the time of the work only on backends that do not enqueue.
    fn after(
        &mut self,
        step: &Step,
        elapsed: Duration,
        backend: &mut dyn Backend,
        pass: PassId,
    ) -> Result<()>;
}

/// An observer that does not look.
#[derive(Clone, Copy, Debug, Default)]
pub struct Quiet;

impl Observer for Quiet {
    fn after(&mut self, _: &Step, _: Duration, _: &mut dyn Backend, _: PassId) -> Result<()> {
        Ok(())
    }
}

/// How far a pass is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Steps called.
    pub done: usize,
    /// Steps in all. A layer's experts count as one step, however many waves they take.
    pub total: usize,
}

impl Progress {
    /// Whether everything has been called.
    pub fn is_done(&self) -> bool {
        self.done == self.total
    }
}

/// A pass in flight.
#[derive(Debug)]
pub struct Driver {
    pass: PassId,
    steps: Vec<Step>,
    next: usize,
    waves_open: bool,
    /// Time of the calls of the step so far: experts may take several.
    spent: Duration,
}

impl Driver {
    /// Opens `pass` on `backend`.
    ///
    /// # Errors
    /// Those of [`Backend::begin`].
    pub fn begin(backend: &mut dyn Backend, spec: &Spec, pass: &Pass) -> Result<Driver> {
        pass.check(spec.vocab)?;
        let steps = plan(spec, pass, backend.capabilities().block_rows);
        Ok(Driver { pass: backend.begin(pass)?, steps, next: 0, waves_open: false, spent: Duration::ZERO })
    }

    /// The open pass.
    pub fn pass(&self) -> PassId {
        self.pass
    }

    /// The step [`Driver::advance`] works on next; `None` when done.
    pub fn next_step(&self) -> Option<&Step> {
        self.steps.get(self.next)
    }

    /// Calls the next stage of the next block, or the next wave of experts.
    ///
    /// # Errors
    /// Whatever the backend or the source says; the pass should then be aborted.
    pub fn advance(
        &mut self,
        backend: &mut dyn Backend,
        experts: &mut dyn ExpertSource,
        observer: &mut dyn Observer,
    ) -> Result<Progress> {
        if let Some(step) = self.steps.get(self.next) {
            let started = Instant::now();
            let complete = match step.stage {
                Stage::Experts => {
                    if !self.waves_open {
                        let used = experts.needs_routes().then(|| backend.routes(self.pass, step.layer));
                        experts.start(step.layer, used.transpose()?.as_deref())?;
                    }
                    let wave = experts.wave()?;
                    backend.experts(self.pass, step.layer, &wave)?;
                    self.waves_open = !wave.last;
                    wave.last
                }
                stage => {
                    backend.run_stage(self.pass, stage, step.layer, step.rows.clone())?;
                    true
                }
            };
            self.spent += started.elapsed();
            if complete {
                observer.after(step, std::mem::take(&mut self.spent), backend, self.pass)?;
                self.next += 1;
            }
        }
        Ok(self.progress())
    }

    /// Runs the rest of the pass; what [`Driver::advance`] does, until done.
    ///
    /// # Errors
    /// As [`Driver::advance`].
    pub fn finish(
        &mut self,
        backend: &mut dyn Backend,
        experts: &mut dyn ExpertSource,
        observer: &mut dyn Observer,
    ) -> Result<()> {
        while !self.advance(backend, experts, observer)?.is_done() {}
        Ok(())
    }

    /// How far the pass is.
    pub fn progress(&self) -> Progress {
        Progress { done: self.next, total: self.steps.len() }
    }
}

/// Every step of `pass`, in order.
///
/// Inside a layer, mixer, router and shared expert run block by block; then the routed experts run once
/// for the whole pass, so that their bytes are read and decoded once.
fn plan(spec: &Spec, pass: &Pass, block_rows: usize) -> Vec<Step> {
    const DELTA: [Stage; 5] =
        [Stage::DeltaProject, Stage::DeltaMix, Stage::DeltaOut, Stage::Route, Stage::Shared];
    const ATTENTION: [Stage; 5] =
        [Stage::AttnProject, Stage::AttnMix, Stage::AttnOut, Stage::Route, Stage::Shared];
    let blocks = pass.blocks(block_rows);
    let whole = 0..pass.rows();
    let mut steps: Vec<Step> =
        blocks.iter().map(|rows| Step { stage: Stage::Embed, layer: 0, rows: rows.clone() }).collect();
    for (layer, kind) in spec.layers.iter().enumerate() {
        let stages = if *kind == LayerKind::Delta { DELTA } else { ATTENTION };
        for rows in &blocks {
            steps.extend(stages.map(|stage| Step { stage, layer, rows: rows.clone() }));
        }
        steps.push(Step { stage: Stage::Experts, layer, rows: whole.clone() });
    }
    if !(pass.logits.is_empty() && pass.hidden.is_empty()) {
        steps.push(Step { stage: Stage::Head, layer: spec.layers.len(), rows: whole });
    }
    steps
}
