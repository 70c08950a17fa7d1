// The largest numbers of rows, as choosing a token wants them of its logits.
//
// A piece of a row is a block's, a number of every LARGEST_THREADS a thread's. A bound that the largest numbers of `count` threads
// reach is one that `count` numbers reach; it is worked out bit by bit from above, as far as few enough reach it.

const int LARGEST_THREADS = 1024, LARGEST_EACH = 8, LARGEST_ROOM = 256;

struct Largest {
    const float *x; // [rows, cols]
    uint2 *out;     // [rows, pieces, LARGEST_ROOM]: where in its row a number is, and its bits; memory of the host
    u32 *counts;    // [rows, pieces]: how many there are, also where there is no room for all
    int cols, count;
};

/// Larger for larger numbers, largest for those that are not finite, never 0; 0 and −0 are the same.
DEVICE u32 rank(float x) {
    return (__float_as_uint(x) & 0x7f800000u) == 0x7f800000u ? 0xffffffffu : order_of(x + 0.0f);
}

/// Grid: pieces, rows.
KERNEL __launch_bounds__(LARGEST_THREADS) void largest(Largest p) {
    __shared__ u32 found;
    int first = blockIdx.x * LARGEST_THREADS * LARGEST_EACH + threadIdx.x;
    const float *row = p.x + (long)blockIdx.y * p.cols;
    u32 ranks[LARGEST_EACH], most = 0, least = 0;
#pragma unroll
    for (int i = 0; i < LARGEST_EACH; i++) {
        int at = first + i * LARGEST_THREADS;
        ranks[i] = at < p.cols ? rank(row[at]) : 0;
        most = max(most, ranks[i]);
    }
    if (threadIdx.x == 0) found = 0;
    for (u32 bit = 1u << 31; bit > 0; bit >>= 1) {
        int reach = __syncthreads_count(most >= (least | bit));
        if (reach < p.count) continue;
        least |= bit;
        if (reach <= 2 * p.count) break;
    }
    int piece = blockIdx.y * gridDim.x + blockIdx.x;
#pragma unroll
    for (int i = 0; i < LARGEST_EACH; i++) {
        if (ranks[i] < max(least, 1u)) continue;
        int at = first + i * LARGEST_THREADS;
        u32 place = atomicAdd(&found, 1);
        if (place < LARGEST_ROOM) p.out[piece * LARGEST_ROOM + place] = make_uint2(at, __float_as_uint(row[at]));
    }
    __syncthreads();
    if (threadIdx.x == 0) p.counts[piece] = found;
}
