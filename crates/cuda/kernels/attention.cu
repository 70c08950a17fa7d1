// The attention mixer between its projections. DIM: numbers in a head, 32, 64, 128 or 256.
//
// Keys and values lie in pages (`head_in_page`), KV_F32 ? f32 : f16. Key blocks lie on the absolute grid of 64 positions.

const int BLOCK = 64;

#if KV_F32
typedef float Kv;
#else
typedef u16 Kv;
#endif

DEVICE void kv_store(float *to, float x) { *to = x; }
DEVICE void kv_store(u16 *to, float x) { *to = f16(x); }

struct Shape {
    int heads, kv_heads, layer, stride; // stride: columns of the projections, q | gate | k | v
};

DEVICE Kv *head_of(Kv *page, const Shape &s, int side, int head) { return head_in_page(page, s.layer, side, s.kv_heads, head, DIM); }

struct Rotations {
    const u32 *positions; // [rows]
    float *out;           // [rows, dims]: cosines, then sines
    double base;
    int rows, dims;
};

/// Angles of each row: position · base^(−2 i / dims). Grid: rows.
KERNEL void attn_rotations(Rotations p) {
    long row = blockIdx.x;
    for (int i = threadIdx.x; i < p.dims / 2; i += blockDim.x) {
        double sine, cosine;
        sincos((double)p.positions[row] * pow(p.base, -2.0 * i / p.dims), &sine, &cosine);
        p.out[row * p.dims + i] = (float)cosine;
        p.out[row * p.dims + p.dims / 2 + i] = (float)sine;
    }
}

struct Prepare {
    Shape shape;
    float *projected;       // [rows, stride]; keys are normed and rotated in place
    const float *rotations; // [rows, dims]
    const float *query_norm, *key_norm; // [DIM]
    Kv *const *const *pages; // of each row: the pages of its sequence
    const u32 *positions;    // of each row
    u16 *queries;            // [rows, heads · DIM]: as f16
    float eps;
    int dims, rows;
};

// A lane of `attn_prepare` has EACH times WIDE neighbouring numbers of a head.
const int PREPARE_WARPS = 8, WIDE = DIM >= 128 ? 4 : DIM / 32, EACH = DIM / 32 / WIDE;

template <class T> struct __align__(sizeof(T) * WIDE) Wide {
    T x[WIDE];
};

/// Norms, rotation, and the store of keys and values, a warp a head of a row. Grid: rows · (heads + 2 kv heads) / PREPARE_WARPS.
KERNEL __launch_bounds__(PREPARE_WARPS * 32) void attn_prepare(Prepare p) {
    __shared__ __align__(16) float room[PREPARE_WARPS][DIM];
    next();
    const Shape &s = p.shape;
    int lane = threadIdx.x % 32, heads = s.heads + 2 * s.kv_heads, half = p.dims / 2;
    u32 index = blockIdx.x * PREPARE_WARPS + threadIdx.x / 32, row = index / heads;
    int head = index - row * heads;
    if (row >= p.rows) return;
    bool query = head < s.heads, key = !query && head < s.heads + s.kv_heads;
    // Numbers of heads follow each other; gates lie between queries and keys.
    Wide<float> *at = (Wide<float> *)(p.projected + (long)row * s.stride + (query ? head : s.heads + head) * DIM) + lane, x[EACH];
    const float *turn = p.rotations + row * p.dims + lane;
    previous();
#pragma unroll
    for (int j = 0; j < EACH; j++) x[j] = at[j * 32];
    if (query || key) {
        // Of the first pair that this lane rotates.
        float cosine = 0.0f, sine = 0.0f;
        if (lane < half) cosine = turn[0], sine = turn[half];
        const Wide<float> *norm = (const Wide<float> *)(query ? p.query_norm : p.key_norm) + lane;
        float *numbers = room[threadIdx.x / 32], squares = 0.0f;
#pragma unroll
        for (int j = 0; j < EACH; j++) {
#pragma unroll
            for (int k = 0; k < WIDE; k++) squares += x[j].x[k] * x[j].x[k];
        }
        float factor = rsqrtf(warp_sum(squares) * (1.0f / DIM) + p.eps);
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            Wide<float> w = norm[j * 32];
#pragma unroll
            for (int k = 0; k < WIDE; k++) x[j].x[k] *= factor * w.x[k];
            if (j * 32 * WIDE < p.dims) ((Wide<float> *)numbers)[j * 32 + lane] = x[j];
        }
        __syncwarp();
#pragma unroll 1
        for (int i = lane; i < half; i += 32) {
            float a = numbers[i], b = numbers[i + half];
            numbers[i] = a * cosine - b * sine;
            numbers[i + half] = b * cosine + a * sine;
            if (i + 32 < half) turn += 32, cosine = turn[0], sine = turn[half];
        }
        __syncwarp();
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            if (j * 32 * WIDE < p.dims) x[j] = ((Wide<float> *)numbers)[j * 32 + lane];
        }
    }
    if (query) {
        Wide<u16> *to = (Wide<u16> *)(p.queries + ((long)row * s.heads + head) * DIM) + lane;
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            Wide<u16> rounded;
#pragma unroll
            for (int k = 0; k < WIDE; k++) rounded.x[k] = (u16)f16_pair(x[j].x[k], 0.0f);
            to[j * 32] = rounded;
        }
    } else if (key) {
#pragma unroll
        for (int j = 0; j < EACH; j++) at[j * 32] = x[j];
    }
    if (!query) {
        u32 position = p.positions[row];
        Kv *page = p.pages[row][position / PAGE];
        Wide<Kv> *to = (Wide<Kv> *)(head_of(page, s, key ? 0 : 1, head - s.heads - (key ? 0 : s.kv_heads)) + (position % PAGE) * DIM) + lane;
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            Wide<Kv> stored;
#pragma unroll
            for (int k = 0; k < WIDE; k++) kv_store(&stored.x[k], x[j].x[k]);
            to[j * 32] = stored;
        }
    }
}

struct Mix {
    Shape shape;
    const float *projected; // [rows, stride]
    Kv *const *pages;       // of the sequence
    u16 *out;               // [rows, heads · DIM]: queries as f16; in their place comes what is mixed, bf16 and gated
    int rows, position;     // of the first row
};

const int ROW_BYTES = DIM * 2, CHUNKS = DIM / 8;

/// Where chunk c (eight f16) of row r of a tile [64][DIM] lies in shared memory.
DEVICE u32 chunk_at(u32 base, int row, int chunk) { return base + row * ROW_BYTES + (chunk ^ row % (CHUNKS < 8 ? CHUNKS : 8)) * 16; }

/// Copies 64 positions of a head to a tile.
DEVICE void load_block(u32 to, const u16 *from) {
    for (int i = threadIdx.x; i < BLOCK * CHUNKS; i += blockDim.x) {
        copy_16(chunk_at(to, i / CHUNKS, i % CHUNKS), from + (long)i * 8, true);
    }
}

DEVICE void store_16(u32 at, const u32 x[4]) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
}

DEVICE void load_block(u32 to, const float *from) {
    for (int i = threadIdx.x; i < BLOCK * CHUNKS; i += blockDim.x) {
        const float *x = from + (long)i * 8;
        u32 packed[4];
        for (int j = 0; j < 4; j++) packed[j] = f16_pair(x[2 * j], x[2 * j + 1]);
        store_16(chunk_at(to, i / CHUNKS, i % CHUNKS), packed);
    }
}

/// Attention of 64 rows of one head over the blocks of keys up to the last row's, the softmax corrected block by block.
/// Grid: (heads, tiles of rows); 128 threads, each warp 16 rows; shared memory: queries, keys, values.
KERNEL __launch_bounds__(128) void attn_mix(Mix p) {
    extern __shared__ __align__(128) u8 shared[];
    const Shape &s = p.shape;
    u32 queries = shared_address(shared), keys = queries + BLOCK * ROW_BYTES, values = keys + BLOCK * ROW_BYTES;
    int head = blockIdx.x, kv_head = head / (s.heads / s.kv_heads), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    // The longest tiles first.
    int first = (int)(gridDim.y - 1 - blockIdx.y) * BLOCK, count = min(BLOCK, p.rows - first);
    int blocks = (p.position + first + count + BLOCK - 1) / BLOCK;

    load_block(keys, head_of(p.pages[0], s, 0, kv_head));
    for (int i = threadIdx.x; i < BLOCK * CHUNKS; i += blockDim.x) {
        int row = i / CHUNKS, chunk = i % CHUNKS;
        const u16 *from = p.out + ((long)(first + min(row, count - 1)) * s.heads + head) * DIM + chunk * 8;
        copy_16(chunk_at(queries, row, chunk), from, true);
    }
    copies_commit();
    float out[DIM / 8][4], largest[2] = {-1e30f, -1e30f}, sums[2] = {0.0f, 0.0f};
#pragma unroll
    for (int j = 0; j < DIM / 8; j++) out[j][0] = out[j][1] = out[j][2] = out[j][3] = 0.0f;
    const float scale = 1.44269504f / sqrtf((float)DIM);

    for (int block = 0; block < blocks; block++) {
        copies_wait<0>();
        __syncthreads();
        Kv *page = p.pages[block * BLOCK / PAGE];
        load_block(values, head_of(page, s, 1, kv_head) + (long)(block * BLOCK % PAGE) * DIM);
        copies_commit();

        float score[BLOCK / 8][4];
#pragma unroll
        for (int j = 0; j < BLOCK / 8; j++) score[j][0] = score[j][1] = score[j][2] = score[j][3] = 0.0f;
#pragma unroll 4
        for (int k = 0; k < CHUNKS; k += 2) {
            u32 q[4];
            load_matrices(q, chunk_at(queries, warp * 16 + lane % 16, k + lane / 16));
#pragma unroll
            for (int j = 0; j < BLOCK / 8; j += 2) {
                u32 x[4];
                load_matrices(x, chunk_at(keys, j * 8 + lane % 8 + lane / 16 * 8, k + lane / 8 % 2));
                multiply_f16(score[j], q, x[0], x[1]);
                multiply_f16(score[j + 1], q, x[2], x[3]);
            }
        }
        u32 weights[BLOCK / 16][4];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int seen = p.position + first + warp * 16 + lane / 4 + half * 8 - block * BLOCK; // last key this row sees
            float most = largest[half];
#pragma unroll
            for (int j = 0; j < BLOCK / 8; j++) {
#pragma unroll
                for (int x = 0; x < 2; x++) {
                    float &at = score[j][2 * half + x];
                    at = j * 8 + lane % 4 * 2 + x <= seen ? at * scale : -1e30f;
                    most = fmaxf(most, at);
                }
            }
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
            float correction = exp2f(largest[half] - most), sum = 0.0f;
            largest[half] = most;
#pragma unroll
            for (int j = 0; j < BLOCK / 8; j++) {
                float x = exp2f(score[j][2 * half] - most), y = exp2f(score[j][2 * half + 1] - most);
                sum += x + y;
                weights[j / 2][j % 2 * 2 + half] = f16_pair(x, y);
            }
            sums[half] = sums[half] * correction + sum;
#pragma unroll
            for (int j = 0; j < DIM / 8; j++) out[j][2 * half] *= correction, out[j][2 * half + 1] *= correction;
        }
        copies_wait<0>();
        __syncthreads();
        if (block + 1 < blocks) {
            int next = (block + 1) * BLOCK;
            load_block(keys, head_of(p.pages[next / PAGE], s, 0, kv_head) + (long)(next % PAGE) * DIM);
        }
        copies_commit();
#pragma unroll
        for (int k = 0; k < BLOCK / 16; k++) {
#pragma unroll
            for (int j = 0; j < CHUNKS; j += 2) {
                u32 x[4];
                load_transposed(x, chunk_at(values, k * 16 + lane % 16, j + lane / 16));
                multiply_f16(out[j], weights[k], x[0], x[1]);
                multiply_f16(out[j + 1], weights[k], x[2], x[3]);
            }
        }
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float sum = sums[half];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        int row = warp * 16 + lane / 4 + half * 8;
        if (row >= count) continue;
        long at = (long)(first + row);
        const float *gates = p.projected + at * s.stride + (s.heads + head) * DIM + lane % 4 * 2;
        u16 *to = p.out + (at * s.heads + head) * DIM + lane % 4 * 2;
        const int BATCH = CHUNKS < 8 ? CHUNKS : 8; // loads on their way before a store, which the compiler takes for one to gates
#pragma unroll
        for (int j = 0; j < CHUNKS; j += BATCH) {
            float2 gate[BATCH];
#pragma unroll
            for (int k = 0; k < BATCH; k++) gate[k] = *(const float2 *)(gates + (j + k) * 8);
#pragma unroll
            for (int k = 0; k < BATCH; k++) {
                float x = out[j + k][2 * half] / sum * sigmoid(gate[k].x), y = out[j + k][2 * half + 1] / sum * sigmoid(gate[k].y);
                *(u32 *)(to + (j + k) * 8) = bf16_pair(x, y);
            }
        }
    }
}
