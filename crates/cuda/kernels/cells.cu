// The delta rule over cells: rows of one sequence between two multiples of 64 positions. With G_i = g_0 + … + g_i inside a cell,
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

const int GROUP = 128;            // threads that share the rows of a cell, 16 for each warp
const int ROW = DIM + PAD;        // numbers of a padded row
const int SQUARE = CELL + PAD;    // numbers of a padded row of a 64 × 64 matrix

/// Copies `valid` of 64 rows of `cols` numbers to rows of `to_stride` numbers, by a group; zeros behind them.
DEVICE void load_rows(u16 *to, int to_stride, const u16 *from, long stride, int cols, int valid) {
    for (int i = threadIdx.x % GROUP; i < CELL * cols / 8; i += GROUP) {
        int row = i / (cols / 8), chunk = i % (cols / 8);
        bool inside = row < valid;
        copy_16(shared_address(to + row * to_stride + chunk * 8), from + (inside ? row : 0) * stride + chunk * 8, inside);
    }
}

/// c[j] = rows 16 w .. of a [64, K] · columns 8 j .. of b [K, 8 N], K-major (b's rows are columns of the result).
template <int K, int N> DEVICE void rows_by_rows(float c[N][4], const u16 *a, int a_stride, const u16 *b, int b_stride) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
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
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
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

/// T = (1 + A)⁻¹ for a strictly lower triangular A, column by column, by 64 threads: T diag(beta), and the same times exp(G), as
/// bf16. `a`: A, by columns.
DEVICE void invert(const float *a, const float *beta, const float *total, u16 *by_beta, u16 *by_decay) {
    int column = threadIdx.x;
    float x[CELL], scale = beta[column], decay = expf(total[column]);
#pragma unroll
    for (int i = 0; i < CELL; i++) x[i] = i == column ? 1.0f : 0.0f;
    // Every number is done with those before it while they are at hand: sums of all rows advance side by side.
#pragma unroll
    for (int j = 0; j < CELL; j++) {
#pragma unroll
        for (int i = j / 4 * 4; i < CELL; i += 4) {
            float4 four = *(const float4 *)(a + j * CELL + i);
            if (i > j) x[i] = fmaf(-four.x, x[j], x[i]);
            if (i + 1 > j) x[i + 1] = fmaf(-four.y, x[j], x[i + 1]);
            if (i + 2 > j) x[i + 2] = fmaf(-four.z, x[j], x[i + 2]);
            if (i + 3 > j) x[i + 3] = fmaf(-four.w, x[j], x[i + 3]);
        }
        float value = x[j] * scale;
        by_beta[j * SQUARE + column] = bf16(value);
        by_decay[j * SQUARE + column] = bf16(value * decay);
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

/// Sums of all numbers so far, of CELL numbers, by a warp.
DEVICE void sum_up(float *x) {
    int lane = threadIdx.x;
    float2 own = ((float2 *)x)[lane];
    float sum = own.x + own.y;
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
        float before = __shfl_up_sync(~0u, sum, by);
        if (lane >= by) sum += before;
    }
    float before = __shfl_up_sync(~0u, sum, 1);
    if (lane == 0) before = 0.0f;
    ((float2 *)x)[lane] = make_float2(before + own.x, sum);
}

/// Grid: (cells, value heads); 128 threads.
KERNEL __launch_bounds__(128) void delta_prepare(Prepare p) {
    extern __shared__ __align__(16) u8 shared[];
    u16 *k = (u16 *)shared, *v = k + CELL * ROW;
    float *a = (float *)(v + CELL * ROW), *total = a + CELL * CELL, *beta = total + CELL;
    // Queries make room for what becomes of T.
    u16 *q = (u16 *)(beta + CELL), *by_beta = q, *by_decay = by_beta + CELL * SQUARE;
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
    if (threadIdx.x < 32) sum_up(total);
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
                float value = seen ? __expf(total[row] - total[column]) * c[j][x] : 0.0f;
                if (which) c[j][x] = value;
                else a[column * CELL + row] = beta[row] * value;
            }
        }
        if (which) store_rounded<CELL / 8>(c, scores, CELL);
    }
    __syncthreads();
    if (threadIdx.x < CELL) invert(a, beta, total, by_beta, by_decay);
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

const int WIDE = SLICE + PAD;     // numbers of a padded row of a slice
const int OWN = (DIM / 16 + 3) / 4; // blocks of 16 keys of a warp's part of the state

/// A cell's inputs to the state, and to the outputs.
struct ForState {
    u16 w[CELL * ROW], k[CELL * ROW], u[CELL * WIDE];
    float decay[CELL];
};

struct ForOutputs {
    u16 q[CELL * ROW], p[CELL * SQUARE];
    float decay[CELL];
};

/// What the warps of the state leave for those of the outputs: the state before the cell, and d.
struct Left {
    u16 state[DIM * WIDE], d[CELL * WIDE];
};

/// Shared memory of `delta_scan`.
struct ScanRoom {
    ForState state[DELTA_STAGES];
    ForOutputs outputs[DELTA_STAGES];
    Left left[DELTA_STAGES];
    u16 decayed[CELL * WIDE];
};

// Barriers: of each group, and for each buffer of `left` that it is filled, and that it is free.
enum { STATE_GROUP = 1, OUTPUT_GROUP, FILLED, FREE = FILLED + DELTA_STAGES };

DEVICE void group_wait(int barrier, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory"); }

DEVICE void group_arrive(int barrier, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory"); }

DEVICE long place_of(const Scan &p, int cell) { return (long)cell * p.shape.value_heads + blockIdx.x; }

DEVICE void load_decay(float *to, const Scan &p, int cell) {
    int i = threadIdx.x % GROUP * 4;
    if (i < CELL) copy_16(shared_address(to + i), p.decay + place_of(p, cell) * CELL + i, true);
}

/// Queries (0) or keys (1) of a cell.
DEVICE void load_mixed(u16 *to, const Scan &p, int cell, int which) {
    int first, count = cell_rows(cell, p.first_offset, p.rows, first);
    const Shape &s = p.shape;
    int key_head = blockIdx.x / (s.value_heads / s.key_heads);
    const u16 *from = p.mixed + (long)first * channels(s) + (which * s.key_heads + key_head) * DIM;
    load_rows(to, ROW, from, channels(s), DIM, count);
}

DEVICE void load_inputs(ForState &to, const Scan &p, int cell) {
    long at = place_of(p, cell) * CELL * DIM;
    load_rows(to.w, ROW, p.w + at, DIM, DIM, CELL);
    load_mixed(to.k, p, cell, 1);
    load_rows(to.u, WIDE, p.u + at + blockIdx.y * SLICE, DIM, SLICE, CELL);
    load_decay(to.decay, p, cell);
}

DEVICE void load_inputs(ForOutputs &to, const Scan &p, int cell) {
    load_mixed(to.q, p, cell, 0);
    load_rows(to.p, SQUARE, p.p + place_of(p, cell) * CELL * CELL, CELL, CELL, CELL);
    load_decay(to.decay, p, cell);
}

/// Waits until the inputs of a cell are there for the whole group, and has the next cell's on their way if there is a
/// second stage for them.
template <class Inputs> DEVICE Inputs &arrived(Inputs *stages, const Scan &p, int cell, int group) {
    copies_wait<0>();
    group_wait(group, GROUP);
    if (DELTA_STAGES > 1 && cell + 1 < p.cells) load_inputs(stages[(cell + 1) % DELTA_STAGES], p, cell + 1);
    copies_commit();
    return stages[cell % DELTA_STAGES];
}

/// The group is through with a cell: where there is one stage, the next cell's inputs follow.
template <class Inputs> DEVICE void used(Inputs *stages, const Scan &p, int cell, int group) {
    if (DELTA_STAGES > 1 || cell + 1 == p.cells) return;
    group_wait(group, GROUP);
    load_inputs(stages[0], p, cell + 1);
    copies_commit();
}

typedef float State[OWN][SLICE / 8][4];

/// Calls `work` with every number of this lane's part of the state, its key and column.
template <class Work> DEVICE void each_of(State &s, Work work) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
#pragma unroll
    for (int m = 0; m < OWN; m++) {
#pragma unroll
        for (int j = 0; j < SLICE / 8; j++) {
#pragma unroll
            for (int x = 0; x < 4; x++) {
                int key = (warp + 4 * m) * 16 + lane / 4 + x / 2 * 8;
                if (key < DIM) work(s[m][j][x], key, j * 8 + lane % 4 * 2 + x % 2);
            }
        }
    }
}

/// The state as bf16.
DEVICE void store_state(const State &s, u16 *to) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
#pragma unroll
    for (int m = 0; m < OWN; m++) {
        int key = (warp + 4 * m) * 16 + lane / 4;
        if (key >= DIM) continue;
#pragma unroll
        for (int j = 0; j < SLICE / 8; j++) {
            u16 *at = to + key * WIDE + j * 8 + lane % 4 * 2;
            *(u32 *)at = bf16_pair(s[m][j][0], s[m][j][1]);
            *(u32 *)(at + 8 * WIDE) = bf16_pair(s[m][j][2], s[m][j][3]);
        }
    }
}

/// d = U − W S, plain and decayed to the end of the cell.
DEVICE void differences(const ForState &in, Left &left, u16 *decayed) {
    const int N = SLICE / 8;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    float c[N][4], last = in.decay[CELL - 1];
    clear<N>(c);
    rows_by_columns<DIM, N>(c, in.w, ROW, left.state, WIDE);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int row = warp * 16 + lane / 4 + half * 8;
        float rest = expf(last - in.decay[row]);
#pragma unroll
        for (int j = 0; j < N; j++) {
            int at = row * WIDE + j * 8 + lane % 4 * 2;
            u32 pair = *(u32 *)(in.u + at);
            float x = bf16_value((u16)pair) - c[j][2 * half], y = bf16_value((u16)(pair >> 16)) - c[j][2 * half + 1];
            *(u32 *)(left.d + at) = bf16_pair(x, y);
            *(u32 *)(decayed + at) = bf16_pair(x * rest, y * rest);
        }
    }
}

/// S ← exp(G_n) S + Kᵀ d, keys down.
DEVICE void update_state(State &s, const ForState &in, const u16 *decayed) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    float keep = expf(in.decay[CELL - 1]);
#pragma unroll
    for (int m = 0; m < OWN; m++) {
        int key = (warp + 4 * m) * 16;
        if (key >= DIM) continue;
#pragma unroll
        for (int j = 0; j < SLICE / 8; j++) {
#pragma unroll
            for (int x = 0; x < 4; x++) s[m][j][x] *= keep;
        }
#pragma unroll
        for (int k = 0; k < CELL; k += 16) {
            u32 x[4];
            load_transposed(x, shared_address(in.k + (k + lane % 8 + lane / 16 * 8) * ROW + key + lane / 8 % 2 * 8));
#pragma unroll
            for (int j = 0; j < SLICE / 8; j += 2) {
                u32 y[4];
                load_transposed(y, shared_address(decayed + (k + lane % 16) * WIDE + (j + lane / 16) * 8));
                multiply_bf16(s[m][j], x, y[0], y[1]);
                multiply_bf16(s[m][j + 1], x, y[2], y[3]);
            }
        }
    }
}

/// The group that walks the state from cell to cell.
DEVICE void scan_state(const Scan &p, ScanRoom &room) {
    float *state = p.state + (long)blockIdx.x * DIM * DIM + blockIdx.y * SLICE;
    State s = {};
    each_of(s, [&](float &x, int key, int column) { x = state[key * DIM + column]; });
    load_inputs(room.state[0], p, 0);
    copies_commit();
    for (int cell = 0; cell < p.cells; cell++) {
        int buffer = cell % DELTA_STAGES;
        Left &left = room.left[buffer];
        if (p.out && cell >= DELTA_STAGES) group_wait(FREE + buffer, 2 * GROUP);
        store_state(s, left.state);
        const ForState &in = arrived(room.state, p, cell, STATE_GROUP);
        differences(in, left, room.decayed);
        if (p.out) group_arrive(FILLED + buffer, 2 * GROUP);
        group_wait(STATE_GROUP, GROUP);
        update_state(s, in, room.decayed);
        used(room.state, p, cell, STATE_GROUP);
    }
    each_of(s, [&](float x, int key, int column) { state[key * DIM + column] = x; });
}

/// The group that makes outputs, o = exp(G) Q S + P d, of what the other one leaves.
DEVICE void scan_outputs(const Scan &p, ScanRoom &room) {
    const int N = SLICE / 8;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, values = p.shape.value_heads * DIM;
    load_inputs(room.outputs[0], p, 0);
    copies_commit();
    for (int cell = 0; cell < p.cells; cell++) {
        int buffer = cell % DELTA_STAGES;
        const Left &left = room.left[buffer];
        const ForOutputs &in = arrived(room.outputs, p, cell, OUTPUT_GROUP);
        group_wait(FILLED + buffer, 2 * GROUP);
        float c[N][4];
        clear<N>(c);
        rows_by_columns<DIM, N>(c, in.q, ROW, left.state, WIDE);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float factor = expf(in.decay[warp * 16 + lane / 4 + half * 8]);
#pragma unroll
            for (int j = 0; j < N; j++) c[j][2 * half] *= factor, c[j][2 * half + 1] *= factor;
        }
        rows_by_columns<CELL, N>(c, in.p, SQUARE, left.d, WIDE);
        if (cell + DELTA_STAGES < p.cells) group_arrive(FREE + buffer, 2 * GROUP);
        int first, count = cell_rows(cell, p.first_offset, p.rows, first);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int row = warp * 16 + lane / 4 + half * 8;
            float *to = p.out + (long)(first + row) * values + blockIdx.x * DIM + blockIdx.y * SLICE + lane % 4 * 2;
            if (row >= count) continue;
#pragma unroll
            for (int j = 0; j < N; j++) *(float2 *)(to + j * 8) = make_float2(c[j][2 * half], c[j][2 * half + 1]);
        }
        used(room.outputs, p, cell, OUTPUT_GROUP);
    }
}

/// Grid: (value heads, DIM / SLICE); 256 threads: one group walks the state, the other follows with the outputs.
KERNEL __launch_bounds__(2 * GROUP, 1) void delta_scan(Scan p) {
    extern __shared__ __align__(16) u8 shared[];
    ScanRoom &room = *(ScanRoom *)shared;
    if (threadIdx.x < GROUP) scan_state(p, room);
    else if (p.out) scan_outputs(p, room);
}
