//! The store: an [`ExpertSource`] whose slots are filled by reader threads.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use model::{
    Backend, CopySpan, CopyStats, Error as ModelError, ExpertSource, LayerCall, Matrix, Model, PlacedExpert,
    Slot, Wave,
};

use crate::error::Error;
use crate::layout::Layout;
use crate::load::{Load, Loader};
use crate::reader::{self, Io, Reader};
use crate::slots::Origin;
use crate::state::{Attempt, Pinned, Queued, State};
use crate::stats::{Span, Stats, Wait};

/// Rows up to which a pass is small, unless a loan says otherwise.
const SMALL_ROWS: usize = 512;

/// Memory of slots that is lent while passes of many rows are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Loan {
    /// How much, of the budget.
    pub bytes: u64,
    /// Passes of more rows take it.
    pub rows: usize,
}

/// What the user may choose.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Options {
    /// Bytes of slots; as much as all experts need if not given.
    pub budget: Option<u64>,
    /// What of the budget is for something else while large passes are computed. Not of a cache of everything.
    pub loan: Option<Loan>,
    /// How bytes come from the files.
    pub io: Io,
    /// Reader threads.
    pub readers: usize,
    /// Experts beyond each row's choice that the look-ahead fetches; `None` turns it off.
    pub look_ahead: Option<usize>,
    /// Added to the router's logits of experts that have a slot when passes of a few rows choose, so that less is
    /// read: results then depend on what the cache holds. 0 changes nothing.
    pub route_bias: f32,
    /// Compares every expert with the mapped file when a wave names it and when the wave has been computed. For
    /// tests: it reads everything twice.
    pub verify: bool,
    /// Keeps times of every load and wait, for [`Monitor::spans`].
    pub trace: bool,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            budget: None,
            loan: None,
            io: Io::Cached,
            readers: 4,
            look_ahead: Some(4),
            route_bias: 0.0,
            verify: false,
            trace: false,
        }
    }
}

struct Shared {
    loader: Loader,
    state: Mutex<State>,
    /// A load waits for a reader.
    work: Condvar,
    /// A load is complete.
    done: Condvar,
    trace: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Routed experts in bounded memory.
pub struct Store {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    arena: u32,
    options: Options,
    /// The mapped file to compare with.
    truth: Option<Arc<Model>>,
    damage: Option<ModelError>,
    /// Waves of whole layers, once every expert of them is in place for good.
    complete: Vec<Option<Arc<[PlacedExpert]>>>,
}

/// Looks at a store from outside.
#[derive(Clone)]
pub struct Monitor(Arc<Shared>);

impl Monitor {
    /// What the store did so far.
    pub fn stats(&self) -> Stats {
        let state = self.0.lock();
        Stats { predicted_wasted: state.slots.wasted(), ..state.stats }
    }

    /// Every load so far, if traced.
    pub fn spans(&self) -> (Vec<Span>, Vec<Wait>) {
        let state = self.0.lock();
        (state.spans.clone(), state.waits.clone())
    }

    /// What copies to the backend's memory did so far, if it is behind a link.
    pub fn copies(&self) -> Option<CopyStats> {
        self.0.loader.memory.copies()
    }

    /// Every copy to the backend's memory so far, if traced.
    pub fn copy_spans(&self) -> Vec<CopySpan> {
        self.0.loader.memory.copy_spans()
    }

    /// The cut of the budget.
    pub fn layout(&self) -> &Layout {
        &self.0.loader.layout
    }
}

impl Store {
    /// A store for `model` with slots in the memory of `backend`.
    ///
    /// # Errors
    /// [`Error::Budget`], files that cannot be read that way, no memory, no threads.
    pub fn new(model: &Arc<Model>, backend: &mut dyn Backend, options: Options) -> Result<Store, Error> {
        let reader = reader::open(model, options.io)?;
        Store::with_reader(model, backend, options, reader)
    }

    /// As [`Store::new`], with a reader of the caller's.
    ///
    /// # Errors
    /// As [`Store::new`].
    pub fn with_reader(
        model: &Arc<Model>,
        backend: &mut dyn Backend,
        options: Options,
        reader: Box<dyn Reader>,
    ) -> Result<Store, Error> {
        let lent = options.loan.map_or(0, |loan| loan.bytes);
        let layout = Layout::lending(model, options.budget, lent, reader.alignment())?;
        let (arena, memory) = backend.slot_memory(layout.bytes() as usize)?;
        if options.trace {
            memory.trace_copies();
        }
        let paths = model.gguf.shards().iter().map(|shard| shard.path().to_owned()).collect();
        let state = Mutex::new(State::new(&layout, model.spec.moe.used));
        let layers = layout.layers.len();
        let shared = Arc::new(Shared {
            loader: Loader { layout, reader, memory, paths },
            state,
            work: Condvar::new(),
            done: Condvar::new(),
            trace: options.trace,
        });
        let mut store = Store {
            shared,
            threads: Vec::new(),
            arena,
            options,
            truth: options.verify.then(|| model.clone()),
            damage: None,
            complete: vec![None; layers],
        };
        let count = options.readers.max(1);
        for number in 0..count {
            let shared = store.shared.clone();
            let name = format!("reader {number}");
            let thread = std::thread::Builder::new().name(name).spawn(move || serve(&shared, number));
            store.threads.push(thread.map_err(|source| Error::Threads { count, source })?);
        }
        Ok(store)
    }

    /// A view that outlives being handed to an engine.
    pub fn monitor(&self) -> Monitor {
        Monitor(self.shared.clone())
    }

    fn place(&self, pinned: &Pinned, state: &State) -> PlacedExpert {
        let layout = &self.shared.loader.layout;
        let index = state.slots.index_in_class(pinned.slot);
        let at =
            |part| (layout.part_at(pinned.layer, index, part) + layout.slack(part, pinned.expert)) as u64;
        let [gate, up, down] = &layout.layers[pinned.layer].parts;
        let slot = Slot { arena: self.arena, gate: at(gate), up: at(up), down: at(down) };
        PlacedExpert { expert: pinned.expert, slot }
    }

    /// Compares what slots hold with the mapped file.
    fn verify(&self, layer: usize, experts: &[PlacedExpert], when: &str) -> Result<(), ModelError> {
        let Some(model) = &self.truth else { return Ok(()) };
        let loader = &self.shared.loader;
        for placed in experts {
            let at = [placed.slot.gate, placed.slot.up, placed.slot.down];
            for (part, at) in loader.layout.layers[layer].parts.iter().zip(at) {
                let offset = part.file_offset(placed.expert);
                let truth = &model.gguf.shards()[part.shard].bytes()[offset as usize..][..part.bytes];
                let mut same = true;
                let range = at as usize..at as usize + part.bytes;
                loader.memory.inspect(range, &mut |bytes| same = bytes == truth);
                if !same {
                    return Err(ModelError::Load {
                        file: loader.paths[part.shard].clone(),
                        tensor: part.tensor.clone(),
                        offset,
                        len: part.bytes as u64,
                        source: io::Error::other(format!("the slot holds other bytes {when} its use")),
                    });
                }
            }
        }
        Ok(())
    }

    /// A layer, if every expert has a slot and is in it.
    fn complete_layer(&mut self, layer: usize) -> Option<Arc<[PlacedExpert]>> {
        let known = self.complete[layer].clone();
        let experts = known.or_else(|| {
            let state = self.shared.lock();
            let experts = 0..state.policy.experts as u32;
            let slots: Option<Vec<_>> =
                experts.clone().map(|expert| state.slots.ready(state.slots.key(layer, expert))).collect();
            let slots = slots.filter(|_| state.policy.full)?;
            let placed = experts
                .zip(slots)
                .map(|(expert, slot)| self.place(&Pinned::unused(slot, layer, expert), &state));
            Some(placed.collect())
        })?;
        self.complete[layer] = Some(experts.clone());
        Some(experts)
    }

    /// Waits until enough of `window` is ready, and pins it.
    fn wait_for(&self, call: &LayerCall, window: &[u32]) -> Result<Vec<PlacedExpert>, ModelError> {
        let mut state = self.shared.lock();
        state.unpin_all();
        state.begin_wait();
        let mut since = None;
        loop {
            let attempt = state.attempt(call, window);
            self.shared.work.notify_all();
            match attempt {
                Attempt::Failed(error) => return Err(error),
                Attempt::Ready => break,
                Attempt::Wait => {}
            }
            since.get_or_insert_with(Instant::now);
            state = self.shared.done.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if let Some(start) = since {
            let end = Instant::now();
            state.stats.wait += end - start;
            if self.shared.trace {
                state.waits.push(Wait { start, end, layer: call.layer });
            }
        }
        Ok(state.pinned.iter().map(|pinned| self.place(pinned, &state)).collect())
    }
}

impl ExpertSource for Store {
    fn needs_routes(&self, rows: usize) -> bool {
        let state = self.shared.lock();
        !state.policy.scans(rows) && !self.complete.iter().all(Option::is_some)
    }

    fn start(&mut self, call: &LayerCall) -> Result<(), ModelError> {
        if let Some(damage) = self.damage.take() {
            return Err(damage);
        }
        let mut state = self.shared.lock();
        match call.used {
            Some(used) if !state.policy.scans(call.rows) => state.start_small(call.layer, used),
            _ if state.policy.full => {}
            _ => {
                let another = state.policy.scans(call.follow);
                state.start_scan(call.layer, another);
            }
        }
        self.shared.work.notify_all();
        Ok(())
    }

    fn wave(&mut self, call: &LayerCall, from: u32) -> Result<Wave, ModelError> {
        if let Some(experts) = self.complete_layer(call.layer) {
            return Ok(Wave::of_layer(&experts, call.rows, from));
        }
        let (most, all) = {
            let state = self.shared.lock();
            (state.policy.wave(state.slots.class_of(call.layer)), state.policy.experts as u32)
        };
        let every: Vec<u32>;
        let need = match call.used {
            Some(used) => &used[used.partition_point(|&expert| expert < from)..],
            None => {
                every = (from..all).collect();
                &every
            }
        };
        let placed = self.wait_for(call, &need[..most.min(need.len())])?;
        let last = placed.len() == need.len();
        if last {
            self.shared.lock().end_scan(call.layer);
        }
        self.verify(call.layer, &placed, "before")?;
        Ok(Wave { experts: placed.into(), last })
    }

    fn release(&mut self) {
        let mut state = self.shared.lock();
        if self.truth.is_some()
            && let Some(layer) = state.pinned.first().map(|pinned| pinned.layer)
        {
            let placed: Vec<_> = state.pinned.iter().map(|pinned| self.place(pinned, &state)).collect();
            self.damage = self.verify(layer, &placed, "after").err();
        }
        let scan = state.pinned.first().is_some_and(Pinned::is_scan);
        state.unpin_all();
        if scan {
            state.pump();
            self.shared.work.notify_all();
        }
    }

    fn wants_prediction(&self, rows: usize) -> Option<usize> {
        self.options.look_ahead.filter(|_| self.needs_routes(rows) && !self.shared.lock().policy.full)
    }

    fn predicted(&mut self, layer: usize, experts: &[u32]) {
        self.shared.lock().predict(layer, experts);
        self.shared.work.notify_all();
    }

    fn route_bias(&mut self, layer: usize, rows: usize) -> Option<Vec<f32>> {
        let bias = Some(self.options.route_bias).filter(|&bias| bias != 0.0)?;
        let state = self.shared.lock();
        if state.policy.full || state.policy.scans(rows) {
            return None;
        }
        let has_slot = |expert| state.slots.find(state.slots.key(layer, expert)).is_some();
        let experts = 0..state.policy.experts as u32;
        Some(experts.map(|expert| if has_slot(expert) { bias } else { 0.0 }).collect())
    }

    fn small_rows(&self) -> usize {
        self.options.loan.map_or(SMALL_ROWS, |loan| loan.rows)
    }

    fn lend(&mut self, lend: bool) -> Result<(), ModelError> {
        let mut state = self.shared.lock();
        if !lend {
            state.take_back();
            return Ok(());
        }
        state.lend();
        while state.is_draining() {
            state = self.shared.done.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        drop(state);
        let Loader { layout, memory, .. } = &self.shared.loader;
        // SAFETY: no expert has a slot there and no load writes there, until they are taken back.
        layout.lent_ranges().for_each(|range| unsafe { memory.give_back(range) });
        Ok(())
    }

    fn wants_choices(&self, call: &LayerCall) -> bool {
        let state = self.shared.lock();
        !state.policy.full && state.policy.scans(call.rows) && !state.policy.scans(call.follow)
    }

    fn choices(&mut self, layer: usize, ids: &Matrix) {
        let rows = (0..ids.rows).map(|row| ids.row(row).iter().map(|&id| id as u32).collect());
        self.shared.lock().seed(layer, rows);
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        self.shared.lock().closing = true;
        self.shared.work.notify_all();
        for thread in self.threads.drain(..) {
            // A reader that panicked has nothing more to say.
            let _ = thread.join();
        }
    }
}

/// The life of a reader: loads, one after the other, what is needed now before what is needed later.
fn serve(shared: &Shared, reader: usize) {
    let mut state = shared.lock();
    loop {
        if state.closing {
            return;
        }
        let Some(Queued { load, origin }) = state.next_load() else {
            state = shared.work.wait(state).unwrap_or_else(PoisonError::into_inner);
            continue;
        };
        let began = state.wait;
        drop(state);
        let start = Instant::now();
        // A panic would leave its slots loading for ever, and somebody waiting for them.
        let result = catch_unwind(AssertUnwindSafe(|| shared.loader.carry_out(&load)));
        let result = result.unwrap_or_else(|_| Err(shared.loader.failure(&load, "the reader panicked")));
        let end = Instant::now();
        state = shared.lock();
        state.stats.busy += end - start;
        if shared.trace {
            state.spans.push(span(
                reader,
                (start, end),
                &load,
                origin,
                result.as_ref().copied().unwrap_or(0),
            ));
        }
        state.complete(&load, began, result);
        shared.done.notify_all();
    }
}

fn span(reader: usize, (start, end): (Instant, Instant), load: &Load, origin: Origin, bytes: u64) -> Span {
    let why = match origin {
        Origin::Ahead => "ahead",
        Origin::Predicted => "predicted",
        Origin::Demand | Origin::Used => "demand",
    };
    let (expert, count) = (load.items[0].expert, load.items.len());
    Span { reader, start, end, layer: load.layer, expert, count, bytes, why }
}
