//! Pieces seen before and their tokens. Source code repeats its pieces: nine of ten come from here.

use crate::bpe::fold;

/// Slots, a power of two; with 64 bytes each the cache takes 1 MiB.
const SLOTS: usize = 1 << 14;
/// Longest piece kept.
const KEY: usize = 30;
/// Most tokens kept for one piece.
const TOKENS: usize = 8;

/// One piece, in one cache line.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Slot {
    tokens: [u32; TOKENS],
    key: [u8; KEY],
    /// Bytes of the key; 0 for an empty slot.
    len: u8,
    count: u8,
}

/// A direct-mapped cache: a collision overwrites, so it never grows and never has to be cleared.
pub(crate) struct Cache(Box<[Slot]>);

impl Cache {
    pub(crate) fn new() -> Cache {
        let empty = Slot { tokens: [0; TOKENS], key: [0; KEY], len: 0, count: 0 };
        Cache(vec![empty; SLOTS].into_boxed_slice())
    }

    /// Appends the tokens of `piece`, from the cache or else from `encode`.
    #[inline]
    pub(crate) fn encode(
        &mut self,
        piece: &[u8],
        out: &mut Vec<u32>,
        encode: impl FnOnce(&[u8], &mut Vec<u32>),
    ) {
        if piece.is_empty() || piece.len() > KEY {
            return encode(piece, out);
        }
        let slot = &mut self.0[hash(piece) as usize % SLOTS];
        if slot.key[..usize::from(slot.len)] == *piece {
            out.extend_from_slice(&slot.tokens[..usize::from(slot.count)]);
            return;
        }
        let before = out.len();
        encode(piece, out);
        let made = &out[before..];
        if made.len() <= TOKENS {
            slot.key[..piece.len()].copy_from_slice(piece);
            slot.tokens[..made.len()].copy_from_slice(made);
            (slot.len, slot.count) = (piece.len() as u8, made.len() as u8);
        }
    }
}

/// Eight bytes per multiplication; the tail overlaps what came before it.
#[inline]
fn hash(piece: &[u8]) -> u64 {
    const KEY: u64 = 0x9E37_79B9_7F4A_7C15;
    let word = |bytes: &[u8]| {
        let mut word = [0; 8];
        word[..bytes.len()].copy_from_slice(bytes);
        u64::from_le_bytes(word)
    };
    let mut hash = piece.len() as u64;
    for chunk in piece.chunks(8) {
        hash = fold(hash ^ word(chunk), KEY);
    }
    hash ^ hash >> 32
}
