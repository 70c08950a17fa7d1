// Experts of two to eight rows of x, in one kernel: as those of one row (`few_experts.cu`), cut another way.
//
// What binds are instructions, and reads of shared memory: a block has many items. So the type is found out once for all of them, a
// warp keeps its part of x in registers, and who stores an item's numbers asks for the next item while the others go on.
//
// Down: a job is neighbouring tiles of 16 outputs of one row of x. Each warp has a span of 256 inner numbers of one expert, makes them
// planes once, and goes with them through all tiles of the job. Sums of a row are added up where all of them are, in the order that
// a row alone has.
//
// The shared expert: a block has a tile for all rows, multiplies it while experts are chosen and come, and hands the outputs on as inner
// numbers are.
//
// Shared memory: as of one row; sums of down are [tile of the job][expert][span][16], the keys of the choice lie where sums of items will be.

const int MORE_THREADS = 32 * PARTS * MOST_GROUPS;

/// What a block has of a row: neighbouring tiles of outputs, perhaps none, and items of gate and up. Those are, of eights of inner numbers and
/// experts, neighbours in the order [eight][expert], and go by experts.
struct Job {
    int row, tile, tiles;
    int first, from, end, to; // of experts before `from` the eights begin behind `first`, of others with it; `end`, `to` alike
    int items;

    DEVICE Job of(const FewExperts &p) {
        int row = small_quotient(blockIdx.x, p.row_jobs), number = blockIdx.x - row * p.row_jobs, all = Sizes::items(p) * p.used;
        int begin = number * all / p.row_jobs, end = (number + 1) * all / p.row_jobs;
        Job job = {row, number * p.job_tiles, min(p.job_tiles, Sizes::tiles(p) - number * p.job_tiles)};
        job.first = small_quotient(begin, p.used), job.from = begin - job.first * p.used;
        job.end = small_quotient(end, p.used), job.to = end - job.end * p.used;
        job.items = end - begin;
        return job;
    }

    /// Sums of a tile.
    DEVICE int sums(const FewExperts &p) { return p.used * Sizes::spans(p); }
};

/// An item: an expert's number among those of its row, and eight of its inner numbers.
struct Item {
    int expert, eight;

    DEVICE Item at(const FewExperts &p, const Job &job, int number) {
        Item item = {0, job.first + (job.from > 0) + number};
        settle(p, job, item);
        return item;
    }

    /// What is too far for an expert is of the next one.
    DEVICE void settle(const FewExperts &p, const Job &job, Item &item) {
        while (item.expert < p.used && item.eight >= job.end + (item.expert < job.to)) {
            item.eight -= job.end + (item.expert < job.to);
            item.expert++;
            item.eight += job.first + (item.expert < job.from);
        }
    }

    DEVICE void step(const FewExperts &p, const Job &job, Item &item, int by) {
        item.eight += by;
        settle(p, job, item);
    }

    DEVICE int pair(const FewExperts &p, const Job &job, const Item &item) { return job.row * p.used + item.expert; }

    DEVICE Begins begins(const FewExperts &p, const Item &item) { return Begins::of(p, Eight{0, item.eight}); }
};

/// This lane's factors of a span of x, in registers, if those suffice.
struct Held {
#if __CUDA_ARCH__ >= 900
    uint2 at[8];
#else
    const u8 *at;
#endif
    float scale;

    __device__ __forceinline__ void read(const u8 *shared, int planes) {
        int lane = threadIdx.x % 32, q = lane % 4, column = lane / 4;
        const u8 *own = shared + (column / 2 == q ? planes + column % 2 * PLANE + 32 * q : 0);
#if __CUDA_ARCH__ >= 900
#pragma unroll
        for (int i = 0; i < 8; i++) at[i] = factors(own, i / 4, i % 4);
#else
        at = own;
#endif
        scale = *(const float *)(shared + planes + 2 * PLANE);
    }
};

#if __CUDA_ARCH__ >= 900
DEVICE uint2 factors(const Held &x, int k, int t) { return x.at[4 * k + t]; }
#else
DEVICE uint2 factors(const Held &x, int k, int t) { return factors(x.at, k, t); }
#endif

/// This thread's number, read anew, without a sign: quotients of powers of two are shifts then.
DEVICE u32 place_again() { return (u32)thread_again(); }

/// Comes to a barrier at which others wait for as many threads (`meet`), and goes on.
DEVICE void come(int barrier, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory"); }

/// Stores an item's inner numbers, the sums of all parts, [part][16]; by a warp, which calls `read` when it has read them.
template <class Read> DEVICE void store_sums(const FewExperts &p, const Choice &choice, int pair, int eight, const float *sums, Read read) {
    u32 lane = place_again() % 32, output = eight * 8 + lane;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < PARTS; i++) sum += sums[i * TILE + lane % TILE];
    float up = __shfl_down_sync(~0u, sum, 8);
    read();
    float x = unmarked(silu(sum) * up);
    if (choice.pairs[pair] != NOTHING && lane < 8 && output < p.width) store_relaxed(choice.inner + pair * p.width + output, x);
}

/// Spans of x that a warp has of an item, at most.
DEVICE int own_spans(const FewExperts &p) { return (spans_of(p.cols) + PARTS - 1) / PARTS; }

/// Begins to copy the first items of all groups, to all slots, by a warp: a lane for each, where one can.
DEVICE void bring_first(const FewExperts &p, Choice &choice, const Job &job, u32 shared) {
    int count = min(p.groups * p.slots, job.items);
#if __CUDA_ARCH__ >= 900
    int number = threadIdx.x % 32;
    if (number >= count) return;
    Item item = Item::at(p, job, number);
    u32 expert = choice.pairs[Item::pair(p, job, item)], rows = expert == NOTHING ? 0 : 8, to = shared + p.slots_at + number * p.slot_bytes;
    if (expert == NOTHING) expert = 0;
    Begins begins = Item::begins(p, item);
    Lines gate = Lines::at(p.gate, matrix_of(p.gate, expert) + begins.gate, rows), up = Lines::at(p.up, matrix_of(p.up, expert) + begins.up, rows);
    choice.odd[number] = make_int2(gate.odd, up.odd);
    // What is needed first is asked for first.
#pragma unroll 1
    for (int slot = 0; slot < p.slots; slot++) {
        if (number / p.groups == slot) begin_copies_alone(barrier_of(choice, number), to, gate, to + p.high_at, up);
    }
#else
    for (int number = 0; number < count; number++) {
        Item item = Item::at(p, job, number);
        bring_item(p, choice, Item::pair(p, job, item), Item::begins(p, item), shared, number);
    }
#endif
}

/// Warps share the spans of an expert by two, if there are two: how many times two they are, and groups of them.
struct Shares {
    DEVICE int twice(const FewExperts &p) { return Sizes::spans(p) > 1; }
    DEVICE int groups(const FewExperts &p) { return Sizes::warps(p) >> twice(p); }
    /// Turns of an expert: the job's tiles for a span of each warp, then for the next ones.
    DEVICE int turns(const FewExperts &p, const Job &job) { return ((Sizes::spans(p) + twice(p)) >> twice(p)) * job.tiles; }

    /// What a group has in its turn `i`; nothing behind the last one. All groups have as many.
    DEVICE Lines at(const FewExperts &p, const Choice &choice, const Job &job, int group, int i) {
        int tile = i, expert = group;
        while (tile >= turns(p, job)) tile -= turns(p, job), expert += groups(p);
        while (tile >= job.tiles) tile -= job.tiles;
        u32 id = expert < p.used ? choice.pairs[job.row * p.used + expert] : NOTHING;
        int first = (job.tile + tile) * TILE;
        return Lines::of(p.down, matrix_of(p.down, id == NOTHING ? 0 : id), first, id == NOTHING ? 0 : min(TILE, p.cols - first));
    }

    DEVICE bool has(const FewExperts &p, const Job &job, int i) {
        int first = 0;
        while (i >= turns(p, job)) i -= turns(p, job), first += groups(p);
        return first < p.used;
    }
};

/// Begins to copy what groups have in their turns, by a warp, a lane for each where one can: of `count`, number n is turn i + n · by_turn of
/// group group + n · by_group.
DEVICE void bring_shares(const FewExperts &p, Choice &choice, u32 shared, const Job &job, int group, int by_group, int i, int by_turn, int count) {
#if __CUDA_ARCH__ >= 900
    int n = threadIdx.x % 32;
    if (n >= count) return;
    group += n * by_group, i += n * by_turn;
    int place = i & (p.down_slots - 1);
    if (!Shares::has(p, job, i)) return;
    Lines lines = Shares::at(p, choice, job, group, i), none = {0, 0, 0};
    begin_copies_alone(barrier_of(choice, DOWN_BARRIERS + group * p.down_slots + place), shared + down_place(p, group, place), lines, 0, none);
#else
    for (int n = 0; n < count; n++, group += by_group, i += by_turn) {
        int place = i & (p.down_slots - 1);
        if (!Shares::has(p, job, i)) return;
        Lines lines = Shares::at(p, choice, job, group, i), none = {0, 0, 0};
        begin_copies(barrier_of(choice, DOWN_BARRIERS + group * p.down_slots + place), shared + down_place(p, group, place), lines, 0, none);
    }
#endif
}

/// Tiles of the shared expert that a block has, for all rows.
struct Tiles {
    int first, count;

    DEVICE Tiles of(const FewExperts &p) {
        int first = blockIdx.x * p.shared_tiles;
        return {first, p.first ? max(min(p.shared_tiles, Sizes::tiles(p) - first), 0) : 0};
    }
};

/// Begins to copy the block's tiles of the shared expert, by a warp.
DEVICE void bring_shared_tiles(const FewExperts &p, Choice &choice, u32 shared) {
    Tiles tiles = Tiles::of(p);
    int first = tiles.first * TILE;
    Lines lines = Lines::of(p.shared, p.shared.at, first, min(tiles.count * TILE, p.cols - first)), none = {0, 0, 0};
    begin_copies(barrier_of(choice, SHARED_BARRIER), shared + p.shared_at, lines, 0, none);
}

/// Products of those tiles with all rows, [tile][row][span][16], by `warps` warps, of which this is number `own`.
DEVICE void multiply_shared_tiles(const FewExperts &p, Choice &choice, u8 *shared, int own, int warps) {
    int lane = place_again() % 32, spans = Sizes::shared_spans(p);
    Tiles tiles = Tiles::of(p);
    int odd = (int)(u64)(p.shared.at + (long)tiles.first * TILE * p.shared.row_bytes) & 15;
#pragma unroll 1
    for (int i = own; i < tiles.count * p.count * spans; i += warps) {
        int rows = small_quotient(i, spans), span = i - rows * spans, tile = small_quotient(rows, p.count), row = rows - tile * p.count;
        int column = span * SPAN + lane * 8;
        const float *from = p.shared_gate + (long)row * p.gates_stride + column;
        float gate[8], up[8];
        spread(numbers_at(from, column < p.shared_cols), gate);
        spread(numbers_at(from + (p.shared_up - p.shared_gate), column < p.shared_cols), up);
#pragma unroll
        for (int k = 0; k < 8; k++) gate[k] = silu(gate[k]) * up[k];
        barrier_wait(barrier_of(choice, SHARED_BARRIER), 0);
        int at = p.shared_at + odd + tile * TILE * p.shared.row_bytes, to = p.shared_sums_at + i * TILE * 4;
        multiply_rows(p, choice, p.shared, 0, gate, p.shared_cols, shared, at, tiles.first + tile, span, p.table_at[3], to, place_again() % 32);
    }
}

/// Where the shared expert's outputs are handed over, [row][cols], behind inner numbers.
DEVICE float *shared_outputs(const FewExperts &p, const Choice &choice) { return choice.inner + p.shared_room; }

/// Adds up the shared expert's outputs and stores them for the blocks that need them.
DEVICE void store_shared_tiles(const FewExperts &p, const Choice &choice, const u8 *shared) {
    Tiles tiles = Tiles::of(p);
    int spans = Sizes::shared_spans(p);
    for (int i = thread_again(); i < tiles.count * p.count * TILE; i += blockDim.x) {
        int rows = i / TILE, tile = small_quotient(rows, p.count), row = rows - tile * p.count, column = (tiles.first + tile) * TILE + i % TILE;
        const float *sums = (const float *)(shared + p.shared_sums_at) + rows * spans * TILE + i % TILE;
        float total = 0.0f;
        for (int s = 0; s < spans; s++) total += sums[s * TILE];
        if (column < p.cols) store_relaxed(shared_outputs(p, choice) + (long)row * p.cols + column, unmarked(total));
    }
}

/// One of those, when it is there.
DEVICE float shared_output(const FewExperts &p, const Choice &choice, int row, int column) {
    u32 x, polls = 0;
    const float *from = shared_outputs(p, choice) + (long)row * p.cols + column;
    do {
        asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
        if (++polls == 1u << 25) asm volatile("trap;");
    } while (x == MARK);
    return __uint_as_float(x);
}

/// Gate and up where both are of type T, and a warp has no more than two spans of x. The first items are under way.
template <class T> DEVICE void gate_and_up_of(const FewExperts &p, Choice &choice, u8 *shared, const Job &job) {
    const int BYTES = SPAN / T::LEN * T::BYTES;
    u32 part = place_again() / 32 % PARTS, table = shared_address(shared) + p.table_at[0];
    int span = part * own_spans(p), columns = min(own_spans(p) * SPAN, p.cols - span * SPAN);
    int line = place_again() % 32 / 4 * p.gate.row_bytes + span * p.gate.span;
    int number = place_again() / (32 * PARTS);
    u32 turn = 0;
    Item item = Item::at(p, job, number);
    Held x[2];
    if (columns > 0) x[0].read(shared, p.planes_at + span * PLANES);
    if (columns > SPAN) x[1].read(shared, p.planes_at + (span + 1) * PLANES);
#pragma unroll 1
    for (; number < job.items; number += p.groups, Item::step(p, job, item, p.groups), turn++) {
        u32 thread = place_again(), slot = (turn & (p.slots - 1)) * p.groups + thread / (32 * PARTS);
        barrier_wait(barrier_of(choice, slot), (turn & p.slots) != 0);
        // Of two turns, [warp][16] each.
        float *sums_at = (float *)(shared + p.items_at) + (turn & 1) * (PARTS * TILE * p.groups);
        if (choice.pairs[Item::pair(p, job, item)] != NOTHING) {
            float sums[2] = {};
            int2 odd = choice.odd[slot];
            const u8 *low = shared + p.slots_at + slot * p.slot_bytes + line + odd.x, *high = low + p.high_at + odd.y - odd.x;
            if (columns > 0) multiply_span<T>(sums, low, high, x[0], x[0].scale, columns / 32, table);
            if (columns > SPAN) multiply_span<T>(sums, low + BYTES, high + BYTES, x[1], x[1].scale, columns / 32 - 8, table);
            float sum = row_sums(sums[0], sums[1]);
            thread = place_again();
            if (thread % 4 < 2) sums_at[thread / 32 * TILE + thread % 32 / 4 + thread % 2 * 8] = sum;
        }
        thread = place_again();
        u32 group = thread / (32 * PARTS), barrier = 1 + group + turn % 2 * MOST_GROUPS;
        // One warp in turn stores, and asks for what comes to the slot that is free now. The others go on, as far as there are slots: two.
        if ((thread / 32 ^ turn) % PARTS != 0) {
            come(barrier, 32 * PARTS);
            continue;
        }
        meet(barrier, 32 * PARTS);
        store_sums(p, choice, Item::pair(p, job, item), item.eight, sums_at + group * PARTS * TILE, [&] {
            if (number + p.slots * p.groups >= job.items) return;
            Item next = item;
            Item::step(p, job, next, p.slots * p.groups);
            bring_item(p, choice, Item::pair(p, job, next), Item::begins(p, next), shared_address(shared), (turn & (p.slots - 1)) * p.groups + group);
        });
    }
}

/// Products of a job's tiles with the experts of its row, of type T.
template <class T> DEVICE void multiply_job(const FewExperts &p, Choice &choice, u8 *shared, const Job &job) {
    int twice = Shares::twice(p), group = place_again() / 32 >> twice, i = 0, row_bytes = p.down.row_bytes;
    u32 table = shared_address(shared) + p.table_at[2];
#pragma unroll 1
    for (int e = group; e - group < p.used; e += Shares::groups(p)) {
        u32 expert = e < p.used ? choice.pairs[job.row * p.used + e] : NOTHING;
        const u8 *matrix = matrix_of(p.down, expert == NOTHING ? 0 : expert) + (u32)(job.tile * TILE * row_bytes);
#pragma unroll 1
        for (int first = 0; first < Sizes::spans(p); first += 1 + twice) {
            int span = first + (place_again() / 32 & twice);
            bool here = expert != NOTHING && span < Sizes::spans(p);
            int planes = p.scratch_at + place_again() / 32 * PLANES, columns = min(SPAN, p.width - span * SPAN);
            // Tiles of a matrix lie whole words of 16 bytes apart.
            int line = ((u32)(u64)matrix & 15) + low_row() * row_bytes + span * p.down.span;
            Held x;
            if (here) {
                float numbers[8];
                int column = span * SPAN + place_again() % 32 * 8;
                inner_numbers(choice.inner + (job.row * p.used + e) * p.width + column, column < p.width, numbers);
                store_planes(shared + planes, numbers);
                __syncwarp();
                x.read(shared, planes);
            }
            int out = (e * Sizes::spans(p) + span) * TILE + low_row() + place_again() % 2 * 2;
#pragma unroll 1
            for (int tile = 0; tile < job.tiles; tile++, i++, out += Job::sums(p) * TILE) {
                u32 place = i & (p.down_slots - 1), slot = group * p.down_slots + place;
                barrier_wait(barrier_of(choice, DOWN_BARRIERS + slot), (i & p.down_slots) != 0);
                if (here) {
                    float sums[2] = {};
                    if constexpr (T::LEN == 8) {
                        int row = (job.tile + tile) * TILE + low_row();
                        const u8 *rows = matrix_of(p.down, expert) + span * p.down.span;
                        const u8 *low = rows + min(row, p.cols - 1) * row_bytes, *high = rows + min(row + 2, p.cols - 1) * row_bytes;
                        multiply_plain<T>(sums, low, high, shared + planes, columns);
                    } else {
                        const u8 *low = shared + down_place(p, group, place) + line;
                        multiply_span<T>(sums, low, low + 2 * row_bytes, x, x.scale, columns / 32, table);
                    }
                    float sum = row_sums(sums[0], sums[1]);
                    if (place_again() % 4 < 2) ((float *)(shared + p.sums_at))[out] = sum;
                }
                // The warps of a slot in turns ask for what comes next.
                if (twice) meet(1 + group, 64);
                else __syncwarp();
                if ((place_again() / 32 ^ i) & twice) continue;
                int ahead = tile + p.down_slots;
                if (ahead >= job.tiles) {
                    // Of the next spans or the next expert.
                    bring_shares(p, choice, shared_address(shared), job, group, 0, i + p.down_slots, 0, 1);
                    continue;
                }
                int odd = (u32)(u64)matrix & 15, bytes = (odd + min(TILE, p.cols - (job.tile + ahead) * TILE) * row_bytes + 15) & ~15;
                Lines lines = {matrix - odd + ahead * TILE * row_bytes, odd, expert == NOTHING || p.down.plain ? 0 : bytes}, none = {0, 0, 0};
                begin_copies(barrier_of(choice, DOWN_BARRIERS + slot), shared_address(shared) + down_place(p, group, place), lines, 0, none);
            }
        }
    }
}

/// Adds up an output of a job: share · shared expert + Σ weight · down · x over the chosen experts, ascending.
DEVICE void store_job(const FewExperts &p, const Choice &choice, const Output &out, const u8 *shared, const Job &job, int i) {
    if (!out.exists) return;
    const float *from = (const float *)(shared + p.sums_at) + i / TILE * Job::sums(p) * TILE + i % TILE;
    float total = p.first ? out.total * sigmoid(out.share) : out.total;
    total = add_experts(p, choice, job.row, from, total);
    long place = (long)job.row * p.cols + job.tile * TILE + i;
    if (p.last) p.hidden[place] = out.before + total;
    else p.sum[place] = total;
}

/// Barriers, zeros and tables, by `by.threads` threads; the block's tiles of the shared expert, by the last warp.
DEVICE void prepare_more(const FewExperts &p, Choice &choice, u8 *shared, Threads by) {
    int lane = threadIdx.x % 32, warps = by.threads / 32;
    bool last = threadIdx.x / 32 == Sizes::warps(p) - 1;
    if (last && lane == 0) barrier_init(barrier_of(choice, SHARED_BARRIER), arrivals());
    make_barriers(p, choice, Shares::groups(p), by.thread / 32, warps);
    __syncwarp();
    come(13, 32 * (warps + 1));
    if (last && Tiles::of(p).count > 0) bring_shared_tiles(p, choice, shared_address(shared));
    fill_tables(p, shared, by);
}

/// Grid: [rows][row_jobs].
KERNEL __launch_bounds__(MORE_THREADS, 1) void more_experts(__grid_constant__ const FewExperts p) {
    extern __shared__ __align__(128) u8 in_lines[];
    u8 *shared = in_lines;
    __shared__ Choice choice;
    next();
    int warp = threadIdx.x / 32, warps = Sizes::warps(p);
    u32 base = shared_address(shared);
    Job job = Job::of(p);
    bool typed = p.gate.type == p.up.type && !p.gate.plain && own_spans(p) <= 2;
    if (threadIdx.x == 0) choice.end = job.row * Sizes::items(p) * p.used + job.first * p.used + job.from + job.items;
    if (warp == 0) {
        previous();
        choose_row(p, choice, (u32 *)(shared + p.keys_at), job.row);
        __syncwarp();
        meet(13, 32 * warps); // barriers are made
        if (typed) bring_first(p, choice, job, base);
        settle_choice(p, choice, job.row, (int)blockIdx.x == job.row * p.row_jobs);
    } else {
        int own = warp - 1, others = warps - 1;
        prepare_more(p, choice, shared, {32 * own + (int)threadIdx.x % 32, 32 * others});
        previous();
        if (threadIdx.x == blockDim.x - 1) find_inner(p, choice);
        stage_x(p, shared, job.row, own, others);
        meet(14, 32 * others);
        // While experts are chosen and come.
        multiply_shared_tiles(p, choice, shared, own, others);
    }
    __syncthreads();
    if (warp == warps - 2) mark_others(p, choice);
    if (warp == warps - 3) bring_shares(p, choice, base, job, 0, 1, 0, 0, job.tiles > 0 ? Shares::groups(p) : 0);
    if (typed) {
        with_type(p.gate.type, All(), [&](auto type) {
            typedef decltype(type) T;
            if constexpr (T::LEN > 8) gate_and_up_of<T>(p, choice, shared, job);
        });
    } else {
        // The same items in another order.
        int group = warp / PARTS, part = warp % PARTS, begin = choice.end - job.items, number = begin + group + part * p.groups;
        Eight item = Eight::at(p, number);
        if (part < p.slots && number < choice.end) bring_item(p, choice, item.pair, Begins::of(p, item), base, group * p.slots + part);
        gate_and_up(p, choice, shared, begin);
    }
    __syncthreads();
    store_shared_tiles(p, choice, shared);
    // While others wait for inner numbers.
    if (thread_again() == (int)blockDim.x - 1) count_launch(p);
    if (job.tiles <= 0) return;
    // More of down comes where gate and up have been, and its table where theirs was.
    {
        int own = thread_again() / 32, twice = Shares::twice(p);
        if ((own & twice) == twice) bring_shares(p, choice, base, job, own >> twice, 0, 1, 1, p.down_slots - 1);
    }
    if (p.down.type != p.gate.type) {
        fill_table_of(p.down.type, (u32 *)(shared + p.table_at[2]), {thread_again(), (int)blockDim.x});
        __syncthreads();
    }
    with_type(p.down.type, All(), [&](auto type) { multiply_job<decltype(type)>(p, choice, shared, job); });
    int i = thread_again(), column = job.tile * TILE + i;
    Output out = Output::at(p, job.row, column, i < job.tiles * TILE);
    if (out.exists && p.first) out.total = shared_output(p, choice, job.row, column);
    __syncthreads();
    store_job(p, choice, out, shared, job, i);
}
