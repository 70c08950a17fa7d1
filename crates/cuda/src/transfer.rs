//! The GPU's queue of copies and the pinned memory they come from.

use std::ffi::c_void;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::sys::{CUDA_MEMCPY2D, CUmemorytype, CUstream, cuMemcpy2DAsync_v2};
use cudarc::driver::{DriverError, result};

use crate::driver::{Buffer, Device, Event, Pinned, Queue};
use crate::fetch::{PinnedExperts, Sums};
use crate::slots::{Lane, Lanes, Rows};

/// A queue of copies, slots, and pinned memory.
pub(crate) struct GpuLanes {
    /// Dropped before the memory it uses.
    copies: Queue,
    device: Arc<Device>,
    slots: Buffer,
    pinned: Pinned,
    sums: Option<Sums>,
    /// Pinned memory beside, that copies may come from.
    home: Option<Arc<PinnedExperts>>,
}

// SAFETY: handles of the driver may be used from any thread; the context is made current first.
unsafe impl Send for GpuLanes {}
// SAFETY: as above.
unsafe impl Sync for GpuLanes {}

impl GpuLanes {
    /// Slots of `bytes` bytes, filled from `pinned` bytes of the host, or from `home`; `sums` are told beside what is copied.
    pub(crate) fn new(
        device: &Arc<Device>,
        bytes: usize,
        pinned: usize,
        (sums, home): (Option<Sums>, Option<Arc<PinnedExperts>>),
    ) -> Result<GpuLanes, DriverError> {
        device.bind()?;
        let slots = device.allocate(bytes)?;
        let pinned = device.pinned(pinned)?;
        let copies = Queue::new(device)?;
        Ok(GpuLanes { copies, device: device.clone(), slots, pinned, sums, home })
    }

    /// Where the slots begin.
    pub(crate) fn at(&self) -> u64 {
        self.slots.at
    }

    fn stream(&self, lane: Lane) -> CUstream {
        match lane {
            Lane::Compute => self.device.stream,
            Lane::Copy => self.copies.stream,
        }
    }

    fn run<T>(&self, work: impl FnOnce() -> Result<T, DriverError>) -> io::Result<T> {
        self.device.bind().and_then(|()| work()).map_err(io::Error::other)
    }
}

impl Lanes for GpuLanes {
    type Mark = Event;

    fn reaches(&self, bytes: &[u8]) -> bool {
        let start = bytes.as_ptr() as usize;
        self.home.as_ref().is_some_and(|home| home.holds(start..start + bytes.len()))
    }

    fn pinned(&self) -> (*mut u8, usize) {
        (self.pinned.host(), self.pinned.bytes)
    }

    fn mark(&self, lane: Lane) -> io::Result<Event> {
        self.run(|| Event::record_on(self.stream(lane)))
    }

    fn follow(&self, lane: Lane, mark: &Event) -> io::Result<()> {
        self.run(|| mark.hold(self.stream(lane)))
    }

    fn has_passed(&self, mark: &Event) -> io::Result<bool> {
        self.run(|| mark.has_passed())
    }

    fn wait(&self, mark: &Event) -> io::Result<()> {
        self.run(|| mark.wait())
    }

    fn copy(&self, rows: &Rows) -> io::Result<()> {
        let end = |start: usize, stride: usize| start + (rows.count - 1) * stride + rows.len;
        let (first, last) = (rows.from, end(rows.from, rows.from_stride));
        let ring = self.pinned.host() as usize;
        let in_ring = first >= ring && last <= ring + self.pinned.bytes;
        let at_home = || self.home.as_ref().is_some_and(|home| home.holds(first..last));
        let inside = end(rows.to, rows.to_stride) <= self.slots.bytes && (in_ring || at_home());
        assert!(inside && rows.len <= rows.from_stride.min(rows.to_stride), "inside of both memories");
        let copy = CUDA_MEMCPY2D {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: CUmemorytype::CU_MEMORYTYPE_HOST,
            srcHost: rows.from as *const c_void,
            srcDevice: 0,
            srcArray: std::ptr::null_mut(),
            srcPitch: rows.from_stride,
            dstXInBytes: 0,
            dstY: 0,
            dstMemoryType: CUmemorytype::CU_MEMORYTYPE_DEVICE,
            dstHost: std::ptr::null_mut(),
            dstDevice: self.slots.at + rows.to as u64,
            dstArray: std::ptr::null_mut(),
            dstPitch: rows.to_stride,
            WidthInBytes: rows.len,
            Height: rows.count,
        };
        // SAFETY: the rows lie in the slots and in pinned memory, which nobody writes before the copy has passed.
        self.run(|| unsafe { cuMemcpy2DAsync_v2(&copy, self.copies.stream) }.result())
    }

    fn seconds(&self, from: &Event, to: &Event) -> f64 {
        self.run(|| from.until(to)).map_or(0.0, |ms| f64::from(ms) / 1e3)
    }

    fn fetched(&self) -> io::Result<[u64; 2]> {
        self.sums.as_ref().map_or(Ok([0; 2]), |sums| self.run(|| sums.read()))
    }

    fn download(&self, range: Range<usize>) -> io::Result<Vec<u8>> {
        let mut out = vec![0; range.len()];
        // SAFETY: the range lies in the slots; the wait keeps `out` in place until it is filled.
        self.run(|| unsafe {
            result::memcpy_dtoh_async(&mut out, self.slots.at + range.start as u64, self.copies.stream)?;
            result::stream::synchronize(self.copies.stream)
        })?;
        Ok(out)
    }
}
