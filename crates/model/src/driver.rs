//! The loop over stages, as a state machine that can stop between any two steps.

use std::time::{Duration, Instant};

use crate::backend::{Backend, PassId};
use crate::error::Result;
use crate::experts::{ExpertSource, LayerCall};
use crate::pass::Pass;
use crate::spec::{LayerKind, Spec};
use crate::stage::{Intermediate, Stage, Step};

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

/// How far a layer's experts are.
#[derive(Debug)]
struct Waves {
    /// Experts its rows chose, if the source wants to know.
    used: Option<Vec<u32>>,
    /// Everything below has been computed.
    from: u32,
}

/// A pass in flight.
#[derive(Debug)]
pub struct Driver {
    pass: PassId,
    steps: Vec<Step>,
    next: usize,
    /// Layers of the model.
    layers: usize,
    /// Rows of the pass, and of the one after it.
    rows: (usize, usize),
    /// The layer whose waves are being computed.
    waves: Option<Waves>,
    /// Time of the calls of the step so far: experts may take several.
    spent: Duration,
}

impl Driver {
    /// Opens `pass` and runs all of it, unwatched and in one go where the backend can. After an error it is aborted.
    ///
    /// # Errors
    /// Those of [`Backend::begin`], and whatever the backend or the source says.
    pub fn run(
        backend: &mut dyn Backend,
        experts: &mut dyn ExpertSource,
        spec: &Spec,
        pass: &Pass,
    ) -> Result<PassId> {
        pass.check(spec.vocab)?;
        let id = backend.begin(pass)?;
        let mut finish = || {
            if experts.rests(pass.rows()) && backend.repeat(id)? {
                return Ok(());
            }
            Driver::of(backend, spec, pass, id).finish(backend, experts, &mut Quiet)
        };
        let done = finish();
        done.map(|()| id).inspect_err(|_| backend.abort(id))
    }

    /// Opens `pass` on `backend`.
    ///
    /// # Errors
    /// Those of [`Backend::begin`].
    pub fn begin(backend: &mut dyn Backend, spec: &Spec, pass: &Pass) -> Result<Driver> {
        pass.check(spec.vocab)?;
        let id = backend.begin(pass)?;
        Ok(Driver::of(backend, spec, pass, id))
    }

    /// At the beginning of `pass`, just opened as `id`.
    fn of(backend: &dyn Backend, spec: &Spec, pass: &Pass, id: PassId) -> Driver {
        let steps = plan(spec, pass, backend.capabilities().block_rows);
        let (layers, rows) = (spec.layers.len(), (pass.rows(), 0));
        Driver { pass: id, steps, next: 0, layers, rows, waves: None, spent: Duration::ZERO }
    }

    /// Says that a pass of `rows` rows will follow, so that its experts can be on their way.
    pub fn followed_by(self, rows: usize) -> Driver {
        Driver { rows: (self.rows.0, rows), ..self }
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
        if let Some(step) = self.steps.get(self.next).cloned() {
            let started = Instant::now();
            let complete = match step.stage {
                Stage::Experts => self.wave(&step, backend, experts)?,
                stage => {
                    if stage == Stage::Route
                        && let Some(bias) = experts.route_bias(step.layer, self.rows.0)
                    {
                        backend.bias_routes(step.layer, &bias)?;
                    }
                    backend.run_stage(self.pass, stage, step.layer, step.rows.clone())?;
                    if stage == Stage::Route && experts.wants_choices(&self.call(step.layer, None)) {
                        let ids = backend.read(self.pass, Intermediate::RouteIds)?;
                        ids.iter().for_each(|ids| experts.choices(step.layer, ids));
                    }
                    true
                }
            };
            self.spent += started.elapsed();
            if complete {
                observer.after(&step, std::mem::take(&mut self.spent), backend, self.pass)?;
                self.next += 1;
            }
        }
        Ok(self.progress())
    }

    fn call<'a>(&self, layer: usize, used: Option<&'a [u32]>) -> LayerCall<'a> {
        LayerCall { layer, rows: self.rows.0, follow: self.rows.1, used }
    }

    /// The next wave of the experts of a layer; true after the last one.
    fn wave(
        &mut self,
        step: &Step,
        backend: &mut dyn Backend,
        experts: &mut dyn ExpertSource,
    ) -> Result<bool> {
        let (layer, rows) = (step.layer, self.rows.0);
        let waves = match self.waves.take() {
            Some(waves) => waves,
            None => {
                let used =
                    experts.needs_routes(rows).then(|| backend.routes(self.pass, layer)).transpose()?;
                experts.start(&self.call(layer, used.as_deref()))?;
                // After `start`, so that predicting and reading what is missing here overlap.
                let margin = experts.wants_prediction(rows).filter(|_| layer + 1 < self.layers);
                if let Some(margin) = margin
                    && let Some(likely) = backend.predict(self.pass, layer + 1, margin)?
                {
                    experts.predicted(layer + 1, &likely);
                }
                Waves { used, from: 0 }
            }
        };
        let wave = experts.wave(&self.call(layer, waves.used.as_deref()), waves.from)?;
        let computed = backend.experts(self.pass, layer, &wave);
        experts.release();
        computed?;
        if !wave.last {
            let from = wave.experts.last().map_or(waves.from, |placed| placed.expert + 1);
            self.waves = Some(Waves { from, ..waves });
        }
        Ok(wave.last)
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
