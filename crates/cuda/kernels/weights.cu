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
    long to_stride;  // numbers from one listed expert's room to the next
    long groups;     // of one expert
    const u32 *list; // experts
};

/// Matrices of listed experts to bf16, one after the other. Grid: (groups, experts).
KERNEL void decode_experts(DecodeExperts p) {
    long index = (long)blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= p.groups) return;
    float w[8];
    decode_group(p.from + p.list[blockIdx.y] * p.stride, index, w);
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

/// Products of one row of weights with COUNT rows of x, each in one order of summation whatever COUNT is: lane l takes
/// the groups l, l + 32, …; then the lanes are summed.
template <int COUNT>
DEVICE void dot_rows(const u8 *weights, const float *x, long stride, int cols, float sums[COUNT]) {
    for (int r = 0; r < COUNT; r++) sums[r] = 0.0f;
    for (int g = threadIdx.x % 32; g < cols / 8; g += 32) {
        float w[8];
        decode_group(weights, g, w);
#pragma unroll
        for (int r = 0; r < COUNT; r++) {
            const float4 *at = (const float4 *)(x + r * stride) + g * 2;
            float4 a = at[0], b = at[1];
            sums[r] = fmaf(w[3], a.w, fmaf(w[2], a.z, fmaf(w[1], a.y, fmaf(w[0], a.x, sums[r]))));
            sums[r] = fmaf(w[7], b.w, fmaf(w[6], b.z, fmaf(w[5], b.y, fmaf(w[4], b.x, sums[r]))));
        }
    }
    for (int r = 0; r < COUNT; r++) sums[r] = warp_sum(sums[r]);
}

/// Matrices of one type and width that meet the same rows.
struct Gemv {
    const u8 *weights[4];
    float *out[4];
    int ends[4];          // outputs of the matrices before and including each
    const float *x;       // [count, cols]
    const float *scale;   // of each row's results; may be null
    int cols, count, x_stride, out_stride;
    int add;              // whether results are added to what is there
};

/// out[r][o] (+)= scale[r] · Σ weights[o] x[r]. A warp for each output.
template <int COUNT> DEVICE void gemv_rows(const Gemv &p) {
    int output = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (output >= p.ends[3]) return;
    int m = 0;
    while (output >= p.ends[m]) m++;
    int local = output - (m > 0 ? p.ends[m - 1] : 0);
    const u8 *row = p.weights[m] + (long)local * (p.cols / TYPE::LEN) * TYPE::BYTES;
    for (int first = 0; first < p.count; first += COUNT) {
        float sums[COUNT];
        dot_rows<COUNT>(row, p.x + (long)first * p.x_stride, p.x_stride, p.cols, sums);
#pragma unroll
        for (int r = 0; r < COUNT; r++) {
            if (threadIdx.x % 32 == r) {
                float value = p.scale ? sums[r] * p.scale[first + r] : sums[r];
                float *to = p.out[m] + (long)(first + r) * p.out_stride + local;
                *to = p.add ? *to + value : value;
            }
        }
    }
}

KERNEL void gemv_1(Gemv p) { gemv_rows<1>(p); }

/// `count` is a multiple of four.
KERNEL void gemv_4(Gemv p) { gemv_rows<4>(p); }

/// Experts of a wave, one bit each.
struct Mask {
    u32 bits[32];
};

DEVICE bool has(const Mask &mask, u32 expert) { return mask.bits[expert / 32] >> (expert % 32) & 1; }

struct ExpertDot {
    Mask mask;
    const u8 *weights[2];  // gate and up of expert 0
    long stride[2];        // bytes from one expert to the next
    float *out[2];         // [pairs, rows]
    const float *x;        // [pass rows, cols]
    const u32 *ids;        // [pass rows, used]
    int rows, cols, used;
};

/// Gate and up projections of each (row, expert) pair. Grid: (outputs / warps, pairs, matrices).
KERNEL void expert_dot(ExpertDot p) {
    int output = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, pair = blockIdx.y, m = blockIdx.z;
    u32 expert = p.ids[pair];
    if (output >= p.rows || !has(p.mask, expert)) return;
    const u8 *row = p.weights[m] + expert * p.stride[m] + (long)output * (p.cols / TYPE::LEN) * TYPE::BYTES;
    float sum[1];
    dot_rows<1>(row, p.x + (long)(pair / p.used) * p.cols, 0, p.cols, sum);
    if (threadIdx.x % 32 == 0) p.out[m][(long)pair * p.rows + output] = sum[0];
}

struct ExpertDown {
    Mask mask;
    const u8 *weights;    // down of expert 0: [rows, cols]
    long stride;          // bytes from one expert to the next
    const float *gate;    // [pairs, cols]
    const float *up;      // [pairs, cols]
    const u32 *ids;       // [pass rows, used]
    const u32 *order;     // [pass rows, used]: the chosen ones by ascending expert
    const float *chosen;  // [pass rows, used]: their weights
    float *sum;           // [pass rows, rows]
    float *hidden;        // [pass rows, rows]
    int rows, cols, used, last;
};

/// sum += Σ weight · down · (SiLU(gate) ⊙ up) over a row's experts, ascending; after the last wave the sum joins the
/// residual. Grid: (outputs, pass rows); a warp for each output; shared memory: used · cols floats.
KERNEL void expert_down(ExpertDown p) {
    extern __shared__ float inner[];
    long row = blockIdx.y;
    for (int i = threadIdx.x; i < p.used * p.cols; i += blockDim.x) {
        long at = row * p.used * p.cols + i;
        inner[i] = has(p.mask, p.ids[row * p.used + i / p.cols]) ? silu(p.gate[at]) * p.up[at] : 0.0f;
    }
    __syncthreads();
    int warps = blockDim.x / 32;
    for (int output = blockIdx.x * warps + threadIdx.x / 32; output < p.rows; output += gridDim.x * warps) {
        float total = p.sum[row * p.rows + output];
        for (int i = 0; i < p.used; i++) {
            u32 pair = p.order[row * p.used + i], expert = p.ids[row * p.used + pair];
            if (!has(p.mask, expert)) continue;
            long at = (long)output * (p.cols / TYPE::LEN) * TYPE::BYTES;
            float sum[1];
            dot_rows<1>(p.weights + expert * p.stride + at, inner + pair * p.cols, 0, p.cols, sum);
            total = fmaf(p.chosen[row * p.used + pair], sum[0], total);
        }
        if (threadIdx.x % 32 == 0) {
            p.sum[row * p.rows + output] = total;
            if (p.last) p.hidden[row * p.rows + output] += total;
        }
    }
}
