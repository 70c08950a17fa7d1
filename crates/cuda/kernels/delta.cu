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
    float *out;               // [rows, value heads · DIM]
};

// A block of `delta_single` holds 32 columns of a head's state; 16 groups of its threads, a warp each, share the keys.
const int COLUMNS = 32, PARTS = 16, KEYS = DIM / PARTS;

/// What is left of a channel's convolution but for the newest input; its window moves on by all other inputs if `writes`.
DEVICE float convolve_before(const Single &p, const float *before, float *after, int channel, bool writes) {
    int taps = p.shape.taps, count = channels(p.shape);
    float sum = 0.0f;
#pragma unroll 4
    for (int t = 0; t < taps - 1; t++) {
        float old = before ? before[(long)t * count + channel] : 0.0f;
        sum = fmaf(p.weights[channel * taps + t], old, sum);
        if (writes && t > 0) after[(long)(t - 1) * count + channel] = old;
    }
    return sum;
}

/// One token of each of several sequences, from convolution to the delta rule's output, not normed. Grid: (value heads,
/// DIM / 32, rows); 512 threads: thread (part, column) holds a column of a sixteenth of the state's rows. With S the state, kept
/// in part: d = beta (v - S k), S + k d is the new one, and q S + (q · k) d the output, so that one sum over parts serves both.
KERNEL __launch_bounds__(512, 2) void delta_single(Single p) {
    __shared__ __align__(16) float q[DIM], k[DIM];
    __shared__ float v[COLUMNS], partial[2][PARTS][COLUMNS];
    next();
    const Shape &s = p.shape;
    int head = blockIdx.x, row = blockIdx.z, per_key = s.value_heads / s.key_heads, key_head = head / per_key;
    int thread = threadIdx.x, part = thread / COLUMNS, own = thread % COLUMNS, column = blockIdx.y * COLUMNS + own;
    const float *before = p.from[row] ? p.from[row] + p.offset : 0, *input = p.projected + (long)row * s.stride;
    float *after = p.to[row] + p.offset;
    int count = channels(s);
    long at = (long)(s.taps - 1) * count + ((long)head * DIM + part * KEYS) * DIM + column;
    // Neither the state nor the window depends on the kernel before: they are on their way while that one ends. Nothing in this
    // pass reads what is written meanwhile.
    float state[KEYS];
#pragma unroll
    for (int i = 0; i < KEYS; i++) state[i] = before ? before[at + i * DIM] : 0.0f;
    // The first DIM threads take the channels of q, the next those of k, then come those of v.
    int which = thread / DIM, place = thread % DIM, channel = -1;
    bool writes = true;
    if (which < 2) {
        channel = (which == 0 ? key_head : s.key_heads + key_head) * DIM + place;
        writes = blockIdx.y == 0 && head % per_key == 0;
    } else if (thread < 2 * DIM + COLUMNS) {
        channel = (2 * s.key_heads + head) * DIM + blockIdx.y * COLUMNS + thread - 2 * DIM;
    }
    float history = 0.0f, newest_weight = 0.0f;
    if (channel >= 0) {
        history = convolve_before(p, before, after, channel, writes);
        newest_weight = p.weights[channel * s.taps + s.taps - 1];
    }
    float a = p.a[head], bias = p.dt_bias[head];
    previous();
    const float *raw = input + count + s.value_heads * DIM + head;
    float raw_beta = raw[0], raw_alpha = raw[s.value_heads];
    if (channel >= 0) {
        float newest = input[channel], x = silu(fmaf(newest_weight, newest, history));
        *(which == 0 ? q + place : which == 1 ? k + place : v + thread - 2 * DIM) = x;
        if (writes && s.taps > 1) after[(long)(s.taps - 2) * count + channel] = newest;
    }
    float beta = sigmoid(raw_beta), keep = expf(a * softplus(raw_alpha + bias));
    __syncthreads();
    // Every warp works out the lengths of q and k and their product by itself, so that nobody waits for it.
    float q_squares = 0.0f, k_squares = 0.0f, product = 0.0f;
#pragma unroll
    for (int i = 0; i < (DIM + 31) / 32; i++) {
        float x = i * 32 + own < DIM ? q[i * 32 + own] : 0.0f, y = i * 32 + own < DIM ? k[i * 32 + own] : 0.0f;
        q_squares = fmaf(x, x, q_squares), k_squares = fmaf(y, y, k_squares), product = fmaf(x, y, product);
    }
    float of_k = 0.0f, of_q = 0.0f;
#pragma unroll
    for (int i = 0; i < KEYS; i++) {
        state[i] *= keep;
        of_k = fmaf(state[i], k[part * KEYS + i], of_k), of_q = fmaf(state[i], q[part * KEYS + i], of_q);
    }
    partial[0][part][own] = of_k, partial[1][part][own] = of_q;
    q_squares = warp_sum(q_squares), k_squares = warp_sum(k_squares), product = warp_sum(product);
    float q_scale = rsqrtf((float)DIM) / sqrtf(q_squares + L2_EPS), k_scale = 1.0f / sqrtf(k_squares + L2_EPS);
    __syncthreads();
    of_k = of_q = 0.0f;
#pragma unroll
    for (int i = 0; i < PARTS; i++) of_k += partial[0][i][own];
    float d = beta * (v[own] - of_k * k_scale);
    if (part == 0) {
#pragma unroll
        for (int i = 0; i < PARTS; i++) of_q += partial[1][i][own];
        p.out[((long)row * s.value_heads + head) * DIM + column] = q_scale * fmaf(product * k_scale, d, of_q);
    }
    d *= k_scale;
#pragma unroll
    for (int i = 0; i < KEYS; i++) after[at + i * DIM] = fmaf(k[part * KEYS + i], d, state[i]);
}
