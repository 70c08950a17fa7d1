//! Memory for expert slots: written by readers, read by backends.

use std::fmt;
use std::io::{self, IoSliceMut};
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use memmap2::MmapMut;

use crate::backend::Slot;
use crate::model::Model;
use crate::pages::{give_back, prefer_huge_pages};

/// What fills slots: buffers, one for each range asked for.
pub type Fill<'a> = dyn FnMut(&mut [IoSliceMut<'_>]) -> io::Result<()> + 'a;

/// What copies to a memory behind a link did so far.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CopyStats {
    /// Bytes copied.
    pub bytes: u64,
    /// Seconds that the link was busy with them.
    pub seconds: f64,
    /// Experts that a device with slots of its own found in them.
    pub found: u64,
    /// Experts that such a device fetched by itself.
    pub fetched: u64,
}

/// Some copies to a memory behind a link, made together, for a trace.
#[derive(Clone, Copy, Debug)]
pub struct CopySpan {
    /// When they began.
    pub start: Instant,
    /// When they were complete.
    pub end: Instant,
    /// Their bytes.
    pub bytes: u64,
}

/// An arena of slots in whatever memory a backend computes from.
///
/// A backend whose stages are enqueued orders a write behind every stage enqueued before it, and the stages
/// enqueued after it behind the write, so that whoever hands out slots needs no fences.
pub trait SlotMemory: Send + Sync + fmt::Debug {
    /// Bytes in the arena. Its start is aligned to a page.
    fn len(&self) -> usize;

    /// Whether there is no room at all.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Has `fill` write some ranges, which do not overlap. What they hold is unspecified if it fails.
    ///
    /// # Errors
    /// Those of `fill` and of the memory.
    ///
    /// # Safety
    /// Until this returns nobody else writes these ranges, and no wave names them: they belong to no expert
    /// between [`ExpertSource::wave`](crate::ExpertSource::wave) and
    /// [`ExpertSource::release`](crate::ExpertSource::release).
    unsafe fn write(&self, ranges: &[Range<usize>], fill: &mut Fill<'_>) -> io::Result<()>;

    /// As [`SlotMemory::write`], from bytes that lie in memory already. A device that can reach them may read them after
    /// this returns, for which it keeps them itself.
    ///
    /// # Errors
    /// As [`SlotMemory::write`].
    ///
    /// # Safety
    /// As [`SlotMemory::write`].
    ///
    /// # Panics
    /// If there are not as many bytes as ranges take.
    unsafe fn write_from(&self, ranges: &[Range<usize>], from: &[&[u8]]) -> io::Result<()> {
        let mut copy = |parts: &mut [IoSliceMut<'_>]| {
            parts.iter_mut().zip(from).for_each(|(part, from)| part.copy_from_slice(from));
            Ok(())
        };
        // SAFETY: the same promise.
        unsafe { self.write(ranges, &mut copy) }
    }

    /// What a range holds is not needed any more: the system may have its memory until it is written again (by default
    /// it does not get it).
    ///
    /// # Safety
    /// As [`SlotMemory::write`].
    unsafe fn give_back(&self, _range: Range<usize>) {}

    /// Has `see` read a range, for checks. False if this memory cannot be read by the host.
    fn inspect(&self, range: Range<usize>, see: &mut dyn FnMut(&[u8])) -> bool;

    /// What copies did so far, if this memory is behind a link (by default it is not).
    fn copies(&self) -> Option<CopyStats> {
        None
    }

    /// Keeps the times of copies from now on, for [`SlotMemory::copy_spans`].
    fn trace_copies(&self) {}

    /// The times of all copies since they were kept, that are complete.
    fn copy_spans(&self) -> Vec<CopySpan> {
        Vec::new()
    }
}

/// An arena in host memory, in huge pages where the system has them. Pages are taken as they are touched.
pub struct HostArena {
    start: *mut u8,
    len: usize,
    /// Owns the memory behind `start`.
    _map: MmapMut,
}

// SAFETY: the memory belongs to this value; who may write which part of it is the contract of `write`.
unsafe impl Send for HostArena {}
// SAFETY: as above.
unsafe impl Sync for HostArena {}

impl HostArena {
    /// An arena of `len` bytes.
    ///
    /// # Errors
    /// What the system says.
    pub fn new(len: usize) -> io::Result<HostArena> {
        let mut map = MmapMut::map_anon(len.max(1))?;
        // Slots are read in strides of whole rows.
        prefer_huge_pages(&map);
        Ok(HostArena { start: map.as_mut_ptr(), len, _map: map })
    }

    /// `len` bytes at `offset`; `None` if they do not lie inside.
    pub fn bytes(&self, offset: u64, len: usize) -> Option<&[u8]> {
        let offset = usize::try_from(offset).ok()?;
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.len);
        // SAFETY: inside the mapping, which lives as long as `self`; whoever writes has promised that no wave
        // names these bytes meanwhile.
        inside.then(|| unsafe { std::slice::from_raw_parts(self.start.add(offset), len) })
    }
}

impl fmt::Debug for HostArena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostArena").field("len", &self.len).finish_non_exhaustive()
    }
}

impl SlotMemory for HostArena {
    fn len(&self) -> usize {
        self.len
    }

    unsafe fn write(&self, ranges: &[Range<usize>], fill: &mut Fill<'_>) -> io::Result<()> {
        let mut sorted: Vec<&Range<usize>> = ranges.iter().collect();
        sorted.sort_by_key(|range| range.start);
        let apart = sorted.windows(2).all(|pair| pair[0].end <= pair[1].start);
        assert!(apart && sorted.iter().all(|r| r.start <= r.end && r.end <= self.len), "ranges of the arena");
        let buffer = |range: &Range<usize>| {
            // SAFETY: inside the mapping and apart from the other ranges; nobody else touches them, by the
            // caller's promise.
            IoSliceMut::new(unsafe {
                std::slice::from_raw_parts_mut(self.start.add(range.start), range.len())
            })
        };
        fill(&mut ranges.iter().map(buffer).collect::<Vec<_>>())
    }

    unsafe fn give_back(&self, range: Range<usize>) {
        assert!(range.start <= range.end && range.end <= self.len, "a range of the arena");
        // SAFETY: inside the mapping; nobody needs what it holds, by the caller's promise.
        unsafe { give_back(self.start.add(range.start), range.len()) };
    }

    fn inspect(&self, range: Range<usize>, see: &mut dyn FnMut(&[u8])) -> bool {
        let bytes = self.bytes(range.start as u64, range.len());
        bytes.map(see).is_some()
    }
}

/// The arenas of a backend that computes in host memory; arena [`Slot::FILE`] is the mapped file.
#[derive(Debug)]
pub struct HostSlots {
    model: Arc<Model>,
    arenas: Vec<Arc<HostArena>>,
}

impl HostSlots {
    /// The mapped file of `model` and no other arena.
    pub fn new(model: Arc<Model>) -> HostSlots {
        HostSlots { model, arenas: Vec::new() }
    }

    /// Another arena of `bytes` bytes, and its number.
    ///
    /// # Errors
    /// What the system says.
    pub fn add(&mut self, bytes: usize) -> io::Result<(u32, Arc<dyn SlotMemory>)> {
        let arena = Arc::new(HostArena::new(bytes)?);
        self.arenas.push(arena.clone());
        Ok((self.arenas.len() as u32, arena))
    }

    /// `len` bytes at `offset` of an arena; `None` if there is no such arena or they do not lie in it.
    ///
    /// # Panics
    /// If they do not lie in one shard of the mapped file.
    pub fn bytes(&self, arena: u32, offset: u64, len: usize) -> Option<&[u8]> {
        match arena {
            Slot::FILE => Some(self.model.file_bytes(offset, len)),
            other => self.arenas.get(other as usize - 1)?.bytes(offset, len),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_and_nothing_else_changes() {
        let arena = HostArena::new(10_000).unwrap();
        let mut fill = |parts: &mut [IoSliceMut<'_>]| {
            parts.iter_mut().zip(1..).for_each(|(part, value)| part.fill(value));
            Ok(())
        };
        // SAFETY: nobody reads meanwhile.
        unsafe { arena.write(&[500..600, 100..200], &mut fill).unwrap() };
        let sums = [(0, 100), (100, 100), (200, 300), (500, 100), (600, 9_400)];
        let found =
            sums.map(|(at, len)| arena.bytes(at, len).unwrap().iter().map(|&b| u32::from(b)).sum::<u32>());
        assert_eq!(found, [0, 200, 0, 100, 0]);
        assert!(arena.bytes(9_999, 2).is_none() && arena.bytes(u64::MAX, 1).is_none());
        assert!(arena.bytes(10_000, 0).is_some_and(<[u8]>::is_empty));
    }

    #[test]
    fn what_is_given_back_can_be_written_again_and_its_neighbours_stay() {
        const PAGE: usize = 64 << 10;
        let arena = HostArena::new(4 * PAGE).unwrap();
        let write = |range: Range<usize>, value: u8| {
            let mut fill = |parts: &mut [IoSliceMut<'_>]| {
                parts[0].fill(value);
                Ok(())
            };
            // SAFETY: nobody reads meanwhile.
            unsafe { arena.write(&[range], &mut fill).unwrap() };
        };
        write(0..4 * PAGE, 7);
        // SAFETY: as above.
        unsafe { arena.give_back(PAGE - 1..3 * PAGE + 1) };
        let all = |range: Range<usize>, value| {
            arena.bytes(range.start as u64, range.len()).unwrap().iter().all(|&byte| byte == value)
        };
        assert!(all(0..PAGE - 1, 7) && all(3 * PAGE + 1..4 * PAGE, 7));
        if cfg!(target_os = "linux") {
            assert!(all(PAGE..3 * PAGE, 0), "whole pages are gone");
        }
        write(PAGE..3 * PAGE, 9);
        assert!(all(PAGE..3 * PAGE, 9));
    }

    #[test]
    #[should_panic(expected = "ranges of the arena")]
    fn overlapping_ranges_are_refused() {
        let arena = HostArena::new(1_000).unwrap();
        // SAFETY: nobody reads meanwhile.
        let _ = unsafe { arena.write(&[0..10, 9..20], &mut |_| Ok(())) };
    }
}
