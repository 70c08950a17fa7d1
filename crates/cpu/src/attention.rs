//! Stages `attn.project`, `attn.mix`, `attn.out`: gated softmax attention over the cache.

use std::ops::Range;

use half::f16;
use half::slice::HalfFloatSliceExt;
use model::state::host::{HostState, Page, Rows as KvRows, Side};
use model::state::{KvType, PAGE, PageId};
use model::{AttentionWeights, GRID, ResidentMatrix, Spec};

use crate::embed;
use crate::gemm::{self, Input, Product, Then};
use crate::kernels::{Block, Codes, Kernels, Row, TILE, WIDEST};
use crate::memory::{Out, Rows, as_integers, carve};
use crate::open::{Buffers, Open};
use crate::team::{Scratch, Team};

type LayerWeights = AttentionWeights<ResidentMatrix, Vec<f32>>;

/// Rows of a cell that attend together, in single precision, and in integers at least.
const TILE_ROWS: usize = 16;

/// Pieces of work for each thread, below which rows are cut into smaller tiles.
const UNITS: usize = 8;

/// Rows handed to a kernel at once.
const CHUNK: usize = 32;

/// Parts of a block: queries (later the mixed output), gates, keys, values.
pub(crate) fn parts(spec: &Spec, rows: usize) -> [usize; 4] {
    let attention = &spec.attention;
    let (queries, kv) = (rows * attention.query_dim(), rows * attention.kv_dim());
    [queries, queries, kv, kv]
}

/// Cosines, then sines, of the rotation of every row of a pass: [rows][rope_dims].
pub(crate) fn rotations(spec: &Spec, open: &mut Open) {
    let attention = &spec.attention;
    let (dims, half) = (attention.rope_dims, attention.rope_dims / 2);
    let frequencies: Vec<f64> =
        (0..half).map(|i| attention.rope_base.powf(-((2 * i) as f64) / dims as f64)).collect();
    for run in &open.pass.runs {
        for row in run.rows.clone() {
            let (cos, sin) = open.buffers.rope[row * dims..(row + 1) * dims].split_at_mut(half);
            for ((cos, sin), frequency) in cos.iter_mut().zip(sin).zip(&frequencies) {
                let angle = run.position(row) as f64 * frequency;
                (*cos, *sin) = (angle.cos() as f32, angle.sin() as f32);
            }
        }
    }
}

/// Norm, input projections, q/k norms, rotation; writes keys and values. `layer` counts attention layers.
pub(crate) fn project(
    team: &mut Team,
    spec: &Spec,
    (norm_weight, weights): (&[f32], &LayerWeights),
    host: &mut HostState,
    open: &mut Open,
    (layer, rows): (usize, Range<usize>),
) {
    let (cols, count, attention) = (spec.hidden, rows.len(), &spec.attention);
    let (queries, kv, dim) = (attention.query_dim(), attention.kv_dim(), attention.head_dim);
    let Buffers { hidden, norm, whole_norm, codes, block, rope, .. } = &mut open.buffers;
    let norm = Buffers::block_norm(norm, *whole_norm, rows.start, cols);
    let codes = &mut codes[rows.start * Codes::per_row(cols)..];
    let x = Rows::new(&hidden[rows.start * cols..], cols, count);
    embed::norm(team, x, (norm_weight, spec.rms_eps), norm, codes);
    let x =
        Input::with(team, Rows::new(norm, cols, count), Rows::new(codes, Codes::per_row(cols), count), cols);
    let [q, gate, k, v] = carve(block, parts(spec, count));
    let outs = [Out::new(q, queries), Out::new(gate, queries), Out::new(k, kv), Out::new(v, kv)];
    let matrices = [&weights.query, &weights.gate, &weights.key, &weights.value];
    let products =
        [0, 1, 2, 3].map(|i| Product { weights: matrices[i].into(), x, out: outs[i], then: Then::Store });
    gemm::dense(team, &products);

    let mut places: Vec<(usize, Vec<KvPage>)> = Vec::new();
    for (index, _) in open.pass.runs_in(rows.clone()) {
        let pages = open.state.runs[index].pages.iter().map(|&page| KvPage::new(host, page)).collect();
        places.push((index, pages));
    }
    let ranges = |side, head| host.head_range(layer, side, head).start;
    let [q, _, k, v] = outs;
    let (kernels, rope) = (team.kernels, &rope[..]);
    team.split(count, |part, _| {
        for row in part {
            let at = rows.start + row;
            let rotation = &rope[at * attention.rope_dims..][..attention.rope_dims];
            let (index, pages) =
                places.iter().find(|(i, _)| open.pass.runs[*i].rows.contains(&at)).expect("runs cover rows");
            let position = open.pass.runs[*index].position(at);
            let (page, offset) = (&pages[position / PAGE], position % PAGE * dim);
            for head in 0..attention.heads {
                // SAFETY: each row belongs to one member.
                let head = unsafe { q.part(row, head * dim, dim) };
                normalise(kernels, head, &weights.query_norm, spec.rms_eps, rotation);
            }
            for head in 0..attention.kv_heads {
                // SAFETY: each row belongs to one member, and so does its position in the pages, which no
                // other sequence reads.
                unsafe {
                    let (key, value) = (k.part(row, head * dim, dim), v.part(row, head * dim, dim));
                    normalise(kernels, key, &weights.key_norm, spec.rms_eps, rotation);
                    page.store(ranges(Side::Key, head) + offset, key);
                    page.store(ranges(Side::Value, head) + offset, value);
                }
            }
        }
    });
}

/// RMS norm of a head, then the rotation of its leading dimensions.
fn normalise(kernels: &Kernels, head: &mut [f32], weight: &[f32], eps: f32, rotation: &[f32]) {
    let scale = 1.0 / ((kernels.dot)(head, head) / head.len() as f32 + eps).sqrt();
    head.iter_mut().zip(weight).for_each(|(x, w)| *x = *x * scale * w);
    let (cos, sin) = rotation.split_at(rotation.len() / 2);
    let (low, rest) = head.split_at_mut(cos.len());
    for (((a, b), cos), sin) in low.iter_mut().zip(rest).zip(cos).zip(sin) {
        (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
    }
}

/// A page that several threads write, each its own positions.
enum KvPage {
    F16(*mut f16, usize),
    F32(*mut f32, usize),
}

// SAFETY: access goes through `KvPage::store`, whose callers promise disjoint parts.
unsafe impl Send for KvPage {}
// SAFETY: as above.
unsafe impl Sync for KvPage {}

impl KvPage {
    fn new(host: &mut HostState, page: PageId) -> KvPage {
        match host.page_mut(page) {
            Page::F16(data) => KvPage::F16(data.as_mut_ptr(), data.len()),
            Page::F32(data) => KvPage::F32(data.as_mut_ptr(), data.len()),
        }
    }

    /// Stores numbers from `at` on, rounded to the type of the page.
    ///
    /// # Safety
    /// The page must be alive and nobody else may use this part of it.
    unsafe fn store(&self, at: usize, row: &[f32]) {
        match *self {
            KvPage::F16(start, len) => {
                assert!(at + row.len() <= len, "outside of the page");
                // SAFETY: inside the page; exclusive by the caller's promise.
                let to = unsafe { std::slice::from_raw_parts_mut(start.add(at), row.len()) };
                to.convert_from_f32_slice(row);
            }
            KvPage::F32(start, len) => {
                assert!(at + row.len() <= len, "outside of the page");
                // SAFETY: as above.
                let to = unsafe { std::slice::from_raw_parts_mut(start.add(at), row.len()) };
                to.copy_from_slice(row);
            }
        }
    }
}

/// Some rows of one cell, and the pages of their sequence.
struct Tile<'a> {
    /// First row of the block.
    row: usize,
    rows: usize,
    /// Position of the first row.
    position: usize,
    pages: &'a [PageId],
    /// Whether to compute on integers. A lone row does not, since it would round all keys and values for itself.
    integers: bool,
}

/// Attention over the cache, gated; takes the place of the queries. `layer` counts attention layers.
pub(crate) fn mix(
    team: &mut Team,
    spec: &Spec,
    host: &HostState,
    open: &mut Open,
    (layer, rows): (usize, Range<usize>),
) {
    let attention = &spec.attention;
    let mut block = std::mem::take(&mut open.buffers.block);
    let [q, gate, ..] = carve(&mut block, parts(spec, rows.len()));
    let width = attention.head_dim.next_multiple_of(TILE);
    let wanted = team.kernels.int_attention.is_fast && !team.exact;
    let integers = wanted && host.shape().kv == KvType::F16 && width <= WIDEST;
    // The more rows, the fewer times are keys and values rounded.
    let mut tile_rows = if integers { GRID } else { TILE_ROWS };
    while tile_rows > TILE_ROWS && rows.len() / tile_rows * attention.kv_heads < UNITS * team.threads() {
        tile_rows /= 2;
    }
    let mut tiles = Vec::new();
    for (index, part) in open.pass.runs_in(rows.clone()) {
        let run = &open.pass.runs[index];
        for cell in run.cells(part) {
            for first in cell.clone().step_by(tile_rows) {
                tiles.push(Tile {
                    row: first - rows.start,
                    rows: tile_rows.min(cell.end - first),
                    position: run.position(first),
                    pages: &open.state.runs[index].pages,
                    integers: integers && cell.len() > 1,
                });
            }
        }
    }
    // Heads that share a key/value head share the work on it, unless threads would be left idle.
    let mut heads = attention.heads / attention.kv_heads;
    while heads.is_multiple_of(2) && tiles.len() * attention.heads / heads < team.threads() {
        heads /= 2;
    }
    let blocks = |tile: &Tile| (tile.position + tile.rows).div_ceil(GRID);
    let costs: Vec<(usize, u64)> =
        tiles.iter().map(|t| (attention.heads / heads, (t.rows * blocks(t)) as u64)).collect();
    let mixer = Mixer { kernels: team.kernels, spec, host, layer, gate };
    let q = Out::new(q, attention.query_dim());
    team.split_costs(&costs, 1, |tile, units, scratch| {
        for unit in units {
            let heads = unit * heads..(unit + 1) * heads;
            match tiles[tile].integers {
                true => mixer.attend_integers(&tiles[tile], heads, q, scratch),
                false => mixer.attend(&tiles[tile], heads, q, scratch),
            }
        }
    });
    open.buffers.block = block;
}

/// Keys or values of some positions: [positions][dim].
#[derive(Clone, Copy)]
enum Positions {
    Numbers(*const f32),
    Halves(*const f16),
}

struct Mixer<'a> {
    kernels: &'static Kernels,
    spec: &'a Spec,
    host: &'a HostState,
    layer: usize,
    gate: &'a [f32],
}

impl Mixer<'_> {
    /// Attention of a tile's rows with some query heads of one key/value head, block after block of
    /// absolute positions, with the softmax corrected as it goes.
    fn attend(&self, tile: &Tile, heads: Range<usize>, q: Out, scratch: &mut Scratch) {
        let (attention, kernels) = (&self.spec.attention, self.kernels);
        let dim = attention.head_dim;
        let pairs = tile.rows * heads.len();
        let lens = [pairs * GRID, pairs * dim, 2 * pairs, GRID * dim, GRID * dim];
        scratch.work.reserve(lens.iter().map(|len| len.next_multiple_of(16)).sum());
        let [scores, out, sums, keys, values] = carve(&mut scratch.work, lens);
        let (largest, sums) = sums.split_at_mut(pairs);
        out.fill(0.0);
        largest.fill(f32::NEG_INFINITY);
        sums.fill(0.0);
        let kv_head = heads.start / (attention.heads / attention.kv_heads);
        let place = |pair: usize| (tile.row + pair / heads.len(), (heads.start + pair % heads.len()) * dim);
        let scale = 1.0 / (dim as f32).sqrt();
        let lone = tile.rows == 1;

        for start in (0..tile.position + tile.rows).step_by(GRID) {
            let page = tile.pages[start / PAGE];
            let most = GRID.min(tile.position + tile.rows - start);
            let from = (start % PAGE, most, dim);
            let key = self.block(self.host.rows(page, self.layer, Side::Key, kv_head), from, (lone, keys));
            for (i, scores) in scores.chunks_mut(CHUNK * GRID).enumerate() {
                let mut starts = [std::ptr::null(); CHUNK];
                let rows = scores.len() / GRID;
                for (j, start) in starts[..rows].iter_mut().enumerate() {
                    let (row, column) = place(i * CHUNK + j);
                    // SAFETY: these heads of the tile's rows belong to this unit alone.
                    *start = unsafe { q.part(row, column, dim).as_ptr() };
                }
                // SAFETY: a block has GRID rows, whatever those beyond `most` hold; so have scores columns.
                unsafe {
                    let (x, n) = (&starts[..rows], (most.next_multiple_of(4), dim));
                    let out = (scores.as_mut_ptr(), GRID);
                    match key {
                        Positions::Numbers(key) => (kernels.dot_form)(x, (key, dim), n, out, false),
                        Positions::Halves(key) => (kernels.dot_half)(x, (key, dim), n, out, false),
                    }
                }
            }
            for (pair, scores) in scores.chunks_exact_mut(GRID).enumerate() {
                // Causal: positions up to the row's own.
                let seen = GRID.min(tile.position + pair / heads.len() + 1 - start);
                let (scores, beyond) = scores.split_at_mut(seen);
                let (new, correction, sum) = (kernels.softmax_block)(scores, scale, largest[pair]);
                beyond.fill(0.0);
                largest[pair] = new;
                sums[pair] = sums[pair] * correction + sum;
                out[pair * dim..(pair + 1) * dim].iter_mut().for_each(|o| *o *= correction);
            }
            let value = self.host.rows(page, self.layer, Side::Value, kv_head);
            let value = self.block(value, from, (lone, values));
            // SAFETY: scores are [pairs][GRID], values [most][dim], out [pairs][dim].
            unsafe {
                let (shape, a, out) = ((pairs, most, dim), (scores.as_ptr(), GRID), (out.as_mut_ptr(), dim));
                match value {
                    Positions::Numbers(value) => (kernels.sum_form)(shape, a, (value, dim), out, true),
                    Positions::Halves(value) => (kernels.sum_half)(shape, a, (value, dim), out, true),
                }
            }
        }
        for (pair, out) in out.chunks_exact(dim).enumerate() {
            let (row, column) = place(pair);
            // SAFETY: as above; the queries are not needed any more.
            let to = unsafe { q.part(row, column, dim) };
            to.copy_from_slice(out);
            let gate = &self.gate[row * attention.query_dim() + column..][..dim];
            (kernels.gate)(to, 1.0 / sums[pair], gate);
        }
    }

    /// As [`Mixer::attend`], on integers.
    fn attend_integers(&self, tile: &Tile, heads: Range<usize>, q: Out, scratch: &mut Scratch) {
        let (attention, functions) = (&self.spec.attention, self.kernels.int_attention);
        let (dim, pairs) = (attention.head_dim, tile.rows * heads.len());
        let width = dim.next_multiple_of(TILE);
        let block = GRID * width / 2;
        let lens = [pairs * width / 2, pairs * GRID / 2, block, block, pairs * width];
        scratch.work.reserve(lens.iter().map(|len| len.next_multiple_of(16)).sum());
        let [queries, weights, keys, values, out] = carve(&mut scratch.work, lens);
        let [queries, weights, keys, values] = [queries, weights, keys, values].map(as_integers);
        let mut block = Block::new(width, keys, values);
        out.fill(0.0);
        let kv_head = heads.start / (attention.heads / attention.kv_heads);
        let place = |pair: usize| (tile.row + pair / heads.len(), (heads.start + pair % heads.len()) * dim);
        let round = |(pair, query): (usize, &mut [i16])| {
            let (row, column) = place(pair);
            // SAFETY: these heads of the tile's rows belong to this unit alone.
            let scale = (functions.round)(unsafe { q.part(row, column, dim) }, query);
            Row::new(scale / (dim as f32).sqrt())
        };
        let mut rows: Vec<Row> = queries.chunks_exact_mut(width).enumerate().map(round).collect();

        for start in (0..tile.position + tile.rows).step_by(GRID) {
            let page = tile.pages[start / PAGE];
            let most = GRID.min(tile.position + tile.rows - start);
            let half = |side| match self.host.rows(page, self.layer, side, kv_head) {
                KvRows::F16(rows) => &rows[start % PAGE * dim..][..most * dim],
                KvRows::F32(_) => unreachable!("integers are for half precision"),
            };
            (functions.pack)(half(Side::Key), half(Side::Value), dim, &mut block);
            for (pair, row) in rows.iter_mut().enumerate() {
                // Causal: positions up to the row's own.
                row.seen = GRID.min(tile.position + pair / heads.len() + 1 - start);
            }
            (functions.weigh)(&block, queries, &mut rows, weights);
            (functions.sum)(&block, &rows, weights, out);
        }
        for (pair, (out, summed)) in out.chunks_exact(width).zip(&rows).enumerate() {
            let (row, column) = place(pair);
            // SAFETY: as above; the queries are not needed any more.
            let to = unsafe { q.part(row, column, dim) };
            to.copy_from_slice(&out[..dim]);
            let gate = &self.gate[row * attention.query_dim() + column..][..dim];
            (self.kernels.gate)(to, 1.0 / summed.sum, gate);
        }
    }

    /// `most` positions of a page from `first` on, GRID rows readable: where they lie, or decoded to `room`, which is
    /// worth it unless they are for a `lone` row. The same numbers either way.
    fn block(
        &self,
        rows: KvRows,
        (first, most, dim): (usize, usize, usize),
        (lone, room): (bool, &mut [f32]),
    ) -> Positions {
        match rows {
            KvRows::F32(rows) => Positions::Numbers(rows[first * dim..(first + GRID) * dim].as_ptr()),
            KvRows::F16(rows) if lone => Positions::Halves(rows[first * dim..(first + GRID) * dim].as_ptr()),
            KvRows::F16(rows) => {
                (self.kernels.widen)(&rows[first * dim..(first + most) * dim], &mut room[..most * dim]);
                Positions::Numbers(room.as_ptr())
            }
        }
    }
}

/// Output projection and residual.
pub(crate) fn out(team: &mut Team, spec: &Spec, weights: &LayerWeights, open: &mut Open, rows: Range<usize>) {
    let (count, queries) = (rows.len(), spec.attention.query_dim());
    let Buffers { hidden, block, block_codes, .. } = &mut open.buffers;
    let [mixed, ..] = carve(block, parts(spec, count));
    let x = Input::round(team, Rows::new(mixed, queries, count), queries, block_codes);
    let out = Out::new(&mut hidden[rows.start * spec.hidden..], spec.hidden);
    gemm::dense(team, &[Product { weights: (&weights.out).into(), x, out, then: Then::Add }]);
}
