// Products of matrices side by side with up to eight rows of x, by spans (`spans.cuh`): passes of single rows.
//
// A kernel of a token waits for the one before it, and little else. So a block takes half a multiprocessor's registers and some of
// its shared memory, that it may stand beside the kernels before and behind it; its weights are asked for before it waits, all of
// them if they fit; and behind the wait there is no more than x, products, and one sum.
//
// A block has some neighbouring tiles of 16 outputs and some plain rows. Each warp has one span of 256 columns, or several; if K is
// short, groups of warps share the work: they stage x row by row in turns, and multiply tile by tile. What a norm divides by is
// applied to the sums. Tiles lie in shared memory in file form, each row in a window (`pitch`).
//
// Shared memory: x ([row][span] records of SPAN_X), sums of tiles ([tile][part][row][16]), parts of plain rows' results
// ([plain][FEW][span]), plain rows, tiles.

const int SPAN_THREADS = 512; // of a block
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
    float eps, share;     // share: 1 / cols
    int each, plain_rows, plain_each; // each: tiles of a block, plain_each: plain rows of one, at most
    int sums_at, plain_at, tiles_at;
};

/// Bytes from one row of a tile to the next in the ring: a window of whole words of 16 bytes, twice an odd number of them.
DEVICE int pitch(int bytes) { return ((bytes + 30) / 32 | 1) * 32; }

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

/// How a block's warps share the work: this one's first span and group, of as many groups; parts of a tile's sums.
struct Share {
    int span, group, groups, parts;

    DEVICE Share of(int cols) {
        int warps = blockDim.x / 32, warp = threadIdx.x / 32, spans = spans_of(cols);
        Share share;
        share.parts = min(spans, warps), share.groups = warps / share.parts;
        share.group = warp / share.parts, share.span = warp - share.group * share.parts;
        return share;
    }
};

/// Warps that have weights copied: where there are several groups, not those that stage x first.
DEVICE int first_copier(const Share &share) {
#if __CUDA_ARCH__ >= 900
    return share.groups > 1 ? share.parts : 0;
#else
    return 0;
#endif
}

/// How often a barrier is arrived at when something is copied.
DEVICE int copies(const Share &share) {
#if __CUDA_ARCH__ >= 900
    return blockDim.x / 32 - first_copier(share);
#else
    return blockDim.x;
#endif
}

/// Begins to copy this warp's rows of a tile: as an arrival at its barrier, which waits for them as well.
DEVICE void copy_tile_rows(const Matrix &m, int first, const Share &share, u32 to, u32 barrier) {
    int begin = first_copier(share), by = blockDim.x / 32 - begin, rows = min(TILE, m.rows - first), stride = pitch(m.row_bytes);
    const u8 *from = m.at + (long)first * m.row_bytes;
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x % 32 > 0) return;
    // Whole words of 16 bytes around a row.
    auto around = [&](int row) { return (((int)(u64)(from + row * m.row_bytes) & 15) + m.row_bytes + 15) & ~15; };
    int bytes = 0;
#pragma unroll 1
    for (int row = threadIdx.x / 32 - begin; row < rows; row += by) bytes += around(row);
    barrier_expect(barrier, bytes);
#pragma unroll 1
    for (int row = threadIdx.x / 32 - begin; row < rows; row += by) {
        bulk_copy(to + row * stride, (const u8 *)((u64)(from + row * m.row_bytes) & ~15ull), around(row), barrier);
    }
#else
    for (int row = threadIdx.x / 32; row < rows; row += by) {
        const u8 *at = from + row * m.row_bytes, *begin = (const u8 *)((u64)at & ~15ull);
        for (int i = threadIdx.x % 32 * 16; i < (int)(at - begin) + m.row_bytes; i += 32 * 16) {
            copy_16(to + row * stride + i, begin + i, true);
        }
    }
    barrier_arrive_copied(barrier);
#endif
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
DEVICE void copy_plain(const SpanRows &p, const Share &share, u32 to, int plain, u32 barrier) {
    int begin = first_copier(share), by = blockDim.x / 32 - begin, warp = threadIdx.x / 32 - begin, lane = threadIdx.x % 32, row;
#if __CUDA_ARCH__ >= 900
    if (lane > 0) return;
    barrier_expect(barrier, plain > warp ? ((plain - 1 - warp) / by + 1) * p.plain[0].row_bytes : 0);
    for (int i = warp; i < plain; i += by) {
        const Matrix &m = plain_row(p, i, row);
        bulk_copy(to + i * plain_pitch(p), m.at + (long)row * m.row_bytes, m.row_bytes, barrier);
    }
#else
    for (int i = warp; i < plain; i += by) {
        const Matrix &m = plain_row(p, i, row);
        const u8 *from = m.at + (long)row * m.row_bytes;
        for (int at = lane * 16; at < m.row_bytes; at += 32 * 16) copy_16(to + i * plain_pitch(p) + at, from + at, true);
    }
    barrier_arrive_copied(barrier);
#endif
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

/// Multiplies plain rows with a row's columns of a span; parts of results are [plain][FEW][spans].
DEVICE void multiply_plain_rows(const SpanRows &p, u8 *shared, int plain, int r, int span, const float y[8]) {
    int lane = threadIdx.x % 32, spans = spans_of(p.cols);
    float *parts = (float *)(shared + p.plain_at);
    const u8 *rows = (const u8 *)(parts + p.plain_each * FEW * spans);
#pragma unroll 1
    for (int j = 0; j < plain; j += 4) {
        float own[4] = {};
        with_type(p.plain[0].type, All(), [&](auto type) {
            typedef decltype(type) T;
            if constexpr (T::LEN == 8) plain_parts<T>(rows + j * plain_pitch(p), plain_pitch(p), span * SPAN + lane * 8, y, own);
        });
        float sum = four_sums(own);
        int which = j + lane / 16 * 2 + lane / 8 % 2;
        if (lane % 8 == 0 && which < plain) parts[(which * FEW + r) * spans + span] = sum;
    }
}

/// Stages the columns of a span of some rows, and multiplies plain rows with them: side by side, so that one row's steps need not
/// wait for another's. Rows that are not there are staged as the last one, again.
template <int ROWS>
DEVICE void stage_rows(const SpanRows &p, u8 *shared, int first, int end, int span, int plain, const float norm[8]) {
    int lane = threadIdx.x % 32, column = span * SPAN + lane * 8, stride = spans_of(p.cols) * SPAN_X;
    bool inside = column < p.cols;
    u8 *records = shared + span * SPAN_X;
    Numbers all[ROWS];
    float y[ROWS][8], squares[ROWS];
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
    if (plain > 0) {
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            if (first + i < end) multiply_plain_rows(p, shared, plain, first + i, span, y[i]);
        }
    }
}

/// The same of some rows from `first` on.
template <int STAGED> DEVICE void stage_span(const SpanRows &p, u8 *shared, int first, int end, int span, int plain, const float norm[8]) {
#pragma unroll 1
    for (; first < end; first += STAGED) stage_rows<STAGED>(p, shared, first, end, span, plain, norm);
}

/// What the sums of row r are multiplied with.
DEVICE float norm_of(const SpanRows &p, const u8 *shared, int r) {
    if (!p.norm) return 1.0f;
    int spans = spans_of(p.cols);
    const u8 *records = shared + r * spans * SPAN_X + SCALE_AT + 4;
    float sum = 0.0f;
#pragma unroll 8
    for (int i = 0; i < spans; i++) sum += *(const float *)(records + i * SPAN_X);
    return rsqrtf(fmaf(sum, p.share, p.eps));
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
        int which = i / of_tile, rest = i - which * of_tile, r = rest / TILE;
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

/// The columns of a norm's weights that this lane stages of a span.
DEVICE void norm_at(const SpanRows &p, int span, float norm[8]) {
    int column = span * SPAN + threadIdx.x % 32 * 8;
    Numbers v = {};
    if (p.norm) v = numbers_at(p.norm + column, column < p.cols);
    spread(v, norm);
}

/// Stages this warp's rows of its spans, behind the wait for the kernel before.
template <int STAGED> DEVICE void stage_spans(const SpanRows &p, const Share &share, u8 *shared, int plain, u32 of_plain) {
    int each = (p.count + share.groups - 1) / share.groups, first = share.group * each, end = min(first + each, p.count);
    float norm[8];
    norm_at(p, share.span, norm);
    if (plain > 0) barrier_wait(of_plain, 0);
    previous();
#pragma unroll 1
    for (int span = share.span; span < spans_of(p.cols); span += share.parts) {
        if (span > share.span) norm_at(p, span, norm);
        stage_span<STAGED>(p, shared, first, end, span, plain, norm);
    }
    __syncthreads();
}

/// c += a tile in shared memory, whose first row lies at `tile`, by this warp's spans.
template <int SETS> DEVICE void multiply_tile_spans(const SpanRows &p, const Share &share, const u8 *shared, const Place &place, const u8 *tile, float c[2 * SETS]) {
    const Matrix &m = p.matrices[place.matrix];
    int lane = threadIdx.x % 32, spans = spans_of(p.cols);
    u32 address = (u32)(u64)m.at + (place.first + lane / 4) * m.row_bytes;
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
        barrier_init(full + 8 * threadIdx.x, copies(share));
        barriers_made();
    }
    __syncthreads();
    if ((int)threadIdx.x / 32 >= first_copier(share)) {
        int to = at;
#pragma unroll 1
        for (int i = 0; i < tiles; i++) {
            Place place = Place::of(p, first + i);
            copy_tile_rows(p.matrices[place.matrix], place.first, share, shared_address(shared) + to, full + 8 * i);
            to += place.bytes;
        }
        u32 rows = shared_address(shared) + p.plain_at + p.plain_each * FEW * spans_of(p.cols) * 4;
        if (plain > 0) copy_plain(p, share, rows, plain, of_plain);
    }
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
