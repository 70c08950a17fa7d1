// Norms, router, grouping of pairs, sums: everything that works on rows and touches no weight matrix.

struct Norm {
    const float *x;      // [rows, cols]
    const u32 *index;    // which rows of x; may be null: all
    const float *weight; // [cols]
    float *out;          // [rows, cols]; may be null
    u16 *rounded;        // the same as bf16; may be null
    u16 *split;          // the same as low | high | high, bf16; may be null
    const float *dot;    // [cols]; may be null
    float *share;        // sigmoid(out · dot) of each row
    int cols;
    float eps;
};

/// x / sqrt(mean(x²) + eps) · weight. Grid: rows.
KERNEL void rms_norm(Norm p) {
    __shared__ float room[32];
    long row = blockIdx.x;
    const float *x = p.x + (p.index ? (long)p.index[row] : row) * p.cols;
    float squares = 0.0f;
    for (int i = threadIdx.x; i < p.cols; i += blockDim.x) squares = fmaf(x[i], x[i], squares);
    float scale = 1.0f / sqrtf(block_sum(squares, room) / (float)p.cols + p.eps), share = 0.0f;
    for (int i = threadIdx.x; i < p.cols; i += blockDim.x) {
        float y = x[i] * scale * p.weight[i];
        if (p.out) p.out[row * p.cols + i] = y;
        if (p.rounded) p.rounded[row * p.cols + i] = bf16(y);
        if (p.split) {
            u16 *to = p.split + row * 3 * p.cols + i, high = bf16(y);
            to[p.cols] = to[2 * p.cols] = high;
            to[0] = bf16(y - bf16_value(high));
        }
        if (p.dot) share = fmaf(y, p.dot[i], share);
    }
    if (p.dot) {
        share = block_sum(share, room);
        if (threadIdx.x == 0) p.share[row] = sigmoid(share);
    }
}

struct Gated {
    const float *gate, *up;  // [rows, cols]
    float *out;
    long count;
};

/// out = SiLU(gate) ⊙ up.
KERNEL void gated(Gated p) {
    long i = (long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < p.count) p.out[i] = silu(p.gate[i]) * p.up[i];
}

struct Route {
    const float *logits; // [rows, experts]
    u32 *ids;            // [rows, used]
    float *weights;      // [rows, used]
    u32 *order;          // [rows, used]
    int *counts;         // [experts]: pairs of each, added to; may be null
    int rows, experts, used;
};

/// Softmax over all experts, the largest ones by falling weight (ties to the lower number), their weights brought to a
/// sum of 1, and their order by ascending number. A warp for each row; shared memory: warps · (experts + 2 used).
KERNEL void route(Route p) {
    extern __shared__ float room[];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    long row = (long)blockIdx.x * (blockDim.x / 32) + warp;
    if (row >= p.rows) return;
    float *scores = room + warp * (p.experts + 2 * p.used), *best = scores + p.experts;
    u32 *chosen = (u32 *)(best + p.used);
    float largest = -3.0e38f, sum = 0.0f;
    for (int e = lane; e < p.experts; e += 32) largest = fmaxf(largest, p.logits[row * p.experts + e]);
    for (int step = 16; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
    for (int e = lane; e < p.experts; e += 32) {
        scores[e] = expf(p.logits[row * p.experts + e] - largest);
        sum += scores[e];
    }
    sum = warp_sum(sum);
    for (int e = lane; e < p.experts; e += 32) scores[e] /= sum;
    float total = 0.0f;
    for (int i = 0; i < p.used; i++) {
        float value = -1.0f;
        u32 id = p.experts;
        for (int e = lane; e < p.experts; e += 32) {
            if (scores[e] > value) value = scores[e], id = e;
        }
        for (int step = 16; step > 0; step /= 2) {
            float other = __shfl_xor_sync(~0u, value, step);
            u32 other_id = __shfl_xor_sync(~0u, id, step);
            if (other > value || (other == value && other_id < id)) value = other, id = other_id;
        }
        // Logits that are not numbers choose nothing: the lowest experts stand in, and the result shows it.
        if (id >= p.experts) id = i, value = __int_as_float(0x7fffffff);
        if (id % 32 == lane) scores[id] = -2.0f;
        if (lane == 0) best[i] = value, chosen[i] = id;
        total += value;
        __syncwarp();
    }
    for (int i = lane; i < p.used; i += 32) {
        long at = row * p.used + i;
        int rank = 0;
        for (int j = 0; j < p.used; j++) rank += chosen[j] < chosen[i] || (chosen[j] == chosen[i] && j < i);
        p.ids[at] = chosen[i];
        p.weights[at] = best[i] / total;
        p.order[row * p.used + rank] = i;
        if (p.counts) atomicAdd(p.counts + chosen[i], 1);
    }
}

struct Group {
    const int *counts; // [experts]
    int *starts;       // [experts]: where an expert's pairs begin
    int *next;         // [experts]: the same, counted up while pairs are sorted
    const u32 *ids;    // [pairs]
    u32 *sorted;       // [pairs]: pairs by ascending expert
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
    if (pair < p.pairs) p.sorted[atomicAdd(p.next + p.ids[pair], 1)] = pair;
}

struct Tile {
    int first, rows, matrix, unused;
};

struct Tiles {
    const int *counts, *starts; // [experts]
    const u32 *list;            // experts of this product
    Tile *tiles;
    int *count;
    int listed, tile_rows;
};

/// Tiles of the pairs of listed experts. One block of 1024 threads.
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
    for (int i = 0; i < own; i++) {
        Tile tile;
        tile.first = p.starts[p.list[t]] + i * p.tile_rows;
        tile.rows = min(p.tile_rows, pairs - i * p.tile_rows);
        tile.matrix = t;
        tile.unused = 0;
        p.tiles[sums[t] - own + i] = tile;
    }
}

struct Mask {
    u32 bits[32];
};

struct Sum {
    Mask mask;
    const u16 *pairs;  // weighted outputs of the pairs: [rows, used, cols] bf16
    const u32 *ids;    // [rows, used]
    const u32 *order;  // [rows, used]
    float *sum;        // [rows, cols]
    float *hidden;     // [rows, cols]
    int cols, used, last;
};

/// sum += the outputs of a row's experts in this wave, ascending; after the last the sum joins the residual.
/// Grid: (rows, columns / 2 / threads).
KERNEL void sum_pairs(Sum p) {
    int n = (blockIdx.y * blockDim.x + threadIdx.x) * 2;
    long row = blockIdx.x;
    if (n >= p.cols) return;
    float2 *sum = (float2 *)(p.sum + row * p.cols + n);
    float2 total = *sum;
    for (int i = 0; i < p.used; i++) {
        long pair = row * p.used + p.order[row * p.used + i];
        u32 expert = p.ids[pair];
        if (!(p.mask.bits[expert / 32] >> (expert % 32) & 1)) continue;
        u32 both = *(const u32 *)(p.pairs + pair * p.cols + n);
        total.x += bf16_value((u16)both);
        total.y += bf16_value((u16)(both >> 16));
    }
    *sum = total;
    if (p.last) {
        float2 *hidden = (float2 *)(p.hidden + row * p.cols + n);
        hidden->x += total.x;
        hidden->y += total.y;
    }
}
