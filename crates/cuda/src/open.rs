//! Open passes and the memory they work in.

use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::DriverError;
use model::state::OpenPass;
use model::{GRID, Limits, Pass, Spec, Stage};

use crate::BLOCK_ROWS;
use crate::attention::{partial_bytes, provided};
use crate::driver::{Device, Room};
use crate::few::FEW;
use crate::graph::Call;
use crate::state::DeviceState;
use crate::uploads::Uploads;

/// A pass between begin and commit.
pub(crate) struct Open {
    pub(crate) pass: Pass,
    pub(crate) state: OpenPass,
    /// Whether every run is a single row, computed by the kernels for those.
    pub(crate) single: bool,
    /// The stage called last and its rows.
    pub(crate) last: Option<(Stage, Range<usize>)>,
    /// Rows that have been routed in the layer at hand.
    pub(crate) routed: usize,
    /// Whether the pairs of the layer at hand are grouped by expert.
    pub(crate) grouped: bool,
    /// Whether a wave of the layer at hand has been summed, in a pass of single rows.
    pub(crate) summed: bool,
    /// Parts of a row's positions provided for in a pass of single rows.
    pub(crate) parts: usize,
    /// Calls that were put off; `None` if they are not.
    pub(crate) deferred: Option<Vec<Call>>,
    pub(crate) tables: Tables,
    pub(crate) buffers: Buffers,
}

/// Addresses of what a pass says about its rows.
#[derive(Clone, Default)]
pub(crate) struct Tables {
    /// Token ids: [rows] u32.
    pub(crate) tokens: u64,
    /// Positions: [rows] u32.
    pub(crate) positions: u64,
    /// Address of the list of pages of each row's sequence: [rows] u64.
    pub(crate) row_pages: u64,
    /// Recurrent slot before and after each row's run: [rows] u64.
    pub(crate) from: u64,
    pub(crate) to: u64,
    /// Address of the list of pages of each run: [pages] u64.
    pub(crate) run_pages: Vec<u64>,
    /// Rows that want logits, rows that want hidden states: u32.
    pub(crate) logits: u64,
    pub(crate) hidden: u64,
}

/// Single rows of a pass whose layers have parts of their own of [`Layered`] memory, at most.
pub(crate) const LAYERED: usize = 16;

/// Memory of which every layer of a pass of few single rows has a part of its own, so that all are there in the end.
#[derive(Default)]
pub(crate) struct Layered {
    room: Room,
    /// Where the part of the layer at hand begins.
    offset: u64,
}

impl Layered {
    /// Turns to a layer of `layers`, for `rows` rows of `bytes` bytes.
    pub(crate) fn turn(
        &mut self,
        device: &Arc<Device>,
        (layer, layers): (usize, usize),
        (rows, bytes): (usize, usize),
    ) -> Result<(), DriverError> {
        let (layer, layers) = if rows <= LAYERED { (layer, layers) } else { (0, 1) };
        self.offset = (layer * rows * bytes) as u64;
        self.room.take(device, layers * rows * bytes).map(drop)
    }

    /// Where the part of the layer at hand begins.
    pub(crate) fn at(&self) -> u64 {
        self.first() + self.offset
    }

    /// Where that of the first layer begins.
    pub(crate) fn first(&self) -> u64 {
        self.room.at()
    }
}

/// Memory of a pass, reused by later ones.
#[derive(Default)]
pub(crate) struct Buffers {
    /// Rows there is room for.
    rows: usize,
    tables: Room,
    /// The residual stream: [rows, hidden] f32.
    pub(crate) hidden: Room,
    /// Normed rows, f32 (of single rows alone) and bf16: [rows, hidden].
    pub(crate) norm: Room,
    pub(crate) rounded: Room,
    /// Sum of shared and routed experts: [rows, hidden] f32.
    pub(crate) sum: Room,
    /// Chosen experts by falling weight, their weights, their order by number: [rows, used].
    pub(crate) ids: Room,
    pub(crate) weights: Room,
    pub(crate) order: Room,
    /// How much of the shared expert a row gets: [rows].
    pub(crate) share: Room,
    /// Pairs of each expert, and to how many of them a place has been given: [2, experts] i32.
    pub(crate) counts: Room,
    /// Pairs by expert, the place of each, their weights in that order: [3, rows · used] u32, u32, f32.
    pub(crate) sorted: Room,
    /// Cosines, then sines of each row: [rows, rope_dims].
    pub(crate) rotations: Room,
    /// Projections of a block: [block rows, columns] f32.
    pub(crate) projected: Room,
    /// Output of a mixer before its output projection: [block rows, columns], bf16.
    pub(crate) mixed: Room,
    /// Of single rows: logits of the router, gate and up of the shared expert, its share.
    pub(crate) gates: Layered,
    /// Final norms of wanted rows, bf16 and f32; logits.
    pub(crate) last_rounded: Room,
    pub(crate) wanted: Room,
    pub(crate) logits: Room,
}

/// Memory that lives for one stage only, shared by all passes.
#[derive(Default)]
pub(crate) struct Scratch {
    /// Decoded weights.
    pub(crate) weights: Room,
    /// Router: activations as sums of two bf16, and logits.
    pub(crate) split: Room,
    pub(crate) logits: Room,
    /// Rows in the order in which experts multiply them, inner rows of experts.
    pub(crate) shuffled: Room,
    pub(crate) inner: Room,
    /// Outputs of pairs.
    pub(crate) pairs: Room,
    /// Experts of a product, and which they are.
    pub(crate) list: Room,
    pub(crate) listed: Vec<u32>,
    pub(crate) tiles: Room,
    /// Addresses of the matrices of a wave's experts: [3, experts] u64.
    pub(crate) places: Room,
    /// What the look-ahead computes: norms, logits, choices.
    pub(crate) ahead: Room,
    /// Convolved rows and what `delta_prepare` makes of them.
    pub(crate) convolved: Room,
    pub(crate) u: Room,
    pub(crate) w: Room,
    pub(crate) p: Room,
    pub(crate) decay: Room,
    pub(crate) out: Room,
    /// Attention of single rows, block by block.
    pub(crate) partial: Room,
}

impl Scratch {
    /// Where everything is that passes of single rows use.
    pub(crate) fn addresses(&self) -> impl Iterator<Item = u64> {
        [&self.inner, &self.partial].into_iter().map(Room::at)
    }
}

/// Columns of the projections of a DeltaNet layer: q | k | v | z | beta | alpha.
pub(crate) fn delta_columns(spec: &Spec) -> usize {
    spec.delta.channels() + spec.delta.value_dim() + 2 * spec.delta.value_heads
}

/// Columns of the projections of an attention layer: q | gate | k | v.
pub(crate) fn attention_columns(spec: &Spec) -> usize {
    2 * spec.attention.query_dim() + 2 * spec.attention.kv_dim()
}

/// Bytes of the buffers of the largest pass and of the scratch, nearly.
pub(crate) fn bytes(spec: &Spec, limits: &Limits) -> usize {
    let rows = limits.pass_rows;
    let block = rows.min(BLOCK_ROWS);
    let columns = delta_columns(spec).max(attention_columns(spec));
    let width = spec.moe.widths.iter().copied().max().unwrap_or(0);
    let per_row = spec.hidden * (2 * 4 + 2 + 2)
        + 4 * spec.attention.rope_dims
        + spec.moe.used * (24 + 2 * width + 2 * spec.hidden);
    let per_block_row = columns * 4
        + 4 * spec.hidden
        + 4 * spec.moe.experts
        + spec.delta.channels() * 2
        + spec.delta.value_dim() * 14;
    let decoded = crate::grouped::decoded_bytes(spec).max(2 * spec.hidden * spec.vocab.max(columns));
    // Of tokens that are written, as many together as kernels take, each at the end of the longest sequence.
    let (single, longest) = (rows.min(FEW), limits.positions.min(spec.context.max(GRID)));
    let partial = partial_bytes(spec, single, provided(longest));
    rows * per_row + block * per_block_row + decoded + partial + 4 * single * spec.hidden
}

impl Buffers {
    /// Makes room for `pass` and uploads its tables.
    pub(crate) fn prepare(
        &mut self,
        (device, uploads): (&Arc<Device>, &mut Uploads),
        (spec, state): (&Spec, &DeviceState),
        pass: &Pass,
        open: &OpenPass,
    ) -> Result<Tables, DriverError> {
        self.reserve(device, spec, pass.rows())?;
        let mut tables = TableBuilder::default();
        tables.push_u32(pass.tokens.iter().copied());
        let positions = tables.push_u32(pass.runs.iter().flat_map(|run| {
            let rows = run.rows.clone();
            rows.map(move |row| run.position(row) as u32)
        }));
        let logits = tables.push_u32(pass.logits.iter().map(|&row| row as u32));
        let hidden = tables.push_u32(pass.hidden.iter().map(|&row| row as u32));
        let runs = || pass.runs.iter().zip(&open.runs);
        let from = tables.push_u64(runs().flat_map(|(run, open)| {
            let at = open.from.map_or(0, |slot| state.slot(slot));
            run.rows.clone().map(move |_| at)
        }));
        let to = tables.push_u64(runs().flat_map(|(run, open)| {
            let at = state.slot(open.to);
            run.rows.clone().map(move |_| at)
        }));
        // What a graph names lies before what grows with the sequences.
        let row_pages = tables.push_u64((0..pass.rows()).map(|_| 0));
        let run_pages: Vec<u64> = (open.runs.iter())
            .map(|run| tables.push_u64(run.pages.iter().map(|page| state.page(page.0))))
            .collect();
        let at = self.tables.take(device, tables.bytes.len().next_power_of_two().max(TABLE_BYTES))?;
        let rows = pass
            .runs
            .iter()
            .zip(&run_pages)
            .flat_map(|(run, pages)| run.rows.clone().map(move |_| at + pages));
        tables.set_u64(row_pages, rows);
        uploads.put(device, &tables.bytes, at)?;
        Ok(Tables {
            tokens: at,
            positions: at + positions,
            row_pages: at + row_pages,
            from: at + from,
            to: at + to,
            run_pages: run_pages.iter().map(|pages| at + pages).collect(),
            logits: at + logits,
            hidden: at + hidden,
        })
    }

    fn reserve(&mut self, device: &Arc<Device>, spec: &Spec, rows: usize) -> Result<(), DriverError> {
        if self.rows >= rows {
            return Ok(());
        }
        let (hidden, used, block) = (rows * spec.hidden, rows * spec.moe.used, rows.min(BLOCK_ROWS));
        let columns = delta_columns(spec).max(attention_columns(spec));
        let mixed = spec.delta.value_dim().max(spec.attention.query_dim());
        for (room, bytes) in [
            (&mut self.hidden, 4 * hidden),
            (&mut self.rounded, 2 * hidden),
            (&mut self.sum, 4 * hidden),
            (&mut self.ids, 4 * used),
            (&mut self.weights, 4 * used),
            (&mut self.order, 4 * used),
            (&mut self.sorted, 12 * used),
            (&mut self.share, 4 * rows),
            (&mut self.counts, 8 * spec.moe.experts),
            (&mut self.rotations, 4 * rows * spec.attention.rope_dims),
            (&mut self.projected, 4 * block * columns),
            (&mut self.mixed, 4 * block * mixed),
        ] {
            room.take(device, bytes)?;
        }
        self.rows = rows;
        Ok(())
    }

    /// Rows there is room for.
    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    /// Where everything is that passes of single rows use.
    pub(crate) fn addresses(&self) -> impl Iterator<Item = u64> {
        let Buffers { tables, hidden, norm, rounded, sum, ids, weights, order, counts, rotations, .. } = self;
        let Buffers { projected, mixed, gates, logits, .. } = self;
        let first = [tables, hidden, norm, rounded, sum, ids, weights, order, counts, rotations];
        first.into_iter().chain([projected, mixed, &gates.room, logits]).map(Room::at)
    }
}

/// Least bytes of the tables of a pass.
const TABLE_BYTES: usize = 64 << 10;

/// Tables of a pass, one after the other.
#[derive(Default)]
struct TableBuilder {
    bytes: Vec<u8>,
}

impl TableBuilder {
    fn push_u32(&mut self, numbers: impl Iterator<Item = u32>) -> u64 {
        let at = self.bytes.len();
        numbers.for_each(|x| self.bytes.extend_from_slice(&x.to_le_bytes()));
        at as u64
    }

    /// Returns the offset, which is a multiple of eight.
    fn push_u64(&mut self, numbers: impl Iterator<Item = u64>) -> u64 {
        self.bytes.resize(self.bytes.len().next_multiple_of(8), 0);
        let at = self.bytes.len();
        numbers.for_each(|x| self.bytes.extend_from_slice(&x.to_le_bytes()));
        at as u64
    }

    /// Fills in what was pushed as zeros.
    fn set_u64(&mut self, at: u64, numbers: impl Iterator<Item = u64>) {
        for (to, x) in self.bytes[at as usize..].chunks_exact_mut(8).zip(numbers) {
            to.copy_from_slice(&x.to_le_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use model::KvType;
    use testkit::{TinyModel, TinyOptions};

    use super::*;

    #[test]
    fn attention_of_single_rows_is_counted_up_to_the_most_parts() {
        let mut spec = TinyModel::new(TinyOptions::default()).model.spec.clone();
        spec.context = 1 << 18;
        let spec = &spec;
        let of = |pass_rows, positions| bytes(spec, &Limits { pass_rows, positions, kv: KvType::F16 });
        // A sum of values, a largest score and a sum of weights: f32, of each row, head and part: 32 positions, or as many more as make
        // 128 parts.
        let part = 4 * spec.attention.heads * (spec.attention.head_dim + 2);
        for (positions, parts) in [(1, 16), (512, 16), (513, 32), (2049, 128), (4096, 128), (131_072, 128)] {
            for (rows, together) in [(1, 1), (8, 8), (2048, 8)] {
                let more = of(rows, positions) - of(rows, 64);
                assert_eq!(more, together * (parts - 16) * part, "{rows} rows, {positions} positions");
            }
        }
        assert!(of(8, 1) >= 8 * 16 * part, "at least sixteen parts are provided for");
        assert_eq!(of(8, 1 << 18), of(8, 1 << 20), "no sequence is longer than the model's context");
        let mut short = spec.clone();
        short.context = 1024;
        let of = |positions| bytes(&short, &Limits { pass_rows: 8, positions, kv: KvType::F16 });
        assert!(of(512) < of(1024) && of(1024) == of(4096), "as above, where there would be parts for more");
    }
}
