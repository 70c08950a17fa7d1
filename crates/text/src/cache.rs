//! Pieces seen before and their tokens. Source code repeats its pieces: nine of ten come from here.

use crate::bpe::fold;

/// Slots, a power of two; with 64 bytes each the cache takes 2 MiB.
const SLOTS: usize = 1 << 15;
/// Longest piece kept: four words, less one byte for the length.
const KEY: usize = 31;
/// Most tokens kept for one piece.
const TOKENS: usize = 7;

/// One piece, in one cache line.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Slot {
    /// Bytes of the piece, then zeros, then its length in the last byte; all zeros in an empty slot.
    key: [u64; 4],
    tokens: [u32; TOKENS],
    count: u32,
}

/// A direct-mapped cache: a collision overwrites, so it never grows and never has to be cleared.
pub(crate) struct Cache(Box<[Slot]>);

impl Cache {
    pub(crate) fn new() -> Cache {
        Cache(vec![Slot { key: [0; 4], tokens: [0; TOKENS], count: 0 }; SLOTS].into_boxed_slice())
    }

    /// Appends the tokens of `text[start..end]`, from the cache or else from `encode`.
    #[inline]
    pub(crate) fn encode(
        &mut self,
        text: &[u8],
        (start, end): (usize, usize),
        out: &mut Vec<u32>,
        encode: impl FnOnce(&[u8], &mut Vec<u32>),
    ) {
        let len = end - start;
        if len > KEY {
            return encode(&text[start..end], out);
        }
        let key = key(text, start, len);
        let slot = &mut self.0[hash(&key) as usize % SLOTS];
        if slot.key == key {
            match slot.count {
                1 => out.push(slot.tokens[0]),
                count => out.extend_from_slice(&slot.tokens[..count as usize]),
            }
            return;
        }
        let before = out.len();
        encode(&text[start..end], out);
        let made = &out[before..];
        if made.len() <= TOKENS {
            slot.key = key;
            slot.tokens[..made.len()].copy_from_slice(made);
            slot.count = made.len() as u32;
        }
    }
}

#[inline]
fn key(text: &[u8], start: usize, len: usize) -> [u64; 4] {
    let mut key = [0; 4];
    for (word, at) in key.iter_mut().zip((0..len).step_by(8)) {
        *word = load(text, start + at, (len - at).min(8));
    }
    key[3] |= (len as u64) << 56;
    key
}

/// `len` bytes (1 to 8) from `at` as the low bytes of a word.
#[inline]
fn load(text: &[u8], at: usize, len: usize) -> u64 {
    match text.get(at..at + 8).and_then(|bytes| bytes.try_into().ok()) {
        // Reading past the piece and masking is much faster than copying few bytes.
        Some(bytes) => u64::from_le_bytes(bytes) & (u64::MAX >> (64 - 8 * len)),
        None => {
            let mut bytes = [0; 8];
            bytes[..len].copy_from_slice(&text[at..at + len]);
            u64::from_le_bytes(bytes)
        }
    }
}

#[inline]
fn hash(key: &[u64; 4]) -> u64 {
    const MIX: [u64; 4] =
        [0x9E37_79B9_7F4A_7C15, 0xD1B5_4A32_D192_ED03, 0xA24B_AED4_963E_E407, 0x8EBC_6AF0_9C88_C6E3];
    let hash = fold(key[0] ^ MIX[0], key[1] ^ MIX[1]) ^ fold(key[2] ^ MIX[2], key[3] ^ MIX[3]);
    hash ^ hash >> 32
}
