//! Sequences against a naive model of them: random operations, then positions, contents, pages and slots are what
//! lists of tokens say they must be.

mod common;

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use half::f16;
use model::state::host::{HostState, Page, Side};
use model::state::{OpenPass, PAGE, PageId, SlotId};
use model::{Error, KvType, Pass, SequenceId, Snapshot, SnapshotRequest, Spec};
use testkit::{Random, TinyModel, TinyOptions};

const PAGES: usize = 12;

fn spec() -> Spec {
    let small = TinyOptions { hidden: 16, width: 8, head: 8, layers: 5, ..TinyOptions::default() };
    TinyModel::new(small).model.spec.clone()
}

/// What a backend would store for a token: small whole numbers, which every KV type holds.
fn kv_number(token: u32, layer: usize, side: Side, head: usize, i: usize) -> f32 {
    ((token as usize + 3 * layer + 5 * side as usize + 7 * head + 11 * i) % 1021) as f32
}

/// Numbers of a layer's recurrent state, which tell histories apart.
fn recurrent_numbers(tokens: &[u32], layer: usize) -> impl Iterator<Item = f32> {
    let sum = tokens.iter().enumerate().map(|(at, &token)| (at as u64 + 1) * u64::from(token)).sum::<u64>();
    let zero = tokens.is_empty();
    (0..).map(move |i| if zero { 0.0 } else { (sum % 65_521) as f32 + (layer * 31 + i % 17) as f32 })
}

/// The snapshot that a list of tokens must have.
fn expected(host: &HostState, tokens: &[u32]) -> Snapshot {
    let shape = *host.shape();
    let mut recurrent = Vec::new();
    if !tokens.is_empty() {
        for layer in 0..shape.delta_layers {
            recurrent.extend(recurrent_numbers(tokens, layer).take(shape.window + shape.state));
        }
    }
    let mut kv = Vec::new();
    for layer in 0..shape.attention_layers {
        for side in [Side::Key, Side::Value] {
            for head in 0..shape.kv_heads {
                for &token in tokens {
                    for i in 0..shape.head_dim {
                        let number = kv_number(token, layer, side, head, i);
                        match shape.kv {
                            KvType::F16 => kv.extend(f16::from_f32(number).to_le_bytes()),
                            KvType::F32 => kv.extend(number.to_le_bytes()),
                        }
                    }
                }
            }
        }
    }
    let rows = tokens.len() * shape.head_dim * shape.kv.bytes();
    let mut pages = Vec::new();
    for first in (0..tokens.len()).step_by(PAGE) {
        let mut page = Page::new(&shape);
        let count = PAGE.min(tokens.len() - first) * shape.head_dim * shape.kv.bytes();
        for head in 0..shape.attention_layers * 2 * shape.kv_heads {
            let start = head * rows + first * shape.head_dim * shape.kv.bytes();
            page.write_bytes(head * PAGE * shape.head_dim, &kv[start..start + count]);
        }
        pages.push(Arc::new(page));
    }
    Snapshot { shape, position: tokens.len(), recurrent: Arc::new(recurrent), pages }
}

/// A pass that has been opened and computed, but neither committed nor aborted.
struct Pending {
    pass: Pass,
    open: OpenPass,
    /// What its sequences and snapshots become.
    after: Vec<(SequenceId, Vec<u32>)>,
}

struct World {
    host: HostState,
    random: Random,
    /// Every live sequence and its tokens.
    live: BTreeMap<SequenceId, Vec<u32>>,
    pending: Option<Pending>,
    copies: Vec<(Snapshot, Vec<u32>)>,
    /// How often each kind of thing happened, so that the test is known to test it.
    happened: BTreeMap<&'static str, usize>,
}

impl World {
    fn new(kv: KvType, seed: u64) -> World {
        World {
            host: HostState::new(&spec(), kv, PAGES * PAGE),
            random: Random::new(seed, "operations"),
            live: BTreeMap::new(),
            pending: None,
            copies: Vec::new(),
            happened: BTreeMap::new(),
        }
    }

    fn below(&mut self, n: usize) -> usize {
        (self.random.bits() % n as u64) as usize
    }

    fn count(&mut self, what: &'static str) {
        *self.happened.entry(what).or_default() += 1;
    }

    /// A live sequence; one that no open pass names, if `idle`.
    fn pick(&mut self, idle: bool) -> Option<SequenceId> {
        let named =
            |id: SequenceId| self.pending.iter().any(|p| p.after.iter().any(|(other, _)| *other == id));
        let ids: Vec<SequenceId> = self.live.keys().copied().filter(|&id| !(idle && named(id))).collect();
        (!ids.is_empty()).then(|| ids[self.below(ids.len())])
    }

    fn step(&mut self) {
        match self.below(13) {
            0 | 1 => self.create(),
            2 => self.fork(),
            3..=5 => self.free(),
            6 => self.copy_out(),
            7 => self.copy_in(),
            8 | 9 => self.settle(),
            _ => self.run(),
        }
    }

    fn create(&mut self) {
        if self.live.len() < 8 {
            let id = self.host.table_mut().create();
            assert!(self.live.insert(id, Vec::new()).is_none(), "ids of live sequences are not given again");
        }
    }

    fn fork(&mut self) {
        let Some(id) = self.pick(false).filter(|_| self.live.len() < 8) else { return };
        let before = self.host.table().in_use();
        let fork = self.host.table_mut().fork(id).unwrap();
        assert_eq!(self.host.table().in_use(), before, "a fork owns nothing");
        assert!(self.live.insert(fork, self.live[&id].clone()).is_none());
        self.count("fork");
    }

    fn free(&mut self) {
        let Some(id) = self.pick(true) else { return };
        self.host.table_mut().free(id);
        self.host.table_mut().free(id); // does nothing
        self.live.remove(&id);
        assert!(matches!(self.host.table().position(id), Err(Error::NoSequence(n)) if n == id.0));
        assert!(self.host.snapshot(id).is_err() && self.host.table_mut().fork(id).is_err());
        self.count("free");
    }

    fn copy_out(&mut self) {
        let Some(id) = self.pick(false) else { return };
        let copy = self.host.snapshot(id).unwrap();
        self.copies.truncate(3);
        self.copies.insert(0, (copy, self.live[&id].clone()));
        self.count("copy");
    }

    fn copy_in(&mut self) {
        if self.copies.is_empty() || self.live.len() >= 8 {
            return;
        }
        let at = self.below(self.copies.len());
        let (copy, tokens) = self.copies[at].clone();
        let (pages, _) = self.host.table().in_use();
        match self.host.restore(&copy) {
            Ok(id) => {
                assert!(self.live.insert(id, tokens).is_none());
                self.count("restore");
            }
            Err(Error::ContextFull { .. }) => {
                assert!(tokens.len().div_ceil(PAGE) > PAGES - pages, "there was room");
                self.count("restore refused");
            }
            Err(error) => panic!("{error}"),
        }
    }

    /// Opens a pass of one to three sequences, some with snapshots, and computes it.
    fn run(&mut self) {
        self.settle();
        let (mut pass, mut after) = (Pass::new(), Vec::new());
        for _ in 0..1 + self.below(3) {
            let Some(id) = self.pick(true).filter(|id| after.iter().all(|(other, _)| other != id)) else {
                continue;
            };
            let len = [1, 2, 60, PAGE - 1, PAGE, 300][self.below(6)];
            let tokens: Vec<u32> = self.random.tokens(len, 1000);
            let start = self.live[&id].len();
            let rows = pass.push(id, start, &tokens);
            let whole = [self.live[&id].clone(), tokens].concat();
            for _ in 0..self.below(3).min(10 - self.live.len().min(10)) {
                let empty = self.host.table_mut().create();
                assert!(self.live.insert(empty, Vec::new()).is_none());
                let row = rows.start + self.below(rows.len());
                pass.snapshots.push(SnapshotRequest { row, into: empty });
                after.push((empty, whole[..start + row - rows.start + 1].to_vec()));
            }
            after.push((id, whole));
        }
        if pass.runs.is_empty() {
            return;
        }
        let before = self.host.table().in_use();
        match self.host.open(&pass) {
            Ok(open) => {
                self.compute(&pass, &open);
                self.pending = Some(Pending { pass, open, after });
                self.count("pass");
            }
            Err(Error::ContextFull { pages, page_positions }) => {
                assert_eq!((pages, page_positions), (PAGES, PAGE));
                assert_eq!(self.host.table().in_use(), before, "a refused pass takes nothing");
                // A run needs new pages, and one more if the page it continues is shared.
                let most = pass.runs.iter().map(|run| {
                    let (start, end) = (run.start, run.start + run.rows.len());
                    end.div_ceil(PAGE) - start / PAGE
                });
                assert!(most.sum::<usize>() > PAGES - before.0, "there was room");
                self.count("pass refused");
                self.forget(&pass);
                self.free();
            }
            Err(error) => panic!("{error}"),
        }
    }

    /// Does what a backend does between opening and committing.
    fn compute(&mut self, pass: &Pass, open: &OpenPass) {
        let shape = *self.host.shape();
        for (run, opened) in pass.runs.iter().zip(&open.runs) {
            let mut tokens = self.live[&run.sequence].clone();
            for layer in 0..shape.delta_layers {
                self.host.copy_recurrent(opened.from, opened.to, layer);
                let (window, state) = self.host.recurrent(opened.to, layer);
                let mut pairs = window.iter().chain(state).zip(recurrent_numbers(&tokens, layer));
                assert!(pairs.all(|(&found, wanted)| found == wanted), "the state before the run");
            }
            for row in run.rows.clone() {
                tokens.push(pass.tokens[row]);
                self.store(&opened.pages, tokens.len() - 1, pass.tokens[row]);
                for &(at, slot) in opened.snapshots.iter().filter(|(at, _)| *at == row) {
                    assert_eq!(run.position(at), tokens.len() - 1);
                    self.remember(slot, &tokens);
                }
            }
            self.remember(opened.to, &tokens);
        }
    }

    fn store(&mut self, pages: &[PageId], position: usize, token: u32) {
        let shape = *self.host.shape();
        for layer in 0..shape.attention_layers {
            for (side, head) in [(Side::Key, 0), (Side::Key, 1), (Side::Value, 0), (Side::Value, 1)] {
                let row: Vec<f32> =
                    (0..shape.head_dim).map(|i| kv_number(token, layer, side, head, i)).collect();
                self.host.store(pages, position, (layer, side, head), &row);
            }
        }
    }

    fn remember(&mut self, slot: SlotId, tokens: &[u32]) {
        let shape = *self.host.shape();
        for layer in 0..shape.delta_layers {
            let (window, state) = self.host.recurrent_mut(slot, layer);
            let numbers = window.iter_mut().chain(state).zip(recurrent_numbers(tokens, layer));
            numbers.for_each(|(out, number)| *out = number);
        }
    }

    /// Commits or aborts the open pass.
    fn settle(&mut self) {
        let Some(Pending { pass, open, after }) = self.pending.take() else { return };
        if self.below(3) == 0 {
            self.host.table_mut().abort(open);
            self.forget(&pass);
            self.count("abort");
        } else {
            self.host.table_mut().commit(&pass, open);
            self.live.extend(after);
            self.count("commit");
        }
    }

    /// Frees the snapshot targets of a pass that came to nothing; they must be as empty as before.
    fn forget(&mut self, pass: &Pass) {
        for wish in &pass.snapshots {
            assert_eq!(self.host.table().position(wish.into).unwrap(), 0);
            self.host.table_mut().free(wish.into);
            self.live.remove(&wish.into);
        }
    }

    /// Everything is what the lists say; nothing is held that no sequence and no open pass needs.
    fn check(&self) {
        let (mut pages, mut slots): (HashSet<PageId>, HashSet<SlotId>) = Default::default();
        for (&id, tokens) in &self.live {
            let (position, own, slot) = self.host.table().parts(id).unwrap();
            assert_eq!((position, own.len()), (tokens.len(), tokens.len().div_ceil(PAGE)));
            assert_eq!(slot.is_none(), tokens.is_empty());
            pages.extend(own);
            slots.extend(slot);
            assert!(self.host.snapshot(id).unwrap() == expected(&self.host, tokens), "contents of {id:?}");
        }
        for run in self.pending.iter().flat_map(|pending| &pending.open.runs) {
            pages.extend(&run.pages);
            slots.insert(run.to);
            slots.extend(run.snapshots.iter().map(|(_, slot)| *slot));
        }
        assert_eq!(self.host.table().in_use(), (pages.len(), slots.len()), "pages and slots in use");
        assert!(pages.len() <= PAGES);
    }
}

#[test]
fn sequences_are_what_their_tokens_say_whatever_happens() {
    for (kv, seed) in [(KvType::F16, 1), (KvType::F32, 2), (KvType::F16, 3)] {
        let mut world = World::new(kv, seed);
        for _ in 0..500 {
            world.step();
            world.check();
        }
        for what in ["fork", "free", "copy", "restore", "pass", "pass refused", "commit", "abort"] {
            assert!(world.happened.get(what).is_some_and(|&n| n >= 5), "{what} in {:?}", world.happened);
        }
        world.settle();
        for id in world.live.keys().copied().collect::<Vec<_>>() {
            world.host.table_mut().free(id);
        }
        assert_eq!(world.host.table().in_use(), (0, 0), "nothing leaks");
    }
}

#[test]
fn damaged_states_are_refused_and_leave_nothing() {
    let mut world = World::new(KvType::F16, 7);
    world.create();
    while world.live.values().all(|tokens| tokens.len() < 300) {
        world.run();
        world.settle();
    }
    let (&id, tokens) = world.live.iter().find(|(_, tokens)| tokens.len() >= 300).unwrap();
    let (good, tokens) = (world.host.snapshot(id).unwrap(), tokens.clone());
    let damage: [fn(&mut Snapshot); 10] = [
        |s| s.position += PAGE,
        |s| s.position = 0,
        |s| s.position = usize::MAX,
        |s| s.pages.truncate(s.pages.len() - 1),
        |s| s.pages.push(s.pages[0].clone()),
        |s| Arc::make_mut(&mut s.recurrent).truncate(10),
        |s| Arc::make_mut(&mut s.recurrent).clear(),
        |s| s.shape.kv = KvType::F32,
        |s| s.shape.kv_heads *= 2,
        |s| (s.shape.window, s.shape.state) = (s.shape.state, s.shape.window),
    ];
    let before = world.host.table().in_use();
    for (case, damage) in damage.iter().enumerate() {
        let mut bad = good.clone();
        damage(&mut bad);
        let error = world.host.restore(&bad).expect_err("a damaged state");
        assert!(matches!(error, Error::Snapshot(_)), "case {case}: {error}");
        assert!(error.to_string().contains("stored state refused"), "{error}");
        assert_eq!(world.host.table().in_use(), before, "case {case}");
    }
    // Whole, but larger than all memory for it.
    let mut small = HostState::new(&spec(), KvType::F16, PAGE);
    assert!(matches!(small.restore(&good), Err(Error::ContextFull { pages: 1, .. })));
    assert_eq!(small.table().in_use(), (0, 0));
    // The undamaged one comes back, in another place too.
    let mut other = HostState::new(&spec(), KvType::F16, PAGES * PAGE);
    let restored = other.restore(&good).unwrap();
    assert_eq!(other.table().position(restored).unwrap(), tokens.len());
    assert!(other.snapshot(restored).unwrap() == expected(&other, &tokens));
    // An empty sequence is a state as well.
    let empty = other.table_mut().create();
    let copy = other.snapshot(empty).unwrap();
    assert_eq!((copy.position, copy.recurrent.len(), copy.pages.len()), (0, 0, 0));
    let again = other.restore(&copy).unwrap();
    assert_eq!(other.table().position(again).unwrap(), 0);
}

#[test]
fn wrong_snapshot_targets_are_refused() {
    let mut host = HostState::new(&spec(), KvType::F16, PAGES * PAGE);
    let (a, b) = (host.table_mut().create(), host.table_mut().create());
    let request = |row, into| SnapshotRequest { row, into };
    for snapshots in
        [vec![request(0, a)], vec![request(0, SequenceId(77))], vec![request(0, b), request(1, b)]]
    {
        let mut pass = Pass::new();
        pass.push(a, 0, &[1, 2]);
        pass.snapshots = snapshots;
        assert!(matches!(host.open(&pass), Err(Error::Pass(_) | Error::NoSequence(77))));
        assert_eq!(host.table().in_use(), (0, 0));
    }
    let mut pass = Pass::new();
    pass.push(a, 0, &[1, 2]);
    let open = host.open(&pass).unwrap();
    host.table_mut().commit(&pass, open);
    let mut pass = Pass::new();
    pass.push(b, 0, &[1]);
    pass.snapshots = vec![request(0, a)];
    assert!(matches!(host.open(&pass), Err(Error::Pass(_))), "`a` is not empty");
}
