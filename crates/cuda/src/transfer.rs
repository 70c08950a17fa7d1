//! The GPU's queue of copies and the pinned memory they come from.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::sys::CUstream;
use cudarc::driver::{DriverError, result};

use crate::driver::{Buffer, Device, Event};
use crate::slots::{Lane, Lanes};

/// Memory of the host that the GPU copies from without help.
pub(crate) struct Pinned {
    start: *mut u8,
    len: usize,
    device: Arc<Device>,
}

// SAFETY: the memory belongs to this value; who may write which part is up to its owner.
unsafe impl Send for Pinned {}
// SAFETY: as above.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// `len` bytes, not initialised.
    pub(crate) fn new(device: &Arc<Device>, len: usize) -> Result<Pinned, DriverError> {
        // SAFETY: freed when dropped. Its bytes are numbers of any value.
        let start = unsafe { result::malloc_host(len.max(1), 0) }?;
        Ok(Pinned { start: start.cast(), len, device: device.clone() })
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let _ = self.device.bind();
        // SAFETY: allocated by us; no copy reads it, the queue has been waited for.
        let _ = unsafe { result::free_host(self.start.cast()) };
    }
}

/// A stream for copies, slots, and pinned memory.
pub(crate) struct GpuLanes {
    device: Arc<Device>,
    stream: CUstream,
    slots: Buffer,
    pinned: Pinned,
}

// SAFETY: handles of the driver may be used from any thread; the context is made current first.
unsafe impl Send for GpuLanes {}
// SAFETY: as above.
unsafe impl Sync for GpuLanes {}

impl GpuLanes {
    /// Slots of `bytes` bytes, filled from `pinned` bytes of the host.
    pub(crate) fn new(device: &Arc<Device>, bytes: usize, pinned: usize) -> Result<GpuLanes, DriverError> {
        device.bind()?;
        let slots = device.allocate(bytes)?;
        let pinned = Pinned::new(device, pinned)?;
        let stream = result::stream::create(result::stream::StreamKind::NonBlocking)?;
        Ok(GpuLanes { device: device.clone(), stream, slots, pinned })
    }

    /// Where the slots begin.
    pub(crate) fn at(&self) -> u64 {
        self.slots.at
    }

    fn stream(&self, lane: Lane) -> CUstream {
        match lane {
            Lane::Compute => self.device.stream,
            Lane::Copy => self.stream,
        }
    }

    fn run<T>(&self, work: impl FnOnce() -> Result<T, DriverError>) -> io::Result<T> {
        self.device.bind().and_then(|()| work()).map_err(io::Error::other)
    }
}

impl Drop for GpuLanes {
    fn drop(&mut self) {
        let _ = self.device.bind();
        // SAFETY: the stream is ours; nothing is enqueued on it any more. Copies read pinned memory until then.
        unsafe {
            let _ = result::stream::synchronize(self.stream);
            let _ = result::stream::destroy(self.stream);
        }
    }
}

impl Lanes for GpuLanes {
    type Mark = Event;

    fn pinned(&self) -> (*mut u8, usize) {
        (self.pinned.start, self.pinned.len)
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

    fn copy(&self, from: usize, to: Range<usize>) -> io::Result<()> {
        assert!(from + to.len() <= self.pinned.len && to.end <= self.slots.bytes, "inside of both memories");
        // SAFETY: inside pinned memory, which stays and which nobody writes before the copy has passed.
        let bytes = unsafe { std::slice::from_raw_parts(self.pinned.start.add(from), to.len()) };
        // SAFETY: the target lies in the slots; the source is pinned and stays.
        self.run(|| unsafe { result::memcpy_htod_async(self.slots.at + to.start as u64, bytes, self.stream) })
    }

    fn seconds(&self, from: &Event, to: &Event) -> f64 {
        self.run(|| from.until(to)).map_or(0.0, |ms| f64::from(ms) / 1e3)
    }

    fn download(&self, range: Range<usize>) -> io::Result<Vec<u8>> {
        let mut out = vec![0; range.len()];
        // SAFETY: the range lies in the slots; the wait keeps `out` in place until it is filled.
        self.run(|| unsafe {
            result::memcpy_dtoh_async(&mut out, self.slots.at + range.start as u64, self.stream)?;
            result::stream::synchronize(self.stream)
        })?;
        Ok(out)
    }
}
