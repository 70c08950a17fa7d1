//! Tables on their way to the GPU, in pinned memory: a copy from memory that is not would wait for everything before it.

use std::sync::Arc;

use cudarc::driver::DriverError;

use crate::driver::{Device, Event, Pinned};

type Done = Result<(), DriverError>;

/// Copies that may be on their way at once; one more waits for the first of them.
const MOST: usize = 4;

/// So few bytes the driver takes along with the command, wherever they are.
const SMALL: usize = 16 << 10;

/// Pinned memory for tables, in turn.
#[derive(Default)]
pub(crate) struct Uploads {
    /// Memory, and the end of the copy from it. The one used last is last.
    rooms: Vec<(Pinned, Event)>,
}

impl Uploads {
    /// Copies `bytes` to the GPU, after everything enqueued; they may be reused at once.
    pub(crate) fn put(&mut self, device: &Arc<Device>, bytes: &[u8], to: u64) -> Done {
        if bytes.len() <= SMALL {
            return device.upload(bytes, to);
        }
        let room = self.room(device, bytes.len())?;
        // SAFETY: nothing is copied from it any more, and nobody else has it.
        unsafe { room.fill(bytes) };
        device.upload(&room.as_slice()[..bytes.len()], to)?;
        self.rooms.push((room, Event::record(device)?));
        Ok(())
    }

    /// Memory of at least `bytes` bytes that no copy reads.
    fn room(&mut self, device: &Arc<Device>, bytes: usize) -> Result<Pinned, DriverError> {
        if self.rooms.len() >= MOST {
            let (room, copied) = self.rooms.remove(0);
            copied.wait()?;
            if room.bytes >= bytes {
                return Ok(room);
            }
        }
        device.pinned(bytes.next_power_of_two())
    }
}

impl Drop for Uploads {
    fn drop(&mut self) {
        for (_, copied) in &self.rooms {
            // Copies read the memory until then; nothing can be done about a failure here.
            let _ = copied.wait();
        }
    }
}
