// Dense products with up to eight rows of x (`few.cuh`): matrices side by side behind one norm.

struct FewRows {
    Matrix matrices[4];   // of types of blocks
    int ends[4];          // tiles of the matrices before and including each
    Matrix plain[2];      // of numbers: computed in f32
    int plain_rows, plain_blocks;
    const float *x;       // [rows, cols]: normed first
    const u16 *numbers;   // instead: [count, cols] bf16 as they are
    const u32 *index;     // which rows of x; may be null: all
    const float *norm;    // [cols]
    float *normed;        // the normed rows, f32; may be null
    u16 *rounded;         // the same as bf16; may be null
    int cols, count, out_stride, add;
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

/// Brings x to shared memory as bf16; block 0 stores what others want of it.
DEVICE void stage_x(const FewRows &p, u16 *x, float *room, bool store) {
    int stride = x_stride(p.cols);
#pragma unroll 1
    for (int r = 0; r < p.count; r++) pad_x(x + r * stride, p.cols);
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
    if (!p.numbers) norm_scales(p, room);
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
