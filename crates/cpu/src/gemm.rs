//! Products of activations with weights in file form.
//!
//! out[r, n] = Σ_k x[r, k] · W[n, k]. The unit of work is a panel of [`PANEL`] weight rows: it is decoded
//! once, into memory near the thread, and meets all rows of its group while it is there. Dense matrices are
//! one group, experts one group each.
//!
//! The sum over k is cut every [`K_BLOCK`] columns; inside a block the kernel fixes the order, and blocks are
//! added in order. So a row's products depend on that row and the weights alone, however many rows come
//! with it and whoever computes them.
//!
//! Inputs that come rounded to integers meet quantised weights as integers ([`integers`]), everything else
//! is multiplied in single precision.

mod integers;

use std::ops::Range;

pub(crate) use integers::{Input, rounds};
use model::ResidentMatrix;
use quant::Type;

use crate::kernels::{Codes, GROUP, GROUPS, Kernels, PANEL};
use crate::memory::{Out, Rows};
use crate::team::{Scratch, Team};

/// Rows that meet a panel together: their products stay in the first cache.
const CHUNK: usize = 32;

/// Rows whose products are handed on together, at most.
const MOST_ROWS: usize = if CHUNK > integers::CHUNK { CHUNK } else { integers::CHUNK };

/// Panels that rows meet in turn, at most.
const PANELS: usize = 16;

/// Panels of a dense matrix that all rows meet in turn, so that rows are read once for all of them, times
/// blocks of columns: less than half of a second cache.
const PANEL_BLOCKS: usize = 64;

/// The same in single precision, where panels take more room.
const WIDE_PANEL_BLOCKS: usize = 16;

/// Panels of a second half that the rows of an expert meet together: a line of the sum for each.
const DOWN_PANELS: usize = 4;

/// Panels of each matrix that make a unit of a first half: as many as make a group of what follows.
const GATED_PANELS: usize = GROUP / PANEL;

/// Columns whose products are summed in registers: with a panel of them, half of a first cache. A multiple
/// of every block length.
const K_BLOCK: usize = 512;

/// From so many rows on, outputs are too many for the caches and go past them.
const STREAM_ROWS: usize = 256;

/// Up to so many rows, `F32` weights are used where they lie: copying them would take longer than using them.
const IN_PLACE_ROWS: usize = 4;

/// Cost of decoding a panel, in rows multiplied with it.
const DECODE_ROWS: usize = 8;

/// A weight matrix in file form, [rows = outputs, cols = inputs].
#[derive(Clone, Copy)]
pub(crate) struct Weights<'a> {
    /// Type of its blocks.
    pub(crate) ty: Type,
    /// Outputs.
    pub(crate) rows: usize,
    /// Inputs.
    pub(crate) cols: usize,
    /// The blocks, row by row.
    pub(crate) bytes: &'a [u8],
}

impl<'a> From<&'a ResidentMatrix> for Weights<'a> {
    fn from(matrix: &'a ResidentMatrix) -> Weights<'a> {
        Weights { ty: matrix.ty, rows: matrix.rows, cols: matrix.cols, bytes: &matrix.bytes }
    }
}

impl<'a> Weights<'a> {
    /// Panel number `index`; beyond the last one, a panel without rows.
    fn panel(&self, index: usize) -> Weights<'a> {
        let row_bytes = self.bytes.len() / self.rows;
        let rows = (index * PANEL).min(self.rows)..((index + 1) * PANEL).min(self.rows);
        let bytes = &self.bytes[rows.start * row_bytes..rows.end * row_bytes];
        Weights { rows: rows.len(), bytes, ..*self }
    }

    /// The blocks of some columns of a row; `columns` starts and ends between blocks.
    fn blocks(&self, row: usize, columns: &Range<usize>) -> &'a [u8] {
        let row_bytes = self.bytes.len() / self.rows;
        let at = |column: usize| column / self.ty.block_len() * self.ty.block_bytes();
        &self.bytes[row * row_bytes..][at(columns.start)..at(columns.end)]
    }

    /// The numbers of the panel from column `first` on, if they can be used where they lie.
    fn in_place(&self, first: usize) -> Option<*const f32> {
        let start: *const f32 = self.bytes[first * size_of::<f32>()..].as_ptr().cast();
        let usable = cfg!(target_endian = "little") && self.rows.is_multiple_of(4) && start.is_aligned();
        usable.then_some(start)
    }
}

/// What becomes of a product.
#[derive(Clone, Copy)]
pub(crate) enum Then<'a> {
    /// It is stored.
    Store,
    /// It is added to what is there.
    Add,
    /// Each row is multiplied by its factor and stored.
    Scale(&'a [f32]),
}

/// A dense product.
pub(crate) struct Product<'a> {
    /// The weights.
    pub(crate) weights: Weights<'a>,
    /// The inputs.
    pub(crate) x: Input<'a>,
    /// Where the outputs go, one row for each of `x`.
    pub(crate) out: Out,
    /// What becomes of them.
    pub(crate) then: Then<'a>,
}

/// Several dense products in one region.
pub(crate) fn dense(team: &mut Team, products: &[Product]) {
    let kernels = team.kernels;
    let costs: Vec<(usize, u64)> = products
        .iter()
        .map(|p| (p.weights.rows.div_ceil(2 * PANEL), ((p.x.count() + DECODE_ROWS) * p.weights.cols) as u64))
        .collect();
    team.split_costs(&costs, PANELS / 2, |index, units, scratch| {
        let Product { weights, x, out, then } = &products[index];
        let room = if x.codes_for(&[*weights]).is_some() { PANEL_BLOCKS } else { WIDE_PANEL_BLOCKS };
        let pairs = (room / weights.cols.div_ceil(K_BLOCK) / 2).clamp(1, PANELS / 2);
        let most = 2 * pairs;
        for first in (2 * units.start..2 * units.end).step_by(most) {
            let set = PanelSet::of(weights, first..(first + most).min(2 * units.end));
            panels(kernels, scratch, &set, *x, |rows, tile, stride| {
                for (row, from) in rows.zip(tile.chunks_exact(stride)) {
                    let from = &from[..set.rows()];
                    // SAFETY: these columns of the output belong to this unit alone.
                    let to = unsafe { out.part(row, first * PANEL, from.len()) };
                    match then {
                        Then::Store if x.count() >= STREAM_ROWS => (kernels.stream)(from, to),
                        Then::Store => to.copy_from_slice(from),
                        // SAFETY: as above.
                        Then::Add => unsafe {
                            (kernels.add_rows)((from, from.len()), from.len(), &[to.as_mut_ptr()], &[1.0]);
                        },
                        Then::Scale(by) => to.iter_mut().zip(from).for_each(|(to, x)| *to = x * by[row]),
                    }
                }
            });
        }
    });
}

/// Panels that the same rows are multiplied with, in pairs.
struct PanelSet<'a> {
    panels: [Weights<'a>; PANELS],
    count: usize,
    /// Bytes from a panel to the one that is probably decoded after it by way of its place.
    ahead: usize,
}

impl<'a> PanelSet<'a> {
    /// Panels that lie one after the other.
    fn of(weights: &Weights<'a>, range: Range<usize>) -> PanelSet<'a> {
        let panels = std::array::from_fn(|i| weights.panel(range.start + i));
        PanelSet { panels, count: range.len(), ahead: 2 * panels[0].bytes.len() }
    }

    /// The panels of two matrices, one of each in turn.
    fn of_both(gate: &Weights<'a>, up: &Weights<'a>, range: Range<usize>) -> PanelSet<'a> {
        let panels = std::array::from_fn(|i| [gate, up][i % 2].panel(range.start + i / 2));
        PanelSet { panels, count: 2 * range.len(), ahead: panels[0].bytes.len() }
    }

    fn panels(&self) -> &[Weights<'a>] {
        &self.panels[..self.count]
    }

    /// Weight rows of all panels.
    fn rows(&self) -> usize {
        self.panels().iter().map(|panel| panel.rows).sum()
    }
}

/// The first half of a gated network for one group of rows: SiLU(gate · x) · (up · x).
pub(crate) struct GateUp<'a> {
    /// [width, hidden].
    pub(crate) gate: Weights<'a>,
    /// [width, hidden].
    pub(crate) up: Weights<'a>,
    /// The group's rows.
    pub(crate) x: Input<'a>,
    /// Row of the output where the group begins.
    pub(crate) first: usize,
}

/// Where first halves go.
#[derive(Clone, Copy)]
pub(crate) enum Inner {
    /// In single precision.
    Numbers(Out),
    /// Rounded.
    Codes(Out<Codes>),
}

/// The first halves of gated networks, all groups in one region.
pub(crate) fn gate_up(team: &mut Team, groups: &[GateUp], out: Inner) {
    let kernels = team.kernels;
    let costs: Vec<(usize, u64)> = groups
        .iter()
        .map(|g| {
            let units = g.gate.rows.div_ceil(GATED_PANELS * PANEL);
            (units, ((g.x.count() + DECODE_ROWS) * g.gate.cols) as u64)
        })
        .collect();
    team.split_costs(&costs, PANELS, |index, units, scratch| {
        let GateUp { gate, up, x, first } = &groups[index];
        let count = gate.rows.div_ceil(GATED_PANELS * PANEL);
        for unit in units {
            if let Some(next) = groups.get(index + 1) {
                let rows = next.x.count();
                next.x.prefetch(kernels, unit * rows / count..(unit + 1) * rows / count);
            }
            let set = PanelSet::of_both(gate, up, GATED_PANELS * unit..GATED_PANELS * (unit + 1));
            panels(kernels, scratch, &set, *x, |rows, tile, stride| match out {
                Inner::Codes(out) => {
                    let mut codes = [std::ptr::null_mut(); MOST_ROWS];
                    for (codes, row) in codes.iter_mut().zip(rows.clone()) {
                        *codes = out.at(first + row, unit / GROUPS);
                    }
                    // SAFETY: this group of these rows belongs to this unit alone.
                    unsafe { (kernels.gated)(tile, stride, &codes[..rows.len()], unit % GROUPS) };
                }
                Inner::Numbers(out) => {
                    for (row, tile) in rows.zip(tile.chunks_exact_mut(stride)) {
                        for (i, both) in tile.chunks_exact_mut(2 * PANEL).enumerate() {
                            let (gates, ups) = both.split_at_mut(PANEL);
                            let count = set.panels[2 * i].rows;
                            if count == 0 {
                                break;
                            }
                            (kernels.swiglu)(&mut gates[..count], &ups[..count]);
                            let column = (GATED_PANELS * unit + i) * PANEL;
                            // SAFETY: these columns of the group's rows belong to this unit alone.
                            let to = unsafe { out.part(first + row, column, count) };
                            to.copy_from_slice(&gates[..count]);
                        }
                    }
                }
            });
        }
    });
}

/// The second half of a gated network for one group of rows.
pub(crate) struct Down<'a> {
    /// [hidden, width].
    pub(crate) weights: Weights<'a>,
    /// What the first half made of the group's rows.
    pub(crate) x: Input<'a>,
    /// Row of the sum for each row of the group.
    pub(crate) rows: &'a [u32],
    /// Factor of each row.
    pub(crate) factors: &'a [f32],
}

/// The second halves of gated networks, all groups in one region: sum[row] += factor · (weights · x), in the
/// order of `groups`. With `residual`, the complete `sum` joins it.
///
/// Threads own columns of the sum, so that its order does not depend on them.
pub(crate) fn down(
    team: &mut Team,
    groups: &[Down],
    hidden: usize,
    sum: Out,
    residual: Option<(Out, usize)>,
) {
    let kernels = team.kernels;
    // Every piece goes through the inner rows of all groups.
    let columns = [(hidden.div_ceil(2 * PANEL), 1)];
    team.split_costs(&columns, PANELS, |_, units, scratch| {
        for Down { weights, x, rows: to_rows, factors } in groups {
            for first in (2 * units.start..2 * units.end).step_by(DOWN_PANELS) {
                let set = PanelSet::of(weights, first..(first + DOWN_PANELS).min(2 * units.end));
                panels(kernels, scratch, &set, *x, |rows, tile, stride| {
                    let mut to = [std::ptr::null_mut(); MOST_ROWS];
                    for (to, &row) in to.iter_mut().zip(&to_rows[rows.clone()]) {
                        *to = sum.at(row as usize, first * PANEL);
                    }
                    let (to, factors) = (&to[..rows.len()], &factors[rows]);
                    // SAFETY: these columns of the sum belong to this thread alone.
                    unsafe { (kernels.add_rows)((tile, stride), set.rows(), to, factors) };
                });
            }
        }
        if let Some((residual, rows)) = residual {
            let columns = (units.start * 2 * PANEL).min(hidden)..(units.end * 2 * PANEL).min(hidden);
            for row in 0..rows {
                // SAFETY: these columns of both belong to this thread alone.
                unsafe {
                    let from = sum.part(row, columns.start, columns.len());
                    let to = residual.part(row, columns.start, columns.len()).as_mut_ptr();
                    (kernels.add_rows)((from, from.len()), from.len(), &[to], &[1.0]);
                }
            }
        }
    });
}

/// Multiplies all rows of `x` with some panels. `emit` is given a range of rows and their products:
/// [rows of the range][stride], [`PANEL`] columns for each panel.
fn panels(
    kernels: &Kernels,
    scratch: &mut Scratch,
    set: &PanelSet,
    x: Input,
    emit: impl FnMut(Range<usize>, &mut [f32], usize),
) {
    match x.codes_for(set.panels()) {
        Some(codes) => integers::panels(kernels, scratch, (set.panels(), set.ahead), codes, emit),
        None => {
            let x = x.numbers.expect("inputs of weights that are plain numbers are kept");
            numbers(kernels, scratch, set.panels(), x, emit);
        }
    }
}

/// As [`panels`], in single precision.
fn numbers(
    kernels: &Kernels,
    scratch: &mut Scratch,
    weights: &[Weights],
    x: Rows,
    mut emit: impl FnMut(Range<usize>, &mut [f32], usize),
) {
    let (cols, stride) = (weights[0].cols, weights.len() * PANEL);
    let blocks = cols.div_ceil(K_BLOCK);
    let chunks = x.count().div_ceil(CHUNK);
    // With a single chunk every block is used at once, and its place is taken by the next.
    let kept = if chunks > 1 { blocks } else { 1 };
    let in_place = |w: &Weights| w.ty == Type::F32 && x.count() <= IN_PLACE_ROWS;
    scratch.panel.reserve(weights.len() * kept * PANEL * K_BLOCK);
    scratch.tile.reserve(CHUNK * stride);
    for chunk in 0..chunks {
        let rows = chunk * CHUNK..x.count().min((chunk + 1) * CHUNK);
        for block in 0..blocks {
            let columns = block * K_BLOCK..cols.min((block + 1) * K_BLOCK);
            let mut starts = [std::ptr::null(); CHUNK];
            for (start, row) in starts.iter_mut().zip(rows.clone()) {
                *start = x.row(row, cols)[columns.start..].as_ptr();
            }
            for (p, weights) in weights.iter().enumerate().filter(|(_, w)| w.rows > 0) {
                let place = (p * kept + block % kept) * PANEL * K_BLOCK;
                let panel = &mut scratch.panel[place..][..PANEL * K_BLOCK];
                let lying = if in_place(weights) { weights.in_place(columns.start) } else { None };
                if chunk == 0 && lying.is_none() {
                    decode(kernels, weights, &columns, panel);
                }
                let w = lying.map_or((panel.as_ptr(), K_BLOCK), |start| (start, cols));
                let tile = &mut scratch.tile[p * PANEL..];
                let n = weights.rows.next_multiple_of(4);
                // SAFETY: each start points to the block's columns of a row; the panel has n rows (those
                // behind the last are zeros, and weights in place are a multiple of four) of these columns;
                // the tile has room for the chunk.
                unsafe {
                    let (shape, out) = ((n, columns.len()), (tile.as_mut_ptr(), stride));
                    (kernels.dot_form)(&starts[..rows.len()], w, shape, out, block > 0);
                }
            }
        }
        let len = rows.len() * stride;
        emit(rows, &mut scratch.tile[..len], stride);
    }
}

/// Decodes some columns of a panel: [rows][K_BLOCK], zeros behind the last row up to a multiple of four.
fn decode(kernels: &Kernels, weights: &Weights, columns: &Range<usize>, panel: &mut [f32]) {
    for (row, out) in panel.chunks_exact_mut(K_BLOCK).enumerate().take(weights.rows.next_multiple_of(4)) {
        if row < weights.rows {
            (kernels.decode)(weights.ty, weights.blocks(row, columns), &mut out[..columns.len()]);
        } else {
            out[..columns.len()].fill(0.0);
        }
    }
}

#[cfg(test)]
mod tests;
