// Weights of one type, TYPE: decoding.
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

const int MOST_MATRICES = 4;

/// Matrices of one type, of which the room of each lies behind that of the one before.
struct Decode {
    const u8 *from[MOST_MATRICES];
    long ends[MOST_MATRICES]; // groups up to the end of each, the last one's end for those that are not there
    void *to;
};

/// Decodes a group, and returns whether there is one.
DEVICE bool decode_one(const Decode &p, long index, float w[8]) {
    if (index >= p.ends[MOST_MATRICES - 1]) return false;
    const u8 *from = p.from[0];
    long start = 0;
#pragma unroll
    for (int i = 1; i < MOST_MATRICES; i++) {
        if (index >= p.ends[i - 1]) from = p.from[i], start = p.ends[i - 1];
    }
    decode_group(from, index - start, w);
    return true;
}

/// Weights to f32.
KERNEL void decode_f32(__grid_constant__ const Decode p) {
    long index = (long)blockIdx.x * blockDim.x + threadIdx.x;
    float w[8];
    if (!decode_one(p, index, w)) return;
    float4 *to = (float4 *)p.to + index * 2;
    to[0] = make_float4(w[0], w[1], w[2], w[3]);
    to[1] = make_float4(w[4], w[5], w[6], w[7]);
}

/// Weights to bf16. They are decoded while the kernel before may still use the room.
KERNEL void decode_bf16(__grid_constant__ const Decode p) {
    next();
    long index = (long)blockIdx.x * blockDim.x + threadIdx.x;
    float w[8];
    if (!decode_one(p, index, w)) return;
    previous();
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

/// A matrix as sums of two bf16: [rows, 2, cols], high and low. Against activations that are sums of two, their
/// products are those of f32 but for 2^-17 without low · low.
KERNEL void decode_split(DecodeSplit p) {
    next();
    long index = (long)blockIdx.x * blockDim.x + threadIdx.x, per_row = p.cols / 8;
    if (index >= p.rows * per_row) return;
    float w[8], low[8];
    decode_group(p.from, index, w);
    for (int i = 0; i < 8; i++) low[i] = w[i] - bf16_value(bf16(w[i]));
    previous();
    uint4 *row = (uint4 *)p.to + index / per_row * 2 * per_row + index % per_row;
    row[0] = round_group(w);
    row[per_row] = round_group(low);
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
