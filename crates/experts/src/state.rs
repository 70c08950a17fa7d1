//! What the engine's thread and the readers share: slots, queues of loads, the scan, statistics.

use std::collections::VecDeque;

use model::{Error, LayerCall};

use crate::layout::Layout;
use crate::load::{Item, Load};
use crate::policy::Policy;
use crate::slots::{Origin, Place, SlotId, Slots};
use crate::stats::{Span, Stats, Wait};

/// A load that waits for a reader.
#[derive(Debug)]
pub(crate) struct Queued {
    pub(crate) load: Load,
    pub(crate) origin: Origin,
}

/// A load that failed.
#[derive(Debug)]
struct Failure {
    layer: usize,
    experts: Vec<u32>,
    error: Error,
}

/// The scan through the file: positions are layer · experts + expert, and go on behind the last layer with the
/// first one of the next chunk.
#[derive(Clone, Copy, Debug, Default)]
struct Scan {
    /// Everything before has been asked for.
    next: usize,
    /// Nothing from here on is asked for.
    limit: usize,
    /// Whether a scan is under way.
    open: bool,
}

/// A slot that the wave at hand names.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pinned {
    pub(crate) slot: SlotId,
    pub(crate) layer: usize,
    pub(crate) expert: u32,
    /// Whether it had been used before.
    resident: bool,
    /// Whether a scan named it.
    scan: bool,
}

impl Pinned {
    /// A slot that is not evicted in any case.
    pub(crate) fn unused(slot: SlotId, layer: usize, expert: u32) -> Pinned {
        Pinned { slot, layer, expert, resident: true, scan: false }
    }

    /// Whether a scan named it.
    pub(crate) fn is_scan(&self) -> bool {
        self.scan
    }
}

/// What can be done about a wave.
#[derive(Debug)]
pub(crate) enum Attempt {
    /// The first ones, as many as make a wave, are ready and pinned.
    Ready,
    /// A load has to be complete first.
    Wait,
    /// A load of one of them failed.
    Failed(Error),
}

/// The shared state.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) slots: Slots,
    pub(crate) policy: Policy,
    /// The policy while the memory of some slots is lent, or while it is not: the other one.
    other: Policy,
    lent: bool,
    pub(crate) urgent: VecDeque<Queued>,
    pub(crate) ahead: VecDeque<Queued>,
    /// Loads queued or being carried out.
    pub(crate) in_flight: usize,
    failure: Option<Failure>,
    /// Waits so far; a load that began before the one at hand may fail for reasons that have passed.
    pub(crate) wait: u64,
    scan: Scan,
    pub(crate) pinned: Vec<Pinned>,
    /// Experts that the last tokens of a prompt chose, by layer, the most recent first; empty before the last
    /// chunk.
    seeds: Vec<Vec<u32>>,
    pub(crate) stats: Stats,
    pub(crate) spans: Vec<Span>,
    pub(crate) waits: Vec<Wait>,
    pub(crate) closing: bool,
}

impl State {
    /// Nothing is loaded. `used` experts are chosen by a row.
    pub(crate) fn new(layout: &Layout, used: usize) -> State {
        let counts: Vec<usize> = layout.classes.iter().map(|class| class.slots).collect();
        let classes = layout.layers.iter().map(|layer| layer.class).collect();
        let mut state = State {
            slots: Slots::new(&counts, classes, layout.experts),
            seeds: vec![Vec::new(); layout.layers.len()],
            policy: Policy::new(layout, used, false),
            other: Policy::new(layout, used, true),
            lent: false,
            urgent: VecDeque::new(),
            ahead: VecDeque::new(),
            in_flight: 0,
            failure: None,
            wait: 0,
            scan: Scan::default(),
            pinned: Vec::new(),
            stats: Stats::default(),
            spans: Vec::new(),
            waits: Vec::new(),
            closing: false,
        };
        if state.policy.full {
            state.scan.limit = state.policy.positions();
            state.pump();
        }
        state
    }

    /// The next load for a reader.
    pub(crate) fn next_load(&mut self) -> Option<Queued> {
        self.urgent.pop_front().or_else(|| self.ahead.pop_front())
    }

    /// A reader has carried out a load, which began in wait number `began`.
    pub(crate) fn complete(&mut self, load: &Load, began: u64, result: Result<u64, Error>) {
        self.in_flight -= 1;
        match result {
            Ok(bytes) => {
                self.stats.loads += load.items.len() as u64;
                self.stats.bytes += bytes;
                load.items.iter().for_each(|item| self.slots.publish(item.slot));
            }
            Err(error) => {
                load.items.iter().for_each(|item| self.slots.cancel(item.slot));
                if began == self.wait {
                    let experts = load.items.iter().map(|item| item.expert).collect();
                    self.failure = Some(Failure { layer: load.layer, experts, error });
                }
            }
        }
    }

    /// The failure of a load of one of these experts that began since the last call of [`State::begin_wait`].
    pub(crate) fn failure(&mut self, layer: usize, window: &[u32]) -> Option<Error> {
        let hit = |f: &mut Failure| f.layer == layer && f.experts.iter().any(|e| window.contains(e));
        self.failure.take_if(hit).map(|failure| failure.error)
    }

    /// Failures of loads that began before are no matter: whoever needs those bytes asks again.
    pub(crate) fn begin_wait(&mut self) {
        self.wait += 1;
        self.failure = None;
    }

    /// Slots whose memory is lent from now on lose what they hold, and are used no more. Those that are being
    /// written just now are free when [`State::is_draining`] says no.
    pub(crate) fn lend(&mut self) {
        if !std::mem::replace(&mut self.lent, true) {
            self.stats.loans += 1;
            self.unpin_all();
            std::mem::swap(&mut self.policy, &mut self.other);
            (0..self.policy.classes()).for_each(|class| self.slots.withdraw(class, self.policy.slots(class)));
            self.cancel_queued(|queued, slots| {
                queued.load.items.iter().any(|item| slots.is_withdrawn(item.slot))
            });
        }
    }

    /// Whether lent slots are still being written.
    pub(crate) fn is_draining(&self) -> bool {
        self.slots.is_draining()
    }

    /// The memory of all slots is there again. Large passes are over; what was read ahead for more of them is given
    /// up.
    pub(crate) fn take_back(&mut self) {
        if std::mem::replace(&mut self.lent, false) {
            self.stats.repaid += 1;
            std::mem::swap(&mut self.policy, &mut self.other);
            (0..self.policy.classes()).for_each(|class| self.slots.bring_back(class));
        }
        if std::mem::take(&mut self.scan.open) {
            self.scan.limit = self.scan.next;
            self.cancel_queued(|queued, _| queued.origin == Origin::Ahead);
            self.slots.unreserve_all();
        }
    }

    /// Asks for what a wave of the first experts of `window` lacks; pins what is ready, if it is enough or waiting would
    /// be in vain.
    pub(crate) fn attempt(&mut self, call: &LayerCall, window: &[u32]) -> Attempt {
        if let Some(error) = self.failure(call.layer, window) {
            return Attempt::Failed(error);
        }
        let (scan, enough) = (self.policy.scans(call.rows), self.policy.enough(call.rows));
        self.demand(call.layer, window);
        if scan || self.policy.full {
            self.pump();
        }
        let is_ready = |&&e: &&u32| self.slots.ready(self.slots.key(call.layer, e)).is_some();
        let ready = window.iter().take_while(is_ready).count();
        if let Some(&next) = window.get(ready).filter(|_| ready < enough) {
            let stuck = self.slots.find(self.slots.key(call.layer, next)).is_none();
            if !stuck || ready == 0 {
                if stuck && self.in_flight == 0 {
                    self.make_room(call.layer, next);
                }
                return Attempt::Wait;
            }
        }
        self.pin(call.layer, &window[..ready], scan);
        Attempt::Ready
    }

    /// A layer of a scan begins. `another` says whether a scan will follow this one.
    pub(crate) fn start_scan(&mut self, layer: usize, another: bool) {
        let total = self.policy.positions();
        if layer == 0 {
            self.scan.next = self.scan.next.saturating_sub(total);
            self.scan.limit = if another { 2 * total } else { total };
            self.scan.open = true;
            // Rows of the first layer have chosen already.
            self.seeds.iter_mut().skip(1).for_each(Vec::clear);
        } else if layer == 1 {
            self.seeds[0].clear();
        }
        self.scan.next = self.scan.next.max(layer * self.policy.experts);
        self.pump();
    }

    /// The last wave of a layer of a scan has been handed out.
    pub(crate) fn end_scan(&mut self, layer: usize) {
        if (layer + 1) * self.policy.experts == self.policy.positions() {
            self.scan.open = false;
        }
    }

    /// A layer of a small pass begins: what was predicted for it in vain is not read any more, what it finds is
    /// kept, what is missing is asked for.
    pub(crate) fn start_small(&mut self, layer: usize, used: &[u32]) {
        if layer == 0 && !self.scan.open && !self.policy.full {
            self.slots.unreserve_all();
        }
        self.cancel_predicted(layer, used);
        self.touch(layer, used);
        let class = self.slots.class_of(layer);
        let most = self.slots.count(class) * 3 / 4;
        let mut held = used.iter().filter(|&&e| self.slots.find(self.slots.key(layer, e)).is_some()).count();
        for &expert in used {
            let absent = self.slots.find(self.slots.key(layer, expert)).is_none();
            if absent && held < most {
                if !self.ask(layer, expert, Origin::Demand, true) {
                    break;
                }
                held += 1;
            }
        }
    }

    /// Asks for what a wave of these experts lacks, the first ones first; what is queued for later is moved to
    /// the front. Never evicts one of them for another.
    pub(crate) fn demand(&mut self, layer: usize, window: &[u32]) {
        let listed = self.touch(layer, window);
        let class = self.slots.class_of(layer);
        for &expert in window {
            let key = self.slots.key(layer, expert);
            if self.slots.ready(key).is_some() {
                continue;
            }
            if self.slots.find(key).is_some() {
                self.promote(layer, expert);
            } else if self.slots.free(class) == 0 && self.slots.evictable(class) <= listed
                || !self.ask(layer, expert, Origin::Demand, false)
            {
                return;
            }
        }
    }

    /// Nothing is in flight and nothing can be evicted but what was read ahead, or what the wave itself needs
    /// later: gives that up for `first`, the wave's first expert.
    pub(crate) fn make_room(&mut self, layer: usize, first: u32) {
        self.slots.unreserve_all();
        let key = self.slots.key(layer, first);
        if self.slots.find(key).is_none() {
            self.ask(layer, first, Origin::Demand, false);
        }
    }

    /// The look-ahead expects these experts in `layer`.
    pub(crate) fn predict(&mut self, layer: usize, likely: &[u32]) {
        for &expert in likely {
            self.stats.predicted += 1;
            if self.slots.find(self.slots.key(layer, expert)).is_none() {
                if !self.ask(layer, expert, Origin::Predicted, false) {
                    break;
                }
                self.stats.predicted_loads += 1;
            }
        }
    }

    /// Pins experts, all of which are ready, and counts where they came from.
    pub(crate) fn pin(&mut self, layer: usize, experts: &[u32], scan: bool) {
        for &expert in experts {
            let slot = self.slots.ready(self.slots.key(layer, expert)).expect("it is ready");
            self.slots.pin(slot);
            let origin = self.slots.origin(slot);
            match origin {
                Origin::Used => self.stats.hits += 1,
                Origin::Ahead => self.stats.ahead += 1,
                Origin::Predicted => self.stats.predicted_used += 1,
                Origin::Demand => self.stats.misses += 1,
            }
            self.slots.set_origin(slot, Origin::Used);
            self.pinned.push(Pinned { slot, layer, expert, resident: origin == Origin::Used, scan });
        }
    }

    /// The wave at hand has been computed.
    pub(crate) fn unpin_all(&mut self) {
        for pinned in std::mem::take(&mut self.pinned) {
            let place = self.place(&pinned);
            self.slots.unpin(pinned.slot, place);
        }
    }

    /// Where an expert goes after its use. Small passes keep the most recent. A scan, which would evict everything
    /// before it comes round again, keeps a fixed number of each layer and frees the rest at once; the
    /// last scan of a prompt keeps what the last tokens chose instead.
    fn place(&self, pinned: &Pinned) -> Place {
        if !pinned.scan || self.policy.full {
            return Place::Hot;
        }
        let seeds = &self.seeds[pinned.layer];
        if !seeds.is_empty() {
            return match (seeds.contains(&pinned.expert), pinned.resident) {
                (true, _) => Place::Hot,
                (false, true) => Place::Cold,
                (false, false) => Place::Free,
            };
        }
        let class = self.slots.class_of(pinned.layer);
        // The slot itself still counts as kept.
        let room = self.slots.kept(pinned.layer) <= self.policy.quota(class)
            && self.slots.evictable(class) < self.policy.keep(class);
        if pinned.resident || room { Place::Hot } else { Place::Free }
    }

    /// What rows of the last scan of a prompt chose, the last row last.
    pub(crate) fn seed(&mut self, layer: usize, rows: impl DoubleEndedIterator<Item = Vec<u32>>) {
        let most = self.policy.seeds(self.slots.class_of(layer));
        let before = std::mem::take(&mut self.seeds[layer]);
        let seeds = &mut self.seeds[layer];
        for expert in rows.rev().flatten().chain(before) {
            if seeds.len() == most {
                break;
            }
            if !seeds.contains(&expert) {
                seeds.push(expert);
            }
        }
    }

    /// Asks for what the scan needs next, as long as there is room: runs of consecutive experts.
    pub(crate) fn pump(&mut self) {
        let experts = self.policy.experts;
        while self.scan.next < self.scan.limit {
            let (layer, run) = (self.scan.next % self.policy.positions() / experts, self.policy.run);
            let class = self.slots.class_of(layer);
            let (mut items, from) = (Vec::new(), self.scan.next);
            loop {
                let expert = (self.scan.next % experts) as u32;
                let key = self.slots.key(layer, expert);
                let room =
                    self.slots.free(class) > 0 || self.slots.evictable(class) > self.policy.keep(class);
                match self.slots.find(key) {
                    None if room => {
                        let slot = self.slots.take(key, Origin::Ahead, true).expect("there is room");
                        items.push(Item { expert, slot, index: self.slots.index_in_class(slot) });
                    }
                    Some(_) if items.is_empty() => {}
                    _ => break,
                }
                self.scan.next += 1;
                if items.len() == run || self.scan.next.is_multiple_of(experts) {
                    break;
                }
            }
            if !items.is_empty() {
                self.in_flight += 1;
                self.ahead.push_back(Queued { load: Load { layer, items }, origin: Origin::Ahead });
            }
            if self.scan.next == from {
                return;
            }
        }
    }

    /// Makes experts that are ready the hottest, the first one most of all. Returns how many of them may be
    /// evicted.
    fn touch(&mut self, layer: usize, experts: &[u32]) -> usize {
        let mut listed = 0;
        for &expert in experts.iter().rev() {
            if let Some(slot) = self.slots.listed(self.slots.key(layer, expert)) {
                self.slots.pin(slot);
                self.slots.unpin(slot, Place::Hot);
                listed += 1;
            }
        }
        listed
    }

    /// Asks for one expert; false if there is no slot for it.
    fn ask(&mut self, layer: usize, expert: u32, origin: Origin, reserved: bool) -> bool {
        let key = self.slots.key(layer, expert);
        let Some(slot) = self.slots.take(key, origin, reserved) else { return false };
        let item = Item { expert, slot, index: self.slots.index_in_class(slot) };
        let queued = Queued { load: Load { layer, items: vec![item] }, origin };
        self.in_flight += 1;
        match origin {
            Origin::Demand => self.urgent.push_back(queued),
            _ => self.ahead.push_back(queued),
        }
        true
    }

    /// Moves a load that waits for later to the front.
    fn promote(&mut self, layer: usize, expert: u32) {
        let names = |queued: &Queued| {
            queued.load.layer == layer && queued.load.items.iter().any(|item| item.expert == expert)
        };
        if let Some(queued) = self.ahead.iter().position(names).and_then(|at| self.ahead.remove(at)) {
            self.urgent.push_back(queued);
        }
    }

    /// Drops predictions for `layer` that nobody has begun to read and that are not among `used`.
    fn cancel_predicted(&mut self, layer: usize, used: &[u32]) {
        self.cancel_queued(|queued, _| {
            queued.origin == Origin::Predicted
                && queued.load.layer == layer
                && queued.load.items.iter().all(|item| used.binary_search(&item.expert).is_err())
        });
    }

    /// Drops loads that are in vain and that nobody has begun to carry out. Whoever needs them asks again.
    fn cancel_queued(&mut self, vain: impl Fn(&Queued, &Slots) -> bool) {
        let State { ahead, urgent, slots, in_flight, stats, .. } = self;
        for queue in [urgent, ahead] {
            queue.retain(|queued| {
                let vain = vain(queued, slots);
                if vain {
                    for item in &queued.load.items {
                        slots.set_origin(item.slot, Origin::Demand);
                        slots.cancel(item.slot);
                        stats.predicted_cancelled += u64::from(queued.origin == Origin::Predicted);
                    }
                    *in_flight -= 1;
                }
                !vain
            });
        }
    }
}

#[cfg(test)]
mod tests;
