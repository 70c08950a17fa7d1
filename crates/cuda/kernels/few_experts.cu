// Experts of up to eight rows of x (`few.cuh`): their choice, gate and up, and down.

const int THREADS = 512, WARPS = THREADS / 32; // of a block of `experts_down`
const int UP_THREADS = 256, UP_WARPS = UP_THREADS / 32;

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
