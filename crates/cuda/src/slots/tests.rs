//! The arena against a device that does what it may do at the worst time.

use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use model::SlotMemory;
use testkit::Random;

use super::{Arena, Lane, Lanes, Rows, rows};

enum Op {
    Mark(usize),
    Follow(usize),
    Copy(usize, Range<usize>),
    /// A wave: these ranges hold these bytes.
    Read(Vec<(Range<usize>, u8)>),
}

/// Which queue goes on when both could.
#[derive(Clone, Copy, Debug)]
enum Haste {
    Compute,
    Copy,
    Random,
}

struct State {
    memory: Vec<u8>,
    queues: [Vec<Op>; 2],
    done: [usize; 2],
    passed: Vec<bool>,
    haste: Haste,
    random: Random,
    reads: usize,
}

/// A device that only works while somebody waits for it, or when it is told to.
struct Fake {
    pinned: *mut u8,
    pinned_len: usize,
    /// Other memory it reaches.
    home: Vec<u8>,
    state: Mutex<State>,
}

// SAFETY: `pinned` belongs to this value; the tests write it as the arena allows, the device reads it under the lock.
unsafe impl Send for Fake {}
// SAFETY: as above.
unsafe impl Sync for Fake {}

impl Fake {
    fn new(memory: usize, pinned: usize, haste: Haste, seed: u64) -> Fake {
        let state = State {
            memory: vec![0; memory],
            queues: [Vec::new(), Vec::new()],
            done: [0; 2],
            passed: Vec::new(),
            haste,
            random: Random::new(seed, "device"),
            reads: 0,
        };
        let pinned_len = pinned;
        let pinned = Box::leak(vec![0u8; pinned].into_boxed_slice()).as_mut_ptr();
        let home = (0..SLOTS as u8).flat_map(|value| [value; SLOT]).collect();
        Fake { pinned, pinned_len, home, state: Mutex::new(state) }
    }

    fn push(&self, lane: Lane, op: Op) {
        self.state.lock().unwrap().queues[lane as usize].push(op);
    }

    /// Does up to `steps` steps; fewer if neither queue can go on.
    fn work(&self, steps: usize) -> bool {
        let mut state = self.state.lock().unwrap();
        (0..steps).all(|_| state.step())
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        // SAFETY: leaked by `new`; nothing refers to it any more.
        drop(unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(self.pinned, self.pinned_len)) });
    }
}

impl State {
    fn can(&self, lane: usize) -> bool {
        match self.queues[lane].get(self.done[lane]) {
            Some(Op::Follow(mark)) => self.passed[*mark],
            next => next.is_some(),
        }
    }

    fn step(&mut self) -> bool {
        let first = match self.haste {
            Haste::Compute => 0,
            Haste::Copy => 1,
            Haste::Random => self.random.bits() as usize % 2,
        };
        let Some(lane) = [first, 1 - first].into_iter().find(|&lane| self.can(lane)) else { return false };
        self.done[lane] += 1;
        match &self.queues[lane][self.done[lane] - 1] {
            Op::Mark(mark) => self.passed[*mark] = true,
            Op::Follow(_) => {}
            Op::Copy(from, to) => {
                // SAFETY: inside pinned memory; if somebody writes it meanwhile, that is what the test is to find.
                let bytes = unsafe { std::slice::from_raw_parts(*from as *const u8, to.len()) };
                self.memory[to.clone()].copy_from_slice(bytes);
            }
            Op::Read(expected) => {
                for (range, value) in expected {
                    let found = &self.memory[range.clone()];
                    let wrong = found.iter().position(|byte| byte != value);
                    assert_eq!(wrong, None, "byte of {range:?}, which should be {value} throughout");
                }
                self.reads += 1;
            }
        }
        true
    }
}

impl Lanes for Fake {
    type Mark = usize;

    fn reaches(&self, bytes: &[u8]) -> bool {
        self.home.as_ptr_range().contains(&bytes.as_ptr())
    }

    fn pinned(&self) -> (*mut u8, usize) {
        (self.pinned, self.pinned_len)
    }

    fn mark(&self, lane: Lane) -> io::Result<usize> {
        let mut state = self.state.lock().unwrap();
        let mark = state.passed.len();
        state.passed.push(false);
        state.queues[lane as usize].push(Op::Mark(mark));
        Ok(mark)
    }

    fn follow(&self, lane: Lane, mark: &usize) -> io::Result<()> {
        self.push(lane, Op::Follow(*mark));
        Ok(())
    }

    fn has_passed(&self, mark: &usize) -> io::Result<bool> {
        Ok(self.state.lock().unwrap().passed[*mark])
    }

    fn wait(&self, mark: &usize) -> io::Result<()> {
        while !self.has_passed(mark)? {
            assert!(self.work(1), "both queues wait for each other");
        }
        Ok(())
    }

    fn copy(&self, rows: &Rows) -> io::Result<()> {
        for row in 0..rows.count {
            let to = rows.to + row * rows.to_stride;
            self.push(Lane::Copy, Op::Copy(rows.from + row * rows.from_stride, to..to + rows.len));
        }
        Ok(())
    }

    fn seconds(&self, from: &usize, to: &usize) -> f64 {
        (to - from) as f64
    }

    fn download(&self, range: Range<usize>) -> io::Result<Vec<u8>> {
        let mark = self.mark(Lane::Copy)?;
        self.wait(&mark)?;
        Ok(self.state.lock().unwrap().memory[range].to_vec())
    }
}

const SLOT: usize = 5_000; // no multiple of what the books count in
const SLOTS: usize = 13;
const PINNED: usize = 7 * 8_192;

fn slot(index: usize) -> Range<usize> {
    index * SLOT..(index + 1) * SLOT
}

fn write(arena: &Arena<Fake>, ranges: &[Range<usize>], value: u8) {
    let mut fill = |parts: &mut [io::IoSliceMut<'_>]| {
        parts.iter_mut().for_each(|part| part.fill(value));
        Ok(())
    };
    // SAFETY: the tests write no slot that a wave names.
    unsafe { arena.write(ranges, &mut fill) }.unwrap();
}

/// A wave over some slots that hold some values.
fn read(arena: &Arena<Fake>, held: &[(Range<usize>, u8)]) {
    let ranges: Vec<Range<usize>> = held.iter().map(|(range, _)| range.clone()).collect();
    arena.before_wave(&ranges).unwrap();
    arena.lanes().push(Lane::Compute, Op::Read(held.to_vec()));
    arena.after_wave(&ranges).unwrap();
}

#[test]
fn waves_read_what_was_written_whichever_queue_is_late() {
    for haste in [Haste::Compute, Haste::Copy, Haste::Random] {
        for seed in 0..40 {
            let mut random = Random::new(seed, "script");
            let mut below = |most: usize| random.bits() as usize % most;
            let arena = Arena::new(Fake::new(SLOTS * SLOT, PINNED, haste, seed), SLOTS * SLOT);
            let mut values = [0u8; SLOTS];
            for value in 1..=200 {
                let count = 1 + below(3);
                let first = below(SLOTS - count);
                let chosen: Vec<usize> = (first..first + count).collect();
                if below(2) == 0 {
                    let ranges: Vec<_> = chosen.iter().map(|&index| slot(index)).collect();
                    write(&arena, &ranges, value);
                    chosen.iter().for_each(|&index| values[index] = value);
                } else {
                    let held: Vec<_> = chosen.iter().map(|&index| (slot(index), values[index])).collect();
                    read(&arena, &held);
                }
                if below(4) == 0 {
                    arena.lanes().work(below(6));
                }
            }
            while arena.lanes().work(1) {}
            let state = arena.lanes().state.lock().unwrap();
            assert_eq!(state.done, [state.queues[0].len(), state.queues[1].len()], "everything is done");
            assert!(state.reads > 50);
        }
    }
}

#[test]
fn neighbours_are_copied_together() {
    let rows = |starts: &[usize], len: usize| {
        let parts: Vec<_> = (0..).step_by(100).zip(starts.iter().map(|&at| at..at + len)).collect();
        rows(&parts).iter().map(|rows| (rows.to, rows.count, rows.to_stride)).collect::<Vec<_>>()
    };
    assert_eq!(rows(&[10, 40, 70, 100], 20), [(10, 4, 30)]);
    assert_eq!(rows(&[10, 40, 90, 140, 200], 20), [(10, 2, 30), (90, 2, 50), (200, 1, 20)]);
    assert_eq!(rows(&[10], 20), [(10, 1, 20)]);
    assert_eq!(rows(&[], 20), []);
}

#[test]
fn bytes_within_reach_are_copied_from_where_they_are() {
    let arena = Arena::new(Fake::new(SLOTS * SLOT, PINNED, Haste::Random, 3), SLOTS * SLOT);
    let own = vec![77; SLOT];
    let (targets, sources): (Vec<_>, Vec<_>) =
        [9, 4, 5, 6, 2].map(|index| (slot(index), &arena.lanes().home[slot(index - 1)])).into_iter().unzip();
    // SAFETY: no wave names these slots.
    unsafe {
        arena.write_from(&targets, &sources).unwrap();
        arena.write_from(&[slot(0)], &[&own]).unwrap();
    }
    read(&arena, &[(slot(9), 8), (slot(4), 3), (slot(5), 4), (slot(6), 5), (slot(2), 1), (slot(0), 77)]);
    while arena.lanes().work(1) {}
    assert_eq!(arena.lanes().state.lock().unwrap().reads, 1);
}

#[test]
fn what_fails_to_be_filled_is_not_copied_and_leaves_its_room() {
    let arena = Arena::new(Fake::new(SLOTS * SLOT, PINNED, Haste::Random, 1), SLOTS * SLOT);
    write(&arena, &[slot(3)], 7);
    for _ in 0..20 {
        let mut fail = |parts: &mut [io::IoSliceMut<'_>]| {
            parts[0].fill(9);
            Err(io::Error::other("no more bytes"))
        };
        // SAFETY: no wave names the slot.
        unsafe { arena.write(&[slot(3)], &mut fail) }.unwrap_err();
    }
    let mut seen = Vec::new();
    assert!(arena.inspect(slot(3), &mut |bytes| seen = bytes.to_vec()));
    assert_eq!(seen, [7; SLOT]);
    assert_eq!(arena.copies().unwrap().bytes, SLOT as u64);
    // SAFETY: as above.
    let large = unsafe { arena.write(&vec![slot(0); 8], &mut |_| Ok(())) };
    assert!(large.unwrap_err().to_string().contains("at once"), "more than there is of pinned memory");
}

#[test]
fn several_threads_fill_while_one_computes() {
    const ROUNDS: u8 = 60;
    let fake = Fake::new(SLOTS * SLOT, PINNED, Haste::Random, 5);
    let arena = Arc::new(Arena::new(fake, SLOTS * SLOT));
    for value in 1..=ROUNDS {
        std::thread::scope(|scope| {
            for part in 0..4 {
                let arena = arena.clone();
                scope.spawn(move || {
                    for index in (part..SLOTS).step_by(4) {
                        write(&arena, &[slot(index)], value);
                    }
                });
            }
        });
        let held: Vec<_> = (0..SLOTS).map(|index| (slot(index), value)).collect();
        held.chunks(5).for_each(|held| read(&arena, held));
    }
    while arena.lanes().work(1) {}
    assert_eq!(arena.lanes().state.lock().unwrap().reads, usize::from(ROUNDS) * SLOTS.div_ceil(5));
    assert_eq!(arena.copies().unwrap().bytes, (usize::from(ROUNDS) * SLOTS * SLOT) as u64);
}

#[test]
fn times_are_kept_from_when_they_are_asked_for() {
    let arena = Arena::new(Fake::new(SLOTS * SLOT, PINNED, Haste::Copy, 2), SLOTS * SLOT);
    write(&arena, &[slot(0)], 1);
    while arena.lanes().work(1) {}
    assert!(arena.copy_spans().is_empty());
    arena.trace_copies();
    write(&arena, &[slot(1), slot(2)], 2);
    assert!(arena.copy_spans().is_empty(), "not done yet");
    while arena.lanes().work(1) {}
    let spans = arena.copy_spans();
    assert_eq!(spans.iter().map(|span| span.bytes).collect::<Vec<_>>(), [2 * SLOT as u64]);
    assert!(spans[0].start < spans[0].end);
}
