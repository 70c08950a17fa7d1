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

struct Group {
    const int *counts; // [experts]
    int *starts;       // [experts]: where an expert's pairs begin
    int *next;         // [experts]: the same, counted up while pairs are sorted
    const u32 *ids;    // [pairs]
    u32 *sorted;       // [pairs]: pairs by ascending expert
    u32 *places;       // [pairs]: where a pair has come to be
    const float *from; // [pairs]: weights
    float *weights;    // [pairs]: of sorted pairs
    int experts, pairs;
};

/// Starts of the experts' pairs: sums of the counts before. One block of 1024 threads.
KERNEL void group_starts(Group p) {
    __shared__ int sums[1024];
    int t = threadIdx.x, own = t < p.experts ? p.counts[t] : 0;
    sums[t] = own;
    for (int step = 1; step < 1024; step *= 2) {
        __syncthreads();
        int before = t >= step ? sums[t - step] : 0;
        __syncthreads();
        sums[t] += before;
    }
    if (t < p.experts) p.starts[t] = p.next[t] = sums[t] - own;
}

/// Sorts pairs by expert; the order of an expert's pairs does not matter, for each has its own row of results.
KERNEL void group_pairs(Group p) {
    int pair = blockIdx.x * blockDim.x + threadIdx.x;
    if (pair >= p.pairs) return;
    int place = atomicAdd(p.next + p.ids[pair], 1);
    p.sorted[place] = pair, p.places[pair] = place, p.weights[place] = p.from[pair];
}

struct Tile {
    int first, rows, matrix, expert; // matrix: place in the list
};

struct Tiles {
    const int *counts, *starts; // [experts]
    const u32 *list;            // experts of this product
    Tile *tiles;
    int *count;
    int listed, tile_rows;
};

/// Tiles of the pairs of listed experts, each expert's about alike in rows. One block of 1024 threads.
KERNEL void group_tiles(Tiles p) {
    __shared__ int sums[1024];
    int t = threadIdx.x, pairs = t < p.listed ? p.counts[p.list[t]] : 0;
    int own = (pairs + p.tile_rows - 1) / p.tile_rows;
    sums[t] = own;
    for (int step = 1; step < 1024; step *= 2) {
        __syncthreads();
        int before = t >= step ? sums[t - step] : 0;
        __syncthreads();
        sums[t] += before;
    }
    if (t == 1023) *p.count = sums[t];
    // Whole groups of 16, as they are multiplied.
    int each = own > 0 ? ((pairs + own - 1) / own + 15) / 16 * 16 : 0;
    for (int i = 0; i < own; i++) {
        Tile tile;
        tile.first = p.starts[p.list[t]] + i * each;
        tile.rows = min(each, pairs - i * each);
        tile.matrix = t;
        tile.expert = p.list[t];
        p.tiles[sums[t] - own + i] = tile;
    }
}

struct Shuffle {
    const u32 *from; // rows of whole 128 numbers, as pairs of bf16
    uint4 *to;
    int fours;       // of pairs
};

/// Numbers of rows in the order in which `experts.cu` multiplies them. Grid: four pairs of numbers to a thread.
KERNEL void shuffle_rows(Shuffle p) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= p.fours) return;
    // Four pairs of the same step and half, of four runs.
    const u32 *from = p.from + (long)(i / 16) * 64 + i % 16;
    p.to[i] = make_uint4(from[0], from[16], from[32], from[48]);
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
