//! How far the host may be ahead of the GPU.

use std::collections::VecDeque;

use cudarc::driver::DriverError;

use crate::driver::{Device, Event};

/// Ends of chunks that were enqueued.
#[derive(Default)]
pub(crate) struct Pace {
    ends: VecDeque<Event>,
}

impl Pace {
    /// A chunk has been enqueued, whose end is the end of what is enqueued on `device`: waits until at most `ahead` have
    /// not been computed.
    pub(crate) fn keep(&mut self, device: &Device, ahead: usize) -> Result<(), DriverError> {
        device.bind()?;
        self.ends.push_back(Event::record(device)?);
        while self.ends.len() > ahead {
            self.ends.pop_front().expect("not empty").wait()?;
        }
        Ok(())
    }

    /// Everything has been computed.
    pub(crate) fn clear(&mut self) {
        self.ends.clear();
    }
}
