//! Products with few rows by spans of 256 columns (`few_spans.cu`, `few_head.cu`): matrices side by side, and the head.

use cudarc::driver::DriverError;

use crate::Cuda;
use crate::few::{FEW, FewMatrix, FewRows, Input, Output, SLACK, SPAN, TILE};
use crate::sources::has_spans;

/// Bytes of a span of a row of x (`SPAN_X` of the kernels).
const SPAN_X: usize = 704;

/// Tiles of a block of `few_spans` at most (`MOST_TILES` of the kernels).
const MOST_TILES: usize = 8;

/// Rows that one product of four columns a row can take; twice as many with two.
const SET: usize = 4;

/// Warps of a block of `few_spans`, and of `few_head`.
const WARPS: usize = 16;
const HEAD_WARPS: usize = 8;

/// Stages that a block of `few_head` copies to at most, and floats of the sums that meet.
const HEAD_STAGES: usize = 8;
const HEAD_SUMS: usize = 1024;

/// Shared memory that a block cannot have for itself: what a block takes, and what is declared in the kernels.
const RESERVED: usize = 1280;

/// How few rows are multiplied with matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// By spans, of one matrix of very many rows.
    Head,
    /// By spans.
    Spans,
    /// By steps of 128 columns: of any type.
    Rows,
}

impl Way {
    /// It depends on the matrices and what is multiplied alone, for it decides on the order of sums.
    pub(crate) fn of(outputs: &[Output], input: Input, add: bool) -> Way {
        let is_plain = |output: &&Output| output.exact && output.matrix.ty.block_len() == 1;
        let coded = outputs.iter().filter(|output| !is_plain(output));
        let mut plain = outputs.iter().filter(is_plain).map(|output| output.matrix.ty);
        let first = plain.next();
        let spans =
            coded.clone().all(|output| has_spans(output.matrix.ty)) && plain.all(|ty| Some(ty) == first);
        match (outputs, input) {
            _ if !spans => Way::Rows,
            (&[output], Input::Norm { normed: 0, rounded: 0, .. }) if !add && !is_plain(&&output) => {
                Way::Head
            }
            _ => Way::Spans,
        }
    }
}

/// Parameters of `few_spans`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct SpanRows {
    matrices: [FewMatrix; 4],
    ends: [i32; 4],
    plain: [FewMatrix; 2],
    x: u64,
    numbers: u64,
    index: u64,
    norm: u64,
    normed: u64,
    rounded: u64,
    cols: i32,
    count: i32,
    out_stride: i32,
    add: i32,
    eps: f32,
    reciprocal: f32,
    each: i32,
    plain_rows: i32,
    plain_each: i32,
    sums_at: i32,
    plain_at: i32,
    tiles_at: i32,
}

/// Parameters of `few_head`.
#[derive(Clone, Copy)]
#[repr(C)]
struct HeadRows {
    rows: SpanRows,
    stage_bytes: i32,
    stages: i32,
}

/// Bytes from one row of `bytes` to the next in shared memory (`pitch` of the kernels).
fn pitch(bytes: usize) -> usize {
    let around = if bytes.is_multiple_of(16) { 0 } else { 29 };
    ((bytes + around).div_ceil(32) | 1) * 32
}

/// Bytes of a tile of rows of `bytes` in shared memory.
fn tile_bytes(bytes: i32) -> usize {
    TILE * pitch(bytes as usize)
}

impl SpanRows {
    /// Without what depends on the launch.
    fn of(p: &FewRows) -> SpanRows {
        SpanRows {
            matrices: p.matrices,
            ends: p.ends,
            plain: p.plain,
            x: p.x,
            numbers: p.numbers,
            index: p.index,
            norm: p.norm,
            normed: p.normed,
            rounded: p.rounded,
            cols: p.cols,
            out_stride: p.out_stride,
            add: p.add,
            eps: p.eps,
            reciprocal: 1.0 / p.cols as f32,
            plain_rows: p.plain_rows,
            ..SpanRows::default()
        }
    }

    fn spans(&self) -> usize {
        (self.cols as usize).div_ceil(SPAN)
    }

    /// Bytes of the `each` tiles of a block, at most.
    fn most_bytes(&self, each: usize) -> usize {
        let of_tile = |tile: usize| {
            let matrix = self.ends.iter().position(|&end| tile < end as usize);
            matrix.map_or(0, |matrix| tile_bytes(self.matrices[matrix].row_bytes))
        };
        let tiles = self.ends[3] as usize;
        let of_block = |first: usize| (first..first + each).map(of_tile).sum();
        (0..tiles).step_by(each).map(of_block).max().unwrap_or(0)
    }

    /// Lays out the shared memory of a block of `warps`, for `count` rows and `sums` tiles that are added up together, of which
    /// `plain` plain rows. Returns its bytes without tiles.
    fn place(&mut self, count: usize, warps: usize, sums: usize, plain: usize) -> usize {
        let x = count * self.spans() * SPAN_X;
        let plain_each = plain.next_multiple_of(4); // which are multiplied together
        let plain_at = x + 4 * sums * warps.min(self.spans()) * TILE * count;
        let parts = 4 * FEW * self.spans();
        let tiles_at =
            (plain_at + plain_each * (parts + self.plain[0].row_bytes as usize)).next_multiple_of(128);
        self.count = count as i32;
        self.plain_each = plain_each as i32;
        self.sums_at = x as i32;
        self.plain_at = plain_at as i32;
        self.tiles_at = tiles_at as i32;
        tiles_at
    }
}

impl Cuda {
    /// Launches the products of as many of `left` rows as fit into shared memory, and returns how many those are.
    pub(crate) fn spans_launch(&self, p: FewRows, left: usize) -> Result<usize, DriverError> {
        let p = SpanRows::of(&p);
        let (tiles, processors) = (p.ends[3] as usize, self.device.processors as usize);
        let mut count = left.min(FEW);
        loop {
            let most = tiles.div_ceil(processors).clamp(1, MOST_TILES);
            let grid = |each: usize| {
                let plain = (p.plain_rows as usize).min(processors);
                tiles.div_ceil(each).max(plain)
            };
            let fitting = (1..=most).rev().find_map(|each| {
                let mut placed = p;
                let plain = (p.plain_rows as usize).div_ceil(grid(each));
                let shared = placed.place(count, WARPS, each, plain) + p.most_bytes(each) + SLACK;
                placed.each = each as i32;
                (shared + RESERVED <= self.device.shared).then_some((placed, each, shared))
            });
            let Some((p, each, shared)) = fitting else {
                assert!(count > 1, "a row of {} columns fits into shared memory", p.cols);
                count /= 2;
                continue;
            };
            let kernel = if count > SET { &self.kernels.more_spans } else { &self.kernels.few_spans };
            self.device.launch(kernel, (grid(each), 1, 1), 32 * WARPS, shared, &p)?;
            return Ok(count);
        }
    }

    /// As [`Cuda::spans_launch`], of one matrix of very many rows.
    pub(crate) fn head_launch(&self, p: FewRows, left: usize) -> Result<usize, DriverError> {
        let mut rows = SpanRows::of(&p);
        let (tiles, stage) = (p.ends[3] as usize, tile_bytes(p.matrices[0].row_bytes));
        let mut count = left.min(FEW);
        loop {
            let each = (HEAD_SUMS / (HEAD_WARPS * TILE * count)).clamp(1, MOST_TILES);
            let at = rows.place(count, HEAD_WARPS, 2 * each, 0);
            rows.each = each as i32;
            let fits = |stages: usize, blocks: usize| {
                blocks * (at + stages * stage + SLACK + RESERVED) <= self.device.shared
            };
            let most = |blocks: usize| (1..=HEAD_STAGES).rev().find(|&stages| fits(stages, blocks));
            let (stages, blocks) = match (most(2), most(1)) {
                (Some(stages @ 2..), _) => (stages, 2),
                (_, Some(stages)) => (stages, 1),
                (_, None) => {
                    assert!(count > 1, "a row of {} columns fits into shared memory", p.cols);
                    count /= 2;
                    continue;
                }
            };
            let p = HeadRows { rows, stage_bytes: stage as i32, stages: stages as i32 };
            let grid = (tiles.min(blocks * self.device.processors as usize), 1, 1);
            let shared = at + stages * stage + SLACK;
            let kernel = if count > SET { &self.kernels.more_head } else { &self.kernels.few_head };
            self.device.launch(kernel, grid, 32 * HEAD_WARPS, shared, &p)?;
            return Ok(count);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_have_room_for_whole_words_around_them_and_lie_in_different_banks() {
        for bytes in 1..5000 {
            let pitch = pitch(bytes);
            // Where rows begin in their first words repeats with 16 of them.
            for row in 0..16 {
                let begin = row * bytes % 16;
                assert!((begin + bytes).next_multiple_of(16) <= pitch, "row {row} of {bytes} bytes");
            }
            let banks = (0..8).map(|row| row * pitch / 32 % 4);
            for bank in 0..4 {
                assert_eq!(banks.clone().filter(|&of_row| of_row == bank).count(), 2, "{bytes} bytes");
            }
        }
    }

    /// Tiles of two matrices, the rows of the second longer.
    fn two_matrices() -> SpanRows {
        let mut rows = SpanRows { ends: [5, 7, 7, 7], cols: 2048, ..SpanRows::default() };
        rows.matrices[0].row_bytes = 1408;
        rows.matrices[1].row_bytes = 2176;
        rows
    }

    #[test]
    fn a_block_has_room_for_the_largest_of_its_tiles() {
        let (short, long) = (tile_bytes(1408), tile_bytes(2176));
        let rows = two_matrices();
        // Blocks of tiles (0 1)(2 3)(4 5)(6); (0 1 2)(3 4 5)(6); all.
        assert_eq!(rows.most_bytes(1), long);
        assert_eq!(rows.most_bytes(2), short + long);
        assert_eq!(rows.most_bytes(3), 2 * short + long);
        assert_eq!(rows.most_bytes(7), 5 * short + 2 * long);
    }

    #[test]
    fn parts_of_shared_memory_follow_each_other() {
        for count in 1..=FEW {
            for (each, plain) in [(1, 0), (6, 0), (1, 3), (2, 4), (8, 5)] {
                let mut rows = two_matrices();
                rows.plain[0].row_bytes = 8192;
                let tiles_at = rows.place(count, WARPS, each, plain);
                assert_eq!(rows.sums_at as usize, count * 8 * SPAN_X);
                assert_eq!(rows.plain_at as usize, rows.sums_at as usize + 4 * each * 8 * TILE * count);
                let plain = plain.next_multiple_of(4);
                assert_eq!(rows.plain_each as usize, plain);
                assert!(tiles_at >= rows.plain_at as usize + plain * (4 * FEW * 8 + 8192));
                assert!(tiles_at.is_multiple_of(128) && rows.tiles_at as usize == tiles_at);
            }
        }
    }
}
