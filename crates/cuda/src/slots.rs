//! Expert slots in a device's memory, filled over a queue of copies of their own.
//!
//! A device has two queues: one computes, one copies, each in order, neither waiting for the other unless told so. Whoever
//! fills slots writes to pinned memory of the host and enqueues copies from there; nobody waits on the host for them.
//! What keeps bytes right are points in the queues: a copy goes behind the last wave that reads its slot, a wave behind
//! the last copy into any of its slots, and pinned memory is reused behind the copy that reads it.

mod ring;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::fmt;
use std::io::{self, IoSliceMut};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use model::{CopySpan, CopyStats, Fill, SlotMemory};

use ring::Ring;

/// One of a device's queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lane {
    Compute,
    Copy,
}

/// A device with two queues and an arena of slots. Called by several threads at once.
pub(crate) trait Lanes: Send + Sync + 'static {
    /// A point in a queue.
    type Mark: Send + Sync;

    /// Whether copies can come straight from these bytes, which stay as long as this device.
    fn reaches(&self, _bytes: &[u8]) -> bool {
        false
    }

    /// The pinned memory of the host that other copies come from.
    fn pinned(&self) -> (*mut u8, usize);

    /// A point behind everything enqueued so far.
    fn mark(&self, lane: Lane) -> io::Result<Self::Mark>;

    /// What is enqueued from now on begins when `mark` has passed.
    fn follow(&self, lane: Lane, mark: &Self::Mark) -> io::Result<()>;

    /// Whether the device has come past a point.
    fn has_passed(&self, mark: &Self::Mark) -> io::Result<bool>;

    /// Waits on the host.
    fn wait(&self, mark: &Self::Mark) -> io::Result<()>;

    /// Enqueues a copy from pinned memory to the arena.
    fn copy(&self, rows: &Rows) -> io::Result<()>;

    /// Seconds of the device between two points that have passed.
    fn seconds(&self, from: &Self::Mark, to: &Self::Mark) -> f64;

    /// Experts that the device found in slots of its own, and that it fetched by itself; 0 if it has none.
    fn fetched(&self) -> io::Result<[u64; 2]> {
        Ok([0; 2])
    }

    /// The bytes of a range when everything enqueued for copying is done. Waits.
    fn download(&self, range: Range<usize>) -> io::Result<Vec<u8>>;
}

/// Rows of equal length, equally far apart in pinned memory and in the arena.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Rows {
    /// Where the first one begins: its address in pinned memory, its place in the arena.
    pub(crate) from: usize,
    pub(crate) to: usize,
    /// Bytes of each.
    pub(crate) len: usize,
    /// Bytes from one to the next.
    pub(crate) from_stride: usize,
    pub(crate) to_stride: usize,
    pub(crate) count: usize,
}

/// Rows that are copied together begin at most so many bytes after each other; drivers have limits.
const FARTHEST: usize = 1 << 30;

/// Puts parts, by ascending place in the arena, together into as few copies as possible: a copy costs a link as much
/// time as 100 KB.
fn rows(parts: &[(usize, Range<usize>)]) -> Vec<Rows> {
    let mut rows: Vec<Rows> = Vec::new();
    for (from, to) in parts {
        if let Some(last) = rows.last_mut()
            && last.len == to.len()
            && *from > last.from
        {
            let strides = (from - last.from, to.start - last.to);
            if last.count == 1 && strides.1 <= FARTHEST {
                (last.from_stride, last.to_stride) = strides;
            }
            if strides == (last.count * last.from_stride, last.count * last.to_stride) {
                last.count += 1;
                continue;
            }
        }
        let (len, stride) = (to.len(), to.len());
        rows.push(Rows { from: *from, to: to.start, len, from_stride: stride, to_stride: stride, count: 1 });
    }
    rows
}

/// The order of ranges in the arena.
fn ascending(ranges: &[Range<usize>]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..ranges.len()).collect();
    order.sort_unstable_by_key(|&index| ranges[index].start);
    order
}

/// Points of a queue, numbered from 1 on; those that have passed are forgotten.
struct Points<M> {
    last: u64,
    kept: VecDeque<(u64, Arc<M>)>,
}

impl<M> Points<M> {
    fn new() -> Points<M> {
        Points { last: 0, kept: VecDeque::new() }
    }

    fn push(&mut self, mark: Arc<M>) -> u64 {
        self.last += 1;
        self.kept.push_back((self.last, mark));
        self.last
    }

    /// Point `number`; `None` if it has passed.
    fn find(&self, number: u64) -> Option<&Arc<M>> {
        let first = self.kept.front()?.0;
        self.kept.get(number.checked_sub(first)? as usize).map(|(_, mark)| mark)
    }

    /// Forgets what has passed.
    fn forget<L: Lanes<Mark = M>>(&mut self, lanes: &L) -> io::Result<()> {
        while let Some((_, mark)) = self.kept.front() {
            if !lanes.has_passed(mark)? {
                break;
            }
            self.kept.pop_front();
        }
        Ok(())
    }
}

/// A copy whose time is not known yet.
struct Timed<M> {
    start: M,
    end: Arc<M>,
    bytes: u64,
}

/// Who touched which part of the arena last.
struct Books<M> {
    /// Number of the last copy into each granule, and of the last wave that reads it.
    copied: Vec<u64>,
    read: Vec<u64>,
    copies: Points<M>,
    waves: Points<M>,
    /// Computation is behind this copy already.
    followed: u64,
    timed: VecDeque<Timed<M>>,
    stats: CopyStats,
    /// Where the device's clock is compared with the host's, and the copies since, if they are kept.
    base: Option<(M, Instant)>,
    spans: Vec<CopySpan>,
}

/// An arena of slots in a device's memory.
pub(crate) struct Arena<L: Lanes> {
    lanes: L,
    len: usize,
    /// Bytes that share their places in the books.
    granule: usize,
    books: Mutex<Books<L::Mark>>,
    ring: Ring<L::Mark>,
}

/// Places in the books: fine enough for slots, few enough to walk over.
const GRANULES: usize = 1 << 16;

/// Copies that are kept before anybody asks which are done.
const KEPT: usize = 64;

/// Buffers of a direct read begin at multiples of this.
const ALIGN: usize = 4096;

impl<L: Lanes> Arena<L> {
    /// The books of an arena of `len` bytes.
    pub(crate) fn new(lanes: L, len: usize) -> Arena<L> {
        let granule = (len / GRANULES).next_multiple_of(ALIGN).max(ALIGN);
        let count = len.div_ceil(granule);
        let books = Mutex::new(Books {
            copied: vec![0; count],
            read: vec![0; count],
            copies: Points::new(),
            waves: Points::new(),
            followed: 0,
            timed: VecDeque::new(),
            stats: CopyStats::default(),
            base: None,
            spans: Vec::new(),
        });
        let ring = Ring::new(lanes.pinned().1);
        Arena { lanes, len, granule, books, ring }
    }

    pub(crate) fn lanes(&self) -> &L {
        &self.lanes
    }

    fn books(&self) -> MutexGuard<'_, Books<L::Mark>> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn granules(&self, range: &Range<usize>) -> Range<usize> {
        range.start / self.granule..range.end.div_ceil(self.granule)
    }

    /// Whether a range lies in the arena.
    pub(crate) fn holds(&self, range: &Range<usize>) -> bool {
        range.start <= range.end && range.end <= self.len
    }

    /// Puts computation behind the copies into `ranges`, which a wave is about to read.
    pub(crate) fn before_wave(&self, ranges: &[Range<usize>]) -> io::Result<()> {
        let mut books = self.books();
        let granules = ranges.iter().flat_map(|range| self.granules(range));
        let newest = granules.map(|granule| books.copied[granule]).max().unwrap_or(0);
        if newest <= books.followed {
            return Ok(());
        }
        if let Some(mark) = books.copies.find(newest) {
            self.lanes.follow(Lane::Compute, mark)?;
        }
        books.followed = newest;
        Ok(())
    }

    /// Notes that a wave, enqueued just now, reads `ranges`.
    pub(crate) fn after_wave(&self, ranges: &[Range<usize>]) -> io::Result<()> {
        let mut books = self.books();
        books.waves.forget(&self.lanes)?;
        let number = books.waves.push(Arc::new(self.lanes.mark(Lane::Compute)?));
        for granule in ranges.iter().flat_map(|range| self.granules(range)) {
            books.read[granule] = number;
        }
        Ok(())
    }

    /// Enqueues the copies of ascending ranges whose bytes lie in pinned memory, each at its address.
    fn enqueue(&self, parts: &[(usize, Range<usize>)]) -> io::Result<Arc<L::Mark>> {
        let mut books = self.books();
        let granules = || parts.iter().flat_map(|(_, range)| self.granules(range));
        let readers = granules().map(|granule| books.read[granule]).max().unwrap_or(0);
        if let Some(mark) = books.waves.find(readers) {
            self.lanes.follow(Lane::Copy, mark)?;
        }
        let start = self.lanes.mark(Lane::Copy)?;
        for rows in rows(parts) {
            self.lanes.copy(&rows)?;
        }
        let end = Arc::new(self.lanes.mark(Lane::Copy)?);
        if books.timed.len() >= KEPT {
            books.copies.forget(&self.lanes)?;
            books.count(&self.lanes)?;
        }
        let number = books.copies.push(end.clone());
        granules().for_each(|granule| books.copied[granule] = number);
        let bytes = parts.iter().map(|(_, range)| range.len() as u64).sum();
        books.timed.push_back(Timed { start, end: end.clone(), bytes });
        Ok(end)
    }
}

impl<M> Books<M> {
    /// Adds up the times of copies that are done.
    fn count<L: Lanes<Mark = M>>(&mut self, lanes: &L) -> io::Result<()> {
        while let Some(timed) = self.timed.front() {
            if !lanes.has_passed(&timed.end)? {
                break;
            }
            self.stats.seconds += lanes.seconds(&timed.start, &timed.end);
            self.stats.bytes += timed.bytes;
            if let Some((base, at)) = &self.base {
                let time = |mark| *at + Duration::from_secs_f64(lanes.seconds(base, mark).max(0.0));
                let (start, end) = (time(&timed.start), time(&timed.end));
                self.spans.push(CopySpan { start, end, bytes: timed.bytes });
            }
            self.timed.pop_front();
        }
        Ok(())
    }
}

impl<L: Lanes> fmt::Debug for Arena<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Arena").field("len", &self.len).finish_non_exhaustive()
    }
}

impl<L: Lanes> SlotMemory for Arena<L> {
    fn len(&self) -> usize {
        self.len
    }

    unsafe fn write(&self, ranges: &[Range<usize>], fill: &mut Fill<'_>) -> io::Result<()> {
        assert!(ranges.iter().all(|range| self.holds(range)), "ranges of the arena");
        let sizes = ranges.iter().map(|range| range.len().next_multiple_of(ALIGN));
        let room = self.ring.take(&self.lanes, sizes.sum())?;
        // In pinned memory they lie in the order of the arena, so that neighbours there are copied together.
        let (order, pinned) = (ascending(ranges), self.lanes.pinned().0);
        let (mut at, mut places) = (room.start(), vec![0; ranges.len()]);
        for &index in &order {
            places[index] = at;
            at += ranges[index].len().next_multiple_of(ALIGN);
        }
        let buffer = |(from, range): (&usize, &Range<usize>)| {
            // SAFETY: inside the room just taken, which is nobody else's, apart from the other parts; no copy reads
            // it any more.
            IoSliceMut::new(unsafe { std::slice::from_raw_parts_mut(pinned.add(*from), range.len()) })
        };
        fill(&mut places.iter().zip(ranges).map(buffer).collect::<Vec<_>>())?;
        let part = |&index: &usize| (pinned as usize + places[index], ranges[index].clone());
        let parts: Vec<_> = order.iter().map(part).collect();
        room.read_by(self.enqueue(&parts)?);
        Ok(())
    }

    unsafe fn write_from(&self, ranges: &[Range<usize>], from: &[&[u8]]) -> io::Result<()> {
        let same =
            ranges.len() == from.len() && ranges.iter().zip(from).all(|(to, from)| to.len() == from.len());
        assert!(
            same && ranges.iter().all(|range| self.holds(range)),
            "ranges of the arena, and bytes for them"
        );
        if !from.iter().all(|bytes| self.lanes.reaches(bytes)) {
            let mut copy = |parts: &mut [IoSliceMut<'_>]| {
                parts.iter_mut().zip(from).for_each(|(part, from)| part.copy_from_slice(from));
                Ok(())
            };
            // SAFETY: the same promise.
            return unsafe { self.write(ranges, &mut copy) };
        }
        let part = |&index: &usize| (from[index].as_ptr() as usize, ranges[index].clone());
        self.enqueue(&ascending(ranges).iter().map(part).collect::<Vec<_>>()).map(drop)
    }

    fn inspect(&self, range: Range<usize>, see: &mut dyn FnMut(&[u8])) -> bool {
        self.holds(&range) && self.lanes.download(range).map(|bytes| see(&bytes)).is_ok()
    }

    fn copies(&self) -> Option<CopyStats> {
        // What cannot be asked for now is counted later.
        let [found, fetched] = self.lanes.fetched().unwrap_or_default();
        let mut books = self.books();
        let _ = books.count(&self.lanes);
        Some(CopyStats { found, fetched, ..books.stats })
    }

    fn trace_copies(&self) {
        let mut books = self.books();
        let mark = self.lanes.mark(Lane::Copy).and_then(|mark| self.lanes.wait(&mark).map(|()| mark));
        books.base = mark.ok().map(|mark| (mark, Instant::now()));
    }

    fn copy_spans(&self) -> Vec<CopySpan> {
        let mut books = self.books();
        let _ = books.count(&self.lanes);
        books.spans.clone()
    }
}
