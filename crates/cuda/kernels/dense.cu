// Products of many rows with one matrix on Hopper: out[m][n] = Σ_k a[m][k] · b[n][k], bf16 factors, sums in f32.
//
// A block makes tiles of 64 · GROUPS rows and WIDTH columns: a group of four warps for every 64 rows, and one warp whose
// first lane has tiles of a and b brought by the copy engine (TMA). K is walked in steps of 64 through a ring of stages,
//
//   stage: a [64 GROUPS][64], b [WIDTH][64] bf16, rows of 128 bytes, 16-byte chunk c of row r at chunk c ^ (r % 8),
//
// each with a barrier for "full" and one for "empty". The ring runs on over the end of a tile: while sums are stored, the
// next tile's first steps come.
//
// Sums leave by way of shared memory: each warp puts 16 rows of 128 bytes there, swizzled as above, and the engine
// stores them (or adds them to what is there), as far as they lie inside. A row's sums run over k in ascending order
// whatever the tile.

enum Then { STORE, ADD, SCALE, GATED, SPLIT };

/// What the engine knows of a matrix: made by the driver.
struct __align__(128) Map { u64 words[16]; };

struct Dense {
    Map a[2];           // [m, k], in boxes of 64 · GROUPS rows; SPLIT: low and high, else the first alone
    Map b[2];           // [n, k], in boxes of WIDTH / 2 rows; SPLIT: high and low; GATED: [2 n, k], gate rows first
    Map out;            // f32 [m, n]; GATED: bf16; in boxes of 16 rows of 128 bytes
    const float *scale; // SCALE: of each row
    int m, n, k;
};

const int STEP = 64, ROW_BYTES = STEP * 2;
const int PUT_BYTES = 16 * ROW_BYTES; // of a buffer of sums on their way out; a warp has two

/// A kind of tiles.
template <Then THEN_, int GROUPS_, int WIDTH_> struct Kind {
    static const Then THEN = THEN_;
    static const int GROUPS = GROUPS_, WIDTH = WIDTH_, ROWS = 64 * GROUPS;
    static const int COLUMNS = THEN == GATED ? WIDTH / 2 : WIDTH; // of out
    static const int A_BYTES = ROWS * ROW_BYTES, B_BYTES = WIDTH * ROW_BYTES, STAGE = A_BYTES + B_BYTES;
    static const int PUTS = GROUPS * 4 * 2 * PUT_BYTES;
    static const int STAGES = (ROOM - PUTS) / (STAGE + 16);
    static const int PUTS_AT = STAGES * STAGE, BARRIERS_AT = PUTS_AT + PUTS;
};

/// The ring of stages: which one is next.
template <class K> struct Ring {
    u32 base;
    int at;     // the stage
    u32 parity; // of the phase of its barrier "full"
    DEVICE u32 stage(const Ring &r) { return r.base + r.at * K::STAGE; }
    DEVICE u32 full(const Ring &r) { return r.base + K::BARRIERS_AT + r.at * 16; }
    DEVICE u32 empty(const Ring &r) { return full(r) + 8; }
    DEVICE void advance(Ring &r) {
        if (++r.at == K::STAGES) r.at = 0, r.parity ^= 1;
    }
};

/// Tiles: column after column of a panel of rows, whose part of `a` stays in the L2 cache meanwhile.
template <class K> struct Walk {
    int rows, columns, m, n; // of tiles; where this one begins
    DEVICE Walk of(const Dense &p) {
        Walk walk;
        walk.rows = (p.m + K::ROWS - 1) / K::ROWS;
        walk.columns = (p.n + K::COLUMNS - 1) / K::COLUMNS;
        return walk;
    }
    DEVICE void go(Walk &walk, int t) {
        const int PANEL = 4096 / K::ROWS;
        int first = t / (PANEL * walk.columns) * PANEL, rows = min(PANEL, walk.rows - first);
        t -= first * walk.columns;
        walk.m = (first + t % rows) * K::ROWS;
        walk.n = t / rows * K::COLUMNS;
    }
};

/// Brings the box of a matrix that begins at (row, column).
DEVICE void bring(u32 to, const Map &map, int row, int column, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                 ::"r"(to), "l"(&map), "r"(column), "r"(row), "r"(barrier) : "memory");
}

/// Brings a step of a tile: columns k .. k + 64 of a part.
template <class K> DEVICE void produce_step(const Dense &p, const Walk<K> &tile, Ring<K> &ring, int part, int k) {
    const int HALF = K::WIDTH / 2;
    u32 full = Ring<K>::full(ring), a = Ring<K>::stage(ring), b = a + K::A_BYTES;
    barrier_wait(Ring<K>::empty(ring), ring.parity ^ 1);
    barrier_expect(full, K::STAGE);
    bring(a, p.a[part], tile.m, k, full);
    bring(b, p.b[part], tile.n, k, full);
    bring(b + HALF * ROW_BYTES, p.b[part], tile.n + (K::THEN == GATED ? p.n : HALF), k, full);
    Ring<K>::advance(ring);
}

/// Brings all steps of a tile.
template <class K> DEVICE void produce(const Dense &p, const Walk<K> &tile, Ring<K> &ring) {
    for (int k = 0; k < p.k; k += STEP) {
        produce_step<K>(p, tile, ring, 0, k);
        if (K::THEN == SPLIT) produce_step<K>(p, tile, ring, 1, k);
    }
}

/// The stage or stages of a step are free.
template <class K> DEVICE void free_step(Ring<K> &ring) {
    for (int i = 0; i < (K::THEN == SPLIT ? 2 : 1); i++) {
        if (threadIdx.x % 32 == 0) barrier_arrive(Ring<K>::empty(ring));
        Ring<K>::advance(ring);
    }
}

DEVICE void store_shared(u32 at, u32 pair) { asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(pair) : "memory"); }

DEVICE void store_shared(u32 at, float x, float y) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(x), "f"(y) : "memory");
}

/// A warp's buffer for sums on their way out, once its last store has read it.
DEVICE u32 free_buffer(u32 buffer) {
    stores_wait<1>();
    __syncwarp();
    return buffer + threadIdx.x % 32 / 4 * ROW_BYTES;
}

/// Sends what all lanes have put into a warp's buffer to (row, column) of a matrix, and turns to the other buffer.
template <bool ADDS> DEVICE void send(const Map &map, int row, int column, u32 &buffer) {
    copies_see_stores();
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
        if (ADDS) {
            asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%0, {%1, %2}], [%3];"
                         ::"l"(&map), "r"(column), "r"(row), "r"(buffer) : "memory");
        } else {
            asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];"
                         ::"l"(&map), "r"(column), "r"(row), "r"(buffer) : "memory");
        }
    }
    stores_commit();
    buffer ^= PUT_BYTES;
}

/// Stores 16 rows of a warp as f32, the first at (row, n), up to column `end`: `of` gives of the lane's rows lane / 4 (half 0) and
/// lane / 4 + 8 two neighbouring numbers of every eight. They go by way of the warp's two buffers, of which `buffer` is the next.
template <bool ADDS, int EIGHTS, class F> DEVICE void put_floats(const Map &map, int row, int n, int end, u32 &buffer, const F &of) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int part = 0; part < EIGHTS / 4; part++) {
        if (n + part * 32 >= end) continue;
        u32 to = free_buffer(buffer);
#pragma unroll
        for (int j = 0; j < 4; j++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float2 x = of(part * 4 + j, half);
                u32 chunk = (2 * j + lane % 4 / 2) ^ lane / 4;
                store_shared(to + half * 8 * ROW_BYTES + chunk * 16 + lane % 2 * 8, x.x, x.y);
            }
        }
        send<ADDS>(map, row, n + part * 32, buffer);
    }
}

/// The same as pairs of 16 bits, which `of` gives.
template <int EIGHTS, class F> DEVICE void put_pairs(const Map &map, int row, int n, int end, u32 &buffer, const F &of) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int part = 0; part < EIGHTS / 8; part++) {
        if (n + part * 64 >= end) continue;
        u32 to = free_buffer(buffer);
#pragma unroll
        for (int j = 0; j < 8; j++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                store_shared(to + half * 8 * ROW_BYTES + (j ^ lane / 4) * 16 + lane % 4 * 4, of(part * 8 + j, half));
            }
        }
        send<false>(map, row, n + part * 64, buffer);
    }
}

/// Stores 16 rows of a warp's sums.
template <class K> DEVICE void put(const Dense &p, const float *c, int row, int n, u32 &buffer) {
    if (K::THEN == GATED) {
        return put_pairs<K::COLUMNS / 8>(p.out, row, n, p.n, buffer, [&](int j, int half) {
            const float *gate = c + 4 * j + 2 * half, *up = gate + K::WIDTH / 4;
            return bf16_pair(silu(gate[0]) * up[0], silu(gate[1]) * up[1]);
        });
    }
    float scale[2] = {1.0f, 1.0f};
    if (K::THEN == SCALE) {
        for (int half = 0; half < 2; half++) {
            int r = row + half * 8 + threadIdx.x % 32 / 4;
            if (r < p.m) scale[half] = p.scale[r];
        }
    }
    put_floats<K::THEN == ADD, K::COLUMNS / 8>(p.out, row, n, p.n, buffer, [&](int j, int half) {
        return make_float2(c[4 * j + 2 * half] * scale[half], c[4 * j + 2 * half + 1] * scale[half]);
    });
}

/// Waits until the ring's next stage is full, and returns where it is.
template <class K> DEVICE u32 wait_stage(Ring<K> &ring) {
    barrier_wait(Ring<K>::full(ring), ring.parity);
    u32 stage = Ring<K>::stage(ring);
    Ring<K>::advance(ring);
    return stage;
}

/// c += a bᵀ over the 64 columns of a stage's parts.
template <class K> DEVICE void products(float *c, u32 a, u32 b) {
    u64 from_a = descriptor(a), from_b = descriptor(b);
#pragma unroll
    for (int part = 0; part < STEP / 16; part++) multiply_tile<K::WIDTH>(c, from_a + 2 * part, from_b + 2 * part);
}

/// Multiplies all steps of a tile as they come, and calls `finish` with a warp's sums of 16 rows, of which the first are at (row, n).
template <class K, class F> DEVICE void consume(const Dense &p, const Walk<K> &tile, Ring<K> &ring, const F &finish) {
    int group = threadIdx.x / 128, warp = threadIdx.x / 32;
    float c[K::WIDTH / 2];
#pragma unroll
    for (int i = 0; i < K::WIDTH / 2; i++) c[i] = 0.0f;
    Ring<K> freed = ring;
    u32 a = group * 64 * ROW_BYTES; // in a stage
    for (int k = 0; k < p.k; k += STEP) {
        u32 first = wait_stage<K>(ring), second = K::THEN == SPLIT ? wait_stage<K>(ring) : 0;
        products_begin();
        products<K>(c, first + a, first + K::A_BYTES);
        if (K::THEN == SPLIT) {
            products<K>(c, second + a, first + K::A_BYTES);
            products<K>(c, second + a, second + K::A_BYTES);
        }
        products_commit();
        products_wait<1>();
        // The products of the step before are done: its stages are free.
        if (k > 0) free_step<K>(freed);
    }
    products_wait<0>();
    free_step<K>(freed);
    int row = tile.m + warp * 16;
    if (row < p.m) finish(c, row, tile.n);
}

DEVICE void prefetch(const Map &map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }

/// Blocks of the grid take tiles in turns. `finish` is also told where its warp's next buffer is.
template <class K, class F> DEVICE void dense(const Dense &p, const F &finish) {
    extern __shared__ __align__(1024) u8 shared[];
    Ring<K> ring = {shared_address(shared), 0, 0};
    if (threadIdx.x == 0) {
        for (int i = 0; i < K::STAGES; i++) {
            barrier_init(ring.base + K::BARRIERS_AT + 16 * i, 1);
            barrier_init(ring.base + K::BARRIERS_AT + 16 * i + 8, K::GROUPS * 4);
        }
        barriers_made();
        prefetch(p.a[0]), prefetch(p.b[0]), prefetch(p.out);
    }
    __syncthreads();
    previous();
    Walk<K> walk = Walk<K>::of(p);
    bool multiplies = threadIdx.x < K::GROUPS * 128;
    u32 buffer = ring.base + K::PUTS_AT + threadIdx.x / 32 * 2 * PUT_BYTES;
    for (int t = blockIdx.x; t < walk.rows * walk.columns; t += gridDim.x) {
        Walk<K>::go(walk, t);
        if (multiplies) consume<K>(p, walk, ring, [&](const float *c, int row, int n) { finish(c, row, n, buffer); });
        else if (threadIdx.x == K::GROUPS * 128) produce<K>(p, walk, ring);
    }
    next();
    if (multiplies) stores_wait<0>(); // shared memory stays until they have read it
}

template <class K> DEVICE void dense(const Dense &p) {
    dense<K>(p, [&](const float *c, int row, int n, u32 &buffer) { put<K>(p, c, row, n, buffer); });
}

template <Then THEN> using Large = Kind<THEN, 2, 256>;
template <Then THEN> using Medium = Kind<THEN, 2, 128>;
template <Then THEN> using Small = Kind<THEN, 1, 128>;

#define THREADS(COUNT) KERNEL __launch_bounds__(COUNT, 1) void

/// out = a bᵀ.
THREADS(288) dense_store_128x256(__grid_constant__ const Dense p) { dense<Large<STORE>>(p); }
THREADS(288) dense_store_128x128(__grid_constant__ const Dense p) { dense<Medium<STORE>>(p); }
THREADS(160) dense_store_64x128(__grid_constant__ const Dense p) { dense<Small<STORE>>(p); }

/// out += a bᵀ.
THREADS(288) dense_add_128x256(__grid_constant__ const Dense p) { dense<Large<ADD>>(p); }
THREADS(288) dense_add_128x128(__grid_constant__ const Dense p) { dense<Medium<ADD>>(p); }
THREADS(160) dense_add_64x128(__grid_constant__ const Dense p) { dense<Small<ADD>>(p); }

/// out = scale · a bᵀ.
THREADS(288) dense_scale_128x256(__grid_constant__ const Dense p) { dense<Large<SCALE>>(p); }
THREADS(288) dense_scale_128x128(__grid_constant__ const Dense p) { dense<Medium<SCALE>>(p); }
THREADS(160) dense_scale_64x128(__grid_constant__ const Dense p) { dense<Small<SCALE>>(p); }

/// out = SiLU(a gateᵀ) ⊙ (a upᵀ), as bf16.
THREADS(288) dense_gated_128x256(__grid_constant__ const Dense p) { dense<Large<GATED>>(p); }
THREADS(288) dense_gated_128x128(__grid_constant__ const Dense p) { dense<Medium<GATED>>(p); }
THREADS(160) dense_gated_64x128(__grid_constant__ const Dense p) { dense<Small<GATED>>(p); }

/// out = a bᵀ of factors that are sums of two, but for low · low.
THREADS(288) dense_split_128x256(__grid_constant__ const Dense p) { dense<Large<SPLIT>>(p); }
THREADS(288) dense_split_128x128(__grid_constant__ const Dense p) { dense<Medium<SPLIT>>(p); }
THREADS(160) dense_split_64x128(__grid_constant__ const Dense p) { dense<Small<SPLIT>>(p); }
