//! The books of slots: which expert is where, what may be evicted, and in which order.
//!
//! A slot is free, loading, or ready. A ready one can be pinned (a wave names it) or reserved (read ahead, not
//! used yet); otherwise it stands in its class's list, coldest first, and may be evicted from the cold end.
//! Operations take constant time, but for the heap of free slots: the first ones are taken first, so that what is read
//! together lies together.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;

/// Names a slot.
pub(crate) type SlotId = u32;

const NONE: u32 = u32::MAX;

/// Why a slot was loaded, until it is used for the first time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// A wave waited for it.
    Demand,
    /// The scan read ahead.
    Ahead,
    /// The look-ahead predicted it.
    Predicted,
    /// It has been used before.
    Used,
}

/// Where a slot goes when it is let go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// It is the last one to be evicted.
    Hot,
    /// It is the first one to be evicted.
    Cold,
    /// It is free at once.
    Free,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Free,
    Loading,
    Ready,
}

/// One slot. `before` and `after` link the ready ones that may be evicted.
#[derive(Clone, Debug)]
struct Entry {
    key: u32,
    class: u32,
    state: State,
    origin: Origin,
    pinned: bool,
    reserved: bool,
    listed: bool,
    before: SlotId,
    after: SlotId,
}

#[derive(Clone, Debug)]
struct ClassBooks {
    slots: Range<SlotId>,
    /// Slots from here on are not used: their memory is lent.
    end: SlotId,
    free: BinaryHeap<Reverse<SlotId>>,
    coldest: SlotId,
    hottest: SlotId,
    listed: usize,
}

/// The books. Experts are named by key = layer · experts + expert.
#[derive(Clone, Debug)]
pub(crate) struct Slots {
    experts: usize,
    layer_class: Vec<usize>,
    classes: Vec<ClassBooks>,
    entries: Vec<Entry>,
    /// Slot of each key.
    table: Vec<SlotId>,
    /// Slots of each layer that are ready and not reserved.
    kept: Vec<usize>,
    /// Predicted experts that were evicted without having been used.
    wasted: u64,
}

impl Slots {
    /// Free slots: `counts[class]` of each class, for layers of the classes `layer_class`.
    pub(crate) fn new(counts: &[usize], layer_class: Vec<usize>, experts: usize) -> Slots {
        let mut classes = Vec::new();
        let mut entries = Vec::new();
        for (class, &count) in counts.iter().enumerate() {
            let slots = entries.len() as SlotId..(entries.len() + count) as SlotId;
            entries.extend((0..count).map(|_| Entry {
                key: NONE,
                class: class as u32,
                state: State::Free,
                origin: Origin::Used,
                pinned: false,
                reserved: false,
                listed: false,
                before: NONE,
                after: NONE,
            }));
            let free = slots.clone().map(Reverse).collect();
            let end = slots.end;
            classes.push(ClassBooks { slots, end, free, coldest: NONE, hottest: NONE, listed: 0 });
        }
        let keys = layer_class.len() * experts;
        let kept = vec![0; layer_class.len()];
        Slots { experts, layer_class, classes, entries, table: vec![NONE; keys], kept, wasted: 0 }
    }

    /// The key of an expert.
    pub(crate) fn key(&self, layer: usize, expert: u32) -> u32 {
        (layer * self.experts) as u32 + expert
    }

    /// The class of a layer.
    pub(crate) fn class_of(&self, layer: usize) -> usize {
        self.layer_class[layer]
    }

    /// The slot of an expert, ready or loading.
    pub(crate) fn find(&self, key: u32) -> Option<SlotId> {
        let slot = self.table[key as usize];
        (slot != NONE).then_some(slot)
    }

    /// The slot of an expert, if it is ready.
    pub(crate) fn ready(&self, key: u32) -> Option<SlotId> {
        self.find(key).filter(|&slot| self.entries[slot as usize].state == State::Ready)
    }

    /// The slot of an expert, if it is ready and may be evicted.
    pub(crate) fn listed(&self, key: u32) -> Option<SlotId> {
        self.find(key).filter(|&slot| self.entries[slot as usize].listed)
    }

    /// The number of a slot in its class.
    pub(crate) fn index_in_class(&self, slot: SlotId) -> usize {
        let class = &self.classes[self.entries[slot as usize].class as usize];
        (slot - class.slots.start) as usize
    }

    /// Free slots of a class.
    pub(crate) fn free(&self, class: usize) -> usize {
        self.classes[class].free.len()
    }

    /// Slots of a class that may be evicted.
    pub(crate) fn evictable(&self, class: usize) -> usize {
        self.classes[class].listed
    }

    /// Slots of a class in use.
    pub(crate) fn count(&self, class: usize) -> usize {
        let class = &self.classes[class];
        (class.end - class.slots.start) as usize
    }

    /// Slots of a class from number `count` on are not used any more: what is ready there is given up now, what
    /// is loading as soon as it is complete. None of them may be pinned.
    pub(crate) fn withdraw(&mut self, class: usize, count: usize) {
        let books = &mut self.classes[class];
        let end = books.slots.start + count as SlotId;
        let gone = end..std::mem::replace(&mut books.end, end);
        books.free.retain(|&Reverse(slot)| slot < end);
        for slot in gone {
            if self.entries[slot as usize].state == State::Ready {
                self.discard(slot);
            }
        }
    }

    /// All slots of a class are used again.
    pub(crate) fn bring_back(&mut self, class: usize) {
        let books = &mut self.classes[class];
        let back = std::mem::replace(&mut books.end, books.slots.end)..books.slots.end;
        let entries = &self.entries;
        let is_free = |slot: &SlotId| entries[*slot as usize].state == State::Free;
        books.free.extend(back.filter(is_free).map(Reverse));
    }

    /// Whether slots that are not used any more are still being written.
    pub(crate) fn is_draining(&self) -> bool {
        let busy = |slot: SlotId| self.entries[slot as usize].state != State::Free;
        self.classes.iter().any(|books| (books.end..books.slots.end).any(busy))
    }

    /// Whether a slot is not used any more.
    pub(crate) fn is_withdrawn(&self, slot: SlotId) -> bool {
        slot >= self.classes[self.entries[slot as usize].class as usize].end
    }

    /// Experts of a layer that are ready and not reserved.
    pub(crate) fn kept(&self, layer: usize) -> usize {
        self.kept[layer]
    }

    /// Predicted experts that were given up unused so far.
    pub(crate) fn wasted(&self) -> u64 {
        self.wasted
    }

    /// Why a slot was loaded.
    pub(crate) fn origin(&self, slot: SlotId) -> Origin {
        self.entries[slot as usize].origin
    }

    /// Notes that a slot has been used, or why it is loaded after all.
    pub(crate) fn set_origin(&mut self, slot: SlotId, origin: Origin) {
        self.entries[slot as usize].origin = origin;
    }

    /// Takes a slot for an expert that has none, to be loaded: a free one, else the coldest that may be
    /// evicted. A reserved one stays out of the list when it is ready, until it is used.
    pub(crate) fn take(&mut self, key: u32, origin: Origin, reserved: bool) -> Option<SlotId> {
        assert_eq!(self.table[key as usize], NONE, "an expert has one slot");
        let class = self.layer_class[key as usize / self.experts];
        if self.classes[class].free.is_empty() {
            let victim = self.classes[class].coldest;
            if victim == NONE {
                return None;
            }
            self.discard(victim);
        }
        let Reverse(slot) = self.classes[class].free.pop().expect("there is one now");
        self.table[key as usize] = slot;
        let entry = &mut self.entries[slot as usize];
        (entry.key, entry.state, entry.origin, entry.reserved) = (key, State::Loading, origin, reserved);
        Some(slot)
    }

    /// A load is complete.
    pub(crate) fn publish(&mut self, slot: SlotId) {
        assert_eq!(self.entries[slot as usize].state, State::Loading);
        if self.is_withdrawn(slot) {
            return self.cancel(slot);
        }
        let entry = &mut self.entries[slot as usize];
        entry.state = State::Ready;
        if !entry.reserved {
            self.kept[entry.key as usize / self.experts] += 1;
            self.link(slot, Place::Hot);
        }
    }

    /// A load was given up: what the slot holds is nobody's.
    pub(crate) fn cancel(&mut self, slot: SlotId) {
        assert_eq!(self.entries[slot as usize].state, State::Loading);
        self.discard(slot);
    }

    /// A wave names a ready slot: it cannot be evicted. Its reservation is used up.
    pub(crate) fn pin(&mut self, slot: SlotId) {
        self.unlink(slot);
        let entry = &mut self.entries[slot as usize];
        assert_eq!(entry.state, State::Ready);
        if entry.reserved {
            entry.reserved = false;
            self.kept[entry.key as usize / self.experts] += 1;
        }
        entry.pinned = true;
    }

    /// No wave names a pinned slot any more.
    pub(crate) fn unpin(&mut self, slot: SlotId, place: Place) {
        let entry = &mut self.entries[slot as usize];
        assert!(entry.pinned);
        entry.pinned = false;
        match place {
            Place::Free => self.discard(slot),
            place => self.link(slot, place),
        }
    }

    /// Gives up what was read ahead: reserved slots may be evicted, first of all.
    pub(crate) fn unreserve_all(&mut self) {
        for slot in 0..self.entries.len() as SlotId {
            let entry = &mut self.entries[slot as usize];
            if std::mem::take(&mut entry.reserved) && entry.state == State::Ready {
                self.kept[entry.key as usize / self.experts] += 1;
                self.link(slot, Place::Cold);
            }
        }
    }

    /// Makes a slot free.
    fn discard(&mut self, slot: SlotId) {
        self.unlink(slot);
        let entry = &mut self.entries[slot as usize];
        assert!(!entry.pinned && entry.state != State::Free);
        if entry.state == State::Ready && !entry.reserved {
            self.kept[entry.key as usize / self.experts] -= 1;
        }
        self.wasted += u64::from(entry.origin == Origin::Predicted);
        self.table[entry.key as usize] = NONE;
        (entry.key, entry.state, entry.reserved) = (NONE, State::Free, false);
        let books = &mut self.classes[entry.class as usize];
        if slot < books.end {
            books.free.push(Reverse(slot));
        }
    }

    fn link(&mut self, slot: SlotId, place: Place) {
        let class = &mut self.classes[self.entries[slot as usize].class as usize];
        let (before, after) = match place {
            Place::Cold => (NONE, std::mem::replace(&mut class.coldest, slot)),
            _ => (std::mem::replace(&mut class.hottest, slot), NONE),
        };
        if class.listed == 0 {
            (class.coldest, class.hottest) = (slot, slot);
        }
        class.listed += 1;
        let entry = &mut self.entries[slot as usize];
        (entry.before, entry.after, entry.listed) = (before, after, true);
        if before != NONE {
            self.entries[before as usize].after = slot;
        }
        if after != NONE {
            self.entries[after as usize].before = slot;
        }
    }

    fn unlink(&mut self, slot: SlotId) {
        let entry = &mut self.entries[slot as usize];
        if !std::mem::take(&mut entry.listed) {
            return;
        }
        let (before, after) = (entry.before, entry.after);
        let class = &mut self.classes[entry.class as usize];
        class.listed -= 1;
        match before {
            NONE => class.coldest = after,
            before => self.entries[before as usize].after = after,
        }
        match after {
            NONE => class.hottest = before,
            after => self.entries[after as usize].before = before,
        }
    }
}

#[cfg(test)]
mod tests;
