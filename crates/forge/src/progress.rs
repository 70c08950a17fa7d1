//! How a long operation tells its caller where it is, and how the caller stops it.

use crate::error::Error;

/// Where an operation is. Sent before the first byte of every tensor and after every piece of work,
/// so that a bar can be drawn and the answer to [`Control::Cancel`] is prompt.
#[derive(Clone, Copy, Debug)]
pub struct Progress<'a> {
    /// Bytes of tensor data written so far.
    pub done: u64,
    /// Bytes of tensor data the finished file will hold.
    pub total: u64,
    /// The tensor being written.
    pub tensor: &'a str,
}

/// What the caller wants next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Control {
    /// Go on.
    Continue,
    /// Stop; the operation returns [`Error::Cancelled`] and leaves no file.
    Cancel,
}

/// The caller's progress function. It is called from one thread at a time, not always the caller's.
pub type OnProgress<'a> = dyn FnMut(Progress<'_>) -> Control + Send + 'a;

/// Counts bytes and passes the count on.
pub(crate) struct Meter<'a, 'f> {
    pub(crate) done: u64,
    pub(crate) total: u64,
    pub(crate) report: &'a mut OnProgress<'f>,
}

impl Meter<'_, '_> {
    /// Adds `bytes` of `tensor` and asks whether to go on.
    pub(crate) fn add(&mut self, bytes: u64, tensor: &str) -> Result<(), Error> {
        self.done += bytes;
        match (self.report)(Progress { done: self.done, total: self.total, tensor }) {
            Control::Continue => Ok(()),
            Control::Cancel => Err(Error::Cancelled),
        }
    }
}
