//! How slots are shared between what stays and what streams through.

use crate::layout::Layout;

/// Largest wave: long stages stay interruptible, and slots of a scan are freed in time.
const WAVE: usize = 64;

/// Smallest wave of a scan that is handed out while the rest is being read: enough work for all threads.
const SMALLEST_WAVE: usize = 16;

/// Bytes of the largest matrix in a run: reads of this size reach the rate of the disk.
const RUN_BYTES: usize = 2 << 20;

/// Pairs for each expert from which on a pass can be expected to touch all of them: the layer is read whole.
const SCAN_PAIRS: usize = 10;

/// The numbers behind every decision, fixed when the store is made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Policy {
    pub(crate) experts: usize,
    layers: usize,
    used: usize,
    /// Whether every expert has a slot.
    pub(crate) full: bool,
    /// Experts read together by a scan.
    pub(crate) run: usize,
    classes: Vec<ClassPolicy>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct ClassPolicy {
    slots: usize,
    layers: usize,
    /// Slots that stay while a scan goes through the others.
    keep: usize,
}

impl Policy {
    /// For the cut `layout`, while the memory of some slots is `lent` or not.
    pub(crate) fn new(layout: &Layout, used: usize, lent: bool) -> Policy {
        let experts = layout.experts;
        let classes: Vec<ClassPolicy> = (layout.classes.iter())
            .map(|class| {
                let (slots, layers) = (if lent { class.stay } else { class.slots }, class.layers);
                // A layer and a quarter streams ahead; below two layers everything does.
                let window = match slots {
                    slots if slots == layers * experts => 0,
                    slots if slots <= 2 * experts => slots,
                    _ => experts + experts / 4,
                };
                ClassPolicy { slots, layers, keep: slots - window }
            })
            .collect();
        let largest = layout.layers.iter().flat_map(|layer| &layer.parts).map(|part| part.bytes).max();
        let fewest = classes.iter().map(|class| class.slots).min().unwrap_or(1);
        let run = (RUN_BYTES / largest.unwrap_or(1).max(1)).clamp(1, (fewest / 8).max(1));
        let full = classes.iter().all(|class| class.slots == class.layers * experts);
        Policy { experts, layers: layout.layers.len(), used, full, run, classes }
    }

    /// Positions of a scan: all experts of all layers.
    pub(crate) fn positions(&self) -> usize {
        self.layers * self.experts
    }

    /// Whether a pass of `rows` rows reads whole layers.
    pub(crate) fn scans(&self, rows: usize) -> bool {
        rows * self.used >= SCAN_PAIRS * self.experts
    }

    /// Classes of slots.
    pub(crate) fn classes(&self) -> usize {
        self.classes.len()
    }

    /// Slots of a class.
    pub(crate) fn slots(&self, class: usize) -> usize {
        self.classes[class].slots
    }

    /// Slots of a class that stay while a scan goes through the others.
    pub(crate) fn keep(&self, class: usize) -> usize {
        self.classes[class].keep
    }

    /// Experts of each layer of a class that stay.
    pub(crate) fn quota(&self, class: usize) -> usize {
        self.classes[class].keep / self.classes[class].layers
    }

    /// Experts of each layer of a class that are there when decoding begins.
    pub(crate) fn seeds(&self, class: usize) -> usize {
        self.classes[class].slots / self.classes[class].layers
    }

    /// Most experts of a wave.
    pub(crate) fn wave(&self, class: usize) -> usize {
        (self.classes[class].slots / 3).clamp(1, WAVE)
    }

    /// Experts that make a wave before the rest is there.
    pub(crate) fn enough(&self, rows: usize) -> usize {
        match rows {
            rows if self.scans(rows) => SMALLEST_WAVE,
            // A few rows: whatever is there is computed while the rest is read.
            rows if rows <= 8 => 1,
            _ => SMALLEST_WAVE / 2,
        }
    }
}
