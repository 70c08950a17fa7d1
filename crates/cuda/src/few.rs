//! Products with few rows: passes of single rows, eight at a time.

use cudarc::driver::DriverError;
use quant::Type;

use crate::Cuda;
use crate::sources::{few_window, table_bytes};
use crate::spans::Way;
use crate::weights::{Experts, Matrix};

type Done = Result<(), DriverError>;

/// Rows of x in one launch.
pub(crate) const FEW: usize = 8;

/// Outputs of a tile.
pub(crate) const TILE: usize = 16;

/// Warps of a block of `few_rows`; `many_tiles` has half as many.
const WARPS: usize = 16;

/// Columns that are multiplied with whole numbers at a time.
pub(crate) const SPAN: usize = 256;

/// Columns that are in shared memory at a time.
const SEGMENT: usize = 2048;

/// Bytes of shared memory behind tiles, where a decoder may read on.
pub(crate) const SLACK: usize = 512;

#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct FewMatrix {
    at: u64,
    out: u64,
    rows: i32,
    ty: i32,
    pub(crate) row_bytes: i32,
    segment_bytes: i32,
}

/// Parameters of `few_rows` and `many_tiles`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct FewRows {
    pub(crate) matrices: [FewMatrix; 4],
    pub(crate) ends: [i32; 4],
    pub(crate) plain: [FewMatrix; 2],
    pub(crate) plain_rows: i32,
    plain_blocks: i32,
    pub(crate) x: u64,
    pub(crate) numbers: u64,
    pub(crate) index: u64,
    pub(crate) norm: u64,
    pub(crate) normed: u64,
    pub(crate) rounded: u64,
    pub(crate) cols: i32,
    count: i32,
    pub(crate) out_stride: i32,
    pub(crate) add: i32,
    pub(crate) eps: f32,
    room_at: i32,
    table_at: i32,
    stages_at: i32,
    stage_bytes: i32,
    stages: i32,
    /// Of the host alone.
    table_bytes: i32,
}

/// One matrix of all experts, as kernels take it.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct FewExperts {
    at: u64,
    stride: i64,
    places: u64,
    ty: i32,
    row_bytes: i32,
    span: i32,
    plain: i32,
}

/// What is multiplied.
#[derive(Clone, Copy)]
pub(crate) enum Input {
    /// Norms of f32 rows.
    Norm {
        /// Of the rows, or of all rows that `index` chooses from.
        x: u64,
        /// Which rows; 0: all.
        index: u64,
        /// Of the norm.
        weight: u64,
        /// Where normed rows are stored, f32 and bf16; 0: nowhere.
        normed: u64,
        rounded: u64,
    },
    /// bf16 rows, one after the other.
    Numbers(u64),
}

/// A matrix and the address of its results of the first row.
#[derive(Clone, Copy)]
pub(crate) struct Output {
    pub(crate) matrix: Matrix,
    pub(crate) out: u64,
    /// Whether it is multiplied in f32 where its weights are plain numbers.
    pub(crate) exact: bool,
}

/// Matrices whose results lie side by side from `out` on.
pub(crate) fn side_by_side(matrices: &[Matrix], out: u64) -> Vec<Output> {
    let mut column = 0;
    let place = |&matrix: &Matrix| {
        let at = out + 4 * column as u64;
        column += matrix.rows;
        Output { matrix, out: at, exact: false }
    };
    matrices.iter().map(place).collect()
}

/// Bytes of a row of x in shared memory: runs of 32 numbers, 80 bytes apart.
fn row_of_x(cols: usize) -> usize {
    2 * (cols.div_ceil(128) * 4 * 40 + 8)
}

fn row_bytes(ty: Type, cols: usize) -> usize {
    ty.bytes(cols).expect("rows are whole blocks")
}

/// The number by which kernels of these types know one.
fn number_of(types: &[Type], ty: Type) -> i32 {
    types.iter().position(|&known| known == ty).expect("a type of the model") as i32
}

impl Cuda {
    fn few_matrix(&self, matrix: Matrix, out: u64) -> FewMatrix {
        FewMatrix {
            at: matrix.at,
            out,
            rows: matrix.rows as i32,
            ty: number_of(&self.kernels.few_types, matrix.ty),
            row_bytes: row_bytes(matrix.ty, matrix.cols) as i32,
            segment_bytes: row_bytes(matrix.ty, SEGMENT) as i32,
        }
    }

    pub(crate) fn few_experts(&self, experts: Experts) -> FewExperts {
        FewExperts {
            at: experts.at,
            stride: experts.stride as i64,
            places: experts.places,
            ty: number_of(&self.kernels.few_expert_types, experts.ty),
            row_bytes: row_bytes(experts.ty, experts.cols) as i32,
            span: row_bytes(experts.ty, SPAN) as i32,
            plain: i32::from(experts.ty.block_len() == 1),
        }
    }

    /// out[r] (+)= x[r] · weightsᵀ of matrices of one width, for `count` rows; results of rows are `stride` numbers apart.
    pub(crate) fn few(
        &self,
        outputs: &[Output],
        (input, count): (Input, usize),
        stride: usize,
        add: bool,
    ) -> Done {
        let way = Way::of(outputs, input, add);
        let mut first = 0;
        while first < count {
            let p = self.few_parameters(outputs, (input, first), stride, add);
            let left = count - first;
            // Where one row fits, fewer rows do at a time; where it does not, none ever does: the way is the same for all.
            let by_spans = match way {
                Way::Head => self.head_launch(&p, left)?,
                Way::Spans => self.spans_launch(&p, left)?,
                Way::Rows => None,
            };
            first += match by_spans {
                Some(launched) => launched,
                None => self.few_launch(p, left)?,
            };
        }
        Ok(())
    }

    /// Parameters of the launch for the rows from `first` on, but for what depends on their number.
    fn few_parameters(
        &self,
        outputs: &[Output],
        (input, first): (Input, usize),
        stride: usize,
        add: bool,
    ) -> FewRows {
        let cols = outputs[0].matrix.cols;
        let mut p = FewRows {
            cols: cols as i32,
            out_stride: stride as i32,
            add: i32::from(add),
            eps: self.model.spec.rms_eps,
            ..FewRows::default()
        };
        let (mut coded, mut plain, mut tiles) = (0, 0, 0);
        for output in outputs {
            let matrix = output.matrix;
            let one = self.few_matrix(matrix, output.out + 4 * (first * stride) as u64);
            if output.exact && matrix.ty.block_len() == 1 {
                p.plain[plain] = one;
                p.plain_rows += one.rows;
                plain += 1;
            } else {
                p.matrices[coded] = one;
                tiles += matrix.rows.div_ceil(TILE);
                p.ends[coded..].fill(tiles as i32);
                let stage = TILE * few_window(one.row_bytes.min(one.segment_bytes) as usize);
                p.stage_bytes = p.stage_bytes.max(stage as i32);
                p.table_bytes = p.table_bytes.max(table_bytes(matrix.ty) as i32);
                coded += 1;
            }
        }
        let per_row = |at: u64, bytes: usize| if at == 0 { 0 } else { at + (first * cols * bytes) as u64 };
        match input {
            Input::Norm { x, index, weight, normed, rounded } => {
                p.x = if index == 0 { per_row(x, 4) } else { x };
                p.index = if index == 0 { 0 } else { index + 4 * first as u64 };
                (p.norm, p.normed, p.rounded) = (weight, per_row(normed, 4), per_row(rounded, 2));
            }
            Input::Numbers(at) => p.numbers = per_row(at, 2),
        }
        p
    }

    /// Launches the products of as many of `left` rows as fit into shared memory, and returns how many those are.
    fn few_launch(&self, p: FewRows, left: usize) -> Result<usize, DriverError> {
        let (cols, processors, tiles) =
            (p.cols as usize, self.device.processors as usize, p.ends[3] as usize);
        // Which kernel depends on the matrices alone, for it decides on the order of sums.
        let many = tiles > 2 * processors;
        let (kernel, warps, each) = match many {
            true => (&self.kernels.many_tiles, WARPS / 2, 2),
            false => (&self.kernels.few_rows, WARPS, 1),
        };
        let plain_blocks = (p.plain_rows as usize).div_ceil(warps);
        let of_plain = if plain_blocks > 0 { 4 * cols } else { 0 };
        let room = 4 * warps * TILE * FEW;
        let (stage, table) = (p.stage_bytes as usize, p.table_bytes as usize);
        let mut count = left.min(FEW);
        loop {
            let room_at = (count * row_of_x(cols).max(of_plain)).next_multiple_of(16);
            let stages_at = room_at + room + table;
            // Behind the last stage a decoder may read on.
            let fits = |stages: usize, blocks: usize| {
                blocks * (stages_at + stages * stage + SLACK + 1024) <= self.device.shared
            };
            let stages = if fits(4, each) { 4 } else { 2 };
            if !fits(stages, 1) && count > 1 {
                count /= 2;
                continue;
            }
            let p = FewRows {
                count: count as i32,
                plain_blocks: plain_blocks as i32,
                room_at: room_at as i32,
                table_at: (room_at + room) as i32,
                stages_at: stages_at as i32,
                stages: stages as i32,
                ..p
            };
            let grid = tiles.min(each * processors) + plain_blocks;
            let shared = stages_at + stages * stage + SLACK;
            self.device.launch(kernel, (grid, 1, 1), 32 * warps, shared, &p)?;
            return Ok(count);
        }
    }
}
