// Attention of many rows for GPUs of compute capability 9.0a (`wgmma`), heads of DIM = 256 numbers.
//
// Blocks of the grid take tiles in turns: 64 rows of two heads that share a kv head, a group of four warps each. Other warps copy
// queries, and keys and values through TILES buffers of shared memory in the order keys 0, keys 1, values 0, keys 2, values 1, …,
//
//   tile: [4][64][64] f16: 64 columns of 64 positions (or rows, of queries), rows of 128 bytes, 16-byte chunk c of row r at
//   chunk c ^ (r % 8),
//
// each with a barrier for "full" and one for "empty". A group's products of values and of the next keys are issued together; the
// softmax of those scores is worked out while values are multiplied.
//
// A block of keys of which a row sees none leaves its sums as they are, to the bit.

const int GROUPS = 2, CONSUMERS = GROUPS * 128, PRODUCERS = 128, THREADS = CONSUMERS + PRODUCERS;
// Registers of a thread that multiplies, and of one that copies, which holds 32 numbers at a time of f32.
const int MORE = KV_F32 ? 208 : 224, LESS = KV_F32 ? 88 : 56;
const int PART_BYTES = BLOCK * 128, TILE_BYTES = DIM / 64 * PART_BYTES, TILES = 5;
const int TILES_AT = GROUPS * TILE_BYTES, BARRIERS_AT = TILES_AT + TILES * TILE_BYTES; // of queries, then of the ring

/// Where chunk c (eight f16) of row r of a tile lies.
DEVICE u32 part_at(u32 tile, int row, int chunk) { return tile + chunk / 8 * PART_BYTES + row * 128 + (chunk % 8 ^ row % 8) * 16; }

/// 2^x, for softmax weights.
DEVICE float power(float x) {
    float out;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out;
}

/// Two weights, which are at most 1, to a pair of f16.
DEVICE u32 weight_pair(float low, float high) {
    u32 out;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    return out;
}

/// What a block does in one of its turns. Long tiles come first, and every other turn the other way round, so that
/// all blocks get alike much.
struct Work {
    int head, kv_head, first, count, blocks; // of two heads the first; rows; key blocks

    DEVICE bool at(const Mix &p, int turn, Work &work) {
        int pairs = p.shape.heads / GROUPS, tiles = (p.rows + BLOCK - 1) / BLOCK;
        int tile = turn * gridDim.x + (turn % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
        work.head = tile % pairs * GROUPS;
        work.kv_head = work.head / (p.shape.heads / p.shape.kv_heads);
        work.first = (tiles - 1 - tile / pairs) * BLOCK;
        work.count = min(BLOCK, p.rows - work.first);
        work.blocks = (p.position + work.first + work.count + BLOCK - 1) / BLOCK;
        return tile < pairs * tiles;
    }
};

/// The tiles of keys and values as a ring.
struct Ring {
    u32 tiles, barriers;
    int slot, parity;

    DEVICE u32 tile(const Ring &r) { return r.tiles + r.slot * TILE_BYTES; }
    DEVICE u32 full(const Ring &r) { return r.barriers + 8 * r.slot; }
    DEVICE u32 empty(const Ring &r) { return r.barriers + 8 * (TILES + r.slot); }
    /// The barriers of the queries.
    DEVICE u32 asked(const Ring &r) { return r.barriers + 8 * 2 * TILES; }
    DEVICE u32 answered(const Ring &r) { return r.barriers + 8 * (2 * TILES + 1); }
    DEVICE void advance(Ring &r) {
        if (++r.slot == TILES) r.slot = 0, r.parity ^= 1;
    }
};

/// One thread's share of a tile: chunk t % 32 of every fourth row.
DEVICE void fill(u32 tile, const u16 *from, int thread) {
    int row = thread / CHUNKS, chunk = thread % CHUNKS;
    u32 even = part_at(tile, row, chunk), odd = part_at(tile, row + 4, chunk);
    from += row * DIM + chunk * 8;
#pragma unroll
    for (int i = 0; i < BLOCK / 8; i++) {
        copy_16(even + i * 8 * 128, from + i * 8 * DIM, true);
        copy_16(odd + i * 8 * 128, from + (i * 8 + 4) * DIM, true);
    }
}

DEVICE void fill(u32 tile, const float *from, int thread) {
    const int BATCH = 8; // loads on their way before a store
    const float4 *x = (const float4 *)from + thread;
    for (int i = 0; i < BLOCK * DIM / 4 / PRODUCERS; i += BATCH) {
        float4 numbers[BATCH];
#pragma unroll
        for (int j = 0; j < BATCH; j++) numbers[j] = x[(i + j) * PRODUCERS];
#pragma unroll
        for (int j = 0; j < BATCH; j++) {
            int at = thread + (i + j) * PRODUCERS, row = at / (DIM / 4), column = at % (DIM / 4);
            u32 low = f16_pair(numbers[j].x, numbers[j].y), high = f16_pair(numbers[j].z, numbers[j].w);
            u32 to = part_at(tile, row, column / 2) + column % 2 * 8;
            asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to), "r"(low), "r"(high) : "memory");
        }
    }
}

/// Brings the queries of a tile, and asks for its gates, which are wanted at its end.
DEVICE void bring_queries(const Mix &p, const Work &work, const Ring &ring, int turn) {
    int thread = threadIdx.x - CONSUMERS, chunk = thread % (GROUPS * CHUNKS);
    u32 tile = ring.tiles - TILES_AT + chunk / CHUNKS * TILE_BYTES;
    const u16 *from = p.out + ((long)work.first * p.shape.heads + work.head) * DIM + chunk * 8;
    barrier_wait(Ring::answered(ring), turn % 2 ^ 1);
#pragma unroll 2
    for (int row = thread / (GROUPS * CHUNKS); row < BLOCK; row += PRODUCERS / (GROUPS * CHUNKS)) {
        bool valid = row < work.count;
        copy_16(part_at(tile, row, chunk % CHUNKS), from + (valid ? row * p.shape.heads * DIM : 0), valid);
    }
    barrier_arrive_copied(Ring::asked(ring));
    const int LINES = GROUPS * DIM * 4 / 128; // of a row
    const float *gates = p.projected + (p.shape.heads + work.head) * DIM + thread % LINES * 32;
    for (int row = thread / LINES; row < work.count; row += PRODUCERS / LINES) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(gates + (long)(work.first + row) * p.shape.stride));
    }
}

/// Brings the keys and values of all blocks of all tiles.
DEVICE void produce(const Mix &p, Ring ring) {
    int thread = threadIdx.x - CONSUMERS;
    Work work;
    for (int turn = 0; Work::at(p, turn, work); turn++) {
        for (int i = 0; i < 2 * work.blocks; i++) {
            int side = i > 0 && (i % 2 == 0 || i == 2 * work.blocks - 1), block = (i + 1) / 2 - side;
            Kv *page = p.pages[block * BLOCK / PAGE];
            const Kv *from = head_of(page, p.shape, side, work.kv_head) + block * BLOCK % PAGE * DIM;
            barrier_wait(Ring::empty(ring), ring.parity ^ 1);
            fill(Ring::tile(ring), from, thread);
            if (sizeof(Kv) == 2) {
                barrier_arrive_copied(Ring::full(ring));
            } else {
                copies_see_stores();
                barrier_arrive(Ring::full(ring));
            }
            Ring::advance(ring);
            if (i == 0) bring_queries(p, work, ring, turn);
        }
    }
    copies_wait_all();
}

/// The softmax of a thread's two rows so far: lane l of warp w holds rows 16 w + l / 4 and + 8.
struct Softmax {
    float largest[2], sums[2]; // sums: of this lane's columns

    /// Scores of 64 keys become weights; `corrections` are what to multiply sums by that were made before.
    DEVICE void next(Softmax &s, float score[32], float corrections[2]) {
        const float scale = 1.44269504f / 16.0f; // of exponents of two: log2(e) / √DIM
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float most = s.largest[half];
#pragma unroll
            for (int i = 0; i < 32; i++) {
                if (i / 2 % 2 == half) most = fmaxf(most, score[i]);
            }
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
            corrections[half] = power((s.largest[half] - most) * scale);
            s.largest[half] = most;
            float sum = 0.0f, least = -most * scale;
#pragma unroll
            for (int i = 0; i < 32; i++) {
                if (i / 2 % 2 == half) sum += score[i] = power(fmaf(score[i], scale, least));
            }
            s.sums[half] = s.sums[half] * corrections[half] + sum;
        }
    }
};

/// Takes away the scores of keys behind the last one seen, of this lane's first row, counted from the block's first; the other row
/// sees eight more.
DEVICE void mask(float score[32], int seen) {
    int column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < 32; i++) {
        if (i / 4 * 8 + column + i % 2 > seen + i / 2 % 2 * 8) score[i] = -1e30f;
    }
}

/// A row's sums by the softmax's, gated.
DEVICE void finish(const Mix &p, const Work &work, int head, const float out[128], const Softmax &softmax) {
    const int BATCH = 16;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float sum = softmax.sums[half];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        int row = warp * 16 + lane / 4 + half * 8;
        if (row >= work.count) continue;
        float part = 1.0f / sum;
        long at = work.first + row;
        const float *gates = p.projected + at * p.shape.stride + (p.shape.heads + head) * DIM + lane % 4 * 2;
        u16 *to = p.out + (at * p.shape.heads + head) * DIM + lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < DIM / 8; j += BATCH) {
            // All before the first store, which the compiler takes for one to them.
            float2 gate[BATCH];
#pragma unroll
            for (int k = 0; k < BATCH; k++) gate[k] = *(const float2 *)(gates + (j + k) * 8);
#pragma unroll
            for (int k = 0; k < BATCH; k++) {
                float x = out[4 * (j + k) + 2 * half] * part, y = out[4 * (j + k) + 2 * half + 1] * part;
                *(u32 *)(to + (j + k) * 8) = bf16_pair(x * sigmoid(gate[k].x), y * sigmoid(gate[k].y));
            }
        }
    }
}

/// Attention of 64 rows of one head over all blocks.
DEVICE void consume(const Mix &p, const Work &work, int turn, Ring &ring) {
    int group = threadIdx.x / 128, lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    int row = p.position + work.first + warp * 16, seen = row + lane / 4; // of this warp and lane the first
    u64 q = descriptor(ring.tiles - TILES_AT + group * TILE_BYTES);
    float out[128], score[32], corrections[2];
    u32 weights[16];
    Softmax softmax = {{-1e30f, -1e30f}, {0.0f, 0.0f}};
#pragma unroll
    for (int i = 0; i < 128; i++) out[i] = 0.0f;

    auto multiply_by_keys = [&]() {
        barrier_wait(Ring::full(ring), ring.parity);
        u64 k = descriptor(Ring::tile(ring));
        products_begin();
#pragma unroll
        for (int i = 0; i < DIM / 16; i++) {
            int at = i / 4 * (PART_BYTES / 16) + i % 4 * 2;
            if (i == 0) multiply_keys<0>(score, q + at, k + at);
            else multiply_keys<1>(score, q + at, k + at);
        }
        products_commit();
    };
    auto multiply_values_of = [&](const Ring &ring) {
        barrier_wait(Ring::full(ring), ring.parity);
        // Positions are rows here: 64 columns lie a part apart, eight positions 1024 bytes.
        u64 v = descriptor(Ring::tile(ring)) + ((u64)(PART_BYTES / 16 - 1) << 16);
        products_begin();
#pragma unroll
        for (int i = 0; i < BLOCK / 16; i++) multiply_values(out, weights + 4 * i, v + i * (16 * 128 / 16));
        products_commit();
    };
    auto release = [&](const Ring &ring) {
        if (lane == 0) barrier_arrive(Ring::empty(ring));
    };
    auto weigh = [&](int block) {
        settle(score);
        if (block * BLOCK + BLOCK - 1 > row) mask(score, seen - block * BLOCK);
        Softmax::next(softmax, score, corrections);
    };
    auto pack = [&]() {
#pragma unroll
        for (int i = 0; i < 16; i++) weights[i] = weight_pair(score[2 * i], score[2 * i + 1]);
        settle(weights);
    };

    barrier_wait(Ring::asked(ring), turn % 2);
    multiply_by_keys();
    products_wait<0>();
    release(ring);
    Ring::advance(ring);
    weigh(0);
    pack();
    settle(out);
    for (int block = 1; block < work.blocks; block++) {
        Ring keys = ring;
        multiply_by_keys();
        Ring::advance(ring);
        multiply_values_of(ring);
        products_wait<1>();
        release(keys);
        weigh(block);
        products_wait<0>();
        settle(out);
        release(ring);
        Ring::advance(ring);
        if (__any_sync(~0u, corrections[0] != 1.0f || corrections[1] != 1.0f)) {
#pragma unroll
            for (int i = 0; i < 128; i++) out[i] *= corrections[i / 2 % 2];
        }
        pack();
        settle(out);
    }
    // All scores are made.
    if (lane == 0) barrier_arrive(Ring::answered(ring));
    multiply_values_of(ring);
    products_wait<0>();
    settle(out);
    release(ring);
    Ring::advance(ring);
    finish(p, work, work.head + group, out, softmax);
}

/// Grid: at most a block for each tile.
KERNEL __launch_bounds__(THREADS, 1) void attn_mix_pair(__grid_constant__ const Mix p) {
    extern __shared__ __align__(1024) u8 room[];
    u32 base = shared_address(room);
    Ring ring = {base + TILES_AT, base + BARRIERS_AT, 0, 0};
    if (threadIdx.x == 0) {
        for (int i = 0; i < TILES; i++) {
            barrier_init(ring.barriers + 8 * i, PRODUCERS);
            barrier_init(ring.barriers + 8 * (TILES + i), CONSUMERS / 32);
        }
        barrier_init(Ring::asked(ring), PRODUCERS);
        barrier_init(Ring::answered(ring), CONSUMERS / 32);
    }
    __syncthreads();
    if (threadIdx.x >= CONSUMERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(LESS));
        produce(p, ring);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MORE));
        Work work;
        for (int turn = 0; Work::at(p, turn, work); turn++) consume(p, work, turn, ring);
    }
}
