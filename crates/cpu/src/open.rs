//! Open passes and the memory they work in.

use std::ops::Range;

use model::state::OpenPass;
use model::{Pass, Spec, Stage};

use crate::kernels::Codes;
use crate::memory::{Aligned, reserve};

/// A pass between begin and commit.
pub(crate) struct Open {
    pub(crate) pass: Pass,
    pub(crate) state: OpenPass,
    /// The stage called last and its rows.
    pub(crate) last: Option<(Stage, Range<usize>)>,
    pub(crate) buffers: Buffers,
}

/// Memory of a pass, reused by later ones. Never smaller than what the pass needs; leading parts are used.
#[derive(Default)]
pub(crate) struct Buffers {
    /// The residual stream: [rows, hidden].
    pub(crate) hidden: Aligned,
    /// Normed rows, input of whatever follows a norm: [rows, hidden].
    pub(crate) norm: Aligned,
    /// `norm` as integers: [rows, blocks of hidden].
    pub(crate) codes: Vec<Codes>,
    /// Other inputs of products as integers.
    pub(crate) block_codes: Vec<Codes>,
    /// Sum of shared and routed experts: [rows, hidden].
    pub(crate) sum: Aligned,
    /// What lives between the stages of a block of rows; see [`carve`].
    pub(crate) block: Aligned,
    /// Chosen experts of each row, by falling weight: [rows, used]. Small integers, exact as numbers.
    pub(crate) ids: Aligned,
    /// Their weights: [rows, used].
    pub(crate) weights: Aligned,
    /// Cosines, then sines of each row's rotation: [rows, rope_dims].
    pub(crate) rope: Aligned,
    /// The pairs of the layer routed last, by expert.
    pub(crate) pairs: Pairs,
    /// Final hidden states of the rows that want logits or hidden states.
    pub(crate) last: Vec<f32>,
    /// The same as integers.
    pub(crate) last_codes: Vec<Codes>,
    /// Those rows.
    pub(crate) last_rows: Vec<usize>,
    /// Logits of the rows that want them.
    pub(crate) logits: Vec<f32>,
}

/// Pairs (expert, row), grouped by ascending expert, rows ascending in each.
#[derive(Default)]
pub(crate) struct Pairs {
    /// Whether they belong to the layer routed last.
    pub(crate) valid: bool,
    /// Expert e's pairs are `starts[e] .. starts[e + 1]`.
    pub(crate) starts: Vec<usize>,
    /// Row of each pair.
    pub(crate) rows: Vec<u32>,
    /// Weight of each pair.
    pub(crate) weights: Vec<f32>,
}

/// Lengths of a pass's buffers.
struct Lens {
    /// `hidden`, `norm`, `sum`.
    hidden: usize,
    codes: usize,
    /// `ids`, `weights`.
    used: usize,
    rope: usize,
    block: usize,
    block_codes: usize,
}

impl Lens {
    /// Of a pass of `rows` rows in blocks of at most `block_rows`.
    fn new(spec: &Spec, rows: usize, block_rows: usize) -> Lens {
        let block = rows.min(block_rows);
        let lens = [
            &crate::delta::parts(spec, block)[..],
            &crate::attention::parts(spec, block)[..],
            &crate::moe::router_parts(spec, block)[..],
            &crate::moe::shared_parts(spec, block)[..],
        ];
        let widest = [spec.delta.value_dim(), spec.attention.query_dim(), spec.moe.shared_width];
        let widest = widest.into_iter().max().unwrap_or(0);
        Lens {
            hidden: rows * spec.hidden,
            codes: rows * Codes::per_row(spec.hidden),
            used: rows * spec.moe.used,
            rope: rows * spec.attention.rope_dims,
            block: lens.into_iter().map(carved_len).max().unwrap_or(0),
            block_codes: block * Codes::per_row(widest),
        }
    }
}

/// Bytes that passes of `rows` rows work in, for the plan of memory.
pub(crate) fn scratch_bytes(spec: &Spec, rows: usize, block_rows: usize) -> usize {
    let lens = Lens::new(spec, rows, block_rows);
    let numbers = 3 * lens.hidden + 2 * lens.used + lens.rope + lens.block + spec.vocab;
    let pairs = 2 * size_of::<u32>() * lens.used;
    numbers * size_of::<f32>() + (lens.codes + lens.block_codes) * size_of::<Codes>() + pairs
}

impl Buffers {
    /// Makes room for a pass of `rows` rows in blocks of at most `block_rows`.
    pub(crate) fn reserve(&mut self, spec: &Spec, rows: usize, block_rows: usize) {
        let lens = Lens::new(spec, rows, block_rows);
        for buffer in [&mut self.hidden, &mut self.norm, &mut self.sum] {
            buffer.reserve(lens.hidden);
        }
        reserve(&mut self.codes, lens.codes, Codes::ZERO);
        for buffer in [&mut self.ids, &mut self.weights] {
            buffer.reserve(lens.used);
        }
        self.rope.reserve(lens.rope);
        self.block.reserve(lens.block);
        reserve(&mut self.block_codes, lens.block_codes, Codes::ZERO);
        self.pairs.valid = false;
    }
}

/// Numbers that parts of these lengths take in a block.
fn carved_len(lens: &[usize]) -> usize {
    lens.iter().map(|len| len.next_multiple_of(16)).sum()
}

/// Cuts a block into parts of these lengths, each on a cache line boundary.
pub(crate) fn carve<const N: usize>(block: &mut [f32], lens: [usize; N]) -> [&mut [f32]; N] {
    let mut rest = block;
    lens.map(|len| {
        let (part, behind) = std::mem::take(&mut rest).split_at_mut(len.next_multiple_of(16));
        rest = behind;
        &mut part[..len]
    })
}
