//! Byte-pair merging inside one piece of text.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::hash::{BuildHasher, Hasher, RandomState};

/// Pieces up to this many bytes are merged by scanning; longer ones with a heap, in n log n.
const SCAN: usize = 64;
/// No pair here merges.
const NO_RANK: u32 = u32::MAX;

/// Merge rank and resulting token of a pair of tokens.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Merge {
    /// Lower merges first.
    pub(crate) rank: u32,
    /// The token made.
    pub(crate) token: u32,
}

/// Hashes a pair of ids by one folded multiplication with a random key, so that no file can be made to collide.
#[derive(Clone)]
pub(crate) struct PairHash(u64);

impl BuildHasher for PairHash {
    type Hasher = PairHasher;

    fn build_hasher(&self) -> PairHasher {
        PairHasher { key: self.0, hash: 0 }
    }
}

pub(crate) struct PairHasher {
    key: u64,
    hash: u64,
}

impl Hasher for PairHasher {
    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(u64::from(byte));
        }
    }

    #[inline]
    fn write_u64(&mut self, value: u64) {
        self.hash = fold(self.hash ^ value ^ self.key, self.key | 1);
    }

    #[inline]
    fn finish(&self) -> u64 {
        self.hash
    }
}

/// Both halves of the 128-bit product.
#[inline]
pub(crate) fn fold(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    (product as u64) ^ (product >> 64) as u64
}

/// The merges of a vocabulary, and the token of each single byte.
pub(crate) struct Bpe {
    bytes: [u32; 256],
    merges: HashMap<u64, Merge, PairHash>,
}

#[inline]
fn pair(left: u32, right: u32) -> u64 {
    u64::from(left) << 32 | u64::from(right)
}

impl Bpe {
    pub(crate) fn new(bytes: [u32; 256], merges: usize) -> Bpe {
        let key = RandomState::new().hash_one(0u8);
        Bpe { bytes, merges: HashMap::with_capacity_and_hasher(merges, PairHash(key)) }
    }

    /// Adds a merge; false if the pair has one already.
    pub(crate) fn insert(&mut self, left: u32, right: u32, merge: Merge) -> bool {
        self.merges.insert(pair(left, right), merge).is_none()
    }

    #[inline]
    fn merge(&self, left: u32, right: u32) -> Option<Merge> {
        self.merges.get(&pair(left, right)).copied()
    }

    /// Appends the tokens of one piece: its bytes, merged lowest rank first, leftmost first among equals.
    pub(crate) fn encode(&self, piece: &[u8], out: &mut Vec<u32>) {
        if piece.len() <= SCAN { self.encode_short(piece, out) } else { self.encode_long(piece, out) }
    }

    fn encode_short(&self, piece: &[u8], out: &mut Vec<u32>) {
        let mut tokens = [0u32; SCAN];
        // ranks[i]: the merge of tokens[i] with tokens[i + 1].
        let mut ranks = [NO_RANK; SCAN];
        let mut made = [0u32; SCAN];
        let mut len = piece.len();
        for (token, &byte) in tokens.iter_mut().zip(piece) {
            *token = self.bytes[usize::from(byte)];
        }
        let rank =
            |left, right| self.merge(left, right).map_or((NO_RANK, 0), |merge| (merge.rank, merge.token));
        for at in 1..len {
            (ranks[at - 1], made[at - 1]) = rank(tokens[at - 1], tokens[at]);
        }
        while len > 1 {
            let (at, &best) = (ranks[..len - 1].iter().enumerate())
                .min_by_key(|&(_, rank)| *rank)
                .expect("len is at least 2");
            if best == NO_RANK {
                break;
            }
            tokens[at] = made[at];
            tokens.copy_within(at + 2..len, at + 1);
            ranks.copy_within(at + 1..len, at);
            made.copy_within(at + 1..len, at);
            len -= 1;
            ranks[len - 1] = NO_RANK;
            if at > 0 {
                (ranks[at - 1], made[at - 1]) = rank(tokens[at - 1], tokens[at]);
            }
            if at + 1 < len {
                (ranks[at], made[at]) = rank(tokens[at], tokens[at + 1]);
            }
        }
        out.extend_from_slice(&tokens[..len]);
    }

    fn encode_long(&self, piece: &[u8], out: &mut Vec<u32>) {
        let mut list = List::new(piece.iter().map(|&byte| self.bytes[usize::from(byte)]));
        let mut heap = BinaryHeap::new();
        let candidate = |list: &List, left: usize| {
            let right = list.next(left)?;
            let merge = self.merge(list.tokens[left], list.tokens[right])?;
            Some(Reverse((merge.rank, left, merge.token)))
        };
        heap.extend((0..list.tokens.len()).filter_map(|left| candidate(&list, left)));
        while let Some(Reverse((rank, left, _))) = heap.pop() {
            // An entry is stale once either of its tokens has merged with something else.
            let Some(Reverse((current, _, token))) = candidate(&list, left) else { continue };
            if list.gone[left] || current != rank {
                continue;
            }
            list.join(left, token);
            heap.extend(candidate(&list, left));
            heap.extend(list.previous(left).and_then(|before| candidate(&list, before)));
        }
        out.extend((0..list.tokens.len()).filter(|&at| !list.gone[at]).map(|at| list.tokens[at]));
    }
}

/// Tokens of a piece as a doubly linked list over the positions where they start.
struct List {
    tokens: Vec<u32>,
    next: Vec<usize>,
    previous: Vec<usize>,
    gone: Vec<bool>,
}

/// No neighbour on this side.
const END: usize = usize::MAX;

impl List {
    fn new(tokens: impl Iterator<Item = u32>) -> List {
        let tokens: Vec<u32> = tokens.collect();
        let len = tokens.len();
        let next = (1..=len).map(|at| if at == len { END } else { at }).collect();
        let previous = (0..len).map(|at| if at == 0 { END } else { at - 1 }).collect();
        List { gone: vec![false; tokens.len()], tokens, next, previous }
    }

    fn next(&self, at: usize) -> Option<usize> {
        Some(self.next[at]).filter(|&at| at != END)
    }

    fn previous(&self, at: usize) -> Option<usize> {
        Some(self.previous[at]).filter(|&at| at != END)
    }

    /// Makes `left` and its right neighbour one `token`, at `left`.
    fn join(&mut self, left: usize, token: u32) {
        let right = self.next[left];
        self.tokens[left] = token;
        self.gone[right] = true;
        self.next[left] = self.next[right];
        if let Some(after) = self.next(left) {
            self.previous[after] = left;
        }
    }
}
