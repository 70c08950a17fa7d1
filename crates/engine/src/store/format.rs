//! What a stored session looks like in a file.
//!
//! An entry is a head and a body, each followed by its SHA-256; numbers are little-endian. Keys and values of every full
//! [`SEGMENT`] positions lie in files of their own, named by the SHA-256 of their bytes, which entries of one conversation
//! share.
//!
//! - head: magic, the fingerprint of what computes (32 bytes), seven u64 of the state's shape, u64 position, u64 bytes of
//!   the body, position × u32 token ids, segments × 32 bytes of names;
//! - body: the recurrent state as f32, then keys and values of the positions behind the last segment;
//! - segment: [attention layer][key, value][kv head][SEGMENT][head_dim] numbers of the KV type.

use std::io::{Read, Write};
use std::sync::{Arc, Weak};

use model::state::host::Page;
use model::state::{PAGE, SnapshotShape};
use model::{KvType, Snapshot};
use sha2::{Digest, Sha256};

/// Positions of a segment: whole pages.
pub(crate) const SEGMENT: usize = 1024;
/// Longest session that is believed: a context nobody has.
const LONGEST: usize = 1 << 24;
const MAGIC: &[u8; 8] = b"RLSTATE1";
/// Bytes of the head before the token ids.
const FIXED: usize = 8 + 32 + 7 * 8 + 8 + 8;

/// SHA-256.
pub(crate) type Hash = [u8; 32];

/// The hash of some bytes.
pub(crate) fn hash(bytes: &[u8]) -> Hash {
    Sha256::digest(bytes).into()
}

/// A hash as file names have it.
pub(crate) fn hex(hash: &Hash) -> String {
    hash.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The bytes of token ids.
pub(crate) fn token_bytes(tokens: &[u32]) -> Vec<u8> {
    tokens.iter().flat_map(|token| token.to_le_bytes()).collect()
}

/// What is known of an entry before its state is read.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Head {
    pub(crate) fingerprint: Hash,
    pub(crate) shape: SnapshotShape,
    pub(crate) tokens: Vec<u32>,
    pub(crate) segments: Vec<Hash>,
    body: usize,
}

/// Why a file is no entry. Nothing more is needed: it is deleted.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Bad {
    #[error("it cannot be read: {0}")]
    Io(#[from] std::io::Error),
    #[error("it belongs to another model, template or version")]
    Foreign,
    #[error("it is damaged or cut short")]
    Damaged,
}

impl Head {
    pub(crate) fn new(
        fingerprint: Hash,
        shape: SnapshotShape,
        tokens: Vec<u32>,
        segments: Vec<Hash>,
    ) -> Head {
        let tail = tokens.len() - segments.len() * SEGMENT;
        let body = 4 * shape.slot_len() + tail * row(&shape) * heads(&shape);
        Head { fingerprint, shape, tokens, segments, body }
    }

    /// Bytes of the whole entry.
    pub(crate) fn entry_bytes(&self) -> u64 {
        (FIXED + 4 * self.tokens.len() + 32 * self.segments.len() + 32 + self.body + 32) as u64
    }

    fn bytes(&self) -> Vec<u8> {
        let s = &self.shape;
        let kv = s.kv.bytes();
        let mut out = Vec::from(MAGIC);
        out.extend(self.fingerprint);
        for number in [s.delta_layers, s.window, s.state, s.attention_layers, s.kv_heads, s.head_dim, kv] {
            out.extend((number as u64).to_le_bytes());
        }
        out.extend((self.tokens.len() as u64).to_le_bytes());
        out.extend((self.body as u64).to_le_bytes());
        out.extend(token_bytes(&self.tokens));
        self.segments.iter().for_each(|name| out.extend(name));
        out
    }

    /// Reads the head of an entry and checks it: that it is whole, and made by what computes now.
    pub(crate) fn read(file: &mut impl Read, fingerprint: &Hash, shape: &SnapshotShape) -> Result<Head, Bad> {
        let mut fixed = [0; FIXED];
        exact(file, &mut fixed)?;
        if &fixed[..8] != MAGIC || fixed[8..40] != fingerprint[..] {
            return Err(Bad::Foreign);
        }
        let number = |index: usize| {
            let at = FIXED - 16 + 8 * index;
            usize::try_from(u64::from_le_bytes(fixed[at..at + 8].try_into().expect("eight bytes")))
        };
        let (Ok(position), Ok(body)) = (number(0), number(1)) else { return Err(Bad::Damaged) };
        if position == 0 || position > LONGEST {
            return Err(Bad::Damaged);
        }
        let mut rest = vec![0; 4 * position + 32 * (position / SEGMENT)];
        exact(file, &mut rest)?;
        let (tokens, segments) = rest.split_at(4 * position);
        let token = |bytes: &[u8]| u32::from_le_bytes(bytes.try_into().expect("four bytes"));
        let name = |bytes: &[u8]| Hash::try_from(bytes).expect("32 bytes");
        let tokens = tokens.chunks_exact(4).map(token).collect();
        let head = Head::new(*fingerprint, *shape, tokens, segments.chunks_exact(32).map(name).collect());
        let mut sum = Hash::default();
        exact(file, &mut sum)?;
        // The head as we would write it: shape and length of the body are right if and only if these are the bytes.
        let bytes = head.bytes();
        if bytes[..FIXED] != fixed || head.body != body || sum != hash(&bytes) {
            return Err(Bad::Damaged);
        }
        Ok(head)
    }

    /// Writes the entry; its segments are written already.
    pub(crate) fn write(&self, snapshot: &Snapshot, file: &mut impl Write) -> std::io::Result<()> {
        let head = self.bytes();
        let mut body: Vec<u8> = Vec::with_capacity(self.body);
        body.extend(snapshot.recurrent.iter().flat_map(|x| x.to_le_bytes()));
        body.extend(positions(snapshot, self.segments.len() * SEGMENT..snapshot.position));
        for part in [&head[..], &hash(&head), &body, &hash(&body)] {
            file.write_all(part)?;
        }
        file.flush()
    }

    /// Reads the body of an entry, whose head has just been read, and joins it with the segments.
    pub(crate) fn read_state(&self, file: &mut impl Read, segments: &[Vec<u8>]) -> Result<Snapshot, Bad> {
        let mut body = vec![0; self.body];
        exact(file, &mut body)?;
        let (mut sum, mut more) = (Hash::default(), [0]);
        exact(file, &mut sum)?;
        if sum != hash(&body) || file.read(&mut more)? != 0 {
            return Err(Bad::Damaged);
        }
        let (recurrent, tail) = body.split_at(4 * self.shape.slot_len());
        let number = |bytes: &[u8]| f32::from_le_bytes(bytes.try_into().expect("four bytes"));
        let recurrent = Arc::new(recurrent.chunks_exact(4).map(number).collect());
        let mut pages = Vec::new();
        for part in segments.iter().map(Vec::as_slice).chain([tail]) {
            self.append_pages(part, &mut pages);
        }
        let pages = pages.into_iter().map(Arc::new).collect();
        Ok(Snapshot { shape: self.shape, position: self.tokens.len(), recurrent, pages })
    }

    /// Pages with the keys and values of a segment or of the rest: [layer, side, head][position][head_dim].
    fn append_pages(&self, part: &[u8], pages: &mut Vec<Page>) {
        let (row, heads) = (row(&self.shape), heads(&self.shape));
        let positions = part.len() / (row * heads).max(1);
        for first in (0..positions).step_by(PAGE) {
            let mut page = Page::new(&self.shape);
            let count = PAGE.min(positions - first);
            for head in 0..heads {
                let start = (head * positions + first) * row;
                page.write_bytes(head * PAGE * self.shape.head_dim, &part[start..start + count * row]);
            }
            pages.push(page);
        }
    }
}

/// Full segments of a state.
pub(crate) fn segments(snapshot: &Snapshot) -> usize {
    snapshot.position / SEGMENT
}

/// The keys and values of full segment `n`.
pub(crate) fn segment(snapshot: &Snapshot, n: usize) -> Vec<u8> {
    positions(snapshot, n * SEGMENT..(n + 1) * SEGMENT)
}

/// The pages that hold them.
pub(crate) fn segment_pages(snapshot: &Snapshot, n: usize) -> &[Arc<Page>] {
    const PAGES: usize = SEGMENT / PAGE;
    &snapshot.pages[n * PAGES..(n + 1) * PAGES]
}

/// Segments whose names are known, by the pages they were made of.
///
/// A page is shared by everything that has the same positions of the same conversation, and copied by whoever writes on:
/// while a weak reference to it lives, nobody else has its place in memory and what it holds cannot change.
#[derive(Debug, Default)]
pub(crate) struct KnownSegments(pub(super) Vec<(Vec<Weak<Page>>, Hash)>);

impl KnownSegments {
    /// The name of a segment in these pages.
    pub(crate) fn name(&self, pages: &[Arc<Page>]) -> Option<Hash> {
        let same = |known: &Weak<Page>, page: &Arc<Page>| std::ptr::eq(known.as_ptr(), Arc::as_ptr(page));
        let is = |known: &[Weak<Page>]| known.iter().zip(pages).all(|(known, page)| same(known, page));
        self.0.iter().find(|(known, _)| is(known)).map(|(_, name)| *name)
    }

    /// Notes a name, and forgets those of pages that are gone.
    pub(crate) fn note(&mut self, pages: &[Arc<Page>], name: Hash) {
        self.0.retain(|(known, _)| known.iter().all(|page| page.strong_count() > 0));
        if self.name(pages).is_none() {
            self.0.push((pages.iter().map(Arc::downgrade).collect(), name));
        }
    }
}

/// Bytes of a segment.
pub(crate) fn segment_bytes(shape: &SnapshotShape) -> usize {
    SEGMENT * row(shape) * heads(shape)
}

/// Keys and values of some positions: [layer, side, head][position][head_dim].
fn positions(snapshot: &Snapshot, range: std::ops::Range<usize>) -> Vec<u8> {
    let mut out = Vec::with_capacity(range.len() * row(&snapshot.shape) * heads(&snapshot.shape));
    (0..heads(&snapshot.shape)).for_each(|head| snapshot.append_rows(head, range.clone(), &mut out));
    out
}

/// Bytes of one head at one position.
fn row(shape: &SnapshotShape) -> usize {
    shape.head_dim * shape.kv.bytes()
}

fn heads(shape: &SnapshotShape) -> usize {
    shape.attention_layers * 2 * shape.kv_heads
}

/// Fills `bytes`; a file that ends before is damaged.
fn exact(file: &mut impl Read, bytes: &mut [u8]) -> Result<(), Bad> {
    file.read_exact(bytes).map_err(|error| match error.kind() {
        std::io::ErrorKind::UnexpectedEof => Bad::Damaged,
        _ => Bad::Io(error),
    })
}

/// A name for how keys and values are stored, part of the fingerprint.
pub(crate) fn kv_name(kv: KvType) -> &'static str {
    match kv {
        KvType::F16 => "kv-f16",
        KvType::F32 => "kv-f32",
    }
}
