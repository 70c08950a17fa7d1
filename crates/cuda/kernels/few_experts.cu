// Experts of one row of x, in one kernel: their choice, gate and up, and down, with the shared expert's.
//
// A block stands on each multiprocessor. What does not depend on the choice (tables, the shared expert's tile) is fetched or made before
// it is known; behind it each block asks at once for the first matrices of gate and up, and when those are there for its own of down.
// The block that begins last is waited for by all others: so little is done before the choice, and by many warps side by side.
//
// Gate and up: a block has neighbouring items. Down: it has tiles of 16 outputs. Groups of warps take experts in turns, each warp some
// spans of 256 inner numbers. The last warp multiplies the shared expert's tile while the others have gate and up.
//
// Shared memory: zeros, tables, x as planes, planes of each warp, sums of down ([expert][span][16], behind those of the shared expert;
// before that the keys of `choose_experts`), sums of items, the shared expert's tile, the first slots of down, the slots of gate and up, in
// which more of down come later.

/// The copies of an item, but for its expert: worked out before that is known, where matrices lie in words of 16 bytes (`aligned`).
struct Prepared {
    const u8 *gate, *up;
    int gate_bytes, up_bytes;

    DEVICE Prepared of(const FewExperts &p, Choice &choice, const Begins &begins, int slot) {
        Lines gate = Lines::at(p.gate, p.gate.at + begins.gate, 8), up = Lines::at(p.up, p.up.at + begins.up, 8);
        if (threadIdx.x % 32 == 0) choice.odd[slot] = make_int2(gate.odd, up.odd);
        return {gate.from, up.from, gate.bytes, up.bytes};
    }

    /// Begins them, by a warp.
    DEVICE void begin(const FewExperts &p, const Prepared &item, const Choice &choice, int pair, u32 shared, int slot) {
        u32 expert = choice.pairs[pair], to = shared + p.slots_at + slot * p.slot_bytes, of = expert == NOTHING ? 0 : expert;
        Lines gate = {item.gate + (u64)of * (u32)p.gate.stride, 0, expert == NOTHING ? 0 : item.gate_bytes};
        Lines up = {item.up + (u64)of * (u32)p.up.stride, 0, expert == NOTHING ? 0 : item.up_bytes};
        begin_copies(barrier_of(choice, slot), to, gate, to + p.high_at, up);
    }
};

/// Begins to copy a tile of the shared expert.
DEVICE void bring_shared(const FewExperts &p, Choice &choice, int tile, u32 shared) {
    Lines lines = Lines::of(p.shared, p.shared.at, tile * TILE, min(TILE, p.cols - tile * TILE)), none = {0, 0, 0};
    begin_copies(barrier_of(choice, SHARED_BARRIER), shared + p.shared_at, lines, 0, none);
}

/// Products of the shared expert's tile: of few spans by the last warp, else by all.
DEVICE void multiply_shared(const FewExperts &p, Choice &choice, u8 *shared, int tile) {
    int thread = thread_again(), lane = thread % 32, warp = thread / 32, warps = Sizes::warps(p) + 1, all = Sizes::shared_spans(p);
    bool few = all <= 4;
    int sums = p.sums_at + p.used * Sizes::spans(p) * TILE * 4;
    int odd = (int)(u64)(p.shared.at + (long)tile * TILE * p.shared.row_bytes) & 15;
    if (tile >= Sizes::tiles(p)) return;
#pragma unroll 1
    for (int span = few ? (warp < warps - 1 ? all : 0) : warp; span < all; span += few ? 1 : warps) {
        int column = span * SPAN + lane * 8;
        float gate[8], up[8];
        spread(numbers_at(p.shared_gate + column, column < p.shared_cols), gate);
        spread(numbers_at(p.shared_up + column, column < p.shared_cols), up);
#pragma unroll
        for (int k = 0; k < 8; k++) gate[k] = silu(gate[k]) * up[k];
        barrier_wait(barrier_of(choice, SHARED_BARRIER), tile / gridDim.x & 1);
        multiply_rows(p, choice, p.shared, 0, gate, p.shared_cols, shared, p.shared_at + odd, tile, span, p.table_at[3], sums + span * TILE * 4,
                      threadIdx.x % 32);
    }
}

/// What a group of down has in its turn: an expert (`pair`) of a tile. All groups have as many turns a tile, some of them with nothing to do.
struct Turn {
    int tile, pair;

    DEVICE int of_tile(const FewExperts &p) { return (p.used + Sizes::groups(p) - 1) / Sizes::groups(p); }

    DEVICE Turn at(const FewExperts &p, int group, int turn) {
        int of = of_tile(p), tiles = small_quotient(turn, of);
        return {(int)(blockIdx.x + tiles * gridDim.x), group + (turn - tiles * of) * Sizes::groups(p)};
    }
};

/// Begins to copy what a group has in turn `turn`, by a warp; nothing behind the block's last tile.
DEVICE void bring_turn(const FewExperts &p, Choice &choice, u32 shared, int group, int turn) {
    Turn next = Turn::at(p, group, turn);
    if (next.tile < Sizes::tiles(p)) bring_down(p, choice, next.tile, next.pair, shared, group, turn & (p.down_slots - 1));
}

/// The same for the turns from `first` to `end` of this warp's group, by one of its warps.
DEVICE void bring_turns(const FewExperts &p, Choice &choice, u32 shared, int first, int end) {
    int warp = thread_again() / 32, parts = Sizes::parts(p);
    if (parts == 2 && warp % 2 == 0) return; // those have brought items, some of them
#pragma unroll 1
    for (int turn = first; turn < end; turn++) bring_turn(p, choice, shared, parts == 2 ? warp / 2 : warp, turn);
}

#if __CUDA_ARCH__ >= 900

/// Whether a group has one item of gate and up at most, and one turn of down: their copies come one behind the other then.
DEVICE bool has_one_turn(const FewExperts &p) {
    return p.slots == 1 && p.down_slots == 1 && Turn::of_tile(p) == 1 && Sizes::tiles(p) <= (int)gridDim.x;
}

/// Begins to copy all groups' only turn of down when all of a block's `items` are there, which come sooner so, by a warp: a group for each
/// lane.
DEVICE void bring_all_down(const FewExperts &p, Choice &choice, u32 shared, int items) {
#pragma unroll 1
    for (int group = 0; group < items; group++) barrier_wait(barrier_of(choice, group), 0);
    int group = threadIdx.x % 32;
    if (group >= Sizes::groups(p)) return;
    Lines lines = lines_of_down(p, choice, blockIdx.x, group), none = {0, 0, 0};
    choice.down_odd[group] = lines.odd;
    begin_copies_alone(barrier_of(choice, DOWN_BARRIERS + group), shared + down_place(p, group, 0), lines, 0, none);
}

#else

DEVICE bool has_one_turn(const FewExperts &) { return false; }
DEVICE void bring_all_down(const FewExperts &, Choice &, u32, int) {}

#endif

/// Keeps a tile of down if it came over the link.
DEVICE void keep_tile(const FewExperts &p, const Choice &choice, int tile, int pair, const u8 *from, int copied) {
    int slot = slot_for(choice.kept, pair), first = tile * TILE;
    if (slot < 0) return;
    int parts = Sizes::parts(p);
    Threads by = {parts == 2 ? thread_again() / 32 % 2 * 32 : 0, 32 * parts};
    from += choice.down_odd[copied];
    keep_rows(room_of(p.keep, slot, 2, choice.pairs[pair]) + first * p.down.row_bytes, from, min(TILE, p.cols - first) * p.down.row_bytes, by);
}

/// Products of a tile with the chosen experts, by all warps but the last. `turn`: the first one of the tile.
DEVICE void multiply_down(const FewExperts &p, Choice &choice, u8 *shared, int tile, int turn) {
    int warp = thread_again() / 32, parts = Sizes::parts(p), spans = Sizes::spans(p), group = parts == 2 ? warp / 2 : warp;
    int part = parts == 2 ? warp % 2 : 0;
#pragma unroll 1
    for (int end = turn + Turn::of_tile(p); turn < end; turn++) {
        int pair = Turn::at(p, group, turn).pair, place = turn & (p.down_slots - 1), slot = group * p.down_slots + place;
        u32 expert = pair < p.used ? choice.pairs[pair] : NOTHING;
        // Also where nothing comes: a phase that nobody waits for might not be over when the next one is waited for.
        if (expert == NOTHING) barrier_wait(barrier_of(choice, DOWN_BARRIERS + slot), (turn & p.down_slots) != 0);
#pragma unroll 1
        for (int span = expert == NOTHING ? spans : part; span < spans; span += parts) {
            float x[8];
            int column = span * SPAN + threadIdx.x % 32 * 8;
            inner_numbers(choice.inner + (long)pair * p.width + column, column < p.width, x);
            barrier_wait(barrier_of(choice, DOWN_BARRIERS + slot), (turn & p.down_slots) != 0);
            multiply_rows(p, choice, p.down, expert, x, p.width, shared, down_place(p, group, place) + choice.down_odd[slot], tile, span,
                          p.table_at[2], p.sums_at + (pair * spans + span) * TILE * 4, threadIdx.x % 32);
        }
        if (expert != NOTHING && p.keep.book.slots) keep_tile(p, choice, tile, pair, shared + down_place(p, group, place), slot);
        if (parts == 2) meet(1 + MOST_GROUPS + group, 64); // others may still be at those of gate and up
        else __syncwarp();
        if (part == 0) bring_turn(p, choice, shared_address(shared), group, turn + p.down_slots);
    }
}

/// Adds up an output: share · shared expert + Σ weight · down · x over the chosen experts, ascending.
DEVICE void store_output(const FewExperts &p, const Choice &choice, const Output &out, const u8 *shared, int i, int tile) {
    if (!out.exists) return;
    int spans = Sizes::spans(p), shared_spans = Sizes::shared_spans(p);
    const float *from = (const float *)(shared + p.sums_at) + i, *of_shared = from + p.used * spans * TILE;
    float total = out.total;
#pragma unroll 2
    for (int s = 0; s < shared_spans; s++) total += of_shared[s * TILE];
    if (p.first) total *= sigmoid(out.share);
    total = add_experts(p, choice, 0, from, total);
    int place = tile * TILE + i;
    if (p.last) p.hidden[place] = out.before + total;
    else p.sum[place] = total;
}

/// Has this block's share of what is read behind this kernel brought to the second cache, by a warp: at the end, as what other blocks still
/// read from that cache would wait.
DEVICE void look_ahead(const FewExperts &p) {
    int lane = threadIdx.x % 32;
    if (lane > 3) return;
    u32 from = blockIdx.x * p.ahead[lane].share, bytes = p.ahead[lane].bytes;
    if (from < bytes) prefetch_bulk(p.ahead[lane].at + from, min(p.ahead[lane].share, bytes - from));
}

/// What warps do before the first copies of what was chosen: the first one chooses, so many stage x, and, the last ones, make zeros and
/// tables. All but the first do both if they are too few.
struct Roles {
    int staging, others;

    DEVICE Roles of(const FewExperts &p) {
        int all = Sizes::warps(p), staging = all >= 12 ? min(8, all - 8) : all;
        return {staging, all >= 12 ? all - staging : all};
    }
};

/// Barriers, the shared expert's tile, zeros and tables: what does not depend on the kernel before.
DEVICE void prepare(const FewExperts &p, Choice &choice, u8 *shared, const Roles &roles) {
    int thread = threadIdx.x - 32 * (Sizes::warps(p) + 1 - roles.others), lane = threadIdx.x % 32;
    if (thread < 0) return;
    if (threadIdx.x / 32 == Sizes::warps(p)) {
        if (lane == 0) barrier_init(barrier_of(choice, SHARED_BARRIER), arrivals()), barrier_init(shared_address(&choice.kept.known), 1);
        barriers_made();
        __syncwarp();
        if (Sizes::shared_spans(p) && (int)blockIdx.x < Sizes::tiles(p)) bring_shared(p, choice, blockIdx.x, shared_address(shared));
    }
    make_barriers(p, choice, Sizes::groups(p), thread / 32, roles.others);
    fill_tables(p, shared, {thread, 32 * roles.others});
}

/// Behind a block's gate and up: more of down comes where they have been, and its table where theirs was. Where each group has at most
/// one turn of down, and the table is the same, warps go on without the others.
DEVICE void turn_to_down(const FewExperts &p, Choice &choice, u8 *shared) {
    int thread = thread_again();
    bool same = p.down.type == p.gate.type, alone = same && Turn::of_tile(p) == 1 && Sizes::tiles(p) <= (int)gridDim.x;
    if (!alone) __syncthreads();
    if (thread / 32 == Sizes::warps(p)) {
        if (thread % 32 == 0) count_launch(p);
    } else if (!alone) {
        bring_turns(p, choice, shared_address(shared), 1, p.down_slots);
    }
    if (same) return;
    fill_table_of(p.down.type, (u32 *)(shared + p.table_at[2]), {thread, (int)blockDim.x});
    __syncthreads();
}

/// Grid: a block for each multiprocessor, or fewer.
KERNEL __launch_bounds__(EXPERTS_THREADS, 1) void few_experts(__grid_constant__ const FewExperts p) {
    extern __shared__ __align__(128) u8 in_lines[];
    u8 *shared = in_lines;
    __shared__ Choice choice;
    next();
    int warp = threadIdx.x / 32, group = warp / PARTS, part = warp % PARTS;
    int all = Sizes::items(p) * p.used, first = blockIdx.x * all / gridDim.x, end = (blockIdx.x + 1) * all / gridDim.x;
    u32 base = shared_address(shared);
    int number = first + group + part * p.groups; // of the first item that this warp asks for
    Eight item = Eight::at(p, number);
    Begins begins = Begins::of(p, item);
    Roles roles = Roles::of(p);
    bool asks = warp < Sizes::warps(p) && part < p.slots && number < end;
    Prepared prepared = {};
    if (p.aligned && asks) prepared = Prepared::of(p, choice, begins, group * p.slots + part);
    if (threadIdx.x == 0) choice.end = end;
    prepare(p, choice, shared, roles);
    previous();
    if (warp == 0) {
        choose_row(p, choice, (u32 *)(shared + p.scratch_at), 0);
    } else if (warp <= roles.staging) {
        stage_x(p, shared, 0, warp - 1, roles.staging);
        if (threadIdx.x == 32) find_inner(p, choice);
    }
    __syncthreads();
    if (warp < Sizes::warps(p)) {
        if (asks && p.aligned) Prepared::begin(p, prepared, choice, item.pair, base, group * p.slots + part);
        else if (asks) bring_item(p, choice, item.pair, begins, base, group * p.slots + part);
        if (!has_one_turn(p)) bring_turns(p, choice, base, 0, 1);
        gate_and_up(p, choice, shared, first);
    } else {
        settle_choice(p, choice, 0, blockIdx.x == 0);
        if (p.keep.book.slots) find_missing(p.keep, choice.pairs, choice.kept);
        mark_others(p, choice);
        if (has_one_turn(p)) bring_all_down(p, choice, base, choice.end - first);
    }
    if (Sizes::shared_spans(p)) multiply_shared(p, choice, shared, blockIdx.x);
    turn_to_down(p, choice, shared);
#pragma unroll 1
    for (int tile = blockIdx.x, turn = 0; tile < Sizes::tiles(p); tile += gridDim.x, turn += Turn::of_tile(p)) {
        if (turn > 0 && Sizes::shared_spans(p)) {
            if (thread_again() / 32 == Sizes::warps(p)) bring_shared(p, choice, tile, base);
            multiply_shared(p, choice, shared, tile);
        }
        if (thread_again() / 32 < Sizes::warps(p)) multiply_down(p, choice, shared, tile, turn);
        int i = thread_again();
        Output out = Output::at(p, 0, tile * TILE + i, i < TILE);
        __syncthreads();
        store_output(p, choice, out, shared, i, tile);
        if (tile + (int)gridDim.x < Sizes::tiles(p)) __syncthreads();
    }
    if (thread_again() / 32 == Sizes::warps(p)) look_ahead(p);
    if (p.keep.book.slots) note_kept(p.keep, choice.pairs, choice.kept);
}
