// Products of matrices side by side with up to eight rows of x, by spans (`spans.cuh`): passes of single rows.
//
// A kernel of a token waits for the one before it, and little else. So a block of up to four rows takes half a multiprocessor's
// registers and some of its shared memory, that it may stand beside the kernels before and behind it; all of its weights are asked
// for before it waits; and behind the wait there is no more than x, products, and one sum.
//
// A block has some neighbouring tiles of 16 outputs and some plain rows. Each warp has one span of 256 columns, or several; if K is
// short, groups of warps share the work: they stage x row by row in turns, and multiply tile by tile. What a norm divides by is
// applied to the sums. Tiles lie in shared memory in file form, each row in a window (`pitch`).
//
// Shared memory: x ([row][span] records of SPAN_X), sums of tiles ([tile][part][row][16]), parts of plain rows' results
// ([plain][FEW][span]), plain rows, tiles.

const int SPAN_THREADS = 512; // of a block: a warp for each row of a tile
static_assert(SPAN_THREADS == 32 * TILE, "rows are copied by warps");
const int MOST_TILES = 8;     // of a block
#if __CUDA_ARCH__ >= 900
const int SPAN_BLOCKS = 2; // that share a multiprocessor, each the half of its registers
#else
const int SPAN_BLOCKS = 1; // nothing begins early
#endif

/// What is multiplied.
struct SpanRows {
    Matrix matrices[4];   // of types with spans
    int ends[4];          // tiles of the matrices before and including each
    Matrix plain[2];      // of numbers: computed in f32
    const float *x;       // [rows, cols]: normed first
    const u16 *numbers;   // instead: [count, cols] bf16 as they are
    const u32 *index;     // which rows of x; may be null: all
    const float *norm;    // [cols]; null for `numbers`
    float *normed;        // the normed rows, f32; may be null
    u16 *rounded;         // the same as bf16; may be null
    int cols, count, out_stride, add;
    float eps, reciprocal; // of cols
    int each, plain_rows, plain_each; // each: tiles of a block, plain_each: plain rows of one, at most
    int sums_at, plain_at, tiles_at;
};

/// Bytes from one row of a tile to the next in shared memory: a window of whole words of 16 bytes around it, twice an odd number of
/// them, so that eight rows lie in different banks.
DEVICE int pitch(int bytes) { return ((bytes + (bytes % 16 ? 29 : 0) + 31) / 32 | 1) * 32; }

/// A tile: its matrix, its first output, and its bytes in shared memory.
struct Place {
    int matrix, first, bytes;

    DEVICE Place of(const SpanRows &p, int tile) {
        Place place;
        place.matrix = (tile >= p.ends[0]) + (tile >= p.ends[1]) + (tile >= p.ends[2]);
        place.first = (tile - (place.matrix > 0 ? p.ends[place.matrix - 1] : 0)) * TILE;
        place.bytes = TILE * pitch(p.matrices[place.matrix].row_bytes);
        return place;
    }
};

/// a / b of small numbers, in few instructions.
DEVICE int small_quotient(int a, int b) { return (int)__fdividef((float)a + 0.5f, (float)b); }

/// How a block's warps share the work: this one's first span and group, of as many groups; parts of a tile's sums.
struct Share {
    int span, group, groups, parts;

    DEVICE Share of(int cols) {
        int warps = blockDim.x / 32, warp = threadIdx.x / 32, spans = spans_of(cols);
        Share share;
        share.parts = min(spans, warps), share.groups = small_quotient(warps, share.parts);
        share.group = small_quotient(warp, share.parts), share.span = warp - share.group * share.parts;
        return share;
    }
};

/// How often a barrier is arrived at when something is copied.
DEVICE int copies() {
#if __CUDA_ARCH__ >= 900
    return blockDim.x / 32;
#else
    return blockDim.x;
#endif
}

/// Begins to copy `bytes` from `from` on, whole words of 16: as an arrival at a barrier, which waits for them as well. By a warp.
DEVICE void copy_row(u32 to, const u8 *from, int bytes, u32 barrier) {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x % 32 > 0) return;
    barrier_expect(barrier, bytes);
    if (bytes > 0) bulk_copy(to, from, bytes, barrier);
#else
    for (int i = threadIdx.x % 32 * 16; i < bytes; i += 32 * 16) copy_16(to + i, from + i, true);
    barrier_arrive_copied(barrier);
#endif
}

/// Begins to copy row `row` of some neighbouring tiles, one behind the other, each with a barrier of its own.
DEVICE void copy_tiles(const SpanRows &p, int tile, int tiles, int row, u32 to, u32 barrier) {
#pragma unroll 1
    while (tiles > 0) {
        Place place = Place::of(p, tile);
        const Matrix &m = p.matrices[place.matrix];
        int same = min(tiles, p.ends[place.matrix] - tile), left = m.rows - place.first - row;
        const u8 *from = m.at + (long)(place.first + row) * m.row_bytes;
        // Whole words of 16 bytes around the row: as many for each tile.
        int bytes = (((int)(u64)from & 15) + m.row_bytes + 15) & ~15;
        from = (const u8 *)((u64)from & ~15ull);
        u32 at = to + row * pitch(m.row_bytes);
        tile += same, tiles -= same, to += same * place.bytes;
#pragma unroll 1
        for (; same > 0; same--, left -= TILE, from += TILE * m.row_bytes, at += place.bytes, barrier += 8) {
            copy_row(at, from, left > 0 ? bytes : 0, barrier);
        }
    }
}

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

DEVICE float squares_of(const float y[8]) {
    return ((y[0] * y[0] + y[1] * y[1]) + (y[2] * y[2] + y[3] * y[3])) + ((y[4] * y[4] + y[5] * y[5]) + (y[6] * y[6] + y[7] * y[7]));
}

/// Loads what of row r this lane stages.
DEVICE Numbers raw(const SpanRows &p, int r, int column, bool inside) {
    if (!p.numbers) return numbers_at(p.x + (long)(p.index ? p.index[r] : r) * p.cols + column, inside);
    uint4 v = inside ? *(const uint4 *)(p.numbers + (long)r * p.cols + column) : make_uint4(0, 0, 0, 0);
    Numbers out;
    out.low = make_float4(bf16_value((u16)v.x), bf16_value((u16)(v.x >> 16)), bf16_value((u16)v.y), bf16_value((u16)(v.y >> 16)));
    out.high = make_float4(bf16_value((u16)v.z), bf16_value((u16)(v.z >> 16)), bf16_value((u16)v.w), bf16_value((u16)(v.w >> 16)));
    return out;
}

/// Plain row i of a block: a matrix, and its row.
DEVICE const Matrix &plain_row(const SpanRows &p, int i, int &row) {
    row = blockIdx.x + i * gridDim.x;
    bool second = row >= p.plain[0].rows;
    if (second) row -= p.plain[0].rows;
    return p.plain[second];
}

DEVICE int plain_count(const SpanRows &p) {
    return (int)blockIdx.x < p.plain_rows ? (p.plain_rows - (int)blockIdx.x - 1) / (int)gridDim.x + 1 : 0;
}

/// Bytes of a block's plain row.
DEVICE int plain_pitch(const SpanRows &p) { return (p.plain[0].row_bytes + 15) & ~15; }

/// Begins to copy a block's plain rows, each by a warp.
DEVICE void copy_plain(const SpanRows &p, u32 to, int plain, u32 barrier) {
    int row, warps = blockDim.x / 32;
    for (int i = threadIdx.x / 32; i < p.plain_each; i += warps) {
        const Matrix &m = plain_row(p, min(i, plain - 1), row);
        copy_row(to + i * plain_pitch(p), m.at + (long)row * m.row_bytes, i < plain ? m.row_bytes : 0, barrier);
    }
}

/// The sums over a warp of four numbers: of number 2 · bit 4 + bit 3 of a lane, in every lane.
DEVICE float four_sums(const float v[4]) {
    int lane = threadIdx.x % 32;
    bool high = lane & 16, odd = lane & 8;
    float a = (high ? v[2] : v[0]) + __shfl_xor_sync(~0u, high ? v[0] : v[2], 16);
    float b = (high ? v[3] : v[1]) + __shfl_xor_sync(~0u, high ? v[1] : v[3], 16);
    float c = (odd ? b : a) + __shfl_xor_sync(~0u, odd ? a : b, 8);
#pragma unroll
    for (int step = 4; step > 0; step /= 2) c += __shfl_xor_sync(~0u, c, step);
    return c;
}

/// This lane's part of four plain rows' products with `y`, from row `from` on.
template <class T> DEVICE void plain_parts(const u8 *from, int pitch, int column, const float y[8], float out[4]) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
        float w[8];
        T::decode(from + j * pitch + column / 8 * T::BYTES, 0, w);
        out[j] = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; i++) out[j] = fmaf(w[i], y[i], out[j]);
    }
}

/// Stages the columns of a span of some rows: side by side, so that one row's steps need not wait for another's. Rows that are not
/// there are staged as the last one, again.
template <int ROWS> DEVICE void stage_rows(const SpanRows &p, u8 *shared, int first, int end, int span) {
    int lane = threadIdx.x % 32, column = span * SPAN + lane * 8, stride = spans_of(p.cols) * SPAN_X;
    bool inside = column < p.cols;
    u8 *records = shared + span * SPAN_X;
    Numbers all[ROWS];
    float y[ROWS][8], squares[ROWS], norm[8];
    if (p.norm) spread(numbers_at(p.norm + column, inside), norm);
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        all[i] = raw(p, min(first + i, end - 1), column, inside);
    }
#pragma unroll
    for (int i = 0; i < ROWS; i++) spread(all[i], y[i]), squares[i] = 0.0f;
    if (p.norm) {
#pragma unroll
        for (int i = 0; i < ROWS; i++) squares[i] = squares_of(y[i]);
#pragma unroll
        for (int step = 16; step > 0; step /= 2) {
#pragma unroll
            for (int i = 0; i < ROWS; i++) squares[i] += __shfl_xor_sync(~0u, squares[i], step);
        }
#pragma unroll
        for (int i = 0; i < ROWS * 8; i++) y[i / 8][i % 8] *= norm[i % 8];
    }
    put_x<ROWS>(records + first * stride, stride, min(ROWS, end - first), y, squares);
}

/// Multiplies plain rows with the columns of a span of all rows; parts of results are [plain][FEW][spans].
DEVICE void multiply_plain_rows(const SpanRows &p, u8 *shared, int plain, int span) {
    int lane = threadIdx.x % 32, spans = spans_of(p.cols), column = span * SPAN + lane * 8;
    bool inside = column < p.cols;
    float *parts = (float *)(shared + p.plain_at), norm[8];
    const u8 *rows = (const u8 *)(parts + p.plain_each * FEW * spans);
    spread(numbers_at(p.norm + column, inside), norm);
#pragma unroll 1
    for (int r = 0; r < p.count; r++) {
        float y[8];
        spread(raw(p, r, column, inside), y);
#pragma unroll
        for (int i = 0; i < 8; i++) y[i] *= norm[i];
#pragma unroll 1
        for (int j = 0; j < plain; j += 4) {
            float own[4] = {};
            with_type(p.plain[0].type, All(), [&](auto type) {
                typedef decltype(type) T;
                if constexpr (T::LEN == 8) {
                    if (inside) plain_parts<T>(rows + j * plain_pitch(p), plain_pitch(p), column, y, own);
                }
            });
            float sum = four_sums(own);
            int which = j + lane / 16 * 2 + lane / 8 % 2;
            if (lane % 8 == 0 && which < plain) parts[(which * FEW + r) * spans + span] = sum;
        }
    }
}

/// What the sums of row r are multiplied with.
DEVICE float norm_of(const SpanRows &p, const u8 *shared, int r) {
    if (!p.norm) return 1.0f;
    int spans = spans_of(p.cols);
    const u8 *records = shared + r * spans * SPAN_X + SCALE_AT + 4;
    float sum = 0.0f;
#pragma unroll 8
    for (int i = 0; i < spans; i++) sum += *(const float *)(records + i * SPAN_X);
    return rsqrtf(fmaf(sum, p.reciprocal, p.eps));
}

/// Leaves a warp's sums of a tile: [count][16].
template <int SETS> DEVICE void put_sums(int count, float *to, const float c[2 * SETS]) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 2 * SETS; i++) {
        int r = i / 2 * 4 + lane % 4;
        if (r < count) to[r * TILE + lane / 4 + i % 2 * 8] = c[i];
    }
}

/// Adds up the warps' sums of some tiles, the first of which is number `first`, others `apart` from one another.
DEVICE void store_tiles(const SpanRows &p, const Share &share, const u8 *shared, const float *sums, int first, int apart, int tiles) {
    int of_tile = p.count * TILE;
#pragma unroll 1
    for (int i = threadIdx.x; i < tiles * of_tile; i += blockDim.x) {
        int which = small_quotient(i, of_tile), rest = i - which * of_tile, r = rest / TILE;
        Place place = Place::of(p, first + which * apart);
        const Matrix &m = p.matrices[place.matrix];
        int output = place.first + rest % TILE;
        if (output >= m.rows) continue;
        const float *from = sums + which * share.parts * of_tile + rest;
        float *to = m.out + (long)r * p.out_stride + output, sum = 0.0f;
        float before = p.add ? *to : 0.0f;
#pragma unroll 8
        for (int w = 0; w < share.parts; w++) sum += from[w * of_tile];
        *to = fmaf(sum, norm_of(p, shared, r), before);
    }
}

/// Results of plain rows, and normed rows for others: some columns of each by each block.
DEVICE void store_plain(const SpanRows &p, const u8 *shared, int plain) {
    int spans = spans_of(p.cols);
    const float *parts = (const float *)(shared + p.plain_at);
#pragma unroll 1
    for (int i = blockDim.x - 1 - threadIdx.x; i < plain * FEW; i += blockDim.x) { // other threads than those of tiles
        int r = i % FEW, row;
        if (r >= p.count) continue;
        const Matrix &m = plain_row(p, i / FEW, row);
        float sum = 0.0f;
#pragma unroll 8
        for (int s = 0; s < spans; s++) sum += parts[i * spans + s];
        m.out[(long)r * p.out_stride + row] = sum * norm_of(p, shared, r);
    }
}

DEVICE void store_normed(const SpanRows &p, const u8 *shared) {
    int each = (p.cols / 2 + gridDim.x - 1) / gridDim.x; // pairs of columns
#pragma unroll 1
    for (int i = threadIdx.x ^ blockDim.x / 2; i < each * p.count; i += blockDim.x) {
        int r = i / each, column = (blockIdx.x * each + i - r * each) * 2;
        if (column >= p.cols) continue;
        float2 v = *(const float2 *)(p.x + (long)(p.index ? p.index[r] : r) * p.cols + column), w = *(const float2 *)(p.norm + column);
        float scale = norm_of(p, shared, r);
        v.x *= scale * w.x, v.y *= scale * w.y;
        if (p.normed) *(float2 *)(p.normed + (long)r * p.cols + column) = v;
        if (p.rounded) *(u32 *)(p.rounded + (long)r * p.cols + column) = bf16_pair(v.x, v.y);
    }
}

/// Stages this warp's rows of its spans, behind the wait for the kernel before. Plain rows are left to the last group, if there are
/// several.
template <int STAGED> DEVICE void stage_spans(const SpanRows &p, const Share &share, u8 *shared, int plain, u32 of_plain) {
    const float *norm = p.norm + share.span * SPAN + threadIdx.x % 32 * 8;
    if (p.norm && norm < p.norm + p.cols) asm volatile("prefetch.global.L2 [%0];" ::"l"(norm));
    bool multiplies = plain > 0 && share.group == share.groups - 1;
    int stagers = plain > 0 ? max(share.groups - 1, 1) : share.groups, each = (p.count + stagers - 1) / stagers;
    int end = min((share.group + 1) * each, p.count);
    if (multiplies) barrier_wait(of_plain, 0);
    previous();
#pragma unroll 1
    for (int span = share.span; span < spans_of(p.cols); span += share.parts) {
#pragma unroll 1
        for (int first = share.group * each; first < end; first += STAGED) stage_rows<STAGED>(p, shared, first, end, span);
        if (multiplies) multiply_plain_rows(p, shared, plain, span);
    }
    __syncthreads();
}

/// c += a tile in shared memory, whose first row lies at `tile`, by this warp's spans.
template <int SETS> DEVICE void multiply_tile_spans(const SpanRows &p, const Share &share, const u8 *shared, const Place &place, const u8 *tile, float c[2 * SETS]) {
    const Matrix &m = p.matrices[place.matrix];
    int lane = threadIdx.x % 32, spans = spans_of(p.cols);
    u32 address = (u32)(u64)m.at + (u32)(place.first + lane / 4) * (u32)m.row_bytes; // its lowest bits
    const u8 *low = tile + lane / 4 * pitch(m.row_bytes);
    const u8 *high = low + 8 * pitch(m.row_bytes) + (address + 8 * m.row_bytes & 15);
    low += address & 15;
    with_type(m.type, All(), [&](auto of) {
        typedef decltype(of) T;
        if constexpr (Span<T>::EXISTS) {
            const int BYTES = SPAN / T::LEN * T::BYTES;
#pragma unroll 1
            for (int span = share.span; span < spans; span += share.parts) {
                auto x = SpanX<SETS>::of(shared + span * SPAN_X, spans * SPAN_X, p.count);
                Span<T>::multiply(c, low + span * BYTES, high + span * BYTES, x, p.cols - span * SPAN);
            }
        }
    });
}

/// Grid: a block for each `each` tiles, or more if there are plain rows. Up to 4 · SETS rows.
template <int SETS> DEVICE void multiply_spans(const SpanRows &p) {
    extern __shared__ __align__(16) u8 shared[];
    __shared__ __align__(8) u64 barriers[MOST_TILES + 1]; // of tiles, and of plain rows
    next();
    Share share = Share::of(p.cols);
    int first = blockIdx.x * p.each, tiles = max(min(p.each, p.ends[3] - first), 0), plain = plain_count(p), at = p.tiles_at;
    u32 full = shared_address(barriers), of_plain = full + 8 * MOST_TILES;
    if (threadIdx.x <= MOST_TILES) {
        // Of plain rows each has an arrival for itself.
        int each = copies() * (threadIdx.x < MOST_TILES ? 16 : p.plain_each) / 16;
        barrier_init(full + 8 * threadIdx.x, max(each, 1));
        barriers_made();
    }
    __syncthreads();
    u32 rows = shared_address(shared) + p.plain_at + p.plain_each * FEW * spans_of(p.cols) * 4;
    copy_tiles(p, first, tiles, threadIdx.x / 32, shared_address(shared) + at, full);
    if (plain > 0) copy_plain(p, rows, plain, of_plain);
    stage_spans<SETS == 1 ? 1 : 4>(p, share, shared, plain, of_plain);
    float *sums = (float *)(shared + p.sums_at);
#pragma unroll 1
    for (int i = 0; i < tiles; i++) {
        Place place = Place::of(p, first + i);
        if (i % share.groups == share.group) {
            float c[2 * SETS] = {};
            barrier_wait(full + 8 * i, 0);
            multiply_tile_spans<SETS>(p, share, shared, place, shared + at, c);
            put_sums<SETS>(p.count, sums + (i * share.parts + share.span) * TILE * p.count, c);
        }
        at += place.bytes;
    }
    __syncthreads();
    store_tiles(p, share, shared, sums, first, 1, tiles);
    if (plain > 0) store_plain(p, shared, plain);
    if (p.rounded || p.normed) store_normed(p, shared);
}

KERNEL __launch_bounds__(SPAN_THREADS, SPAN_BLOCKS) void few_spans(__grid_constant__ const SpanRows p) { multiply_spans<1>(p); }

KERNEL __launch_bounds__(SPAN_THREADS, 1) void more_spans(__grid_constant__ const SpanRows p) { multiply_spans<2>(p); }
