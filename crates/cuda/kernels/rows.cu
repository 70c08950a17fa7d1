// Norms, router, grouping of pairs, sums: everything that works on rows and touches no weight matrix.

struct Norm {
    const float *x;      // [rows, cols]
    const u32 *index;    // which rows of x; may be null: all
    const float *weight; // [cols]
    float *out;          // [rows, cols]; may be null
    u16 *rounded;        // the same as bf16; may be null
    u16 *split;          // the same as [rows, 2, cols], low and high, bf16; may be null
    const float *dot;    // [cols]; may be null
    float *share;        // sigmoid(out · dot) of each row
    int rows, cols;
    float eps;
};

DEVICE float dot4(float4 a, float4 b) { return (a.x * b.x + a.y * b.y) + (a.z * b.z + a.w * b.w); }

const int NORM_WARPS = 4, HELD = 16; // warps of a block, and fours of a row that a lane holds

/// x / sqrt(mean(x²) + eps) · weight, a warp a row, a lane four numbers of every 128. Grid: rows / NORM_WARPS.
KERNEL __launch_bounds__(NORM_WARPS * 32, 4) void rms_norm(Norm p) {
    int lane = threadIdx.x % 32, row = blockIdx.x * NORM_WARPS + threadIdx.x / 32;
    previous();
    next();
    if (row >= p.rows) return;
    const float *x = p.x + (p.index ? (long)p.index[row] : row) * p.cols;
    float4 held[HELD];
    float squares = 0.0f, share = 0.0f;
#pragma unroll
    for (int j = 0; j < HELD; j++) {
        int i = (j * 32 + lane) * 4;
        held[j] = i < p.cols ? *(const float4 *)(x + i) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
#pragma unroll
    for (int j = 0; j < HELD; j++) squares += dot4(held[j], held[j]);
    // What is not held is read twice.
    for (int i = (HELD * 32 + lane) * 4; i < p.cols; i += 128) {
        float4 v = *(const float4 *)(x + i);
        squares += dot4(v, v);
    }
    float scale = 1.0f / sqrtf(warp_sum(squares) / (float)p.cols + p.eps);
    auto put = [&](int i, float4 v) {
        float4 w = *(const float4 *)(p.weight + i);
        float4 y = make_float4(v.x * scale * w.x, v.y * scale * w.y, v.z * scale * w.z, v.w * scale * w.w);
        uint2 high = make_uint2(bf16_pair(y.x, y.y), bf16_pair(y.z, y.w));
        long at = (long)row * p.cols + i;
        if (p.out) *(float4 *)(p.out + at) = y;
        if (p.rounded) *(uint2 *)(p.rounded + at) = high;
        if (p.split) {
            u16 *to = p.split + at + (long)row * p.cols;
            *(uint2 *)(to + p.cols) = high;
            float4 low = make_float4(y.x - bf16_value((u16)high.x), y.y - bf16_value((u16)(high.x >> 16)),
                                     y.z - bf16_value((u16)high.y), y.w - bf16_value((u16)(high.y >> 16)));
            *(uint2 *)to = make_uint2(bf16_pair(low.x, low.y), bf16_pair(low.z, low.w));
        }
        if (p.dot) share += dot4(y, *(const float4 *)(p.dot + i));
    };
#pragma unroll
    for (int j = 0; j < HELD; j++) {
        int i = (j * 32 + lane) * 4;
        if (i < p.cols) put(i, held[j]);
    }
    for (int i = (HELD * 32 + lane) * 4; i < p.cols; i += 128) put(i, *(const float4 *)(x + i));
    if (p.dot) {
        share = warp_sum(share);
        if (lane == 0) p.share[row] = sigmoid(share);
    }
}

struct Route {
    const float *logits; // rows of `stride` numbers, of which the first are of experts
    u32 *ids;            // [rows, used]
    float *weights;      // [rows, used]
    u32 *order;          // [rows, used]
    int *counts;         // [experts]: pairs of each, added to; may be null
    int rows, experts, used, stride; // used: at most 32
};

/// The experts of each row, and how many rows each has. Grid: rows / warps; a warp for each row; shared memory: warps ·
/// experts numbers.
KERNEL void route(Route p) {
    long row = (long)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= p.rows) return;
    extern __shared__ u32 keys[];
    u32 *ids = p.ids + row * p.used, *own = keys + threadIdx.x / 32 * p.experts;
    choose(p.logits + row * p.stride, p.experts, p.used, own, ids, p.weights + row * p.used, p.order + row * p.used);
    __syncwarp();
    if (p.counts && threadIdx.x % 32 < p.used) atomicAdd(p.counts + ids[threadIdx.x % 32], 1);
}

/// The sum of `own` over the threads before this one of a block of 1024, all of which call it; `sums`: 32 numbers of shared memory.
DEVICE int sum_before(int own, int *sums) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    auto up_to = [&](int x) {
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            int before = __shfl_up_sync(~0u, x, step);
            if (lane >= step) x += before;
        }
        return x;
    };
    int all = up_to(own);
    if (lane == 31) sums[warp] = all;
    __syncthreads();
    if (warp == 0) sums[lane] = up_to(sums[lane]);
    __syncthreads();
    return all - own + (warp > 0 ? sums[warp - 1] : 0);
}

struct Group {
    const int *counts; // [experts], at most 1024
    int *taken;        // [experts]: how many of an expert's places have been given to pairs; 0 before
    const u32 *ids;    // [pairs]
    u32 *sorted;       // [pairs]: pairs by ascending expert
    u32 *places;       // [pairs]: where a pair has come to be
    const float *from; // [pairs]: weights
    float *weights;    // [pairs]: of sorted pairs
    int experts, pairs;
};

const int SORTED = 4; // pairs of a thread

/// Sorts pairs by expert; the order of an expert's pairs does not matter, for each has its own row of results. Pairs of a block are
/// counted in shared memory, so that blocks do not wait for one another at the counters. Blocks of 1024 threads.
KERNEL void group_pairs(Group p) {
    __shared__ int sums[32], held[1024];
    int t = threadIdx.x, first = blockIdx.x * 1024 * SORTED + t;
    held[t] = 0;
    previous();
    next();
    int start = sum_before(t < p.experts ? p.counts[t] : 0, sums);
    u32 ids[SORTED];
    int ranks[SORTED];
#pragma unroll
    for (int i = 0; i < SORTED; i++) {
        int pair = first + i * 1024;
        if (pair < p.pairs) ids[i] = p.ids[pair], ranks[i] = atomicAdd(held + ids[i], 1);
    }
    __syncthreads();
    int own = held[t];
    held[t] = start + (own > 0 ? atomicAdd(p.taken + t, own) : 0);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < SORTED; i++) {
        int pair = first + i * 1024;
        if (pair >= p.pairs) break;
        int place = held[ids[i]] + ranks[i];
        p.sorted[place] = pair, p.places[pair] = place, p.weights[place] = p.from[pair];
    }
}

struct Tile {
    int first, rows, matrix, expert; // matrix: place in the list
};

struct Tiles {
    const int *counts; // [experts]
    const u32 *list;   // experts of this product
    Tile *tiles;
    int *count;
    int experts, listed, tile_rows;
    // Rows of whole 128 numbers, as pairs of bf16, to be shuffled; `fours`: of pairs, may be 0.
    const u32 *from;
    uint4 *to;
    int fours;
};

/// The first block: tiles of the pairs of listed experts, each expert's about alike in rows. The others: numbers of rows in the order in
/// which `experts.cu` multiplies them, four pairs of numbers to a thread. Blocks of 1024 threads.
KERNEL void group_tiles(Tiles p) {
    __shared__ int sums[32], starts[1024];
    int t = threadIdx.x;
    previous();
    next();
    if (blockIdx.x > 0) {
        int i = (blockIdx.x - 1) * 1024 + t;
        if (i >= p.fours) return;
        // Four pairs of the same step and half, of four runs.
        const u32 *from = p.from + (long)(i / 16) * 64 + i % 16;
        p.to[i] = make_uint4(from[0], from[16], from[32], from[48]);
        return;
    }
    starts[t] = sum_before(t < p.experts ? p.counts[t] : 0, sums);
    __syncthreads();
    u32 expert = t < p.listed ? p.list[t] : 0;
    int pairs = t < p.listed ? p.counts[expert] : 0, own = (pairs + p.tile_rows - 1) / p.tile_rows;
    int at = sum_before(own, sums);
    if (t == 1023) *p.count = at + own;
    // Whole groups of 16, as they are multiplied.
    int each = own > 0 ? ((pairs + own - 1) / own + 15) / 16 * 16 : 0;
    for (int i = 0; i < own; i++) {
        Tile tile;
        tile.first = starts[expert] + i * each;
        tile.rows = min(each, pairs - i * each);
        tile.matrix = t;
        tile.expert = expert;
        p.tiles[at + i] = tile;
    }
}

struct Mask {
    u32 bits[32];
};

struct Sum {
    Mask mask;
    const u16 *pairs;  // weighted outputs of the pairs: [rows · used, cols] bf16
    const u32 *places; // [rows, used]: the pairs' rows there, if not in this order
    const u32 *ids;    // [rows, used]
    const u32 *order;  // [rows, used]
    float *sum;        // [rows, cols]
    float *hidden;     // [rows, cols]
    int cols, used, last;
};

/// sum += the outputs of a row's experts in this wave, ascending; after the last the sum joins the residual.
/// Grid: (rows, columns / 8 / threads).
KERNEL void sum_pairs(Sum p) {
    const int AT_ONCE = 5;
    previous();
    next();
    int n = (blockIdx.y * blockDim.x + threadIdx.x) * 8, lane = threadIdx.x % 32;
    long row = blockIdx.x, first = row * p.used;
    // Lane i knows where the pair of the i-th expert is; nowhere if it is of another wave.
    u32 own = ~0u;
    if (lane < p.used) {
        u32 pair = p.order[first + lane], expert = p.ids[first + pair];
        if (p.mask.bits[expert / 32] >> (expert % 32) & 1) own = p.places ? p.places[first + pair] : first + pair;
    }
    if (n >= p.cols) n = -1;
    float4 *sum = (float4 *)(p.sum + row * p.cols + max(n, 0)), low = sum[0], high = sum[1];
    for (int start = 0; start < p.used; start += AT_ONCE) {
        uint4 eight[AT_ONCE];
        bool here[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            u32 place = __shfl_sync(~0u, own, min(start + i, 31));
            here[i] = start + i < p.used && place != ~0u && n >= 0;
            if (here[i]) eight[i] = *(const uint4 *)(p.pairs + (long)place * p.cols + n);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            if (!here[i]) continue;
            low.x += bf16_value((u16)eight[i].x), low.y += bf16_value((u16)(eight[i].x >> 16));
            low.z += bf16_value((u16)eight[i].y), low.w += bf16_value((u16)(eight[i].y >> 16));
            high.x += bf16_value((u16)eight[i].z), high.y += bf16_value((u16)(eight[i].z >> 16));
            high.z += bf16_value((u16)eight[i].w), high.w += bf16_value((u16)(eight[i].w >> 16));
        }
    }
    if (n < 0) return;
    if (!p.last) {
        sum[0] = low, sum[1] = high;
        return;
    }
    float4 *hidden = (float4 *)(p.hidden + row * p.cols + n), a = hidden[0], b = hidden[1];
    hidden[0] = make_float4(a.x + low.x, a.y + low.y, a.z + low.z, a.w + low.w);
    hidden[1] = make_float4(b.x + high.x, b.y + high.y, b.z + high.z, b.w + high.w);
}
