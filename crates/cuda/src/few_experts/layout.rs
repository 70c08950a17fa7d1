//! Where everything lies in the shared memory of a block of single rows' experts.

use model::Spec;
use quant::Type;

use crate::driver::Device;
use crate::few::{FEW, SLACK, SPAN, TILE};
use crate::sources::{Target, whole_table_bytes};
use crate::weights::Triplet;

/// Where everything lies in a block's shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(super) struct Layout {
    pub(super) groups: i32,
    slots: i32,
    down_slots: i32,
    slot_bytes: i32,
    high_at: i32,
    down_bytes: i32,
    table_at: [i32; 4],
    planes_at: i32,
    scratch_at: i32,
    sums_at: i32,
    items_at: i32,
    shared_at: i32,
    down_at: i32,
    slots_at: i32,
    /// Of several rows: the keys of their choice; tiles that a job has at most, and jobs of a row; tiles of the shared expert that a block
    /// has, and where its sums are; where its outputs are handed over, behind inner numbers.
    keys_at: i32,
    job_tiles: i32,
    pub(super) row_jobs: i32,
    shared_tiles: i32,
    shared_sums_at: i32,
    shared_room: i32,
}

/// What a layout depends on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    /// Of gate, up, down, and the shared expert's down matrix.
    types: [Type; 4],
    /// Rows of x, and numbers of one.
    pub(super) rows: usize,
    cols: usize,
    /// Inner numbers of an expert, and of the shared one.
    width: usize,
    shared_cols: usize,
    experts: usize,
    used: usize,
}

/// What a launch has to fit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gpu {
    /// Bytes of shared memory of a block.
    pub(super) shared: usize,
    /// The same of what kernels were compiled for, which says how large their tables are.
    compiled_for: usize,
    /// Multiprocessors that blocks may wait for one another on.
    pub(super) processors: usize,
}

/// Warps that share the columns of an item of gate and up, and items at a time in a block, at most.
pub(super) const PARTS: usize = 4;
const MOST_GROUPS: usize = 5;

/// Slots of a group, at most.
const MOST_SLOTS: usize = 4;

/// Tiles of a job of several rows for each group of warps, at most: a thread adds up one output.
const MOST_TILES: usize = 32 * PARTS / TILE;

/// Bytes of planes of a span of x.
const PLANES: usize = 544;

/// Bytes of zeros that shared memory begins with.
const ZEROS: usize = 256;

/// Bytes of a line of memory. What lies in lines of shared memory as it does in the host's comes over the link twice as fast.
pub(crate) const LINE: usize = 128;

/// Shared memory of a block beside what is asked for: the kernel's own, and the system's.
pub(super) const STATIC: usize = 10 << 10;

/// Bytes of `rows` neighbouring rows of `cols` weights in whole lines; plain numbers are read where they lie.
fn lines(ty: Type, rows: usize, cols: usize) -> usize {
    match ty.block_len() {
        1 => 0,
        _ => (LINE - 1 + rows * ty.bytes(cols).expect("rows are whole blocks")).next_multiple_of(LINE),
    }
}

impl Gpu {
    /// For one of `present` backends.
    pub(crate) fn of(device: &Device, target: &Target, present: usize) -> Gpu {
        let processors = (device.processors as usize / present).max(1);
        Gpu { shared: device.shared, compiled_for: target.shared, processors }
    }
}

impl Shape {
    /// Of one row and a layer's experts, and the shared one's down matrix: its type and columns.
    pub(super) fn of(spec: &Spec, [gate, up, down]: Triplet, (shared, shared_cols): (Type, usize)) -> Shape {
        Shape {
            types: [gate.ty, up.ty, down.ty, shared],
            rows: 1,
            cols: spec.hidden,
            width: gate.rows,
            shared_cols,
            experts: spec.moe.experts,
            used: spec.moe.used,
        }
    }

    /// The layout, and what it takes.
    pub(super) fn layout(&self, gpu: Gpu) -> (Layout, usize) {
        let of_block = match self.rows {
            1 => self.items().div_ceil(gpu.processors),
            _ => self.items().div_ceil(self.jobs(gpu).1),
        };
        // One round of all groups needs no second slot.
        let most = if self.rows == 1 { MOST_SLOTS } else { 2 };
        let enough = |groups: usize| of_block.div_ceil(groups).next_power_of_two().min(most);
        let mut ways = (1..=MOST_GROUPS).rev().flat_map(|groups| {
            [4, 2, 1]
                .into_iter()
                .filter(move |&slots| slots <= enough(groups))
                .map(move |slots| (groups, slots))
        });
        // Two slots a group, unless one is enough; all groups before that.
        let found = ways.find(|&(groups, slots)| {
            slots >= enough(groups).min(2) && self.place(groups, slots, gpu).1 + STATIC <= gpu.shared
        });
        let (groups, slots) = found.unwrap_or((1, 1));
        self.place(groups, slots, gpu)
    }

    /// Of several rows: the most tiles of a block, and blocks that share a row.
    fn jobs(&self, gpu: Gpu) -> (usize, usize) {
        let tiles = self.cols.div_ceil(TILE);
        let blocks = (gpu.processors / self.rows).clamp(1, tiles.max(self.items()));
        (tiles.div_ceil(blocks), blocks)
    }

    /// Items of a row.
    pub(super) fn items(&self) -> usize {
        self.used * self.width.div_ceil(8)
    }

    /// With as many rows of `left` as there is shared memory for, and blocks for their jobs, or one, which `check` found room for; bits
    /// do not depend on it.
    /// Their layout, and what it takes.
    pub(super) fn most_rows(&self, left: usize, gpu: Gpu) -> (Shape, Layout, usize) {
        let mut shape = Shape { rows: left.min(FEW), ..*self };
        loop {
            let (layout, bytes) = shape.layout(gpu);
            let most = MOST_TILES as i32 * layout.groups;
            let few = layout.job_tiles <= most && shape.rows <= gpu.processors;
            if (few && bytes + STATIC <= gpu.shared) || shape.rows == 1 {
                return (shape, layout, bytes);
            }
            shape.rows -= 1;
        }
    }

    /// Where tables of gate, up, down and the shared expert lie (0: there is none), and where they end.
    fn tables(&self, gpu: Gpu) -> ([usize; 4], usize) {
        let [gate, up, down, of_shared] = self.types;
        let table = |ty: Type| whole_table_bytes(ty, gpu.compiled_for);
        let second = if gate == up { 0 } else { table(gate) };
        let tables = (second + table(up)).max(table(down));
        let shared_table = if table(of_shared) == 0 { 0 } else { ZEROS + tables };
        ([ZEROS, ZEROS + second, ZEROS, shared_table], ZEROS + tables + table(of_shared))
    }

    fn place(&self, groups: usize, slots: usize, gpu: Gpu) -> (Layout, usize) {
        let [gate, up, down, of_shared] = self.types;
        let several = self.rows > 1;
        let (table_at, planes_at) = self.tables(gpu);
        let scratch_at = planes_at + self.cols.div_ceil(SPAN) * PLANES;
        let warps = PARTS * groups;
        let sums_at = scratch_at + (warps + 1) * PLANES;
        let [spans, shared_spans] = [self.width, self.shared_cols].map(|width| width.div_ceil(SPAN));
        let keys = 4 * self.experts;
        let (job_tiles, row_jobs) = if several { self.jobs(gpu) } else { (1, 1) };
        let shared_tiles = self.cols.div_ceil(TILE).div_ceil(self.rows * row_jobs);
        let shared_tiles = if several { shared_tiles } else { 1 };
        let shared_sums_at = sums_at + 4 * job_tiles * self.used * spans * TILE;
        let items_at = shared_sums_at + 4 * shared_tiles * self.rows * shared_spans * TILE;
        let items_at =
            (if several { items_at } else { items_at.max(scratch_at + keys) }).next_multiple_of(16);
        let items = groups * 2 * PARTS * TILE * 4;
        let items = if several { items.max(keys) } else { items };
        let shared_at = (items_at + items).next_multiple_of(LINE);
        let down_at = shared_at + lines(of_shared, shared_tiles * TILE, self.shared_cols);
        let down_bytes = lines(down, TILE, self.width);
        let down_groups = warps / spans.min(2);
        let slots_at = down_at + down_groups * down_bytes;
        let high_at = lines(gate, 8, self.cols);
        let slot_bytes = high_at + lines(up, 8, self.cols);
        let all = groups * slots * slot_bytes;
        // The first slot of each group is beside those of gate and up.
        let more = all / (down_groups * down_bytes).max(1);
        let turns =
            (self.rows * self.used).div_ceil(down_groups) * self.cols.div_ceil(TILE).div_ceil(gpu.processors);
        let fits = |slots: &usize| slots - 1 <= more && *slots <= turns.next_power_of_two();
        let down_slots = [4, 2].into_iter().find(fits).unwrap_or(1);
        let layout = Layout {
            groups: groups as i32,
            slots: slots as i32,
            down_slots: down_slots as i32,
            slot_bytes: slot_bytes as i32,
            high_at: high_at as i32,
            down_bytes: down_bytes as i32,
            table_at: table_at.map(|at| at as i32),
            planes_at: planes_at as i32,
            scratch_at: scratch_at as i32,
            sums_at: sums_at as i32,
            items_at: items_at as i32,
            shared_at: shared_at as i32,
            down_at: down_at as i32,
            slots_at: slots_at as i32,
            keys_at: items_at as i32,
            job_tiles: job_tiles as i32,
            row_jobs: row_jobs as i32,
            shared_tiles: shared_tiles as i32,
            shared_sums_at: shared_sums_at as i32,
            shared_room: (FEW * self.used * self.width) as i32,
        };
        (layout, slots_at + all + SLACK)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn constants_are_those_of_the_kernel() {
        for (name, value) in [
            ("PARTS", PARTS),
            ("MOST_GROUPS", MOST_GROUPS),
            ("MOST_SLOTS", MOST_SLOTS),
            ("PLANES", PLANES),
            ("ZEROS", ZEROS),
            ("LINE", LINE),
            ("FEW", FEW),
            ("TILE", TILE),
            ("SPAN", SPAN),
        ] {
            let sources = [
                include_str!("../../kernels/few_experts.cuh"),
                include_str!("../../kernels/planes.cuh"),
                include_str!("../../kernels/lines.cuh"),
                include_str!("../../kernels/few.cuh"),
                include_str!("../../kernels/spans.cuh"),
            ];
            assert_eq!(crate::sources::constant(&sources, name), value, "{name}");
        }
    }

    fn of_80b(types: [Type; 4], rows: usize) -> Shape {
        Shape { types, rows, cols: 2048, width: 512, shared_cols: 512, experts: 512, used: 10 }
    }

    fn gpu(shared: usize, processors: usize) -> Gpu {
        Gpu { shared, compiled_for: shared, processors }
    }

    /// Mixes of types of the 80B's files, and extremes.
    fn mixes() -> Vec<[Type; 4]> {
        use Type as T;
        vec![
            [T::IQ2_XXS, T::IQ2_XXS, T::IQ2_XXS, T::Q8_0],
            [T::IQ2_XXS, T::IQ2_XXS, T::IQ2_XS, T::Q8_0],
            [T::IQ3_XXS, T::IQ3_XXS, T::IQ3_S, T::Q8_0],
            [T::IQ1_M, T::IQ1_M, T::IQ2_XS, T::Q4_K],
            [T::IQ2_S, T::IQ2_S, T::MXFP4, T::IQ4_XS],
            [T::IQ4_XS, T::IQ4_NL, T::Q6_K, T::Q8_0],
            [T::Q6_K, T::Q6_K, T::Q6_K, T::IQ4_XS],
            [T::Q8_0, T::Q8_0, T::Q8_0, T::Q8_0],
            [T::F32, T::F32, T::F32, T::F32],
        ]
    }

    #[test]
    fn layouts_fit_every_gpu() {
        for shared in [99 << 10, 163 << 10, 227 << 10] {
            for processors in [16, 46, 72, 108, 132, 170] {
                for types in mixes() {
                    for left in 1..=2 * FEW {
                        let (shape, layout, bytes) =
                            of_80b(types, 1).most_rows(left, gpu(shared, processors));
                        let rows = shape.rows;
                        assert!((1..=left.min(FEW)).contains(&rows));
                        assert_eq!((layout, bytes), of_80b(types, rows).layout(gpu(shared, processors)));
                        assert!(
                            bytes + STATIC <= shared,
                            "{types:?}, {rows} rows: {bytes} of {shared} bytes"
                        );
                        assert!((1..=MOST_GROUPS as i32).contains(&layout.groups));
                        for slots in [layout.slots, layout.down_slots] {
                            assert!([1, 2, 4].contains(&slots), "{slots} slots");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn wider_models_fit_or_are_refused() {
        use Type as T;
        let needed = |hidden, width, ty, shared: usize| {
            let shape = Shape { cols: hidden, width, shared_cols: width, ..of_80b([ty, ty, ty, T::Q8_0], 1) };
            shape.layout(gpu(shared, 46)).1 + STATIC
        };
        for (hidden, width, ty, fits_99) in [
            (3072, 1024, T::IQ2_XXS, true),
            (4096, 1024, T::IQ2_XXS, true),
            (3072, 1024, T::Q8_0, false),
            (4096, 1024, T::Q6_K, false),
            (8192, 1024, T::Q4_K, false),
        ] {
            assert_eq!(needed(hidden, width, ty, 99 << 10) <= 99 << 10, fits_99, "{hidden} of {ty}");
            assert!(needed(hidden, width, ty, 227 << 10) <= 227 << 10, "{hidden} of {ty}");
        }
    }

    #[test]
    fn all_groups_are_there_for_the_80b_on_an_h200() {
        let types = mixes()[0];
        let layout = |rows| of_80b(types, rows).layout(gpu(227 << 10, 132)).0;
        // 640 items on 132 multiprocessors: one round. Eight rows: more than one slot of each group.
        assert_eq!((layout(1).groups, layout(1).slots), (5, 1));
        assert_eq!((layout(8).groups, layout(8).slots), (5, 2));
        assert!(layout(8).down_slots > 1);
    }

    #[test]
    fn fewer_rows_where_there_is_little_shared_memory() {
        use Type as T;
        assert_eq!(of_80b(mixes()[0], 1).most_rows(16, gpu(163 << 10, 108)).0.rows, FEW);
        assert_eq!(of_80b(mixes()[0], 1).most_rows(16, gpu(99 << 10, 128)).0.rows, FEW);
        // Few multiprocessors as well: jobs of several rows are long.
        assert_eq!(of_80b(mixes()[0], 1).most_rows(16, gpu(99 << 10, 46)).0.rows, 2);
        let rows =
            of_80b([T::IQ2_S, T::IQ3_XXS, T::MXFP4, T::IQ4_XS], 1).most_rows(16, gpu(99 << 10, 46)).0.rows;
        assert!((1..FEW).contains(&rows), "{rows} rows");
    }

    #[test]
    fn parts_of_shared_memory_follow_each_other() {
        for shared in [99 << 10, 227 << 10] {
            for types in mixes() {
                for rows in [1, 2, 3, 8] {
                    let shape = of_80b(types, rows);
                    let (l, bytes) = shape.layout(gpu(shared, 132));
                    let table = |i: usize| whole_table_bytes(types[i], shared) as i32;
                    let warps = PARTS as i32 * l.groups;
                    // Tables of gate, up and down, of which the last one comes when the others are not needed any more.
                    assert!(types[0] == types[1] || l.table_at[1] >= l.table_at[0] + table(0));
                    for i in 0..3 {
                        let end = if table(3) > 0 { l.table_at[3] } else { l.planes_at };
                        assert!(l.table_at[i] + table(i) <= end);
                    }
                    // 0 says that there is none.
                    assert_eq!(table(3) == 0, l.table_at[3] == 0, "{types:?}");
                    assert!(l.table_at[3] + table(3) <= l.planes_at);
                    assert!(l.planes_at + (8 * PLANES) as i32 <= l.scratch_at);
                    assert!(l.scratch_at + (warps + 1) * PLANES as i32 <= l.sums_at);
                    // Sums of a job's tiles with ten experts of two spans, then those of the shared expert's tiles, of all rows.
                    let sums = l.job_tiles * (20 * TILE * 4) as i32;
                    assert!(l.sums_at + sums <= l.shared_sums_at);
                    let of_shared = l.shared_tiles * (rows * 2 * TILE * 4) as i32;
                    assert!(l.shared_sums_at + of_shared <= l.items_at);
                    assert!(rows == 1 || l.job_tiles * l.row_jobs >= 128);
                    assert!(l.shared_tiles * l.row_jobs * rows as i32 >= 128 || rows == 1);
                    // The keys of a choice lie where nothing else is yet.
                    let keys = if rows == 1 { l.scratch_at..l.items_at } else { l.keys_at..l.shared_at };
                    assert!(keys.len() >= 512 * 4);
                    assert!(l.items_at + l.groups * 2 * (PARTS * TILE * 4) as i32 <= l.shared_at);
                    assert!(l.down_at + warps / 2 * l.down_bytes <= l.slots_at);
                    let slots = (l.groups * l.slots * l.slot_bytes)
                        .max(warps / 2 * (l.down_slots - 1) * l.down_bytes);
                    assert!((l.slots_at + slots) as usize <= bytes);
                    assert_eq!(l.scratch_at % 16, 0);
                    for at in [l.down_at, l.shared_at, l.slots_at, l.high_at, l.slot_bytes, l.down_bytes] {
                        assert_eq!(at as usize % LINE, 0);
                    }
                }
            }
        }
    }
}
