// Weights of one type, TYPE: decoding, and products with single rows.
//
// A matrix is [rows = outputs, cols = inputs] in file form, its rows one after the other.

/// Decodes group `index` (eight weights) of a run of blocks.
DEVICE void decode_group(const u8 *blocks, long index, float out[8]) {
    const int GROUPS = TYPE::LEN / 8;
    TYPE::decode(blocks + index / GROUPS * TYPE::BYTES, (u32)(index % GROUPS), out);
}

DEVICE uint4 round_group(const float w[8]) {
    return make_uint4(bf16_pair(w[0], w[1]), bf16_pair(w[2], w[3]), bf16_pair(w[4], w[5]), bf16_pair(w[6], w[7]));
}

struct Decode {
    const u8 *from;
    void *to;
    long groups;
};

/// groups · 8 weights to f32.
KERNEL void decode_f32(Decode p) {
    long index = (long)blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= p.groups) return;
    float w[8];
    decode_group(p.from, index, w);
    float4 *to = (float4 *)p.to + index * 2;
    to[0] = make_float4(w[0], w[1], w[2], w[3]);
    to[1] = make_float4(w[4], w[5], w[6], w[7]);
}

/// groups · 8 weights to bf16.
KERNEL void decode_bf16(Decode p) {
    long index = (long)blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= p.groups) return;
    float w[8];
    decode_group(p.from, index, w);
    ((uint4 *)p.to)[index] = round_group(w);
}

struct DecodeExperts {
    const u8 *from;  // expert 0's matrix
    u16 *to;         // room of the first listed expert
    long stride;     // bytes from one expert to the next
    const u64 *places; // of each expert's matrix instead; may be null
    long to_stride;  // numbers from one listed expert's room to the next
    long groups;     // of one expert
    const u32 *list; // experts
};

/// Matrices of listed experts to bf16, one after the other. Grid: (groups, experts).
KERNEL void decode_experts(DecodeExperts p) {
    long index = (long)blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= p.groups) return;
    float w[8];
    decode_group(expert_at(p.from, p.stride, p.places, p.list[blockIdx.y]), index, w);
    ((uint4 *)(p.to + blockIdx.y * p.to_stride))[index] = round_group(w);
}

struct DecodeSplit {
    const u8 *from;
    u16 *to;
    int rows, cols;
};

/// A matrix as sums of two bf16: row r becomes high | high | low, 3 · cols numbers. Against rows low | high | high
/// of activations their products are those of f32 but for 2^-17.
KERNEL void decode_split(DecodeSplit p) {
    long index = (long)blockIdx.x * blockDim.x + threadIdx.x, per_row = p.cols / 8;
    if (index >= p.rows * per_row) return;
    float w[8], low[8];
    decode_group(p.from, index, w);
    for (int i = 0; i < 8; i++) low[i] = w[i] - bf16_value(bf16(w[i]));
    uint4 *row = (uint4 *)p.to + index / per_row * 3 * per_row + index % per_row;
    row[0] = row[per_row] = round_group(w);
    row[2 * per_row] = round_group(low);
}

struct Embed {
    const u8 *table;
    const u32 *tokens;
    float *out;
    int cols;
};

/// Rows of the embedding. Grid: rows.
KERNEL void embed(Embed p) {
    long row = blockIdx.x, groups = p.cols / 8;
    for (long g = threadIdx.x; g < groups; g += blockDim.x) {
        float w[8];
        decode_group(p.table, p.tokens[row] * groups + g, w);
        float4 *to = (float4 *)(p.out + row * p.cols) + g * 2;
        to[0] = make_float4(w[0], w[1], w[2], w[3]);
        to[1] = make_float4(w[4], w[5], w[6], w[7]);
    }
}

// Products with single rows. A lane decodes UNIT consecutive weights at a time, so that scales are worked out once for
// them; lanes_of(cols) lanes share a row of weights, each takes every lanes-th unit, and their sums are added up crosswise.
// A row's sum is the same whatever rows of x or of weights are beside it.
//
// x lies in shared memory, number i at place(i): the units of eight neighbouring lanes begin in different banks.

const int UNIT = TYPE::LEN < 32 ? 8 : 32;

DEVICE int place(int i) { return i + i / 32 * 4; }

extern __shared__ __align__(16) float staged[];

/// Lanes that share a row of `cols` weights.
DEVICE int lanes_of(int cols) {
    int lanes = 32;
    while (lanes > 1 && lanes / 2 * UNIT >= cols) lanes /= 2;
    return lanes;
}

/// Copies a row to shared memory; with `up`, SiLU(x) ⊙ up.
DEVICE void stage_row(float *to, const float *x, const float *up, int cols) {
#pragma unroll 4
    for (int i = threadIdx.x * 4; i < cols; i += blockDim.x * 4) {
        float4 v = *(const float4 *)(x + i);
        if (up) {
            float4 u = *(const float4 *)(up + i);
            v = make_float4(silu(v.x) * u.x, silu(v.y) * u.y, silu(v.z) * u.z, silu(v.w) * u.w);
        }
        *(float4 *)(to + place(i)) = v;
    }
}

/// Lane `lane` of `lanes`: its part of the products of one row of weights with COUNT rows of x, `stride` apart.
template <int COUNT>
DEVICE void dot_part(const u8 *weights, const float *x, int stride, int cols, int lane, int lanes, float out[COUNT]) {
    float4 sums[COUNT];
#pragma unroll
    for (int r = 0; r < COUNT; r++) sums[r] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 2
    for (u32 unit = lane; unit < (u32)cols / UNIT; unit += lanes) {
        float w[UNIT];
#pragma unroll
        for (u32 i = 0; i < UNIT / 8; i++) {
            const u32 GROUPS = TYPE::LEN / 8;
            u32 group = unit * (UNIT / 8) + i;
            TYPE::decode(weights + group / GROUPS * TYPE::BYTES, group % GROUPS, w + 8 * i);
        }
        const float *at = x + place(unit * UNIT);
#pragma unroll
        for (int j = 0; j < UNIT; j += 4) {
#pragma unroll
            for (int r = 0; r < COUNT; r++) {
                float4 v = *(const float4 *)(at + r * stride + j);
                sums[r].x = fmaf(w[j], v.x, sums[r].x);
                sums[r].y = fmaf(w[j + 1], v.y, sums[r].y);
                sums[r].z = fmaf(w[j + 2], v.z, sums[r].z);
                sums[r].w = fmaf(w[j + 3], v.w, sums[r].w);
            }
        }
    }
#pragma unroll
    for (int r = 0; r < COUNT; r++) out[r] = (sums[r].x + sums[r].y) + (sums[r].z + sums[r].w);
}

/// The sum over groups of `lanes` lanes, in every lane of the group.
DEVICE float group_sum(float x, int lanes) {
    for (int step = lanes / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

DEVICE long row_bytes(int cols) { return (long)(cols / TYPE::LEN) * TYPE::BYTES; }

/// Matrices of one type and width that meet the same rows.
struct Gemv {
    const u8 *weights[4];
    float *out[4];
    int ends[4];          // outputs of the matrices before and including each
    const float *x;       // [count, cols]
    const float *up;      // [count, cols]: if not null, x is SiLU(x) ⊙ up
    const float *scale;   // of each row's results; may be null
    int cols, count, x_stride, out_stride;
    int add;              // whether results are added to what is there
};

/// out[r][o] (+)= scale[r] · Σ weights[o] x[r]. Shared memory: COUNT rows of place(cols) numbers.
template <int COUNT> DEVICE void gemv_rows(const Gemv &p) {
    float *x = staged;
    int stride = place(p.cols) + 4, lanes = lanes_of(p.cols), per_warp = 32 / lanes;
    int lane = threadIdx.x % lanes, warps = gridDim.x * (blockDim.x / 32);
    int warp = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, own = threadIdx.x % 32 / lanes;
    for (int first = 0; first < p.count; first += COUNT) {
        __syncthreads();
        for (int r = 0; r < COUNT; r++) {
            long at = (long)(first + r) * p.x_stride;
            stage_row(x + r * stride, p.x + at, p.up ? p.up + at : 0, p.cols);
        }
        __syncthreads();
        for (int base = warp * per_warp; base < p.ends[3]; base += warps * per_warp) {
            int output = min(base + own, p.ends[3] - 1), m = 0;
            while (output >= p.ends[m]) m++;
            int local = output - (m > 0 ? p.ends[m - 1] : 0);
            float sums[COUNT];
            dot_part<COUNT>(p.weights[m] + local * row_bytes(p.cols), x, stride, p.cols, lane, lanes, sums);
#pragma unroll
            for (int r = 0; r < COUNT; r++) {
                float value = group_sum(sums[r], lanes);
                if (lane == 0 && base + own < p.ends[3]) {
                    if (p.scale) value *= p.scale[first + r];
                    float *to = p.out[m] + (long)(first + r) * p.out_stride + local;
                    *to = p.add ? *to + value : value;
                }
            }
        }
    }
}

KERNEL __launch_bounds__(256, 3) void gemv_1(__grid_constant__ const Gemv p) { gemv_rows<1>(p); }

/// `count` is a multiple of four.
KERNEL __launch_bounds__(256) void gemv_4(__grid_constant__ const Gemv p) { gemv_rows<4>(p); }

/// Experts of a wave, one bit each.
struct Mask {
    u32 bits[32];
};

DEVICE bool has(const Mask &mask, u32 expert) { return mask.bits[expert / 32] >> (expert % 32) & 1; }

struct ExpertDot {
    Mask mask;
    const u8 *weights[2];  // gate and up of expert 0; up may be null, its stride then 0
    long stride[2];        // bytes from one expert to the next
    const u64 *places[2];  // of each expert's matrix instead; may be null
    float *out;            // [pairs, rows]: SiLU(gate) ⊙ up, or the products with gate alone
    const float *x;        // [pass rows, cols]
    const u32 *ids;        // [pass rows, used]
    int rows, cols, used;
};

/// Gate and up projections of each (row, expert) pair. Grid: (parts of the outputs, pairs); shared memory: place(cols).
KERNEL __launch_bounds__(256) void expert_dot(__grid_constant__ const ExpertDot p) {
    float *x = staged;
    int pair = blockIdx.y, lanes = lanes_of(p.cols), per_warp = 32 / lanes, lane = threadIdx.x % lanes;
    u32 expert = p.ids[pair];
    if (!has(p.mask, expert)) return;
    const u8 *first = expert_at(p.weights[0], p.stride[0], p.places[0], expert);
    const u8 *second = expert_at(p.weights[1], p.stride[1], p.places[1], expert);
    stage_row(x, p.x + (long)(pair / p.used) * p.cols, 0, p.cols);
    __syncthreads();
    int warps = gridDim.x * (blockDim.x / 32), own = threadIdx.x % 32 / lanes;
    int warp = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    for (int base = warp * per_warp; base < p.rows; base += warps * per_warp) {
        int output = min(base + own, p.rows - 1);
        long at = output * row_bytes(p.cols);
        float gate[1], up[1];
        dot_part<1>(first + at, x, 0, p.cols, lane, lanes, gate);
        if (second) dot_part<1>(second + at, x, 0, p.cols, lane, lanes, up);
        float value = group_sum(gate[0], lanes);
        if (second) value = silu(value) * group_sum(up[0], lanes);
        if (lane == 0 && base + own < p.rows) p.out[(long)pair * p.rows + output] = value;
    }
}

struct ExpertDown {
    Mask mask;
    const u8 *weights;    // down of expert 0: [rows, cols]
    long stride;          // bytes from one expert to the next
    const u64 *places;    // of each expert's matrix instead; may be null
    const float *x;       // [pairs, cols]
    const float *up;      // [pairs, cols]: if not null, x is SiLU(x) ⊙ up
    const u32 *ids;       // [pass rows, used]
    const u32 *order;     // [pass rows, used]: the chosen ones by ascending expert
    const float *chosen;  // [pass rows, used]: their weights
    float *sum;           // [pass rows, rows]
    float *hidden;        // [pass rows, rows]
    int rows, cols, used, last;
};

/// sum += Σ weight · down · x over a row's experts, ascending; after the last wave the sum joins the residual.
/// Grid: (parts of the outputs, pass rows); shared memory: used rows of place(cols).
KERNEL __launch_bounds__(256) void expert_down(__grid_constant__ const ExpertDown p) {
    float *x = staged;
    const int ABREAST = 4;
    long row = blockIdx.y * p.used;
    int stride = place(p.cols) + 4, lanes = lanes_of(p.cols), per_warp = 32 / lanes;
    int lane = threadIdx.x % lanes, own = threadIdx.x % 32 / lanes, warps = blockDim.x / 32;
    for (int i = 0; i < p.used; i++) {
        long at = (row + i) * p.cols;
        if (has(p.mask, p.ids[row + i])) stage_row(x + i * stride, p.x + at, p.up ? p.up + at : 0, p.cols);
    }
    __syncthreads();
    for (int output = blockIdx.x * warps + threadIdx.x / 32; output < p.rows; output += gridDim.x * warps) {
        long at = output * row_bytes(p.cols), place_of_sum = (long)blockIdx.y * p.rows + output;
        float total = p.sum[place_of_sum];
        // Groups of lanes take experts in turns; their products join the sum one by one.
        for (int first = 0; first < p.used; first += ABREAST * per_warp) {
            float sums[ABREAST][1];
#pragma unroll
            for (int i = 0; i < ABREAST; i++) {
                int rank = first + i * per_warp + own;
                u32 pair = p.order[row + min(rank, p.used - 1)], expert = p.ids[row + pair];
                sums[i][0] = 0.0f;
                if (rank < p.used && has(p.mask, expert)) {
                    dot_part<1>(expert_at(p.weights, p.stride, p.places, expert) + at, x + pair * stride, 0, p.cols, lane, lanes, sums[i]);
                }
            }
#pragma unroll
            for (int i = 0; i < ABREAST; i++) {
                float dot = group_sum(sums[i][0], lanes);
                for (int group = 0; group < per_warp; group++) {
                    int rank = first + i * per_warp + group;
                    float value = __shfl_sync(0xffffffffu, dot, group * lanes);
                    if (rank >= p.used) continue;
                    u32 pair = p.order[row + rank];
                    if (has(p.mask, p.ids[row + pair])) total = fmaf(p.chosen[row + pair], value, total);
                }
            }
        }
        if (threadIdx.x % 32 == 0) {
            p.sum[place_of_sum] = total;
            if (p.last) p.hidden[place_of_sum] += total;
        }
    }
}
