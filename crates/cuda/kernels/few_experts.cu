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
};

/// How a block's warps share the work.
struct Team {
    int lane, warp, warps;                  // warps: but for the last one, of the shared expert
    int tiles, pairs;                       // items of an expert of a row; experts of all rows

    DEVICE Team of(const FewExperts &p) {
        Team team;
        team.lane = threadIdx.x % 32, team.warp = threadIdx.x / 32, team.warps = blockDim.x / 32 - 1;
        team.tiles = (p.width + 7) / 8, team.pairs = p.count * p.used;
        return team;
    }
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
        lines.from = from - lines.odd, lines.bytes = e.plain ? 0 : (lines.odd + count * e.row_bytes + 15) & ~15;
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

/// Goes through a block's items, those of one group: the item, its pair and tile.
struct Items {
    int item, pair, tile;

    DEVICE Items at(int item, const Team &team) {
        Items items = {item, item / team.tiles, 0};
        items.tile = item - items.pair * team.tiles;
        return items;
    }

    /// Steps `by` items on, over those of experts that this wave has not.
    DEVICE void step(Items &items, int by, int end, const Team &team, const Choice &choice) {
        do {
            items.item += by, items.tile += by;
            while (items.tile >= team.tiles) items.tile -= team.tiles, items.pair++;
        } while (items.item < end && choice.pairs[items.pair] == NOTHING);
    }
};

/// Begins to copy an item's rows of gate and up to a slot, by a warp.
DEVICE void bring_item(const FewExperts &p, Choice &choice, const Items &items, u32 shared, int slot) {
    u32 expert = choice.pairs[items.pair], to = shared + p.slots_at + slot * p.slot_bytes;
    int first = items.tile * 8, count = min(8, p.width - first);
    Lines gate = Lines::of(p.gate, matrix_of(p.gate, expert), first, count), up = Lines::of(p.up, matrix_of(p.up, expert), first, count);
    if (threadIdx.x % 32 == 0) choice.odd[slot][0] = gate.odd, choice.odd[slot][1] = up.odd;
    begin_copies(barrier_of(choice, slot), to, gate, to + p.high_at, up);
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

/// Sums of an item's gate and up by this warp's part of the columns, which lie in a slot.
DEVICE void multiply_item(const FewExperts &p, const Choice &choice, const Items &items, const u8 *shared, int slot, float sums[2]) {
    int part = threadIdx.x / 32 % PARTS, g = threadIdx.x % 32 / 4;
    int spans = (spans_of(p.cols) + PARTS - 1) / PARTS, span = part * spans, columns = min(spans * SPAN, p.cols - span * SPAN);
    if (columns <= 0) return;
    int planes = p.planes_at + span * PLANES, at = p.slots_at + slot * p.slot_bytes;
    Halves rows;
    rows.low = at + choice.odd[slot][0] + g * p.gate.row_bytes + span * p.gate.span;
    rows.high = at + p.high_at + choice.odd[slot][1] + g * p.up.row_bytes + span * p.up.span;
    if (p.gate.plain || p.up.plain) {
        u32 expert = choice.pairs[items.pair];
        long row = min(items.tile * 8 + g, p.width - 1);
        rows.plain_low = matrix_of(p.gate, expert) + row * p.gate.row_bytes + span * p.gate.span;
        rows.plain_high = matrix_of(p.up, expert) + row * p.up.row_bytes + span * p.up.span;
    }
    if (p.gate.type == p.up.type) {
        multiply_halves(sums, p.gate.type, shared, rows, planes, columns, p.table_at[0]);
        return;
    }
    // Matrices of two types: each by itself, and half of that is left unused.
#pragma unroll 1
    for (int i = 0; i < 2; i++) {
        float both[2] = {};
        Halves twice = i ? Halves{rows.high, rows.high, rows.plain_high, rows.plain_high} : Halves{rows.low, rows.low, rows.plain_low, rows.plain_low};
        multiply_halves(both, i ? p.up.type : p.gate.type, shared, twice, planes, columns, p.table_at[i]);
        sums[i] = both[0];
    }
}

/// Adds up an item's sums of all parts, [part][16], and stores its inner numbers; by a warp.
DEVICE void store_item(const FewExperts &p, const Items &items, const float *sums) {
    int lane = threadIdx.x % 32, output = items.tile * 8 + lane;
    float sum = 0.0f;
    if (lane < TILE) {
#pragma unroll
        for (int i = 0; i < PARTS; i++) sum += sums[i * TILE + lane];
    }
    float up = __shfl_down_sync(~0u, sum, 8);
    if (lane < 8 && output < p.width) p.inner[(long)items.pair * p.width + output] = silu(sum) * up;
}

/// All items of a block: `first` to `end`. The first slots' copies have begun.
DEVICE void gate_and_up(const FewExperts &p, const Team &team, Choice &choice, u8 *shared, int first, int end) {
    int group = team.warp / PARTS, part = team.warp % PARTS, slot = group * p.slots, parity = 0, turn = 0;
    float *room = (float *)(shared + p.items_at) + group * 2 * PARTS * TILE;
    Items items = Items::at(first + group - p.groups, team), ahead;
    Items::step(items, p.groups, end, team, choice);
    ahead = items;
    for (int i = 0; i < p.slots; i++) Items::step(ahead, p.groups, end, team, choice);
    int of_row = team.tiles * p.used;
#pragma unroll 1
    for (int row = first / of_row; row * of_row < end; row++) {
        if (row > first / of_row) {
            together(15, team.warps);
            stage_x(p, shared, row, team.warp, team.warps);
            together(15, team.warps);
        }
        int row_end = min((row + 1) * of_row, end);
#pragma unroll 1
        for (; items.item < row_end; Items::step(items, p.groups, end, team, choice)) {
            float sums[2] = {}, *to = room + turn % 2 * PARTS * TILE;
            barrier_wait(barrier_of(choice, slot), parity);
            multiply_item(p, choice, items, shared, slot, sums);
            float low = row_sum(sums[0]), high = row_sum(sums[1]);
            if (team.lane % 4 == 0) to[part * TILE + team.lane / 4] = low, to[part * TILE + 8 + team.lane / 4] = high;
            together(1 + group, PARTS);
            // Each warp in turn stores, and another one asks for what comes next into the slot that is free now.
            if (part == turn % PARTS) store_item(p, items, to);
            if (ahead.item < end) {
                if (part == (turn + 1) % PARTS) bring_item(p, choice, ahead, shared_address(shared), slot);
                Items::step(ahead, p.groups, end, team, choice);
            }
            turn++, slot++;
            if (slot == (group + 1) * p.slots) slot -= p.slots, parity ^= 1;
        }
    }
}

/// How warps share the down products: groups of so many warps.
struct Down {
    int spans, shared_spans, parts, groups, group, part, tiles, steps; // tiles: of 16 outputs; steps: of a row

    DEVICE Down of(const FewExperts &p, const Team &team) {
        Down down;
        down.spans = spans_of(p.width), down.shared_spans = p.first ? spans_of(p.shared_cols) : 0;
        down.parts = min(2, down.spans), down.groups = team.warps / down.parts;
        down.group = team.warp / down.parts, down.part = team.warp - down.group * down.parts;
        down.tiles = (p.cols + TILE - 1) / TILE, down.steps = p.used * down.spans + down.shared_spans;
        return down;
    }
};

/// Goes through what a group multiplies: pairs of tiles, but for those of experts that this wave has not. `count`: how many before.
struct Steps {
    int tile, pair, count;

    DEVICE void find(Steps &steps, const Down &down, const Team &team, const Choice &choice) {
        while (steps.tile < down.tiles) {
            if (steps.pair >= team.pairs) steps.tile += gridDim.x, steps.pair = down.group;
            else if (choice.pairs[steps.pair] == NOTHING) steps.pair += down.groups;
            else return;
        }
    }

    DEVICE Steps begin(const Down &down, const Team &team, const Choice &choice) {
        Steps steps = {(int)blockIdx.x, down.group, 0};
        if (down.group >= down.groups) steps.tile = down.tiles;
        find(steps, down, team, choice);
        return steps;
    }

    DEVICE void step(Steps &steps, const Down &down, const Team &team, const Choice &choice) {
        steps.pair += down.groups, steps.count++;
        find(steps, down, team, choice);
    }
};

/// The slot of a step, and where it lies: the first one of each group by itself, others where gate and up have been.
struct DownSlot {
    int slot, at;

    DEVICE DownSlot of(const FewExperts &p, const Down &down, int turn) {
        DownSlot out;
        out.slot = down.group * p.down_slots + turn;
        out.at = turn == 0 ? p.down_at + down.group * p.down_bytes
                           : p.slots_at + (down.group * (p.down_slots - 1) + turn - 1) * p.down_bytes;
        return out;
    }
};

/// Begins to copy a tile of an expert's down matrix, by a warp.
DEVICE void bring_down(const FewExperts &p, const Down &down, Choice &choice, const Steps &steps, u32 shared) {
    DownSlot slot = DownSlot::of(p, down, steps.count % p.down_slots);
    int first = steps.tile * TILE;
    Lines lines = Lines::of(p.down, matrix_of(p.down, choice.pairs[steps.pair]), first, min(TILE, p.cols - first)), none = {0, 0, 0};
    if (threadIdx.x % 32 == 0) choice.down_odd[slot.slot] = lines.odd;
    begin_copies(barrier_of(choice, DOWN_BARRIERS + slot.slot), shared + slot.at, lines, 0, none);
}

/// The first row of two in a tile of 16 that this lane has; the other one is the second next. So rows of 132 bytes lie in different banks.
DEVICE int low_row() {
    int g = threadIdx.x % 32 / 4;
    return g % 2 + g / 2 % 2 * 8 + g / 4 * 4;
}

/// Multiplies a span of a tile whose first row lies at `at` in `shared`, or of plain numbers at `matrix`, and leaves 16 sums.
DEVICE void multiply_down(const Experts &e, const u8 *matrix, int tile, int rows, int span, int columns, const u8 *shared, int at, int planes,
                          int table, float *to) {
    int row = low_row(), lane = threadIdx.x % 32;
    float sums[2] = {};
    Halves halves;
    halves.low = at + row * e.row_bytes + span * e.span, halves.high = halves.low + 2 * e.row_bytes;
    if (e.plain) {
        halves.plain_low = matrix + (long)min(tile * TILE + row, rows - 1) * e.row_bytes + span * e.span;
        halves.plain_high = matrix + (long)min(tile * TILE + row + 2, rows - 1) * e.row_bytes + span * e.span;
    }
    multiply_halves(sums, e.type, shared, halves, planes, columns, table);
    float low = row_sum(sums[0]), high = row_sum(sums[1]);
    if (lane % 4 == 0) to[row] = low, to[row + 2] = high;
}

/// Begins to copy a tile of the shared expert.
DEVICE void bring_shared(const FewExperts &p, Choice &choice, int tile, u32 shared) {
    Lines lines = Lines::of(p.shared, p.shared.at, tile * TILE, min(TILE, p.cols - tile * TILE)), none = {0, 0, 0};
    begin_copies(barrier_of(choice, SHARED_BARRIER), shared + p.shared_at, lines, 0, none);
}

/// Products of the shared expert's tile with all rows, by a warp. `turn`: how many tiles it had before.
DEVICE void multiply_shared(const FewExperts &p, const Down &down, const Team &team, const Choice &choice, u8 *shared, int tile, int turn) {
    float *sums = (float *)(shared + p.sums_at);
    int planes = p.scratch_at + team.warp * PLANES, odd = (int)(u64)(p.shared.at + (long)tile * TILE * p.shared.row_bytes) & 15;
    barrier_wait(barrier_of(choice, SHARED_BARRIER), turn & 1);
#pragma unroll 1
    for (int i = 0; i < p.count * down.shared_spans; i++) {
        int row = i / down.shared_spans, span = i - row * down.shared_spans, column = span * SPAN + team.lane * 8;
        const float *gate = p.shared_gate + (long)row * p.gates_stride + column, *up = p.shared_up + (long)row * p.gates_stride + column;
        float x[8];
#pragma unroll
        for (int k = 0; k < 8; k++) x[k] = column + k < p.shared_cols ? silu(gate[k]) * up[k] : 0.0f;
        __syncwarp();
        store_planes(shared + planes, x);
        __syncwarp();
        multiply_down(p.shared, p.shared.at, tile, p.cols, span, min(SPAN, p.shared_cols - span * SPAN), shared, p.shared_at + odd, planes,
                      p.table_at[3], sums + (row * down.steps + p.used * down.spans + span) * TILE);
    }
}

/// This lane's eight inner numbers of a span of a pair, as other blocks have left them.
DEVICE void inner_numbers(const FewExperts &p, int pair, int span, float x[8]) {
    int column = span * SPAN + threadIdx.x % 32 * 8;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float *from = p.inner + (long)pair * p.width + column + 4 * i;
        float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (column + 4 * i < p.width) v = __ldcg((const float4 *)from);
        x[4 * i] = v.x, x[4 * i + 1] = v.y, x[4 * i + 2] = v.z, x[4 * i + 3] = v.w;
    }
}

/// Products of one tile with all rows' experts, by all groups.
DEVICE void multiply_tile(const FewExperts &p, const Down &down, const Team &team, Choice &choice, u8 *shared, Steps &steps, Steps &ahead) {
    float *sums = (float *)(shared + p.sums_at);
    int planes = p.scratch_at + team.warp * PLANES, tile = steps.tile;
#pragma unroll 1
    while (steps.tile == tile && tile < down.tiles) {
        DownSlot slot = DownSlot::of(p, down, steps.count % p.down_slots);
        int row = steps.pair / p.used;
#pragma unroll 1
        for (int span = down.part; span < down.spans; span += down.parts) {
            float x[8];
            inner_numbers(p, steps.pair, span, x);
            store_planes(shared + planes, x);
            __syncwarp();
            if (span == down.part) barrier_wait(barrier_of(choice, DOWN_BARRIERS + slot.slot), steps.count / p.down_slots & 1);
            multiply_down(p.down, p.down.plain ? matrix_of(p.down, choice.pairs[steps.pair]) : 0, tile, p.cols, span,
                          min(SPAN, p.width - span * SPAN), shared, slot.at + choice.down_odd[slot.slot], planes, p.table_at[2],
                          sums + (row * down.steps + (steps.pair - row * p.used) * down.spans + span) * TILE);
            __syncwarp();
        }
        if (down.parts > 1) together(1 + down.group, down.parts);
        if (ahead.tile < down.tiles) {
            if (down.part == 0) bring_down(p, down, choice, ahead, shared_address(shared));
            Steps::step(ahead, down, team, choice);
        }
        Steps::step(steps, down, team, choice);
    }
}

/// Adds up a tile: share · shared expert + Σ weight · down · x over the chosen experts, ascending; a thread for each output of a row.
DEVICE void store_tile(const FewExperts &p, const Down &down, const Choice &choice, const u8 *shared, int tile) {
#pragma unroll 1
    for (int i = threadIdx.x; i < p.count * TILE; i += blockDim.x) {
        int row = i / TILE, output = i % TILE;
        if (tile * TILE + output >= p.cols) continue;
        long place = (long)row * p.cols + tile * TILE + output;
        const float *from = (const float *)(shared + p.sums_at) + row * down.steps * TILE + output;
        float total = 0.0f, hidden = p.last ? p.hidden[place] : 0.0f;
        if (p.first) {
            for (int s = 0; s < down.shared_spans; s++) total += from[(p.used * down.spans + s) * TILE];
            total *= sigmoid(p.share[(long)row * p.gates_stride]);
        } else {
            total = p.sum[place];
        }
#pragma unroll 2
        for (int e = 0; e < p.used; e++) {
            u32 rank = choice.order[row][e];
            float dot = 0.0f;
            for (int s = 0; s < down.spans; s++) dot += from[(rank * down.spans + s) * TILE];
            if (choice.pairs[row * p.used + rank] != NOTHING) total = fmaf(choice.weights[row][rank], dot, total);
        }
        if (p.last) p.hidden[place] = hidden + total;
        else p.sum[place] = total;
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

/// Barriers, zeros, tables, the choice and x: all that comes before the first copies of what was chosen.
DEVICE void prepare(const FewExperts &p, const Team &team, Choice &choice, u8 *shared, int first_row) {
    for (int i = threadIdx.x; i <= SHARED_BARRIER; i += blockDim.x) barrier_init(barrier_of(choice, i), arrivals());
    if (threadIdx.x < ZEROS / 4) ((u32 *)shared)[threadIdx.x] = 0;
    barriers_made();
    // The last warp and others that do not choose make tables meanwhile.
    Threads by = {(int)threadIdx.x - 32 * p.count, (int)blockDim.x - 32 * p.count};
    if (by.thread < 0) {
        previous();
        choose_row(p, choice, shared, team.warp);
    } else {
        fill_table_of(p.gate.type, (u32 *)(shared + p.table_at[0]), by);
        if (p.up.type != p.gate.type) fill_table_of(p.up.type, (u32 *)(shared + p.table_at[1]), by);
        if (p.table_at[3] > ZEROS) fill_table_of(p.shared.type, (u32 *)(shared + p.table_at[3]), by);
        previous();
        stage_x(p, shared, first_row, by.thread / 32, by.threads / 32);
    }
    __syncthreads();
}

/// Grid: a block for each multiprocessor, or fewer.
KERNEL __launch_bounds__(EXPERTS_THREADS, 1) void few_experts(__grid_constant__ const FewExperts p) {
    extern __shared__ __align__(16) u8 shared[];
    __shared__ Choice choice;
    next();
    Team team = Team::of(p);
    Down down = Down::of(p, team);
    u32 base = shared_address(shared);
    int of_block = team.tiles * team.pairs, first = (int)((long)blockIdx.x * of_block / gridDim.x);
    int end = (int)((long)(blockIdx.x + 1) * of_block / gridDim.x);
    bool is_shared = team.warp == team.warps;
    prepare(p, team, choice, shared, min(first / (team.tiles * p.used), p.count - 1));
    Steps steps = Steps::begin(down, team, choice), ahead = steps;
    if (is_shared) {
        if (down.shared_spans && (int)blockIdx.x < down.tiles) {
            bring_shared(p, choice, blockIdx.x, base);
            multiply_shared(p, down, team, choice, shared, blockIdx.x, 0);
        }
    } else {
        int group = team.warp / PARTS, part = team.warp % PARTS;
        Items items = Items::at(first + group - p.groups, team);
        for (int i = 0; i < p.slots; i++) {
            Items::step(items, p.groups, end, team, choice);
            if (items.item < end && i % PARTS == part) bring_item(p, choice, items, base, group * p.slots + i);
        }
        if (ahead.tile < down.tiles) {
            if (down.part == 0) bring_down(p, down, choice, ahead, base);
            Steps::step(ahead, down, team, choice);
        }
        gate_and_up(p, team, choice, shared, first, end);
    }
    __syncthreads();
    // More of down comes where gate and up have been, and its table where theirs was, while the blocks meet.
    for (int i = 1; i < p.down_slots && ahead.tile < down.tiles; i++) {
        if (down.part == 0) bring_down(p, down, choice, ahead, base);
        Steps::step(ahead, down, team, choice);
    }
    if (p.down.type != p.gate.type) fill_table_of(p.down.type, (u32 *)(shared + p.table_at[2]), {(int)threadIdx.x, (int)blockDim.x});
    if (threadIdx.x == blockDim.x - 1) meet(p.meeting);
    __syncthreads();
#pragma unroll 1
    for (int tile = blockIdx.x, turn = 0; tile < down.tiles; tile += gridDim.x, turn++) {
        if (is_shared && turn > 0 && down.shared_spans) {
            bring_shared(p, choice, tile, base);
            multiply_shared(p, down, team, choice, shared, tile, turn);
        }
        if (steps.tile == tile) multiply_tile(p, down, team, choice, shared, steps, ahead);
        __syncthreads();
        store_tile(p, down, choice, shared, tile);
        __syncthreads();
    }
}
