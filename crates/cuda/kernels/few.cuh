// Products with up to eight rows of x, on the tensor cores: passes of single rows.
//
// out[r][o] = Σ_k weights[o][k] · x[r][k]. A tile is 16 outputs; its blocks come into shared memory in file form by copies of
// 16 bytes (a window around each row), K cut into segments of 2048. Weights and x are bf16 factors, sums f32.
//
// K is walked in steps of 128: lane l of a warp holds run l % 4 (32 weights) of the rows l / 4 and l / 4 + 8 and of row l / 4
// of x, so each lane decodes whole runs. Steps go to the warps of a block in turns, their sums are added up in the order
// of warps. A result depends on its row of x and its row of weights alone, not on what is beside them.
//
// x in shared memory: run i of row r at r · x_stride + 40 i, so that the runs of a step lie in different banks.
//
// A kernel begins while the one before it ends where the GPU can do that (`previous`): weights are under way by then.

const int FEW = 8, TILE = 16, SEGMENT = 2048, RUN = 40;

template <class... T> struct List {};

/// Calls `work` with the type of this number.
template <class Work, class... T> DEVICE void with_type(int number, List<T...>, Work work) {
    int i = 0;
    ((i++ == number ? (work(T()), 0) : 0), ...);
}

typedef List<TYPES> All;

/// Bytes of shared memory of a row whose blocks take `bytes`: whole words of 16, an odd number of them.
DEVICE int window(int bytes) { return ((bytes + 30) / 16 | 1) * 16; }

struct Matrix {
    const u8 *at;
    float *out;      // of the first row of x
    int rows, type;  // type: its place in TYPES
    int row_bytes, segment_bytes;
};

/// Copies a tile's rows of one segment, `bytes` of each, to windows in shared memory, by as many threads as the block has.
template <int COUNT> DEVICE void copy_tile(u8 *to, const u8 *first, int row_bytes, int rows, int bytes) {
    const int BY = COUNT / TILE;
    int row = threadIdx.x / BY, stride = window(bytes);
    const u8 *from = first + min(row, rows - 1) * row_bytes;
    int words = ((int)((u64)from & 15) + bytes + 15) / 16;
    from = (const u8 *)((u64)from & ~15ull);
#pragma unroll 4
    for (int i = threadIdx.x % BY; i < words; i += BY) copy_16(shared_address(to + row * stride + 16 * i), from + 16 * i, true);
}

/// This lane's two rows of a tile in shared memory.
struct Pair {
    const u8 *low, *high;
};

DEVICE Pair rows_of(const u8 *tile, const u8 *first, int row_bytes, int rows, int bytes) {
    int g = threadIdx.x % 32 / 4, stride = window(bytes);
    Pair out;
    out.low = tile + g * stride + ((u64)(first + min(g, rows - 1) * row_bytes) & 15);
    out.high = tile + (g + 8) * stride + ((u64)(first + min(g + 8, rows - 1) * row_bytes) & 15);
    return out;
}

/// A run of a row; zeros behind column `cols`.
template <class T> DEVICE void run_of(const u8 *row, int run, int cols, const u32 *table, u32 out[16]) {
    if (run * 32 < cols) {
        Run<T>::decode(row, run, table, out);
    } else {
#pragma unroll
        for (int i = 0; i < 16; i++) out[i] = 0;
    }
    if (T::LEN < 32) {
#pragma unroll
        for (int i = 0; i < 16; i++) {
            if (run * 32 + i / 4 * 8 >= cols) out[i] = 0;
        }
    }
}

/// c += a tile · xᵀ over the steps `first`, `first` + `by`, … of `cols` columns. `x`: this lane's row, at the same columns.
template <class T>
DEVICE void multiply_steps(float c[2][4], const Pair &rows, const u16 *x, int cols, int first, int by, const u32 *table) {
    for (int step = first; step * 128 < cols; step += by) {
        int run = step * 4 + threadIdx.x % 4;
        u32 low[16], high[16];
        run_of<T>(rows.low, run, cols, table, low);
        run_of<T>(rows.high, run, cols, table, high);
        const uint4 *at = (const uint4 *)(x + run * RUN);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint4 v = at[i];
            u32 a[4] = {low[4 * i], high[4 * i], low[4 * i + 1], high[4 * i + 1]};
            u32 b[4] = {low[4 * i + 2], high[4 * i + 2], low[4 * i + 3], high[4 * i + 3]};
            multiply_bf16(c[0], a, v.x, v.y);
            multiply_bf16(c[1], b, v.z, v.w);
        }
    }
}

DEVICE int steps_of(int cols) { return (cols + 127) / 128; }

/// Numbers of a row of x in shared memory.
DEVICE int x_stride(int cols) { return steps_of(cols) * 4 * RUN + 8; }

DEVICE int x_at(int column) { return column / 32 * RUN + column % 32; }

/// Zeros behind the columns of a row of x, up to whole steps.
DEVICE void pad_x(u16 *row, int cols) {
    for (int i = cols + threadIdx.x; i < steps_of(cols) * 128; i += blockDim.x) row[x_at(i)] = 0;
}

/// a / b of small numbers, in few instructions.
DEVICE int small_quotient(int a, int b) { return (int)__fdividef((float)a + 0.5f, (float)b); }

/// Waits for as many threads of a block to come here.
DEVICE void meet(int barrier, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory"); }

/// Eight numbers of a lane.
struct Numbers {
    float4 low, high;
};

DEVICE Numbers numbers_at(const float *from, bool inside) {
    Numbers v = {make_float4(0.0f, 0.0f, 0.0f, 0.0f), make_float4(0.0f, 0.0f, 0.0f, 0.0f)};
    if (inside) v.low = ((const float4 *)from)[0], v.high = ((const float4 *)from)[1];
    return v;
}

DEVICE void spread(const Numbers &v, float y[8]) {
    y[0] = v.low.x, y[1] = v.low.y, y[2] = v.low.z, y[3] = v.low.w;
    y[4] = v.high.x, y[5] = v.high.y, y[6] = v.high.z, y[7] = v.high.w;
}
