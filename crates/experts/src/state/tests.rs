//! The store's decisions under reads that come in any order, fail, or are given up: one thread plays the engine and all
//! readers, by a seeded schedule, so that every order can happen and each failure can be repeated.

use std::io;

use testkit::Random;

use super::*;
use crate::layout::{Class, LayerParts, Part};

const EXPERTS: usize = 16;
const USED: usize = 2;
/// Rows that read whole layers, and rows that do not.
const SCAN: usize = 80;
const FEW: usize = 3;

/// Layers of classes `classes`, with `(slots, stay)` for each class.
fn layout(classes: &[usize], slots: &[(usize, usize)]) -> Layout {
    let part = Part { tensor: String::new(), shard: 0, offset: 0, stride: 1, bytes: 1, at: 0 };
    let layer = |&class| LayerParts { class, parts: [part.clone(), part.clone(), part.clone()] };
    let class = |(class, &(slots, stay)): (usize, &(usize, usize))| Class {
        base: 0,
        slot_bytes: 1,
        slots,
        stay,
        layers: classes.iter().filter(|&&of| of == class).count(),
    };
    Layout {
        experts: EXPERTS,
        alignment: 1,
        layers: classes.iter().map(layer).collect(),
        classes: slots.iter().enumerate().map(class).collect(),
    }
}

/// A pass on its way through the layers.
struct Walk {
    rows: usize,
    follow: usize,
    layer: usize,
    /// What the layer's rows chose, if it was asked; where the next wave begins; whether the layer has.
    used: Option<Vec<u32>>,
    from: u32,
    started: bool,
}

impl Walk {
    fn new(rows: usize, follow: usize) -> Walk {
        Walk { rows, follow, layer: 0, used: None, from: 0, started: false }
    }
}

/// The store's state, what slots really hold, and the readers.
struct World {
    state: State,
    layers: usize,
    /// The key of the expert whose bytes a slot holds; `None` while it is written, or when its memory is lent.
    holds: Vec<Option<u32>>,
    /// Loads that readers are carrying out, and the waits in which they began.
    reading: Vec<(Queued, u64)>,
    rng: Random,
    /// One in so many loads fails; 0 for none.
    failing: usize,
    failures: usize,
    /// Whether a look-ahead names experts, right or wrong.
    predicting: bool,
    /// The keys of all that was read, in the order of completion.
    read: Vec<u32>,
}

impl World {
    fn new(layout: &Layout, seed: u64, failing: usize) -> World {
        World {
            state: State::new(layout, USED),
            layers: layout.layers.len(),
            holds: vec![None; layout.slots()],
            reading: Vec::new(),
            rng: Random::new(seed, "state"),
            failing,
            failures: 0,
            predicting: false,
            read: Vec::new(),
        }
    }

    /// A reader takes a load, or completes any of those under way; false if there is nothing to do.
    fn read_something(&mut self) -> bool {
        let begin = self.reading.is_empty() || self.reading.len() < 6 && self.rng.below(2) == 0;
        if begin && let Some(queued) = self.state.next_load() {
            for item in &queued.load.items {
                let pinned = self.state.pinned.iter().any(|pinned| pinned.slot == item.slot);
                assert!(!pinned, "what a wave names is not overwritten");
                assert!(!self.state.slots.is_withdrawn(item.slot), "what is lent is not written");
                self.holds[item.slot as usize] = None;
            }
            self.reading.push((queued, self.state.wait));
            return true;
        }
        if self.reading.is_empty() {
            return false;
        }
        let at = self.rng.below(self.reading.len());
        let (queued, began) = self.reading.swap_remove(at);
        let result = if self.failing > 0 && self.rng.below(self.failing) == 0 {
            self.failures += 1;
            let source = io::Error::other("it failed");
            Err(Error::Load { file: "f".into(), tensor: "t".to_string(), offset: 0, len: 1, source })
        } else {
            for item in &queued.load.items {
                let key = self.state.slots.key(queued.load.layer, item.expert);
                self.holds[item.slot as usize] = Some(key);
                self.read.push(key);
            }
            Ok(queued.load.items.len() as u64)
        };
        self.state.complete(&queued.load, began, result);
        true
    }

    fn read_all(&mut self) {
        while self.read_something() {}
    }

    /// Every slot of the wave holds what it says.
    fn check_pinned(&self) {
        for pinned in &self.state.pinned {
            let key = self.state.slots.key(pinned.layer, pinned.expert);
            assert_eq!(self.holds[pinned.slot as usize], Some(key), "stale or unfinished bytes in a wave");
        }
    }

    /// The next wave of a pass; true when the pass is over, an error if a load failed.
    fn advance(&mut self, walk: &mut Walk, used: &[u32]) -> Result<bool, ()> {
        let scan = self.state.policy.scans(walk.rows);
        if !walk.started {
            walk.used = (!scan).then(|| used.to_vec());
            walk.from = 0;
            walk.started = true;
            match &walk.used {
                Some(used) => self.state.start_small(walk.layer, used),
                None if self.state.policy.full => {}
                None => {
                    let another = self.state.policy.scans(walk.follow);
                    if !another {
                        let rows = vec![used.to_vec()];
                        self.state.seed(walk.layer, rows.into_iter());
                    }
                    self.state.start_scan(walk.layer, another);
                }
            }
            if self.predicting && !scan && walk.layer + 1 < self.layers && self.rng.below(2) == 0 {
                let likely: Vec<u32> = (0..EXPERTS as u32).filter(|_| self.rng.below(4) == 0).collect();
                self.state.predict(walk.layer + 1, &likely);
            }
        }
        let all: Vec<u32> = walk.used.clone().unwrap_or_else(|| (0..EXPERTS as u32).collect());
        let need: Vec<u32> = all.into_iter().filter(|&expert| expert >= walk.from).collect();
        let most = self.state.policy.wave(self.state.slots.class_of(walk.layer)).min(need.len());
        let call =
            LayerCall { layer: walk.layer, rows: walk.rows, follow: walk.follow, used: walk.used.as_deref() };
        self.state.unpin_all();
        self.state.begin_wait();
        loop {
            match self.state.attempt(&call, &need[..most]) {
                Attempt::Failed(_) => return Err(()),
                Attempt::Ready => break,
                Attempt::Wait => assert!(self.read_something(), "it waits for nothing"),
            }
        }
        let wave: Vec<u32> = self.state.pinned.iter().map(|pinned| pinned.expert).collect();
        assert!(!wave.is_empty() || need.is_empty());
        assert_eq!(wave, need[..wave.len()], "waves ascend and leave nothing out");
        self.check_pinned();
        // It is being computed; readers go on.
        for _ in 0..self.rng.below(8) {
            self.read_something();
        }
        self.check_pinned();
        let last = wave.len() == need.len();
        if last && scan {
            self.state.end_scan(walk.layer);
        }
        self.state.unpin_all();
        if scan {
            self.state.pump();
        }
        if last {
            (walk.layer, walk.started) = (walk.layer + 1, false);
        } else {
            walk.from = wave.last().map_or(0, |last| last + 1);
        }
        Ok(walk.layer == self.layers)
    }

    /// A whole pass, in which each row of each layer chooses what `choose` says.
    fn pass(&mut self, rows: usize, follow: usize, choose: impl Fn(usize) -> Vec<u32>) {
        let mut walk = Walk::new(rows, follow);
        loop {
            let used = choose(walk.layer);
            if self.advance(&mut walk, &used).unwrap() {
                return;
            }
        }
    }

    fn lend(&mut self) {
        self.state.lend();
        while self.state.is_draining() {
            assert!(self.read_something(), "it waits for nothing");
        }
        for slot in 0..self.holds.len() {
            if self.state.slots.is_withdrawn(slot as SlotId) {
                self.holds[slot] = None;
            }
        }
    }

    /// Experts of a layer that are ready.
    fn ready(&self, layer: usize) -> Vec<u32> {
        let experts = 0..EXPERTS as u32;
        experts.filter(|&e| self.state.slots.ready(self.state.slots.key(layer, e)).is_some()).collect()
    }
}

/// One class or two; from the floor to all but everything.
fn layouts() -> Vec<Layout> {
    vec![
        layout(&[0; 4], &[(6, 6)]),
        layout(&[0; 4], &[(9, 6)]),
        layout(&[0; 4], &[(23, 11)]),
        layout(&[0; 4], &[(50, 40)]),
        layout(&[0, 1, 1, 0], &[(30, 24), (28, 24)]),
        layout(&[0; 4], &[(64, 64)]),
    ]
}

#[test]
fn any_order_of_reads_and_phases_hands_out_the_right_bytes_and_never_sticks() {
    let (mut loads, mut failures, mut waves, mut lent) = (0, 0, 0, 0);
    for (number, layout) in layouts().iter().enumerate() {
        for seed in 0..60 {
            let failing = if seed % 3 == 0 { 40 } else { 0 };
            let mut world = World::new(layout, 1000 * number as u64 + seed, failing);
            world.predicting = true;
            let mut walks: Vec<Walk> = Vec::new();
            for _ in 0..400 {
                if walks.len() < 3 && world.rng.below(4) == 0 {
                    let rows = if world.rng.below(2) == 0 { SCAN } else { FEW };
                    let follow = if world.rng.below(2) == 0 { SCAN } else { 0 };
                    walks.push(Walk::new(rows, follow));
                }
                match world.rng.below(40) {
                    0 => {
                        world.lend();
                        lent += 1;
                    }
                    1 => world.state.take_back(),
                    // A pass is given up.
                    2 if !walks.is_empty() => drop(walks.swap_remove(world.rng.below(walks.len()))),
                    _ => {}
                }
                if walks.is_empty() {
                    continue;
                }
                let at = world.rng.below(walks.len());
                let used: Vec<u32> = (0..EXPERTS as u32).filter(|_| world.rng.below(3) == 0).collect();
                waves += 1;
                if !matches!(world.advance(&mut walks[at], &used), Ok(false)) {
                    walks.swap_remove(at);
                }
            }
            world.state.unpin_all();
            world.read_all();
            assert_eq!(world.state.in_flight, 0, "no load is lost");
            loads += world.read.len();
            failures += world.failures;
        }
    }
    assert!(waves > 50_000 && loads > 200_000, "{waves} waves, {loads} loads");
    assert!(failures > 1_000 && lent > 1_000, "{failures} failures, {lent} loans");
}

#[test]
fn hits_are_reserved_before_victims_are_chosen() {
    let mut world = World::new(&layout(&[0; 2], &[(8, 8)]), 1, 0);
    for expert in 0..8 {
        world.pass(1, 0, |layer| if layer == 0 { vec![expert] } else { vec![] });
    }
    assert_eq!(world.ready(0), [0, 1, 2, 3, 4, 5, 6, 7]);
    // 0 and 1 are the coldest: what is missing must not take their slots.
    world.read.clear();
    world.pass(1, 0, |layer| if layer == 0 { vec![0, 1, 9, 10] } else { vec![] });
    world.read.sort_unstable();
    assert_eq!(world.read, [9, 10], "only what was missing is read");
    assert_eq!(world.ready(0), [0, 1, 4, 5, 6, 7, 9, 10], "the least recently used went");
}

#[test]
fn a_scan_keeps_a_fixed_part_and_the_last_one_what_the_last_tokens_chose() {
    (0..500).for_each(scans_and_the_last_one);
}

fn scans_and_the_last_one(seed: u64) {
    // Two and a half layers of four: a layer and a quarter streams, five experts of each stay.
    let (mut world, kept) = (World::new(&layout(&[0; 4], &[(40, 40)]), seed, 0), 20);
    let nothing = |_| Vec::new();
    world.pass(SCAN, SCAN, nothing);
    world.read_all();
    assert_eq!(world.read.len(), 64 + 40 - kept, "seed {seed}: a scan is ahead by what streams");
    world.read.clear();
    for _ in 0..3 {
        let hits = world.state.stats.hits;
        world.pass(SCAN, SCAN, nothing);
        assert!((0..4).all(|layer| world.ready(layer).len() >= 5), "seed {seed}");
        assert_eq!(world.state.stats.hits - hits, kept as u64, "seed {seed}: it finds what stays");
    }
    // How much of what is asked for ahead comes before the end of a scan is up to the readers.
    world.read_all();
    assert_eq!(world.read.len(), 3 * (64 - kept), "seed {seed}: it reads the rest");
    // The last chunk.
    let last = |layer: usize| vec![layer as u32, 15];
    world.pass(SCAN, 0, last);
    for layer in 0..4 {
        let ready = world.ready(layer);
        assert!(last(layer).iter().all(|expert| ready.contains(expert)), "seed {seed}, layer {layer}");
    }
    let (misses, loads) = (world.state.stats.misses, world.state.in_flight);
    assert_eq!(loads, 0, "seed {seed}: nothing is read ahead for a chunk that does not come");
    world.pass(1, 0, last);
    assert_eq!(world.state.stats.misses, misses, "seed {seed}: decoding begins warm");
}

#[test]
fn few_rows_evict_the_least_recent_and_a_scan_does_not_take_all() {
    for seed in 0..500 {
        let mut world = World::new(&layout(&[0; 4], &[(40, 40)]), seed, 0);
        let mine = |layer: usize| vec![2 * layer as u32, 9];
        world.pass(1, 0, mine);
        // A chunk that another follows goes by, twice.
        world.pass(SCAN, SCAN, |_| Vec::new());
        world.pass(SCAN, 0, mine);
        let misses = world.state.stats.misses;
        world.pass(1, 0, mine);
        assert_eq!(world.state.stats.misses, misses, "seed {seed}");
    }
}

#[test]
fn a_load_that_was_aborted_leaves_nothing_behind() {
    let mut world = World::new(&layout(&[0; 2], &[(6, 6)]), 5, 1);
    let mut walk = Walk::new(1, 0);
    assert!(world.advance(&mut walk, &[3, 4]).is_err(), "every load fails");
    world.read_all();
    assert!(world.ready(0).is_empty() && world.state.slots.free(0) == 6);
    world.failing = 0;
    world.pass(1, 0, |_| vec![3, 4]);
    assert_eq!(world.ready(0), [3, 4]);
}

#[test]
fn lent_slots_come_back_empty_and_the_others_keep_what_they_hold() {
    let mut world = World::new(&layout(&[0; 4], &[(24, 12)]), 11, 0);
    for expert in 0..6 {
        world.pass(1, 0, |layer| vec![(expert + layer as u32) % 16]);
    }
    let count = |world: &World| (0..4).map(|layer| world.ready(layer).len()).sum::<usize>();
    assert_eq!(count(&world), 24);
    world.lend();
    assert_eq!((count(&world), world.state.slots.count(0)), (12, 12));
    world.pass(SCAN, 0, |_| vec![1]);
    assert!(count(&world) <= 12);
    let kept = count(&world);
    world.state.take_back();
    assert_eq!((count(&world), world.state.slots.count(0)), (kept, 24));
    for expert in 0..6 {
        world.pass(1, 0, |layer| vec![(expert + layer as u32) % 16]);
    }
    assert_eq!(count(&world), 24, "all slots are used again");
    // A prompt that was given up leaves nothing reserved.
    let mut walk = Walk::new(SCAN, SCAN);
    world.advance(&mut walk, &[]).unwrap();
    world.state.take_back();
    world.read_all();
    assert_eq!(world.state.slots.evictable(0) + world.state.slots.free(0), 24);
}
