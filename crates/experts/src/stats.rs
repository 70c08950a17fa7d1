//! What a store did.

use std::time::{Duration, Instant};

/// Counts since the store was made, or since they were taken last.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Stats {
    /// Experts read.
    pub loads: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Time that readers spent reading, over all of them.
    pub busy: Duration,
    /// Time that computation waited for them.
    pub wait: Duration,
    /// Experts that waves found in place, used before.
    pub hits: u64,
    /// Experts that waves needed and that a scan had asked for before.
    pub ahead: u64,
    /// Experts that waves needed and nobody had asked for.
    pub misses: u64,
    /// Experts that the look-ahead named.
    pub predicted: u64,
    /// Of these, how many were not in place and were asked for.
    pub predicted_loads: u64,
    /// Of these, how many were used.
    pub predicted_used: u64,
    /// Of these, how many were given up before they were read.
    pub predicted_cancelled: u64,
    /// Of these, how many were read and evicted unused.
    pub predicted_wasted: u64,
    /// Times that memory of slots was lent.
    pub loans: u64,
    /// Times that it came back.
    pub repaid: u64,
}

impl Stats {
    /// What happened between `before` and now.
    pub fn since(&self, before: &Stats) -> Stats {
        Stats {
            loads: self.loads - before.loads,
            bytes: self.bytes - before.bytes,
            busy: self.busy.saturating_sub(before.busy),
            wait: self.wait.saturating_sub(before.wait),
            hits: self.hits - before.hits,
            ahead: self.ahead - before.ahead,
            misses: self.misses - before.misses,
            predicted: self.predicted - before.predicted,
            predicted_loads: self.predicted_loads - before.predicted_loads,
            predicted_used: self.predicted_used - before.predicted_used,
            predicted_cancelled: self.predicted_cancelled - before.predicted_cancelled,
            predicted_wasted: self.predicted_wasted - before.predicted_wasted,
            loans: self.loans - before.loans,
            repaid: self.repaid - before.repaid,
        }
    }

    /// Experts that waves named.
    pub fn wanted(&self) -> u64 {
        self.hits + self.ahead + self.misses + self.predicted_used
    }
}

/// A load, for a trace.
#[derive(Clone, Debug)]
pub struct Span {
    /// Number of the reader.
    pub reader: usize,
    /// When it began.
    pub start: Instant,
    /// When it was complete.
    pub end: Instant,
    /// The layer.
    pub layer: usize,
    /// The first expert.
    pub expert: u32,
    /// How many.
    pub count: usize,
    /// Their bytes.
    pub bytes: u64,
    /// `demand`, `ahead` or `predicted`.
    pub why: &'static str,
}

/// A time that computation waited, for a trace.
#[derive(Clone, Copy, Debug)]
pub struct Wait {
    /// When it began.
    pub start: Instant,
    /// When it was over.
    pub end: Instant,
    /// The layer whose experts were missing.
    pub layer: usize,
}
