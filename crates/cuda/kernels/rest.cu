// Down for many pairs of an expert, of short rows: as `experts.cu`, but all of x of a tile, up to STEPS steps of it, stays in
// shared memory, while three groups walk over the rows of weights, 64 at a time, each at its own pace with buffers of blocks
// of its own: one decodes or stores while others multiply. A run is decoded in two halves (`Halves`), each while the
// products of the half before are made.

/// Turns of a ring: eight times the slot, and the parity in the highest bit.
struct Turn {
    u32 state;
    DEVICE u32 slot(const Turn &t) { return (t.state & 0xff) / 8; }
    /// The barrier of the slot.
    DEVICE u32 of(const Turn &t, u32 barriers) { return barriers + (t.state & 0xff); }
    DEVICE u32 parity(const Turn &t) { return t.state >> 31; }
    DEVICE void advance(Turn &t, int buffers) {
        t.state = (t.state & 0xff) == 8 * (buffers - 1) ? (t.state & 0x80000000u) ^ 0x80000000u : t.state + 8;
    }
};

DEVICE void wait_full(const Turn &t, u32 barriers) { barrier_wait(Turn::of(t, barriers), Turn::parity(t)); }

DEVICE void wait_empty(const Turn &t, u32 barriers) { barrier_wait(Turn::of(t, barriers), Turn::parity(t) ^ 1); }

/// Groups that each walk over rows of weights by themselves.
struct Rest {
    static const int GROUPS = 3, TOKENS = 192, CONSUMERS = GROUPS * 128, THREADS = CONSUMERS + 128, MORE = 152, LESS = 56, STEPS = 4, SPANS = SPANS_REST;
    static const int HALF = TOKENS * 128, X_BYTES = 2 * HALF, SPAN_BUFFER = 64 * WINDOW;
    static const int SPANS_AT = STEPS * X_BYTES, TABLE_AT = SPANS_AT + GROUPS * SPANS * SPAN_BUFFER;
    static const int X_AT = TABLE_AT + Run<TYPE>::TABLE * COPIES, BLOCKS_AT = X_AT + 16 * STEPS, SHARED = BLOCKS_AT + 16 * GROUPS * SPANS;
    /// Barriers of a group's buffers of blocks.
    DEVICE u32 blocks_full(u32 base, int group) { return base + BLOCKS_AT + group * 16 * SPANS; }
    DEVICE u32 blocks_empty(u32 base, int group) { return blocks_full(base, group) + 8 * SPANS; }
};

/// Row of the matrix that row 16 `j` + `at` of the walk is: neighbouring rows are eight apart.
DEVICE int row_at(int j, int at) { return 16 * j + at % 8 * 2 + at / 8; }

DEVICE void settle_half(u32 a[2][8]) {
    asm volatile(""
                 : "+r"(a[0][0]), "+r"(a[0][1]), "+r"(a[0][2]), "+r"(a[0][3]), "+r"(a[0][4]), "+r"(a[0][5]), "+r"(a[0][6]), "+r"(a[0][7]),
                   "+r"(a[1][0]), "+r"(a[1][1]), "+r"(a[1][2]), "+r"(a[1][3]), "+r"(a[1][4]), "+r"(a[1][5]), "+r"(a[1][6]), "+r"(a[1][7])
                 :
                 : "memory");
}

/// Products of half a run with `wide` pairs.
DEVICE void multiply_half(float c[Rest::TOKENS / 2], u32 a[2][8], u64 x, int wide) {
    products_begin();
    of_width<Rest::TOKENS>(wide, [&](auto width) {
#pragma unroll
        for (int s = 0; s < 4; s++) {
            Products<decltype(width)::VALUE>::add(c, a[0][2 * s], a[1][2 * s], a[0][2 * s + 1], a[1][2 * s + 1], x + 2 * s);
        }
    });
    products_commit();
}

/// x of a tile, by a warp.
DEVICE void copy_resting(const Pairs &p, u8 *shared) {
    u32 base = shared_address(shared), full = base + Rest::X_AT, empty = full + 8 * Rest::STEPS, parity = 1;
    int lane = threadIdx.x % 32, chunk = lane % 16;
    for (int t = blockIdx.x; t < *p.count; t += gridDim.x, parity ^= 1) {
        Tile tile = p.tiles[t];
        int count = multiplied(tile.rows);
        for (int k = 0; k < p.k; k += STEP) {
            barrier_wait(empty + k / STEP * 8, parity);
            const u16 *from = p.x + (long)tile.first * p.k + k + chunk * 8;
            u32 to = base + k / STEP * Rest::X_BYTES + chunk / 8 * Rest::HALF;
#pragma unroll 8
            for (int i = lane / 16; i < count; i += 2) copy_16(to + i * 128 + (chunk % 8 ^ i % 8) * 16, from + min(i, tile.rows - 1) * p.k, true);
            barrier_arrive_copied(full + k / STEP * 8);
        }
    }
    copies_wait_all();
}

/// Blocks of the rows of a group, by a warp.
DEVICE void copy_walked(const Pairs &p, int group, u8 *shared) {
    const int WORDS = WINDOW / 16;
    u32 base = shared_address(shared), full = Rest::blocks_full(base, group), empty = Rest::blocks_empty(base, group), apart = row_bytes(p);
    int lane = threadIdx.x % 32, own = group;
    Turn turn = {0};
    for (int t = blockIdx.x; t < *p.count; t += gridDim.x, own -= p.n / 64) {
        const u8 *first = expert_at(p.blocks[0], p.strides[0], p.places[0], p.tiles[t].expert);
        for (; own < p.n / 64; own += Rest::GROUPS) {
            for (int k = 0; k < p.k; k += SPAN) {
                wait_empty(turn, empty);
                u32 to = base + Rest::SPANS_AT + (group * Rest::SPANS + Turn::slot(turn)) * Rest::SPAN_BUFFER;
#pragma unroll 2
                for (int i = lane; i < 64 * WORDS; i += 32) {
                    int row = i / WORDS;
                    const u8 *from = first + (own * 64 + row_at(row / 16, row % 16)) * apart + k / SPAN * SPAN_BYTES;
                    copy_16(to + i * 16, (const u8 *)((u64)from & ~15ull) + i % WORDS * 16, true);
                }
                barrier_arrive_copied(Turn::of(turn, full));
                Turn::advance(turn, Rest::SPANS);
            }
        }
    }
    copies_wait_all();
}

/// The products of 64 rows of weights with x of a tile: block `own`. `last`: of this group, so that x is not needed any more.
DEVICE void multiply_rest(const Pairs &p, const Tile &tile, int own, bool last, int group, u8 *shared, Turn &spans, u32 parity) {
    u32 base = shared_address(shared), x_full = base + Rest::X_AT, x_empty = x_full + 8 * Rest::STEPS;
    int lane = threadIdx.x % 32, j = own * 4 + threadIdx.x / 32 % 4, row = j % 4 * 16 + lane / 4, wide = multiplied(tile.rows);
    u32 low = (u32)(u64)expert_at(p.blocks[0], p.strides[0], p.places[0], tile.expert) + row_at(j, lane / 4) * row_bytes(p);
    float c[Rest::TOKENS / 2];
#pragma unroll
    for (int i = 0; i < Rest::TOKENS / 2; i++) c[i] = 0.0f;
    const u32 *table = (const u32 *)(shared + Rest::TABLE_AT);
    Halves<TYPE> runs[2];
    auto decode = [&](int k, int half, u32 out[2][8]) {
        if (half == 0) {
            if (k % SPAN == 0) wait_full(spans, Rest::blocks_full(base, group));
            const u8 *window = shared + Rest::SPANS_AT + (group * Rest::SPANS + Turn::slot(spans)) * Rest::SPAN_BUFFER + row * WINDOW;
            u32 at = low + k / SPAN * SPAN_BYTES, run = (u32)k % SPAN / 32 + lane % 4;
            runs[0] = Halves<TYPE>::of(window + (at & 15), run);
            runs[1] = Halves<TYPE>::of(window + 8 * WINDOW + (at + row_bytes(p) & 15), run);
        }
        Halves<TYPE>::decode(runs[0], half, table, out[0]);
        Halves<TYPE>::decode(runs[1], half, table, out[1]);
        if (half == 1 && k % SPAN == SPAN - STEP) {
            warp_arrives(Turn::of(spans, Rest::blocks_empty(base, group)));
            Turn::advance(spans, Rest::SPANS);
        }
    };
    u64 from = descriptor(base);
    u32 a[2][2][8];
    decode(0, 0, a[0]);
    for (int k = 0;; k += STEP, from += Rest::X_BYTES / 16) {
        barrier_wait(x_full + k / STEP * 8, parity);
        settle_half(a[0]);
        multiply_half(c, a[0], from, wide);
        decode(k, 1, a[1]);
        settle_half(a[1]);
        products_wait<0>();
        multiply_half(c, a[1], from + Rest::HALF / 16, wide);
        if (k + STEP >= p.k) break;
        decode(k + STEP, 0, a[0]);
        settle_half(a[0]);
        products_wait<0>();
        if (last) warp_arrives(x_empty + k / STEP * 8);
    }
    u32 pairs[Rest::TOKENS / 32];
    float weights[Rest::TOKENS / 32];
    look_up_pairs<Rest::TOKENS>(p, tile, pairs, weights);
    products_wait<0>();
    if (last) warp_arrives(x_empty + (p.k / STEP - 1) * 8);
    store_pairs<Rest::TOKENS>(p, tile, j * 16, c, pairs, weights);
}

/// Outputs of the pairs: weight · down · inner row, of at most STEPS steps. Blocks of the grid take tiles in turns.
KERNEL __launch_bounds__(Rest::THREADS, 1) void experts_down_rest(__grid_constant__ const Pairs p) {
    extern __shared__ __align__(1024) u8 shared[];
    u32 base = shared_address(shared);
    Run<TYPE>::fill_table((u32 *)(shared + Rest::TABLE_AT));
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2 * Rest::STEPS; i++) barrier_init(base + Rest::X_AT + 8 * i, i < Rest::STEPS ? 32 : 4 * Rest::GROUPS);
        for (int i = 0; i < 2 * Rest::GROUPS * Rest::SPANS; i++) barrier_init(base + Rest::BLOCKS_AT + 8 * i, i / Rest::SPANS % 2 ? 4 : 32);
    }
    __syncthreads();
    // The same in all lanes, so that the compiler knows it is.
    int group = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = threadIdx.x / 32 % 4;
    if (group == Rest::GROUPS) {
        less_registers<Rest>();
        if (warp < Rest::GROUPS) copy_walked(p, warp, shared);
        else copy_resting(p, shared);
        return;
    }
    more_registers<Rest>();
    int own = group, blocks = p.n / 64;
    u32 parity = 0;
    Turn spans = {0};
    for (int t = blockIdx.x; t < *p.count; t += gridDim.x, parity ^= 1, own -= blocks) {
        Tile tile = p.tiles[t];
        for (; own < blocks; own += Rest::GROUPS) {
            multiply_rest(p, tile, own, own + Rest::GROUPS >= blocks, group, shared, spans, parity);
        }
    }
}
