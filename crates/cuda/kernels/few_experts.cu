// Experts of up to eight rows of x: their choice, gate and up, and down, on the integer tensor cores.
//
// Weights of blocks are whole numbers of a byte times scales (`whole.cuh`). x becomes three whole numbers of a byte too, planes of
// 2^0, 2^8, 2^16 that hold 23 bits counted from the largest of 256 numbers: more than bf16, and a product's eight columns have
// room for them. So sums of products are exact within a block of 256 weights, and are scaled once for each run of 32.
//
// A warp multiplies sixteen rows (two halves of eight, of matrices of any two types) by 256 columns, a step, whose blocks have
// come to its own part of shared memory in file form by copies of 16 bytes. Lane l holds eight weights of a run, 8 (l % 4) on, of
// rows l / 4 of both halves. Of the eight columns the first four are planes of x in the first half of every run and zeros in
// the second one, the last four the other way: each of the lanes of a row then has sums of one half alone, whose scale it knows.
//
// A result depends on its row of x and its row of weights alone. Plain numbers are multiplied in f32, as they lie.

const int UP_PARTS = 4;       // warps that share the columns of an item of `experts_up`
const int UP_THREADS = 640;   // of a block of it, at most
const int DOWN_THREADS = 704; // of a block of `experts_down`, at most
const int PLANES = 784;       // bytes of 256 numbers of x: three planes, their scale

/// Experts of a wave, one bit each.
struct Mask {
    u32 bits[32];
};

DEVICE bool has(const Mask &mask, u32 expert) { return mask.bits[expert / 32] >> (expert % 32) & 1; }

/// One matrix of all experts of a layer, or of one that is the same for all rows.
struct Experts {
    const u8 *at;        // expert 0's
    long stride;         // bytes from one expert to the next
    const u64 *places;   // of each expert's matrix instead; may be null
    int type, row_bytes; // type: its place in TYPES
    int span, plain;     // bytes of 256 weights; whether they are numbers, which stay where they are
};

DEVICE const u8 *matrix_of(const Experts &e, u32 expert) { return expert_at(e.at, e.stride, e.places, expert); }

/// Eight rows of weights; where there are fewer, the last one again.
struct Half {
    const u8 *at;
    int count, type, row_bytes, span, plain;
};

DEVICE Half half_of(const Experts &e, const u8 *matrix, int first, int rows) {
    Half h;
    h.at = matrix + (long)min(first, rows - 1) * e.row_bytes;
    h.count = max(min(8, rows - first), 1);
    h.type = e.type, h.row_bytes = e.row_bytes, h.span = e.span, h.plain = e.plain;
    return h;
}

/// Where row `i` of a half begins, at span `span`.
DEVICE const u8 *row_of(const Half &h, int i, int span) { return h.at + (long)min(i, h.count - 1) * h.row_bytes + span * h.span; }

/// Begins to copy a step of two halves to `to`.
DEVICE void bring_step(u8 *to, const Half &low, const Half &high, int span) {
    int lane = threadIdx.x % 32, i = lane / 2 % 8;
    const Half &h = lane < 16 ? low : high;
    if (h.plain) return;
    const u8 *from = row_of(h, i, span);
    u8 *row = to + (lane < 16 ? 0 : 8 * window(low.span)) + i * window(h.span);
    int words = ((int)((u64)from & 15) + min(h.span, h.row_bytes - span * h.span) + 15) / 16;
    from = (const u8 *)((u64)from & ~15ull);
#pragma unroll 4
    for (int w = lane % 2; w < words; w += 2) copy_16(shared_address(row + 16 * w), from + 16 * w, true);
}

/// This lane's row of a half, copied or where it lies. `to`: where the half was copied to.
DEVICE const u8 *own_row(const u8 *to, const Half &h, int span) {
    int i = threadIdx.x % 32 / 4;
    const u8 *from = row_of(h, i, span);
    return h.plain ? from : to + i * window(h.span) + ((u64)from & 15);
}

/// Stores 256 numbers of x as whole ones, eight of each lane: number = whole · scale.
DEVICE void store_planes(u8 *planes, const float x[8]) {
    u32 most = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) most = max(most, __float_as_uint(x[i]) & 0x7fffffffu);
    most = __reduce_max_sync(~0u, most);
    // The largest has 22 bits; what is no number stays none.
    u32 exponent = max(most >> 23, 30u);
    float up = __uint_as_float((127 + 21 + 127 - exponent) << 23);
    float scale = __uint_as_float(most >> 23 == 255 ? 0x7fffffffu : (exponent - 21) << 23);
    u32 whole[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        // As the mantissa of a float, then with every byte's zero moved to 128.
        whole[i] = __float_as_uint(fmaf(x[i], up, 12582912.0f)) + (0x808080u - 0x400000u);
    }
    uint2 *to = (uint2 *)planes + threadIdx.x % 32;
    u32 words[3][2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const u32 *v = whole + 4 * i;
        u32 low = permute(v[0], v[1], 0x5140), high = permute(v[2], v[3], 0x5140);
        words[0][i] = permute(low, high, 0x5410) ^ 0x80808080u;
        words[1][i] = permute(low, high, 0x7632) ^ 0x80808080u;
        words[2][i] = permute(permute(v[0], v[1], 0x0062), permute(v[2], v[3], 0x0062), 0x5410) ^ 0x80808080u;
    }
#pragma unroll
    for (int p = 0; p < 3; p++) to[32 * p] = make_uint2(words[p][0], words[p][1]);
    if (threadIdx.x % 32 == 0) *(float *)(planes + 768) = scale;
}

/// c = a · b: a [16, 32], b [32, 8], of whole numbers of a byte.
///
/// Lane l holds of a rows l / 4 (a0, a2) and l / 4 + 8 (a1, a3), of c these rows (c0, c1; c2, c3), columns 2 (l % 4) and the next.
DEVICE void multiply_whole(int c[4], const u32 a[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
        : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(0));
}

/// What this lane's sums of planes come to, for the lanes of the row to be added up.
DEVICE float joined(const int sums[2]) {
    return threadIdx.x % 2 ? (float)sums[0] * 65536.0f : fmaf((float)sums[1], 256.0f, (float)sums[0]);
}

/// sums += this lane's part of low · x and high · x, over the first `runs` runs of a span.
template <class T> DEVICE void multiply_span(float sums[2], const u8 *low, const u8 *high, const u8 *planes, int runs, const u32 *table) {
    typedef Whole<T> W;
    int lane = threadIdx.x % 32, q = lane % 4, column = lane / 4;
    // Column 3 and 7, and the other half's, are zeros.
    bool own = column / 4 == q / 2 && column % 4 < 3;
    const uint2 *x = (const uint2 *)(planes + (own ? column % 4 * 256 : 0)) + q;
    const u8 *rows[2] = {low, high};
    int whole[4] = {}, mins[4] = {};
    float parts[2] = {};
    auto join = [&](int r) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float scale, min = 0.0f;
            W::factors(rows[h] + r * T::BYTES, scale, min);
            parts[h] = fmaf(scale, joined(whole + 2 * h), parts[h]);
            if (W::MIN) parts[h] = fmaf(-min, joined(mins + 2 * h), parts[h]);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) whole[i] = 0, mins[i] = 0;
    };
#pragma unroll
    for (int r = 0; r < 8; r++) {
        if (T::LEN == 32 && r >= runs) break;
        uint2 b = x[4 * r];
        if (!own) b = make_uint2(0, 0);
        u32 a[4];
        int scale[2] = {1, 1}, min[2] = {1, 1}, c[4];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            u32 out[2];
            W::decode(T::LEN == 32 ? rows[h] + r * T::BYTES : rows[h], T::LEN == 32 ? 0 : r, q, table, out, scale[h], min[h]);
            a[h] = out[0], a[h + 2] = out[1];
        }
        multiply_whole(c, a, b.x, b.y);
#pragma unroll
        for (int i = 0; i < 4; i++) whole[i] += c[i] * scale[i / 2];
        if (W::MIN) {
            u32 ones[4] = {0x01010101u, 0x01010101u, 0x01010101u, 0x01010101u};
            multiply_whole(c, ones, b.x, b.y);
#pragma unroll
            for (int i = 0; i < 4; i++) mins[i] += c[i] * min[i / 2];
        }
        if (T::LEN == 32) join(r);
    }
    if (T::LEN == 256) join(0);
    float scale = *(const float *)(planes + 768);
    sums[0] = fmaf(scale, parts[0], sums[0]), sums[1] = fmaf(scale, parts[1], sums[1]);
}

/// The same of plain numbers.
template <class T> DEVICE void multiply_plain(float sums[2], const u8 *low, const u8 *high, const u8 *planes, int columns) {
    int q = threadIdx.x % 4;
    float scale = *(const float *)(planes + 768);
#pragma unroll 1
    for (int first = 8 * q; first < columns; first += 32) {
        float a[8], b[8];
        T::decode(low + first / 8 * T::BYTES, 0, a);
        T::decode(high + first / 8 * T::BYTES, 0, b);
        const signed char *x = (const signed char *)planes + first;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            float whole = (float)(x[i] + 256 * x[256 + i] + 65536 * x[512 + i]) * scale;
            sums[0] = fmaf(a[i], whole, sums[0]), sums[1] = fmaf(b[i], whole, sums[1]);
        }
    }
}

/// sums += a step: this lane's part of its two rows of type number `type`.
DEVICE void multiply_step(float sums[2], int type, const u8 *low, const u8 *high, const u8 *planes, int columns, const u32 *table) {
    with_type(type, All(), [&](auto type) {
        typedef decltype(type) T;
        if constexpr (T::LEN == 8) multiply_plain<T>(sums, low, high, planes, columns);
        else multiply_span<T>(sums, low, high, planes, (columns + 31) / 32, table);
    });
}

DEVICE void fill_table_of(int type, u32 *table) {
    with_type(type, All(), [&](auto type) {
        typedef decltype(type) T;
        if constexpr (T::LEN > 8) Whole<T>::fill_table(table);
    });
}

/// The sum over the four lanes of a row.
DEVICE float row_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

DEVICE int spans_of(int cols) { return (cols + 255) / 256; }

/// Waits for the oldest step of those in flight, by all lanes of a warp.
DEVICE void step_wait(int stages) {
    if (stages == 2) copies_wait<1>();
    else copies_wait<2>();
    __syncwarp();
}

struct ExpertsUp {
    Mask mask;
    Experts gate, up;
    const float *logits;                    // [count, …]: rows of `logits_stride` numbers, of which the first are of experts
    const u16 *x;                           // [count, cols] bf16
    u32 *ids;                               // [count, used], and so on: the choice, stored by the block with a row's first item
    float *weights;
    u32 *order;
    float *out;                             // [count, used, width]: SiLU(gate · x) ⊙ (up · x)
    const float *shared_gate, *shared_up;   // of the shared expert: [count, …] rows of `logits_stride`
    float *shared_out;                      // [count, shared_cols]: SiLU(gate) ⊙ up
    int width, cols, experts, used, logits_stride, count, shared_cols;
    int stages, stage_bytes;                // steps in shared memory for each warp: two or three
    int table_at[2], planes_at, keys_at, stages_at;
};

const int ROWS_OF_BLOCK = 8; // of x, at most

/// Chooses the experts of rows, and computes 8 inner numbers of one of them at a time, an item, by UP_PARTS warps. Any grid: blocks
/// take neighbouring items, of not more than ROWS_OF_BLOCK rows. Shared memory: tables, for each warp planes of its columns, keys
/// of `choose` for each row of a block, for each warp its steps.
KERNEL __launch_bounds__(UP_THREADS, 1) void experts_up(__grid_constant__ const ExpertsUp p) {
    extern __shared__ __align__(16) u8 shared[];
    __shared__ u32 ids[ROWS_OF_BLOCK][32], order[ROWS_OF_BLOCK][32];
    __shared__ float weights[ROWS_OF_BLOCK][32], room[2][UP_THREADS / 32][16];
    next();
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = warp / UP_PARTS, part = warp % UP_PARTS;
    int groups = blockDim.x / 32 / UP_PARTS, spans = spans_of(p.cols), own_spans = (spans - part + UP_PARTS - 1) / UP_PARTS;
    int tiles = (p.width + 7) / 8, of_row = tiles * p.used, items = of_row * p.count;
    int each = (items + gridDim.x - 1) / gridDim.x, first = blockIdx.x * each, end = min(first + each, items);
    int blocks = (items + each - 1) / each;
    if (first >= end) return;
    u32 *tables[2] = {(u32 *)(shared + p.table_at[0]), (u32 *)(shared + p.table_at[1])};
    bool mixed = p.gate.type != p.up.type;
    fill_table_of(p.gate.type, tables[0]);
    if (mixed) fill_table_of(p.up.type, tables[1]);
    u8 *planes = shared + p.planes_at + warp * ((spans + UP_PARTS - 1) / UP_PARTS) * PLANES;
    u8 *stages = shared + p.stages_at + warp * p.stages * p.stage_bytes;
    auto stage_x = [&](int row) {
#pragma unroll 2
        for (int j = 0; j < own_spans; j++) {
            int column = (part + j * UP_PARTS) * 256 + lane * 8;
            uint4 v = column < p.cols ? *(const uint4 *)(p.x + (long)row * p.cols + column) : make_uint4(0, 0, 0, 0);
            u32 pairs[4] = {v.x, v.y, v.z, v.w};
            float x[8];
#pragma unroll
            for (int i = 0; i < 8; i++) x[i] = bf16_value((u16)(pairs[i / 2] >> (i % 2 * 16)));
            store_planes(planes + j * PLANES, x);
        }
    };
    int first_row = first / of_row, rows = (end - 1) / of_row - first_row + 1, staged = first_row;
    previous();
    if (warp < rows) {
        u32 *keys = (u32 *)(shared + p.keys_at) + warp * p.experts;
        long row = first_row + warp;
        choose(p.logits + row * p.logits_stride, p.experts, p.used, keys, ids[warp], weights[warp], order[warp]);
        __syncwarp();
        int at = (int)row * p.used + lane;
        if (lane < p.used && row * of_row >= first) {
            p.ids[at] = ids[warp][lane], p.weights[at] = weights[warp][lane], p.order[at] = order[warp][lane];
        }
    } else {
        stage_x(staged);
    }
    __syncthreads();
    // What an item is, and the next one of this group of an expert that this wave has.
    auto expert_of = [&](int item) { return ids[item / of_row - first_row][item % of_row / tiles]; };
    auto present = [&](int item) {
        while (item < end && !has(p.mask, expert_of(item))) item += groups;
        return item;
    };
    auto half = [&](const Experts &e, int item) { return half_of(e, matrix_of(e, expert_of(item)), item % tiles * 8, p.width); };
    int ahead = present(first + group), ahead_span = 0, ahead_slot = 0, slot = 0;
    auto bring = [&]() {
        if (ahead < end && own_spans > 0) {
            bring_step(stages + ahead_slot * p.stage_bytes, half(p.gate, ahead), half(p.up, ahead), part + ahead_span * UP_PARTS);
            if (++ahead_span == own_spans) ahead_span = 0, ahead = present(ahead + groups);
        }
        ahead_slot = ahead_slot + 1 == p.stages ? 0 : ahead_slot + 1;
        copies_commit();
    };
    for (int i = 0; i < p.stages; i++) bring();
    if (warp < rows) stage_x(staged);
    // The block's share of the shared expert's inner numbers.
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < p.count * p.shared_cols; i += blocks * blockDim.x) {
        long from = (long)(i / p.shared_cols) * p.logits_stride + i % p.shared_cols;
        p.shared_out[i] = silu(p.shared_gate[from]) * p.shared_up[from];
    }
    int turn = 0;
#pragma unroll 1
    for (int item = present(first + group); item < end; item = present(item + groups), turn ^= 1) {
        int row = item / of_row;
        if (row != staged) {
            __syncwarp();
            stage_x(row);
            staged = row;
        }
        float sums[2] = {};
#pragma unroll 1
        for (int j = 0; j < own_spans; j++) {
            int span = part + j * UP_PARTS, columns = min(256, p.cols - span * 256);
            step_wait(p.stages);
            const u8 *at = stages + slot * p.stage_bytes;
            const u8 *low = own_row(at, half(p.gate, item), span), *high = own_row(at + 8 * window(p.gate.span), half(p.up, item), span);
            // Matrices of two types: each with itself, and half of it is left unused.
            float twice[2][2] = {};
#pragma unroll 1
            for (int i = 0; i <= (int)mixed; i++) {
                float both[2] = {};
                multiply_step(both, i ? p.up.type : p.gate.type, i ? high : low, mixed && !i ? low : high, planes + j * PLANES, columns,
                              tables[i]);
                if (i == 0) twice[0][0] = both[0], twice[0][1] = both[1];
                else twice[0][1] = both[1];
            }
            sums[0] += twice[0][0], sums[1] += twice[0][1];
            __syncwarp();
            bring();
            slot = slot + 1 == p.stages ? 0 : slot + 1;
        }
        float low = row_sum(sums[0]), high = row_sum(sums[1]);
        if (lane % 4 == 0) room[turn][warp][lane / 4] = low, room[turn][warp][lane / 4 + 8] = high;
        asm volatile("bar.sync %0, %1;" ::"r"(1 + group), "r"(32 * UP_PARTS) : "memory");
        if (part == 0 && lane < 8) {
            float gate = 0.0f, up = 0.0f;
#pragma unroll
            for (int i = 0; i < UP_PARTS; i++) gate += room[turn][warp + i][lane], up += room[turn][warp + i][lane + 8];
            int output = item % tiles * 8 + lane;
            if (output < p.width) p.out[(long)item / tiles * p.width + output] = silu(gate) * up;
        }
    }
}

struct ExpertsDown {
    Mask mask;
    Experts down, shared;         // of the routed experts, and of the shared one
    const float *x;               // [count, used, cols]
    const float *shared_x;        // [count, shared_cols]
    const float *share;           // [count] of rows of `share_stride`: sigmoid of it times the shared expert's output
    const u32 *ids, *order;       // [count, used]
    const float *weights;         // [count, used]
    float *sum;                   // [count, rows]: left by the wave before, and for the next
    float *hidden;                // [count, rows]
    int rows, cols, used, shared_cols, share_stride, count;
    int first, last;              // whether this is the first and the last wave
    int stages, stage_bytes;      // steps in shared memory for each warp: two or three
    int table_at[2], planes_at, room_at, shared_at, stages_at;
};

/// sum = share · shared expert + Σ weight · down · x over the chosen experts, ascending; after the last wave it joins the
/// residual. A block computes 16 numbers of FEW rows; steps of a row, those of all experts, then those of the shared one, go to its
/// warps in turns. Grid: (rows / 16, count / FEW). Shared memory: tables, for each warp planes of a step, twice sums of all steps
/// of a row, the tile of the shared expert, for each warp its steps: tile and x.
KERNEL __launch_bounds__(DOWN_THREADS, 1) void experts_down(__grid_constant__ const ExpertsDown p) {
    extern __shared__ __align__(16) u8 shared[];
    __shared__ const u8 *matrices[FEW][32]; // of the chosen experts, ascending; null: not of this wave
    __shared__ u32 pairs[FEW][32];
    __shared__ float weights[FEW][32];
    next();
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32, first = blockIdx.x * TILE;
    int base = blockIdx.y * FEW, count = min(FEW, p.count - base);
    int spans = spans_of(p.cols), routed = p.used * spans, shared_spans = p.first ? spans_of(p.shared_cols) : 0;
    int steps = routed + shared_spans;
    u32 *tables[2] = {(u32 *)(shared + p.table_at[0]), (u32 *)(shared + p.table_at[1])};
    float *room = (float *)(shared + p.room_at);
    u8 *planes = shared + p.planes_at + warp * PLANES, *stages = shared + p.stages_at + warp * p.stages * p.stage_bytes;
    fill_table_of(p.down.type, tables[0]);
    if (p.shared.type != p.down.type) fill_table_of(p.shared.type, tables[1]);
    auto shared_tile = [&](int span) { return shared + p.shared_at + span * TILE * window(p.shared.span); };
    auto shared_half = [&](int which) { return half_of(p.shared, p.shared.at, first + 8 * which, p.rows); };
    // A step is always the same warp's: it brings its tile of the shared expert, for all rows.
    for (int step = warp; step < steps; step += warps) {
        if (step >= routed) bring_step(shared_tile(step - routed), shared_half(0), shared_half(1), step - routed);
    }
    previous();
    if (warp < count && lane < p.used) {
        long row = (long)(base + warp) * p.used;
        u32 pair = p.order[row + lane], expert = p.ids[row + pair];
        pairs[warp][lane] = row + pair;
        weights[warp][lane] = p.weights[row + pair];
        matrices[warp][lane] = has(p.mask, expert) ? matrix_of(p.down, expert) : 0;
    }
    __syncthreads();
    auto absent = [&](int r, int step) { return step < routed && !matrices[r][step / spans]; };
    // Steps of a warp: of row after row.
    auto advance = [&](int &r, int &step) {
        do {
            step += warps;
            if (step >= steps) step = warp, r++;
        } while (r < count && (step >= steps || absent(r, step)));
    };
    auto half = [&](int r, int step, int which) {
        return step < routed ? half_of(p.down, matrices[r][step / spans], first + 8 * which, p.rows) : shared_half(which);
    };
    auto span_of = [&](int step) { return step < routed ? step % spans : step - routed; };
    int r = 0, step = warp - warps;
    advance(r, step);
    int ahead_r = r, ahead_step = step, ahead_slot = 0, slot = 0, x_at = p.stage_bytes - 1024;
    auto bring = [&]() {
        if (ahead_r < count) {
            u8 *to = stages + ahead_slot * p.stage_bytes;
            bool own = ahead_step < routed;
            int span = span_of(ahead_step), cols = own ? p.cols : p.shared_cols;
            if (own) bring_step(to, half(ahead_r, ahead_step, 0), half(ahead_r, ahead_step, 1), span);
            const float *x = own ? p.x + (long)pairs[ahead_r][ahead_step / spans] * p.cols : p.shared_x + (long)(base + ahead_r) * cols;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int column = span * 256 + i * 128 + lane * 4;
                copy_16(shared_address(to + x_at + i * 512 + lane * 16), x + (column < cols ? column : 0), column < cols);
            }
            advance(ahead_r, ahead_step);
        }
        ahead_slot = ahead_slot + 1 == p.stages ? 0 : ahead_slot + 1;
        copies_commit();
    };
    for (int i = 0; i < p.stages; i++) bring();
#pragma unroll 1
    for (int row = 0; row < count; row++) {
        float *sums_at = room + row % 2 * steps * TILE;
        while (r == row) {
            bool own = step < routed;
            int span = span_of(step), columns = min(256, (own ? p.cols : p.shared_cols) - span * 256);
            step_wait(p.stages);
            const u8 *at = stages + slot * p.stage_bytes;
            const float4 *from = (const float4 *)(at + x_at) + 2 * lane;
            float4 a = from[0], b = from[1];
            float x[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}, sums[2] = {};
            store_planes(planes, x);
            __syncwarp();
            if (!own) at = shared_tile(span);
            const u8 *low = own_row(at, half(r, step, 0), span);
            const u8 *high = own_row(at + 8 * window(own ? p.down.span : p.shared.span), half(r, step, 1), span);
            multiply_step(sums, own ? p.down.type : p.shared.type, low, high, planes, columns, own ? tables[0] : tables[1]);
            float low_sum = row_sum(sums[0]), high_sum = row_sum(sums[1]);
            if (lane % 4 == 0) sums_at[step * TILE + lane / 4] = low_sum, sums_at[step * TILE + lane / 4 + 8] = high_sum;
            __syncwarp();
            bring();
            slot = slot + 1 == p.stages ? 0 : slot + 1;
            advance(r, step);
        }
        __syncthreads();
        if (warp != row % warps || lane >= TILE || first + lane >= p.rows) continue;
        long place = (long)(base + row) * p.rows + first + lane;
        float total = 0.0f;
        if (p.first) {
            for (int i = routed; i < steps; i++) total += sums_at[i * TILE + lane];
            total *= sigmoid(p.share[(long)(base + row) * p.share_stride]);
        } else {
            total = p.sum[place];
        }
#pragma unroll 2
        for (int e = 0; e < p.used; e++) {
            if (!matrices[row][e]) continue;
            float dot = 0.0f;
            for (int i = 0; i < spans; i++) dot += sums_at[(e * spans + i) * TILE + lane];
            total = fmaf(weights[row][e], dot, total);
        }
        if (p.last) p.hidden[place] += total;
        else p.sum[place] = total;
    }
}
