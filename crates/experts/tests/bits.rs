//! The bits of a result do not depend on how experts are loaded.

mod common;

use std::collections::BTreeSet;
use std::io::{self, IoSliceMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use common::{budget, engine, logits, synthetic, tokens};
use experts::{Io, Options, Reader, reader};

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
    // At eight tenths both classes hold a layer and a half; at a quarter the smaller one would not.
    for (share, uniform) in [(0.8, false), (0.25, true)] {
        let allowed = (total.bytes() as f64 * share) as u64;
        let options = Options { budget: Some(allowed), verify: true, ..Options::default() };
        let (mut bounded, monitor) = engine(model, 2, Some((options, None)));
        assert_eq!(logits(&mut bounded, &prompt, 8), expected);
        let monitor = monitor.unwrap();
        let (slots, bytes) = (monitor.layout().slots() as u64, monitor.layout().bytes());
        assert!(bytes <= allowed, "the budget holds");
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
