//! Where experts are in the files, and how memory is cut into slots for them.

use model::{ExpertTensor, Model};

use crate::error::{Error, Result};

/// Slots begin on cache lines.
const LINE: usize = 64;

/// One of the three matrices of a layer's experts, in the file and in a slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    /// The tensor, for messages.
    pub(crate) tensor: String,
    /// The file.
    pub(crate) shard: usize,
    /// Where expert 0's matrix begins in the file.
    pub(crate) offset: u64,
    /// Bytes from one expert to the next.
    pub(crate) stride: u64,
    /// Bytes of one expert's matrix.
    pub(crate) bytes: usize,
    /// Where its room begins in a slot. A matrix begins as far behind it as its place in the file is behind a
    /// multiple of the reader's alignment.
    pub(crate) at: usize,
}

impl Part {
    /// Where an expert's matrix begins in the file.
    pub(crate) fn file_offset(&self, expert: u32) -> u64 {
        self.offset + u64::from(expert) * self.stride
    }

    /// Whether experts follow each other without gaps.
    pub(crate) fn is_contiguous(&self) -> bool {
        self.stride == self.bytes as u64
    }
}

/// A layer: gate, up, down, and the class of its slots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LayerParts {
    pub(crate) class: usize,
    pub(crate) parts: [Part; 3],
}

/// Slots of one size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Class {
    /// Where the first one begins in the arena.
    pub(crate) base: usize,
    /// Bytes of each.
    pub(crate) slot_bytes: usize,
    /// How many there are.
    pub(crate) slots: usize,
    /// Layers that use them.
    pub(crate) layers: usize,
}

/// The cut of a budget into slots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    pub(crate) experts: usize,
    pub(crate) alignment: usize,
    pub(crate) layers: Vec<LayerParts>,
    pub(crate) classes: Vec<Class>,
}

impl Layout {
    /// Cuts at most `budget` bytes into slots for the experts of `model`, read with `alignment` (1, or the
    /// block of direct reads). `None` is as much as all experts need.
    ///
    /// There is a class of slots for each size of triplet, with the same number of slots for every layer. Where
    /// that would leave a class too few to stream a layer through, all slots have the largest size.
    ///
    /// # Errors
    /// [`Error::Budget`] below three times the experts of a token.
    pub fn new(model: &Model, budget: Option<u64>, alignment: usize) -> Result<Layout> {
        let moe = &model.spec.moe;
        let mut sizes: Vec<usize> = Vec::new();
        let mut layers: Vec<LayerParts> = Vec::new();
        for layout in &model.experts {
            let mut size = 0;
            let parts = [&layout.gate, &layout.up, &layout.down].map(|tensor| {
                let part = part(model, tensor, size);
                size += room(part.bytes, alignment);
                part
            });
            let class = sizes.iter().position(|&known| known == size).unwrap_or_else(|| {
                sizes.push(size);
                sizes.len() - 1
            });
            layers.push(LayerParts { class, parts });
        }
        let count = |class: usize| layers.iter().filter(|layer| layer.class == class).count();
        let counts: Vec<usize> = (0..sizes.len()).map(count).collect();
        let all: Vec<usize> = counts.iter().map(|layers| layers * moe.experts).collect();
        let budget = budget.unwrap_or(u64::MAX);
        let slots = match cut(&sizes, &all, &counts, budget) {
            Some(slots) if slots.iter().zip(&all).all(|(&n, &all)| n >= all.min(moe.experts * 3 / 2)) => {
                slots
            }
            _ => {
                let largest = sizes.iter().copied().max().unwrap_or(1);
                let total: usize = all.iter().sum();
                let least = total.min(3 * moe.used);
                let slots = usize::try_from(budget / largest as u64).unwrap_or(usize::MAX).min(total);
                if slots < least {
                    let needed = (least * largest) as u64;
                    return Err(Error::Budget { budget, needed, used: moe.used });
                }
                layers.iter_mut().for_each(|layer| layer.class = 0);
                sizes = vec![largest];
                vec![slots]
            }
        };
        let mut base = 0;
        let classes = sizes.iter().zip(&slots).enumerate().map(|(class, (&slot_bytes, &slots))| {
            let layers = layers.iter().filter(|layer| layer.class == class).count();
            let this = Class { base, slot_bytes, slots, layers };
            base += slot_bytes * slots;
            this
        });
        let classes = classes.collect();
        Ok(Layout { experts: moe.experts, alignment, layers, classes })
    }

    /// Bytes of all slots.
    pub fn bytes(&self) -> u64 {
        self.classes.iter().map(|class| (class.slot_bytes * class.slots) as u64).sum()
    }

    /// Slots in all.
    pub fn slots(&self) -> usize {
        self.classes.iter().map(|class| class.slots).sum()
    }

    /// Whether every expert has a slot.
    pub fn is_full(&self) -> bool {
        self.slots() == self.layers.len() * self.experts
    }

    /// Where the room of a part begins in the arena.
    pub(crate) fn part_at(&self, layer: usize, index_in_class: usize, part: &Part) -> usize {
        let class = &self.classes[self.layers[layer].class];
        class.base + index_in_class * class.slot_bytes + part.at
    }

    /// How far behind the beginning of its room an expert's matrix begins.
    pub(crate) fn slack(&self, part: &Part, expert: u32) -> usize {
        (part.file_offset(expert) % self.alignment as u64) as usize
    }
}

/// Room for a matrix of `bytes` bytes that begins anywhere behind a multiple of `alignment`.
fn room(bytes: usize, alignment: usize) -> usize {
    (bytes + alignment - 1).next_multiple_of(alignment).next_multiple_of(LINE)
}

fn part(model: &Model, tensor: &ExpertTensor, at: usize) -> Part {
    let info = &model.gguf.tensors()[tensor.tensor];
    Part {
        tensor: info.name.clone(),
        shard: info.shard,
        offset: info.offset + tensor.offset,
        stride: tensor.stride,
        bytes: tensor.bytes(),
        at,
    }
}

/// Slots of each class, the same number for every layer, what is left over to whichever class it fits. `None`
/// if not even one slot a layer fits.
fn cut(sizes: &[usize], all: &[usize], layers: &[usize], budget: u64) -> Option<Vec<usize>> {
    let each: u64 = sizes.iter().zip(layers).map(|(&size, &layers)| (size * layers) as u64).sum();
    let count = usize::try_from(budget / each.max(1)).unwrap_or(usize::MAX);
    let mut slots: Vec<usize> =
        all.iter().zip(layers).map(|(&all, &layers)| all.min(count.saturating_mul(layers))).collect();
    let used: u64 = slots.iter().zip(sizes).map(|(&slots, &size)| (slots * size) as u64).sum();
    let mut left = budget - used;
    for (class, &size) in sizes.iter().enumerate() {
        let more = usize::try_from(left / size as u64).unwrap_or(usize::MAX).min(all[class] - slots[class]);
        slots[class] += more;
        left -= (more * size) as u64;
    }
    (count > 0).then_some(slots)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_share_a_budget_by_layers() {
        // Ten layers of 100-byte experts, thirty of 60-byte ones, sixteen experts each.
        let found = cut(&[100, 60], &[160, 480], &[10, 30], 2_800 * 5 + 130).unwrap();
        assert_eq!(found, [51, 150], "five a layer, and one of the first class for what is left");
        assert_eq!(cut(&[100, 60], &[160, 480], &[10, 30], u64::MAX).unwrap(), [160, 480]);
        assert_eq!(cut(&[100, 60], &[160, 480], &[10, 30], 2_799), None);
    }

    #[test]
    fn room_holds_a_matrix_wherever_it_begins() {
        for bytes in [1, 63, 4_095, 4_096, 4_097, 270_336] {
            for start in [0usize, 32, 4_064, 4_095] {
                assert!((start + bytes).next_multiple_of(4_096) <= room(bytes, 4_096));
            }
            assert!(room(bytes, 1) >= bytes && room(bytes, 1) < bytes + 64);
        }
    }
}
