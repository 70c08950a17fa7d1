// Routed experts of many rows: products of pairs of expert and row with blocks of TYPE, which are decoded in registers and are
// there the first factor of the tensor cores of compute capability 9.0a (`wgmma`).
//
// A tile is up to TOKENS pairs of an expert and GROUPS · 64 rows of weights. Each warp of the groups that multiply decodes 16
// rows, lane l whole runs of 32 weights (`Run`): run l % 4 of every 128 of rows l / 4 and l / 4 + 8. What lane l holds are
// then columns 32 (l % 4) + 4 s + {0, 1 | 2, 3} at step s of sixteen columns, where the tensor cores count 2 (l % 4) + {0, 1}
// and those + 8. So x lies shuffled: number 16 s + 2 t + 8 h + b of every 128 is number 32 t + 4 s + 2 h + b of the row
// (`group_tiles`); the inner rows are stored like that.
//
// The other warps copy. K is walked in steps of 128 through X_STAGES buffers of x,
//
//   stage: 2 · [TOKENS][64] bf16, rows of 128 bytes, 16-byte chunk c of row r at chunk c ^ (r % 8),
//
// and in spans of 256 weights through SPANS buffers of blocks in file form, a window of whole words of 16 bytes for each row.
// Each buffer has a barrier for "full" and one for "empty". A sum runs over k in ascending order whatever is beside it.

const int STEP = 128;
const int SPAN = 256; // weights
const int SPAN_BYTES = SPAN / TYPE::LEN * TYPE::BYTES;
const int WINDOW = (SPAN_BYTES + 30 - (TYPE::BYTES % 2 == 0)) / 16 * 16 | 16; // bytes of a row: an odd number of 16-byte words around a span

/// Tiles for few and for many pairs of an expert, threads that copy, registers of a thread that multiplies and of one that
/// copies. SPANS_*: buffers of blocks there is room for. AHEAD: whether there are registers for a step that is decoded ahead; k
/// must be whole spans there.
struct Low {
    static const int GROUPS = 4, PRODUCERS = 128, TOKENS = 64, X_STAGES = 4, SPANS = SPANS_LOW, MORE = 104, LESS = 64;
    static const bool AHEAD = false;
};
struct High {
    static const int GROUPS = 2, PRODUCERS = 256, TOKENS = 192, X_STAGES = 3, SPANS = SPANS_HIGH, MORE = 208, LESS = 48;
    static const bool AHEAD = true;
};

/// Sizes and places in shared memory.
template <class S> struct Sizes {
    static const int CONSUMERS = S::GROUPS * 128, THREADS = CONSUMERS + S::PRODUCERS, ROWS = S::GROUPS * 64;
    static const int HALF = S::TOKENS * 128, X_BYTES = 2 * HALF, SPAN_BUFFER = ROWS * WINDOW;
    static const int SPANS_AT = S::X_STAGES * X_BYTES, TABLE_AT = SPANS_AT + S::SPANS * SPAN_BUFFER;
    static const int PLACES_AT = TABLE_AT + Run<TYPE>::TABLE * COPIES, BARRIERS_AT = PLACES_AT + 2 * 4 * S::TOKENS;
};

struct Tile {
    int first; // of the sorted pairs
    int rows;  // at most TOKENS
    int matrix, expert;
};

struct Pairs {
    const u16 *x;         // shuffled rows of k numbers: GATED: of the pass; else: of the sorted pairs
    u16 *out;             // [pairs, n], sorted; GATED: shuffled
    const float *weights; // of the sorted pairs
    const u32 *pairs;     // sorted
    const Tile *tiles;
    const int *count;     // of tiles
    const u8 *blocks[2];  // gate and up (or down) of expert 0, bytes to the next expert's, or where each one's are
    long strides[2];
    const u64 *places[2];
    int n, k, used;
};

/// Gives registers of the producers to the consumers, who hold the sums.
template <class S> DEVICE void more_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(S::MORE)); }

template <class S> DEVICE void less_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(S::LESS)); }

/// Buffers that are filled and emptied in turns: which one is next.
struct Ring {
    u32 full, empty;
    int slot, parity;

    DEVICE Ring at(u32 barriers, int buffers) {
        Ring ring;
        ring.full = barriers, ring.empty = barriers + 8 * buffers;
        ring.slot = ring.parity = 0;
        return ring;
    }

    DEVICE void advance(Ring &r, int buffers) {
        if (++r.slot == buffers) r.slot = 0, r.parity ^= 1;
    }
};

/// Pairs of a tile that are multiplied, with what fills it up.
DEVICE int multiplied(int rows) { return (rows + 15) / 16 * 16; }

/// One lane of a warp tells, for all of it.
DEVICE void warp_arrives(u32 barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
}

template <int N> struct Width {
    static const int VALUE = N;
};

/// Calls `f` with the width of `wide` pairs, a multiple of 16 up to N. The widest are found first: they are what takes time.
template <int N, class F> DEVICE void of_width(int wide, const F &f) {
    if constexpr (N > 16) {
        if (wide <= N - 16) return of_width<N - 16>(wide, f);
    }
    f(Width<N>());
}

/// Where row `row` of a tile's blocks begins. GATED: of each 16 rows eight of gate, then the same of up, outputs in shuffled
/// order; else neighbouring rows are eight apart.
template <bool GATED> DEVICE const u8 *row_at(const Pairs &p, const Tile &tile, int first, int row) {
    int at = row % 8, half = row / 8 % 2, n;
    if (GATED) {
        int o = first + row / 16 * 8 + at, i = o % 128;
        n = o - i + i / 2 % 4 * 32 + i / 16 * 4 + i / 8 % 2 * 2 + i % 2;
    } else {
        n = first + row / 16 * 16 + 2 * at + half;
    }
    int matrix = GATED ? half : 0;
    // Rows beyond the end repeat the last one.
    return expert_at(p.blocks[matrix], p.strides[matrix], p.places[matrix], tile.expert) +
           min(n, p.n - 1) * ((long)(p.k / TYPE::LEN) * TYPE::BYTES);
}

/// The row of x of one of a tile's pairs.
template <bool GATED> DEVICE u32 x_row(const Pairs &p, const Tile &tile, int i) {
    if (!GATED) return tile.first + i;
    return i < tile.rows ? __ldg(p.pairs + tile.first + i) : 0;
}

/// Copies all that a tile needs. `odd`: whether an odd number of tiles came before; `own`: `x_row` of this thread's pair, here
/// and, looked up meanwhile, in the tile `after`. What fills a tile up is left as it was: nothing that is stored depends on it.
template <class S, bool GATED>
DEVICE void produce(const Pairs &p, const Tile &tile, int first, u8 *shared, Ring &x, Ring &spans, int odd, u32 &own, const Tile &after) {
    typedef Sizes<S> Z;
    const int AT_ONCE = S::PRODUCERS / 2, PARTS = Z::ROWS / AT_ONCE, APART = S::PRODUCERS / 16, ROUNDS = S::TOKENS / APART;
    int thread = threadIdx.x - Z::CONSUMERS, row = thread / 16, chunk = thread % 16;
    u32 *places = (u32 *)(shared + Z::PLACES_AT) + odd * S::TOKENS;
    if (thread < tile.rows) places[thread] = (GATED ? own / p.used : own) * p.k;
    const u8 *rows[PARTS];
#pragma unroll
    for (int i = 0; i < PARTS; i++) rows[i] = row_at<GATED>(p, tile, first, thread / 2 + i * AT_ONCE);
    asm volatile("bar.sync 1, %0;" ::"n"(S::PRODUCERS) : "memory");
    u32 own_places[ROUNDS]; // where this thread's rows of x begin; where there are not the registers, they are read each time
    if (S::AHEAD) {
#pragma unroll
        for (int i = 0; i < ROUNDS; i++) own_places[i] = places[row + i * APART];
    }
    u32 base = shared_address(shared);
    u32 to_x = base + chunk / 8 * Z::HALF + row * 128 + (chunk % 8 ^ row % 8) * 16;
    u32 to_span = base + Z::SPANS_AT + thread / 2 * WINDOW;
    int left = tile.rows - row;
    for (int k = 0; k < p.k; k += STEP) {
        if (k % SPAN == 0) {
            barrier_wait(spans.empty + 8 * spans.slot, spans.parity ^ 1);
            u32 to = to_span + spans.slot * Z::SPAN_BUFFER;
#pragma unroll
            for (int i = 0; i < PARTS; i++) {
                const u8 *at = (const u8 *)((u64)(rows[i] + k / SPAN * SPAN_BYTES) & ~15ull);
#pragma unroll
                for (int j = 0; j < (WINDOW / 16 + 1) / 2; j++) {
                    int word = 2 * j + thread % 2;
                    if (word < WINDOW / 16) copy_16(to + i * AT_ONCE * WINDOW + word * 16, at + word * 16, true);
                }
            }
            barrier_arrive_copied(spans.full + 8 * spans.slot);
            Ring::advance(spans, S::SPANS);
        }
        barrier_wait(x.empty + 8 * x.slot, x.parity ^ 1);
        u32 to = to_x + x.slot * Z::X_BYTES;
        const u16 *step = p.x + k + chunk * 8;
#pragma unroll
        for (int i = 0; i < ROUNDS; i++) {
            if (i * APART >= left) break;
            copy_16(to + i * APART * 128, step + (S::AHEAD ? own_places[i] : places[row + i * APART]), true);
        }
        barrier_arrive_copied(x.full + 8 * x.slot);
        Ring::advance(x, S::X_STAGES);
        if (k == 0) own = x_row<GATED>(p, after, thread);
    }
}

/// Weights of a tile's pairs: lane l has number l, and those 32 behind, and so on.
template <int TOKENS> DEVICE void look_up_weights(const Pairs &p, const Tile &tile, float weights[(TOKENS + 31) / 32]) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < (TOKENS + 31) / 32; i++) weights[i] = __ldg(p.weights + tile.first + min(i * 32 + lane, tile.rows - 1));
}

/// SiLU in as few instructions as there can be, for powers too small or too large for f32 are 0 or infinite.
DEVICE float short_silu(float x) {
    float power, share;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * -1.44269504f));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(share) : "f"(1.0f + power));
    return x * share;
}

/// Weight · SiLU(gate) · up, two neighbouring outputs of a pair to a lane.
template <int TOKENS> DEVICE void store_inner(const Pairs &p, const Tile &tile, int n, const float c[TOKENS / 2], const float *weights) {
    int lane = threadIdx.x % 32, odd = lane / 4 % 2;
    int left = tile.rows - lane % 4 * 2 - odd;
    u16 *to = p.out + (long)(tile.first + lane % 4 * 2 + odd) * p.n + n + (lane / 4 & ~1);
    long down = (long)8 * p.n;
#pragma unroll
    for (int j = 0; j < TOKENS / 8; j++) {
        if (j % 4 == 0 && 8 * j >= tile.rows) break; // so seldom that the work of four goes on side by side
        float x = short_silu(c[4 * j]) * c[4 * j + 2], y = short_silu(c[4 * j + 1]) * c[4 * j + 3];
        float other = __shfl_xor_sync(~0u, odd ? x : y, 4), weight = __shfl_sync(~0u, weights[j / 4], j % 4 * 8 + lane % 4 * 2 + odd);
        u32 both = odd ? bf16_pair(other * weight, y * weight) : bf16_pair(x * weight, other * weight);
        if (8 * j < left) *(u32 *)to = both;
        to += down;
    }
}

/// Outputs of pairs, two neighbouring ones to a lane.
template <int TOKENS> DEVICE void store_pairs(const Pairs &p, const Tile &tile, int n, const float c[TOKENS / 2]) {
    int lane = threadIdx.x % 32, left = tile.rows - lane % 4 * 2;
    n += lane / 4 * 2;
    if (n >= p.n) return;
    u16 *to = p.out + (long)(tile.first + lane % 4 * 2) * p.n + n, *beside = to + p.n;
    long down = (long)8 * p.n;
#pragma unroll
    for (int j = 0; j < TOKENS / 8; j++) {
        if (j % 4 == 0 && 8 * j >= tile.rows) break;
        if (8 * j < left) *(u32 *)to = bf16_pair(c[4 * j], c[4 * j + 2]);
        if (8 * j + 1 < left) *(u32 *)beside = bf16_pair(c[4 * j + 1], c[4 * j + 3]);
        to += down, beside += down;
    }
}

/// Decodes and multiplies all steps of a tile as they come, and stores the sums.
template <class S, bool GATED> DEVICE void consume(const Pairs &p, const Tile &tile, int first, u8 *shared, Ring &x, Ring &spans) {
    typedef Sizes<S> Z;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = warp * 16 + lane / 4, wide = multiplied(tile.rows);
    float c[S::TOKENS / 2];
#pragma unroll
    for (int j = 0; j < S::TOKENS / 2; j++) c[j] = 0.0f;
    u32 low = (u32)(u64)row_at<GATED>(p, tile, first, row), high = (u32)(u64)row_at<GATED>(p, tile, first, row + 8);
    const u32 *table = (const u32 *)(shared + Z::TABLE_AT);
    auto decode = [&](int k, u32 out[2][16]) {
        if (k % SPAN == 0) barrier_wait(spans.full + 8 * spans.slot, spans.parity);
        const u8 *window = shared + Z::SPANS_AT + spans.slot * Z::SPAN_BUFFER + row * WINDOW;
        u32 offset = k / SPAN * SPAN_BYTES, run = (u32)k % SPAN / 32 + lane % 4;
        Run<TYPE>::decode(window + ((low + offset) & 15), run, table, out[0]);
        Run<TYPE>::decode(window + 8 * WINDOW + ((high + offset) & 15), run, table, out[1]);
        settle(out[0]), settle(out[1]);
        if (k % SPAN == SPAN - STEP) {
            warp_arrives(spans.empty + 8 * spans.slot);
            Ring::advance(spans, S::SPANS);
        }
    };
    auto multiply = [&](u32 by[2][16]) {
        barrier_wait(x.full + 8 * x.slot, x.parity);
        u64 from = descriptor(shared_address(shared) + x.slot * Z::X_BYTES);
        settle(by[0]), settle(by[1]);
        products_begin();
        of_width<S::TOKENS>(wide, [&](auto width) {
#pragma unroll
            for (int s = 0; s < STEP / 16; s++) {
                Products<decltype(width)::VALUE>::add(c, by[0][2 * s], by[1][2 * s], by[0][2 * s + 1], by[1][2 * s + 1],
                                                      from + s / 4 * (Z::HALF / 16) + s % 4 * 2);
            }
        });
        products_commit();
    };
    auto finish = [&]() {
        products_wait<0>();
        warp_arrives(x.empty + 8 * x.slot);
        Ring::advance(x, S::X_STAGES);
    };
    u32 a[2][16];
    decode(0, a);
    if (S::AHEAD) {
        // The next step is decoded while this one's products are made.
        u32 b[2][16];
        for (int k = 0;; k += 2 * STEP) {
            multiply(a);
            decode(k + STEP, b);
            finish();
            multiply(b);
            if (k + 2 * STEP >= p.k) break;
            decode(k + 2 * STEP, a);
            finish();
        }
    } else {
        for (int k = STEP;; k += STEP) {
            multiply(a);
            if (k >= p.k) break;
            finish();
            decode(k, a);
        }
    }
    float weights[(S::TOKENS + 31) / 32];
    if (GATED) look_up_weights<S::TOKENS>(p, tile, weights);
    finish();
    if (GATED) store_inner<S::TOKENS>(p, tile, first + warp * 8, c, weights);
    else store_pairs<S::TOKENS>(p, tile, first + warp * 16, c);
}

/// Blocks of the grid take tiles in turns.
template <class S, bool GATED> DEVICE void experts(const Pairs &p) {
    typedef Sizes<S> Z;
    const int OUTPUTS = GATED ? Z::ROWS / 2 : Z::ROWS;
    extern __shared__ __align__(1024) u8 shared[];
    u32 barriers = shared_address(shared) + Z::BARRIERS_AT;
    Run<TYPE>::fill_table((u32 *)(shared + Z::TABLE_AT));
    if (threadIdx.x == 0) {
        for (int i = 0; i < S::X_STAGES + S::SPANS; i++) {
            u32 at = i < S::X_STAGES ? barriers + 8 * i : barriers + 8 * (S::X_STAGES + i);
            barrier_init(at, S::PRODUCERS);
            barrier_init(at + 8 * (i < S::X_STAGES ? S::X_STAGES : S::SPANS), Z::CONSUMERS / 32);
        }
    }
    previous();
    next();
    __syncthreads();
    Ring x = Ring::at(barriers, S::X_STAGES), spans = Ring::at(barriers + 16 * S::X_STAGES, S::SPANS);
    int columns = (p.n + OUTPUTS - 1) / OUTPUTS, count = *p.count * columns, step = gridDim.x;
    // The next tile is on its way while one is worked on.
    Tile next = {};
    auto look_up = [&](int t) {
        if (t < count) next = p.tiles[t / columns];
    };
    look_up(blockIdx.x);
    if (threadIdx.x >= Z::CONSUMERS) {
        less_registers<S>();
        int odd = 0;
        u32 own = x_row<GATED>(p, next, threadIdx.x - Z::CONSUMERS);
        for (int t = blockIdx.x; t < count; t += step, odd ^= 1) {
            Tile tile = next;
            look_up(t + step);
            produce<S, GATED>(p, tile, t % columns * OUTPUTS, shared, x, spans, odd, own, next);
        }
        copies_wait_all();
    } else {
        more_registers<S>();
        for (int t = blockIdx.x; t < count; t += step) {
            Tile tile = next;
            look_up(t + step);
            consume<S, GATED>(p, tile, t % columns * OUTPUTS, shared, x, spans);
        }
    }
}

/// Inner rows of the pairs: weight · SiLU(gate · x) ⊙ (up · x).
KERNEL __launch_bounds__(Sizes<Low>::THREADS, 1) void experts_gated_low(__grid_constant__ const Pairs p) { experts<Low, true>(p); }

KERNEL __launch_bounds__(Sizes<High>::THREADS, 1) void experts_gated_high(__grid_constant__ const Pairs p) { experts<High, true>(p); }

/// Their outputs: down · inner row.
KERNEL __launch_bounds__(Sizes<Low>::THREADS, 1) void experts_down_low(__grid_constant__ const Pairs p) { experts<Low, false>(p); }

KERNEL __launch_bounds__(Sizes<High>::THREADS, 1) void experts_down_high(__grid_constant__ const Pairs p) { experts<High, false>(p); }
