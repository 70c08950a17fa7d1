// The product of a matrix of very many rows, the head, with norms of up to eight rows of x (`few.cuh`).
//
// Each warp has one span of 256 columns (`spans.cuh`) of all tiles of its block, or several if K is longer than 2048; x stays in
// its registers. Tiles come into stages in file form, which the first warp has copied; warps wait for one another only where
// the sums of several tiles meet. Spans are added up in their order.
//
// x in shared memory as f16: run i of row r at r · x_row + 40 i.

const int HEAD_THREADS = 256, HEAD_WARPS = HEAD_THREADS / 32, SPANS = SEGMENT / SPAN, MOST_STAGES = 8;
static_assert(SPANS == HEAD_WARPS, "a span of a segment for each warp");

#if __CUDA_ARCH__ >= 900
const int COPIERS = TILE; // lanes that arrive when a stage is copied

/// Begins to copy whole words of 16 bytes, as an arrival at a barrier, which waits for them as well.
DEVICE void barrier_copy(u32 to, const void *from, int bytes, u32 barrier) {
    barrier_expect(barrier, bytes);
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
                 "r"(bytes), "r"(barrier)
                 : "memory");
}

/// Begins to copy rows of `bytes` to windows `stride` apart: a lane for each row.
DEVICE void copy_rows(u32 to, int stride, const u8 *from, int row_bytes, int rows, int bytes, u32 barrier) {
    int lane = threadIdx.x % 32;
    if (lane >= COPIERS) return;
    if (lane >= rows) return barrier_arrive(barrier);
    from += (long)lane * row_bytes;
    const u8 *first = (const u8 *)((u64)from & ~15ull);
    barrier_copy(to + lane * stride, first, ((int)(from - first) + bytes + 15) / 16 * 16, barrier);
}
#else
const int COPIERS = 32;

/// Begins to copy rows of `bytes` to windows `stride` apart, row by row.
DEVICE void copy_rows(u32 to, int stride, const u8 *from, int row_bytes, int rows, int bytes, u32 barrier) {
    for (int row = 0; row < rows; row++, from += row_bytes) {
        const u8 *first = (const u8 *)((u64)from & ~15ull);
        int all = (int)(from - first) + bytes;
        for (int i = threadIdx.x % 32 * 16; i < all; i += 32 * 16) copy_16(to + row * stride + i, first + i, true);
    }
    barrier_arrive_copied(barrier);
}
#endif

/// Numbers of a row of x in shared memory.
DEVICE int x_row(int cols) { return spans_of(cols) * 8 * RUN + 8; }

/// A segment of a tile of a block, in their order, and the stage it goes to, for the `use`th time.
struct Item {
    int tile, segment, stage, use;

    DEVICE void advance(Item &item, int segments, int stages) {
        if (++item.segment == segments) item.segment = 0, item.tile += gridDim.x;
        if (++item.stage == stages) item.stage = 0, item.use++;
    }
};

/// Brings norms of rows to shared memory as f16, zeros behind their columns.
DEVICE void stage_halves(const FewRows &p, u16 *x, const float *room) {
    int chunks = spans_of(p.cols) * SPAN / 4, stride = x_row(p.cols);
#pragma unroll 2
    for (int i = threadIdx.x; i < p.count * chunks; i += HEAD_THREADS) {
        int r = i / chunks, column = (i - r * chunks) * 4;
        float4 y = column < p.cols ? normed_at(p, r, column, room) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        *(uint2 *)(x + r * stride + x_at(column)) = make_uint2(f16_pair(y.x, y.z), f16_pair(y.y, y.w));
    }
}

/// This lane's runs of a span of x.
template <class T> DEVICE void load_x(const FewRows &p, const u16 *all, int span, u32 x[2][16]) {
    const u16 *from = all + min((int)threadIdx.x % 32 / 4, p.count - 1) * x_row(p.cols) + span * 8 * RUN;
#pragma unroll
    for (int j = 0; j < 2; j++) {
        const uint2 *at = (const uint2 *)(from + Span<T>::own(j) * RUN);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            uint2 v = at[Span<T>::order(i)];
            x[j][2 * i] = v.x, x[j][2 * i + 1] = v.y;
        }
    }
}

/// Leaves a warp's sums of a tile: [count][16]. Begins new ones.
DEVICE void put_sums(const FewRows &p, float *to, float c[4]) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int column = lane % 4 * 2 + i % 2;
        if (column < p.count) to[column * TILE + lane / 4 + i / 2 * 8] = c[i];
        c[i] = 0.0f;
    }
}

/// Adds up the warps' sums of some tiles from `first` on: thread i has output i % 16 of row i / 16 % count of tile i / 16 / count.
DEVICE void store_tiles(const FewRows &p, const float *sums, int first, int tiles) {
    int r = threadIdx.x / TILE % p.count, which = threadIdx.x / TILE / p.count;
    int output = (first + which * gridDim.x) * TILE + threadIdx.x % TILE;
    if (which >= tiles || output >= p.matrices[0].rows) return;
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < HEAD_WARPS; w++) sum += sums[w * HEAD_THREADS + threadIdx.x];
    p.matrices[0].out[(long)r * p.out_stride + output] = sum;
}

/// Any grid: blocks take tiles in turns. Shared memory: x, 2 · 8 · 256 floats, stages.
KERNEL __launch_bounds__(HEAD_THREADS, 2) void few_head(__grid_constant__ const FewRows p) {
    extern __shared__ __align__(16) u8 shared[];
    __shared__ __align__(8) u64 barriers[2 * MOST_STAGES];
    next();
    const Matrix &m = p.matrices[0];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, tiles = p.ends[0], spans = spans_of(p.cols);
    int segments = (spans + SPANS - 1) / SPANS, stride = window(min(m.segment_bytes, m.row_bytes));
    u32 full = shared_address(barriers), empty = full + 8 * MOST_STAGES;
    float *room = (float *)(shared + p.room_at), *sums = room;
    if (threadIdx.x == 0) {
        for (int i = 0; i < p.stages; i++) barrier_init(full + 8 * i, COPIERS), barrier_init(empty + 8 * i, HEAD_WARPS);
        barriers_made();
    }
    __syncthreads();
    Item now = {(int)blockIdx.x, 0, 0, 0}, ahead = now;
    auto bring = [&]() {
        if (warp > 0 || ahead.tile >= tiles) return;
        if (ahead.use > 0) barrier_wait(empty + 8 * ahead.stage, (ahead.use - 1) & 1);
        int bytes = min(m.segment_bytes, m.row_bytes - ahead.segment * m.segment_bytes);
        const u8 *from = m.at + (long)ahead.tile * TILE * m.row_bytes + ahead.segment * m.segment_bytes;
        copy_rows(shared_address(shared) + p.stages_at + ahead.stage * p.stage_bytes, stride, from, m.row_bytes,
                  min(TILE, m.rows - ahead.tile * TILE), bytes, full + 8 * ahead.stage);
        Item::advance(ahead, segments, p.stages);
    };
#pragma unroll 1
    for (int i = 0; i < p.stages; i++) bring();
    previous();
    norm_scales(p, room);
    stage_halves(p, (u16 *)shared, room);
    __syncthreads();

    // Sums of tiles wait until there are as many as threads have results for.
    int each = min(HEAD_THREADS / (TILE * p.count), 8), pending = 0, first = now.tile;
    with_type(m.type, All(), [&](auto type) {
        typedef decltype(type) T;
        if constexpr (Span<T>::EXISTS) {
            u32 x[2][16];
            float c[4] = {};
            if (warp < spans) load_x<T>(p, (const u16 *)shared, warp, x);
#pragma unroll 1
            for (int items = 0; now.tile < tiles; items++) {
                int span = now.segment * SPANS + warp;
                barrier_wait(full + 8 * now.stage, now.use & 1);
                if (span < spans) {
                    if (segments > 1) load_x<T>(p, (const u16 *)shared, span, x);
                    const u8 *stage = shared + p.stages_at + now.stage * p.stage_bytes + warp * (m.segment_bytes / SPANS);
                    const u8 *row = m.at + (long)(now.tile * TILE + lane / 4) * m.row_bytes + now.segment * m.segment_bytes;
                    const u8 *low = stage + lane / 4 * stride + ((u64)row & 15);
                    const u8 *high = stage + (lane / 4 + 8) * stride + ((u64)(row + 8 * m.row_bytes) & 15);
                    Span<T>::multiply(c, low, high, x, p.cols - span * SPAN);
                }
                __syncwarp();
                if (lane == 0) barrier_arrive(empty + 8 * now.stage);
                bool whole = now.segment == segments - 1;
                Item::advance(now, segments, p.stages);
                // One stage behind: the other warps have read that one by now.
                if (items > 0 || p.stages == 1) bring();
                if (!whole) continue;
                put_sums(p, sums + warp * HEAD_THREADS + pending * TILE * p.count, c);
                if (++pending < each && now.tile < tiles) continue;
                __syncthreads();
                store_tiles(p, sums, first, pending);
                sums = sums == room ? room + HEAD_WARPS * HEAD_THREADS : room;
                pending = 0, first = now.tile;
            }
        }
    });
}
