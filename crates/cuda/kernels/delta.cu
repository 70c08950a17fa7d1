// The Gated DeltaNet mixer between its projections. DIM: numbers in a head, a multiple of 16 up to 128.
//
// Cells are rows of one sequence between two multiples of 64 positions. With G_i = g_0 + … + g_i inside a cell,
//
//   A_ij = beta_i exp(G_i − G_j) k_i·k_j (j < i)          T = (1 + A)⁻¹
//   U = T diag(beta) V        W = T diag(beta exp(G)) K   P_ij = exp(G_i − G_j) q_i·k_j (j ≤ i)
//
// depend on the cell alone (`delta_prepare`, all cells at once). What remains goes cell by cell (`delta_scan`):
//
//   d = U − W S      o = exp(G) Q S + P d      S ← exp(G_n) S + (diag(exp(G_n − G)) K)ᵀ d
//
// Factors are bf16, sums and the state f32. Only differences G_i − G_j ≤ 0 are exponentiated.

const int CELL = 64;
const int PAD = 8;                       // numbers behind each row in shared memory, against bank conflicts
const int SLICE = DIM < 32 ? DIM : 32;   // value columns of a block of `delta_scan`

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

struct Prepare {
    Shape shape;
    const float *projected; // [rows, stride]
    const u16 *mixed;       // [rows, channels]
    const float *a;         // [value heads]: −exp(A_log)
    const float *dt_bias;   // [value heads]
    u16 *u, *w;             // [cells, value heads, 64, DIM]
    u16 *p;                 // [cells, value heads, 64, 64]
    float *decay;           // [cells, value heads, 64]: G
    int first_offset;       // rows of the first cell that were before
    int rows;
};

/// First row and rows of a cell.
DEVICE int cell_rows(int cell, int offset, int rows, int &first) {
    first = cell == 0 ? 0 : cell * CELL - offset;
    return min(rows, (cell + 1) * CELL - offset) - first;
}

const int ROW = DIM + PAD;        // numbers of a padded row
const int SQUARE = CELL + PAD;    // numbers of a padded row of a 64 × 64 matrix

/// Copies `valid` of 64 rows of `cols` numbers to rows of `to_stride` numbers; zeros behind them.
DEVICE void load_rows(u16 *to, int to_stride, const u16 *from, long stride, int cols, int valid) {
    for (int i = threadIdx.x; i < CELL * cols / 8; i += blockDim.x) {
        int row = i / (cols / 8), chunk = i % (cols / 8);
        bool inside = row < valid;
        copy_16(shared_address(to + row * to_stride + chunk * 8), from + (inside ? row : 0) * stride + chunk * 8, inside);
    }
}

/// c[j] = rows 16 w .. of a [64, K] · columns 8 j .. of b [K, 8 N], K-major (b's rows are columns of the result).
template <int K, int N> DEVICE void rows_by_rows(float c[N][4], const u16 *a, int a_stride, const u16 *b, int b_stride) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int k = 0; k < K; k += 16) {
        u32 x[4];
        load_matrices(x, shared_address(a + (warp * 16 + lane % 16) * a_stride + k + lane / 16 * 8));
#pragma unroll
        for (int j = 0; j < N; j += 2) {
            u32 y[4];
            load_matrices(y, shared_address(b + (j * 8 + lane % 8 + lane / 16 * 8) * b_stride + k + lane / 8 % 2 * 8));
            multiply_bf16(c[j], x, y[0], y[1]);
            multiply_bf16(c[j + 1], x, y[2], y[3]);
        }
    }
}

/// c[j] += rows 16 w .. of a [64, K] · columns 8 j .. of b [K, 8 N], row-major.
template <int K, int N> DEVICE void rows_by_columns(float c[N][4], const u16 *a, int a_stride, const u16 *b, int b_stride) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int k = 0; k < K; k += 16) {
        u32 x[4];
        load_matrices(x, shared_address(a + (warp * 16 + lane % 16) * a_stride + k + lane / 16 * 8));
#pragma unroll
        for (int j = 0; j < N; j += 2) {
            u32 y[4];
            load_transposed(y, shared_address(b + (k + lane % 16) * b_stride + (j + lane / 16) * 8));
            multiply_bf16(c[j], x, y[0], y[1]);
            multiply_bf16(c[j + 1], x, y[2], y[3]);
        }
    }
}

template <int N> DEVICE void clear(float c[N][4]) {
#pragma unroll
    for (int j = 0; j < N; j++) c[j][0] = c[j][1] = c[j][2] = c[j][3] = 0.0f;
}

/// T = (1 + a)⁻¹ for a strictly lower triangular `a`, column by column, by 64 threads.
DEVICE void invert(const float *a, float *t) {
    int column = threadIdx.x;
    float x[CELL];
#pragma unroll
    for (int i = 0; i < CELL; i++) {
        float sum = i == column ? 1.0f : 0.0f;
#pragma unroll
        for (int j = 0; j < i; j++) sum = fmaf(-a[i * CELL + j], x[j], sum);
        x[i] = sum;
        t[i * CELL + column] = sum;
    }
}

/// Stores a warp's 16 rows of sums as bf16.
template <int N> DEVICE void store_rounded(const float c[N][4], u16 *to, int stride) {
    int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
    for (int j = 0; j < N; j++) {
        u16 *at = to + row * stride + j * 8 + lane % 4 * 2;
        *(u32 *)at = bf16_pair(c[j][0], c[j][1]);
        *(u32 *)(at + 8 * stride) = bf16_pair(c[j][2], c[j][3]);
    }
}

/// Grid: (cells, value heads); 128 threads.
KERNEL __launch_bounds__(128) void delta_prepare(Prepare p) {
    extern __shared__ __align__(16) u8 shared[];
    u16 *k = (u16 *)shared, *q = k + CELL * ROW, *v = q + CELL * ROW;
    float *a = (float *)(v + CELL * ROW), *t = a + CELL * CELL;
    u16 *by_beta = (u16 *)(t + CELL * CELL), *by_decay = by_beta + CELL * SQUARE;
    float *total = (float *)(by_decay + CELL * SQUARE), *beta = total + CELL;
    int cell = blockIdx.x, head = blockIdx.y, first, count = cell_rows(cell, p.first_offset, p.rows, first);
    const Shape &s = p.shape;
    int key_head = head / (s.value_heads / s.key_heads), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u16 *mixed = p.mixed + (long)first * channels(s);
    load_rows(q, ROW, mixed + key_head * DIM, channels(s), DIM, count);
    load_rows(k, ROW, mixed + (s.key_heads + key_head) * DIM, channels(s), DIM, count);
    load_rows(v, ROW, mixed + (2 * s.key_heads + head) * DIM, channels(s), DIM, count);
    copies_commit();
    if (threadIdx.x < CELL) {
        int i = threadIdx.x;
        const float *raw = p.projected + (long)(first + i) * s.stride + channels(s) + s.value_heads * DIM + head;
        beta[i] = i < count ? sigmoid(raw[0]) : 0.0f;
        total[i] = i < count ? p.a[head] * softplus(raw[s.value_heads] + p.dt_bias[head]) : 0.0f;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int i = 1; i < CELL; i++) total[i] += total[i - 1];
    }
    copies_wait<0>();
    __syncthreads();
    long place = (long)cell * s.value_heads + head;
    if (threadIdx.x < CELL) p.decay[place * CELL + threadIdx.x] = total[threadIdx.x];

    float c[CELL / 8][4];
    u16 *scores = p.p + place * CELL * CELL;
    for (int which = 0; which < 2; which++) {
        clear<CELL / 8>(c);
        rows_by_rows<DIM, CELL / 8>(c, which ? q : k, ROW, k, ROW);
#pragma unroll
        for (int j = 0; j < CELL / 8; j++) {
#pragma unroll
            for (int x = 0; x < 4; x++) {
                int row = warp * 16 + lane / 4 + x / 2 * 8, column = j * 8 + lane % 4 * 2 + x % 2;
                bool seen = which ? column <= row : column < row;
                float value = seen ? expf(total[row] - total[column]) * c[j][x] : 0.0f;
                if (which) c[j][x] = value;
                else a[row * CELL + column] = beta[row] * value;
            }
        }
        if (which) store_rounded<CELL / 8>(c, scores, CELL);
    }
    __syncthreads();
    if (threadIdx.x < CELL) invert(a, t);
    __syncthreads();
    for (int i = threadIdx.x; i < CELL * CELL; i += blockDim.x) {
        int row = i / CELL, column = i % CELL;
        float value = t[i] * beta[column];
        by_beta[row * SQUARE + column] = bf16(value);
        by_decay[row * SQUARE + column] = bf16(value * expf(total[column]));
    }
    __syncthreads();
    float out[DIM / 8][4];
    clear<DIM / 8>(out);
    rows_by_columns<CELL, DIM / 8>(out, by_beta, SQUARE, v, ROW);
    store_rounded<DIM / 8>(out, p.u + place * CELL * DIM, DIM);
    clear<DIM / 8>(out);
    rows_by_columns<CELL, DIM / 8>(out, by_decay, SQUARE, k, ROW);
    store_rounded<DIM / 8>(out, p.w + place * CELL * DIM, DIM);
}

struct Scan {
    Shape shape;
    const u16 *mixed;    // [rows, channels]
    const u16 *u, *w, *p; // of `delta_prepare`
    const float *decay;
    float *state;        // [value heads, DIM, DIM]: key, value
    float *out;          // [rows, value heads · DIM]; may be null
    int first_offset, rows;
    int cells;
};

/// One stage of shared memory of `delta_scan`.
struct Inputs {
    u16 w[CELL * ROW], q[CELL * ROW], k[CELL * ROW], p[CELL * SQUARE], u[CELL * (SLICE + PAD)];
    float decay[CELL];
};

DEVICE void load_inputs(Inputs *to, const Scan &p, int cell, int head, int slice) {
    int first, count = cell_rows(cell, p.first_offset, p.rows, first);
    const Shape &s = p.shape;
    int key_head = head / (s.value_heads / s.key_heads);
    long place = (long)cell * s.value_heads + head;
    const u16 *mixed = p.mixed + (long)first * channels(s);
    load_rows(to->w, ROW, p.w + place * CELL * DIM, DIM, DIM, CELL);
    load_rows(to->q, ROW, mixed + key_head * DIM, channels(s), DIM, count);
    load_rows(to->k, ROW, mixed + (s.key_heads + key_head) * DIM, channels(s), DIM, count);
    load_rows(to->p, SQUARE, p.p + place * CELL * CELL, CELL, CELL, CELL);
    load_rows(to->u, SLICE + PAD, p.u + place * CELL * DIM + slice * SLICE, DIM, SLICE, CELL);
    if (threadIdx.x < CELL / 4) {
        copy_16(shared_address(to->decay + threadIdx.x * 4), p.decay + place * CELL + threadIdx.x * 4, true);
    }
}

/// Grid: (value heads, DIM / SLICE); 128 threads.
KERNEL __launch_bounds__(128) void delta_scan(Scan p) {
    extern __shared__ __align__(16) u8 shared[];
    const int WIDE = SLICE + PAD, N = SLICE / 8, M = (DIM / 16 + 3) / 4; // M: blocks of 16 keys of a warp's state
    Inputs *stages = (Inputs *)shared;
    u16 *rounded = (u16 *)(stages + DELTA_STAGES), *d = rounded + DIM * WIDE, *decayed = d + CELL * WIDE;
    int head = blockIdx.x, slice = blockIdx.y, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int values = p.shape.value_heads * DIM;
    float *state = p.state + (long)head * DIM * DIM + slice * SLICE;

    float s[M][N][4];
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int j = 0; j < N; j++) {
#pragma unroll
            for (int x = 0; x < 4; x++) {
                int key = (warp + 4 * m) * 16 + lane / 4 + x / 2 * 8, column = j * 8 + lane % 4 * 2 + x % 2;
                s[m][j][x] = key < DIM ? state[key * DIM + column] : 0.0f;
            }
        }
    }
    load_inputs(stages, p, 0, head, slice);
    copies_commit();
    for (int cell = 0; cell < p.cells; cell++) {
        Inputs *in = stages + cell % DELTA_STAGES;
        if (DELTA_STAGES > 1 && cell + 1 < p.cells) load_inputs(stages + (cell + 1) % DELTA_STAGES, p, cell + 1, head, slice);
        copies_commit();
#pragma unroll
        for (int m = 0; m < M; m++) {
#pragma unroll
            for (int j = 0; j < N; j++) {
                int key = (warp + 4 * m) * 16 + lane / 4;
                u16 *at = rounded + key * WIDE + j * 8 + lane % 4 * 2;
                if (key < DIM) {
                    *(u32 *)at = bf16_pair(s[m][j][0], s[m][j][1]);
                    *(u32 *)(at + 8 * WIDE) = bf16_pair(s[m][j][2], s[m][j][3]);
                }
            }
        }
        if (DELTA_STAGES > 1) copies_wait<1>();
        else copies_wait<0>();
        __syncthreads();

        // d = U − W S, plain and decayed to the end of the cell.
        float c[N][4];
        clear<N>(c);
        rows_by_columns<DIM, N>(c, in->w, ROW, rounded, WIDE);
        float last = in->decay[CELL - 1];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int row = warp * 16 + lane / 4 + half * 8;
            float left = expf(last - in->decay[row]);
#pragma unroll
            for (int j = 0; j < N; j++) {
                int at = row * WIDE + j * 8 + lane % 4 * 2;
                u32 pair = *(u32 *)(in->u + at);
                float x = bf16_value((u16)pair) - c[j][2 * half], y = bf16_value((u16)(pair >> 16)) - c[j][2 * half + 1];
                *(u32 *)(d + at) = bf16_pair(x, y);
                *(u32 *)(decayed + at) = bf16_pair(x * left, y * left);
            }
        }
        __syncthreads();

        if (p.out) {
            clear<N>(c);
            rows_by_columns<DIM, N>(c, in->q, ROW, rounded, WIDE);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float factor = expf(in->decay[warp * 16 + lane / 4 + half * 8]);
#pragma unroll
                for (int j = 0; j < N; j++) c[j][2 * half] *= factor, c[j][2 * half + 1] *= factor;
            }
            rows_by_columns<CELL, N>(c, in->p, SQUARE, d, WIDE);
            int first, count = cell_rows(cell, p.first_offset, p.rows, first);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                int row = warp * 16 + lane / 4 + half * 8;
                float *to = p.out + (long)(first + row) * values + head * DIM + slice * SLICE + lane % 4 * 2;
                if (row < count) {
#pragma unroll
                    for (int j = 0; j < N; j++) *(float2 *)(to + j * 8) = make_float2(c[j][2 * half], c[j][2 * half + 1]);
                }
            }
        }

        // S ← exp(G_n) S + Kᵀ d, keys down.
        float keep = expf(last);
#pragma unroll
        for (int m = 0; m < M; m++) {
            int key = (warp + 4 * m) * 16;
            if (key >= DIM) continue;
#pragma unroll
            for (int j = 0; j < N; j++) {
#pragma unroll
                for (int x = 0; x < 4; x++) s[m][j][x] *= keep;
            }
#pragma unroll
            for (int k = 0; k < CELL; k += 16) {
                u32 x[4];
                load_transposed(x, shared_address(in->k + (k + lane % 8 + lane / 16 * 8) * ROW + key + lane / 8 % 2 * 8));
#pragma unroll
                for (int j = 0; j < N; j += 2) {
                    u32 y[4];
                    load_transposed(y, shared_address(decayed + (k + lane % 16) * WIDE + (j + lane / 16) * 8));
                    multiply_bf16(s[m][j], x, y[0], y[1]);
                    multiply_bf16(s[m][j + 1], x, y[2], y[3]);
                }
            }
        }
        __syncthreads();
        if (DELTA_STAGES == 1 && cell + 1 < p.cells) load_inputs(stages, p, cell + 1, head, slice);
    }
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int j = 0; j < N; j++) {
#pragma unroll
            for (int x = 0; x < 4; x++) {
                int key = (warp + 4 * m) * 16 + lane / 4 + x / 2 * 8, column = j * 8 + lane % 4 * 2 + x % 2;
                if (key < DIM) state[key * DIM + column] = s[m][j][x];
            }
        }
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
