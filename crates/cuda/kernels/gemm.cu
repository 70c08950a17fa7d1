// Products of many rows: out[m][n] = Σ_k a[m][k] · b[n][k], bf16 factors, sums in f32.
//
// A block makes tiles of up to 256 × 128. Two groups of four warps multiply: a tile's rows fall into four blocks of 64, group w
// computes blocks w and w + 2, as far as the tile has rows. The other warps bring what they multiply: K is walked in
// steps of 64 through STAGES buffers of shared memory,
//
//   stage: a [256][64], b [128][64] bf16, rows of 128 bytes, 16-byte chunk c of row r at chunk c ^ (r % 8),
//
// each with a barrier for "full" and one for "empty". Those warps run ahead, over the end of a tile into the next.
//
// The layout of a stage is the one the tensor cores of compute capability 9.0a read themselves (128-byte swizzle,
// `wgmma`); others load it with `ldmatrix`. Both leave sums alike: lane l of warp w holds rows 16 w + l / 4 and + 8 of a
// block of 64, columns 8 j + 2 (l % 4) and the next. A row's sums run over k in ascending order whatever rows are
// beside it.

const int TILE_M = 256, TILE_N = 128, STEP = 64, CONSUMERS = 256, PRODUCERS = 128, THREADS = CONSUMERS + PRODUCERS;
const int ROWS_AT_ONCE = PRODUCERS / 8; // rows of a stage that producers copy at a time, eight chunks each
const int A_BYTES = TILE_M * STEP * 2, B_BYTES = TILE_N * STEP * 2, STAGE_BYTES = A_BYTES + B_BYTES;

enum Then { STORE, ADD, SCALE, GATED, PAIRS, SPLIT };

/// Rows of one expert's pairs: a tile of a grouped product.
struct Tile {
    int first;  // of the sorted pairs
    int rows;   // at most TILE_M
    int matrix; // of b: the expert's place in the list
    int expert;
};

struct Gemm {
    const u16 *a;        // [m or rows that pairs name, k]; SPLIT: [m, 2, k / 3], low and high
    const u16 *b;        // [matrices][n, k]; GATED: [2 n, k], gate rows first; SPLIT: [n, 2, k / 3], high and low
    void *out;           // f32; GATED, PAIRS: bf16
    const float *scale;  // SCALE: of each row; PAIRS: of each pair
    const u32 *pairs;    // sorted pairs, for grouped products
    const Tile *tiles;   // of grouped products
    const int *count;    // of tiles
    long matrix;         // numbers from one matrix of b to the next
    int m, n, k;         // SPLIT: k is of low · high, high · high and high · low, one behind the other
    int tile_rows;       // of products that are not grouped: 64, 128 or 256
    int a_stride, b_stride, out_stride;
    int used;            // pairs of a row
};

#if WGMMA

/// One step of BLOCKS blocks of rows.
template <int BLOCKS> DEVICE void products(float c[BLOCKS][64], u32 stage, int group) {
    u64 b = descriptor(stage + A_BYTES);
#pragma unroll
    for (int part = 0; part < STEP / 16; part++) {
#pragma unroll
        for (int i = 0; i < BLOCKS; i++) {
            u64 a = descriptor(stage + (group + 2 * i) * 64 * 128);
            multiply_tile<TILE_N>(c[i], a + 2 * part, b + 2 * part);
        }
    }
    products_commit();
}

#else

template <int BLOCKS> DEVICE void products(float c[BLOCKS][64], u32 stage, int group) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    for (int part = 0; part < STEP / 16; part++) {
        u32 a[BLOCKS][4];
#pragma unroll
        for (int i = 0; i < BLOCKS; i++) {
            int row = (group + 2 * i) * 64 + warp * 16 + lane % 16, chunk = part * 2 + lane / 16;
            load_matrices(a[i], stage + row * 128 + (chunk ^ row % 8) * 16);
        }
#pragma unroll
        for (int j = 0; j < TILE_N / 16; j++) {
            u32 b[4];
            int row = j * 16 + lane % 8 + lane / 16 * 8, chunk = part * 2 + lane / 8 % 2;
            load_matrices(b, stage + A_BYTES + row * 128 + (chunk ^ row % 8) * 16);
#pragma unroll
            for (int i = 0; i < BLOCKS; i++) {
                multiply_bf16(c[i] + 8 * j, a[i], b[0], b[1]);
                multiply_bf16(c[i] + 8 * j + 4, a[i], b[2], b[3]);
            }
        }
    }
}

#endif

/// The stages as a ring: `count` steps have gone through it.
struct Ring {
    u32 base, full, empty;
    int count;
    DEVICE u32 stage(const Ring &r) { return r.base + r.count % STAGES * STAGE_BYTES; }
    DEVICE u32 parity(const Ring &r) { return r.count / STAGES % 2; }
    DEVICE u32 offset(int count) { return count % STAGES * 8; }
};

/// Where a producer's copies come from: chunk thread % 8 of every ROWS_AT_ONCE-th row, in numbers from the start.
struct Sources {
    u32 a[TILE_M / ROWS_AT_ONCE], b[TILE_N / ROWS_AT_ONCE];
    u32 a_valid, b_valid; // a bit for each
    int a_count;          // rows of a that anybody multiplies, by ROWS_AT_ONCE
};

const int BARRIERS_AT = STAGES * STAGE_BYTES;

/// The place of a row of the tile of a grouped product.
DEVICE u32 pair_at(const Gemm &p, const Tile &tile, int row) { return p.pairs[tile.first + row]; }

template <Then THEN, bool GROUPED>
DEVICE void sources(Sources &from, const Gemm &p, const Tile &tile, int first_n, int thread) {
    from.a_valid = from.b_valid = 0;
    from.a_count = (tile.rows + 63) / 64 * 64 / ROWS_AT_ONCE;
#pragma unroll
    for (int i = 0; i < TILE_M / ROWS_AT_ONCE; i++) {
        int row = thread / 8 + ROWS_AT_ONCE * i;
        bool valid = row < tile.rows;
        u32 at = tile.first + (valid ? row : 0);
        if (GROUPED && THEN == GATED) at = valid ? pair_at(p, tile, row) / p.used : 0;
        from.a[i] = at * p.a_stride + thread % 8 * 8;
        from.a_valid |= (u32)valid << i;
    }
#pragma unroll
    for (int i = 0; i < TILE_N / ROWS_AT_ONCE; i++) {
        int row = thread / 8 + ROWS_AT_ONCE * i;
        // GATED: half of the tile is gate rows, the other half the up rows of the same columns.
        int n = THEN == GATED ? first_n + row % (TILE_N / 2) : first_n + row;
        bool valid = n < p.n;
        if (THEN == GATED && row >= TILE_N / 2) n += p.n;
        from.b[i] = (valid ? n : 0) * p.b_stride + thread % 8 * 8;
        from.b_valid |= (u32)valid << i;
    }
}

/// Fills a stage with the numbers k .. k + 64; zeros where there are none.
template <Then THEN>
DEVICE void fill(const Gemm &p, const Sources &from, const u16 *b, int thread, u32 stage, int k) {
    int row = thread / 8, chunk = thread % 8, at = k + chunk * 8;
    bool inside = at < p.k;
    // SPLIT: the last third of k takes a's second part again, the last two b's parts.
    int a_back = THEN == SPLIT && at >= p.k / 3 * 2 ? p.k / 3 : 0, b_back = THEN == SPLIT && at >= p.k / 3 ? p.k / 3 : 0;
    u32 to = stage + row * 128 + (chunk ^ row % 8) * 16;
#pragma unroll
    for (int i = 0; i < TILE_M / ROWS_AT_ONCE; i++) {
        if (i >= from.a_count) break;
        copy_16(to + i * ROWS_AT_ONCE * 128, p.a + from.a[i] + k - a_back, inside && from.a_valid >> i & 1);
    }
#pragma unroll
    for (int i = 0; i < TILE_N / ROWS_AT_ONCE; i++) {
        bool valid = inside && from.b_valid >> i & 1;
        copy_16(to + A_BYTES + i * ROWS_AT_ONCE * 128, b + from.b[i] + k - b_back, valid);
    }
}

/// Brings all steps of a tile.
template <Then THEN, bool GROUPED> DEVICE void produce(const Gemm &p, const Tile &tile, int first_n, Ring &ring) {
    int thread = threadIdx.x - CONSUMERS;
    Sources from;
    sources<THEN, GROUPED>(from, p, tile, first_n, thread);
    const u16 *b = p.b + tile.matrix * p.matrix;
    for (int k = 0; k < p.k; k += STEP, ring.count++) {
        barrier_wait(ring.empty + Ring::offset(ring.count), Ring::parity(ring) ^ 1);
        fill<THEN>(p, from, b, thread, Ring::stage(ring), k);
        barrier_arrive_copied(ring.full + Ring::offset(ring.count));
    }
}

/// What becomes of two neighbouring sums of a row; `pair` and `weight` are those of PAIRS.
template <Then THEN, bool GROUPED>
DEVICE void finish(const Gemm &p, const Tile &tile, int row, int n, float x, float y, u32 pair, float weight) {
    long at = tile.first + row;
    if (THEN == PAIRS) {
        u16 *to = (u16 *)p.out + (long)pair * p.out_stride + n;
        if (n + 1 < p.n) *(u32 *)to = bf16_pair(x * weight, y * weight);
        else *to = bf16(x * weight);
        return;
    }
    float *to = (float *)p.out + at * p.out_stride + n;
    float scale = THEN == SCALE ? p.scale[at] : 1.0f;
    if (THEN == ADD) {
        to[0] += x;
        if (n + 1 < p.n) to[1] += y;
    } else {
        to[0] = x * scale;
        if (n + 1 < p.n) to[1] = y * scale;
    }
}

/// Multiplies all steps of a tile as they come, and stores the sums.
template <Then THEN, bool GROUPED, int BLOCKS>
DEVICE void consume(const Gemm &p, const Tile &tile, int first_n, Ring &ring) {
    int group = threadIdx.x / 128, lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    float c[BLOCKS][64];
#pragma unroll
    for (int i = 0; i < BLOCKS; i++) {
#pragma unroll
        for (int j = 0; j < 64; j++) c[i][j] = 0.0f;
    }
    int first = ring.count;
    for (int k = 0; k < p.k; k += STEP, ring.count++) {
        barrier_wait(ring.full + Ring::offset(ring.count), Ring::parity(ring));
        products_begin();
        products<BLOCKS>(c, Ring::stage(ring), group);
        products_wait<1>();
        // The products of the step before are done: its stage is free.
        if (lane == 0 && ring.count > first) barrier_arrive(ring.empty + Ring::offset(ring.count - 1));
    }
    products_wait<0>();
    if (lane == 0) barrier_arrive(ring.empty + Ring::offset(ring.count - 1));
#pragma unroll
    for (int i = 0; i < BLOCKS; i++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int row = (group + 2 * i) * 64 + warp * 16 + half * 8 + lane / 4;
            if (row >= tile.rows) continue;
            if (THEN == GATED) {
#pragma unroll
                for (int j = 0; j < TILE_N / 16; j++) {
                    int n = first_n + j * 8 + lane % 4 * 2;
                    const float *gate = c[i] + 4 * j + 2 * half, *up = gate + 32;
                    float x = silu(gate[0]) * up[0], y = silu(gate[1]) * up[1];
                    u16 *to = (u16 *)p.out + (long)(tile.first + row) * p.out_stride + n;
                    if (n + 1 < p.n) *(u32 *)to = bf16_pair(x, y);
                    else if (n < p.n) *to = bf16(x);
                }
            } else {
                u32 pair = THEN == PAIRS ? pair_at(p, tile, row) : 0;
                float weight = THEN == PAIRS ? p.scale[pair] : 1.0f;
#pragma unroll
                for (int j = 0; j < TILE_N / 8; j++) {
                    int n = first_n + j * 8 + lane % 4 * 2;
                    const float *sum = c[i] + 4 * j + 2 * half;
                    if (n < p.n) finish<THEN, GROUPED>(p, tile, row, n, sum[0], sum[1], pair, weight);
                }
            }
        }
    }
}

/// Lets the steps of a tile pass by: a group with no rows in it.
DEVICE void skip(const Gemm &p, Ring &ring) {
    for (int k = 0; k < p.k; k += STEP, ring.count++) {
        barrier_wait(ring.full + Ring::offset(ring.count), Ring::parity(ring));
        if (threadIdx.x % 32 == 0) barrier_arrive(ring.empty + Ring::offset(ring.count));
    }
}

/// Tiles of some rows, or of an expert's pairs.
template <Then THEN, bool GROUPED> struct Tiles {
    static const int WIDTH = THEN == GATED ? TILE_N / 2 : TILE_N;
    int columns, rows;

    DEVICE Tiles of(const Gemm &p) {
        Tiles tiles;
        tiles.columns = (p.n + WIDTH - 1) / WIDTH;
        tiles.rows = GROUPED ? *p.count : (p.m + p.tile_rows - 1) / p.tile_rows;
        return tiles;
    }

    /// Dense: neighbouring blocks share columns of b; grouped: rows of a.
    DEVICE Tile at(const Tiles &tiles, const Gemm &p, int t, int &first_n) {
        int r = GROUPED ? t / tiles.columns : t % tiles.rows;
        first_n = (GROUPED ? t % tiles.columns : t / tiles.rows) * WIDTH;
        if (GROUPED) return p.tiles[r];
        Tile tile;
        tile.first = r * p.tile_rows;
        tile.rows = min(p.tile_rows, p.m - tile.first);
        tile.matrix = 0;
        return tile;
    }
};

/// Blocks of the grid take tiles in turns.
template <Then THEN, bool GROUPED> DEVICE void gemm(const Gemm &p) {
    typedef Tiles<THEN, GROUPED> All;
    extern __shared__ __align__(1024) u8 shared[];
    Ring ring;
    ring.base = shared_address(shared);
    ring.full = ring.base + BARRIERS_AT;
    ring.empty = ring.full + STAGES * 8;
    ring.count = 0;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(ring.full + 8 * i, PRODUCERS);
            barrier_init(ring.empty + 8 * i, CONSUMERS / 32);
        }
    }
    __syncthreads();
    All all = All::of(p);
    int count = all.rows * all.columns, first_n;
    if (threadIdx.x >= CONSUMERS) {
        for (int t = blockIdx.x; t < count; t += gridDim.x) {
            Tile tile = All::at(all, p, t, first_n);
            produce<THEN, GROUPED>(p, tile, first_n, ring);
        }
        copies_wait_all();
    } else {
        int group = threadIdx.x / 128;
        for (int t = blockIdx.x; t < count; t += gridDim.x) {
            Tile tile = All::at(all, p, t, first_n);
            if ((group + 2) * 64 < tile.rows) consume<THEN, GROUPED, 2>(p, tile, first_n, ring);
            else if (group * 64 < tile.rows) consume<THEN, GROUPED, 1>(p, tile, first_n, ring);
            else skip(p, ring);
        }
    }
}

#define ROWS KERNEL __launch_bounds__(THREADS, 1)

/// out = a bᵀ.
ROWS void gemm_store(__grid_constant__ const Gemm p) { gemm<STORE, false>(p); }

/// out += a bᵀ.
ROWS void gemm_add(__grid_constant__ const Gemm p) { gemm<ADD, false>(p); }

/// out = scale · a bᵀ.
ROWS void gemm_scale(__grid_constant__ const Gemm p) { gemm<SCALE, false>(p); }

/// out = a bᵀ of factors that are sums of two, but for low · low.
ROWS void gemm_split(__grid_constant__ const Gemm p) { gemm<SPLIT, false>(p); }

/// out = SiLU(a gateᵀ) ⊙ (a upᵀ), as bf16.
ROWS void gemm_gated(__grid_constant__ const Gemm p) { gemm<GATED, false>(p); }

/// The same for the pairs of experts: a's rows are those of the pairs, out's are sorted.
ROWS void gemm_experts_gated(__grid_constant__ const Gemm p) { gemm<GATED, true>(p); }

/// out[pair] = weight · a bᵀ, as bf16: a's rows are sorted.
ROWS void gemm_experts_down(__grid_constant__ const Gemm p) { gemm<PAIRS, true>(p); }
