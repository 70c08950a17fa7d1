//! Pinned memory, handed out in turn.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::Lanes;

/// What becomes of a part of the ring.
enum Use<M> {
    /// Somebody writes to it.
    Written,
    /// A copy reads it, up to this point.
    Read(Arc<M>),
    /// Nobody needs it.
    Done,
}

struct Part<M> {
    number: u64,
    start: usize,
    end: usize,
    state: Use<M>,
}

struct Parts<M> {
    /// The oldest first. Each begins where the one before ends, or at 0.
    parts: VecDeque<Part<M>>,
    next: u64,
}

/// A ring of `len` bytes.
pub(super) struct Ring<M> {
    len: usize,
    parts: Mutex<Parts<M>>,
    /// A part is done, or read by a copy from now on.
    changed: Condvar,
}

/// A part of the ring that is being written; done when dropped.
pub(super) struct Room<'a, M> {
    ring: &'a Ring<M>,
    number: u64,
    start: usize,
}

impl<M> Ring<M> {
    pub(super) fn new(len: usize) -> Ring<M> {
        Ring { len, parts: Mutex::new(Parts { parts: VecDeque::new(), next: 0 }), changed: Condvar::new() }
    }

    fn parts(&self) -> MutexGuard<'_, Parts<M>> {
        self.parts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `bytes` bytes that nobody uses. Waits for copies, and for others to write what they took.
    pub(super) fn take<L: Lanes<Mark = M>>(&self, lanes: &L, bytes: usize) -> io::Result<Room<'_, M>> {
        if bytes > self.len {
            let message = format!("{bytes} bytes at once, more than the {} of pinned memory", self.len);
            return Err(io::Error::other(message));
        }
        let mut parts = self.parts();
        loop {
            let mut gap = parts.gap(self.len, bytes);
            if gap.is_none() {
                parts.drop_passed(lanes)?;
                gap = parts.gap(self.len, bytes);
            }
            if let Some(start) = gap {
                let number = parts.next;
                parts.next += 1;
                parts.parts.push_back(Part { number, start, end: start + bytes, state: Use::Written });
                return Ok(Room { ring: self, number, start });
            }
            let oldest = match parts.parts.front() {
                Some(Part { state: Use::Read(mark), .. }) => Some(mark.clone()),
                _ => None,
            };
            parts = match oldest {
                Some(mark) => {
                    drop(parts);
                    lanes.wait(&mark)?;
                    self.parts()
                }
                None => self.changed.wait(parts).unwrap_or_else(PoisonError::into_inner),
            };
        }
    }

    fn settle(&self, number: u64, state: Use<M>) {
        let mut parts = self.parts();
        let first = parts.parts.front().map_or(0, |part| part.number);
        let index = number.checked_sub(first).map(|index| index as usize);
        if let Some(part) = index.and_then(|index| parts.parts.get_mut(index))
            && matches!(part.state, Use::Written)
        {
            part.state = state;
        }
        self.changed.notify_all();
    }
}

impl<M> Parts<M> {
    fn drop_passed<L: Lanes<Mark = M>>(&mut self, lanes: &L) -> io::Result<()> {
        while let Some(part) = self.parts.front() {
            let free = match &part.state {
                Use::Written => false,
                Use::Read(mark) => lanes.has_passed(mark)?,
                Use::Done => true,
            };
            if !free {
                break;
            }
            self.parts.pop_front();
        }
        Ok(())
    }

    /// Where `bytes` bytes fit between the youngest part and the oldest.
    fn gap(&self, len: usize, bytes: usize) -> Option<usize> {
        let (Some(oldest), Some(youngest)) = (self.parts.front(), self.parts.back()) else { return Some(0) };
        let (start, end) = (oldest.start, youngest.end);
        if youngest.start >= start {
            // From the youngest to the end of the ring, or before the oldest.
            if end + bytes <= len { Some(end) } else { (bytes <= start).then_some(0) }
        } else {
            (end + bytes <= start).then_some(end)
        }
    }
}

impl<M> Room<'_, M> {
    /// Where it begins.
    pub(super) fn start(&self) -> usize {
        self.start
    }

    /// A copy reads it, up to `mark`.
    pub(super) fn read_by(self, mark: Arc<M>) {
        self.ring.settle(self.number, Use::Read(mark));
    }
}

impl<M> Drop for Room<'_, M> {
    fn drop(&mut self) {
        // Nothing if a copy reads it by now.
        self.ring.settle(self.number, Use::Done);
    }
}
