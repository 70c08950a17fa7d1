//! Several GPUs, each with some of the layers.
//!
//! A prompt's chunks flow through them: since calls only enqueue, the first GPU goes on with the next chunk while the second
//! computes the one before it. Each part of the model is a [`Cuda`] of its own, with the state of its layers; all are told
//! of the same sequences and passes, whose names are therefore the same. Every row is computed by the same kernels as on
//! one GPU, to the same bits.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use model::state::{SequenceId, Snapshot, SnapshotShape};
use model::{
    Backend, Candidate, Capabilities, Error, Intermediate, Limits, Matrix, MatrixView, Model, Pass, PassId,
    Peaks, Result, Stage, Wave,
};

use crate::driver::failed;
use crate::link::Link;
use crate::pace::Pace;
use crate::plan::Memory;
use crate::{Cuda, Options, fail};

/// A model on several GPUs.
pub struct Pipeline {
    /// Never empty.
    parts: Vec<Part>,
    /// From each part to the next one.
    links: Vec<Link>,
    capabilities: Capabilities,
    /// The part that open passes have come to.
    at: HashMap<PassId, usize>,
    pace: Pace,
}

/// Some layers on a GPU.
struct Part {
    layers: Range<usize>,
    cuda: Cuda,
}

impl Pipeline {
    /// A backend for `model` on GPUs by their numbers, a part of the layers on each, in this order. Weights are copied there
    /// side by side. A GPU may be named twice.
    ///
    /// # Errors
    /// As [`Cuda::new`].
    ///
    /// # Panics
    /// If no GPU is named, or if experts are to come through slots: everything has to fit.
    pub fn new(
        model: &Arc<Model>,
        limits: Limits,
        options: Options,
        gpus: &[i32],
    ) -> crate::Result<Pipeline> {
        assert!(!gpus.is_empty() && options.slots.is_none(), "GPUs that hold the whole model");
        let start = |layers: Range<usize>, device: i32| {
            let part = Arc::new(model.part(layers.clone()));
            let weights = part.load(&mut |_, _| {}).map_err(crate::Error::Model)?;
            let options = Options { device, ..options };
            Ok(Part { layers, cuda: Cuda::part_of(model, part, &weights, limits, options)? })
        };
        let parts: Vec<crate::Result<Part>> = std::thread::scope(|scope| {
            let start = &start;
            let all = model.cut(gpus.len()).into_iter().zip(gpus);
            let threads: Vec<_> = all.map(|(layers, &gpu)| scope.spawn(move || start(layers, gpu))).collect();
            threads.into_iter().map(|thread| thread.join().expect("starting does not panic")).collect()
        });
        let parts: Vec<Part> = parts.into_iter().collect::<crate::Result<_>>()?;
        let links = parts.windows(2).map(|pair| Link::new(&pair[0].cuda, &pair[1].cuda, limits.pass_rows));
        let links = links.collect::<std::result::Result<_, _>>().map_err(failed("linking the GPUs"))?;
        let capabilities = common(parts.iter().map(|part| part.cuda.capabilities()));
        Ok(Pipeline { parts, links, capabilities, at: HashMap::new(), pace: Pace::default() })
    }

    /// What each of so many GPUs needs for its part of `model`, in order: as many entries as there are parts.
    pub fn memory(model: &Model, limits: &Limits, gpus: usize) -> Vec<Memory> {
        let layers = model.cut(gpus);
        let last = layers.len() - 1;
        let of_part = |(index, layers): (usize, Range<usize>)| {
            let memory = Memory::new(&model.part(layers), limits);
            let link = if index == last { 0 } else { Link::room(limits.pass_rows, model.spec.hidden) as u64 };
            Memory { scratch: memory.scratch + link, ..memory }
        };
        layers.into_iter().enumerate().map(of_part).collect()
    }

    /// The layers of each part, in order.
    pub fn layers(&self) -> Vec<Range<usize>> {
        self.parts.iter().map(|part| part.layers.clone()).collect()
    }

    /// The part of a layer; layers behind the last belong to the last part.
    fn part_of(&self, layer: usize) -> usize {
        let index = self.parts.iter().position(|part| part.layers.contains(&layer));
        index.unwrap_or(self.parts.len() - 1)
    }

    /// Does `work` with the part of `layer` and the number the layer has there, to where the pass is brought first.
    fn with<T>(
        &mut self,
        pass: PassId,
        layer: usize,
        work: impl FnOnce(&mut Cuda, usize) -> Result<T>,
    ) -> Result<T> {
        let wanted = self.part_of(layer);
        self.bring(pass, wanted)?;
        let Part { layers, cuda } = &mut self.parts[wanted];
        let first = layers.start;
        work(cuda, layer - first).map_err(|error| in_whole(error, first))
    }

    /// Does `work` with the part a pass has come to.
    fn here<'a, T>(&'a mut self, pass: PassId, work: impl FnOnce(&'a mut Cuda) -> Result<T>) -> Result<T> {
        let Part { layers, cuda } = &mut self.parts[self.at.get(&pass).copied().unwrap_or(0)];
        work(cuda).map_err(|error| in_whole(error, layers.start))
    }

    /// Hands a pass over from part to part until it is at `wanted`. Passes go forward only, as layers do.
    fn bring(&mut self, pass: PassId, wanted: usize) -> Result<()> {
        let Some(at) = self.at.get_mut(&pass) else { return Ok(()) };
        while *at < wanted {
            let [from, to] = &mut self.parts[*at..*at + 2] else { unreachable!("a slice of two") };
            let handed = self.links[*at].hand_over(&mut from.cuda, &mut to.cuda, pass);
            handed.map_err(|error| in_whole(error, from.layers.start))?;
            *at += 1;
        }
        Ok(())
    }

    /// Does the same with every part, which have the same books: the first error is that of all, and `undo` takes
    /// back what was done before.
    fn each<T: PartialEq>(
        &mut self,
        mut work: impl FnMut(usize, &mut Cuda) -> Result<T>,
        mut undo: impl FnMut(&mut Cuda, T),
    ) -> Result<T> {
        let mut done = Vec::new();
        for (index, part) in self.parts.iter_mut().enumerate() {
            match work(index, &mut part.cuda) {
                Ok(result) => done.push(result),
                Err(error) => {
                    self.parts.iter_mut().zip(done).for_each(|(part, result)| undo(&mut part.cuda, result));
                    return Err(error);
                }
            }
        }
        let first = done.swap_remove(0);
        assert!(done.iter().all(|other| *other == first), "all parts have the same books");
        Ok(first)
    }
}

/// What the parts can do together: kernels of one kind if their GPUs are alike.
fn common<'a>(mut parts: impl Iterator<Item = &'a Capabilities>) -> Capabilities {
    let mut all = parts.next().expect("never empty").clone();
    for other in parts {
        if !all.variant.split(" + ").any(|variant| variant == other.variant) {
            all.variant = format!("{} + {}", all.variant, other.variant);
        }
    }
    all
}

/// An error of a part whose first layer is number `first` of the model.
fn in_whole(error: Error, first: usize) -> Error {
    match error {
        Error::Backend { backend, stage, layer, message } => {
            Error::Backend { backend, stage, layer: first + layer, message }
        }
        other => other,
    }
}

impl Backend for Pipeline {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn enqueues(&self) -> bool {
        true
    }

    fn peaks(&mut self) -> Vec<Peaks> {
        let peaks = self.parts[0].cuda.peaks();
        // Of all at the same time, as far as chunks keep them busy.
        let all = self.parts.len();
        let of_all = peaks.last().map(|one| one.times(all));
        peaks.into_iter().chain(of_all.filter(|_| all > 1)).collect()
    }

    fn create(&mut self) -> SequenceId {
        let created = self.each(|_, cuda| Ok(cuda.create()), |cuda, id| cuda.free(id));
        created.expect("creating cannot fail")
    }

    fn fork(&mut self, sequence: SequenceId) -> Result<SequenceId> {
        self.each(|_, cuda| cuda.fork(sequence), |cuda, id| cuda.free(id))
    }

    fn free(&mut self, sequence: SequenceId) {
        self.parts.iter_mut().for_each(|part| part.cuda.free(sequence));
    }

    fn position(&self, sequence: SequenceId) -> Result<usize> {
        self.parts[0].cuda.position(sequence)
    }

    fn snapshot(&mut self, sequence: SequenceId) -> Result<Snapshot> {
        let parts: Result<Vec<Snapshot>> =
            self.parts.iter_mut().map(|part| part.cuda.snapshot(sequence)).collect();
        Ok(Snapshot::join(&parts?))
    }

    fn restore(&mut self, snapshot: &Snapshot) -> Result<SequenceId> {
        let shapes: Vec<SnapshotShape> = self.parts.iter().map(|part| part.cuda.snapshot_shape()).collect();
        let count = |of: fn(&SnapshotShape) -> usize| shapes.iter().map(of).sum();
        snapshot.check(&SnapshotShape {
            delta_layers: count(|shape| shape.delta_layers),
            attention_layers: count(|shape| shape.attention_layers),
            ..shapes[0]
        })?;
        let parts = snapshot.split(&shapes);
        self.each(|index, cuda| cuda.restore(&parts[index]), |cuda, id| cuda.free(id))
    }

    fn begin(&mut self, pass: &Pass) -> Result<PassId> {
        let last = self.parts.len() - 1;
        // Only the last part has rows that are wanted.
        let inner = Pass { logits: Vec::new(), hidden: Vec::new(), ..pass.clone() };
        let of_part = |index: usize| if index == last { pass } else { &inner };
        let id = self.each(|index, cuda| cuda.begin(of_part(index)), |cuda, id| cuda.abort(id))?;
        self.at.insert(id, 0);
        Ok(id)
    }

    fn commit(&mut self, pass: PassId) -> Result<()> {
        // Only this can fail, and only before anything was committed.
        self.parts.iter_mut().try_for_each(|part| part.cuda.settle(pass, "commit"))?;
        self.parts.iter_mut().try_for_each(|part| part.cuda.commit(pass))?;
        self.at.remove(&pass);
        Ok(())
    }

    fn abort(&mut self, pass: PassId) {
        self.parts.iter_mut().for_each(|part| part.cuda.abort(pass));
        self.at.remove(&pass);
    }

    fn embed(&mut self, pass: PassId, rows: Range<usize>) -> Result<()> {
        self.with(pass, 0, |cuda, _| cuda.embed(pass, rows))
    }

    fn delta_project(&mut self, pass: PassId, layer: usize, rows: Range<usize>) -> Result<()> {
        self.with(pass, layer, |cuda, layer| cuda.delta_project(pass, layer, rows))
    }

    fn delta_mix(&mut self, pass: PassId, layer: usize, rows: Range<usize>) -> Result<()> {
        self.with(pass, layer, |cuda, layer| cuda.delta_mix(pass, layer, rows))
    }

    fn delta_out(&mut self, pass: PassId, layer: usize, rows: Range<usize>) -> Result<()> {
        self.with(pass, layer, |cuda, layer| cuda.delta_out(pass, layer, rows))
    }

    fn attn_project(&mut self, pass: PassId, layer: usize, rows: Range<usize>) -> Result<()> {
        self.with(pass, layer, |cuda, layer| cuda.attn_project(pass, layer, rows))
    }

    fn attn_mix(&mut self, pass: PassId, layer: usize, rows: Range<usize>) -> Result<()> {
        self.with(pass, layer, |cuda, layer| cuda.attn_mix(pass, layer, rows))
    }

    fn attn_out(&mut self, pass: PassId, layer: usize, rows: Range<usize>) -> Result<()> {
        self.with(pass, layer, |cuda, layer| cuda.attn_out(pass, layer, rows))
    }

    fn route(&mut self, pass: PassId, layer: usize, rows: Range<usize>) -> Result<()> {
        self.with(pass, layer, |cuda, layer| cuda.route(pass, layer, rows))
    }

    fn shared(&mut self, pass: PassId, layer: usize, rows: Range<usize>) -> Result<()> {
        self.with(pass, layer, |cuda, layer| cuda.shared(pass, layer, rows))
    }

    fn routes(&mut self, pass: PassId, layer: usize) -> Result<Vec<u32>> {
        self.with(pass, layer, |cuda, layer| cuda.routes(pass, layer))
    }

    fn experts(&mut self, pass: PassId, layer: usize, wave: &Wave) -> Result<()> {
        self.with(pass, layer, |cuda, layer| cuda.experts(pass, layer, wave))
    }

    fn head(&mut self, pass: PassId) -> Result<()> {
        let behind = self.parts.last().expect("never empty").layers.end;
        self.with(pass, behind, |cuda, _| cuda.head(pass))
    }

    fn logits(&mut self, pass: PassId) -> Result<MatrixView<'_>> {
        self.here(pass, |cuda| cuda.logits(pass))
    }

    fn largest(&mut self, pass: PassId, counts: &[usize]) -> Result<Vec<Option<Vec<Candidate>>>> {
        self.here(pass, |cuda| cuda.largest(pass, counts))
    }

    fn hidden(&mut self, pass: PassId) -> Result<Matrix> {
        self.here(pass, |cuda| cuda.hidden(pass))
    }

    fn read(&mut self, pass: PassId, what: Intermediate) -> Result<Option<Matrix>> {
        self.here(pass, |cuda| cuda.read(pass, what))
    }

    fn sync(&mut self) -> Result<()> {
        self.pace.clear();
        self.parts.iter_mut().try_for_each(|part| part.cuda.sync())
    }

    fn keep_pace(&mut self) -> Result<()> {
        let ahead = self.parts.len();
        let Part { layers, cuda } = self.parts.last().expect("never empty");
        self.pace.keep(&cuda.device, ahead).map_err(fail(Stage::Head.name(), layers.end))
    }
}
