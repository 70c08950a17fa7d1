//! Products on integers; see `kernels::int8` for the arithmetic.

use std::ops::Range;

use crate::kernels::{COLUMNS, GEMV_ROWS, GROUP, Group, Kernels, PANEL, Panel, form, is_integer};
use crate::memory::{Out, Rows, reserve};
use crate::team::{Scratch, Team};

use super::Weights;

/// Rows that meet a panel together: several register tiles.
const CHUNK: usize = 48;

/// Groups of columns that a panel covers.
const GROUPS: usize = COLUMNS / GROUP;

/// Whether inputs of so many columns are rounded to integers at all.
pub(crate) fn rounds(team: &Team, cols: usize) -> bool {
    !team.exact && cols.is_multiple_of(GROUP)
}

/// Inputs of products, perhaps rounded to integers too.
#[derive(Clone, Copy)]
pub(crate) struct Input<'a> {
    /// As they are.
    pub(super) numbers: Rows<'a>,
    /// As integers, one group for every [`GROUP`] columns.
    codes: Option<Rows<'a, Group>>,
}

impl<'a> Input<'a> {
    /// Inputs that stay in single precision.
    pub(crate) fn exact(numbers: Rows<'a>) -> Input<'a> {
        Input { numbers, codes: None }
    }

    /// Inputs that were rounded when they were made, if they were: see [`rounds`].
    pub(crate) fn with(team: &Team, numbers: Rows<'a>, codes: Rows<'a, Group>, cols: usize) -> Input<'a> {
        Input { numbers, codes: rounds(team, cols).then_some(codes) }
    }

    /// Rounds inputs of `cols` columns into `codes`.
    pub(crate) fn round(
        team: &mut Team,
        numbers: Rows<'a>,
        cols: usize,
        codes: &'a mut Vec<Group>,
    ) -> Input<'a> {
        if !rounds(team, cols) {
            return Input::exact(numbers);
        }
        let (kernels, per_row) = (team.kernels, cols / GROUP);
        reserve(codes, numbers.count() * per_row, Group::ZERO);
        let out = Out::new(codes, per_row);
        team.split(numbers.count(), |rows, _| {
            for row in rows {
                // SAFETY: each row belongs to one member.
                (kernels.round)(numbers.row(row, cols), unsafe { out.part(row, 0, per_row) });
            }
        });
        Input { numbers, codes: Some(Rows::new(codes, per_row, numbers.count())) }
    }

    /// Some of the rows, which lie one after the other.
    pub(crate) fn part(&self, rows: Range<usize>) -> Input<'a> {
        Input { numbers: self.numbers.part(rows.clone()), codes: self.codes.map(|codes| codes.part(rows)) }
    }

    /// Number of rows.
    pub(super) fn count(&self) -> usize {
        self.numbers.count()
    }

    /// The integers, if the weights are integers too.
    pub(super) fn codes_for(&self, weights: &[Weights]) -> Option<Rows<'a, Group>> {
        self.codes.filter(|_| weights.iter().all(|weights| is_integer(weights.ty)))
    }
}

/// As [`super::panels`], on integers.
pub(super) fn panels<const P: usize>(
    kernels: &Kernels,
    scratch: &mut Scratch,
    weights: [Weights; P],
    x: Rows<Group>,
    mut emit: impl FnMut(Range<usize>, [&mut [f32]; P]),
) {
    if x.count() <= GEMV_ROWS && weights.iter().all(|weights| (kernels.gemv)(weights.ty).is_some()) {
        return few(kernels, scratch, weights, x, emit);
    }
    let ahead = distance(&weights);
    let per_row = weights[0].cols / GROUP;
    let blocks = per_row.div_ceil(GROUPS);
    let chunks = x.count().div_ceil(CHUNK);
    // With a single chunk every block is used at once, and its place is taken by the next.
    let kept = if chunks > 1 { blocks } else { 1 };
    reserve(&mut scratch.panels, P * kept, Panel::ZERO);
    scratch.tile.reserve(P * CHUNK * PANEL);
    for chunk in 0..chunks {
        let rows = chunk * CHUNK..x.count().min((chunk + 1) * CHUNK);
        for block in 0..blocks {
            let groups = block * GROUPS..per_row.min((block + 1) * GROUPS);
            let mut starts = [std::ptr::null(); CHUNK];
            for (start, row) in starts.iter_mut().zip(rows.clone()) {
                *start = x.row(row, per_row)[groups.start..].as_ptr();
            }
            let place = block % kept * P;
            if chunk == 0 {
                for (weights, panel) in weights.iter().zip(&mut scratch.panels[place..]) {
                    fill(kernels, weights, (&groups, ahead), panel);
                }
            }
            let mut tiles = scratch.tile.chunks_exact_mut(CHUNK * PANEL);
            let pairs: [(&Panel, *mut f32); P] = std::array::from_fn(|p| {
                (&scratch.panels[place + p], tiles.next().expect("reserved").as_mut_ptr())
            });
            let (x, used) = (&starts[..rows.len()], weights.iter().filter(|w| w.rows > 0).count());
            let first = form(weights[0].ty);
            // SAFETY: each start points to the block's groups of a row, the tiles have room for the chunk.
            unsafe {
                if weights[..used].iter().all(|w| form(w.ty) == first) {
                    (kernels.int_product)(x, &pairs[..used], (groups.len(), first), block > 0);
                } else {
                    for (pair, weights) in pairs.iter().zip(&weights) {
                        let shape = (groups.len(), form(weights.ty));
                        (kernels.int_product)(x, std::slice::from_ref(pair), shape, block > 0);
                    }
                }
            }
        }
        let mut tiles = scratch.tile.chunks_exact_mut(CHUNK * PANEL);
        emit(
            rows.clone(),
            std::array::from_fn(|_| &mut tiles.next().expect("reserved")[..rows.len() * PANEL]),
        );
    }
}

/// As [`panels`], for few rows: weights are multiplied as they are decoded.
fn few<const P: usize>(
    kernels: &Kernels,
    scratch: &mut Scratch,
    weights: [Weights; P],
    x: Rows<Group>,
    emit: impl FnOnce(Range<usize>, [&mut [f32]; P]),
) {
    let (ahead, per_row, count) = (distance(&weights), weights[0].cols / GROUP, x.count());
    let mut starts = [std::ptr::null(); GEMV_ROWS];
    for (row, start) in starts.iter_mut().enumerate().take(count) {
        *start = x.row(row, per_row).as_ptr();
    }
    scratch.tile.reserve(P * GEMV_ROWS * PANEL);
    let mut tiles = scratch.tile.chunks_exact_mut(GEMV_ROWS * PANEL);
    let tiles = std::array::from_fn(|p| {
        let (weights, tile) = (&weights[p], &mut tiles.next().expect("reserved")[..count * PANEL]);
        let mut rows: [&[u8]; PANEL] = [&[]; PANEL];
        for (row, bytes) in rows.iter_mut().enumerate().take(weights.rows) {
            *bytes = weights.blocks(row, &(0..weights.cols));
        }
        if let Some(gemv) = (kernels.gemv)(weights.ty).filter(|_| weights.rows > 0 && count > 0) {
            let next = weights.bytes.as_ptr().wrapping_add(ahead);
            // SAFETY: each start points to a row as long as the weights'.
            unsafe { gemv(weights.ty, &rows[..weights.rows], &starts[..count], tile, next) };
        }
        tile
    });
    emit(0..count, tiles);
}

/// Bytes from a panel to the one that will probably take its place: both halves of a pair may come from the
/// same matrix.
fn distance(weights: &[Weights]) -> usize {
    let len = weights[0].bytes.len();
    match weights.get(1) {
        Some(other) if other.bytes.as_ptr() == weights[0].bytes.as_ptr_range().end => 2 * len,
        _ => len,
    }
}

/// Decodes some groups of columns of a panel, and asks for the bytes that lie `ahead` of them: rows are far
/// apart, which the processor does not foresee.
fn fill(kernels: &Kernels, weights: &Weights, (groups, ahead): (&Range<usize>, usize), panel: &mut Panel) {
    let columns = groups.start * GROUP..groups.end * GROUP;
    let mut rows: [&[u8]; PANEL] = [&[]; PANEL];
    for (row, bytes) in rows.iter_mut().enumerate().take(weights.rows) {
        *bytes = weights.blocks(row, &columns);
    }
    for bytes in &rows[..weights.rows] {
        for at in (0..bytes.len()).step_by(64) {
            (kernels.prefetch)(bytes.as_ptr().wrapping_add(ahead + at));
        }
    }
    if weights.rows > 0 {
        (kernels.fill)(weights.ty, &rows[..weights.rows], columns.len(), panel);
    }
}

#[cfg(test)]
mod tests;
