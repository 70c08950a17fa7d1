//! Where the experts of a wave are: in the GPU's copy of the file, or in slots that are filled meanwhile.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::DriverError;
use cudarc::driver::sys::CUresult;
use model::{PlacedExpert, Slot, SlotMemory, Stage, Wave};

use crate::Cuda;
use crate::open::Open;
use crate::slots::Arena;
use crate::transfer::GpuLanes;
use crate::weights::{Experts, Triplet};

/// Pinned memory that slots are filled from.
pub(crate) const STAGING: usize = 64 << 20;

/// What a wave reads of the arenas: where each expert's matrices are, and in which arena.
pub(crate) struct Slots {
    arena: Arc<Arena<GpuLanes>>,
    ranges: Vec<Range<usize>>,
}

impl Slots {
    /// Notes that the wave's kernels have been enqueued.
    pub(crate) fn enqueued(&self) -> Result<(), DriverError> {
        self.arena.after_wave(&self.ranges).map_err(of_driver)
    }
}

/// The matrices where a table says: [3, experts] u64.
fn at_places(triplet: Triplet, table: u64, experts: usize) -> Triplet {
    let mut matrix = 0;
    triplet.map(|experts_of| {
        let places = table + 8 * (matrix * experts) as u64;
        matrix += 1;
        Experts { places, ..experts_of }
    })
}

impl Cuda {
    /// Another arena of `bytes` bytes, and its number.
    pub(crate) fn add_arena(&mut self, bytes: usize) -> model::Result<(u32, Arc<dyn SlotMemory>)> {
        let matrices = self.model.experts.iter().flat_map(|layer| [&layer.gate, &layer.up, &layer.down]);
        let largest = matrices.map(|matrix| matrix.bytes()).max().unwrap_or(0);
        let pinned = STAGING.min(bytes).max(8 * (largest + 8192).next_multiple_of(4096));
        let lanes = GpuLanes::new(&self.device, bytes, pinned, (self.sums(), self.home())).map_err(|error| {
            let message = format!(
                "taking {} MiB of the GPU's memory for experts and {} MiB of pinned memory: {error}; a smaller cache \
                 or a shorter context needs less",
                bytes >> 20,
                pinned >> 20
            );
            model::Error::Backend { backend: "cuda", stage: Stage::Experts.name(), layer: 0, message }
        })?;
        let arena = Arc::new(Arena::new(lanes, bytes));
        self.arenas.push(arena.clone());
        Ok((self.arenas.len() as u32, arena))
    }

    /// Refuses waves that name experts or places there are not.
    pub(crate) fn check_wave(&self, open: &Open, layer: usize, wave: &Wave) -> model::Result<()> {
        let refuse = |message: String| {
            Err(model::Error::Backend { backend: "cuda", stage: Stage::Experts.name(), layer, message })
        };
        let (experts, rows) = (self.model.spec.moe.experts, open.pass.rows());
        if open.routed != rows {
            return refuse(format!("{} of {rows} rows have been routed", open.routed));
        }
        let number = arena_of(wave);
        for PlacedExpert { expert, slot } in &*wave.experts {
            if *expert as usize >= experts {
                return refuse(format!("there is no expert {expert}: the layer has {experts}"));
            }
            if slot.arena != number {
                let other = slot.arena;
                return refuse(format!("expert {expert} is in arena {other}, others are in {number}"));
            }
        }
        if number == Slot::FILE {
            let here = self.whole || self.fetch.is_some() || wave.experts.is_empty();
            let missing =
                || refuse("the GPU does not hold the experts, and the wave names no slots".to_string());
            return if here { Ok(()) } else { missing() };
        }
        let Some(arena) = self.arenas.get(number as usize - 1) else {
            return refuse(format!("there is no arena {number}"));
        };
        let outside =
            |placed: &&PlacedExpert| !self.ranges(layer, placed).iter().all(|range| arena.holds(range));
        match wave.experts.iter().find(outside) {
            Some(placed) => refuse(format!("expert {} is not inside of arena {number}", placed.expert)),
            None => Ok(()),
        }
    }

    /// Where the matrices of an expert are in its arena.
    fn ranges(&self, layer: usize, placed: &PlacedExpert) -> [Range<usize>; 3] {
        let (layout, slot) = (&self.model.experts[layer], placed.slot);
        [(slot.gate, &layout.gate), (slot.up, &layout.up), (slot.down, &layout.down)].map(|(at, matrix)| {
            let at = at as usize;
            at..at.saturating_add(matrix.bytes())
        })
    }

    /// The matrices of a layer at the places that `wave` says, which computation waits for.
    pub(crate) fn place(
        &mut self,
        open: &Open,
        layer: usize,
        wave: &Wave,
    ) -> Result<(Triplet, Option<Slots>), DriverError> {
        let (triplet, experts) = (self.weights.experts[layer], self.model.spec.moe.experts);
        let number = arena_of(wave);
        if number == Slot::FILE {
            let Some(places) = self.fetch.as_ref().map(|fetch| fetch.places(layer)) else {
                return Ok((triplet, None));
            };
            self.fetch_chosen(open, layer)?;
            return Ok((at_places(triplet, places, experts), None));
        }
        let arena = self.arenas[number as usize - 1].clone();
        let mut table = vec![0u64; 3 * experts];
        let mut ranges = Vec::with_capacity(3 * wave.experts.len());
        for placed in &*wave.experts {
            for (matrix, range) in self.ranges(layer, placed).into_iter().enumerate() {
                table[matrix * experts + placed.expert as usize] = arena.lanes().at() + range.start as u64;
                ranges.push(range);
            }
        }
        let places = self.scratch.places.take(&self.device, 8 * table.len())?;
        self.device.upload(&table, places)?;
        arena.before_wave(&ranges).map_err(of_driver)?;
        Ok((at_places(triplet, places, experts), Some(Slots { arena, ranges })))
    }
}

/// The arena a wave is in.
fn arena_of(wave: &Wave) -> u32 {
    wave.experts.first().map_or(Slot::FILE, |placed| placed.slot.arena)
}

/// What the driver said.
fn of_driver(error: io::Error) -> DriverError {
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<DriverError>());
    inner.copied().unwrap_or(DriverError(CUresult::CUDA_ERROR_UNKNOWN))
}
