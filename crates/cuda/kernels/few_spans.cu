// Products of matrices side by side with up to eight rows of x, by spans (`spans.cuh`): passes of single rows.
//
// A kernel of a token waits for the one before it, and little else. So a block of one row takes half a multiprocessor's registers
// and some of its shared memory, that it may stand beside the kernels before and behind it; all of its weights are asked for before
// it waits; and behind the wait there is no more than x, products, and one sum.
//
// A block has some neighbouring tiles of 16 outputs and some plain rows. Each warp has one span of 256 columns, or several; if K is
// short, groups of warps share the work: they stage x row by row in turns, and multiply tile by tile. A warp waits for those of its
// span alone, so that the one that asks for weights keeps no other. What a norm divides by is applied to the sums.
//
// Tiles lie in shared memory in file form: four neighbouring rows, a quad, by one copy, in a window of whole words of 16 bytes. Rows
// that a warp reads together are of different quads, which lie in different banks.
//
// Shared memory: x ([row][span] records of SPAN_X), sums of tiles ([tile][part][row][16]), what those are added to ([tile][row][16]),
// parts of plain rows' results ([plain][FEW][span]), plain rows, tiles.

const int SPAN_WARPS = 16, SPAN_THREADS = 32 * SPAN_WARPS; // of a block
const int MOST_TILES = 8; // of a block
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
    int quads[4];         // bytes from one quad of each matrix to the next in shared memory
    float eps, reciprocal; // of cols
    int each, plain_rows, plain_each; // each: tiles of a block, plain_each: plain rows of one, at most
    int sums_at, plain_at, tiles_at;
};

const int QUAD = 4, QUADS = TILE / QUAD; // rows of a quad; quads of a tile

/// A tile: its matrix, and its first output.
struct Place {
    int matrix, first;

    DEVICE Place of(const SpanRows &p, int tile) {
        Place place;
        place.matrix = (tile >= p.ends[0]) + (tile >= p.ends[1]) + (tile >= p.ends[2]);
        place.first = (tile - (place.matrix > 0 ? p.ends[place.matrix - 1] : 0)) * TILE;
        return place;
    }
};

/// A block's tiles, and how many plain rows it has.
struct Tiles {
    int first, count, plain;

    DEVICE Tiles of(const SpanRows &p, int block) {
        Tiles tiles;
        tiles.first = block * p.each, tiles.count = max(min(p.each, p.ends[3] - tiles.first), 0);
        tiles.plain = block < p.plain_rows ? small_quotient(p.plain_rows - block - 1, gridDim.x) + 1 : 0;
        return tiles;
    }
};

/// How `warps` warps of a block share the work: this one's first span and group, of as many groups; parts of a tile's sums.
struct Share {
    int span, group, groups, parts;

    DEVICE Share of(int cols, int warps) {
        int warp = threadIdx.x / 32, spans = spans_of(cols);
        Share share;
        share.parts = min(spans, warps), share.groups = small_quotient(warps, share.parts);
        share.group = small_quotient(warp, share.parts), share.span = warp - share.group * share.parts;
        return share;
    }
};

// Who asks for pieces of weights side by side: lanes of one warp, or warps with all of their lanes. A piece is as many arrivals.
#if __CUDA_ARCH__ >= 900
const int ARRIVALS = 1;
DEVICE int asker() { return threadIdx.x % 32; }
DEVICE int askers() { return 32; }
#else
const int ARRIVALS = 32;
DEVICE int asker() { return threadIdx.x / 32; }
DEVICE int askers() { return blockDim.x / 32; }
#endif

/// Begins to copy `bytes` from `from` on, whole words of 16: as an arrival at a barrier, which waits for them as well.
DEVICE void copy_piece(u32 to, const u8 *from, int bytes, u32 barrier) {
#if __CUDA_ARCH__ >= 900
    barrier_expect(barrier, bytes);
    if (bytes > 0) bulk_copy(to, from, bytes, barrier);
#else
    for (int i = threadIdx.x % 32 * 16; i < bytes; i += 32 * 16) copy_16(to + i, from + i, true);
    barrier_arrive_copied(barrier);
#endif
}

/// Begins to copy quad `quad` of a tile to where the tile's place is: whole words of 16 bytes around its rows, as far as they are there.
DEVICE void copy_quad(const SpanRows &p, const Place &place, int quad, u32 to, u32 barrier) {
    const Matrix &m = p.matrices[place.matrix];
    int first = place.first + quad * QUAD, rows = max(min(m.rows - first, QUAD), 0);
    const u8 *from = m.at + (long)first * m.row_bytes;
    int bytes = ((int)(u64)from & 15) + rows * m.row_bytes + 15 & ~15;
    copy_piece(to + quad * p.quads[place.matrix], (const u8 *)((u64)from & ~15ull), rows > 0 ? bytes : 0, barrier);
}

/// Bytes in shared memory of the tiles from `first` on before `tile`.
DEVICE int bytes_before(const SpanRows &p, int first, int tile) {
    int bytes = 0;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        int of_matrix = max(min(tile, p.ends[k]) - max(first, k > 0 ? p.ends[k - 1] : 0), 0);
        bytes += of_matrix * QUADS * p.quads[k];
    }
    return bytes;
}

/// Begins to copy some neighbouring tiles to one place behind the other, each with a barrier of its own.
DEVICE void copy_tiles(const SpanRows &p, int first, int tiles, u32 to, u32 barrier) {
#pragma unroll 1
    for (int i = asker(); i < tiles * QUADS; i += askers()) {
        int tile = first + i / QUADS;
        copy_quad(p, Place::of(p, tile), i % QUADS, to + bytes_before(p, first, tile), barrier + 8 * (i / QUADS));
    }
}

// Barriers by name: 0 of a block, then one for each span that several warps share, and that of the barriers of copies.
const int OF_SPANS = 1, OF_COPIES = 15;

/// Comes there and goes on.
DEVICE void announce(int barrier, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory"); }

/// A number of which the compiler knows nothing: what follows from it is worked out here, not kept in registers from long before.
DEVICE int unknown(int number) {
    asm volatile("" : "+r"(number));
    return number;
}

/// Rows of x of a launch; ROWS: the most that a kernel takes.
template <int ROWS> DEVICE int rows_of(const SpanRows &p) { return ROWS == 1 ? 1 : p.count; }

template <int ROWS> constexpr int SETS_OF = ROWS > 4 ? 2 : 1;

DEVICE float squares_of(const float y[8]) {
    return ((y[0] * y[0] + y[1] * y[1]) + (y[2] * y[2] + y[3] * y[3])) + ((y[4] * y[4] + y[5] * y[5]) + (y[6] * y[6] + y[7] * y[7]));
}

/// Where in x row r begins.
DEVICE const float *row_of_x(const SpanRows &p, int r) { return p.x + (long)(p.index ? p.index[r] : r) * p.cols; }

/// bf16 numbers as they are.
DEVICE Numbers widened(uint4 v) {
    Numbers out;
    out.low = make_float4(bf16_value((u16)v.x), __uint_as_float(v.x & 0xffff0000u), bf16_value((u16)v.y), __uint_as_float(v.y & 0xffff0000u));
    out.high = make_float4(bf16_value((u16)v.z), __uint_as_float(v.z & 0xffff0000u), bf16_value((u16)v.w), __uint_as_float(v.w & 0xffff0000u));
    return out;
}

/// Plain row i of a block: a matrix, and its row.
DEVICE const Matrix &plain_row(const SpanRows &p, int i, int &row) {
    row = blockIdx.x + i * gridDim.x;
    bool second = row >= p.plain[0].rows;
    if (second) row -= p.plain[0].rows;
    return p.plain[second];
}

/// Bytes of a block's plain row.
DEVICE int plain_pitch(const SpanRows &p) { return (p.plain[0].row_bytes + 15) & ~15; }

/// Begins to copy a block's plain rows.
DEVICE void copy_plain(const SpanRows &p, u32 to, int plain, u32 barrier) {
    int row;
#pragma unroll 1
    for (int i = asker(); i < p.plain_each; i += askers()) {
        const Matrix &m = plain_row(p, min(i, plain - 1), row);
        copy_piece(to + i * plain_pitch(p), m.at + (long)row * m.row_bytes, i < plain ? m.row_bytes : 0, barrier);
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

/// This lane's part of the products of four plain rows, from row `from` on, with some rows of x.
template <int ROWS, class T> DEVICE void plain_parts(const u8 *from, int pitch, int column, const float y[ROWS][8], float out[ROWS][4]) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
        float w[8];
        T::decode(from + j * pitch + column / 8 * T::BYTES, 0, w);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
#pragma unroll
            for (int i = 0; i < 8; i++) out[r][j] = fmaf(w[i], y[r][i], out[r][j]);
        }
    }
}

/// Sums over a warp, one for each row: that of row r in lane 8 r. Of one row or four.
template <int ROWS> DEVICE float row_sums(const float v[ROWS]) {
    if constexpr (ROWS == 4) return four_sums(v);
    else return warp_sum(v[0]);
}

/// Stages the columns of a span of some rows: side by side, so that one row's steps need not wait for another's. Rows that are not
/// there are staged as the last one, again.
template <int ROWS> DEVICE void stage_rows(const SpanRows &p, u8 *shared, int first, int end, int span, const Numbers &factors) {
    static_assert(ROWS == 1 || ROWS == 4, "row_sums");
    int column = span * SPAN + threadIdx.x % 32 * 8, stride = spans_of(p.cols) * SPAN_X;
    bool inside = column < p.cols;
    Numbers all[ROWS];
    float y[ROWS][8], squares[ROWS], norm[8], sum = 0.0f;
    if (p.numbers) {
        uint4 raw[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            const u16 *from = p.numbers + (long)min(first + i, end - 1) * p.cols + column;
            raw[i] = inside ? *(const uint4 *)from : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int i = 0; i < ROWS; i++) all[i] = widened(raw[i]);
    } else {
#pragma unroll
        for (int i = 0; i < ROWS; i++) all[i] = numbers_at(row_of_x(p, min(first + i, end - 1)) + column, inside);
    }
#pragma unroll
    for (int i = 0; i < ROWS; i++) spread(all[i], y[i]);
    if (p.norm) {
#pragma unroll
        for (int i = 0; i < ROWS; i++) squares[i] = squares_of(y[i]);
        sum = row_sums<ROWS>(squares);
        spread(factors, norm);
#pragma unroll
        for (int i = 0; i < ROWS * 8; i++) y[i / 8][i % 8] *= norm[i % 8];
    }
    put_x<ROWS>(shared + span * SPAN_X + first * stride, stride, min(ROWS, end - first), y, sum);
}

/// Multiplies plain rows with the columns of a span of all rows, some of which come side by side; parts of results are
/// [plain][FEW][spans].
template <int ROWS> DEVICE void multiply_plain_rows(const SpanRows &p, u8 *shared, int plain, int span, const Numbers &factors) {
    const int STEP = ROWS == 1 ? 1 : 4;
    int lane = threadIdx.x % 32, spans = spans_of(p.cols), column = span * SPAN + lane * 8, count = rows_of<ROWS>(p);
    bool inside = column < p.cols;
    float *parts = (float *)(shared + p.plain_at), norm[8];
    const u8 *rows = (const u8 *)(parts + p.plain_each * FEW * spans);
    spread(factors, norm);
#pragma unroll 1
    for (int first = 0; first < count; first += STEP) {
        Numbers all[STEP];
        float y[STEP][8];
#pragma unroll
        for (int r = 0; r < STEP; r++) all[r] = numbers_at(row_of_x(p, min(first + r, count - 1)) + column, inside);
#pragma unroll
        for (int r = 0; r < STEP; r++) {
            spread(all[r], y[r]);
#pragma unroll
            for (int i = 0; i < 8; i++) y[r][i] *= norm[i];
        }
#pragma unroll 1
        for (int j = 0; j < plain; j += 4) {
            float own[STEP][4] = {};
            with_type(p.plain[0].type, All(), [&](auto type) {
                typedef decltype(type) T;
                if constexpr (T::LEN == 8) {
                    if (inside) plain_parts<STEP, T>(rows + j * plain_pitch(p), plain_pitch(p), column, y, own);
                }
            });
            int which = j + lane / 16 * 2 + lane / 8 % 2;
#pragma unroll
            for (int r = 0; r < STEP; r++) {
                float sum = four_sums(own[r]);
                if (lane % 8 == 0 && which < plain && first + r < count) parts[(which * FEW + first + r) * spans + span] = sum;
            }
        }
    }
}

/// The sum of squares of a span of row r.
DEVICE float squares_of_span(const SpanRows &p, const u8 *shared, int r, int span) {
    return *(const float *)(shared + (r * spans_of(p.cols) + span) * SPAN_X + SCALE_AT + 4);
}

/// What the sums of a row are multiplied with.
DEVICE float norm_of_squares(const SpanRows &p, float squares) { return p.norm ? rsqrtf(fmaf(squares, p.reciprocal, p.eps)) : 1.0f; }

DEVICE float norm_of(const SpanRows &p, const u8 *shared, int r) {
    float sum = 0.0f;
#pragma unroll 8
    for (int span = 0; span < spans_of(p.cols); span++) sum += squares_of_span(p, shared, r, span);
    return norm_of_squares(p, sum);
}

/// What a lane has of a tile: its rows l / 4 and l / 4 + 8 of a product are two of one quad, and lanes side by side have other quads.
DEVICE int quad_of(int lane) { return lane % 16 / 4; }

DEVICE int row_in_quad(int lane) { return lane / 16; } // and two behind it

/// Leaves a warp's sums of a tile: [count][16].
template <int SETS> DEVICE void put_sums(int lane, int count, float *to, const float c[2 * SETS]) {
    int r = lane % 4, row = quad_of(lane) * QUAD + row_in_quad(lane);
#pragma unroll
    for (int s = 0; s < SETS; s++) {
        float *at = to + (r + 4 * s) * TILE + row;
        if (r + 4 * s < count) at[0] = c[2 * s], at[2] = c[2 * s + 1];
    }
}

/// A thread's result of what a block's tiles are added to lies behind the parts of their sums.
DEVICE float *sums_behind(const SpanRows &p, u8 *shared, const Share &share, int rows) {
    return (float *)(shared + p.sums_at) + p.each * share.parts * TILE * rows;
}

/// A number of row r, all parts of which are `apart` from one another, added to `before`.
DEVICE float result_of(const SpanRows &p, const Share &share, const u8 *shared, int r, const float *from, int apart, float before) {
    float sum = 0.0f, squares = 0.0f;
#pragma unroll 8
    for (int part = 0; part < share.parts; part++) sum += from[part * apart], squares += squares_of_span(p, shared, r, part);
#pragma unroll 1
    for (int span = share.parts; span < spans_of(p.cols); span++) squares += squares_of_span(p, shared, r, span);
    return fmaf(sum, norm_of_squares(p, squares), before);
}

/// Results of a tile: where those of the first row begin, how many there are.
struct __align__(16) Outputs {
    float *to;
    int count;

    DEVICE Outputs of(const SpanRows &p, int tile) {
        Place place = Place::of(p, tile);
        const Matrix &m = p.matrices[place.matrix];
        Outputs out;
        out.to = m.out + place.first, out.count = m.rows - place.first;
        return out;
    }
};

/// Number i of the results of a block's tiles.
template <int ROWS> struct Result {
    int tile, row, output;

    DEVICE Result of(u32 i, int rows) {
        Result result;
        result.tile = ROWS == 1 ? i / TILE : small_quotient(i, rows * TILE);
        result.row = ROWS == 1 ? 0 : i / TILE - result.tile * rows, result.output = i % TILE;
        return result;
    }
};

/// What this thread's first result is added to; null if there is nothing.
template <int ROWS> DEVICE const float *first_sum(const SpanRows &p, const Tiles &tiles) {
    if (!p.add || threadIdx.x >= tiles.count * rows_of<ROWS>(p) * TILE) return nullptr;
    Result<ROWS> result = Result<ROWS>::of(threadIdx.x, rows_of<ROWS>(p));
    Outputs out = Outputs::of(p, tiles.first + result.tile);
    return result.output < out.count ? out.to + (long)result.row * p.out_stride + result.output : nullptr;
}

/// Adds up the warps' sums of a block's tiles.
template <int ROWS> DEVICE void store_tiles(const SpanRows &p, const Share &share, u8 *shared, const Outputs *outputs, int tiles) {
    int rows = rows_of<ROWS>(p), of_tile = rows * TILE;
    const float *sums = (const float *)(shared + p.sums_at);
#pragma unroll 1
    for (u32 i = threadIdx.x; i < tiles * of_tile; i += SPAN_THREADS) {
        Result<ROWS> result = Result<ROWS>::of(i, rows);
        Outputs out = outputs[result.tile];
        if (result.output >= out.count) continue;
        float *to = out.to + (long)result.row * p.out_stride + result.output;
        float before = p.add ? (ROWS == 1 || i < SPAN_THREADS ? sums_behind(p, shared, share, rows)[i] : *to) : 0.0f;
        const float *from = sums + result.tile * share.parts * of_tile + result.row * TILE + result.output;
        *to = result_of(p, share, shared, result.row, from, of_tile, before);
    }
}

/// Results of plain rows, and normed rows for others: some columns of each by each block.
template <int ROWS> DEVICE void store_plain(const SpanRows &p, const u8 *shared, int plain) {
    int spans = spans_of(p.cols);
    const float *parts = (const float *)(shared + p.plain_at);
#pragma unroll 1
    for (int i = SPAN_THREADS - 1 - threadIdx.x; i < plain * FEW; i += SPAN_THREADS) { // other threads than those of tiles
        int r = i % FEW, row;
        if (r >= rows_of<ROWS>(p)) continue;
        const Matrix &m = plain_row(p, i / FEW, row);
        float sum = 0.0f;
#pragma unroll 8
        for (int s = 0; s < spans; s++) sum += parts[i * spans + s];
        m.out[(long)r * p.out_stride + row] = sum * norm_of(p, shared, r);
    }
}

template <int ROWS> DEVICE void store_normed(const SpanRows &p, const u8 *shared) {
    int each = (p.cols / 2 + gridDim.x - 1) / gridDim.x; // pairs of columns
#pragma unroll 1
    for (int i = threadIdx.x ^ SPAN_THREADS / 2; i < each * rows_of<ROWS>(p); i += SPAN_THREADS) {
        int r = ROWS == 1 ? 0 : i / each, column = (blockIdx.x * each + i - r * each) * 2;
        if (column >= p.cols) continue;
        float2 v = *(const float2 *)(row_of_x(p, r) + column), w = *(const float2 *)(p.norm + column);
        float scale = norm_of(p, shared, r);
        v.x *= scale * w.x, v.y *= scale * w.y;
        if (p.normed) *(float2 *)(p.normed + (long)r * p.cols + column) = v;
        if (p.rounded) *(u32 *)(p.rounded + (long)r * p.cols + column) = bf16_pair(v.x, v.y);
    }
}

/// What this lane's columns of a span are multiplied with.
DEVICE Numbers factors_of(const SpanRows &p, int span) {
    int column = span * SPAN + threadIdx.x % 32 * 8;
    return numbers_at(p.norm + column, p.norm && column < p.cols);
}

/// Who stages a span: group by group, some rows each. Plain rows are left to the last group, if there are several.
template <int ROWS> struct Staged {
    int begin, end;         // this warp's rows
    bool all, multiplies;   // all rows are staged by the first group; this warp multiplies plain rows

    DEVICE Staged of(const SpanRows &p, const Share &share, int plain) {
        int rows = rows_of<ROWS>(p), stagers = plain > 0 ? max(share.groups - 1, 1) : share.groups;
        int each = ROWS == 1 ? 1 : small_quotient(rows + stagers - 1, stagers);
        Staged staged;
        staged.begin = share.group * each, staged.end = min(staged.begin + each, rows);
        staged.all = ROWS == 1 || stagers == 1, staged.multiplies = plain > 0 && share.group == share.groups - 1;
        return staged;
    }
};

/// Stages this warp's rows of its spans, STEP of them side by side; they are there for all warps of a span then.
template <int ROWS, int STEP>
DEVICE void stage_spans(const SpanRows &p, const Share &share, u8 *shared, const Staged<ROWS> &staged, int plain, Numbers factors) {
#pragma unroll 1
    for (int span = share.span;;) {
#pragma unroll 1
        for (int first = staged.begin; first < staged.end; first += STEP) stage_rows<STEP>(p, shared, first, staged.end, span, factors);
        if (staged.multiplies) multiply_plain_rows<ROWS>(p, shared, plain, span, factors);
        span += share.parts;
        if (span >= spans_of(p.cols)) break;
        factors = factors_of(p, span);
    }
    if (share.groups == 1) {
        __syncwarp();
    } else if (staged.all && share.group == 0) {
        announce(OF_SPANS + share.span, 32 * share.groups);
    } else if (share.group < share.groups) {
        meet(OF_SPANS + share.span, 32 * share.groups);
    }
}

/// What a lane multiplies of all tiles of a matrix, but for where they lie.
template <int ROWS> struct Lane {
    static const int SETS = SETS_OF<ROWS>;
    SpanX<SETS> x; // of the warp's first span
    int lane, low, apart; // low: from a tile to its first row; apart: from there to the second

    DEVICE Lane of(const SpanRows &p, const Share &share, const u8 *shared, int matrix) {
        const Matrix &m = p.matrices[matrix];
        Lane lane;
        lane.lane = (u32)unknown(threadIdx.x) % 32;
        lane.x = SpanX<SETS>::of(lane.lane, shared + share.span * SPAN_X, spans_of(p.cols) * SPAN_X, rows_of<ROWS>(p));
        // A tile begins where the matrix does, but for whole words of 16 bytes.
        u32 address = (u32)(u64)m.at + (u32)(quad_of(lane.lane) * QUAD * m.row_bytes);
        lane.low = quad_of(lane.lane) * p.quads[matrix] + (address & 15) + row_in_quad(lane.lane) * m.row_bytes;
        lane.apart = 2 * m.row_bytes;
        return lane;
    }
};

/// c += a tile of blocks T in shared memory by this warp's spans.
template <int ROWS, class T>
DEVICE void multiply_tile_spans(const SpanRows &p, const Share &share, const Lane<ROWS> &lane, const u8 *tile, float c[2 * SETS_OF<ROWS>]) {
    const int BYTES = SPAN / T::LEN * T::BYTES, SETS = SETS_OF<ROWS>;
    const u8 *low = tile + lane.low + share.span * BYTES;
    SpanX<SETS> x = lane.x;
    int left = p.cols - share.span * SPAN;
    // With its only end behind all it does, or the compiler writes it down twice.
#pragma unroll 1
    do {
        Span<T>::multiply(c, low, low + lane.apart, x, lane.lane % 4, left);
        left -= share.parts * SPAN, low += share.parts * BYTES;
        SpanX<SETS>::advance(x, share.parts);
    } while (left > 0);
}

/// Multiplies a group's tiles in the order in which they come.
template <int ROWS> DEVICE void multiply_tiles(const SpanRows &p, const Share &all, u8 *shared, u32 full) {
    const int SETS = SETS_OF<ROWS>;
    int i = all.group < all.groups ? all.group : MOST_TILES;
#pragma unroll 1
    for (;;) {
        // Worked out anew for each matrix: what lives on over products takes registers.
        Tiles tiles = Tiles::of(p, blockIdx.x);
        if (i >= tiles.count) break;
        int matrix = Place::of(p, tiles.first + i).matrix;
        int at = p.tiles_at + bytes_before(p, tiles.first, tiles.first + i);
        with_type(p.matrices[matrix].type, All(), [&](auto of) {
            typedef decltype(of) T;
            if constexpr (Span<T>::EXISTS) {
                Share share = all;
                share.span = unknown(all.span);
                Lane<ROWS> lane = Lane<ROWS>::of(p, share, shared, matrix);
#pragma unroll 1
                for (; i < tiles.count && tiles.first + i < p.ends[matrix]; i += share.groups, at += share.groups * QUADS * p.quads[matrix]) {
                    float c[2 * SETS] = {};
                    barrier_wait(full + 8 * i, 0);
                    multiply_tile_spans<ROWS, T>(p, share, lane, shared + at, c);
                    float *sums = (float *)(shared + p.sums_at) + (i * share.parts + share.span) * TILE * rows_of<ROWS>(p);
                    put_sums<SETS>((u32)unknown(threadIdx.x) % 32, rows_of<ROWS>(p), sums, c);
                }
            }
        });
    }
}

/// Makes a block's barriers, of tiles and, behind them, of plain rows, and asks for all of its weights: by its last warp, where one
/// warp does that, or all.
DEVICE void ask(const SpanRows &p, u8 *shared, const Tiles &tiles, u32 full) {
    u32 of_plain = full + 8 * MOST_TILES, to = shared_address(shared);
    bool last = threadIdx.x >= SPAN_THREADS - 32;
    if (last) {
        int i = threadIdx.x % 32;
        if (i < tiles.count) barrier_init(full + 8 * i, ARRIVALS * QUADS);
        if (i == MOST_TILES && tiles.plain > 0) barrier_init(of_plain, ARRIVALS * p.plain_each);
        barriers_made();
        __syncwarp();
    }
    if (ARRIVALS > 1) __syncthreads();
    else if (last) announce(OF_COPIES, SPAN_THREADS);
    if (ARRIVALS == 1 && !last) return;
    if (tiles.plain > 0) copy_plain(p, to + p.plain_at + p.plain_each * FEW * spans_of(p.cols) * 4, tiles.plain, of_plain);
    copy_tiles(p, tiles.first, tiles.count, to + p.tiles_at, full);
}

/// Grid: a block for each `each` tiles, or more if there are plain rows. Up to ROWS rows.
template <int ROWS> DEVICE void multiply_spans(const SpanRows &p) {
    extern __shared__ __align__(16) u8 shared[];
    __shared__ __align__(8) u64 barriers[MOST_TILES + 1]; // of tiles, and of plain rows
    __shared__ Outputs outputs[MOST_TILES];
    next();
    Tiles tiles = Tiles::of(p, unknown(blockIdx.x));
    u32 full = shared_address(barriers);
    ask(p, shared, tiles, full);
    Share share = Share::of(p.cols, SPAN_WARPS);
    Staged<ROWS> staged = Staged<ROWS>::of(p, share, tiles.plain);
    Numbers factors = factors_of(p, share.span);
    const float *sum = first_sum<ROWS>(p, tiles);
    // By a warp that has nothing to stage of one row.
    int which = (int)threadIdx.x - SPAN_THREADS / 2;
    if (which >= 0 && which < tiles.count) outputs[which] = Outputs::of(p, tiles.first + which);
    if (ARRIVALS == 1 && threadIdx.x < SPAN_THREADS - 32) meet(OF_COPIES, SPAN_THREADS);
    if (staged.multiplies) barrier_wait(full + 8 * MOST_TILES, 0);
    previous();
    float before = sum ? *sum : 0.0f;
    stage_spans<ROWS, ROWS <= 4 ? 1 : 4>(p, share, shared, staged, tiles.plain, factors);
    // Registers are short from here on.
    if (sum) sums_behind(p, shared, share, rows_of<ROWS>(p))[threadIdx.x] = before;
    multiply_tiles<ROWS>(p, share, shared, full);
    meet(0, SPAN_THREADS);
    store_tiles<ROWS>(p, share, shared, outputs, Tiles::of(p, unknown(blockIdx.x)).count);
    tiles = Tiles::of(p, unknown(blockIdx.x));
    if (tiles.plain > 0) store_plain<ROWS>(p, shared, tiles.plain);
    if (p.rounded || p.normed) store_normed<ROWS>(p, shared);
}

KERNEL __launch_bounds__(SPAN_THREADS, SPAN_BLOCKS) void single_spans(__grid_constant__ const SpanRows p) { multiply_spans<1>(p); }

KERNEL __launch_bounds__(SPAN_THREADS, 1) void few_spans(__grid_constant__ const SpanRows p) { multiply_spans<4>(p); }

KERNEL __launch_bounds__(SPAN_THREADS, 1) void more_spans(__grid_constant__ const SpanRows p) { multiply_spans<8>(p); }
