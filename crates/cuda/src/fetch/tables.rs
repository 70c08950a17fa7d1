//! How much of a cache are slots, and how much belongs to them.

use super::{Home, ROWS, State};

/// Rooms of a slot begin at multiples of this.
const ALIGN: usize = 64;

/// Bytes behind the end of each buffer.
const BEHIND: usize = 1024;

/// What tables depend on.
pub(crate) struct Tables {
    layers: usize,
    experts: usize,
    /// Bytes of a slot, and where each matrix begins in it.
    pub(crate) slot_bytes: usize,
    pub(crate) parts: [usize; 3],
    /// Bytes of routers that had to be decoded.
    decoded: usize,
}

impl Tables {
    /// `decoded`: bytes of each router that has to be.
    pub(crate) fn new(homes: &[Home], (layers, experts): (usize, usize), decoded: &[usize]) -> Tables {
        // An expert lies as far behind a multiple of 16 as in pinned memory, and comes in whole words of 16 bytes.
        let largest = |matrix: usize| {
            let bytes = homes.iter().skip(matrix).step_by(3).map(|home| home.bytes as usize + 30);
            bytes.max().unwrap_or(0).next_multiple_of(ALIGN)
        };
        let [gate, up, down] = [0, 1, 2].map(largest);
        let decoded = decoded.iter().map(|bytes| bytes + BEHIND).sum();
        Tables { layers, experts, slot_bytes: gate + up + down, parts: [0, gate, gate + up], decoded }
    }

    /// Bytes of each table of `count` slots: homes, places, slot of an expert, its worth; owner of a slot, since when, those without
    /// an owner; state, sums.
    pub(crate) fn of(&self, count: usize) -> [usize; 9] {
        let (all, homes) = (self.layers * self.experts, size_of::<Home>() * 3 * self.layers);
        [homes, 24 * all, 4 * all, 4 * all, 4 * count, 4 * count, 4 * count, size_of::<State>(), 16]
            .map(|bytes| bytes.next_multiple_of(16))
    }

    /// Bytes of the logits of choices that are foreseen: [layers, ROWS, experts].
    pub(crate) fn logits(&self) -> usize {
        4 * self.layers * ROWS * self.experts
    }

    /// Bytes that `count` slots take with all that belongs to them.
    pub(crate) fn bytes(&self, count: usize) -> u64 {
        let tables: usize = self.of(count).iter().sum();
        (tables + self.logits() + self.decoded + 3 * BEHIND + count * self.slot_bytes) as u64
    }

    /// The most slots that take at most so much, and no more than there are experts.
    pub(crate) fn slots(&self, bytes: u64) -> usize {
        let most = bytes.saturating_sub(self.bytes(0)) as usize / (self.slot_bytes + 12).max(1);
        let mut count = most.min(self.layers * self.experts);
        while count > 0 && self.bytes(count) > bytes {
            count -= 1;
        }
        count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tables() -> Tables {
        let homes =
            [(1000, 500), (1000, 600), (1024, 994)].map(|(stride, bytes)| Home { at: 7, stride, bytes });
        Tables::new(&homes.repeat(5), (5, 33), &[12_345, 0])
    }

    #[test]
    fn a_slot_has_room_for_the_words_around_a_matrix() {
        let tables = tables();
        assert_eq!(tables.parts, [0, 576, 576 + 640]);
        assert_eq!(tables.slot_bytes, 576 + 640 + 1024);
    }

    #[test]
    fn as_many_slots_as_fit_with_their_tables() {
        let tables = tables();
        for count in [1, 2, 3, 63, 64, 65, 164] {
            let bytes = tables.bytes(count);
            assert!(bytes > (count * tables.slot_bytes + 12_345) as u64);
            assert_eq!(tables.slots(bytes), count);
            assert_eq!(tables.slots(bytes - 1), count - 1);
        }
    }

    #[test]
    fn never_more_slots_than_experts_and_none_where_tables_alone_do_not_fit() {
        let tables = tables();
        assert_eq!(tables.slots(u64::MAX / 2), 5 * 33);
        assert_eq!(tables.slots(tables.bytes(0)), 0);
        assert_eq!(tables.slots(0), 0);
    }

    #[test]
    fn tables_begin_at_whole_words() {
        assert!(tables().of(3).iter().all(|bytes| bytes % 16 == 0));
    }
}
