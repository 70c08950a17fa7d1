// The product of a matrix of very many rows, the head, with norms of up to eight rows of x: as `few_spans.cu`, but that blocks take
// tiles in turns, which come through a ring of stages.
//
// Warps wait for one another only where the sums of several tiles meet.
//
// Shared memory: x ([row][span] records of SPAN_X), sums of some tiles ([tile][warp][row][16]), twice, stages.

const int HEAD_THREADS = 256, HEAD_WARPS = HEAD_THREADS / 32, MOST_STAGES = 8;

struct HeadRows {
    SpanRows rows;              // `each`: tiles whose sums are added up at a time; `tiles_at`: of stages
    int stage_bytes, stages;
};

/// A tile of a block, in their order, and the stage it goes to, for the `use`th time.
struct Item {
    int tile, stage, use;

    DEVICE void advance(Item &item, int stages) {
        item.tile += gridDim.x;
        if (++item.stage == stages) item.stage = 0, item.use++;
    }
};

/// Begins to copy a tile to its stage, when every warp has read what was there: by the one warp whose turn it is, or all.
DEVICE void bring(const HeadRows &head, const Item &item, int turn, u32 to, u32 full, u32 empty) {
    if (item.tile >= head.rows.ends[3] || (ARRIVALS == 1 && threadIdx.x / 32 != turn % HEAD_WARPS)) return;
    if (item.use > 0) barrier_wait(empty + 8 * item.stage, (item.use - 1) & 1);
    copy_tiles(head.rows, item.tile, 1, to + item.stage * head.stage_bytes, full + 8 * item.stage);
}

/// Adds up the warps' sums of some tiles, the first of which is number `first`, others as many behind it as there are blocks.
DEVICE void store_turns(const SpanRows &p, const Share &share, const u8 *shared, const float *sums, int first, int tiles) {
    const Matrix &m = p.matrices[0];
    int of_tile = p.count * TILE;
#pragma unroll 1
    for (int i = threadIdx.x; i < tiles * of_tile; i += HEAD_THREADS) {
        int which = small_quotient(i, of_tile), rest = i - which * of_tile, r = rest / TILE;
        int output = (first + which * (int)gridDim.x) * TILE + rest % TILE;
        if (output >= m.rows) continue;
        const float *from = sums + which * share.parts * of_tile + rest;
        m.out[(long)r * p.out_stride + output] = result_of(p, share, shared, r, from, of_tile, 0.0f);
    }
}

/// Any grid. Up to ROWS rows.
template <int ROWS> DEVICE void multiply_head(const HeadRows &head) {
    extern __shared__ __align__(16) u8 shared[];
    __shared__ __align__(8) u64 barriers[2 * MOST_STAGES];
    next();
    const int SETS = SETS_OF<ROWS>;
    const SpanRows &p = head.rows;
    Share share = Share::of(p.cols, HEAD_WARPS);
    Staged<ROWS> staged = Staged<ROWS>::of(p, share, 0);
    int tiles = p.ends[3], of_tiles = p.each * share.parts * TILE * p.count;
    u32 full = shared_address(barriers), empty = full + 8 * MOST_STAGES, to = shared_address(shared) + p.tiles_at;
    if (threadIdx.x < MOST_STAGES) {
        barrier_init(full + 8 * threadIdx.x, QUADS * ARRIVALS), barrier_init(empty + 8 * threadIdx.x, HEAD_WARPS);
        barriers_made();
    }
    __syncthreads();
    Item now = {(int)blockIdx.x, 0, 0}, ahead = now;
    int turn = 0; // of `ahead`
#pragma unroll 1
    for (; turn < head.stages; turn++) bring(head, ahead, turn, to, full, empty), Item::advance(ahead, head.stages);
    Numbers factors = factors_of(p, share.span);
    previous();
    stage_spans<ROWS, ROWS <= 4 ? 1 : 4>(p, share, shared, staged, 0, factors);
    Lane<ROWS> lane = Lane<ROWS>::of(p, share, shared, 0);
    float *both = (float *)(shared + p.sums_at), *sums = both;
    int pending = 0, first = now.tile;
#pragma unroll 1
    for (int items = 0; now.tile < tiles; items++) {
        float c[2 * SETS] = {};
        barrier_wait(full + 8 * now.stage, now.use & 1);
        if (share.group == 0) {
            const u8 *tile = shared + p.tiles_at + now.stage * head.stage_bytes;
            with_type(p.matrices[0].type, All(), [&](auto of) {
                typedef decltype(of) T;
                if constexpr (Span<T>::EXISTS) multiply_tile_spans<ROWS, T>(p, share, lane, tile, c);
            });
            put_sums<SETS>(lane.lane, p.count, sums + (pending * share.parts + share.span) * TILE * p.count, c);
        }
        __syncwarp();
        if (threadIdx.x % 32 == 0) barrier_arrive(empty + 8 * now.stage);
        Item::advance(now, head.stages);
        // One stage behind: the other warps have read that one by now.
        if (items > 0 || head.stages == 1) bring(head, ahead, turn++, to, full, empty), Item::advance(ahead, head.stages);
        if (++pending < p.each && now.tile < tiles) continue;
        __syncthreads();
        store_turns(p, share, shared, sums, first, pending);
        // The other half, which was stored from before all came here.
        sums = sums == both ? both + of_tiles : both;
        pending = 0, first = now.tile;
    }
}

KERNEL __launch_bounds__(HEAD_THREADS, 2) void few_head(__grid_constant__ const HeadRows p) { multiply_head<4>(p); }

KERNEL __launch_bounds__(HEAD_THREADS, 2) void more_head(__grid_constant__ const HeadRows p) { multiply_head<8>(p); }
