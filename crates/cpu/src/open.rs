//! Open passes and the memory they work in.

use std::ops::Range;

use model::state::OpenPass;
use model::{Pass, Spec, Stage};

use crate::kernels::Codes;
use crate::memory::{Aligned, carved_len, reserve};

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
    /// Normed rows, input of whatever follows a norm: [rows, hidden], of the block at hand or of the pass.
    pub(crate) norm: Aligned,
    /// Whether `norm` holds the pass's rows: experts of plain numbers want them.
    pub(crate) whole_norm: bool,
    /// The same of all rows of the pass, as integers: [rows, blocks of hidden].
    pub(crate) codes: Vec<Codes>,
    /// Other inputs of products as integers.
    pub(crate) block_codes: Vec<Codes>,
    /// Sum of shared and routed experts: [rows, hidden].
    pub(crate) sum: Aligned,
    /// What lives between the stages of a block of rows; see [`crate::memory::carve`].
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

/// What buffers are for.
#[derive(Clone, Copy)]
pub(crate) struct Room {
    /// Rows of a pass.
    pub(crate) rows: usize,
    /// Rows of a block, at most.
    pub(crate) block_rows: usize,
    /// See [`Buffers::whole_norm`].
    pub(crate) whole_norm: bool,
}

/// Lengths of a pass's buffers.
struct Lens {
    /// `hidden`, `sum`.
    hidden: usize,
    norm: usize,
    codes: usize,
    /// `ids`, `weights`.
    used: usize,
    rope: usize,
    block: usize,
    block_codes: usize,
}

impl Lens {
    fn new(spec: &Spec, room: Room) -> Lens {
        let (rows, block) = (room.rows, room.rows.min(room.block_rows));
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
            norm: if room.whole_norm { rows } else { block } * spec.hidden,
            codes: rows * Codes::per_row(spec.hidden),
            used: rows * spec.moe.used,
            rope: rows * spec.attention.rope_dims,
            block: lens.into_iter().map(carved_len).max().unwrap_or(0),
            block_codes: block * Codes::per_row(widest),
        }
    }
}

/// Bytes that passes work in, for the plan of memory.
pub(crate) fn scratch_bytes(spec: &Spec, room: Room) -> usize {
    let lens = Lens::new(spec, room);
    let numbers = 2 * lens.hidden + lens.norm + 2 * lens.used + lens.rope + lens.block + spec.vocab;
    let pairs = 2 * size_of::<u32>() * lens.used;
    numbers * size_of::<f32>() + (lens.codes + lens.block_codes) * size_of::<Codes>() + pairs
}

impl Buffers {
    /// Makes room for a pass.
    pub(crate) fn reserve(&mut self, spec: &Spec, room: Room) {
        let lens = Lens::new(spec, room);
        for buffer in [&mut self.hidden, &mut self.sum] {
            buffer.reserve(lens.hidden);
        }
        self.norm.reserve(lens.norm);
        self.whole_norm = room.whole_norm;
        reserve(&mut self.codes, lens.codes, Codes::ZERO);
        for buffer in [&mut self.ids, &mut self.weights] {
            buffer.reserve(lens.used);
        }
        self.rope.reserve(lens.rope);
        self.block.reserve(lens.block);
        reserve(&mut self.block_codes, lens.block_codes, Codes::ZERO);
        self.pairs.valid = false;
    }

    /// The normed rows of the block that begins at `row`, of `cols` columns.
    pub(crate) fn block_norm(norm: &mut [f32], whole: bool, row: usize, cols: usize) -> &mut [f32] {
        let first = if whole { row } else { 0 };
        &mut norm[first * cols..]
    }
}
