// The Gated DeltaNet mixer between its projections: convolution, norms, single rows; cells of rows are in `cells.cu`.
// DIM: numbers in a head, a multiple of 32 up to 128.

struct Shape {
    int key_heads, value_heads, taps, stride; // stride: columns of the projections, q | k | v | z | beta | alpha
};

DEVICE int channels(const Shape &s) { return (2 * s.key_heads + s.value_heads) * DIM; }

struct Convolve {
    Shape shape;
    const float *projected; // [rows, stride]
    const float *window;    // [taps − 1, channels]: rows before the first, oldest first
    const float *weights;   // [channels, taps]
    u16 *out;               // [rows, channels]: q normed and scaled | k normed | v
    int rows;
};

/// SiLU of the causal convolution of one channel of a row whose inputs begin `taps` − 1 rows earlier.
DEVICE float convolve_channel(const Shape &s, const float *projected, const float *window, const float *weights, int row,
                              int channel) {
    float sum = 0.0f;
    for (int t = 0; t < s.taps; t++) {
        int from = row - (s.taps - 1) + t;
        float x = from >= 0 ? projected[(long)from * s.stride + channel]
                            : window[(long)(from + s.taps - 1) * channels(s) + channel];
        sum = fmaf(weights[channel * s.taps + t], x, sum);
    }
    return silu(sum);
}

const int PER = DIM / 32, STRIP = 16, STRIPS = 4; // numbers of a lane, rows of a warp, warps of a block

/// Stores a warp's row of a head; queries and keys normed, queries scaled.
DEVICE void store_convolved(const Convolve &p, int head, int row, const float x[PER]) {
    float squares = 0.0f, scale = 1.0f;
    if (head < 2 * p.shape.key_heads) {
#pragma unroll
        for (int j = 0; j < PER; j++) squares = fmaf(x[j], x[j], squares);
        scale = 1.0f / sqrtf(warp_sum(squares) + L2_EPS);
        if (head < p.shape.key_heads) scale *= rsqrtf((float)DIM);
    }
    u16 *to = p.out + (long)row * channels(p.shape) + head * DIM + threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < PER; j++) to[j * 32] = bf16(x[j] * scale);
}

/// Rows of a strip one by one, for any number of taps.
DEVICE void convolve_slowly(const Convolve &p, int head, int first, int last) {
    for (int row = first; row < last; row++) {
        float x[PER];
        for (int j = 0; j < PER; j++) {
            x[j] = convolve_channel(p.shape, p.projected, p.window, p.weights, row, head * DIM + j * 32 + threadIdx.x % 32);
        }
        store_convolved(p, head, row, x);
    }
}

/// Convolved rows as bf16. A warp walks down a strip of one head's rows, its inputs in registers. Grid: (heads of q, k and v,
/// rows / 64); 128 threads.
KERNEL __launch_bounds__(128) void delta_convolve(Convolve p) {
    const Shape &s = p.shape;
    int head = blockIdx.x, first = (blockIdx.y * STRIPS + threadIdx.x / 32) * STRIP, lane = threadIdx.x % 32;
    int last = min(first + STRIP, p.rows), count = channels(s);
    if (s.taps != 4) return convolve_slowly(p, head, first, last);
    float weights[PER][4], before[PER][3];
#pragma unroll
    for (int j = 0; j < PER; j++) {
        int channel = head * DIM + j * 32 + lane;
#pragma unroll
        for (int t = 0; t < 4; t++) weights[j][t] = p.weights[channel * 4 + t];
#pragma unroll
        for (int t = 0; t < 3; t++) {
            int from = first - 3 + t;
            before[j][t] = first >= p.rows ? 0.0f
                         : from >= 0      ? p.projected[(long)from * s.stride + channel]
                                          : p.window[(long)(from + 3) * count + channel];
        }
    }
#pragma unroll 4
    for (int row = first; row < last; row++) {
        float x[PER];
#pragma unroll
        for (int j = 0; j < PER; j++) {
            float newest = p.projected[(long)row * s.stride + head * DIM + j * 32 + lane], sum = 0.0f;
#pragma unroll
            for (int t = 0; t < 3; t++) sum = fmaf(weights[j][t], before[j][t], sum);
            before[j][0] = before[j][1], before[j][1] = before[j][2], before[j][2] = newest;
            x[j] = silu(fmaf(weights[j][3], newest, sum));
        }
        store_convolved(p, head, row, x);
    }
}

struct Window {
    Shape shape;
    const float *projected; // [rows, stride]
    const float *old;       // [taps − 1, channels]; null: zeros
    float *window;          // the same after these rows; may be `old`
    int rows;
};

/// The last rows of the inputs. Grid: channels / threads.
KERNEL void delta_window(Window p) {
    int channel = blockIdx.x * blockDim.x + threadIdx.x, count = channels(p.shape);
    if (channel >= count) return;
    for (int t = 0; t < p.shape.taps - 1; t++) {
        int from = p.rows - (p.shape.taps - 1) + t;
        float x = from >= 0 ? p.projected[(long)from * p.shape.stride + channel]
                : p.old    ? p.old[(long)(t + p.rows) * count + channel]
                           : 0.0f;
        p.window[(long)t * count + channel] = x;
    }
}

struct Tail {
    Shape shape;
    const float *projected; // [rows, stride]
    const float *o;         // [rows, value heads · DIM]
    const float *weight;    // [DIM]
    u16 *out;               // [rows, value heads · DIM]
    float eps;
    int rows;
};

/// RMS norms of heads, times SiLU(z). Grid: (value heads, rows / 4); a warp for each row.
KERNEL __launch_bounds__(128) void delta_tail(Tail p) {
    int row = blockIdx.y * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= p.rows) return;
    long at = (long)row * p.shape.value_heads * DIM + blockIdx.x * DIM + lane;
    const float *z = p.projected + (long)row * p.shape.stride + channels(p.shape) + blockIdx.x * DIM + lane;
    float o[PER], squares = 0.0f;
#pragma unroll
    for (int j = 0; j < PER; j++) o[j] = p.o[at + j * 32], squares = fmaf(o[j], o[j], squares);
    float scale = 1.0f / sqrtf(warp_sum(squares) / (float)DIM + p.eps);
#pragma unroll
    for (int j = 0; j < PER; j++) p.out[at + j * 32] = bf16(o[j] * scale * p.weight[lane + j * 32] * silu(z[j * 32]));
}

struct Single {
    Shape shape;
    const float *projected; // [rows, stride]
    const float *weights;   // [channels, taps]
    const float *a, *dt_bias;
    const float *const *from; // of each row: the slot before; may be null: zeros
    float *const *to;         // of each row: the slot after
    long offset;              // of the layer in a slot: its window, then its states
    const float *norm;        // [DIM]
    u16 *out;                 // [rows, value heads · DIM]
    float eps;
};

// Single rows: a block has some columns of a head's state: all, which lie together, or, where there are few rows, 32, so that all
// multiprocessors have work; blocks of a head are a cluster then. 16 warps: four groups of columns by four quarters of the keys; in a warp,
// eight lanes side by side have the columns of the group, and four of those share the quarter. The order of sums is the same however
// many columns a block has.
const int SINGLE_THREADS = 512, KEYS = DIM / 16; // KEYS: of a thread

template <int ACROSS> struct __align__(ACROSS == 3 ? 4 : 4 * ACROSS) Columns {
    float x[ACROSS];
};

/// What is left of a channel's convolution but for the newest input; its window moves on by all other inputs if `moves`. The last three of
/// those are loaded together.
DEVICE float convolve_before(const Single &p, const float *before, float *after, int channel, bool moves) {
    int taps = p.shape.taps, count = channels(p.shape);
    const float *weights = p.weights + channel * taps;
    float sum = 0.0f, old[3], factors[3];
#pragma unroll 1
    for (int t = 0; t < taps - 4; t++) {
        float old = before ? before[t * count + channel] : 0.0f;
        sum = fmaf(weights[t], old, sum);
        if (moves && t > 0) after[(t - 1) * count + channel] = old;
    }
#pragma unroll
    for (int i = 0; i < 3; i++) {
        int t = taps - 4 + i;
        factors[i] = t >= 0 ? weights[t] : 0.0f;
        old[i] = t >= 0 && before ? before[t * count + channel] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < 3; i++) {
        int t = taps - 4 + i;
        sum = fmaf(factors[i], old[i], sum);
        if (moves && t > 0) after[(t - 1) * count + channel] = old[i];
    }
    return sum;
}

/// This thread's keys of a vector in shared memory.
DEVICE void load_keys(float to[KEYS], const float *from) {
    const int STEP = KEYS % 4 == 0 ? 4 : 2;
#pragma unroll
    for (int i = 0; i < KEYS; i += STEP) {
        if (STEP == 4) {
            float4 x = *(const float4 *)(from + i);
            to[i] = x.x, to[i + 1] = x.y, to[(i + 2) % KEYS] = x.z, to[(i + 3) % KEYS] = x.w;
        } else {
            float2 x = *(const float2 *)(from + i);
            to[i] = x.x, to[i + 1] = x.y;
        }
    }
}

/// The sum over lanes that are 8 and 16 apart: of x in lanes with l / 8 % 2 = 0, of y in the others.
DEVICE float sum_of_two(float x, float y) {
    bool second = threadIdx.x & 8;
    float sum = (second ? y : x) + __shfl_xor_sync(~0u, second ? x : y, 8);
    return sum + __shfl_xor_sync(~0u, sum, 16);
}

DEVICE void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

DEVICE void cluster_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

/// Stores a number at the same place of shared memory of another block of the cluster.
DEVICE void store_remote(float *to, int block, float x) {
#if __CUDA_ARCH__ >= 900
    u32 at;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(shared_address(to)), "r"(block));
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(at), "f"(x) : "memory");
#endif
}

/// In shared memory.
template <int COLUMNS> struct StepRoom {
    __align__(16) float vectors[2 * DIM + COLUMNS]; // q | k | v
    __align__(16) float partial[2][4][COLUMNS];     // S k and S q of a quarter of the keys
    __align__(16) float gates[COLUMNS];             // times the norm's weights
    float lengths[3], beta, keep;                   // q · q, k · k, q · k
    float squares[DIM / 32];                        // of the outputs of the cluster's blocks
};

/// Sums over keys, of S k or S q.
template <int COUNT, int COLUMNS> DEVICE void sum_quarters(float to[COUNT], const float (&from)[4][COLUMNS], int column) {
    Columns<COUNT> x[4];
#pragma unroll
    for (int i = 0; i < 4; i++) x[i] = *(const Columns<COUNT> *)(from[i] + column);
#pragma unroll
    for (int w = 0; w < COUNT; w++) to[w] = (x[0].x[w] + x[1].x[w]) + (x[2].x[w] + x[3].x[w]);
}

/// What is added to S, by k: d = beta (v − S k), k brought to length 1.
template <int COUNT, int COLUMNS> DEVICE void difference(float d[COUNT], const StepRoom<COLUMNS> &room, int column) {
    float k_scale = rsqrtf(room.lengths[1] + L2_EPS), of_sum = -room.keep * k_scale, factor = room.beta * k_scale;
    sum_quarters<COUNT>(d, room.partial[0], column);
    Columns<COUNT> v = *(const Columns<COUNT> *)(room.vectors + 2 * DIM + column);
#pragma unroll
    for (int w = 0; w < COUNT; w++) d[w] = factor * fmaf(of_sum, d[w], v.x[w]);
}

/// The output of a block's columns, normed over the head and gated, by a warp: a lane has PER columns, as often as there are lanes.
template <int COLUMNS> DEVICE void store_output(const Single &p, StepRoom<COLUMNS> &room, u16 *out) {
    const int LANES = PER == 3 ? 32 : 32 / PER; // of 32 columns, but for PER = 3
    int lane = threadIdx.x % 32, column = lane * PER % COLUMNS;
    float d[PER], o[PER], squares = 0.0f, q_scale = rsqrtf((float)DIM) * rsqrtf(room.lengths[0] + L2_EPS);
    difference<PER>(d, room, column), sum_quarters<PER>(o, room.partial[1], column);
#pragma unroll
    for (int w = 0; w < PER; w++) {
        o[w] = q_scale * fmaf(room.lengths[2], d[w], room.keep * o[w]);
        squares = fmaf(o[w], o[w], squares);
    }
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2) squares += __shfl_xor_sync(~0u, squares, step);
    if (COLUMNS < DIM) {
        if (lane < DIM / COLUMNS) store_remote(room.squares + blockIdx.y, lane, squares);
        cluster_arrive(), cluster_wait();
        squares = room.squares[lane % (DIM / COLUMNS)];
#pragma unroll
        for (int step = 1; step < DIM / COLUMNS; step *= 2) squares += __shfl_xor_sync(~0u, squares, step);
    } else {
#pragma unroll
        for (int step = LANES; step < 32; step *= 2) squares += __shfl_xor_sync(~0u, squares, step);
    }
    float scale = rsqrtf(squares * (1.0f / DIM) + p.eps);
    if (lane * PER >= COLUMNS) return;
#pragma unroll
    for (int w = 0; w < PER; w++) out[column + w] = bf16(o[w] * scale * room.gates[column + w]);
}

/// One token of each of several sequences, from convolution to the delta rule's output, normed and gated. With S the state, kept in part:
/// S + k d is the new one, and q S + (q · k) d the output, so that one sum over keys serves both; the decay is applied to sums.
template <int COLUMNS> DEVICE void delta_step(const Single &p) {
    const int ACROSS = COLUMNS / 32; // of a thread
    __shared__ StepRoom<COLUMNS> room;
    next();
    if (COLUMNS < DIM) cluster_arrive(); // all blocks of the cluster have begun when they store to one another
    const Shape &s = p.shape;
    int head = blockIdx.x, row = blockIdx.z, per_key = s.value_heads / s.key_heads, key_head = head / per_key, first = blockIdx.y * COLUMNS;
    int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, quarter = warp / 4;
    int column = (warp % 4 * 8 + lane % 8) * ACROSS, key = (quarter * 4 + lane / 8) * KEYS;
    const float *before = p.from[row] ? p.from[row] + p.offset : 0, *input = p.projected + (long)row * s.stride;
    float *after = p.to[row] + p.offset;
    int at = (s.taps - 1) * channels(s) + (head * DIM + key) * DIM + first + column;
    // Neither the state nor the window depends on the kernel before: they are on their way while that one ends. Nothing in this
    // pass reads what is written meanwhile.
    Columns<ACROSS> state[KEYS] = {};
    if (before) {
#pragma unroll
        for (int i = 0; i < KEYS; i++) state[i] = *(const Columns<ACROSS> *)(before + at + i * DIM);
    }
    if (COLUMNS == DIM && thread == SINGLE_THREADS - 1) {
        // Half of all blocks may have room only when the kernel before ends.
        int ahead = row * gridDim.x + head + gridDim.x * gridDim.z / 2, other = ahead / gridDim.x;
        const float *from = other < gridDim.z ? p.from[other] : 0;
        if (from) prefetch_bulk(from + p.offset + (s.taps - 1) * channels(s) + (ahead - other * gridDim.x) * DIM * DIM, DIM * DIM * 4);
    }
    // The first DIM threads take the channels of q, the next those of k, then come those of v.
    int which = thread / DIM, place = thread % DIM;
    int channel = which == 2 ? (2 * s.key_heads + head) * DIM + first + place : (which * s.key_heads + key_head) * DIM + place;
    bool convolves = thread < 2 * DIM + COLUMNS, moves = which == 2 || (head % per_key == 0 && first == 0);
    float history = 0.0f, newest_weight = 0.0f, a = 0.0f, bias = 0.0f;
    if (convolves) {
        history = convolve_before(p, before, after, channel, moves);
        newest_weight = p.weights[channel * s.taps + s.taps - 1];
    } else if (warp == 15) {
        a = p.a[head], bias = p.dt_bias[head];
    } else if (warp == 14) {
#pragma unroll
        for (int i = lane; i < COLUMNS; i += 32) room.gates[i] = p.norm[first + i];
    }
    if (COLUMNS < DIM) cluster_wait();
    previous();
    const float *z = input + channels(s) + head * DIM + first, *raw = input + channels(s) + s.value_heads * DIM + head;
    if (convolves) {
        float newest = input[channel];
        room.vectors[thread] = silu(fmaf(newest_weight, newest, history));
        if (moves && s.taps > 1) after[(s.taps - 2) * channels(s) + channel] = newest;
    } else if (warp == 15) {
        float x = sigmoid(raw[0]), y = expf(a * softplus(raw[s.value_heads] + bias));
        if (lane == 0) room.beta = x, room.keep = y;
    } else if (warp == 14) {
#pragma unroll
        for (int i = lane; i < COLUMNS; i += 32) room.gates[i] *= silu(z[i]);
    }
    __syncthreads();
    float k[KEYS], q[KEYS], of_k[ACROSS] = {}, of_q[ACROSS] = {};
    load_keys(k, room.vectors + DIM + key), load_keys(q, room.vectors + key);
#pragma unroll
    for (int i = 0; i < KEYS; i++) {
#pragma unroll
        for (int w = 0; w < ACROSS; w++) {
            of_k[w] = fmaf(state[i].x[w], k[i], of_k[w]), of_q[w] = fmaf(state[i].x[w], q[i], of_q[w]);
        }
    }
#pragma unroll
    for (int w = 0; w < ACROSS; w++) {
        float sum = sum_of_two(of_k[w], of_q[w]);
        if (lane < 16) room.partial[lane / 8][quarter][column + w] = sum;
    }
    if (warp < 3) {
        const float *x = room.vectors + (warp == 1) * DIM + lane, *y = room.vectors + (warp > 0) * DIM + lane;
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < PER; i++) sum = fmaf(x[i * 32], y[i * 32], sum);
        sum = warp_sum(sum);
        if (lane == 0) room.lengths[warp] = sum;
    }
    __syncthreads();
    if (warp == 0) store_output(p, room, p.out + ((long)row * s.value_heads + head) * DIM + first);
    else if (COLUMNS < DIM) cluster_arrive(); // the barrier is the first warp's
    float d[ACROSS], keep = room.keep;
    difference<ACROSS>(d, room, column);
    load_keys(k, room.vectors + DIM + key); // once more, as registers are few
#pragma unroll
    for (int i = 0; i < KEYS; i++) {
#pragma unroll
        for (int w = 0; w < ACROSS; w++) state[i].x[w] = fmaf(k[i], d[w], keep * state[i].x[w]);
        *(Columns<ACROSS> *)(after + at + i * DIM) = state[i];
    }
}

/// Grid: (value heads, 1, rows).
KERNEL __launch_bounds__(SINGLE_THREADS, 2) void delta_single(Single p) { delta_step<DIM>(p); }

#if DELTA_CLUSTERS
/// Grid: (value heads, DIM / 32, rows).
KERNEL __launch_bounds__(SINGLE_THREADS, 2) __cluster_dims__(1, DIM / 32, 1) void delta_split(Single p) { delta_step<32>(p); }
#endif
