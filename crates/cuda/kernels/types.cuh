// Decoders of the weight types: eight consecutive weights of a block, with the operations of the format's
// definition one by one (no multiply-adds), so that they agree to the bit with every other decoder.
//
// Each type has LEN weights in a block of BYTES bytes; group g of a block is its weights 8 g .. 8 g + 8. Blocks lie
// where files put them: those of an odd number of bytes are read by bytes, the others by 16-bit words.
// The codebooks `IQ1_GRID`, `IQ2_XXS_GRID`, … come from the host, eight (IQ3: four) bytes a row.

DEVICE u32 half_word(const u8 *block, int at) { return *(const u16 *)(block + at); }

DEVICE u32 word(const u8 *block, int at) { return half_word(block, at) | half_word(block, at + 2) << 16; }

DEVICE float half_at(const u8 *block, int at) { return f16_value((u16)half_word(block, at)); }

DEVICE u32 nibble(const u8 *field, u32 i) { return field[i / 2] >> (i % 2 * 4) & 15; }

/// The signs of eight weights from the seven bits stored: the eighth makes the number of negative ones even.
DEVICE u32 even_signs(u32 stored) { return stored | (__popc(stored) & 1) << 7; }

/// Eight weights of magnitudes (bytes, the first lowest): bit i of `signs` negates weight i.
DEVICE void signed_row(u32 low, u32 high, float scale, u32 signs, float out[8]) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
        float magnitude = (float)((i < 4 ? low : high) >> (8 * (i % 4)) & 255);
        u32 sign = signs << (31 - i) & 0x80000000u;
        out[i] = __uint_as_float(__float_as_uint(__fmul_rn(scale, magnitude)) ^ sign);
    }
}

/// Eight weights of a ternary row: scale · (entry + delta).
DEVICE void shifted_row(u64 row, float scale, float delta, float out[8]) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
        float entry = (float)(signed char)(row >> (8 * i));
        out[i] = __fmul_rn(scale, __fadd_rn(entry, delta));
    }
}

struct F32 {
    static const int LEN = 8, BYTES = 32;
    DEVICE void decode(const u8 *block, u32, float out[8]) {
        float4 a = ((const float4 *)block)[0], b = ((const float4 *)block)[1];
        out[0] = a.x, out[1] = a.y, out[2] = a.z, out[3] = a.w, out[4] = b.x, out[5] = b.y, out[6] = b.z, out[7] = b.w;
    }
};

struct F16 {
    static const int LEN = 8, BYTES = 16;
    DEVICE void decode(const u8 *block, u32, float out[8]) {
        uint4 all = *(const uint4 *)block;
        u32 pairs[4] = {all.x, all.y, all.z, all.w};
#pragma unroll
        for (int i = 0; i < 8; i++) out[i] = f16_value((u16)(pairs[i / 2] >> (i % 2 * 16)));
    }
};

struct BF16 {
    static const int LEN = 8, BYTES = 16;
    DEVICE void decode(const u8 *block, u32, float out[8]) {
        uint4 all = *(const uint4 *)block;
        u32 pairs[4] = {all.x, all.y, all.z, all.w};
#pragma unroll
        for (int i = 0; i < 8; i++) out[i] = bf16_value((u16)(pairs[i / 2] >> (i % 2 * 16)));
    }
};

struct Q8_0 {
    static const int LEN = 32, BYTES = 34;
    DEVICE void decode(const u8 *block, u32 group, float out[8]) {
        float d = half_at(block, 0);
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
            u32 pair = half_word(block, 2 + 8 * group + i);
            out[i] = __fmul_rn(d, (float)(signed char)pair);
            out[i + 1] = __fmul_rn(d, (float)(signed char)(pair >> 8));
        }
    }
};

/// Weight i of a group in nibbles of 16 bytes: byte j holds the weights j and j + 16.
DEVICE u32 split_nibble(const u8 *nibbles, u32 group, int i) {
    return nibbles[group % 2 * 8 + i] >> (group / 2 * 4) & 15;
}

struct Q4_0 {
    static const int LEN = 32, BYTES = 18;
    DEVICE void decode(const u8 *block, u32 group, float out[8]) {
        float d = half_at(block, 0);
        for (int i = 0; i < 8; i++) {
            out[i] = __fmul_rn(d, (float)((int)split_nibble(block + 2, group, i) - 8));
        }
    }
};

struct Q4_1 {
    static const int LEN = 32, BYTES = 20;
    DEVICE void decode(const u8 *block, u32 group, float out[8]) {
        float d = half_at(block, 0), m = half_at(block, 2);
        for (int i = 0; i < 8; i++) {
            out[i] = __fadd_rn(__fmul_rn(d, (float)split_nibble(block + 4, group, i)), m);
        }
    }
};

struct Q5_0 {
    static const int LEN = 32, BYTES = 22;
    DEVICE void decode(const u8 *block, u32 group, float out[8]) {
        float d = half_at(block, 0);
        u32 fifth = word(block, 2) >> (8 * group);
        for (int i = 0; i < 8; i++) {
            int q = split_nibble(block + 6, group, i) | (fifth >> i & 1) << 4;
            out[i] = __fmul_rn(d, (float)(q - 16));
        }
    }
};

struct Q5_1 {
    static const int LEN = 32, BYTES = 24;
    DEVICE void decode(const u8 *block, u32 group, float out[8]) {
        float d = half_at(block, 0), m = half_at(block, 2);
        u32 fifth = word(block, 4) >> (8 * group);
        for (int i = 0; i < 8; i++) {
            u32 q = split_nibble(block + 8, group, i) | (fifth >> i & 1) << 4;
            out[i] = __fadd_rn(__fmul_rn(d, (float)q), m);
        }
    }
};

struct MXFP4 {
    static const int LEN = 32, BYTES = 17;
    DEVICE void decode(const u8 *block, u32 group, float out[8]) {
        u32 e = block[0];
        float d = __uint_as_float(e < 2 ? 1u << (21 + e) : (e - 1) << 23);
        for (int i = 0; i < 8; i++) {
            u32 q = split_nibble(block + 1, group, i);
            out[i] = __fmul_rn(d, (float)MXFP4_VALUES[q]);
        }
    }
};

/// The 6-bit scale and min of run `run` of 32 weights, packed into the twelve bytes at `packed`.
DEVICE void six_bit_scales(const u8 *packed, u32 run, u32 &scale, u32 &min) {
    // Without branches, so that groups of one run share the work.
    u32 a = packed[run % 4], b = packed[run % 4 + 4], c = packed[run % 4 + 8];
    scale = run < 4 ? a & 63 : (c & 15) | a >> 6 << 4;
    min = run < 4 ? b & 63 : c >> 4 | b >> 6 << 4;
}

/// Where in its field of two-bit numbers a group begins, and at which bit of its bytes.
DEVICE int two_bit_byte(u32 group) { return group / 16 * 32 + group % 4 * 8; }
DEVICE int two_bit_shift(u32 group) { return group % 16 / 4 * 2; }

struct Q2_K {
    static const int LEN = 256, BYTES = 84;
    DEVICE void decode(const u8 *block, u32 group, float out[8]) {
        u32 scales = block[group / 2];
        float scale = __fmul_rn(half_at(block, 80), (float)(scales & 15));
        float min = __fmul_rn(half_at(block, 82), (float)(scales >> 4));
        const u8 *q = block + 16 + two_bit_byte(group);
        for (int i = 0; i < 8; i++) {
            float value = (float)(q[i] >> two_bit_shift(group) & 3);
            out[i] = __fsub_rn(__fmul_rn(scale, value), min);
        }
    }
};

struct Q3_K {
    static const int LEN = 256, BYTES = 110;
    DEVICE void decode(const u8 *block, u32 group, float out[8]) {
        u32 run = group / 2;
        u32 low_scale = block[96 + run % 8] >> (run / 8 * 4) & 15;
        u32 high_scale = block[104 + run % 4] >> (run / 4 * 2) & 3;
        float scale = __fmul_rn(half_at(block, 108), (float)((int)(low_scale | high_scale << 4) - 32));
        const u8 *q = block + 32 + two_bit_byte(group), *third = block + group % 4 * 8;
        for (int i = 0; i < 8; i++) {
            int value = (q[i] >> two_bit_shift(group) & 3) | (third[i] >> (group / 4) & 1) << 2;
            out[i] = __fmul_rn(scale, (float)(value - 4));
        }
    }
};

struct Q4_K {
    static const int LEN = 256, BYTES = 144;
    DEVICE void decode(const u8 *block, u32 group, float out[8]) {
        u32 run = group / 4;
        u32 s, m;
        six_bit_scales(block + 4, run, s, m);
        float scale = __fmul_rn(half_at(block, 0), (float)s), min = __fmul_rn(half_at(block, 2), (float)m);
        const u32 *q = (const u32 *)(block + 16 + run / 2 * 32 + group % 4 * 8);
        u32 bits[2] = {q[0] >> (run % 2 * 4), q[1] >> (run % 2 * 4)};
#pragma unroll
        for (int i = 0; i < 8; i++) {
            float value = (float)(bits[i / 4] >> (i % 4 * 8) & 15);
            out[i] = __fsub_rn(__fmul_rn(scale, value), min);
        }
    }
};

struct Q5_K {
    static const int LEN = 256, BYTES = 176;
    DEVICE void decode(const u8 *block, u32 group, float out[8]) {
        u32 run = group / 4;
        u32 s, m;
        six_bit_scales(block + 4, run, s, m);
        float scale = __fmul_rn(half_at(block, 0), (float)s), min = __fmul_rn(half_at(block, 2), (float)m);
        const u32 *q = (const u32 *)(block + 48 + run / 2 * 32 + group % 4 * 8);
        const u32 *fifth = (const u32 *)(block + 16 + group % 4 * 8);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            u32 low = q[i / 4] >> (run % 2 * 4 + i % 4 * 8) & 15;
            float value = (float)(low | (fifth[i / 4] >> (run + i % 4 * 8) & 1) << 4);
            out[i] = __fsub_rn(__fmul_rn(scale, value), min);
        }
    }
};

struct Q6_K {
    static const int LEN = 256, BYTES = 210;
    DEVICE void decode(const u8 *block, u32 group, float out[8]) {
        float scale = __fmul_rn(half_at(block, 208), (float)(signed char)block[192 + group / 2]);
        const u8 *low = block + group / 16 * 64 + group % 8 * 8, *high = block + 128 + two_bit_byte(group);
        int low_shift = group % 16 / 8 * 4, high_shift = two_bit_shift(group);
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
            u32 pair = half_word(low, i) >> low_shift, top = half_word(high, i) >> high_shift;
            out[i] = __fmul_rn(scale, (float)((int)((pair & 15) | (top & 3) << 4) - 32));
            out[i + 1] = __fmul_rn(scale, (float)((int)((pair >> 8 & 15) | (top >> 8 & 3) << 4) - 32));
        }
    }
};

struct IQ1_S {
    static const int LEN = 256, BYTES = 50;
    DEVICE void decode(const u8 *block, u32 group, float out[8]) {
        u32 field = half_word(block, 34 + group / 4 * 2);
        float scale = __fmul_rn(half_at(block, 0), (float)(2 * (field >> 12 & 7) + 1));
        u32 row = block[2 + group] | (field >> (3 * (group % 4)) & 7) << 8;
        shifted_row(IQ1_GRID[row], scale, field & 0x8000 ? -0.125f : 0.125f, out);
    }
};

struct IQ1_M {
    static const int LEN = 256, BYTES = 56;
    DEVICE void decode(const u8 *block, u32 group, float out[8]) {
        u32 fields[4];
        for (int i = 0; i < 4; i++) fields[i] = half_word(block, 48 + 2 * i);
        u32 d = fields[0] >> 12 | fields[1] >> 12 << 4 | fields[2] >> 12 << 8 | fields[3] >> 12 << 12;
        u32 run = group / 2;
        u32 field = half_word(block, 48 + run / 4 * 2) >> (3 * (run % 4)) & 7;
        float scale = __fmul_rn(f16_value((u16)d), (float)(2 * field + 1));
        u32 high = nibble(block + 32, group);
        shifted_row(IQ1_GRID[block[group] | (high & 7) << 8], scale, high & 8 ? -0.125f : 0.125f, out);
    }
};

struct IQ2_XXS {
    static const int LEN = 256, BYTES = 66;
    DEVICE void decode(const u8 *block, u32 group, float out[8]) {
        u32 at = 2 + group / 4 * 8;
        u32 field = word(block, at + 4);
        float scale = __fmul_rn(__fmul_rn(half_at(block, 0), 0.5f + (float)(field >> 28)), 0.25f);
        u64 row = IQ2_XXS_GRID[block[at + group % 4]];
        signed_row((u32)row, (u32)(row >> 32), scale, even_signs(field >> (7 * (group % 4)) & 127), out);
    }
};

struct IQ2_XS {
    static const int LEN = 256, BYTES = 74;
    DEVICE void decode(const u8 *block, u32 group, float out[8]) {
        float step = 0.5f + (float)nibble(block + 66, group / 2);
        float scale = __fmul_rn(__fmul_rn(half_at(block, 0), step), 0.25f);
        u32 field = half_word(block, 2 + 2 * group);
        u64 row = IQ2_XS_GRID[field & 511];
        signed_row((u32)row, (u32)(row >> 32), scale, even_signs(field >> 9), out);
    }
};

struct IQ2_S {
    static const int LEN = 256, BYTES = 82;
    DEVICE void decode(const u8 *block, u32 group, float out[8]) {
        float step = 0.5f + (float)nibble(block + 74, group / 2);
        float scale = __fmul_rn(__fmul_rn(half_at(block, 0), step), 0.25f);
        u32 high = block[66 + group / 4] >> (group % 4 * 2) & 3;
        u64 row = IQ2_S_GRID[block[2 + group] | high << 8];
        signed_row((u32)row, (u32)(row >> 32), scale, block[34 + group], out);
    }
};

struct IQ3_XXS {
    static const int LEN = 256, BYTES = 98;
    DEVICE void decode(const u8 *block, u32 group, float out[8]) {
        u32 field = word(block, 66 + group / 4 * 4), rows = half_word(block, 2 + 2 * group);
        float scale = __fmul_rn(__fmul_rn(half_at(block, 0), 0.5f + (float)(field >> 28)), 0.5f);
        u32 signs = even_signs(field >> (7 * (group % 4)) & 127);
        signed_row(IQ3_XXS_GRID[rows & 255], IQ3_XXS_GRID[rows >> 8], scale, signs, out);
    }
};

struct IQ3_S {
    static const int LEN = 256, BYTES = 110;
    DEVICE void decode(const u8 *block, u32 group, float out[8]) {
        u32 run = group / 4;
        float scale = __fmul_rn(half_at(block, 0), (float)(1 + 2 * nibble(block + 106, run)));
        u32 ninth = block[66 + run] >> (group % 4 * 2), rows = half_word(block, 2 + 2 * group);
        u32 first = (rows & 255) | (ninth & 1) << 8, second = rows >> 8 | (ninth >> 1 & 1) << 8;
        signed_row(IQ3_S_GRID[first], IQ3_S_GRID[second], scale, block[74 + group], out);
    }
};

/// A group of nibbles in the table of uneven values.
DEVICE void uneven(const u8 *nibbles, u32 group, float scale, float out[8]) {
    for (int i = 0; i < 8; i++) {
        out[i] = __fmul_rn(scale, (float)IQ4_NL_VALUES[split_nibble(nibbles, group, i)]);
    }
}

struct IQ4_NL {
    static const int LEN = 32, BYTES = 18;
    DEVICE void decode(const u8 *block, u32 group, float out[8]) {
        uneven(block + 2, group, half_at(block, 0), out);
    }
};

struct IQ4_XS {
    static const int LEN = 256, BYTES = 136;
    DEVICE void decode(const u8 *block, u32 group, float out[8]) {
        u32 run = group / 4;
        u32 scale = nibble(block + 4, run) | (half_word(block, 2) >> (2 * run) & 3) << 4;
        float d = __fmul_rn(half_at(block, 0), (float)((int)scale - 32));
        uneven(block + 8 + 16 * run, group % 4, d, out);
    }
};
