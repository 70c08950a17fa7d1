//! Where the experts of a wave are: in the GPU's copy of the file, or in slots that are filled meanwhile.

use std::io;
use std::ops::Range;
use std::sync::Arc;

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
    pub(crate) fn enqueued(&self) -> io::Result<()> {
        self.arena.after_wave(&self.ranges)
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
        let lanes = GpuLanes::new(&self.device, bytes, pinned, self.sums()).map_err(|error| {
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

    /// The matrices of a layer with the places that `wave` says, which computation waits for.
    ///
    /// # Errors
    /// Waves that name experts or places there are not.
    pub(crate) fn place(
        &mut self,
        open: &Open,
        layer: usize,
        wave: &Wave,
    ) -> model::Result<(Triplet, Option<Slots>)> {
        let refuse = |message: String| model::Error::Backend {
            backend: "cuda",
            stage: Stage::Experts.name(),
            layer,
            message,
        };
        let experts = self.model.spec.moe.experts;
        if let Some(placed) = wave.experts.iter().find(|placed| placed.expert as usize >= experts) {
            let expert = placed.expert;
            return Err(refuse(format!("there is no expert {expert}: the layer has {experts}")));
        }
        let number = wave.experts.first().map_or(Slot::FILE, |placed| placed.slot.arena);
        if let Some(placed) = wave.experts.iter().find(|placed| placed.slot.arena != number) {
            let (expert, other) = (placed.expert, placed.slot.arena);
            return Err(refuse(format!("expert {expert} is in arena {other}, others in {number}")));
        }
        let mut triplet = self.weights.experts[layer];
        if number == Slot::FILE {
            if let Some(fetch) = &self.fetch {
                triplet = at_places(triplet, fetch.places(layer), experts);
                return match self.fetch(open, layer) {
                    Ok(()) => Ok((triplet, None)),
                    Err(error) => Err(refuse(error.to_string())),
                };
            }
            let whole = self.whole || wave.experts.is_empty();
            let missing =
                || refuse("the experts are not in the GPU's memory, and the wave has no slots".into());
            return if whole { Ok((triplet, None)) } else { Err(missing()) };
        }
        let arena = self.arenas.get(number as usize - 1);
        let arena = arena.ok_or_else(|| refuse(format!("there is no arena {number}")))?.clone();
        let mut table = vec![0u64; 3 * experts];
        let mut ranges = Vec::with_capacity(3 * wave.experts.len());
        let layout = &self.model.experts[layer];
        let bytes = [layout.gate.bytes(), layout.up.bytes(), layout.down.bytes()];
        for PlacedExpert { expert, slot } in &*wave.experts {
            for (matrix, (at, bytes)) in [slot.gate, slot.up, slot.down].into_iter().zip(bytes).enumerate() {
                let range = at as usize..at as usize + bytes;
                if !arena.holds(&range) {
                    return Err(refuse(format!("expert {expert} is not inside of arena {number}")));
                }
                table[matrix * experts + *expert as usize] = arena.lanes().at() + at;
                ranges.push(range);
            }
        }
        let told = (self.scratch.places.take(&self.device, 8 * table.len()))
            .and_then(|at| self.device.upload(&table, at).map(|()| at));
        let places = told.map_err(crate::fail(Stage::Experts.name(), layer))?;
        let triplet = at_places(triplet, places, experts);
        arena.before_wave(&ranges).map_err(|error| refuse(error.to_string()))?;
        Ok((triplet, Some(Slots { arena, ranges })))
    }
}
