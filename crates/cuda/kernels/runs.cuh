// Decoders for the tensor cores: 32 consecutive weights of a row at once, as 16 pairs of bf16.
//
// A weight is an exact small number times a scale (plus a rest), both in bf16 arithmetic: scale = high + low, so that
// fma(v, high, v · low) is the product rounded once, but for 2^-17. Small numbers are made as the mantissa of 128 + q; those of
// codebooks come out of tables in shared memory as bf16 (`fill_table`): tables of bytes would have fewer bank conflicts, but
// instructions are what binds. Types without a decoder of their own go by `decode`.
//
// Tables may lie there in COPIES copies, row by row, of which every lane reads its own: they then lie in different banks.
//
// `row` is the start of whole blocks, `run` counts 32 weights from there. Blocks of 144 and 176 bytes lie on 16 bytes.

/// Whole words `behind` bytes, a multiple of 4, from an even address of shared memory that is the same for several of them; reads up to
/// four bytes behind them.
template <int COUNT> DEVICE void words_behind(const u8 *from, u32 behind, u32 out[COUNT]) {
    // By a difference, which leaves the compiler the knowledge that it is shared memory.
    u32 odd = shared_address(from) & 2, select = odd ? 0x5432 : 0x3210;
    const u32 *at = (const u32 *)(from - odd + behind);
    u32 before = at[0];
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        u32 after = at[i + 1];
        out[i] = __byte_perm(before, after, select);
        before = after;
    }
}

/// The same from an even address on.
template <int COUNT> DEVICE void words_at(const u8 *from, u32 out[COUNT]) { words_behind<COUNT>(from, 0, out); }

/// The same from any address; also reads up to three bytes before them.
template <int COUNT> DEVICE void words_anywhere(const u8 *from, u32 out[COUNT]) {
    u32 odd = shared_address(from) & 3;
    const u32 *at = (const u32 *)(from - odd);
    u32 before = at[0];
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        u32 after = at[i + 1];
        out[i] = __funnelshift_r(before, after, 8 * odd);
        before = after;
    }
}

/// a · b + c of two bf16 each.
DEVICE u32 fma_pair(u32 a, u32 b, u32 c) {
    u32 out;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
    return out;
}

/// A scale and what is added, each for both numbers of a pair; `bias` makes small numbers of 128 + q.
struct Scale {
    u32 high, low, rest, bias;
};

/// Weights scale · (q − zero).
DEVICE Scale scale_of(float scale, float zero) {
    Scale s;
    s.high = bf16_pair(scale, scale);
    float low = scale - bf16_value((u16)s.high);
    s.low = bf16_pair(low, low);
    s.rest = 0x80008000u;
    s.bias = bf16_pair(-128.0f - zero, -128.0f - zero);
    return s;
}

/// Weights scale · q − min, as scale · (q − middle) + rest, which leaves little to rounding.
DEVICE Scale scale_of(float scale, float min, float middle) {
    Scale s = scale_of(scale, middle);
    float rest = fmaf(scale, middle, -min);
    s.rest = bf16_pair(rest, rest);
    return s;
}

/// By a scale that is a bf16: products are exact.
DEVICE u32 scaled_by(u32 numbers, u32 scale) { return fma_pair(numbers, scale, 0x80008000u); }

DEVICE u32 scaled(u32 numbers, const Scale &s) { return fma_pair(numbers, s.high, fma_pair(numbers, s.low, s.rest)); }

/// Four bytes q < 128 as bf16 q + 128 + `bias`.
DEVICE void numbers_of(u32 bytes, u32 bias, u32 out[2]) {
    const u32 ONES = 0x3f803f80u;
    out[0] = fma_pair(__byte_perm(bytes, 0x43434343u, 0x4140), ONES, bias);
    out[1] = fma_pair(__byte_perm(bytes, 0x43434343u, 0x4342), ONES, bias);
}

/// Four numbers q < 128, a byte each.
DEVICE void scaled_bytes(u32 bytes, const Scale &s, u32 out[2]) {
    u32 numbers[2];
    numbers_of(bytes, s.bias, numbers);
    out[0] = scaled(numbers[0], s), out[1] = scaled(numbers[1], s);
}

/// Eight numbers with signs: bit i of `signs` negates number i.
DEVICE void scaled_row(const u32 row[4], u32 signs, const Scale &s, u32 out[4]) {
    u32 spread = signs * 0x8001u; // bit i at i and i + 15
#pragma unroll
    for (int j = 0; j < 4; j++) out[j] = scaled(row[j] ^ (spread << (15 - 2 * j) & 0x80008000u), s);
}

/// The low four bits to the lowest bit of a byte each.
DEVICE u32 spread_bits(u32 bits) { return (bits & 15) * 0x00204081u & 0x01010101u; }

/// Two whole numbers (bytes) as bf16.
DEVICE u32 small_pair(int low, int high) { return bf16_pair((float)low, (float)high); }

/// Stores a pair of numbers of a row of WORDS pairs, in all copies.
template <int WORDS> DEVICE void fill_pair(u32 *table, int i, u32 pair) {
    for (int copy = 0; copy < COPIES; copy++) table[(i / WORDS * COPIES + copy) * WORDS + i % WORDS] = pair;
}

/// This lane's copy.
DEVICE u32 own_copy() { return COPIES == 1 ? 0 : threadIdx.x % COPIES; }

/// Rows of eight bytes to rows of eight bf16 in shared memory, by all threads of a block.
DEVICE void fill_rows(u32 *table, const u64 *from, int rows) {
#pragma unroll 4
    for (int i = threadIdx.x; i < 4 * rows; i += blockDim.x) {
        u32 pair = ((const u16 *)from)[i];
        fill_pair<4>(table, i, small_pair((signed char)pair, (signed char)(pair >> 8)));
    }
}

/// The same of rows of four.
DEVICE void fill_rows(u32 *table, const u32 *from, int rows) {
#pragma unroll 4
    for (int i = threadIdx.x; i < 2 * rows; i += blockDim.x) {
        u32 pair = ((const u16 *)from)[i];
        fill_pair<2>(table, i, small_pair((signed char)pair, (signed char)(pair >> 8)));
    }
}

/// Pairs of sixteen values: entry a + 16 b.
DEVICE void fill_pairs(u32 *table, const signed char *values) {
    for (int i = threadIdx.x; i < 256; i += blockDim.x) fill_pair<1>(table, i, small_pair(values[i % 16], values[i / 16]));
}

/// Row `index` of a table of eight numbers.
DEVICE void eight(const u32 *table, u32 index, u32 out[4]) {
    const u32 ROW = 16 * COPIES; // a power of two: one instruction fewer than index and copy as numbers of rows
    uint4 row = *(const uint4 *)((const u8 *)table + (index * ROW | own_copy() * 16));
    out[0] = row.x, out[1] = row.y, out[2] = row.z, out[3] = row.w;
}

/// Rows of two tables of four numbers.
DEVICE void fours(const u32 *table, u32 first, u32 second, u32 out[4]) {
    const uint2 *rows = (const uint2 *)table + own_copy();
    uint2 a = rows[first * COPIES], b = rows[second * COPIES];
    out[0] = a.x, out[1] = a.y, out[2] = b.x, out[3] = b.y;
}

/// Any type, by the definition.
template <class T> struct Run {
    static const int TABLE = 0; // bytes
    DEVICE void fill_table(u32 *) {}
    DEVICE void decode(const u8 *row, u32 run, const u32 *, u32 out[16]) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            u32 group = run * 4 + i;
            float w[8];
            T::decode(row + group / (T::LEN / 8) * T::BYTES, group % (T::LEN / 8), w);
#pragma unroll
            for (int j = 0; j < 4; j++) out[4 * i + j] = bf16_pair(w[2 * j], w[2 * j + 1]);
        }
    }
};

template <> struct Run<Q8_0> {
    static const int TABLE = 0;
    DEVICE void fill_table(u32 *) {}
    DEVICE void decode(const u8 *row, u32 run, const u32 *, u32 out[16]) {
        const u8 *block = row + run * Q8_0::BYTES;
        float d = half_at(block, 0), off = d * -(32768.0f + 128.0f);
        u32 words[8];
        words_at<8>(block + 2, words);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            // Byte b within a float is 32768 + b, and both factors of what is taken off are short: w is exact.
            u32 bytes = words[i] ^ 0x80808080u;
            float w[4];
#pragma unroll
            for (int j = 0; j < 4; j++) w[j] = fmaf(__uint_as_float(__byte_perm(bytes, 0x47000000u, 0x7404 + 16 * j)), d, off);
            out[2 * i] = bf16_pair(w[0], w[1]), out[2 * i + 1] = bf16_pair(w[2], w[3]);
        }
    }
};

/// Nibbles of 16 bytes, byte j holding the weights j and j + 16; FIFTH: where the fifth bits are, or 0.
template <int FIFTH> DEVICE void nibbles(const u8 *block, int at, const Scale &s, u32 out[16]) {
    u32 fifth = FIFTH ? word(block, FIFTH) : 0, words[4];
    words_at<4>(block + at, words);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 both = words[i];
        u32 low = both & 0x0f0f0f0fu, high = both >> 4 & 0x0f0f0f0fu;
        if (FIFTH) low |= spread_bits(fifth >> (4 * i)) << 4, high |= spread_bits(fifth >> (16 + 4 * i)) << 4;
        scaled_bytes(low, s, out + 2 * i);
        scaled_bytes(high, s, out + 8 + 2 * i);
    }
}

template <> struct Run<Q4_0> {
    static const int TABLE = 0;
    DEVICE void fill_table(u32 *) {}
    DEVICE void decode(const u8 *row, u32 run, const u32 *, u32 out[16]) {
        const u8 *block = row + run * Q4_0::BYTES;
        nibbles<0>(block, 2, scale_of(half_at(block, 0), 8.0f), out);
    }
};

template <> struct Run<Q4_1> {
    static const int TABLE = 0;
    DEVICE void fill_table(u32 *) {}
    DEVICE void decode(const u8 *row, u32 run, const u32 *, u32 out[16]) {
        const u8 *block = row + run * Q4_1::BYTES;
        nibbles<0>(block, 4, scale_of(half_at(block, 0), -half_at(block, 2), 8.0f), out);
    }
};

template <> struct Run<Q5_0> {
    static const int TABLE = 0;
    DEVICE void fill_table(u32 *) {}
    DEVICE void decode(const u8 *row, u32 run, const u32 *, u32 out[16]) {
        const u8 *block = row + run * Q5_0::BYTES;
        nibbles<2>(block, 6, scale_of(half_at(block, 0), 16.0f), out);
    }
};

template <> struct Run<Q5_1> {
    static const int TABLE = 0;
    DEVICE void fill_table(u32 *) {}
    DEVICE void decode(const u8 *row, u32 run, const u32 *, u32 out[16]) {
        const u8 *block = row + run * Q5_1::BYTES;
        nibbles<4>(block, 8, scale_of(half_at(block, 0), -half_at(block, 2), 16.0f), out);
    }
};

template <> struct Run<Q2_K> {
    static const int TABLE = 0;
    DEVICE void fill_table(u32 *) {}
    DEVICE void decode(const u8 *row, u32 run, const u32 *, u32 out[16]) {
        const u8 *block = row + run / 8 * Q2_K::BYTES;
        u32 r = run % 8, scales = half_word(block, 2 * r);
        const u32 *q = (const u32 *)(block + 16 + r / 4 * 32);
        float d = half_at(block, 80), dmin = half_at(block, 82);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 both = scales >> (8 * half);
            Scale s = scale_of(d * (float)(both & 15), dmin * (float)(both >> 4 & 15), 2.0f);
#pragma unroll
            for (int i = 4 * half; i < 4 * half + 4; i++) {
                scaled_bytes(q[i] >> (r % 4 * 2) & 0x03030303u, s, out + 2 * i);
            }
        }
    }
};

template <> struct Run<Q3_K> {
    static const int TABLE = 0;
    DEVICE void fill_table(u32 *) {}
    DEVICE void decode(const u8 *row, u32 run, const u32 *, u32 out[16]) {
        const u8 *block = row + run / 8 * Q3_K::BYTES;
        u32 r = run % 8;
        float d = half_at(block, 108);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 sixteen = 2 * r + half;
            u32 low = block[96 + sixteen % 8] >> (sixteen / 8 * 4) & 15, high = block[104 + sixteen % 4] >> (sixteen / 4 * 2) & 3;
            Scale s = scale_of(d * (float)((int)(low | high << 4) - 32), 4.0f);
            u32 twos[4], thirds[4];
            words_at<4>(block + 32 + r / 4 * 32 + 16 * half, twos);
            words_at<4>(block + 16 * half, thirds);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                u32 two = twos[i] >> (r % 4 * 2) & 0x03030303u;
                scaled_bytes(two | (thirds[i] >> r & 0x01010101u) << 2, s, out + 8 * half + 2 * i);
            }
        }
    }
};

/// Q4_K and Q5_K: run `r` of a block whose nibbles lie at AT; five bits with `fifth`.
template <int AT, bool FIFTH> DEVICE void run_k(const u8 *block, u32 r, u32 out[16]) {
    u32 scale, min;
    six_bit_scales(block + 4, r, scale, min);
    u32 both = *(const u32 *)block;
    Scale s = scale_of(f16_value((u16)both) * (float)scale, f16_value((u16)(both >> 16)) * (float)min, FIFTH ? 16.0f : 8.0f);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint4 q = ((const uint4 *)(block + AT + r / 2 * 32))[half];
        u32 words[4] = {q.x, q.y, q.z, q.w}, tops[4] = {0, 0, 0, 0};
        if (FIFTH) {
            uint4 top = ((const uint4 *)(block + 16))[half];
            tops[0] = top.x, tops[1] = top.y, tops[2] = top.z, tops[3] = top.w;
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 bytes = words[i] >> (r % 2 * 4) & 0x0f0f0f0fu;
            if (FIFTH) bytes |= (tops[i] >> r & 0x01010101u) << 4;
            scaled_bytes(bytes, s, out + 8 * half + 2 * i);
        }
    }
}

template <> struct Run<Q4_K> {
    static const int TABLE = 0;
    DEVICE void fill_table(u32 *) {}
    DEVICE void decode(const u8 *row, u32 run, const u32 *, u32 out[16]) {
        run_k<16, false>(row + run / 8 * Q4_K::BYTES, run % 8, out);
    }
};

template <> struct Run<Q5_K> {
    static const int TABLE = 0;
    DEVICE void fill_table(u32 *) {}
    DEVICE void decode(const u8 *row, u32 run, const u32 *, u32 out[16]) {
        run_k<48, true>(row + run / 8 * Q5_K::BYTES, run % 8, out);
    }
};

template <> struct Run<Q6_K> {
    static const int TABLE = 0;
    DEVICE void fill_table(u32 *) {}
    DEVICE void decode(const u8 *row, u32 run, const u32 *, u32 out[16]) {
        const u8 *block = row + run / 8 * Q6_K::BYTES;
        u32 r = run % 8, scales = half_word(block, 192 + 2 * r);
        float d = half_at(block, 208);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            Scale s = scale_of(d * (float)(signed char)(scales >> (8 * half)), 32.0f);
            u32 lows[4], highs[4];
            words_at<4>(block + r / 4 * 64 + r % 2 * 32 + 16 * half, lows);
            words_at<4>(block + 128 + r / 4 * 32 + 16 * half, highs);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                u32 low = lows[i] >> (r % 4 / 2 * 4) & 0x0f0f0f0fu, high = highs[i] >> (r % 4 * 2) & 0x03030303u;
                scaled_bytes(low | high << 4, s, out + 8 * half + 2 * i);
            }
        }
    }
};

/// Scale of four numbers of a row of bits beside one quarter: IQ2_XXS and IQ3_XXS.
DEVICE float field_scale(const u8 *block, u32 field, float unit) { return half_at(block, 0) * (0.5f + (float)(field >> 28)) * unit; }

template <> struct Run<IQ2_XXS> {
    static const int TABLE = 256 * 16;
    DEVICE void fill_table(u32 *table) { fill_rows(table, IQ2_XXS_GRID, 256); }
    DEVICE void decode(const u8 *row, u32 run, const u32 *table, u32 out[16]) {
        const u8 *block = row + run / 8 * IQ2_XXS::BYTES;
        u32 words[2];
        words_at<2>(block + 2 + run % 8 * 8, words);
        u32 rows = words[0], field = words[1];
        Scale s = scale_of(field_scale(block, field, 0.25f), 0.0f);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 numbers[4];
            eight(table, rows >> (8 * i) & 255, numbers);
            scaled_row(numbers, even_signs(field >> (7 * i) & 127), s, out + 4 * i);
        }
    }
};

template <> struct Run<IQ2_XS> {
    static const int TABLE = 512 * 16;
    DEVICE void fill_table(u32 *table) { fill_rows(table, IQ2_XS_GRID, 512); }
    DEVICE void decode(const u8 *row, u32 run, const u32 *table, u32 out[16]) {
        const u8 *block = row + run / 8 * IQ2_XS::BYTES;
        u32 r = run % 8, scales = block[66 + r], words[2];
        words_at<2>(block + 2 + 8 * r, words);
        float d = half_at(block, 0) * 0.25f;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            Scale s = scale_of(d * (0.5f + (float)(scales >> (4 * half) & 15)), 0.0f);
#pragma unroll
            for (int i = 2 * half; i < 2 * half + 2; i++) {
                u32 field = words[i / 2] >> (i % 2 * 16) & 0xffff, numbers[4];
                eight(table, field & 511, numbers);
                scaled_row(numbers, even_signs(field >> 9), s, out + 4 * i);
            }
        }
    }
};

template <> struct Run<IQ2_S> {
    static const int TABLE = 1024 * 16;
    DEVICE void fill_table(u32 *table) { fill_rows(table, IQ2_S_GRID, 1024); }
    DEVICE void decode(const u8 *row, u32 run, const u32 *table, u32 out[16]) {
        const u8 *block = row + run / 8 * IQ2_S::BYTES;
        u32 r = run % 8, scales = block[74 + r], high = block[66 + r], rows = word(block, 2 + 4 * r), signs = word(block, 34 + 4 * r);
        float d = half_at(block, 0) * 0.25f;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            Scale s = scale_of(d * (0.5f + (float)(scales >> (4 * half) & 15)), 0.0f);
#pragma unroll
            for (int i = 2 * half; i < 2 * half + 2; i++) {
                u32 numbers[4];
                eight(table, (rows >> (8 * i) & 255) | (high >> (2 * i) & 3) << 8, numbers);
                scaled_row(numbers, signs >> (8 * i) & 255, s, out + 4 * i);
            }
        }
    }
};

template <> struct Run<IQ3_XXS> {
    static const int TABLE = 256 * 8;
    DEVICE void fill_table(u32 *table) { fill_rows(table, IQ3_XXS_GRID, 256); }
    DEVICE void decode(const u8 *row, u32 run, const u32 *table, u32 out[16]) {
        const u8 *block = row + run / 8 * IQ3_XXS::BYTES;
        u32 r = run % 8, field = word(block, 66 + 4 * r), words[2];
        words_at<2>(block + 2 + 8 * r, words);
        Scale s = scale_of(field_scale(block, field, 0.5f), 0.0f);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 rows = words[i / 2] >> (i % 2 * 16) & 0xffff, numbers[4];
            fours(table, rows & 255, rows >> 8, numbers);
            scaled_row(numbers, even_signs(field >> (7 * i) & 127), s, out + 4 * i);
        }
    }
};

template <> struct Run<IQ3_S> {
    static const int TABLE = 512 * 8;
    DEVICE void fill_table(u32 *table) { fill_rows(table, IQ3_S_GRID, 512); }
    DEVICE void decode(const u8 *row, u32 run, const u32 *table, u32 out[16]) {
        const u8 *block = row + run / 8 * IQ3_S::BYTES;
        u32 r = run % 8, ninth = block[66 + r], signs = word(block, 74 + 4 * r), words[2];
        words_at<2>(block + 2 + 8 * r, words);
        Scale s = scale_of(half_at(block, 0) * (float)(1 + 2 * nibble(block + 106, r)), 0.0f);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 rows = words[i / 2] >> (i % 2 * 16) & 0xffff, high = ninth >> (2 * i), numbers[4];
            fours(table, (rows & 255) | (high & 1) << 8, rows >> 8 | (high >> 1 & 1) << 8, numbers);
            scaled_row(numbers, signs >> (8 * i) & 255, s, out + 4 * i);
        }
    }
};

/// Nibbles in a table of pairs of values, each pair scaled by `by`.
template <class F> DEVICE void uneven_run(u32 both[4], const u32 *table, const F &by, u32 out[16]) {
    const u32 *own = table + own_copy();
#pragma unroll
    for (int i = 0; i < 4; i++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 four = both[i] >> (4 * half) & 0x0f0f0f0fu, pairs = four | four >> 4;
            out[8 * half + 2 * i] = by(own[(pairs & 255) * COPIES]);
            out[8 * half + 2 * i + 1] = by(own[(pairs >> 16 & 255) * COPIES]);
        }
    }
}

DEVICE void uneven_run(u32 both[4], const u32 *table, const Scale &s, u32 out[16]) {
    uneven_run(both, table, [&](u32 numbers) { return scaled(numbers, s); }, out);
}

template <> struct Run<IQ4_NL> {
    static const int TABLE = 256 * 4;
    DEVICE void fill_table(u32 *table) { fill_pairs(table, IQ4_NL_VALUES); }
    DEVICE void decode(const u8 *row, u32 run, const u32 *table, u32 out[16]) {
        const u8 *block = row + run * IQ4_NL::BYTES;
        u32 both[4];
        words_at<4>(block + 2, both);
        uneven_run(both, table, scale_of(half_at(block, 0), 0.0f), out);
    }
};

template <> struct Run<IQ4_XS> {
    static const int TABLE = 256 * 4;
    DEVICE void fill_table(u32 *table) { fill_pairs(table, IQ4_NL_VALUES); }
    DEVICE void decode(const u8 *row, u32 run, const u32 *table, u32 out[16]) {
        const u8 *block = row + run / 8 * IQ4_XS::BYTES;
        u32 r = run % 8, both[4];
        for (int i = 0; i < 4; i++) both[i] = *(const u32 *)(block + 8 + 16 * r + 4 * i);
        u32 scale = nibble(block + 4, r) | (half_word(block, 2) >> (2 * r) & 3) << 4;
        uneven_run(both, table, scale_of(half_at(block, 0) * (float)((int)scale - 32), 0.0f), out);
    }
};

template <> struct Run<MXFP4> {
    static const int TABLE = 256 * 4;
    DEVICE void fill_table(u32 *table) { fill_pairs(table, MXFP4_VALUES); }
    DEVICE void decode(const u8 *row, u32 run, const u32 *table, u32 out[16]) {
        const u8 *block = row + run * MXFP4::BYTES;
        u32 e = block[0], both[4];
        words_anywhere<4>(block + 1, both);
        float scale = __uint_as_float(e < 2 ? 1u << (21 + e) : (e - 1) << 23);
        u32 pair = bf16_pair(scale, scale);
        uneven_run(both, table, [&](u32 numbers) { return scaled_by(numbers, pair); }, out);
    }
};

/// A ternary row, each number moved by ±1/8.
DEVICE void shifted(const u32 *table, u32 index, bool down, const Scale &s, u32 out[4]) {
    u32 numbers[4];
    eight(table, index, numbers);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        out[j] = scaled(fma_pair(numbers[j], 0x3f803f80u, down ? 0xbe00be00u : 0x3e003e00u), s);
    }
}

template <> struct Run<IQ1_S> {
    static const int TABLE = 2048 * 16;
    DEVICE void fill_table(u32 *table) { fill_rows(table, IQ1_GRID, 2048); }
    DEVICE void decode(const u8 *row, u32 run, const u32 *table, u32 out[16]) {
        const u8 *block = row + run / 8 * IQ1_S::BYTES;
        u32 r = run % 8, field = half_word(block, 34 + 2 * r), rows = word(block, 2 + 4 * r);
        Scale s = scale_of(half_at(block, 0) * (float)(2 * (field >> 12 & 7) + 1), 0.0f);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            shifted(table, (rows >> (8 * i) & 255) | (field >> (3 * i) & 7) << 8, field & 0x8000, s, out + 4 * i);
        }
    }
};

template <> struct Run<IQ1_M> {
    static const int TABLE = 2048 * 16;
    DEVICE void fill_table(u32 *table) { fill_rows(table, IQ1_GRID, 2048); }
    DEVICE void decode(const u8 *row, u32 run, const u32 *table, u32 out[16]) {
        const u8 *block = row + run / 8 * IQ1_M::BYTES;
        u32 r = run % 8, fields[4];
        for (int i = 0; i < 4; i++) fields[i] = half_word(block, 48 + 2 * i);
        float d = f16_value((u16)(fields[0] >> 12 | fields[1] >> 12 << 4 | fields[2] >> 12 << 8 | fields[3] >> 12 << 12));
        u32 rows = word(block, 4 * r), highs = half_word(block, 32 + 2 * r), scales = half_word(block, 48 + r / 2 * 2) >> (r % 2 * 6);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            Scale s = scale_of(d * (float)(2 * (scales >> (3 * half) & 7) + 1), 0.0f);
#pragma unroll
            for (int i = 2 * half; i < 2 * half + 2; i++) {
                u32 high = highs >> (4 * i) & 15;
                shifted(table, (rows >> (8 * i) & 255) | (high & 7) << 8, high & 8, s, out + 4 * i);
            }
        }
    }
};
