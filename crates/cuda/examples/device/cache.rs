//! Experts through slots: the bits of a whole model, whatever the cache, the reader, the look-ahead.

use std::path::Path;
use std::sync::Arc;

use engine::{Cancel, Engine, Request};
use experts::{Io, Layout, Monitor, Options, Stats, Store, reader};
use model::{Backend, ExpertSource, KvType, MappedExperts, Model};
use redlite_cuda::{Cuda, Fetching, PinnedExperts};

use crate::check::{limits, open, prompt};

/// Tokens that are read, written behind them, and read behind those a few at a time.
const READ: usize = 1500;
const WRITTEN: usize = 64;
const TURNS: usize = 4;
const TURN: usize = 5;
const ALL: usize = READ + WRITTEN + TURNS * TURN;

/// Runs `check` for each way of keeping experts.
pub fn checks(path: &Path, check: &mut dyn FnMut(&str, &dyn Fn() -> String)) {
    for (name, io) in [("cached", Io::Cached), ("direct", Io::Direct), ("mmap", Io::Mapped)] {
        check(&format!("cache {name}"), &|| budgets(path, io));
    }
    check("cache fetched", &|| fetched(path));
}

/// The smallest cache that works.
fn floor(model: &Model) -> u64 {
    match Layout::new(model, Some(0), reader::DIRECT_BLOCK) {
        Err(experts::Error::Budget { needed, .. }) => needed,
        other => panic!("no bytes are too few: {other:?}"),
    }
}

/// Bits of all logits: of a prompt's last token, and of every token behind it.
fn logits(model: &Arc<Model>, cuda: Cuda, experts: Box<dyn ExpertSource + Send>) -> Vec<u32> {
    let tokens = prompt(model, READ);
    let options = engine::Options { chunk: 512, context: ALL };
    let mut engine = Engine::new(model.clone(), Box::new(cuda), experts, options);
    let mut session = engine.open();
    let mut logits = engine.ingest(&mut session, &tokens, &mut Request::default()).expect("a prompt").logits;
    for token in &tokens[..WRITTEN] {
        logits.extend(engine.step(&mut session, *token, &Cancel::default()).expect("a step"));
    }
    for turn in tokens.chunks(TURN).take(TURNS) {
        let read = engine.ingest(&mut session, turn, &mut Request::default()).expect("a turn");
        logits.extend(read.logits);
    }
    logits.iter().map(|x| x.to_bits()).collect()
}

fn start(model: &Arc<Model>, slots: Option<u64>) -> Cuda {
    let weights = model.load(&mut |_, _| {}).expect("weights");
    let options = redlite_cuda::Options { slots, ..redlite_cuda::Options::default() };
    Cuda::new(model.clone(), &weights, limits(ALL, KvType::F16), options).expect("a GPU")
}

/// The same bits from every budget, with and without look-ahead; every expert is compared with the file as it is used.
fn budgets(path: &Path, io: Io) -> String {
    let model = open(path);
    let expected = logits(&model, start(&model, None), Box::new(MappedExperts::new(&model)));
    let all = Layout::new(&model, None, reader::DIRECT_BLOCK).expect("a layout").bytes();
    let mut report = Vec::new();
    for budget in [all, all / 2, all / 4, floor(&model)] {
        for look_ahead in [None, Some(4)] {
            let mut cuda = start(&model, Some(budget));
            let options =
                Options { budget: Some(budget), io, look_ahead, verify: true, ..Options::default() };
            let store = Store::new(&model, &mut cuda as &mut dyn Backend, options).expect("a store");
            let monitor = store.monitor();
            let found = logits(&model, cuda, Box::new(store));
            assert!(found == expected, "{budget} bytes, look-ahead {look_ahead:?}");
            let Stats { misses, ahead, predicted_used, .. } = monitor.stats();
            let bounded = budget < all;
            assert!(!bounded || misses + ahead > 0, "experts had to be read again");
            assert!(!bounded || look_ahead.is_none() || predicted_used > 0, "the look-ahead was of use");
            report.push(format!("{} KiB: {misses} missed", budget >> 10));
            copied(&monitor);
        }
    }
    report.join(", ")
}

/// The link has carried what was read.
fn copied(monitor: &Monitor) {
    let copies = monitor.copies().expect("a GPU is behind a link");
    assert!(copies.bytes >= monitor.stats().bytes && copies.seconds > 0.0, "{copies:?}");
}

/// The same bits where the GPU fetches what small passes choose, with slots for fewer experts than a row chooses, for
/// some layers, for all.
fn fetched(path: &Path) -> String {
    let model = open(path);
    let expected = logits(&model, start(&model, None), Box::new(MappedExperts::new(&model)));
    let all = Layout::new(&model, None, 1).expect("a layout");
    let each = all.bytes() / all.slots() as u64;
    let home = Arc::new(PinnedExperts::read(&model, 0).expect("pinned memory"));
    let mut report = Vec::new();
    for slots in [model.spec.moe.used as u64 - 1, all.slots() as u64 / 4, all.slots() as u64] {
        let window = floor(&model) * 4;
        let mut cuda = start(&model, Some(window + slots * each));
        cuda.fetch_from(home.clone(), cuda.fetch_bytes(&home, slots as usize)).expect("slots");
        let options = Options { budget: Some(window), verify: true, ..Options::default() };
        let store = Store::new(&model, &mut cuda as &mut dyn Backend, options).expect("a store");
        let monitor = store.monitor();
        let found = logits(&model, cuda, Box::new(Fetching::new(&model, store, TURN)));
        assert!(found == expected, "{slots} slots");
        let copies = monitor.copies().expect("a GPU is behind a link");
        let chosen = (WRITTEN * model.experts.len() * model.spec.moe.used) as u64;
        assert!(copies.found + copies.fetched == chosen && copies.fetched > 0, "{copies:?}");
        let all = slots == all.slots() as u64;
        assert!(!all || copies.found > 3 * copies.fetched, "what came stays: {copies:?}");
        report.push(format!("{slots} slots: {} found, {} fetched", copies.found, copies.fetched));
    }
    report.join(", ")
}
