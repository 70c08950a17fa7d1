//! The bits of a result do not depend on how experts are loaded.

mod common;

use std::collections::BTreeSet;
use std::io::{self, IoSliceMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use common::{budget, engine, logits, synthetic, tokens};
use engine::{Cancel, Engine, Ingestion, Request};
use experts::{Io, Loan, Options, Reader, reader};

const PROMPT: usize = 3_000;
const ANSWER: usize = 64;

#[test]
fn budgets_readers_look_ahead_and_threads_change_no_bit() {
    let synthetic = synthetic("bits", false);
    let model = &synthetic.model;
    let prompt = tokens(PROMPT);
    let (mut mapped, _) = engine(model, 1, None);
    let expected = logits(&mut mapped, &prompt, ANSWER);
    assert!(expected.iter().any(|row| row != &expected[0]));

    let io = [Io::Mapped, Io::Cached, Io::Direct];
    let mut seen = BTreeSet::new();
    for (index, slots) in [None, Some(12), Some(40), Some(80)].into_iter().enumerate() {
        // A full cache reads everything once, whichever way.
        for (turn, io) in io.into_iter().enumerate().skip(if slots.is_none() { 2 } else { 0 }) {
            let (look_ahead, threads) = ((turn + index) % 2 == 0, 1 + (turn / 2 + index) % 2);
            let alignment = if io == Io::Direct { reader::DIRECT_BLOCK } else { 1 };
            let options = Options {
                budget: slots.map(|slots| budget(model, slots, alignment)),
                io,
                look_ahead: look_ahead.then_some(2),
                verify: true,
                ..Options::default()
            };
            let (mut bounded, monitor) = engine(model, threads, Some((options, None)));
            let found = logits(&mut bounded, &prompt, ANSWER);
            let what = format!("{slots:?} slots, {}, look-ahead {look_ahead}, {threads} threads", io.name());
            let first = expected.iter().zip(&found).position(|(a, b)| a != b);
            assert_eq!(first, None, "{what}: token after which bits differ");
            let stats = monitor.unwrap().stats();
            if let Some(slots) = slots {
                assert!(model.expert_bytes() >= 4 * slots as u64 * (model.expert_bytes() / 320), "{what}");
                assert!(stats.misses > 0 && stats.loads > 2 * 320, "{what}: {stats:?}");
                assert_eq!(stats.predicted > 0, look_ahead, "{what}: {stats:?}");
            } else {
                assert_eq!(stats.loads, 320, "{what}: everything once");
            }
            seen.insert((slots, look_ahead, threads));
        }
    }
    assert_eq!(seen.len(), 10, "budgets meet look-ahead and threads: {seen:?}");
}

#[test]
fn layers_of_different_sizes_have_slots_of_different_sizes() {
    let synthetic = synthetic("classes", true);
    let model = &synthetic.model;
    let prompt = tokens(1_500);
    let (mut mapped, _) = engine(model, 2, None);
    let expected = logits(&mut mapped, &prompt, 8);
    let total = experts::Layout::new(model, None, 1).unwrap();
    // At 95 percent both classes hold a layer and a half; at a quarter the smaller one would not. What is lent counts.
    for (share, lent, uniform) in
        [(0.95, 0.0, false), (0.98, 0.03, false), (0.9, 0.65, true), (0.25, 0.0, true)]
    {
        let of = |share: f64| (total.bytes() as f64 * share) as u64;
        let (allowed, loan) = (of(share), Some(Loan { bytes: of(lent), rows: 512 }));
        let options = Options { budget: Some(allowed), loan, verify: true, ..Options::default() };
        let (mut bounded, monitor) = engine(model, 2, Some((options, None)));
        assert_eq!(logits(&mut bounded, &prompt, 8), expected);
        let monitor = monitor.unwrap();
        let (slots, bytes) = (monitor.layout().slots() as u64, monitor.layout().bytes());
        assert!(bytes <= allowed, "the budget holds");
        let (stays, smaller) = (bytes - monitor.layout().lent_bytes(), of(share) - of(lent));
        assert!(stays <= smaller && smaller - stays < total.bytes() / 160, "{stays} of {smaller} stay");
        assert_eq!(bytes.is_multiple_of(slots), uniform, "{slots} slots in {bytes} bytes");
        assert!(monitor.stats().loads > 320);
    }
}

/// Lets other threads go first, a different number of times for each read, so that loads overtake each other.
struct Disordered {
    inner: Box<dyn Reader>,
    count: AtomicU64,
}

impl Reader for Disordered {
    fn alignment(&self) -> usize {
        self.inner.alignment()
    }

    fn read(
        &self,
        shard: usize,
        offset: u64,
        buffers: &mut [IoSliceMut<'_>],
        needed: usize,
    ) -> io::Result<()> {
        let turn = self.count.fetch_add(1, Ordering::Relaxed).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56;
        // What a slot held before is gone well before the new bytes are there.
        buffers.iter_mut().for_each(|buffer| buffer.fill(0xff));
        (0..turn * turn / 2048).for_each(|_| std::thread::yield_now());
        self.inner.read(shard, offset, buffers, needed)
    }
}

#[test]
fn delayed_and_reordered_reads_change_no_bit() {
    let synthetic = synthetic("stress", false);
    let model = &synthetic.model;
    let prompt = tokens(700);
    let (mut mapped, _) = engine(model, 1, None);
    let expected = logits(&mut mapped, &prompt, 40);
    for (slots, readers) in [(12, 1), (12, 8), (13, 3), (70, 8)] {
        let inner = reader::open(model, Io::Cached).unwrap();
        let reader = Box::new(Disordered { inner, count: AtomicU64::new(slots as u64) });
        let options =
            Options { budget: Some(budget(model, slots, 1)), readers, verify: true, ..Options::default() };
        let (mut bounded, monitor) = engine(model, 2, Some((options, Some(reader))));
        // Several sessions through one store: what one left in slots is another's burden.
        for _ in 0..2 {
            assert_eq!(logits(&mut bounded, &prompt, 40), expected, "{slots} slots, {readers} readers");
        }
        let stats = monitor.unwrap().stats();
        assert!(stats.loads > 4 * 320, "evictions were forced: {stats:?}");
    }
}

#[test]
fn memory_lent_to_large_chunks_changes_no_bit() {
    let synthetic = synthetic("lent", false);
    let model = &synthetic.model;
    let (prompt, turn) = (tokens(1_500), tokens(700));
    // Reads a prompt and writes, reads a long turn and writes, then again from the start.
    let talk = |engine: &mut Engine| {
        let mut all = Vec::new();
        for _ in 0..2 {
            let mut session = engine.open();
            for (text, more) in [(&prompt[..], 12), (&turn[..], 6), (&turn[..40], 6)] {
                let mut request = Request::default();
                all.push(engine.ingest(&mut session, text, &mut request).unwrap().logits);
                all.extend((0..more).map(|token| engine.step(&mut session, token, &Cancel::new()).unwrap()));
            }
            engine.close(session);
        }
        all
    };
    let (mut mapped, _) = engine(model, 2, None);
    let expected = talk(&mut mapped);
    // Down to the floor while it is lent; nothing lent; all but the floor.
    for (slots, lent) in [(20, 8), (80, 30), (80, 68), (300, 200)] {
        let bytes = |slots| budget(model, slots, 1);
        let loan = Some(Loan { bytes: bytes(lent), rows: 512 });
        let options = Options { budget: Some(bytes(slots)), loan, verify: true, ..Options::default() };
        let (mut bounded, monitor) = engine(model, 2, Some((options, None)));
        assert!(talk(&mut bounded) == expected, "{slots} slots, {lent} of them lent");
        let monitor = monitor.unwrap();
        assert_eq!(monitor.layout().lent_bytes(), bytes(lent));
        // Twice in each talk: writing lies between the prompt and the turn.
        let stats = monitor.stats();
        assert_eq!((stats.loans, stats.repaid), (4, 4), "{slots} slots, {lent} of them lent");
    }
}

#[test]
fn a_prompt_given_up_returns_what_it_borrowed() {
    let synthetic = synthetic("given-up", false);
    let model = &synthetic.model;
    let loan = Some(Loan { bytes: budget(model, 30, 1), rows: 512 });
    let options = Options { budget: Some(budget(model, 80, 1)), loan, verify: true, ..Options::default() };
    let (mut bounded, monitor) = engine(model, 1, Some((options, None)));
    let (monitor, long) = (monitor.unwrap(), tokens(2_000));
    let mut session = bounded.open();
    let mut ingestion = Ingestion::new(&bounded, &session, &long, &Request::default()).unwrap();
    for _ in 0..40 {
        assert!(!ingestion.advance(&mut bounded, &mut session, &mut Request::default()).unwrap());
    }
    // Another session writes meanwhile: the memory stays lent.
    let mut other = bounded.open();
    bounded.step(&mut other, 3, &Cancel::new()).unwrap();
    assert_eq!((monitor.stats().loans, monitor.stats().repaid), (1, 0));
    ingestion.give_up(&mut bounded);
    bounded.step(&mut other, 4, &Cancel::new()).unwrap();
    assert_eq!((monitor.stats().loans, monitor.stats().repaid), (1, 1));
    let mut request = Request::default();
    request.cancel.cancel();
    assert!(bounded.ingest(&mut session, &long, &mut request).is_err());
    bounded.step(&mut other, 5, &Cancel::new()).unwrap();
    assert_eq!(monitor.stats().loans, monitor.stats().repaid);
}

#[test]
fn passes_that_take_turns_change_no_bit() {
    use model::{Driver, Pass, Quiet};
    let synthetic = synthetic("turns", false);
    let model = &synthetic.model;
    let prompt = tokens(512);
    let (mut mapped, _) = engine(model, 2, None);
    let expected = [logits(&mut mapped, &prompt, 0), logits(&mut mapped, &prompt[..3], 0)];

    let limits = model::Limits { pass_rows: 1024, positions: 2048, kv: model::KvType::F16 };
    let weights = Arc::new(model.load(&mut |_, _| ()).unwrap());
    let options = cpu::Options { threads: Some(2), ..cpu::Options::default() };
    let mut cpu = cpu::Cpu::new(model.clone(), weights, limits, options).unwrap();
    for slots in [12, 80] {
        let options = Options { budget: Some(budget(model, slots, 1)), verify: true, ..Options::default() };
        let mut store = experts::Store::new(model, &mut cpu, options).unwrap();
        let mut begin = |tokens: &[u32]| {
            let mut pass = Pass::new();
            let sequence = model::Backend::create(&mut cpu);
            pass.push(sequence, 0, tokens);
            pass.logits = vec![tokens.len() - 1];
            Driver::begin(&mut cpu, &model.spec, &pass).unwrap()
        };
        let mut drivers = [begin(&prompt), begin(&prompt[..3])];
        while drivers.iter().any(|driver| !driver.progress().is_done()) {
            for driver in &mut drivers {
                driver.advance(&mut cpu, &mut store, &mut Quiet).unwrap();
            }
        }
        for (driver, expected) in drivers.iter().zip(&expected) {
            let found = model::Backend::logits(&mut cpu, driver.pass()).unwrap();
            assert_eq!(found.row(0), expected[0], "{slots} slots");
            model::Backend::abort(&mut cpu, driver.pass());
        }
    }
}
