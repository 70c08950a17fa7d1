//! Experts of passes of single rows.

use std::sync::Arc;

use cudarc::driver::DriverError;
use model::{Mixer, Spec};
use quant::Type;

use crate::driver::{Buffer, Device};
use crate::fetch::Keep;
use crate::few::{FEW, FewExperts, SLACK, SPAN, TILE};
use crate::moe::{Done, Gates, Mask};
use crate::open::Open;
use crate::sources::{Target, whole_table_bytes};
use crate::weights::{DeviceWeights, Experts, Matrix, Triplet};
use crate::{Cuda, Error};

/// Parameters of `few_experts`.
#[derive(Clone, Copy)]
#[repr(C)]
struct Single {
    mask: Mask,
    gate: FewExperts,
    up: FewExperts,
    down: FewExperts,
    shared: FewExperts,
    logits: u64,
    x: u64,
    ids: u64,
    weights: u64,
    order: u64,
    inner: u64,
    shared_gate: u64,
    shared_up: u64,
    share: u64,
    sum: u64,
    hidden: u64,
    launches: u64,
    ahead: [Ahead; 4],
    inner_room: i32,
    width: i32,
    cols: i32,
    experts: i32,
    used: i32,
    gates_stride: i32,
    count: i32,
    shared_cols: i32,
    first: i32,
    last: i32,
    layout: Layout,
    keep: Keep,
}

/// Bytes that are brought to the second cache while experts are computed, so many by each block.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Ahead {
    at: u64,
    bytes: u32,
    share: u32,
}

impl Ahead {
    fn of(matrix: Matrix, blocks: usize) -> Ahead {
        let bytes = (matrix.rows * matrix.ty.bytes(matrix.cols).expect("rows are whole blocks")) & !15;
        let bytes = bytes.min(AHEAD);
        let share = bytes.div_ceil(blocks).next_multiple_of(16);
        Ahead { at: matrix.at, bytes: bytes as u32, share: share as u32 }
    }
}

/// Bytes of a matrix that are brought ahead, at most: what memory has time for behind the experts' own.
const AHEAD: usize = 6_000_000;

/// The bits of an inner number that is not there yet.
const MARK: u32 = u32::MAX;

/// Where inner numbers of single rows' experts are handed from block to block.
pub(crate) struct Inner {
    /// Of two launches, which have a half by turns, as all others leave it: full of marks; behind them, what counts launches.
    memory: Buffer,
    /// Numbers of a half.
    room: usize,
}

impl Inner {
    /// For any layer of a model.
    pub(crate) fn new(device: &Arc<Device>, spec: &Spec) -> Result<Inner, DriverError> {
        let widest = spec.moe.widths.iter().copied().max().unwrap_or(0);
        let room = FEW * spec.moe.used * widest;
        let memory = device.allocate(4 * (2 * room + 2))?;
        device.upload(&vec![MARK; 2 * room], memory.at)?;
        device.zero(memory.at + 8 * room as u64, 8)?;
        Ok(Inner { memory, room })
    }
}

/// Where everything lies in a block's shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
struct Layout {
    groups: i32,
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
}

/// What a layout depends on.
#[derive(Clone, Copy, Debug)]
struct Shape {
    /// Of gate, up, down, and the shared expert's down matrix.
    types: [Type; 4],
    /// Rows of x, and numbers of one.
    rows: usize,
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
    shared: usize,
    /// The same of what kernels were compiled for, which says how large their tables are.
    compiled_for: usize,
    /// Multiprocessors that blocks may wait for one another on.
    processors: usize,
}

/// Warps that share the columns of an item of gate and up, and items at a time in a block, at most.
const PARTS: usize = 4;
const MOST_GROUPS: usize = 5;

/// Slots of a group, at most.
const MOST_SLOTS: usize = 4;

/// Bytes of planes of a span of x.
const PLANES: usize = 544;

/// Bytes of zeros that shared memory begins with.
const ZEROS: usize = 256;

/// Bytes of a line of memory. What lies in lines of shared memory as it does in the host's comes over the link twice as fast.
pub(crate) const LINE: usize = 128;

/// Shared memory of a block beside what is asked for: the kernel's own, and the system's.
const STATIC: usize = 10 << 10;

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

/// Refuses layers of which not even one row's experts fit a block's shared memory.
pub(crate) fn check(spec: &Spec, weights: &DeviceWeights, gpu: Gpu) -> crate::Result<()> {
    for (triplet, layer) in weights.experts.iter().zip(&weights.dense.layers) {
        let shared = &layer.moe.shared_down;
        let found = Shape::of(spec, *triplet, (shared.ty, shared.cols)).layout(gpu).1 + STATIC;
        if found > gpu.shared {
            let what = "the shared memory that the experts of a layer take, in bytes";
            let expected =
                "no more than a block of this GPU has; other GPUs have more, or use `--backend cpu`";
            return Err(Error::Shape { what, found, expected });
        }
    }
    Ok(())
}

impl Shape {
    /// Of one row and a layer's experts, and the shared one's down matrix: its type and columns.
    fn of(spec: &Spec, [gate, up, down]: Triplet, (shared, shared_cols): (Type, usize)) -> Shape {
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
    fn layout(&self, gpu: Gpu) -> (Layout, usize) {
        let items = self.rows * self.used * self.width.div_ceil(8);
        let of_block = items.div_ceil(gpu.processors);
        // One round of all groups needs no second slot.
        let enough = |groups: usize| of_block.div_ceil(groups).next_power_of_two().min(MOST_SLOTS);
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

    /// With as many rows of `left` as there is shared memory for, or one, which `check` found room for; bits do not depend on it.
    /// Their layout, and what it takes.
    fn most_rows(&self, left: usize, gpu: Gpu) -> (Shape, Layout, usize) {
        let mut shape = Shape { rows: left.min(FEW), ..*self };
        loop {
            let (layout, bytes) = shape.layout(gpu);
            if bytes + STATIC <= gpu.shared || shape.rows == 1 {
                return (shape, layout, bytes);
            }
            shape.rows -= 1;
        }
    }

    fn place(&self, groups: usize, slots: usize, gpu: Gpu) -> (Layout, usize) {
        let [gate, up, down, of_shared] = self.types;
        let table = |ty: Type| whole_table_bytes(ty, gpu.compiled_for);
        let second = if gate == up { 0 } else { table(gate) };
        let up_at = ZEROS + second;
        let tables = (second + table(up)).max(table(down));
        let shared_table = if table(of_shared) == 0 { 0 } else { ZEROS + tables };
        let planes_at = ZEROS + tables + table(of_shared);
        let scratch_at = planes_at + self.rows.min(2) * self.cols.div_ceil(SPAN) * PLANES;
        let warps = PARTS * groups;
        let sums_at = scratch_at + (warps + 1) * PLANES;
        let steps = self.used * self.width.div_ceil(SPAN) + self.shared_cols.div_ceil(SPAN);
        let keys = 4 * self.rows * self.experts;
        let items_at = (sums_at + 4 * self.rows * steps * TILE).max(scratch_at + keys).next_multiple_of(16);
        let shared_at = (items_at + groups * 2 * PARTS * TILE * 4).next_multiple_of(LINE);
        let down_at = shared_at + lines(of_shared, TILE, self.shared_cols);
        let down_bytes = lines(down, TILE, self.width);
        let down_groups = warps / self.width.div_ceil(SPAN).min(2);
        let slots_at = down_at + down_groups * down_bytes;
        let high_at = lines(gate, 8, self.cols);
        let slot_bytes = high_at + lines(up, 8, self.cols);
        let all = groups * slots * slot_bytes;
        // The first slot of each group is beside those of gate and up.
        let more = all / (down_groups * down_bytes).max(1);
        let down_slots = [4, 2].into_iter().find(|slots| slots - 1 <= more).unwrap_or(1);
        let layout = Layout {
            groups: groups as i32,
            slots: slots as i32,
            down_slots: down_slots as i32,
            slot_bytes: slot_bytes as i32,
            high_at: high_at as i32,
            down_bytes: down_bytes as i32,
            table_at: [ZEROS, up_at, ZEROS, shared_table].map(|at| at as i32),
            planes_at: planes_at as i32,
            scratch_at: scratch_at as i32,
            sums_at: sums_at as i32,
            items_at: items_at as i32,
            shared_at: shared_at as i32,
            down_at: down_at as i32,
            slots_at: slots_at as i32,
        };
        (layout, slots_at + all + SLACK)
    }
}

impl Cuda {
    /// A wave of experts of single rows, and with the first one the shared expert.
    pub(crate) fn experts_single(
        &mut self,
        open: &mut Open,
        (layer, triplet): (usize, Triplet),
        (mask, last): (Mask, bool),
    ) -> Done {
        let rows = open.pass.rows();
        let shared = self.weights.dense.layers[layer].moe.shared_down;
        let shared = Experts {
            ty: shared.ty,
            rows: shared.rows,
            cols: shared.cols,
            at: shared.at,
            stride: 0,
            places: 0,
        };
        let first = !open.summed;
        open.summed = true;
        let shape = Shape::of(&self.model.spec, triplet, (shared.ty, shared.cols));
        let gpu = Gpu::of(&self.device, &self.target, self.presence.count());
        let mut row = 0;
        while row < rows {
            let fitting = shape.most_rows(rows - row, gpu);
            let matrices = (triplet, shared);
            self.few_experts_rows(open, (layer, matrices), (row, fitting, gpu), (mask, first, last))?;
            row += fitting.0.rows;
        }
        Ok(())
    }

    /// The same of the rows of a shape, from `row` on.
    fn few_experts_rows(
        &self,
        open: &Open,
        (layer, ([gate, up, down], shared)): (usize, (Triplet, Experts)),
        (row, (shape, layout, bytes), gpu): (usize, (Shape, Layout, usize), Gpu),
        (mask, first, last): (Mask, bool, bool),
    ) -> Done {
        let (spec, buffers, count) = (&self.model.spec, &open.buffers, shape.rows);
        let columns = Gates::of(spec, shared.cols);
        let (used, hidden) = (spec.moe.used, spec.hidden);
        let gates = buffers.gates.at() + 4 * (row * columns.stride) as u64;
        let chosen = 4 * (row * used) as u64;
        let rows = 4 * (row * hidden) as u64;
        // All blocks have to be there at once: they wait for one another's numbers.
        let items = count * used * gate.rows.div_ceil(8);
        let blocks = gpu.processors.min(items.max(hidden.div_ceil(TILE)));
        let p = Single {
            mask,
            gate: self.few_experts(gate),
            up: self.few_experts(up),
            down: self.few_experts(down),
            shared: self.few_experts(shared),
            logits: gates,
            x: buffers.rounded.at() + rows / 2,
            ids: buffers.ids.at() + chosen,
            weights: buffers.weights.at() + chosen,
            order: buffers.order.at() + chosen,
            inner: self.inner.memory.at,
            shared_gate: gates + 4 * columns.gate as u64,
            shared_up: gates + 4 * columns.up as u64,
            share: gates + 4 * columns.share as u64,
            sum: buffers.sum.at() + rows,
            hidden: buffers.hidden.at() + rows,
            launches: self.inner.memory.at + 8 * self.inner.room as u64,
            ahead: if count == 1 { self.ahead(layer + 1, blocks) } else { Default::default() },
            inner_room: self.inner.room as i32,
            width: gate.rows as i32,
            cols: hidden as i32,
            experts: spec.moe.experts as i32,
            used: used as i32,
            gates_stride: columns.stride as i32,
            count: count as i32,
            shared_cols: shared.cols as i32,
            first: i32::from(first),
            last: i32::from(last),
            layout,
            keep: self.keep(open, layer, gate),
        };
        let threads = 32 * (PARTS * layout.groups as usize + 1);
        self.device.launch(&self.kernels.few_experts, (blocks, 1, 1), threads, bytes, &p)
    }

    /// Of the matrices that a layer begins with: what the kernel behind the layer before reads.
    fn ahead(&self, layer: usize, blocks: usize) -> [Ahead; 4] {
        let mut ahead = [Ahead::default(); 4];
        let matrices = match self.weights.dense.layers.get(layer).map(|layer| &layer.mixer) {
            Some(Mixer::Delta(weights)) => vec![weights.qkv, weights.z],
            Some(Mixer::Attention(weights)) => vec![weights.query, weights.gate, weights.key, weights.value],
            None => vec![],
        };
        for (to, matrix) in ahead.iter_mut().zip(matrices) {
            *to = Ahead::of(matrix, blocks);
        }
        ahead
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
                include_str!("../kernels/few_experts.cu"),
                include_str!("../kernels/planes.cuh"),
                include_str!("../kernels/lines.cuh"),
                include_str!("../kernels/few.cuh"),
                include_str!("../kernels/spans.cuh"),
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
        assert_eq!(of_80b(mixes()[0], 1).most_rows(16, gpu(99 << 10, 46)).0.rows, FEW);
        let rows =
            of_80b([T::IQ2_S, T::IQ3_XXS, T::MXFP4, T::IQ4_XS], 1).most_rows(16, gpu(99 << 10, 46)).0.rows;
        assert!((2..FEW).contains(&rows), "{rows} rows");
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
                    assert!(l.planes_at + (rows.min(2) * 8 * PLANES) as i32 <= l.scratch_at);
                    assert!(l.scratch_at + (warps + 1) * PLANES as i32 <= l.sums_at);
                    assert!(l.sums_at + (rows * 22 * TILE * 4) as i32 <= l.items_at);
                    assert!(l.scratch_at + (rows * 512 * 4) as i32 <= l.items_at);
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
