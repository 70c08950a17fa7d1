//! Products with few rows by spans of 256 columns (`few_spans.cu`, `few_head.cu`): matrices side by side, and the head.

use cudarc::driver::DriverError;

use crate::Cuda;
use crate::driver::Function;
use crate::few::{FEW, FewMatrix, FewRows, Input, Output, SLACK, SPAN, TILE};
use crate::kernels::Kernels;
use crate::sources::has_spans;

/// Bytes of a span of a row of x (`SPAN_X` of the kernels).
const SPAN_X: usize = 704;

/// Tiles of a block of `few_spans` at most (`MOST_TILES` of the kernels).
const MOST_TILES: usize = 8;

/// Rows of a quad, which are copied together (`QUAD` of the kernels).
const QUAD: usize = 4;

/// Rows that one product of four columns a row can take; twice as many with two.
const SET: usize = 4;

/// Plain rows that are multiplied together.
const PLAIN: usize = 4;

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
    /// By spans, of one matrix alone: a block goes through tile after tile.
    Head,
    /// By spans.
    Spans,
    /// By steps of 128 columns: of any type, and as long as there are.
    Rows,
}

impl Way {
    /// It depends on the matrices, what is multiplied and the GPU alone, for it decides on the order of sums.
    pub(crate) fn of(outputs: &[Output], input: Input, add: bool) -> Way {
        let is_plain = |output: &&Output| output.exact && output.matrix.ty.block_len() == 1;
        let coded = outputs.iter().filter(|output| !is_plain(output));
        let mut plain = outputs.iter().filter(is_plain).map(|output| output.matrix.ty);
        let first = plain.next();
        let spans =
            coded.clone().all(|output| has_spans(output.matrix.ty)) && plain.all(|ty| Some(ty) == first);
        match (outputs, input) {
            _ if !spans => Way::Rows,
            (_, Input::Numbers(_)) if first.is_some() => Way::Rows,
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
    quads: [i32; 4],
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

/// Bytes from one quad of rows of `row_bytes` to the next in shared memory: a window of whole words of 16 bytes around it, twice an
/// odd number of them, so that rows of four quads lie in different banks.
fn quad_bytes(row_bytes: usize) -> usize {
    let bytes = QUAD * row_bytes;
    let around = if bytes.is_multiple_of(16) { 0 } else { 29 };
    ((bytes + around).div_ceil(32) | 1) * 32
}

/// Bytes of a tile of rows of `row_bytes` in shared memory.
fn tile_bytes(row_bytes: i32) -> usize {
    TILE / QUAD * quad_bytes(row_bytes as usize)
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
            quads: p.matrices.map(|matrix| quad_bytes(matrix.row_bytes as usize) as i32),
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

    /// Lays out the shared memory of a block of `warps`, for `count` rows, `sums` tiles whose sums are kept, and `plain` plain rows.
    /// Returns its bytes without tiles.
    fn place(&mut self, count: usize, warps: usize, sums: usize, plain: usize) -> usize {
        let x = count * self.spans() * SPAN_X;
        let plain_each = plain.next_multiple_of(PLAIN);
        // Behind the parts, what results are added to.
        let plain_at = x + 4 * sums * (warps.min(self.spans()) + 1) * TILE * count;
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

/// A launch of either kernel.
#[derive(Clone, Copy)]
struct Launch<P> {
    p: P,
    grid: usize,
    /// Bytes of shared memory.
    shared: usize,
}

/// The products of `count` rows by spans on a GPU of so many multiprocessors, whose blocks have `room` bytes; `None` if these do not do.
fn by_spans(p: &SpanRows, count: usize, processors: usize, room: usize) -> Option<Launch<SpanRows>> {
    let (tiles, rows) = (p.ends[3] as usize, p.plain_rows as usize);
    let most = tiles.div_ceil(processors).clamp(1, MOST_TILES);
    let launch = |each: usize, least: usize| {
        let grid = tiles.div_ceil(each).max(least);
        let mut p = SpanRows { each: each as i32, ..*p };
        let plain = if rows > 0 { rows.div_ceil(grid) } else { 0 };
        let shared = p.place(count, WARPS, each, plain) + p.most_bytes(each) + SLACK;
        (shared + RESERVED <= room).then_some(Launch { p, grid, shared })
    };
    // Plain rows for each multiprocessor, or if those are too many, as few as are multiplied together.
    let mut launches = [rows.min(processors), rows.div_ceil(PLAIN)]
        .into_iter()
        .flat_map(|least| (1..=most).rev().map(move |each| (each, least)));
    launches.find_map(|(each, least)| launch(each, least))
}

/// The same of one matrix whose tiles go through stages.
fn by_stages(p: &SpanRows, count: usize, processors: usize, room: usize) -> Option<Launch<HeadRows>> {
    let (tiles, stage) = (p.ends[3] as usize, tile_bytes(p.matrices[0].row_bytes));
    let each = (HEAD_SUMS / (HEAD_WARPS * TILE * count)).clamp(1, MOST_TILES);
    let mut rows = SpanRows { each: each as i32, ..*p };
    let at = rows.place(count, HEAD_WARPS, 2 * each, 0);
    let fits = |stages: usize, blocks: usize| blocks * (at + stages * stage + SLACK + RESERVED) <= room;
    let most = |blocks: usize| (1..=HEAD_STAGES).rev().find(|&stages| fits(stages, blocks));
    let (stages, blocks) = match (most(2), most(1)) {
        (Some(stages @ 2..), _) => (stages, 2),
        (_, Some(stages)) => (stages, 1),
        (_, None) => return None,
    };
    let p = HeadRows { rows, stage_bytes: stage as i32, stages: stages as i32 };
    Some(Launch { p, grid: tiles.min(blocks * processors), shared: at + stages * stage + SLACK })
}

/// The most of `left` rows for which there is a launch, and that.
fn most_rows<P>(left: usize, launch: impl Fn(usize) -> Option<Launch<P>>) -> Option<(usize, Launch<P>)> {
    let counts = std::iter::successors(Some(left.min(FEW)), |&count| (count > 1).then_some(count / 2));
    counts.into_iter().find_map(|count| Some((count, launch(count)?)))
}

/// Which of the kernels for one row, for up to [`SET`], and for more takes `count` rows.
fn kernel_for(count: usize) -> usize {
    usize::from(count > 1) + usize::from(count > SET)
}

impl Cuda {
    /// Launches the products of as many of `left` rows as fit into shared memory, and returns how many those are; `None` if not even one does.
    pub(crate) fn spans_launch(&self, p: &FewRows, left: usize) -> Result<Option<usize>, DriverError> {
        let Kernels { single_spans, few_spans, more_spans, .. } = &self.kernels;
        self.launch_most(p, left, ([single_spans, few_spans, more_spans], WARPS), by_spans)
    }

    /// As [`Cuda::spans_launch`], of one matrix alone.
    pub(crate) fn head_launch(&self, p: &FewRows, left: usize) -> Result<Option<usize>, DriverError> {
        let Kernels { few_head, more_head, .. } = &self.kernels;
        self.launch_most(p, left, ([few_head, few_head, more_head], HEAD_WARPS), by_stages)
    }

    /// The same of kernels for one row, for up to [`SET`], and for more.
    fn launch_most<P: Copy>(
        &self,
        p: &FewRows,
        left: usize,
        (kernels, warps): ([&Function; 3], usize),
        launch: impl Fn(&SpanRows, usize, usize, usize) -> Option<Launch<P>>,
    ) -> Result<Option<usize>, DriverError> {
        let (p, processors) = (SpanRows::of(p), self.device.processors as usize);
        let launch = |count| launch(&p, count, processors, self.device.shared);
        let Some((count, Launch { p, grid, shared })) = most_rows(left, launch) else { return Ok(None) };
        self.device.launch(kernels[kernel_for(count)], (grid, 1, 1), 32 * warps, shared, &p)?;
        Ok(Some(count))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quads_have_room_for_whole_words_around_them_and_lie_in_different_banks() {
        for row_bytes in 1..5000 {
            let room = quad_bytes(row_bytes);
            // Where quads begin in their first words repeats with 16 of them.
            for quad in 0..16 {
                let begin = quad * QUAD * row_bytes % 16;
                assert!(
                    (begin + QUAD * row_bytes).next_multiple_of(16) <= room,
                    "quad {quad} of {row_bytes} bytes"
                );
            }
            let mut banks = [0, 1, 2, 3].map(|quad| quad * room / 32 % 4);
            banks.sort_unstable();
            assert_eq!(banks, [0, 1, 2, 3], "{row_bytes} bytes");
        }
    }

    /// What the kernels' sources say a constant is.
    fn of_kernels(name: &str) -> usize {
        let sources = [
            include_str!("../kernels/few.cuh"),
            include_str!("../kernels/spans.cuh"),
            include_str!("../kernels/few_spans.cu"),
            include_str!("../kernels/few_head.cu"),
        ];
        crate::sources::constant(&sources, name)
    }

    #[test]
    fn constants_are_those_of_the_kernels() {
        for (name, value) in [
            ("FEW", FEW),
            ("TILE", TILE),
            ("QUAD", QUAD),
            ("SPAN", SPAN),
            ("SPAN_X", SPAN_X),
            ("MOST_TILES", MOST_TILES),
            ("SPAN_WARPS", WARPS),
            ("HEAD_THREADS", 32 * HEAD_WARPS),
            ("MOST_STAGES", HEAD_STAGES),
        ] {
            assert_eq!(of_kernels(name), value, "{name}");
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

    /// The launch of a layer's router and shared expert, or of its projections, for one row and for eight.
    #[test]
    fn launches_fit_every_gpu_or_are_left_to_others() {
        for room in [99 << 10, 163 << 10, 227 << 10] {
            for processors in [16, 46, 58, 72, 82, 108, 128, 132, 170] {
                for cols in [64, 320, 2048, 4096, 8192, 16384] {
                    for (plain_rows, tiles) in [(0, 772), (0, 128), (513, 64), (513, 0), (9, 1)] {
                        let mut rows = SpanRows { ends: [tiles; 4], cols, plain_rows, ..SpanRows::default() };
                        rows.matrices[0].row_bytes = cols / 32 * 34;
                        rows.plain[0].row_bytes = 4 * cols;
                        for count in [1, 4, 5, 8] {
                            let Some(Launch { p, grid, shared }) = by_spans(&rows, count, processors, room)
                            else {
                                continue;
                            };
                            assert!(shared + RESERVED <= room);
                            assert!(grid * p.each as usize >= tiles as usize);
                            assert!(grid * p.plain_each as usize >= plain_rows as usize);
                            assert!(p.tiles_at as usize + p.most_bytes(p.each as usize) < shared);
                        }
                    }
                }
                // What the 80B's layers need is there on all of these.
                let mut route =
                    SpanRows { ends: [64; 4], cols: 2048, plain_rows: 513, ..SpanRows::default() };
                route.matrices[0].row_bytes = 2176;
                route.plain[0].row_bytes = 8192;
                assert!(by_spans(&route, 1, processors, room).is_some(), "{processors} of {room} bytes");
            }
        }
    }

    #[test]
    fn a_head_of_rows_too_long_is_left_to_others() {
        let mut head = SpanRows { ends: [9496; 4], cols: 2048, ..SpanRows::default() };
        head.matrices[0].row_bytes = 1680;
        let fits = |head: &SpanRows, room: usize| {
            most_rows(8, |count| by_stages(head, count, 132, room)).map(|(count, launch)| {
                assert!(launch.shared + RESERVED <= room);
                count
            })
        };
        assert_eq!(fits(&head, 227 << 10), Some(8));
        assert!(fits(&head, 99 << 10).is_some());
        // A tile takes 53 KiB, a row of x 11.
        (head.cols, head.matrices[0].row_bytes) = (4096, 2 * 1680);
        assert_eq!(fits(&head, 99 << 10), Some(2));
        head.cols = 16_384;
        head.matrices[0].row_bytes = 8 * 1680;
        assert_eq!(fits(&head, 99 << 10), None);
    }

    #[test]
    fn a_kernel_takes_as_many_rows_as_there_are() {
        let most = [1, SET, FEW];
        for count in 1..=FEW {
            let kernel = kernel_for(count);
            assert!(count <= most[kernel] && (kernel == 0 || count > most[kernel - 1]), "{count} rows");
        }
    }

    #[test]
    fn parts_of_shared_memory_follow_each_other() {
        for count in 1..=FEW {
            for (each, plain) in [(1, 0), (6, 0), (1, 3), (2, 4), (8, 5)] {
                let mut rows = two_matrices();
                rows.plain[0].row_bytes = 8192;
                let tiles_at = rows.place(count, WARPS, each, plain);
                assert_eq!(rows.sums_at as usize, count * 8 * SPAN_X);
                assert_eq!(rows.plain_at as usize, rows.sums_at as usize + 4 * each * 9 * TILE * count);
                let plain = plain.next_multiple_of(4);
                assert_eq!(rows.plain_each as usize, plain);
                assert!(tiles_at >= rows.plain_at as usize + plain * (4 * FEW * 8 + 8192));
                assert!(tiles_at.is_multiple_of(128) && rows.tiles_at as usize == tiles_at);
            }
        }
    }
}
