// Experts of up to eight rows of x: their choice, gate and up, and down, on the integer tensor cores.
//
// Weights of blocks are whole numbers of a byte times scales (`whole.cuh`). x becomes two whole numbers of a byte too, planes of 2^0
// and 2^8 that hold 15 bits counted from the largest of 256 numbers: for a sum of products that is sixteen times as exact as bf16. So
// sums of products are exact within a run of 32 weights, and are scaled once for each half of it.
//
// A warp multiplies sixteen rows (two halves of eight, of matrices of any two types) by spans of 256 columns, a step, whose blocks
// have come to its own part of shared memory in file form by copies of 16 bytes. Lane l decodes the runs l % 4 and l % 4 + 4 of a
// span of the rows l / 4 of both halves. Of a product's eight columns, 2 q and 2 q + 1 are the planes of what lanes with l % 4 = q
// decode, and zeros elsewhere: each lane has the sums of its own runs, whose scales it knows. The four lanes of a row add up theirs.
//
// A result depends on its row of x and its row of weights alone. Plain numbers are multiplied in f32, as they lie.

const int UP_PARTS = 4;       // warps that share the columns of an item of `experts_up`
const int UP_THREADS = 640;   // of a block of it, at most
const int UP_ROUND = 8;       // items whose sums it keeps, before its warps add them up
const int DOWN_THREADS = 704; // of a block of `experts_down`, at most
const int PLANE = 264;        // bytes of a plane of a span of x, so that two lie in different banks
const int PLANES = 544;       // of two of them, and their scale
const int ROWS_BYTES = 144;   // of where a step's rows come from, and what the step is, at its beginning
const int ZEROS = 256;        // bytes of zeros that shared memory begins with

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

/// Bytes of a half of a step of `spans` spans in shared memory.
DEVICE int half_bytes(const Experts &e, int spans) { return e.plain ? 0 : 8 * window(spans * e.span); }

/// Begins to copy half `half` of a step, `spans` spans from `span` on of the rows from `first` on of a matrix of `rows`, and stores
/// where they come from; where there are fewer than eight, the last one again. Eight lanes copy a row, so that a request touches
/// few lines. `to`: where the half begins.
DEVICE void bring_half(u8 *step, u8 *to, int half, const Experts &e, const u8 *matrix, int first, int rows, int spans, int span) {
    int i = threadIdx.x % 32 / 8, at = threadIdx.x % 8 * 16, skipped = span * e.span, bytes = min(spans * e.span, e.row_bytes - skipped);
    int pitch = window(spans * e.span);
    u32 own = shared_address(to) + i * pitch + at;
#pragma unroll
    for (int k = 0; k < 2; k++) {
        // Less than 4 GB behind the beginning of a matrix.
        const u8 *from = matrix + (u32)(min(first + i + 4 * k, rows - 1) * e.row_bytes + skipped);
        if (at == 0) ((const u8 **)step)[8 * half + i + 4 * k] = from;
        if (e.plain) continue;
        int odd = (int)(u64)from & 15, left = odd + bytes - at;
        from += at - odd;
        if (left > 0) copy_16(own + 4 * k * pitch, from, true);
        if (left > 128) copy_16(own + 4 * k * pitch + 128, from + 128, true);
#pragma unroll 1
        for (int more = 256; left > more; more += 128) copy_16(own + 4 * k * pitch + more, from + more, true);
    }
}

/// What a step is, behind where its rows come from: stored and read by a warp as its copies begin.
DEVICE uint4 *what_of(u8 *step) { return (uint4 *)(step + ROWS_BYTES - 16); }

const u32 NOTHING = 0xffffffffu; // left to do

/// Where in a step this lane's rows of both halves begin, but for the first one's place in its 16 bytes.
struct Own {
    int low, high;

    DEVICE Own of(const Experts &low, const Experts &high, int spans) {
        int i = threadIdx.x % 32 / 4;
        Own own;
        own.low = ROWS_BYTES + i * window(spans * low.span);
        own.high = ROWS_BYTES + half_bytes(low, spans) + i * window(spans * high.span);
        return own;
    }
};

/// Stores a span of x as whole numbers, eight of each lane: number = whole · scale.
DEVICE void store_planes(u8 *planes, const float x[8]) {
    u32 most = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) most = max(most, __float_as_uint(x[i]) & 0x7fffffffu);
    most = __reduce_max_sync(~0u, most);
    __syncwarp(); // planes may lie where x was
    // The largest becomes 127 · 256. What is next to nothing becomes that; what is no number stays none.
    bool none = most < 0x0d000000u;
    float largest = __uint_as_float(most), up = none ? 0.0f : __fdividef(32512.0f, largest);
    u32 whole[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        // As the mantissa of a float, then with the zero of both bytes moved to 128.
        whole[i] = __float_as_uint(fmaf(x[i], up, 12582912.0f)) + 0x8080u;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const u32 *v = whole + 4 * i;
        u32 low = permute(v[0], v[1], 0x5140), high = permute(v[2], v[3], 0x5140);
        u32 *to = (u32 *)planes + threadIdx.x % 32 * 2 + i;
        to[0] = permute(low, high, 0x5410) ^ 0x80808080u;
        to[PLANE / 4] = permute(low, high, 0x7632) ^ 0x80808080u;
    }
    if (threadIdx.x % 32 == 0) {
        *(float *)(planes + 2 * PLANE) = most >= 0x7f800000u ? __uint_as_float(0x7fffffffu) : none ? 0.0f : largest * (1.0f / 32512.0f);
    }
}

/// c += a · b: a [16, 32], b [32, 8], of whole numbers of a byte.
///
/// Lane l holds of a rows l / 4 (a0, a2) and l / 4 + 8 (a1, a3), of c these rows (c0, c1; c2, c3), columns 2 (l % 4) and the next.
DEVICE void multiply_whole(int c[4], const u32 a[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// sums += this lane's part of low · x and high · x, over the first `runs` runs of a span. `x`: where this lane finds its factors
/// of run 0 of its own, `scale`: of x.
template <class T>
DEVICE void multiply_span(float sums[2], const u8 *low, const u8 *high, const u8 *x, float scale, int runs, const u32 *table) {
    typedef Whole<T> W;
    const int EACH = 4 / W::HALVES;
    int q = threadIdx.x % 4;
    const u8 *rows[2] = {low, high};
    int whole[4] = {}, mins[4] = {};
    auto join = [&](int r) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float factor, min = 0.0f;
            W::factors(rows[h] + r * T::BYTES, factor, min);
            float part = factor * joined(whole[2 * h], whole[2 * h + 1]);
            if (W::MIN) part = fmaf(-min, joined(mins[2 * h], mins[2 * h + 1]), part);
            // Behind the last run of a row there is anything.
            if (T::LEN == 256 || r < runs) sums[h] = fmaf(part, scale, sums[h]);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) whole[i] = 0, mins[i] = 0;
    };
#pragma unroll
    for (int k = 0; k < 2; k++) {
        int r = q + 4 * k;
        typename W::Run run[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            run[h].scales[0] = run[h].scales[1] = run[h].mins[0] = run[h].mins[1] = 1;
            W::open(T::LEN == 32 ? rows[h] + r * T::BYTES : rows[h], r, run[h]);
        }
#pragma unroll
        for (int half = 0; half < W::HALVES; half++) {
            int c[4] = {}, of_ones[4] = {};
#pragma unroll
            for (int t = half * EACH; t < (half + 1) * EACH; t++) {
                uint2 b = *(const uint2 *)(x + 128 * k + 8 * t);
                u32 a[4];
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    u32 out[2];
                    W::eight(run[h], t, table, out);
                    a[h] = out[0], a[h + 2] = out[1];
                }
                multiply_whole(c, a, b.x, b.y);
                const u32 ONES[4] = {0x01010101u, 0x01010101u, 0x01010101u, 0x01010101u};
                if (W::MIN) multiply_whole(of_ones, ONES, b.x, b.y);
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
                whole[i] += c[i] * run[i / 2].scales[half];
                if (W::MIN) mins[i] += of_ones[i] * run[i / 2].mins[half];
            }
        }
        if (T::LEN == 32) join(r);
    }
    if (T::LEN == 256) join(0);
}

/// The same of plain numbers, of all spans.
template <class T> DEVICE void multiply_plain(float sums[2], const u8 *low, const u8 *high, const u8 *planes, int columns) {
#pragma unroll 1
    for (int first = threadIdx.x % 4 * 8; first < columns; first += 32) {
        float a[8], b[8];
        T::decode(low + first / 8 * T::BYTES, 0, a);
        T::decode(high + first / 8 * T::BYTES, 0, b);
        const u8 *span = planes + first / SPAN * PLANES;
        const signed char *x = (const signed char *)span + first % SPAN;
        float scale = *(const float *)(span + 2 * PLANE);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            float number = (float)(x[i] + 256 * x[PLANE + i]) * scale;
            sums[0] = fmaf(a[i], number, sums[0]), sums[1] = fmaf(b[i], number, sums[1]);
        }
    }
}

/// sums += a step: this lane's part of its two rows of type number `type`, those of the halves `low` and `high` (0 or 1), over
/// `columns`. `step`, `planes`, `table`: where they lie in `shared`.
DEVICE void multiply_step(float sums[2], int type, const u8 *shared, int step, const Own &own, int low, int high, int planes, int columns,
                          int table) {
    int lane = threadIdx.x % 32, q = lane % 4, column = lane / 4;
    const u8 *const *from = (const u8 *const *)(shared + step) + column;
    const u8 *first = from[8 * low], *second = from[8 * high];
    bool is_own = column / 2 == q;
    int x = is_own ? planes + column % 2 * PLANE + 32 * q : 0;
    with_type(type, All(), [&](auto type) {
        typedef decltype(type) T;
        if constexpr (T::LEN == 8) {
            multiply_plain<T>(sums, first, second, shared + planes, columns);
        } else {
            const int BYTES = SPAN / T::LEN * T::BYTES;
            int a = step + (low ? own.high : own.low) + ((u32)(u64)first & 15);
            int b = step + (high ? own.high : own.low) + ((u32)(u64)second & 15);
#pragma unroll 1
            for (int i = 0; i * SPAN < columns; i++) {
                const u8 *at = shared + x + (is_own ? i * PLANES : 0);
                float scale = *(const float *)(shared + planes + i * PLANES + 2 * PLANE);
                auto multiply = [&](const u8 *table) {
                    multiply_span<T>(sums, shared + a + i * BYTES, shared + b + i * BYTES, at, scale, columns / 32 - 8 * i,
                                     (const u32 *)table);
                };
                // A place that is known saves an addition for every look-up.
                if (Whole<T>::TABLE == 0 || table == ZEROS) multiply(shared + ZEROS);
                else multiply(shared + table);
            }
        }
    });
}

DEVICE void fill_zeros(u8 *shared) {
    if (threadIdx.x < ZEROS / 4) ((u32 *)shared)[threadIdx.x] = 0;
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
    int table_at[2], planes_at, keys_at, room_at, stages_at;
    int unused;
};

const int ROWS_OF_BLOCK = 8; // of x, at most

/// Chooses the experts of rows, and computes 8 inner numbers of one of them at a time, an item, by UP_PARTS warps. Any grid: blocks
/// take neighbouring items, of not more than ROWS_OF_BLOCK rows. Shared memory: tables, for each warp planes of its columns, keys
/// of `choose` for each row of a block, sums of a round of items, for each warp its steps.
KERNEL __launch_bounds__(UP_THREADS, 1) void experts_up(__grid_constant__ const ExpertsUp p) {
    extern __shared__ __align__(16) u8 shared[];
    __shared__ u32 ids[ROWS_OF_BLOCK][32], order[ROWS_OF_BLOCK][32];
    __shared__ float weights[ROWS_OF_BLOCK][32];
    next();
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = warp / UP_PARTS, part = warp % UP_PARTS;
    int groups = blockDim.x / 32 / UP_PARTS;
    // A part's spans follow each other; the last parts may have fewer, or none.
    int spans = (spans_of(p.cols) + UP_PARTS - 1) / UP_PARTS, first_span = part * spans, columns = min(spans * SPAN, p.cols - first_span * SPAN);
    int tiles = (p.width + 7) / 8, of_row = tiles * p.used, items = of_row * p.count;
    int each = (items + gridDim.x - 1) / gridDim.x, first = blockIdx.x * each, end = min(first + each, items);
    int blocks = (items + each - 1) / each;
    if (first >= end) return;
    bool mixed = p.gate.type != p.up.type;
    fill_zeros(shared);
    fill_table_of(p.gate.type, (u32 *)(shared + p.table_at[0]));
    if (mixed) fill_table_of(p.up.type, (u32 *)(shared + p.table_at[1]));
    int planes = p.planes_at + warp * spans * PLANES, stages = p.stages_at + warp * p.stages * p.stage_bytes;
    auto stage_x = [&](int row) {
#pragma unroll 2
        for (int j = 0; j < spans; j++) {
            int column = (first_span + j) * SPAN + lane * 8;
            uint4 v = column < p.cols ? *(const uint4 *)(p.x + (long)row * p.cols + column) : make_uint4(0, 0, 0, 0);
            u32 pairs[4] = {v.x, v.y, v.z, v.w};
            float x[8];
#pragma unroll
            for (int i = 0; i < 8; i++) x[i] = bf16_value((u16)(pairs[i / 2] >> (i % 2 * 16)));
            store_planes(shared + planes + j * PLANES, x);
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
    Own own = Own::of(p.gate, p.up, spans);
    // Items of this group, `first` + `group` + i · `groups`, 32 at a time, a lane each: those whose experts this wave has are left.
    int next_items = first + group, ahead_slot = 0, slot = 0;
    u32 left = 0, of_item = 0, place = 0;
    auto bring = [&]() {
        while (left == 0 && next_items < end) {
            int item = next_items + lane * groups, row = item / of_row, rank = item % of_row / tiles;
            bool exists = item < end;
            of_item = exists ? ids[row - first_row][rank] : 0, place = row - first_row << 29 | rank << 24 | item % tiles;
            left = __ballot_sync(~0u, exists && has(p.mask, of_item));
            next_items += 32 * groups;
        }
        u8 *step = shared + stages + ahead_slot * p.stage_bytes;
        u32 what = NOTHING;
        if (left) {
            int from = __ffs(left) - 1;
            u32 expert = __shfl_sync(~0u, of_item, from);
            what = __shfl_sync(~0u, place, from);
            left &= left - 1;
            if (columns > 0) {
                int tile = (what & 0xffffffu) * 8;
                u8 *to = step + ROWS_BYTES;
                bring_half(step, to, 0, p.gate, matrix_of(p.gate, expert), tile, p.width, spans, first_span);
                bring_half(step, to + half_bytes(p.gate, spans), 1, p.up, matrix_of(p.up, expert), tile, p.width, spans, first_span);
            }
        }
        if (lane == 0) what_of(step)->x = what;
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
    // Sums of a round's items, of the parts of each; and what the items are.
    float *room = (float *)(shared + p.room_at) + group * UP_ROUND * (UP_PARTS * TILE + 1);
    u32 *whats = (u32 *)room + UP_ROUND * UP_PARTS * TILE;
    auto together = [&]() { asm volatile("bar.sync %0, %1;" ::"r"(1 + group), "r"(32 * UP_PARTS) : "memory"); };
    int kept = UP_ROUND;
#pragma unroll 1
    while (kept == UP_ROUND) {
#pragma unroll 1
        for (kept = 0; kept < UP_ROUND; kept++) {
            __syncwarp();
            int step = stages + slot * p.stage_bytes;
            u32 what = what_of(shared + step)->x;
            if (what == NOTHING) break;
            int row = first_row + (what >> 29);
            if (row != staged) {
                stage_x(row);
                staged = row;
            }
            step_wait(p.stages);
            float sums[2] = {};
            // Matrices of two types: each by itself, and half of that is left unused.
#pragma unroll 1
            for (int i = 0; i <= (int)mixed; i++) {
                float both[2] = {};
                multiply_step(both, i ? p.up.type : p.gate.type, shared, step, own, i, mixed ? i : 1, planes, columns,
                              i ? p.table_at[1] : p.table_at[0]);
                if (i == 0) sums[0] = both[0];
                if (i == (int)mixed) sums[1] = both[1];
            }
            __syncwarp();
            bring();
            slot = slot + 1 == p.stages ? 0 : slot + 1;
            float low = row_sum(sums[0]), high = row_sum(sums[1]);
            float *to = room + (kept * UP_PARTS + part) * TILE + lane / 4;
            if (lane % 4 == 0) to[0] = low, to[8] = high;
            if (part == 0 && lane == 0) whats[kept] = what;
        }
        together();
        int item = threadIdx.x % (32 * UP_PARTS) / 8, inner = lane % 8;
        if (item < kept) {
            float gate = 0.0f, up = 0.0f;
#pragma unroll
            for (int i = 0; i < UP_PARTS; i++) {
                const float *from = room + (item * UP_PARTS + i) * TILE + inner;
                gate += from[0], up += from[8];
            }
            u32 what = whats[item];
            int output = (what & 0xffffffu) * 8 + inner;
            long pair = (long)(first_row + (what >> 29)) * p.used + (what >> 24 & 31);
            if (output < p.width) p.out[pair * p.width + output] = silu(gate) * up;
        }
        together();
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
    int table_at[2], room_at, shared_at, stages_at;
    int shared_bytes;             // of a step of the shared expert
};

/// sum = share · shared expert + Σ weight · down · x over the chosen experts, ascending; after the last wave it joins the
/// residual. A block computes 16 numbers of FEW rows; steps of a row, those of all experts, then those of the shared one, go to its
/// warps in turns. Grid: (rows / 16, count / FEW). Shared memory: tables, sums of all steps of all rows, the
/// tile of the shared expert, for each warp its steps: tile and x, which becomes planes where it lies.
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
    float *room = (float *)(shared + p.room_at);
    int stages = p.stages_at + warp * p.stages * p.stage_bytes;
    fill_zeros(shared);
    fill_table_of(p.down.type, (u32 *)(shared + p.table_at[0]));
    if (p.shared.type != p.down.type) fill_table_of(p.shared.type, (u32 *)(shared + p.table_at[1]));
    Own own = Own::of(p.down, p.down, 1), own_shared = Own::of(p.shared, p.shared, 1);
    auto bring_both = [&](u8 *step, const Experts &e, const u8 *matrix, int span) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            bring_half(step, step + ROWS_BYTES + half * half_bytes(e, 1), half, e, matrix, first + 8 * half, p.rows, 1, span);
        }
    };
    auto shared_tile = [&](int span) { return p.shared_at + span * p.shared_bytes; };
    // A step is always the same warp's: it brings its tile of the shared expert, for all rows.
    for (int step = warp; step < steps; step += warps) {
        if (step < routed) continue;
        bring_both(shared + shared_tile(step - routed), p.shared, p.shared.at, step - routed);
    }
    previous();
    for (int r = warp; r < count; r += warps) {
        int row = (base + r) * p.used;
        bool own = lane < p.used;
        u32 pair = own ? p.order[row + lane] : 0, expert = own ? p.ids[row + lane] : 0;
        float weight = own ? p.weights[row + lane] : 0.0f;
        expert = __shfl_sync(~0u, expert, pair), weight = __shfl_sync(~0u, weight, pair);
        if (own) {
            pairs[r][lane] = row + pair, weights[r][lane] = weight;
            matrices[r][lane] = has(p.mask, expert) ? matrix_of(p.down, expert) : 0;
        }
    }
    __syncthreads();
    // Steps of this warp, of row after row: what is left out is of experts that this wave has not.
    int ahead_r = 0, ahead_step = warp, ahead_slot = 0, slot = 0, x_at = p.stage_bytes - 4 * SPAN;
    auto bring = [&]() {
        u8 *to = shared + stages + ahead_slot * p.stage_bytes;
        uint4 what = make_uint4(NOTHING, 0, 0, 0);
        for (; ahead_r < count && what.x == NOTHING; ahead_step += warps) {
            if (ahead_step >= steps) {
                ahead_step = warp - warps, ahead_r++;
                continue;
            }
            bool is_shared = ahead_step >= routed;
            int e = ahead_step / spans, span = is_shared ? ahead_step - routed : ahead_step - e * spans;
            if (!is_shared && !matrices[ahead_r][e]) continue;
            what = make_uint4(ahead_r, ahead_step, is_shared, span);
            int cols = is_shared ? p.shared_cols : p.cols;
            const float *x = p.shared_x + (long)(base + ahead_r) * cols;
            if (!is_shared) {
                bring_both(to, p.down, matrices[ahead_r][e], span);
                x = p.x + (long)pairs[ahead_r][e] * cols;
            }
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int column = span * SPAN + i * 128 + lane * 4;
                copy_16(shared_address(to + x_at + i * 512 + lane * 16), x + (column < cols ? column : 0), column < cols);
            }
        }
        if (lane == 0) *what_of(to) = what;
        ahead_slot = ahead_slot + 1 == p.stages ? 0 : ahead_slot + 1;
        copies_commit();
    };
    for (int i = 0; i < p.stages; i++) bring();
#pragma unroll 1
    while (true) {
        __syncwarp();
        int at = stages + slot * p.stage_bytes;
        uint4 what = *what_of(shared + at);
        if (what.x == NOTHING) break;
        int step = what.y, span = what.w;
        bool is_shared = what.z;
        int columns = min(SPAN, (is_shared ? p.shared_cols : p.cols) - span * SPAN);
        step_wait(p.stages);
        const float4 *from = (const float4 *)(shared + at + x_at) + 2 * lane;
        float4 a = from[0], b = from[1];
        float x[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}, sums[2] = {};
        store_planes(shared + at + x_at, x);
        __syncwarp();
        int type = is_shared ? p.shared.type : p.down.type, table = is_shared ? p.table_at[1] : p.table_at[0];
        Own rows;
        rows.low = is_shared ? own_shared.low : own.low, rows.high = is_shared ? own_shared.high : own.high;
        multiply_step(sums, type, shared, is_shared ? shared_tile(span) : at, rows, 0, 1, at + x_at, columns, table);
        float low_sum = row_sum(sums[0]), high_sum = row_sum(sums[1]);
        float *to = room + (what.x * steps + step) * TILE + lane / 4;
        if (lane % 4 == 0) to[0] = low_sum, to[8] = high_sum;
        __syncwarp();
        bring();
        slot = slot + 1 == p.stages ? 0 : slot + 1;
    }
    // A thread for each number, which asks for what it needs before it waits for the others.
    auto number = [&](int i, bool wait) {
        int r = i / TILE, output = i % TILE;
        bool mine = r < count && first + output < p.rows;
        long place = (long)(base + r) * p.rows + first + output;
        float before = mine && !p.first ? p.sum[place] : 0.0f, hidden = mine && p.last ? p.hidden[place] : 0.0f;
        float share = mine && p.first ? sigmoid(p.share[(long)(base + r) * p.share_stride]) : 0.0f;
        if (wait) __syncthreads();
        if (!mine) return;
        const float *from = room + r * steps * TILE + output;
        float total = before;
        if (p.first) {
            for (int i = routed; i < steps; i++) total += from[i * TILE];
            total *= share;
        }
#pragma unroll 5
        for (int e = 0; e < p.used; e++) {
            float dot = 0.0f;
            for (int i = 0; i < spans; i++) dot += from[(e * spans + i) * TILE];
            total = matrices[r][e] ? fmaf(weights[r][e], dot, total) : total;
        }
        if (p.last) p.hidden[place] = hidden + total;
        else p.sum[place] = total;
    };
#pragma unroll 1
    for (int i = threadIdx.x; i == (int)threadIdx.x || i < count * TILE; i += blockDim.x) number(i, i == (int)threadIdx.x);
}
