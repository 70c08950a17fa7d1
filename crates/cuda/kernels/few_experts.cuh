// Experts of passes of single rows, one kernel a wave: what kernels of one row (`few_experts.cu`) and of several (`more_experts.cu`) have
// in common.
//
// Blocks are all there at once. Inner numbers pass from block to block as they are made: their places hold a mark until then, and who
// needs them looks until it is gone, so that nobody waits for what he does not need. Launches have two halves of these places by turns,
// and each one marks the other half; the GPU counts launches, so that nothing else needs to know.
//
// An item is 8 inner numbers of one expert of one row of x. Groups of PARTS warps take a block's items in turns, each warp a part of the
// columns, and each group has slots for what it multiplies next. Neighbouring rows of a matrix lie together in a file and come by one copy.
//
// What is of experts that a wave has not is gone through as well, with nothing to copy or multiply.

const int PARTS = 4;                       // warps that share the columns of an item
const int MOST_GROUPS = 5;                 // of so many warps in a block
const int EXPERTS_THREADS = 32 * (PARTS * MOST_GROUPS + 1);
const int MOST_SLOTS = 4;                  // of a group
const int MOST_DOWN = PARTS * MOST_GROUPS; // groups of down
const u32 NOTHING = 0xffffffffu;           // no expert of this wave
const u32 MARK = 0xffffffffu;              // the bits of an inner number that is not there yet: no result has them

/// Experts of a wave, one bit each.
struct Mask {
    u32 bits[32];
};

DEVICE bool has(const Mask &mask, u32 expert) { return mask.bits[expert / 32] >> (expert % 32) & 1; }

/// Bytes that are brought to the second cache, so many by each block.
struct Ahead {
    const u8 *at;
    u32 bytes, share;
};

struct FewExperts {
    Mask mask;
    Experts gate, up, down, shared;         // routed ones, and the down matrix of the shared expert
    const float *logits;                    // [count, …]: rows of `gates_stride` numbers, of which the first are of experts
    const u16 *x;                           // [count, cols] bf16
    u32 *ids;                               // [count, used], and so on: the choice, stored by the first block
    float *weights;
    u32 *order;
    float *inner;                           // [2, inner_room], of which [count, used, width]: SiLU(gate · x) ⊙ (up · x)
    const float *shared_gate, *shared_up;   // of the shared expert: [count, …] rows of `gates_stride`, `shared_cols` of each
    const float *share;                     // [count] of rows of `gates_stride`: sigmoid of it times the shared expert's output
    float *sum;                             // [count, cols]: left by the wave before, and for the next
    float *hidden;                          // [count, cols]
    u32 *launches;                          // how many blocks know the second number: of launches before
    Ahead ahead[4];                         // what the kernels behind this one read next
    int inner_room;
    int width, cols, experts, used, gates_stride, count, shared_cols;
    int first, last;                        // whether this is the first and the last wave
    int aligned;                            // whether all experts' matrices lie one behind the other, in words of 16 bytes
    int groups, slots, down_slots;          // slots: of each group, powers of two
    int slot_bytes, high_at, down_bytes;    // of a slot of gate and up, where up begins in it, and of a slot of down
    int table_at[4];                        // of gate, up, down, shared, which may have none: 0
    int planes_at, scratch_at, sums_at, items_at, shared_at, down_at, slots_at;
    int keys_at, job_tiles, row_jobs, shared_tiles, shared_sums_at, shared_room; // of several rows: see there
    Keep keep;
};

/// The choice of a pass's rows, and what copies are waited for by.
struct Choice {
    u32 ids[FEW][32], order[FEW][32];
    float weights[FEW][32];
    u32 pairs[FEW * 32];                    // [row][rank]: its expert, or NOTHING
    int2 ascending[FEW][32];                // by number: the pair, or −1; its weight
    u64 barriers[MOST_GROUPS * MOST_SLOTS + MOST_DOWN * MOST_SLOTS + 1];
    int2 odd[MOST_GROUPS * MOST_SLOTS];     // bytes from where copies of gate and up begin to what they bring
    int down_odd[MOST_DOWN * MOST_SLOTS];
    volatile int end;                       // of a block's items; registers are short
    float *inner, *other;                   // the inner numbers of this launch, and where those of the next one will be
    const u8 *plain[PARTS * MOST_GROUPS + 1][6]; // of each warp, plain matrices of both halves; the first one, then the second one, as both
    Kept kept;
};

static_assert(sizeof(Choice) <= 9 << 10, "shared memory beside what the host asks for: `STATIC`");

/// Numbers that depend on the shape alone.
struct Sizes {
    /// Items of an expert of a row; spans of inner numbers; those of the shared expert; tiles of 16 outputs.
    DEVICE int items(const FewExperts &p) { return (p.width + 7) / 8; }
    DEVICE int spans(const FewExperts &p) { return spans_of(p.width); }
    DEVICE int shared_spans(const FewExperts &p) { return p.first ? spans_of(p.shared_cols) : 0; }
    DEVICE int tiles(const FewExperts &p) { return (p.cols + TILE - 1) / TILE; }

    /// Warps but for the last one, which has the shared expert.
    DEVICE int warps(const FewExperts &p) { return PARTS * p.groups; }

    /// Warps that share the spans of a tile of down, and groups of them.
    DEVICE int parts(const FewExperts &p) { return min(2, spans(p)); }
    DEVICE int groups(const FewExperts &p) { return PARTS * p.groups / parts(p); }
};

DEVICE u32 barrier_of(const Choice &choice, int i) { return shared_address(choice.barriers + i); }

const int DOWN_BARRIERS = MOST_GROUPS * MOST_SLOTS, SHARED_BARRIER = DOWN_BARRIERS + MOST_DOWN * MOST_SLOTS;

/// Makes the barriers of all slots, by `warps` warps of which this is number `warp`: a warp takes 35 ns for each. `groups`: of down.
DEVICE void make_barriers(const FewExperts &p, const Choice &choice, int groups, int warp, int warps) {
    int items = p.groups * p.slots, all = items + groups * p.down_slots;
    for (int i = warp + threadIdx.x % 32 * warps; i < all; i += 32 * warps) {
        barrier_init(barrier_of(choice, i < items ? i : DOWN_BARRIERS + i - items), arrivals());
    }
    barriers_made();
}

/// Makes zeros, and tables of all but the down matrices.
DEVICE void fill_tables(const FewExperts &p, u8 *shared, Threads by) {
    for (int i = by.thread; i < ZEROS / 4; i += by.threads) ((u32 *)shared)[i] = 0;
    fill_table_of(p.gate.type, (u32 *)(shared + p.table_at[0]), by);
    if (p.up.type != p.gate.type) fill_table_of(p.up.type, (u32 *)(shared + p.table_at[1]), by);
    if (p.first && p.table_at[3] > 0) fill_table_of(p.shared.type, (u32 *)(shared + p.table_at[3]), by);
}

/// This thread's number, read anew: where it would otherwise be kept in a register through all products.
DEVICE int thread_again() {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}

/// A pair and eight of its inner numbers.
struct Eight {
    int pair, tile;

    DEVICE Eight at(const FewExperts &p, int item) {
        Eight out = {small_quotient(item, Sizes::items(p)), 0};
        out.tile = item - out.pair * Sizes::items(p);
        return out;
    }

    DEVICE void step(Eight &item, int by, int items) {
        item.tile += by;
        while (item.tile >= items) item.tile -= items, item.pair++;
    }
};

/// Where an item's rows begin in a matrix of gate and of up, in bytes: all but its expert, worked out before that is known.
struct Begins {
    u32 gate, up;

    DEVICE Begins of(const FewExperts &p, const Eight &item) {
        return {(u32)(item.tile * 8 * p.gate.row_bytes), (u32)(item.tile * 8 * p.up.row_bytes)};
    }
};

/// Begins to copy an item's rows of gate and up to a slot, by a warp.
DEVICE void bring_item(const FewExperts &p, Choice &choice, int pair, const Begins &begins, u32 shared, int slot) {
    u32 expert = choice.pairs[pair], to = shared + p.slots_at + slot * p.slot_bytes;
    int count = expert == NOTHING ? 0 : 8;
    if (expert == NOTHING) expert = 0;
    Lines gate = Lines::at(p.gate, matrix_of(p.gate, expert) + begins.gate, count), up = Lines::at(p.up, matrix_of(p.up, expert) + begins.up, count);
    if (is_far(p.keep, gate.from)) widen(gate), widen(up);
    if (threadIdx.x % 32 == 0) choice.odd[slot] = make_int2(gate.odd, up.odd);
    begin_copies(barrier_of(choice, slot), to, gate, to + p.high_at, up);
}

/// Where a slot of down lies: the first one of each group by itself, others where gate and up have been.
DEVICE int down_place(const FewExperts &p, int group, int turn) {
    return turn == 0 ? p.down_at + group * p.down_bytes : p.slots_at + (group * (p.down_slots - 1) + turn - 1) * p.down_bytes;
}

/// A tile of the down matrix of a pair's expert; of no pair, nothing.
DEVICE Lines lines_of_down(const FewExperts &p, const Choice &choice, int tile, int pair) {
    u32 expert = tile < Sizes::tiles(p) && pair < p.count * p.used ? choice.pairs[pair] : NOTHING;
    int first = tile * TILE, count = expert == NOTHING ? 0 : min(TILE, p.cols - first);
    Lines lines = Lines::of(p.down, matrix_of(p.down, count ? expert : 0), first, count);
    if (is_far(p.keep, lines.from)) widen(lines);
    return lines;
}

/// Begins to copy that, by a warp.
DEVICE void bring_down(const FewExperts &p, Choice &choice, int tile, int pair, u32 shared, int group, int turn) {
    Lines lines = lines_of_down(p, choice, tile, pair), none = {0, 0, 0};
    int slot = group * p.down_slots + turn;
    if (threadIdx.x % 32 == 0) choice.down_odd[slot] = lines.odd;
    begin_copies(barrier_of(choice, DOWN_BARRIERS + slot), shared + down_place(p, group, turn), lines, 0, none);
}

/// Stages a row of x as planes, by `warps` warps of which this is number `warp`.
DEVICE void stage_x(const FewExperts &p, u8 *shared, int row, int warp, int warps) {
#pragma unroll 1
    for (int i = warp; i < spans_of(p.cols); i += warps) {
        int column = i * SPAN + threadIdx.x % 32 * 8;
        uint4 v = column < p.cols ? *(const uint4 *)(p.x + (long)row * p.cols + column) : make_uint4(0, 0, 0, 0);
        u32 pairs[4] = {v.x, v.y, v.z, v.w};
        float x[8];
#pragma unroll
        for (int k = 0; k < 8; k++) x[k] = bf16_value((u16)(pairs[k / 2] >> (k % 2 * 16)));
        store_planes(shared + p.planes_at + i * PLANES, x);
    }
}

/// Sums of an item's 16 rows by this warp's part of the columns, of its slot at `at`.
DEVICE void multiply_item(const FewExperts &p, Choice &choice, const Eight &item, u8 *shared, int at, int2 odd, int part, int to) {
    int lane = threadIdx.x % 32, g = lane / 4, spans = (spans_of(p.cols) + PARTS - 1) / PARTS, span = part * spans;
    int columns = min(spans * SPAN, p.cols - span * SPAN);
    float low = 0.0f, high = 0.0f;
    if (columns > 0) {
        Halves rows;
        rows.low = at + odd.x + g * p.gate.row_bytes + span * p.gate.span;
        rows.high = at + p.high_at + odd.y + g * p.up.row_bytes + span * p.up.span;
        rows.plain = choice.plain[threadIdx.x / 32];
        if (p.gate.plain || p.up.plain) {
            u32 expert = choice.pairs[item.pair], row = min(item.tile * 8 + g, p.width - 1);
            if (lane < 6) rows.plain[lane] = lane == 1 || lane > 3 ? matrix_of(p.up, expert) : matrix_of(p.gate, expert);
            if (p.gate.plain) rows.low = row * p.gate.row_bytes + span * p.gate.span;
            if (p.up.plain) rows.high = row * p.up.row_bytes + span * p.up.span;
            __syncwarp();
        }
        int planes = p.planes_at + span * PLANES;
        bool mixed = p.gate.type != p.up.type;
        // Matrices of two types: each by itself, and half of that is left unused.
#pragma unroll 1
        for (int i = 0; i <= (int)mixed; i++) {
            float sums[2] = {};
            Halves twice = rows;
            if (mixed) twice.low = twice.high = i ? rows.high : rows.low, twice.plain += 2 + 2 * i;
            multiply_halves(sums, i ? p.up.type : p.gate.type, shared, twice, planes, columns, p.table_at[i]);
            if (i == 0) low = sums[0];
            if (i == (int)mixed) high = sums[1];
        }
    }
    low = row_sum(low), high = row_sum(high);
    float *sums = (float *)(shared + to) + part * TILE + g;
    if (lane % 4 == 0) sums[0] = low, sums[8] = high;
}

/// A number that another block looks for is not the mark.
DEVICE float unmarked(float x) { return __float_as_uint(x) == MARK ? __uint_as_float(0x7fffffffu) : x; }

/// Stores a number that another block looks for.
DEVICE void store_relaxed(float *to, float x) { asm volatile("st.relaxed.gpu.global.f32 [%0], %1;" ::"l"(to), "f"(x) : "memory"); }

/// Keeps an item's rows if they came over the link, by each of its warps a part.
DEVICE void keep_item(const FewExperts &p, Choice &choice, const Eight &item, const u8 *shared, int copied) {
    int slot = slot_for(choice.kept, item.pair), first = item.tile * 8, count = min(8, p.width - first);
    if (slot < 0) return;
    u32 expert = choice.pairs[item.pair];
    int2 odd = choice.odd[copied];
    const u8 *at = shared + p.slots_at + copied * p.slot_bytes;
    Threads by = {thread_again() / 32 % PARTS * 32, 32 * PARTS};
    keep_rows(room_of(p.keep, slot, 0, expert) + first * p.gate.row_bytes, at + odd.x, count * p.gate.row_bytes, by);
    keep_rows(room_of(p.keep, slot, 1, expert) + first * p.up.row_bytes, at + p.high_at + odd.y, count * p.up.row_bytes, by);
}

/// Adds up an item's sums of all parts, [part][16], and stores its inner numbers; by a warp.
DEVICE void store_item(const FewExperts &p, const Choice &choice, const Eight &item, const float *sums) {
    int lane = threadIdx.x % 32, output = item.tile * 8 + lane;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < PARTS; i++) sum += sums[i * TILE + lane % TILE];
    float up = __shfl_down_sync(~0u, sum, 8);
    float x = unmarked(silu(sum) * up);
    // All eight in one store.
    if (lane < 8 && output < p.width) store_relaxed(choice.inner + (long)item.pair * p.width + output, x);
}

/// The items of a block from `first` on, up to `choice.end`, all of one row of x, by PARTS warps of each group. Copies to all slots have
/// begun.
DEVICE void gate_and_up(const FewExperts &p, Choice &choice, u8 *shared, int first) {
    int number = first + threadIdx.x / (32 * PARTS), turn = 0;
    Eight item = Eight::at(p, number);
#pragma unroll 1
    for (; number < choice.end; number += p.groups, Eight::step(item, p.groups, Sizes::items(p)), turn++) {
        int group = thread_again() / (32 * PARTS), part = thread_again() / 32 % PARTS;
        int slot = group * p.slots + (turn & (p.slots - 1)), to = p.items_at + (group * 2 + turn % 2) * PARTS * TILE * 4;
        bool here = choice.pairs[item.pair] != NOTHING;
        barrier_wait(barrier_of(choice, slot), (turn & p.slots) != 0);
        if (here) multiply_item(p, choice, item, shared, p.slots_at + slot * p.slot_bytes, choice.odd[slot], part, to);
        // Worked out anew: a product leaves few registers.
        group = thread_again() / (32 * PARTS), part = thread_again() / 32 % PARTS;
        slot = group * p.slots + (turn & (p.slots - 1)), to = p.items_at + (group * 2 + turn % 2) * PARTS * TILE * 4;
#if __CUDA_ARCH__ < 900
        item = Eight::at(p, number);
#endif
        here = choice.pairs[item.pair] != NOTHING;
        if (here && p.keep.book.slots) keep_item(p, choice, item, shared, slot);
        meet(1 + group, 32 * PARTS);
        // Each warp in turn stores, and another one asks for what comes next to the slot that is free now.
        int ahead = number + p.slots * p.groups;
        if (here && part == turn % PARTS) store_item(p, choice, item, (const float *)(shared + to));
        if (part == (turn + 1) % PARTS && ahead < choice.end) {
            Eight next = Eight::at(p, ahead);
            bring_item(p, choice, next.pair, Begins::of(p, next), shared_address(shared), slot);
        }
    }
}

/// The first row of two in a tile of 16 that this lane has; the other one is the second next. So rows of 132 bytes lie in different banks.
DEVICE int low_row() {
    int g = threadIdx.x % 32 / 4;
    return g % 2 + g / 2 % 2 * 8 + g / 4 * 4;
}

/// Multiplies eight numbers of each lane, a span of one of `width` numbers, with a tile of an expert whose first row lies at `at`, and
/// leaves 16 sums. `planes`: of this warp; `own`: the lane, read anew where it is not to be kept.
DEVICE void multiply_rows(const FewExperts &p, Choice &choice, const Experts &e, u32 expert, const float x[8], int width, u8 *shared, int at,
                          int tile, int span, int table, int to, int own) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = low_row(), planes = p.scratch_at + warp * PLANES;
    float sums[2] = {};
    Halves rows;
    rows.low = at + row * e.row_bytes + span * e.span, rows.high = rows.low + 2 * e.row_bytes;
    rows.plain = choice.plain[warp];
    __syncwarp(); // behind products with what planes and places of plain numbers were before
    if (e.plain) {
        if (own < 2) rows.plain[own] = matrix_of(e, expert);
        rows.low = min(tile * TILE + row, p.cols - 1) * e.row_bytes + span * e.span;
        rows.high = min(tile * TILE + row + 2, p.cols - 1) * e.row_bytes + span * e.span;
    }
    store_planes(shared + planes, x);
    __syncwarp();
    multiply_halves(sums, e.type, shared, rows, planes, min(SPAN, width - span * SPAN), table);
    float low = row_sum(sums[0]), high = row_sum(sums[1]);
    float *out = (float *)(shared + to) + low_row();
    if (lane % 4 == 0) out[0] = low, out[2] = high;
}

DEVICE uint4 load_relaxed(const float *from) {
    uint4 x;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(from) : "memory");
    return x;
}

DEVICE bool is_there(const uint4 &x) { return x.x != MARK && x.y != MARK && x.z != MARK && x.w != MARK; }

/// Eight inner numbers of each lane, when they are there; of lanes that are not `inside`, zeros.
DEVICE void inner_numbers(const float *from, bool inside, float x[8]) {
    uint4 low, high;
    bool there;
    u32 polls = 0;
    do {
        low = high = make_uint4(0, 0, 0, 0);
        if (inside) low = load_relaxed(from), high = load_relaxed(from + 4);
        there = is_there(low) && is_there(high);
        // Some 20 s: a block is missing, which an error is better than.
        if (++polls == 1u << 25) asm volatile("trap;");
    } while (!__all_sync(~0u, there));
    u32 bits[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] = __uint_as_float(bits[i]);
}

/// What a thread needs to add up its output of a row, asked for early.
struct Output {
    float before, total, share;
    bool exists;

    DEVICE Output at(const FewExperts &p, int row, int column, bool exists) {
        Output out = {0.0f, 0.0f, 0.0f, exists && column < p.cols};
        if (!out.exists) return out;
        long place = (long)row * p.cols + column;
        if (p.last) out.before = p.hidden[place];
        if (p.first) out.share = p.share[(long)row * p.gates_stride];
        else out.total = p.sum[place];
        return out;
    }
};

/// Adds the chosen experts of a row to an output, ascending: weight times the sum over spans. `from`: of the row's first expert,
/// [expert][span][16].
DEVICE float add_experts(const FewExperts &p, const Choice &choice, int row, const float *from, float total) {
    int spans = Sizes::spans(p);
#pragma unroll 4
    for (int e = 0; e < p.used; e++) {
        int2 one = choice.ascending[row][e];
        const float *at = from + max(one.x - row * p.used, 0) * spans * TILE;
        // Two spans are what there is as a rule.
        float dot = 0.0f + at[0];
        if (spans > 1) dot += at[TILE];
#pragma unroll 1
        for (int s = 2; s < spans; s++) dot += at[s * TILE];
        total = one.x >= 0 ? fmaf(__int_as_float(one.y), dot, total) : total;
    }
    return total;
}

/// How many launches all blocks know of.
DEVICE u32 launches_before(const FewExperts &p) {
    u32 before;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(before) : "l"(p.launches + 1) : "memory");
    return before;
}

/// Finds out where this launch's inner numbers go, by one thread: to either half of their room by turns.
DEVICE void find_inner(const FewExperts &p, Choice &choice) {
    bool second = launches_before(p) & 1;
    choice.inner = p.inner + (second ? p.inner_room : 0), choice.other = p.inner + (second ? 0 : p.inner_room);
}

/// Counts the launch when all blocks have found out, by one thread: so late that nobody waits for that.
DEVICE void count_launch(const FewExperts &p) {
    u32 here;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(here) : "l"(p.launches) : "memory");
    if (here < gridDim.x - 1) return;
    asm volatile("st.relaxed.gpu.global.u32 [%0], 0;" ::"l"(p.launches) : "memory");
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p.launches + 1), "r"(launches_before(p) + 1) : "memory");
}

/// Marks this block's share of the places of the next launch's inner numbers, by a warp.
DEVICE void mark_others(const FewExperts &p, const Choice &choice) {
    int first = (blockIdx.x * 32 + threadIdx.x % 32) * 4;
    for (int i = first; i < p.inner_room; i += gridDim.x * 32 * 4) *(uint4 *)(choice.other + i) = make_uint4(MARK, MARK, MARK, MARK);
}

/// The choice of row `row`, by a warp.
DEVICE void choose_row(const FewExperts &p, Choice &choice, u32 *keys, int row) {
    int lane = threadIdx.x % 32;
    choose_experts(p.logits + (long)row * p.gates_stride, p.experts, p.used, keys, choice.ids[row], choice.weights[row]);
    __syncwarp();
    if (lane >= p.used) return;
    u32 id = choice.ids[row][lane];
    // All that was chosen is of a wave that is the only one.
    choice.pairs[row * p.used + lane] = (p.first && p.last) || has(p.mask, id) ? id : NOTHING;
}

/// What is left to do of the choice of a row when copies have begun, by a warp.
DEVICE void settle_choice(const FewExperts &p, Choice &choice, int row, bool stores) {
    int lane = threadIdx.x % 32, at = row * p.used + lane;
    weigh_experts(choice.ids[row], p.used, choice.weights[row], choice.order[row]);
    __syncwarp();
    if (lane >= p.used) return;
    u32 rank = choice.order[row][lane], pair = row * p.used + rank;
    choice.ascending[row][lane] = make_int2(choice.pairs[pair] == NOTHING ? -1 : (int)pair, __float_as_int(choice.weights[row][rank]));
    if (!stores) return;
    p.ids[at] = choice.ids[row][lane], p.weights[at] = choice.weights[row][lane], p.order[at] = choice.order[row][lane];
}
