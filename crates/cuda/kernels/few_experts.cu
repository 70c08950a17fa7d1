// Experts of up to eight rows of x, in one kernel: their choice, gate and up, and down, with the shared expert's.
//
// A block stands on each multiprocessor; all of them meet once, when the inner numbers are there. What does not depend on the choice
// (tables, the shared expert's tile) is fetched or made before it is known; behind it each block asks at once for the first matrices
// of both halves of its work. Neighbouring rows of a matrix lie together in a file and come by one copy.
//
// Gate and up: an item is 8 inner numbers of one expert of one row of x. A block has neighbouring items; groups of PARTS warps take
// them in turns, each warp a part of the columns. Each group has a ring of slots for what it multiplies next.
//
// Down: a block has tiles of 16 outputs. Groups of warps take the rows' experts in turns, each warp some spans of 256 inner numbers.
// The last warp multiplies the shared expert's tile, while the others have gate and up.
//
// Shared memory: zeros, tables, a row of x as planes, scratch (planes of each warp, sums of down; before that the keys of `choose`),
// sums of items, the shared expert's tile, the first slots of down, the slots of gate and up, in which more of down come later.

const int PARTS = 4;                       // warps that share the columns of an item
const int MOST_GROUPS = 5;                 // of so many warps in a block
const int EXPERTS_THREADS = 32 * (PARTS * MOST_GROUPS + 1);
const int MOST_SLOTS = 4;                  // of a group
const int MOST_DOWN = PARTS * MOST_GROUPS; // groups of down
const u32 NOTHING = 0xffffffffu;           // no expert of this wave

/// Experts of a wave, one bit each.
struct Mask {
    u32 bits[32];
};

DEVICE bool has(const Mask &mask, u32 expert) { return mask.bits[expert / 32] >> (expert % 32) & 1; }

struct FewExperts {
    Mask mask;
    Experts gate, up, down, shared;         // routed ones, and the down matrix of the shared expert
    const float *logits;                    // [count, …]: rows of `gates_stride` numbers, of which the first are of experts
    const u16 *x;                           // [count, cols] bf16
    u32 *ids;                               // [count, used], and so on: the choice, stored by the first block
    float *weights;
    u32 *order;
    float *inner;                           // [count, used, width]: SiLU(gate · x) ⊙ (up · x)
    const float *shared_gate, *shared_up;   // of the shared expert: [count, …] rows of `gates_stride`, `shared_cols` of each
    const float *share;                     // [count] of rows of `gates_stride`: sigmoid of it times the shared expert's output
    float *sum;                             // [count, cols]: left by the wave before, and for the next
    float *hidden;                          // [count, cols]
    u32 *meeting;                           // how many blocks are there, and how often all were
    int width, cols, experts, used, gates_stride, count, shared_cols;
    int first, last;                        // whether this is the first and the last wave
    int groups, slots, down_slots;          // slots: of each group
    int slot_bytes, high_at, down_bytes;    // of a slot of gate and up, where up begins in it, and of a slot of down
    int table_at[4];                        // of gate, up, down, shared
    int planes_at, scratch_at, sums_at, items_at, shared_at, down_at, slots_at;
};

/// The choice of a pass's rows, and what copies are waited for by.
struct Choice {
    u32 ids[FEW][32], order[FEW][32];
    float weights[FEW][32];
    u32 pairs[FEW * 32];                    // [row][rank]: its expert, or NOTHING
    u64 barriers[MOST_GROUPS * MOST_SLOTS + MOST_DOWN * MOST_SLOTS + 1];
    int odd[MOST_GROUPS * MOST_SLOTS][2];   // bytes from where a copy begins to what it brings
    int down_odd[MOST_DOWN * MOST_SLOTS];
    const u8 *plain[PARTS * MOST_GROUPS + 1][6]; // of each warp, plain matrices of both halves; the first one, then the second one, as both
};

/// How a block's warps share the work.
struct Team {
    int lane, warp, warps;      // warps: but for the last one, of the shared expert
    int group, part;            // of gate and up
    int first, end;             // this block's items
    int down_group, down_part;

    DEVICE Team of(const FewExperts &p) {
        Team team;
        team.lane = threadIdx.x % 32, team.warp = threadIdx.x / 32, team.warps = blockDim.x / 32 - 1;
        team.group = team.warp / PARTS, team.part = team.warp % PARTS;
        u32 all = items_of(p) * p.count * p.used;
        team.first = blockIdx.x * all / gridDim.x, team.end = (blockIdx.x + 1) * all / gridDim.x;
        bool two = down_parts(p) == 2;
        team.down_group = two ? team.warp / 2 : team.warp, team.down_part = two ? team.warp % 2 : 0;
        return team;
    }

    /// Items of an expert of a row.
    DEVICE int items_of(const FewExperts &p) { return (p.width + 7) / 8; }

    /// Spans of inner numbers, those of the shared expert, products of a tile of down with a row, and such tiles.
    DEVICE int spans(const FewExperts &p) { return spans_of(p.width); }
    DEVICE int shared_spans(const FewExperts &p) { return p.first ? spans_of(p.shared_cols) : 0; }
    DEVICE int steps(const FewExperts &p) { return p.used * spans(p) + shared_spans(p); }
    DEVICE int tiles(const FewExperts &p) { return (p.cols + TILE - 1) / TILE; }

    /// Warps that share the spans of a tile, groups of them, and how many pairs each has at most.
    DEVICE int down_parts(const FewExperts &p) { return min(2, spans(p)); }
    DEVICE int down_groups(const FewExperts &p) { return PARTS * p.groups / down_parts(p); }
    DEVICE int down_each(const FewExperts &p) { return (p.count * p.used + down_groups(p) - 1) / down_groups(p); }
};

DEVICE u32 barrier_of(const Choice &choice, int i) { return shared_address(choice.barriers + i); }

const int DOWN_BARRIERS = MOST_GROUPS * MOST_SLOTS, SHARED_BARRIER = DOWN_BARRIERS + MOST_DOWN * MOST_SLOTS;

/// Waits for `warps` warps of a block, which share named barrier `name`.
DEVICE void together(int name, int warps) { asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(32 * warps) : "memory"); }

/// Neighbouring rows as they lie in a file, in whole words of 16 bytes; none of plain numbers, which stay where they are.
struct Lines {
    const u8 *from;
    int odd, bytes;

    DEVICE Lines of(const Experts &e, const u8 *matrix, int first, int count) {
        const u8 *from = matrix + (long)first * e.row_bytes;
        Lines lines;
        lines.odd = (int)(u64)from & 15;
        lines.from = from - lines.odd, lines.bytes = e.plain || count == 0 ? 0 : (lines.odd + count * e.row_bytes + 15) & ~15;
        return lines;
    }
};

/// How often a barrier is arrived at for a copy.
DEVICE int arrivals() {
#if __CUDA_ARCH__ >= 900
    return 1;
#else
    return 33;
#endif
}

/// Begins to copy up to two blocks of lines, by a warp; a barrier waits for them, and for what its first lane wrote before.
DEVICE void begin_copies(u32 barrier, u32 to, const Lines &a, u32 second_to, const Lines &b) {
    int lane = threadIdx.x % 32;
#if __CUDA_ARCH__ >= 900
    if (lane > 0) return;
    barrier_expect(barrier, a.bytes + b.bytes);
    if (a.bytes) bulk_copy(to, a.from, a.bytes, barrier);
    if (b.bytes) bulk_copy(second_to, b.from, b.bytes, barrier);
#else
    for (int i = 16 * lane; i < a.bytes; i += 32 * 16) copy_16(to + i, a.from + i, true);
    for (int i = 16 * lane; i < b.bytes; i += 32 * 16) copy_16(second_to + i, b.from + i, true);
    barrier_arrive_copied(barrier);
    if (lane == 0) barrier_arrive(barrier);
#endif
}

/// What a group multiplies next: a pair and 8 of its inner numbers, or a tile of 16 outputs. Those of experts that this wave has not
/// are gone through as well, with nothing to copy.
struct Work {
    int pair, tile;
    u32 expert;

    DEVICE Work of_item(const FewExperts &p, const Choice &choice, int item) {
        Work work;
        work.pair = small_quotient(item, Team::items_of(p)), work.tile = item - work.pair * Team::items_of(p);
        work.expert = choice.pairs[work.pair];
        return work;
    }

    /// Step `step` of this warp's group.
    DEVICE Work of_step(const FewExperts &p, const Team &team, const Choice &choice, int step) {
        int each = Team::down_each(p), turn = small_quotient(step, each);
        Work work;
        work.tile = blockIdx.x + turn * gridDim.x, work.pair = team.down_group + (step - turn * each) * Team::down_groups(p);
        bool exists = work.pair < p.count * p.used && work.tile < Team::tiles(p);
        work.expert = exists ? choice.pairs[work.pair] : NOTHING;
        return work;
    }
};

/// Begins to copy an item's rows of gate and up to a slot, by a warp.
DEVICE void bring_item(const FewExperts &p, Choice &choice, int item, u32 shared, int slot) {
    Work work = Work::of_item(p, choice, item);
    int first = work.tile * 8, count = work.expert == NOTHING ? 0 : min(8, p.width - first);
    u32 expert = count ? work.expert : 0, to = shared + p.slots_at + slot * p.slot_bytes;
    Lines gate = Lines::of(p.gate, matrix_of(p.gate, expert), first, count), up = Lines::of(p.up, matrix_of(p.up, expert), first, count);
    if (threadIdx.x % 32 == 0) choice.odd[slot][0] = gate.odd, choice.odd[slot][1] = up.odd;
    begin_copies(barrier_of(choice, slot), to, gate, to + p.high_at, up);
}

/// The slot of a step of down: the first one of each group by itself, others where gate and up have been.
struct DownSlot {
    int slot, at;

    DEVICE DownSlot of(const FewExperts &p, const Team &team, int step) {
        int turn = step % p.down_slots;
        DownSlot out;
        out.slot = team.down_group * p.down_slots + turn;
        out.at = turn == 0 ? p.down_at + team.down_group * p.down_bytes
                           : p.slots_at + (team.down_group * (p.down_slots - 1) + turn - 1) * p.down_bytes;
        return out;
    }
};

/// Begins to copy a tile of an expert's down matrix, by a warp.
DEVICE void bring_step(const FewExperts &p, const Team &team, Choice &choice, int step, u32 shared) {
    DownSlot slot = DownSlot::of(p, team, step);
    Work work = Work::of_step(p, team, choice, step);
    int first = work.tile * TILE, count = work.expert == NOTHING ? 0 : min(TILE, p.cols - first);
    Lines lines = Lines::of(p.down, matrix_of(p.down, count ? work.expert : 0), first, count), none = {0, 0, 0};
    if (threadIdx.x % 32 == 0) choice.down_odd[slot.slot] = lines.odd;
    begin_copies(barrier_of(choice, DOWN_BARRIERS + slot.slot), shared + slot.at, lines, 0, none);
}

/// Begins to copy a tile of the shared expert.
DEVICE void bring_shared(const FewExperts &p, Choice &choice, int tile, u32 shared) {
    Lines lines = Lines::of(p.shared, p.shared.at, tile * TILE, min(TILE, p.cols - tile * TILE)), none = {0, 0, 0};
    begin_copies(barrier_of(choice, SHARED_BARRIER), shared + p.shared_at, lines, 0, none);
}

/// Stages a row of x as planes, by `warps` warps of which this is number `warp`.
DEVICE void stage_x(const FewExperts &p, u8 *shared, int row, int warp, int warps) {
    int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int span = warp; span < spans_of(p.cols); span += warps) {
        int column = span * SPAN + lane * 8;
        uint4 v = column < p.cols ? *(const uint4 *)(p.x + (long)row * p.cols + column) : make_uint4(0, 0, 0, 0);
        u32 pairs[4] = {v.x, v.y, v.z, v.w};
        float x[8];
#pragma unroll
        for (int i = 0; i < 8; i++) x[i] = bf16_value((u16)(pairs[i / 2] >> (i % 2 * 16)));
        store_planes(shared + p.planes_at + span * PLANES, x);
    }
}

/// Eight numbers of a lane, the first of them number `column` of `count` at `from`: as other blocks have left them.
DEVICE void eight_numbers(const float *from, int column, int count, float x[8]) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (column + 4 * i < count) v = __ldcg((const float4 *)(from + column + 4 * i));
        x[4 * i] = v.x, x[4 * i + 1] = v.y, x[4 * i + 2] = v.z, x[4 * i + 3] = v.w;
    }
}

/// Eight inner numbers of the shared expert.
DEVICE void shared_numbers(const float *gate, const float *up, int column, int count, float x[8]) {
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] = column + i < count ? silu(gate[column + i]) * up[column + i] : 0.0f;
}

/// The first row of two in a tile of 16 that this lane has; the other one is the second next. So rows of 132 bytes lie in different banks.
DEVICE int low_row() {
    int g = threadIdx.x % 32 / 4;
    return g % 2 + g / 2 % 2 * 8 + g / 4 * 4;
}

/// What a warp multiplies: two halves of rows of one type, or of two (`types[1]`), and where in shared memory the sums go.
struct Unit {
    Halves rows;
    int type, second;   // second: of the high half, or -1
    int planes, columns, table, second_table;
    int to;
    bool down;          // whether rows are those of `low_row`
};

/// Gate and up of an item, by this warp's part of the columns.
DEVICE Unit item_unit(const FewExperts &p, const Team &team, Choice &choice, const Work &work, int slot, int to) {
    int g = team.lane / 4, spans = (spans_of(p.cols) + PARTS - 1) / PARTS, span = team.part * spans;
    Unit unit;
    unit.type = p.gate.type, unit.second = p.up.type == p.gate.type ? -1 : p.up.type;
    unit.table = p.table_at[0], unit.second_table = p.table_at[1];
    unit.planes = p.planes_at + span * PLANES, unit.columns = max(min(spans * SPAN, p.cols - span * SPAN), 0);
    unit.to = to + team.part * TILE * 4, unit.down = false;
    int at = p.slots_at + slot * p.slot_bytes;
    unit.rows.low = at + choice.odd[slot][0] + g * p.gate.row_bytes + span * p.gate.span;
    unit.rows.high = at + p.high_at + choice.odd[slot][1] + g * p.up.row_bytes + span * p.up.span;
    unit.rows.plain = choice.plain[team.warp];
    if (p.gate.plain || p.up.plain) {
        u32 expert = work.expert, row = min(work.tile * 8 + g, p.width - 1);
        if (team.lane < 6) unit.rows.plain[team.lane] = team.lane == 1 || team.lane > 3 ? matrix_of(p.up, expert) : matrix_of(p.gate, expert);
        if (p.gate.plain) unit.rows.low = row * p.gate.row_bytes + span * p.gate.span;
        if (p.up.plain) unit.rows.high = row * p.up.row_bytes + span * p.up.span;
        __syncwarp();
    }
    return unit;
}

/// A span of an expert's tile of down whose first row lies at `at`.
DEVICE Unit down_unit(const FewExperts &p, const Team &team, Choice &choice, const Experts &e, u32 expert, int tile, int span, int width, int at, int to) {
    int row = low_row();
    Unit unit;
    unit.type = e.type, unit.second = -1;
    unit.planes = p.scratch_at + team.warp * PLANES, unit.columns = min(SPAN, width - span * SPAN);
    unit.to = to, unit.down = true;
    unit.rows.low = at + row * e.row_bytes + span * e.span, unit.rows.high = unit.rows.low + 2 * e.row_bytes;
    unit.rows.plain = choice.plain[team.warp];
    if (e.plain) {
        if (team.lane == 0) unit.rows.plain[0] = unit.rows.plain[1] = matrix_of(e, expert);
        unit.rows.low = min(tile * TILE + row, p.cols - 1) * e.row_bytes + span * e.span;
        unit.rows.high = min(tile * TILE + row + 2, p.cols - 1) * e.row_bytes + span * e.span;
        __syncwarp();
    }
    return unit;
}

/// Multiplies, and leaves the sums of 16 rows.
DEVICE void multiply_unit(const Unit &unit, u8 *shared) {
    float sums[2] = {};
    // Matrices of two types: each by itself, and half of that is left unused.
#pragma unroll 1
    for (int i = 0; i <= (int)(unit.second >= 0); i++) {
        float both[2] = {};
        Halves rows = unit.rows;
        if (i) rows.low = rows.high;
        if (unit.second >= 0) rows.high = rows.low, rows.plain += 2 + 2 * i;
        multiply_halves(both, i ? unit.second : unit.type, shared, rows, unit.planes, unit.columns, i ? unit.second_table : unit.table);
        if (i == 0) sums[0] = both[0];
        if (unit.second < 0) sums[1] = both[1];
        else if (i) sums[1] = both[0];
    }
    float low = row_sum(sums[0]), high = row_sum(sums[1]);
    float *to = (float *)(shared + unit.to);
    int lane = threadIdx.x % 32, row = unit.down ? low_row() : lane / 4;
    if (lane % 4 == 0) to[row] = low, to[row + (unit.down ? 2 : 8)] = high;
}

/// Adds up an item's sums of all parts, [part][16], and stores its inner numbers; by a warp.
DEVICE void store_item(const FewExperts &p, const Work &work, const float *sums) {
    int lane = threadIdx.x % 32, output = work.tile * 8 + lane;
    float sum = 0.0f;
    if (lane < TILE) {
#pragma unroll
        for (int i = 0; i < PARTS; i++) sum += sums[i * TILE + lane];
    }
    float up = __shfl_down_sync(~0u, sum, 8);
    if (lane < 8 && output < p.width && work.expert != NOTHING) p.inner[(long)work.pair * p.width + output] = silu(sum) * up;
}

/// Adds up a tile: share · shared expert + Σ weight · down · x over the chosen experts, ascending; a thread for each output of a row.
DEVICE void store_tile(const FewExperts &p, const Choice &choice, const u8 *shared, int tile) {
#pragma unroll 1
    for (int i = threadIdx.x; i < p.count * TILE; i += blockDim.x) {
        int row = i / TILE, output = tile * TILE + i % TILE;
        if (output >= p.cols) continue;
        const float *from = (const float *)(shared + p.sums_at) + row * Team::steps(p) * TILE + i % TILE;
        float *hidden = p.hidden + (long)row * p.cols + output, *sum = p.sum + (long)row * p.cols + output;
        float before = p.last ? *hidden : 0.0f, total = p.first ? 0.0f : *sum;
        if (p.first) {
            float share = p.share[(long)row * p.gates_stride];
            for (int s = 0; s < Team::shared_spans(p); s++) total += from[(p.used * Team::spans(p) + s) * TILE];
            total *= sigmoid(share);
        }
#pragma unroll 1
        for (int e = 0; e < p.used; e += 5) {
            // Loads of some experts side by side.
            float dots[5], weights[5];
#pragma unroll
            for (int k = 0; k < 5; k++) {
                u32 rank = choice.order[row][min(e + k, p.used - 1)];
                bool here = e + k < p.used && choice.pairs[row * p.used + rank] != NOTHING;
                dots[k] = 0.0f, weights[k] = here ? choice.weights[row][rank] : 0.0f;
#pragma unroll 2
                for (int s = 0; s < Team::spans(p); s++) dots[k] += from[(rank * Team::spans(p) + s) * TILE];
                if (!here) dots[k] = 0.0f;
            }
#pragma unroll
            for (int k = 0; k < 5; k++) total = fmaf(weights[k], dots[k], total);
        }
        if (p.last) *hidden = before + total;
        else *sum = total;
    }
}

/// Waits until all blocks have come here; what they stored before is there then. By one thread of each.
DEVICE void meet(u32 *meeting) {
    u32 before, here;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(before) : "l"(meeting + 1) : "memory");
    __threadfence();
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(here) : "l"(meeting) : "memory");
    if (here == gridDim.x - 1) {
        asm volatile("st.relaxed.gpu.global.u32 [%0], 0;" ::"l"(meeting) : "memory");
        asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(meeting + 1), "r"(before + 1) : "memory");
        return;
    }
    u32 now;
    do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(meeting + 1) : "memory");
    while (now == before);
}

/// The choice of row `row`, by a warp.
DEVICE void choose_row(const FewExperts &p, Choice &choice, u8 *shared, int row) {
    int lane = threadIdx.x % 32;
    u32 *keys = (u32 *)(shared + p.scratch_at) + row * p.experts;
    choose(p.logits + (long)row * p.gates_stride, p.experts, p.used, keys, choice.ids[row], choice.weights[row], choice.order[row]);
    __syncwarp();
    if (lane >= p.used) return;
    u32 id = choice.ids[row][lane];
    choice.pairs[row * p.used + lane] = has(p.mask, id) ? id : NOTHING;
    if (blockIdx.x > 0) return;
    int at = row * p.used + lane;
    p.ids[at] = id, p.weights[at] = choice.weights[row][lane], p.order[at] = choice.order[row][lane];
}

/// Barriers, the shared expert's tile, zeros and tables: what does not depend on the kernel before, by all warps but those that choose.
DEVICE void prepare(const FewExperts &p, const Team &team, Choice &choice, u8 *shared) {
    Threads by = {(int)threadIdx.x - 32 * p.count, (int)blockDim.x - 32 * p.count};
    if (team.warp == team.warps) {
        for (int i = team.lane; i <= SHARED_BARRIER; i += 32) barrier_init(barrier_of(choice, i), arrivals());
        barriers_made();
        __syncwarp();
        if (Team::shared_spans(p) && (int)blockIdx.x < Team::tiles(p)) bring_shared(p, choice, blockIdx.x, shared_address(shared));
    }
    if (by.thread < 0) return;
    for (int i = by.thread; i < ZEROS / 4; i += by.threads) ((u32 *)shared)[i] = 0;
    fill_table_of(p.gate.type, (u32 *)(shared + p.table_at[0]), by);
    if (p.up.type != p.gate.type) fill_table_of(p.up.type, (u32 *)(shared + p.table_at[1]), by);
    if (p.table_at[3] > ZEROS) fill_table_of(p.shared.type, (u32 *)(shared + p.table_at[3]), by);
}

/// Grid: a block for each multiprocessor, or fewer.
///
/// All warps go through the same sections: gate and up of each row of x that a block has, then its tiles of down. There is one place
/// where anything is multiplied, for code that is long is slow to come.
KERNEL __launch_bounds__(EXPERTS_THREADS, 1) void few_experts(__grid_constant__ const FewExperts p) {
    extern __shared__ __align__(16) u8 shared[];
    __shared__ Choice choice;
    next();
    Team team = Team::of(p);
    u32 base = shared_address(shared);
    bool is_shared = team.warp == team.warps;
    int of_row = Team::items_of(p) * p.used, row = min(team.first / of_row, p.count - 1), tiles = Team::tiles(p);
    prepare(p, team, choice, shared);
    previous();
    if (team.warp < p.count) choose_row(p, choice, shared, team.warp);
    else stage_x(p, shared, row, team.warp - p.count, team.warps + 1 - p.count);
    __syncthreads();
    if (!is_shared) {
        int item = team.first + team.group + team.part * p.groups;
        if (team.part < p.slots && item < team.end) bring_item(p, choice, item, base, team.group * p.slots + team.part);
        if (team.down_part == 0 && (int)blockIdx.x < tiles) bring_step(p, team, choice, 0, base);
    }
    // The tile of down at hand, before that −1. How many items the group has had, or steps, or the last warp products of the tile.
    int tile = -1, turn = 0, span = team.down_part;
#pragma unroll 1
    while (true) {
#pragma unroll 1
        while (true) {
            Unit unit;
            Work work;
            float x[8];
            if (is_shared) {
                int spans = Team::shared_spans(p), of = max(tile, (int)blockIdx.x);
                if (of >= tiles || turn >= p.count * spans) break;
                int r = turn / spans, s = turn - r * spans, odd = (int)(u64)(p.shared.at + (long)of * TILE * p.shared.row_bytes) & 15;
                const float *gate = p.shared_gate + (long)r * p.gates_stride, *up = p.shared_up + (long)r * p.gates_stride;
                shared_numbers(gate, up, s * SPAN + team.lane * 8, p.shared_cols, x);
                if (turn == 0) barrier_wait(barrier_of(choice, SHARED_BARRIER), of / gridDim.x & 1);
                unit = down_unit(p, team, choice, p.shared, 0, of, s, p.shared_cols, p.shared_at + odd,
                                 p.sums_at + (r * Team::steps(p) + p.used * Team::spans(p) + s) * TILE * 4);
                unit.table = p.table_at[3];
            } else if (tile < 0) {
                int item = team.first + team.group + turn * p.groups, slot = team.group * p.slots + turn % p.slots;
                if (item >= min((row + 1) * of_row, team.end)) break;
                work = Work::of_item(p, choice, item);
                barrier_wait(barrier_of(choice, slot), turn / p.slots & 1);
                unit = item_unit(p, team, choice, work, slot, p.items_at + (team.group * 2 + turn % 2) * PARTS * TILE * 4);
            } else {
                if (turn >= (tile / (int)gridDim.x + 1) * Team::down_each(p)) break;
                DownSlot slot = DownSlot::of(p, team, turn);
                work = Work::of_step(p, team, choice, turn);
                int pair = min(work.pair, p.count * p.used - 1), r = small_quotient(pair, p.used), spans = Team::spans(p);
                eight_numbers(p.inner + (long)pair * p.width, span * SPAN + team.lane * 8, p.width, x);
                barrier_wait(barrier_of(choice, DOWN_BARRIERS + slot.slot), turn / p.down_slots & 1);
                unit = down_unit(p, team, choice, p.down, work.expert, tile, span, p.width, slot.at + choice.down_odd[slot.slot],
                                 p.sums_at + (r * Team::steps(p) + (pair - r * p.used) * spans + span) * TILE * 4);
                unit.table = p.table_at[2];
            }
            if (is_shared || tile >= 0) {
                store_planes(shared + unit.planes, x);
                __syncwarp();
            }
            if (is_shared || work.expert != NOTHING) multiply_unit(unit, shared);
            __syncwarp();
            if (is_shared) {
                turn++;
            } else if (tile < 0) {
                together(1 + team.group, PARTS);
                // Each warp in turn stores, and another one asks for what comes next to the slot that is free now.
                int ahead = team.first + team.group + (turn + p.slots) * p.groups;
                if (team.part == turn % PARTS) store_item(p, work, (const float *)(shared + unit.to) - team.part * TILE);
                if (team.part == (turn + 1) % PARTS && ahead < team.end) bring_item(p, choice, ahead, base, team.group * p.slots + turn % p.slots);
                turn++;
            } else if ((span += Team::down_parts(p)) >= Team::spans(p)) {
                span = team.down_part;
                if (Team::down_parts(p) > 1) together(1 + team.down_group, Team::down_parts(p));
                if (team.down_part == 0) bring_step(p, team, choice, turn + p.down_slots, base);
                turn++;
            }
        }
        __syncthreads();
        if (tile < 0 && (row + 1) * of_row < team.end) {
            row++;
            stage_x(p, shared, row, team.warp, team.warps + 1);
        } else {
            if (tile < 0) {
                // More of down comes where gate and up have been, and its table where theirs was, while the blocks meet.
                tile = blockIdx.x;
#pragma unroll 1
                for (int i = 1; i < p.down_slots; i++) {
                    if (!is_shared && team.down_part == 0) bring_step(p, team, choice, i, base);
                }
                if (!is_shared) turn = 0;
                if (p.down.type != p.gate.type) {
                    fill_table_of(p.down.type, (u32 *)(shared + p.table_at[2]), {(int)threadIdx.x, (int)blockDim.x});
                }
                if (threadIdx.x == blockDim.x - 1) meet(p.meeting);
            } else {
                store_tile(p, choice, shared, tile);
                tile += gridDim.x;
                if (is_shared && tile < tiles) {
                    turn = 0;
                    if (Team::shared_spans(p)) bring_shared(p, choice, tile, base);
                }
            }
            if (tile >= tiles) break;
        }
        __syncthreads();
    }
}
