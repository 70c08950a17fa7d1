// Attention of single rows: norms, rotation, the store of a row's key and value, and attention over parts of its positions; then the
// join of the parts, and the gate.
//
// A row's positions are cut into parts of whole steps of 32, at most 128 parts; where depends on its position alone. A block has up to
// eight queries of a kv head over one part. Keys and values go from memory to the registers from which the tensor cores take them,
// before the kernel ahead has ended: the order of a product's inner dimension is free, so that a lane takes eight neighbouring numbers
// of a key (and of a query), or two numbers of four values. Eight warps: scores are multiplied by (two sixteens of keys) by (up to four
// parts of the numbers) of them; each has the softmax of a query; then each has the sums of values of some sixteens of the numbers.
// Two more warps have the row's own key and value, where it lies in the part.

struct Single {
    Shape shape;
    const float *projected;  // [rows, stride]: q | gate | k | v
    const float *rotations;  // [rows, dims]: cosines, then sines
    const float *query_norm, *key_norm; // [DIM]
    Kv *const *const *pages; // of each row
    const u32 *positions;    // of each row
    float *sums;             // [rows, heads, parts, DIM]: of values
    float *stats;            // [rows, heads, parts, 2]: largest score, sum of weights
    u16 *out;                // [rows, heads · DIM] bf16: gated
    float eps;
    int dims, parts, eights; // parts: of the longest sequence, or more; eights: blocks that share the queries of a kv head
};

const int STEP = 32, PARTS = 128, ABREAST = 8, WORKERS = 8, SINGLE_THREADS = 32 * (WORKERS + 2);
const int NUMBERS = DIM / 32;                        // of a lane that has a 32nd of a head
const int SPLIT = NUMBERS < 4 ? NUMBERS : 4;         // parts of the numbers of a key
const int WINDOWS = NUMBERS / SPLIT;                 // of 32 numbers in such a part
const int SIXTEENS = DIM / 16 > WORKERS ? DIM / 16 / WORKERS : 1; // sixteens of the numbers of a value that a warp has
// Distances of rows in shared memory, so that lanes read from different banks.
const int QUERY_ROW = DIM + 32, SCORES_ROW = STEP + 4, WEIGHTS_ROW = STEP + 8;
const float LOG2_E = 1.44269504f;

// As they lie: eight numbers of a key, two of a value; held as pairs of f16.
#if KV_F32
typedef float2 KvTwo;
struct KvEight {
    float4 low, high;
};

DEVICE uint4 factors(const KvEight &x) {
    return make_uint4(f16_pair(x.low.x, x.low.y), f16_pair(x.low.z, x.low.w), f16_pair(x.high.x, x.high.y), f16_pair(x.high.z, x.high.w));
}

DEVICE u32 factors(float2 x) { return f16_pair(x.x, x.y); }
DEVICE u16 own_factor(float x) { return (u16)f16_pair(x, 0.0f); }
#else
typedef u32 KvTwo;
typedef uint4 KvEight;

DEVICE uint4 factors(uint4 x) { return x; }
DEVICE u32 factors(u32 x) { return x; }
DEVICE u16 own_factor(float x) { return f16(x); }
#endif

struct SingleRoom {
    __align__(16) u16 query[ABREAST][QUERY_ROW]; // f16
    __align__(16) u16 own[2][DIM];               // key and value of the row, as they are multiplied
    __align__(16) u16 weights[ABREAST][WEIGHTS_ROW];
    float correction[ABREAST], largest[ABREAST], sum[ABREAST]; // of scores; of weights
    union {
        float scores[SPLIT][ABREAST][SCORES_ROW];
        __align__(16) float normed[ABREAST + 1][DIM];
    };
};

/// A row's steps, but for the last one; log2 of the steps of a part.
DEVICE int steps_before(u32 position) { return position / STEP; }
DEVICE int share_of(u32 position) { return 32 - __clz(position / (STEP * PARTS)); }

/// A thread's part of the keys of a step: of positions l / 4 and l / 4 + 8 of a warp's sixteen. Of its values: two numbers of positions
/// 4 (l % 4) + j of both sixteens.
typedef uint4 Keys[WINDOWS][2];
typedef u32 Values[SIXTEENS][2][4];

/// Where a kv head's numbers lie.
struct Head {
    Kv *const *pages;
    u32 keys, values; // in each page
};

DEVICE Kv *at_position(const Head &head, u32 in_page, u32 position) { return head.pages[position / PAGE] + (in_page + position % PAGE * DIM); }

DEVICE void load_keys(Keys &keys, const Kv *from) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, split = warp / 2;
    if (split >= SPLIT) return;
    from += (warp % 2 * 16 + lane / 4) * DIM + split * WINDOWS * 32 + lane % 4 * 8;
#pragma unroll
    for (int w = 0; w < WINDOWS; w++) {
#pragma unroll
        for (int h = 0; h < 2; h++) keys[w][h] = factors(*(const KvEight *)(from + h * 8 * DIM + w * 32));
    }
}

DEVICE void load_values(Values &values, const Kv *from) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp >= WORKERS || warp * SIXTEENS >= DIM / 16) return;
    from += lane % 4 * 4 * DIM + warp * SIXTEENS * 16 + lane / 4 * 2;
#pragma unroll
    for (int t = 0; t < SIXTEENS; t++) {
#pragma unroll
        for (int i = 0; i < 8; i++) values[t][i / 4][i % 4] = factors(*(const KvTwo *)(from + (i / 4 * 16 + i % 4) * DIM + t * 16));
    }
}

/// Has a thread's share of a step's keys and values brought to the second cache.
DEVICE void fetch_step(const Head &head, int step) {
    const int EACH = 128 / sizeof(Kv);
    const Kv *keys = at_position(head, head.keys, step * STEP), *values = keys + (head.values - head.keys);
#pragma unroll 1
    for (int i = threadIdx.x * EACH; i < STEP * DIM; i += SINGLE_THREADS * EACH) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(keys + i));
        asm volatile("prefetch.global.L2 [%0];" ::"l"(values + i));
    }
}

/// Norm and rotation of a head, by a warp whose lanes have neighbouring numbers; times `scale`. `room`: of this warp, at first the norm's
/// weights, each lane's own.
DEVICE void norm_head(const Single &p, const float *turn, float scale, float *room, float x[NUMBERS]) {
    int half = p.dims / 2, lane = threadIdx.x % 32;
    float squares = 0.0f, cosine = 0.0f, sine = 0.0f;
    if (lane < half) cosine = turn[lane], sine = turn[half + lane];
#pragma unroll
    for (int j = 0; j < NUMBERS; j++) squares = fmaf(x[j], x[j], squares);
    float factor = scale * rsqrtf(warp_sum(squares) * (1.0f / DIM) + p.eps);
#pragma unroll
    for (int j = 0; j < NUMBERS; j++) room[lane * NUMBERS + j] *= factor * x[j];
    __syncwarp();
    // Pairs are those of this lane alone.
#pragma unroll 1
    for (int i = lane; i < half; i += 32) {
        if (i >= 32) cosine = turn[i], sine = turn[half + i];
        float a = room[i], b = room[i + half];
        room[i] = a * cosine - b * sine, room[i + half] = b * cosine + a * sine;
    }
    __syncwarp();
#pragma unroll
    for (int j = 0; j < NUMBERS; j++) x[j] = room[lane * NUMBERS + j];
}

/// A lane's numbers of a head.
template <class T> struct __align__(sizeof(T) * NUMBERS < 16 ? sizeof(T) * NUMBERS : 16) Numbers {
    T x[NUMBERS];
};

/// A warp's query, key or value (`kind`) of a row to shared memory; if `stores`, keys and values to their page as well.
DEVICE void prepare_head(const Single &p, SingleRoom &room, int kind, int head, Kv *page, bool stores) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    long row = blockIdx.z;
    Numbers<float> x = *((const Numbers<float> *)(p.projected + row * p.shape.stride + head * DIM) + lane);
    if (kind < 2) norm_head(p, p.rotations + row * p.dims, kind == 0 ? rsqrtf((float)DIM) : 1.0f, room.normed[warp], x.x);
    Numbers<u16> factors;
#pragma unroll
    for (int j = 0; j < NUMBERS; j++) factors.x[j] = kind == 0 ? (u16)f16_pair(x.x[j], 0.0f) : own_factor(x.x[j]);
    *((Numbers<u16> *)(kind == 0 ? room.query[warp] : room.own[kind - 1]) + lane) = factors;
    if (!stores) return;
    Numbers<Kv> stored;
#pragma unroll
    for (int j = 0; j < NUMBERS; j++) kv_store(&stored.x[j], x.x[j]);
    *((Numbers<Kv> *)page + lane) = stored;
}

/// Puts the row's own key, at position `own` of the step, in its place.
DEVICE void put_key(Keys &keys, const SingleRoom &room, int own) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, split = warp / 2;
    if (split >= SPLIT || own / 16 != warp % 2 || own % 8 != lane / 4) return;
#pragma unroll
    for (int w = 0; w < WINDOWS; w++) {
        uint4 x = *(const uint4 *)(room.own[0] + (split * WINDOWS + w) * 32 + lane % 4 * 8);
        if (own / 8 % 2 == 0) keys[w][0] = x;
        else keys[w][1] = x;
    }
}

DEVICE void put_value(Values &values, const SingleRoom &room, int own) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp >= WORKERS || warp * SIXTEENS >= DIM / 16 || own % 16 / 4 != lane % 4) return;
#pragma unroll
    for (int t = 0; t < SIXTEENS; t++) {
        u32 x = *(const u32 *)(room.own[1] + (warp * SIXTEENS + t) * 16 + lane / 4 * 2);
#pragma unroll
        for (int i = 0; i < 8; i++) values[t][i / 4][i % 4] = i / 4 == own / 16 && i % 4 == own % 4 ? x : values[t][i / 4][i % 4];
    }
}

/// Scores of a step: of a warp's 16 keys, over its part of the numbers.
DEVICE void multiply_keys(const Keys &keys, SingleRoom &room) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, split = warp / 2;
    if (split >= SPLIT) return;
    float c[4] = {};
#pragma unroll
    for (int w = 0; w < WINDOWS; w++) {
        uint4 low = keys[w][0], high = keys[w][1];
        uint4 x = *(const uint4 *)(room.query[lane / 4] + (split * WINDOWS + w) * 32 + lane % 4 * 8);
        u32 a[4] = {low.x, high.x, low.y, high.y}, b[4] = {low.z, high.z, low.w, high.w};
        multiply_f16(c, a, x.x, x.y);
        multiply_f16(c, b, x.z, x.w);
    }
    float *to = room.scores[split][lane % 4 * 2] + warp % 2 * 16 + lane / 4;
    to[0] = c[0], to[SCORES_ROW] = c[1], to[8] = c[2], to[SCORES_ROW + 8] = c[3];
}

/// The largest number of a warp, in every lane.
DEVICE float warp_max(float x) {
    // As whole numbers in the same order.
    int bits = __float_as_int(x), most = __reduce_max_sync(~0u, bits ^ (bits >> 31 & 0x7fffffff));
    return __int_as_float(most ^ (most >> 31 & 0x7fffffff));
}

/// Weights of a step's positions up to `last` for a query, by a warp; returns this lane's.
DEVICE float weigh(SingleRoom &room, int last, float &largest) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float x = 0.0f;
#pragma unroll
    for (int split = 0; split < SPLIT; split++) x += room.scores[split][warp][lane];
    x = lane <= last ? x : -1e30f;
    float most = fmaxf(largest, warp_max(x)), correction = exp2f((largest - most) * LOG2_E);
    x = exp2f((x - most) * LOG2_E), largest = most;
    room.weights[warp][lane] = (u16)f16_pair(x, 0.0f);
    if (lane == 0) room.correction[warp] = correction;
    return x;
}

/// Sums of values: of a tile, c0 and c2 are two numbers of query 2 (l % 4), c1 and c3 those of the next.
DEVICE void multiply_values(const Values &values, const SingleRoom &room, float c[SIXTEENS][4]) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp >= WORKERS || warp * SIXTEENS >= DIM / 16) return;
    float2 correction = *(const float2 *)(room.correction + lane % 4 * 2);
#pragma unroll
    for (int t = 0; t < SIXTEENS; t++) {
        c[t][0] *= correction.x, c[t][2] *= correction.x, c[t][1] *= correction.y, c[t][3] *= correction.y;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            u32 a[4];
            // Pairs of positions out of pairs of numbers.
#pragma unroll
            for (int h = 0; h < 2; h++) {
                u32 x = values[t][i][2 * h], y = values[t][i][2 * h + 1];
                a[2 * h] = __byte_perm(x, y, 0x5410), a[2 * h + 1] = __byte_perm(x, y, 0x7632);
            }
            uint2 b = *(const uint2 *)(room.weights[lane / 4] + i * 16 + lane % 4 * 4);
            multiply_f16(c[t], a, b.x, b.y);
        }
    }
}

const int SINGLE_BLOCKS = __CUDA_ARCH__ >= 900 ? 3 : 2; // of a multiprocessor: as many as leave enough registers

/// Grid: (parts, kv heads · eights, rows).
KERNEL __launch_bounds__(SINGLE_THREADS, SINGLE_BLOCKS) void attn_single(Single p) {
    __shared__ SingleRoom room;
    next();
    const Shape &s = p.shape;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = blockIdx.x, kv_head = blockIdx.y / p.eights;
    int group = s.heads / s.kv_heads, first = (blockIdx.y - kv_head * p.eights) * ABREAST, queries = min(group - first, ABREAST);
    long row = blockIdx.z;
    u32 position = p.positions[row];
    int share = share_of(position), step = part << share, end = min(step + (1 << share), steps_before(position) + 1);
    if (step >= end) return;
    // Keys and values were there before this pass, but for the row's own.
    u32 side_of = s.kv_heads * PAGE * DIM, keys_at = 2 * s.layer * side_of + kv_head * (PAGE * DIM);
    Head kv = {p.pages[row], keys_at, keys_at + side_of};
    int own = end > (int)steps_before(position) ? position % STEP : -1; // in the last step
    Keys keys;
    Values values;
    load_keys(keys, at_position(kv, kv.keys, step * STEP));
    load_values(values, at_position(kv, kv.values, step * STEP));
#pragma unroll 1
    for (int ahead = step + 1; ahead < min(step + 3, end); ahead++) fetch_step(kv, ahead);
    // Gates lie between queries and keys.
    int kind = max(warp - ABREAST + 1, 0), side = kind - 1;
    int head = kind == 0 ? kv_head * group + first + warp : 2 * s.heads + side * s.kv_heads + kv_head;
    if (kind < 2) ((Numbers<float> *)room.normed[warp])[lane] = ((const Numbers<float> *)(kind == 0 ? p.query_norm : p.key_norm))[lane];
    Kv *page = at_position(kv, side <= 0 ? kv.keys : kv.values, position);
    previous();
    if (kind == 0 ? warp < queries : own >= 0) prepare_head(p, room, kind, head, page, kind > 0 && first == 0);
    __syncthreads();
    float c[SIXTEENS][4] = {}, largest = -1e30f, sum = 0.0f, weight = 0.0f;
#pragma unroll 1
    for (;; step++) {
        bool last = step + 1 == end, more = !last;
        if (last && own >= 0) put_key(keys, room, own);
        multiply_keys(keys, room);
        if (more) load_keys(keys, at_position(kv, kv.keys, (step + 1) * STEP));
        if (step + 3 < end) fetch_step(kv, step + 3);
        __syncthreads();
        if (warp < ABREAST) weight = weigh(room, last && own >= 0 ? own : STEP - 1, largest);
        if (last && own >= 0) put_value(values, room, own);
        __syncthreads();
        // Nobody waits for the sum.
        if (warp < ABREAST) sum = fmaf(sum, room.correction[warp], warp_sum(weight));
        multiply_values(values, room, c);
        if (last) break;
        load_values(values, at_position(kv, kv.values, (step + 1) * STEP));
    }
    long of_row = row * s.heads + kv_head * group + first;
    if (warp < WORKERS && warp * SIXTEENS < DIM / 16) {
#pragma unroll
        for (int t = 0; t < SIXTEENS; t++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int query = lane % 4 * 2 + i;
                if (query >= queries) continue;
                float *to = p.sums + ((of_row + query) * p.parts + part) * DIM + (warp * SIXTEENS + t) * 16 + lane / 4 * 2;
                *(float2 *)to = make_float2(c[t][i], c[t][i + 2]);
            }
        }
    }
    if (warp < queries && lane == 0) *(float2 *)(p.stats + ((of_row + warp) * p.parts + part) * 2) = make_float2(largest, sum);
}

// In `attn_join` a thread has four numbers of every fourth part.
const int JOIN_WIDE = DIM / 4, JOIN_GROUPS = 4, JOIN_THREADS = JOIN_WIDE * JOIN_GROUPS;

/// Joins the parts of a query: each group its own ascending, then the groups. Gates. Grid: (heads, rows).
KERNEL __launch_bounds__(JOIN_THREADS) void attn_join(Single p) {
    __shared__ __align__(16) float room[JOIN_GROUPS][DIM];
    next();
    const Shape &s = p.shape;
    int thread = threadIdx.x, lane = thread % 32, group = thread / JOIN_WIDE, number = thread % JOIN_WIDE * 4, head = blockIdx.x;
    long row = blockIdx.y, at = row * s.heads + head;
    u32 position = p.positions[row];
    int parts = (steps_before(position) >> share_of(position)) + 1;
    const float *sums = p.sums + (at * p.parts + group) * DIM + number, *stats = p.stats + at * p.parts * 2;
    previous();
    float gate = p.projected[row * s.stride + (s.heads + head) * DIM + thread % DIM], most = -1e30f, total = 0.0f;
    float2 of_part[PARTS / 32];
#pragma unroll
    for (int i = 0; i < PARTS / 32; i++) {
        of_part[i] = make_float2(-1e30f, 0.0f);
        if (i * 32 + lane < parts) of_part[i] = *(const float2 *)(stats + (i * 32 + lane) * 2);
    }
    float4 out = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int i = 0; i < PARTS / 32; i++) {
        if (i * 32 >= parts) break;
        float4 x[32 / JOIN_GROUPS];
#pragma unroll
        for (int j = 0; j < 32 / JOIN_GROUPS; j++) {
            int part = i * 32 + j * JOIN_GROUPS;
            x[j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (part + group < parts) x[j] = *(const float4 *)(sums + part * DIM);
        }
        if (i == 0) {
#pragma unroll
            for (int k = 0; k < PARTS / 32; k++) most = fmaxf(most, of_part[k].x);
            most = warp_max(most);
        }
        float weight = exp2f((of_part[i].x - most) * LOG2_E);
        total = fmaf(weight, of_part[i].y, total);
#pragma unroll
        for (int j = 0; j < 32 / JOIN_GROUPS; j++) {
            float w = __shfl_sync(~0u, weight, j * JOIN_GROUPS + group);
            out.x = fmaf(w, x[j].x, out.x), out.y = fmaf(w, x[j].y, out.y), out.z = fmaf(w, x[j].z, out.z), out.w = fmaf(w, x[j].w, out.w);
        }
    }
    *(float4 *)(room[group] + number) = out;
    total = warp_sum(total);
    __syncthreads();
    if (thread >= DIM) return;
    float joined = (room[0][thread] + room[1][thread]) + (room[2][thread] + room[3][thread]);
    p.out[at * DIM + thread] = bf16(__fdividef(joined, total) * sigmoid(gate));
}
