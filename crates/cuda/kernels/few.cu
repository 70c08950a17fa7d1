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
const int THREADS = 512, WARPS = THREADS / 32; // of a block of `experts_down`
const int UP_THREADS = 256, UP_WARPS = UP_THREADS / 32;

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

struct FewRows {
    Matrix matrices[4];   // of types of blocks
    int ends[4];          // tiles of the matrices before and including each
    Matrix plain[2];      // of numbers: computed in f32
    int plain_rows, plain_blocks;
    const float *x;       // [rows, cols]: normed first
    const u16 *numbers;   // instead: [count, cols] bf16 as they are
    const u32 *index;     // which rows of x; may be null: all
    const float *norm;    // [cols]; of heads: [head]
    const float *gate;    // if not null, x is norms of heads times SiLU of this: rows of `gate_stride` numbers
    float *normed;        // the normed rows, f32; may be null
    u16 *rounded;         // the same as bf16; may be null
    int cols, count, out_stride, add;
    int head, gate_stride;
    float eps;
    int room_at, table_at, stages_at, stage_bytes, stages; // of shared memory, behind x
    int unused;
};

/// Row r of what is normed.
DEVICE const float *row_at(const FewRows &p, int r) { return p.x + (long)(p.index ? p.index[r] : r) * p.cols; }

/// Scales of the norms of all rows, at `room` + FEW · 64. Warps take 128 columns of a row in turns, whose sums are added up
/// in their order: the same whatever rows are beside it.
DEVICE void norm_scales(const FewRows &p, float *room) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, parts = steps_of(p.cols);
#pragma unroll 4
    for (int i = warp; i < p.count * parts; i += blockDim.x / 32) {
        int r = i / parts, column = (i - r * parts) * 128 + lane * 4;
        float4 v = column < p.cols ? *(const float4 *)(row_at(p, r) + column) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        float sum = warp_sum((v.x * v.x + v.y * v.y) + (v.z * v.z + v.w * v.w));
        if (lane == 0) room[r * 64 + i - r * parts] = sum;
    }
    __syncthreads();
    if (threadIdx.x < p.count) {
        float sum = 0.0f;
#pragma unroll 4
        for (int i = 0; i < parts; i++) sum += room[threadIdx.x * 64 + i];
        room[FEW * 64 + threadIdx.x] = 1.0f / sqrtf(sum / (float)p.cols + p.eps);
    }
    __syncthreads();
}

/// Four normed numbers of a row.
DEVICE float4 normed_at(const FewRows &p, int r, int i, const float *room) {
    float4 v = *(const float4 *)(row_at(p, r) + i), w = *(const float4 *)(p.norm + i);
    float scale = room[FEW * 64 + r];
    return make_float4(v.x * scale * w.x, v.y * scale * w.y, v.z * scale * w.z, v.w * scale * w.w);
}

/// Norms of heads, gated, to shared memory as bf16: a warp for each head.
DEVICE void stage_heads(const FewRows &p, u16 *x) {
    int lane = threadIdx.x % 32, heads = p.cols / p.head, stride = x_stride(p.cols);
#pragma unroll 2
    for (int i = threadIdx.x / 32; i < p.count * heads; i += blockDim.x / 32) {
        int r = i / heads, column = (i - r * heads) * p.head + lane * 4;
        bool inside = lane * 4 < p.head;
        float4 v = inside ? *(const float4 *)(p.x + (long)r * p.cols + column) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        float sum = warp_sum((v.x * v.x + v.y * v.y) + (v.z * v.z + v.w * v.w));
        if (!inside) continue;
        float scale = 1.0f / sqrtf(sum / (float)p.head + p.eps);
        float4 w = *(const float4 *)(p.norm + lane * 4);
        const float *gate = p.gate + (long)r * p.gate_stride + column;
        u32 low = bf16_pair(v.x * scale * w.x * silu(gate[0]), v.y * scale * w.y * silu(gate[1]));
        u32 high = bf16_pair(v.z * scale * w.z * silu(gate[2]), v.w * scale * w.w * silu(gate[3]));
        *(uint2 *)(x + r * stride + x_at(column)) = make_uint2(low, high);
    }
}

/// Brings x to shared memory as bf16; block 0 stores what others want of it.
DEVICE void stage_x(const FewRows &p, u16 *x, float *room, bool store) {
    int stride = x_stride(p.cols);
#pragma unroll 1
    for (int r = 0; r < p.count; r++) pad_x(x + r * stride, p.cols);
    if (p.gate) return stage_heads(p, x);
    if (p.numbers) {
        int chunks = p.cols / 8;
#pragma unroll 4
        for (int i = threadIdx.x; i < p.count * chunks; i += blockDim.x) {
            int r = i / chunks;
            *(uint4 *)(x + r * stride + x_at((i - r * chunks) * 8)) = ((const uint4 *)p.numbers)[i];
        }
        return;
    }
    int chunks = p.cols / 4;
#pragma unroll 2
    for (int i = threadIdx.x; i < p.count * chunks; i += blockDim.x) {
        int r = i / chunks, column = (i - r * chunks) * 4;
        float4 y = normed_at(p, r, column, room);
        uint2 pairs = make_uint2(bf16_pair(y.x, y.y), bf16_pair(y.z, y.w));
        *(uint2 *)(x + r * stride + x_at(column)) = pairs;
        if (store && p.rounded) ((uint2 *)p.rounded)[i] = pairs;
        if (store && p.normed) ((float4 *)p.normed)[i] = y;
    }
}

/// Outputs of a plain matrix, from normed rows. A warp for each output; x f32 in shared memory: [count, cols].
DEVICE void plain_rows(const FewRows &p, float *x, float *room) {
    int chunks = p.cols / 4;
#pragma unroll 2
    for (int i = threadIdx.x; i < p.count * chunks; i += blockDim.x) {
        int r = i / chunks;
        ((float4 *)x)[i] = normed_at(p, r, (i - r * chunks) * 4, room);
    }
    __syncthreads();
    int lane = threadIdx.x % 32, output = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (output >= p.plain_rows) return;
    bool second = output >= p.plain[0].rows;
    const Matrix &m = second ? p.plain[1] : p.plain[0];
    int row = second ? output - p.plain[0].rows : output;
    float sums[FEW];
#pragma unroll
    for (int r = 0; r < FEW; r++) sums[r] = 0.0f;
    with_type(m.type, All(), [&](auto type) {
        typedef decltype(type) T;
        if constexpr (T::LEN == 8) {
            const u8 *from = m.at + (long)row * m.row_bytes;
#pragma unroll 2
            for (int i = lane; i < p.cols / 8; i += 32) {
                float w[8];
                T::decode(from + i * T::BYTES, 0, w);
#pragma unroll
                for (int r = 0; r < FEW; r++) {
                    if (r >= p.count) continue;
                    const float4 *at = (const float4 *)(x + r * p.cols + i * 8);
                    float4 a = at[0], b = at[1];
                    sums[r] = fmaf(w[0], a.x, fmaf(w[1], a.y, fmaf(w[2], a.z, fmaf(w[3], a.w, sums[r]))));
                    sums[r] = fmaf(w[4], b.x, fmaf(w[5], b.y, fmaf(w[6], b.z, fmaf(w[7], b.w, sums[r]))));
                }
            }
        }
    });
#pragma unroll
    for (int r = 0; r < FEW; r++) {
        if (r >= p.count) continue;
        float sum = warp_sum(sums[r]);
        float *to = m.out + (long)r * p.out_stride + row;
        if (lane == 0) *to = p.add ? *to + sum : sum;
    }
}

/// A segment of a tile of one of the matrices.
struct Part {
    int tile, segment, segments, tiles, blocks;
    const u8 *from; // of the tile's first row, at the segment
    int matrix, first, rows, bytes; // first output, outputs there are, bytes of a row

    /// Looks up the matrix of the tile.
    DEVICE void place(const FewRows &p, Part &part) {
        part.matrix = 0;
        while (part.matrix < 3 && part.tile >= p.ends[part.matrix]) part.matrix++;
        const Matrix &m = p.matrices[part.matrix];
        part.first = (part.tile - (part.matrix > 0 ? p.ends[part.matrix - 1] : 0)) * TILE;
        part.rows = min(TILE, m.rows - part.first);
        part.from = m.at + (long)part.first * m.row_bytes;
        part.bytes = min(m.segment_bytes, m.row_bytes);
    }

    DEVICE bool exists(const Part &part) { return part.tile < part.tiles; }

    /// Goes on to the next segment, or the next tile of this block.
    DEVICE void advance(const FewRows &p, Part &part) {
        if (++part.segment < part.segments) {
            const Matrix &m = p.matrices[part.matrix];
            part.from += m.segment_bytes;
            part.bytes = min(m.segment_bytes, m.row_bytes - part.segment * m.segment_bytes);
            return;
        }
        part.segment = 0;
        part.tile += part.blocks;
        if (exists(part)) place(p, part);
    }
};

/// Grid: `plain_blocks`, then any number of blocks that take tiles in turns, of COUNT threads. Shared memory: x, COUNT / 32 · 16
/// · 8 floats, table, stages of a segment of a tile; blocks of plain matrices: x and as many floats.
template <int COUNT> DEVICE void few_by(const FewRows &p) {
    const int WARPS = COUNT / 32;
    extern __shared__ __align__(16) u8 shared[];
    next();
    u16 *x = (u16 *)shared;
    float *room = (float *)(shared + p.room_at);
    bool plain = (int)blockIdx.x < p.plain_blocks;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, type = -1;
    Part now;
    now.tile = plain ? 0 : blockIdx.x - p.plain_blocks, now.blocks = gridDim.x - p.plain_blocks, now.tiles = plain ? 0 : p.ends[3];
    now.segment = 0, now.segments = (p.cols + SEGMENT - 1) / SEGMENT;
    u8 *stages = shared + p.stages_at;
    if (Part::exists(now)) Part::place(p, now);
    // Runs ahead of `now` by as many parts as there are stages, but one.
    Part ahead = now;
    int slot = 0, ahead_slot = 0;
    auto bring = [&]() {
        if (Part::exists(ahead)) {
            copy_tile<COUNT>(stages + ahead_slot * p.stage_bytes, ahead.from, p.matrices[ahead.matrix].row_bytes, ahead.rows,
                             ahead.bytes);
            Part::advance(p, ahead);
        }
        ahead_slot = ahead_slot + 1 == p.stages ? 0 : ahead_slot + 1;
        copies_commit();
    };
#pragma unroll 1
    for (int i = 0; i < p.stages - 1; i++) bring();
    previous();
    if (!p.numbers && !p.gate) norm_scales(p, room);
    if (plain) {
        plain_rows(p, (float *)shared, room);
        return;
    }
    stage_x(p, x, room, blockIdx.x == p.plain_blocks);
    u32 *table = (u32 *)(shared + p.table_at);
    const u16 *own = x + min(lane / 4, p.count - 1) * x_stride(p.cols);
    float c[2][4] = {};
    while (Part::exists(now)) {
        bring();
        const Matrix &m = p.matrices[now.matrix];
        if (type != m.type) {
            type = m.type;
            with_type(type, All(), [&](auto type) { Run<decltype(type)>::fill_table(table); });
        }
        if (p.stages == 4) copies_wait<3>();
        else copies_wait<1>();
        __syncthreads();
        Pair rows = rows_of(stages + slot * p.stage_bytes, now.from, m.row_bytes, now.rows, now.bytes);
        int cols = min(SEGMENT, p.cols - now.segment * SEGMENT);
        with_type(type, All(), [&](auto type) {
            multiply_steps<decltype(type)>(c, rows, own + now.segment * (SEGMENT / 32 * RUN), cols, warp, WARPS, table);
        });
        if (now.segment == now.segments - 1) {
            float2 *to = (float2 *)(room + warp * TILE * FEW) + lane;
            to[0] = make_float2(c[0][0] + c[1][0], c[0][1] + c[1][1]);
            to[32] = make_float2(c[0][2] + c[1][2], c[0][3] + c[1][3]);
            __syncthreads();
            int row = threadIdx.x % TILE, r = threadIdx.x / TILE;
            if (r < p.count && row < now.rows) {
                float sum = 0.0f;
#pragma unroll 8
                for (int w = 0; w < WARPS; w++) sum += room[(w * TILE + row) * FEW + r];
                float *at = m.out + (long)r * p.out_stride + now.first + row;
                *at = p.add ? *at + sum : sum;
            }
#pragma unroll
            for (int i = 0; i < 8; i++) c[i / 4][i % 4] = 0.0f;
        }
        __syncthreads();
        Part::advance(p, now);
        slot = slot + 1 == p.stages ? 0 : slot + 1;
    }
}

/// For few tiles: a large block for each multiprocessor.
KERNEL __launch_bounds__(512, 1) void few_rows(__grid_constant__ const FewRows p) { few_by<512>(p); }

/// For many: two that wait in turns.
KERNEL __launch_bounds__(256, 2) void many_tiles(__grid_constant__ const FewRows p) { few_by<256>(p); }

/// Experts of a wave, one bit each.
struct Mask {
    u32 bits[32];
};

DEVICE bool has(const Mask &mask, u32 expert) { return mask.bits[expert / 32] >> (expert % 32) & 1; }

/// One matrix of all experts of a layer.
struct Experts {
    const u8 *at;        // expert 0's
    long stride;         // bytes from one expert to the next
    const u64 *places;   // of each expert's matrix instead; may be null
    int type, row_bytes;
};

DEVICE const u8 *matrix_of(const Experts &e, u32 expert) { return expert_at(e.at, e.stride, e.places, expert); }

struct ExpertsUp {
    Mask mask;
    Experts gate, up;
    const float *logits; // [count, …]: rows of `logits_stride` numbers, of which the first are of experts
    const u16 *x;        // [count, cols] bf16
    u32 *ids;            // [count, used], and so on: the choice, which block 0 of each row stores
    float *weights;
    u32 *order;
    u16 *out;            // [count, used, width] bf16: SiLU(gate · x) ⊙ (up · x)
    int width, cols, experts, used, logits_stride, count;
    int buffers;         // of tiles: one or two
    int room_at, table_at[2], keys_at, tiles_at;
};

const int ROWS_OF_BLOCK = UP_WARPS; // of x, at most

/// Chooses the experts of rows, and computes 16 inner numbers of one of them at a time. Any grid: blocks take neighbouring tiles
/// of experts of rows, of not more than ROWS_OF_BLOCK rows. Shared memory: x of a row, 8 · 16 floats, tables, keys of
/// `choose` for each row of a block, buffers of two tiles.
KERNEL __launch_bounds__(UP_THREADS, 3) void experts_up(__grid_constant__ const ExpertsUp p) {
    extern __shared__ __align__(16) u8 shared[];
    __shared__ u32 ids[ROWS_OF_BLOCK][32], order[ROWS_OF_BLOCK][32];
    __shared__ float weights[ROWS_OF_BLOCK][32];
    next();
    u16 *x = (u16 *)shared;
    float *room = (float *)(shared + p.room_at);
    u32 *tables[2] = {(u32 *)(shared + p.table_at[0]), (u32 *)(shared + p.table_at[1])}, *keys = (u32 *)(shared + p.keys_at);
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int tiles = (p.width + TILE - 1) / TILE, of_row = tiles * p.used, items = of_row * p.count;
    int each = (items + gridDim.x - 1) / gridDim.x, first = blockIdx.x * each, end = min(first + each, items);
    if (first >= end) return;
    with_type(p.gate.type, All(), [&](auto type) { Run<decltype(type)>::fill_table(tables[0]); });
    if (p.up.type != p.gate.type) {
        with_type(p.up.type, All(), [&](auto type) { Run<decltype(type)>::fill_table(tables[1]); });
    }
    int first_row = first / of_row, rows = (end - 1) / of_row - first_row + 1;
    auto stage = [&](long row) {
        for (int i = threadIdx.x * 8; i < p.cols; i += UP_THREADS * 8) *(uint4 *)(x + x_at(i)) = *(const uint4 *)(p.x + row * p.cols + i);
        pad_x(x, p.cols);
    };
    previous();
    if (warp < rows) {
        long row = first_row + warp;
        choose(p.logits + row * p.logits_stride, p.experts, p.used, keys + warp * p.experts, ids[warp], weights[warp], order[warp]);
        __syncwarp();
        // The block that has a row's first tile stores the choice.
        int at = (int)row * p.used + lane;
        if (lane < p.used && row * of_row >= first) {
            p.ids[at] = ids[warp][lane], p.weights[at] = weights[warp][lane], p.order[at] = order[warp][lane];
        }
    }
    stage(first_row);
    __syncthreads();
    // What an item is: whether this wave has its expert, and where its rows of gate and up begin.
    int bytes_of[2] = {TILE * window(p.gate.row_bytes), TILE * window(p.up.row_bytes)}, which = warp / (UP_WARPS / 2);
    auto expert_of = [&](int item, int &row, int &rank, int &tile) {
        row = item / of_row, rank = (item - row * of_row) / tiles, tile = item % tiles;
        return ids[row - first_row][rank];
    };
    auto rows_from = [&](const Experts &e, u32 expert, int tile) { return matrix_of(e, expert) + (long)tile * TILE * e.row_bytes; };
    auto bring = [&](int item) {
        int row, rank, tile;
        if (item < end) {
            u32 expert = expert_of(item, row, rank, tile);
            if (has(p.mask, expert)) {
                int count = min(TILE, p.width - tile * TILE);
                u8 *to = shared + p.tiles_at + (p.buffers == 2 ? (item - first) % 2 : 0) * (bytes_of[0] + bytes_of[1]);
                copy_tile<UP_THREADS>(to, rows_from(p.gate, expert, tile), p.gate.row_bytes, count, p.gate.row_bytes);
                copy_tile<UP_THREADS>(to + bytes_of[0], rows_from(p.up, expert, tile), p.up.row_bytes, count, p.up.row_bytes);
            }
        }
        copies_commit();
    };
    bring(first);
    int staged = first_row;
#pragma unroll 1
    for (int item = first; item < end; item++) {
        if (p.buffers == 2) bring(item + 1);
        int row, rank, tile;
        u32 expert = expert_of(item, row, rank, tile);
        bool here = has(p.mask, expert);
        if (row != staged) {
            stage(row);
            staged = row;
        }
        if (p.buffers == 2) copies_wait<1>();
        else copies_wait<0>();
        __syncthreads();
        if (here) {
            int count = min(TILE, p.width - tile * TILE), bytes = which ? p.up.row_bytes : p.gate.row_bytes;
            const u8 *at = shared + p.tiles_at + (p.buffers == 2 ? (item - first) % 2 : 0) * (bytes_of[0] + bytes_of[1]);
            Pair pair = rows_of(at + (which ? bytes_of[0] : 0), rows_from(which ? p.up : p.gate, expert, tile), bytes, count, bytes);
            float c[2][4] = {};
            with_type(which ? p.up.type : p.gate.type, All(), [&](auto type) {
                multiply_steps<decltype(type)>(c, pair, x, p.cols, warp % (UP_WARPS / 2), UP_WARPS / 2, which ? tables[1] : tables[0]);
            });
            // Every column of the product is the same row of x: the first one counts.
            if (lane % 4 == 0) {
                room[warp * TILE + lane / 4] = c[0][0] + c[1][0];
                room[warp * TILE + lane / 4 + 8] = c[0][2] + c[1][2];
            }
        }
        __syncthreads();
        if (here && threadIdx.x < TILE) {
            // Found out again: registers are scarce while decoding.
            int same = item;
            asm volatile("" : "+r"(same));
            expert_of(same, row, rank, tile);
            float gate = 0.0f, up = 0.0f;
            for (int w = 0; w < UP_WARPS / 2; w++) {
                gate += room[w * TILE + threadIdx.x];
                up += room[(w + UP_WARPS / 2) * TILE + threadIdx.x];
            }
            int output = tile * TILE + threadIdx.x;
            if (output < p.width) p.out[((long)row * p.used + rank) * p.width + output] = bf16(silu(gate) * up);
        }
        if (p.buffers == 1) bring(item + 1);
    }
}

struct ExpertsDown {
    Mask mask;
    Experts down;
    Matrix shared;            // the shared expert's down
    const u16 *x;             // [count, used, cols]
    const float *gate, *up;   // of the shared expert: [count, …] rows of `inner_stride`
    const float *share;       // [count] of rows of `inner_stride`: sigmoid of it times the shared expert's output
    const u32 *ids, *order;   // [count, used]
    const float *weights;     // [count, used]
    float *sum;               // [count, rows]: left by the wave before, and for the next
    float *hidden;            // [count, rows]
    int rows, cols, used, shared_cols, inner_stride, count;
    int first, last, abreast; // whether this is the first and the last wave; experts in shared memory at a time
    int buffers, by;          // of their tiles: one or two; threads for a row of a tile, a power of two up to 32
    int room_at, table_at[2], tiles_at;
};

/// sum = share · shared expert + Σ weight · down · x over the chosen experts, ascending; after the last wave it joins the
/// residual. A block computes 16 numbers of FEW rows. Grid: (rows / 16, count / FEW). Shared memory: x of the experts abreast and
/// of the shared one, sums of their steps, tables, the tile of the shared one, buffers of their tiles.
KERNEL __launch_bounds__(THREADS, 1) void experts_down(__grid_constant__ const ExpertsDown p) {
    extern __shared__ __align__(16) u8 shared[];
    __shared__ const u8 *matrices[FEW][32]; // of the chosen experts, ascending; null: not of this wave
    __shared__ u32 pairs[FEW][32];
    __shared__ float weights[FEW][32];
    next();
    u16 *x = (u16 *)shared;
    float *room = (float *)(shared + p.room_at);
    u32 *tables[2] = {(u32 *)(shared + p.table_at[0]), (u32 *)(shared + p.table_at[1])};
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = blockIdx.x * TILE, count = min(TILE, p.rows - first);
    int base = blockIdx.y * FEW, groups = (p.used + p.abreast - 1) / p.abreast, parts = min(FEW, p.count - base) * groups;
    u8 *shared_tile = shared + p.tiles_at, *tiles = shared_tile + TILE * window(p.shared.row_bytes);
    const u8 *at = p.shared.at + (long)first * p.shared.row_bytes;
    if (p.first) copy_tile<THREADS>(shared_tile, at, p.shared.row_bytes, count, p.shared.row_bytes);
    with_type(p.down.type, All(), [&](auto type) { Run<decltype(type)>::fill_table(tables[0]); });
    if (p.shared.type != p.down.type) {
        with_type(p.shared.type, All(), [&](auto type) { Run<decltype(type)>::fill_table(tables[1]); });
    }
    previous();
    if (warp * groups < parts && lane < p.used) {
        long row = (long)(base + warp) * p.used;
        u32 pair = p.order[row + lane], expert = p.ids[row + pair];
        pairs[warp][lane] = row + pair;
        weights[warp][lane] = p.weights[row + pair];
        matrices[warp][lane] = has(p.mask, expert) ? matrix_of(p.down, expert) + (long)first * p.down.row_bytes : 0;
    }
    __syncthreads();
    int steps = steps_of(p.cols), stride = TILE * window(p.down.row_bytes), row_x = x_stride(p.cols), chunks = p.cols / 8;
    int shared_steps = p.first ? steps_of(p.shared_cols) : 0;
    // Copies a part: the tiles of the experts abreast, for one row.
    auto bring = [&](int part) {
        int r = part / groups, start = part % groups * p.abreast, rows = min(p.abreast, p.used - start) * TILE;
        u8 *to = tiles + (p.buffers == 2 ? part % 2 : 0) * p.abreast * stride;
#pragma unroll 2
        for (int i = threadIdx.x / p.by; part < parts && i < rows; i += THREADS / p.by) {
            const u8 *from = matrices[r][start + i / TILE];
            if (!from) continue;
            from += min(i % TILE, count - 1) * p.down.row_bytes;
            int words = ((int)((u64)from & 15) + p.down.row_bytes + 15) / 16;
            u32 row = shared_address(to + i / TILE * stride + i % TILE * (stride / TILE));
            from = (const u8 *)((u64)from & ~15ull);
            for (int word = threadIdx.x % p.by; word < words; word += p.by) copy_16(row + 16 * word, from + 16 * word, true);
        }
        copies_commit();
    };
    bring(0);
    u16 *shared_x = x + p.abreast * row_x;
    float total = 0.0f;
#pragma unroll 1
    for (int part = 0; part < parts; part++) {
        int r = part / groups, start = part % groups * p.abreast, experts = min(p.abreast, p.used - start);
        int own_steps = start == 0 ? shared_steps : 0;
        long row = base + r, place = row * p.rows + first + threadIdx.x;
        if (p.buffers == 2) bring(part + 1);
        for (int i = threadIdx.x; i < experts * chunks; i += THREADS) {
            int e = i / chunks, column = (i - e * chunks) * 8;
            *(uint4 *)(x + e * row_x + x_at(column)) = *(const uint4 *)(p.x + (long)pairs[r][start + e] * p.cols + column);
        }
        if (p.cols % 128) {
#pragma unroll 1
            for (int e = 0; e < experts; e++) pad_x(x + e * row_x, p.cols);
        }
        if (own_steps) {
            const float *gate = p.gate + row * p.inner_stride, *up = p.up + row * p.inner_stride;
            for (int i = threadIdx.x; i < p.shared_cols; i += THREADS) shared_x[x_at(i)] = bf16(silu(gate[i]) * up[i]);
            pad_x(shared_x, p.shared_cols);
        }
        if (p.buffers == 2) copies_wait<1>();
        else copies_wait<0>();
        __syncthreads();
        // Steps of all experts, then those of the shared one, go to the warps in turns.
        const u8 *own = tiles + (p.buffers == 2 ? part % 2 : 0) * p.abreast * stride;
#pragma unroll 1
        for (int item = warp; item < experts * steps + own_steps; item += WARPS) {
            int e = item / steps, step = item - e * steps;
            float c[2][4] = {};
            if (e < experts) {
                const u8 *from = matrices[r][start + e];
                if (!from) continue;
                Pair rows = rows_of(own + e * stride, from, p.down.row_bytes, count, p.down.row_bytes);
                with_type(p.down.type, All(), [&](auto type) {
                    multiply_steps<decltype(type)>(c, rows, x + e * row_x, p.cols, step, steps, tables[0]);
                });
            } else {
                Pair rows = rows_of(shared_tile, at, p.shared.row_bytes, count, p.shared.row_bytes);
                with_type(p.shared.type, All(), [&](auto type) {
                    multiply_steps<decltype(type)>(c, rows, shared_x, p.shared_cols, item - experts * steps, shared_steps, tables[1]);
                });
            }
            if (lane % 4 == 0) {
                room[item * TILE + lane / 4] = c[0][0] + c[1][0];
                room[item * TILE + lane / 4 + 8] = c[0][2] + c[1][2];
            }
        }
        __syncthreads();
        if (p.buffers == 1) bring(part + 1);
        if (threadIdx.x >= count) continue;
        if (start == 0) {
            total = p.first ? 0.0f : p.sum[place];
#pragma unroll 4
            for (int step = 0; step < own_steps; step++) total += room[(experts * steps + step) * TILE + threadIdx.x];
            if (p.first) total *= sigmoid(p.share[row * p.inner_stride]);
        }
#pragma unroll 2
        for (int e = 0; e < experts; e++) {
            if (!matrices[r][start + e]) continue;
            float dot = 0.0f;
#pragma unroll 4
            for (int step = 0; step < steps; step++) dot += room[(e * steps + step) * TILE + threadIdx.x];
            total = fmaf(weights[r][start + e], dot, total);
        }
        if (start + experts < p.used) continue;
        if (p.last) p.hidden[place] += total;
        else p.sum[place] = total;
    }
}
