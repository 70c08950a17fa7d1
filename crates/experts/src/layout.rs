//! Where experts are in the files, and how memory is cut into slots for them.

use std::ops::Range;

use model::{ExpertTensor, Model};

use crate::error::{Error, Result};

/// Slots begin on cache lines.
const LINE: usize = 64;

/// Bytes that are read in the time that the reads of an expert take whatever their size.
const READ_BYTES: f64 = 128.0 * 1024.0;

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
    /// How many of them stay, the first ones, while the memory of the others is lent.
    pub(crate) stay: usize,
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
    /// There is a class of slots for each size of triplet; layers with smaller ones get more of them. Where
    /// that would leave a class too few to stream a layer through, all slots have the largest size.
    ///
    /// # Errors
    /// [`Error::Budget`] below three times the experts of a token.
    pub fn new(model: &Model, budget: Option<u64>, alignment: usize) -> Result<Layout> {
        Layout::lending(model, budget, 0, alignment)
    }

    /// As [`Layout::new`], where `lent` bytes of the budget are for something else from time to time: then the slots that
    /// stay hold to the smaller budget.
    ///
    /// # Errors
    /// As [`Layout::new`], for the smaller budget.
    pub fn lending(model: &Model, budget: Option<u64>, lent: u64, alignment: usize) -> Result<Layout> {
        let (mut layers, mut sizes) = layers(model, alignment);
        let moe = &model.spec.moe;
        let count = |class: usize| layers.iter().filter(|layer| layer.class == class).count();
        let counts: Vec<usize> = (0..sizes.len()).map(count).collect();
        let all: Vec<usize> = counts.iter().map(|layers| layers * moe.experts).collect();
        let budget = budget.unwrap_or(u64::MAX);
        let smaller = budget - lent.min(budget);
        let cut = |budget| cut(&sizes, &all, &counts, budget);
        let (mut slots, mut stay) = (cut(budget), cut(smaller));
        if stay.iter().zip(&all).any(|(&n, &all)| n < all.min(moe.experts * 3 / 2)) {
            let largest = sizes.iter().copied().max().unwrap_or(1);
            let total: usize = all.iter().sum();
            let of = |budget: u64| usize::try_from(budget / largest as u64).unwrap_or(usize::MAX).min(total);
            let least = total.min(3 * moe.used);
            if of(smaller) < least {
                let needed = (least * largest) as u64;
                return Err(Error::Budget { budget: smaller, needed, used: moe.used });
            }
            (slots, stay, sizes) = (vec![of(budget)], vec![of(smaller)], vec![largest]);
            layers.iter_mut().for_each(|layer| layer.class = 0);
        }
        let mut base = 0;
        let classes = sizes.iter().enumerate().map(|(class, &slot_bytes)| {
            let layers = layers.iter().filter(|layer| layer.class == class).count();
            let (slots, stay) = (slots[class], stay[class].min(slots[class]));
            let this = Class { base, slot_bytes, slots, stay, layers };
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

    /// Bytes of the slots whose memory can be lent.
    pub fn lent_bytes(&self) -> u64 {
        self.lent_ranges().map(|range| range.len() as u64).sum()
    }

    /// Where the slots whose memory can be lent lie in the arena.
    pub(crate) fn lent_ranges(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        self.classes.iter().map(|class| {
            let at = |slot| class.base + slot * class.slot_bytes;
            at(class.stay)..at(class.slots)
        })
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

/// The layers of a model, and the sizes of slots they need, each once.
fn layers(model: &Model, alignment: usize) -> (Vec<LayerParts>, Vec<usize>) {
    let mut sizes: Vec<usize> = Vec::new();
    let layers = model.experts.iter().map(|layout| {
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
        LayerParts { class, parts }
    });
    let layers = layers.collect();
    (layers, sizes)
}

/// Slots of each class for a budget.
///
/// If the hits of a layer grow with the logarithm of its slots n, the time of misses that another slot saves is
/// (a + b s) / n for slots of s bytes, so a byte saves most where n grows with 1 + (a / b) / s: smaller experts
/// get more slots. What is left over goes to whichever class it fits.
fn cut(sizes: &[usize], all: &[usize], layers: &[usize], budget: u64) -> Vec<usize> {
    let weight = |size: usize| 1.0 + READ_BYTES / size as f64;
    let each: f64 = sizes.iter().zip(layers).map(|(&size, &n)| (size * n) as f64 * weight(size)).sum();
    let count = budget as f64 / each.max(1.0);
    let mut left = budget;
    let mut take = |size: usize, wanted: usize| {
        let slots = usize::try_from(left / size as u64).unwrap_or(usize::MAX).min(wanted);
        left -= (slots * size) as u64;
        slots
    };
    let mut slots: Vec<usize> = (0..sizes.len())
        .map(|class| {
            let wanted = (count * weight(sizes[class]) * layers[class] as f64) as usize;
            take(sizes[class], wanted.min(all[class]))
        })
        .collect();
    for (class, &size) in sizes.iter().enumerate() {
        slots[class] += take(size, all[class] - slots[class]);
    }
    slots
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_share_a_budget_and_smaller_experts_get_more() {
        // Ten layers of experts of 900 KB, thirty of 300 KB ones, 16 experts each.
        let (sizes, all, layers) = ([900_000, 300_000], [160, 480], [10, 30]);
        let bytes = |slots: &[usize]| -> usize { slots.iter().zip(sizes).map(|(n, size)| n * size).sum() };
        for budget in (120_000_000..250_000_000).step_by(7_123_457) {
            let slots = cut(&sizes, &all, &layers, budget);
            let left = budget - bytes(&slots) as u64;
            assert!(left < 300_000 || slots[0] == all[0], "nothing is left over: {slots:?}");
            assert!(slots[0] * 30 < slots[1] * 10, "{slots:?}");
        }
        assert_eq!(cut(&sizes, &all, &layers, u64::MAX), all);
        assert_eq!(cut(&sizes, &all, &layers, 299_999), [0, 0]);
        assert_eq!(cut(&sizes, &all, &layers, 300_000), [0, 1]);
        // Ten of each by weight, which is 11.5 and 14.4.
        assert_eq!(cut(&sizes, &all, &layers, 232_500_000), [114, 433]);
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
