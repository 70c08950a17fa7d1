// Weights as whole numbers of a byte for the integer tensor cores, of every type of blocks: passes of single rows.
//
// Four neighbouring lanes share a run of 32 weights: lane q decodes the weights 8 q .. 8 q + 8 to two words of bytes. A weight is
// such a number times `scale`, less `min` where MIN, a whole number each; times the block's two factors. `scale` and `min` are
// those of the half of the run the eight lie in. Sums of whole numbers are exact: rounding begins with the factors.
//
// `block`: where the run's block begins, on an even address except for MXFP4; `r`: the run in it. Tables lie in shared memory in
// copies, word by word, of which every lane reads its own: 32 of them have no bank conflicts at all.

DEVICE u32 permute(u32 a, u32 b, u32 select) {
    u32 out;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(select));
    return out;
}

/// Stores `entry(i)` of ROWS entries, each in COPIES copies (a multiple of 4), by all threads of a block.
template <int ROWS, int COPIES_OF, class Entry> DEVICE void fill_copies(u32 *table, Entry entry) {
    const int CHUNKS = COPIES_OF / 4;
    for (int i = threadIdx.x; i < ROWS; i += blockDim.x) {
        u32 word = entry(i);
#pragma unroll
        for (int j = 0; j < CHUNKS; j++) ((uint4 *)table)[i * CHUNKS + (j + i) % CHUNKS] = make_uint4(word, word, word, word);
    }
}

/// Entry `i` of such a table.
template <int COPIES_OF> DEVICE u32 entry_of(const u32 *table, u32 i) { return table[i * COPIES_OF + threadIdx.x % COPIES_OF]; }

/// The low bits of the four nibbles' places (0, 8, 16, 24 of each word) of eight bytes to one nibble each.
DEVICE u32 nibbles_of(u32 low, u32 high) {
    u32 both[2] = {low, high};
#pragma unroll
    for (int i = 0; i < 2; i++) {
        u32 two = (both[i] | both[i] >> 4) & 0x00ff00ffu;
        both[i] = (two | two >> 8) & 0xffff;
    }
    return both[0] | both[1] << 16;
}

/// Eight bits to the lowest bit of a nibble each.
DEVICE u32 spread_nibbles(u32 bits) { return nibbles_of(spread_bits(bits), spread_bits(bits >> 4)); }

/// Eight bits to two words of bytes: those of weights 0 .. 4 at the lowest bit of each byte, of 4 .. 8 four bits higher.
DEVICE u32 spread_bytes(u32 bits) { return spread_bits(bits) | spread_bits(bits >> 4) << 4; }

/// Eight numbers chosen by nibbles from eight bytes.
DEVICE void chosen_bytes(u32 low, u32 high, u32 select, u32 out[2]) {
    out[0] = permute(low, high, select);
    out[1] = permute(low, high, select >> 16);
}

/// Negates the bytes (none of them 0) whose lowest bit in `signs` is set.
DEVICE u32 negated(u32 bytes, u32 signs) { return (bytes ^ signs * 255) + signs; }

/// Bytes q < 128 − `zero`, less `zero` each.
DEVICE u32 less(u32 bytes, u32 zero) { return ((bytes | 0x80808080u) - zero * 0x01010101u) ^ 0x80808080u; }

/// What types have in common unless they say otherwise.
struct WholeBase {
    static const int TABLE = 0; // bytes
    static const bool MIN = false;
    DEVICE void fill_table(u32 *) {}
};

template <class T> struct Whole;

/// Types whose factor is a half at the beginning of the block.
struct OneFactor : WholeBase {
    DEVICE void factors(const u8 *block, float &scale, float &) { scale = half_at(block, 0); }
};

/// Types whose two factors are the halves there; the second one is added if SIGN is -1.
template <int SIGN> struct TwoFactors : WholeBase {
    static const bool MIN = true;
    DEVICE void factors(const u8 *block, float &scale, float &min) {
        u32 both = word(block, 0);
        scale = f16_value((u16)both), min = (float)SIGN * f16_value((u16)(both >> 16));
    }
};

template <> struct Whole<Q8_0> : OneFactor {
    DEVICE void decode(const u8 *block, u32, u32 q, const u32 *, u32 out[2], int &, int &) { words_at<2>(block + 2 + 8 * q, out); }
};

/// Eight nibbles of 16 bytes, byte j holding the weights j and j + 16; FIFTH: where the fifth bits are, or 0.
template <int FIFTH> DEVICE void eight_nibbles(const u8 *block, int at, u32 q, u32 out[2]) {
    words_at<2>(block + at + q % 2 * 8, out);
    u32 fifth = FIFTH ? word(block, FIFTH) >> (8 * q) : 0;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        out[i] = out[i] >> (q / 2 * 4) & 0x0f0f0f0fu;
        if (FIFTH) out[i] |= spread_bits(fifth >> (4 * i)) << 4;
    }
}

template <> struct Whole<Q4_0> : OneFactor {
    DEVICE void decode(const u8 *block, u32, u32 q, const u32 *, u32 out[2], int &, int &) {
        eight_nibbles<0>(block, 2, q, out);
        out[0] = less(out[0], 8), out[1] = less(out[1], 8);
    }
};

template <> struct Whole<Q5_0> : OneFactor {
    DEVICE void decode(const u8 *block, u32, u32 q, const u32 *, u32 out[2], int &, int &) {
        eight_nibbles<2>(block, 6, q, out);
        out[0] = less(out[0], 16), out[1] = less(out[1], 16);
    }
};

template <> struct Whole<Q4_1> : TwoFactors<-1> {
    DEVICE void decode(const u8 *block, u32, u32 q, const u32 *, u32 out[2], int &, int &) { eight_nibbles<0>(block, 4, q, out); }
};

template <> struct Whole<Q5_1> : TwoFactors<-1> {
    DEVICE void decode(const u8 *block, u32, u32 q, const u32 *, u32 out[2], int &, int &) { eight_nibbles<4>(block, 8, q, out); }
};

/// Pairs of sixteen values, a byte each: entry a + 16 b.
template <class Value> DEVICE void fill_byte_pairs(u32 *table, const Value *values) {
    fill_copies<256, 32>(table, [&](int i) { return (u32)(u8)values[i % 16] | (u32)(u8)values[i / 16] << 8; });
}

/// Nibbles in a table of pairs of values.
DEVICE void uneven_bytes(const u32 nibbles[2], const u32 *table, u32 out[2]) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        u32 pairs = nibbles[i] | nibbles[i] >> 4;
        out[i] = entry_of<32>(table, pairs & 255) | entry_of<32>(table, pairs >> 16 & 255) << 16;
    }
}

template <> struct Whole<IQ4_NL> : OneFactor {
    static const int TABLE = 256 * 4 * 32;
    DEVICE void fill_table(u32 *table) { fill_byte_pairs(table, IQ4_NL_VALUES); }
    DEVICE void decode(const u8 *block, u32, u32 q, const u32 *table, u32 out[2], int &, int &) {
        u32 four[2];
        eight_nibbles<0>(block, 2, q, four);
        uneven_bytes(four, table, out);
    }
};

template <> struct Whole<MXFP4> : WholeBase {
    static const int TABLE = 256 * 4 * 32;
    DEVICE void fill_table(u32 *table) { fill_byte_pairs(table, MXFP4_VALUES); }
    DEVICE void factors(const u8 *block, float &scale, float &) {
        u32 e = block[0];
        scale = __uint_as_float(e < 2 ? 1u << (21 + e) : (e - 1) << 23);
    }
    DEVICE void decode(const u8 *block, u32, u32 q, const u32 *table, u32 out[2], int &, int &) {
        u32 four[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const u8 *at = block + 1 + q % 2 * 8 + 4 * i;
            four[i] = (at[0] | at[1] << 8 | at[2] << 16 | (u32)at[3] << 24) >> (q / 2 * 4) & 0x0f0f0f0fu;
        }
        uneven_bytes(four, table, out);
    }
};

/// Two-bit numbers of run `r`: 32 bytes hold four runs.
DEVICE void eight_twos(const u8 *field, u32 r, u32 q, u32 out[2]) {
    words_at<2>(field + r / 4 * 32 + 8 * q, out);
#pragma unroll
    for (int i = 0; i < 2; i++) out[i] = out[i] >> (r % 4 * 2) & 0x03030303u;
}

template <> struct Whole<Q2_K> : WholeBase {
    static const bool MIN = true;
    DEVICE void factors(const u8 *block, float &scale, float &min) { scale = half_at(block, 80), min = half_at(block, 82); }
    DEVICE void decode(const u8 *block, u32 r, u32 q, const u32 *, u32 out[2], int &scale, int &min) {
        u32 both = block[2 * r + q / 2];
        scale = both & 15, min = both >> 4;
        eight_twos(block + 16, r, q, out);
    }
};

template <> struct Whole<Q3_K> : WholeBase {
    DEVICE void factors(const u8 *block, float &scale, float &) { scale = half_at(block, 108); }
    DEVICE void decode(const u8 *block, u32 r, u32 q, const u32 *, u32 out[2], int &scale, int &) {
        u32 sixteen = 2 * r + q / 2, thirds[2];
        u32 low = block[96 + sixteen % 8] >> (sixteen / 8 * 4) & 15, high = block[104 + sixteen % 4] >> (sixteen / 4 * 2) & 3;
        scale = (int)(low | high << 4) - 32;
        eight_twos(block + 32, r, q, out);
        words_at<2>(block + 8 * q, thirds);
#pragma unroll
        for (int i = 0; i < 2; i++) out[i] = less(out[i] | (thirds[i] >> r & 0x01010101u) << 2, 4);
    }
};

/// Q4_K and Q5_K: nibbles at AT, five bits with FIFTH.
template <int AT, bool FIFTH> struct WholeK : TwoFactors<1> {
    DEVICE void decode(const u8 *block, u32 r, u32 q, const u32 *, u32 out[2], int &scale, int &min) {
        u32 s, m;
        six_bit_scales(block + 4, r, s, m);
        scale = s, min = m;
        const u32 *four = (const u32 *)(block + AT + r / 2 * 32 + 8 * q), *fifth = (const u32 *)(block + 16 + 8 * q);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            out[i] = four[i] >> (r % 2 * 4) & 0x0f0f0f0fu;
            if (FIFTH) out[i] |= (fifth[i] >> r & 0x01010101u) << 4;
        }
    }
};

template <> struct Whole<Q4_K> : WholeK<16, false> {};
template <> struct Whole<Q5_K> : WholeK<48, true> {};

template <> struct Whole<Q6_K> : WholeBase {
    DEVICE void factors(const u8 *block, float &scale, float &) { scale = half_at(block, 208); }
    DEVICE void decode(const u8 *block, u32 r, u32 q, const u32 *, u32 out[2], int &scale, int &) {
        scale = (signed char)block[192 + 2 * r + q / 2];
        u32 highs[2];
        words_at<2>(block + r / 4 * 64 + r % 2 * 32 + 8 * q, out);
        words_at<2>(block + 128 + r / 4 * 32 + 8 * q, highs);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            u32 low = out[i] >> (r % 4 / 2 * 4) & 0x0f0f0f0fu, high = highs[i] >> (r % 4 * 2) & 0x03030303u;
            out[i] = less(low | high << 4, 32);
        }
    }
};

template <> struct Whole<IQ4_XS> : OneFactor {
    static const int TABLE = 256 * 4 * 32;
    DEVICE void fill_table(u32 *table) { fill_byte_pairs(table, IQ4_NL_VALUES); }
    DEVICE void decode(const u8 *block, u32 r, u32 q, const u32 *table, u32 out[2], int &scale, int &) {
        scale = (int)(nibble(block + 4, r) | (half_word(block, 2) >> (2 * r) & 3) << 4) - 32;
        u32 four[2];
        words_at<2>(block + 8 + 16 * r + q % 2 * 8, four);
#pragma unroll
        for (int i = 0; i < 2; i++) four[i] = four[i] >> (q / 2 * 4) & 0x0f0f0f0fu;
        uneven_bytes(four, table, out);
    }
};

/// Codebooks of the magnitudes 8, 25, 43 in ROWS rows: a table of nibbles, then one of signs at their third bits, SIGNS entries.
template <int ROWS, int SIGNS, int ROW_COPIES, int SIGN_COPIES> struct WholeIq2 : WholeBase {
    static const int TABLE = (ROWS * ROW_COPIES + SIGNS * SIGN_COPIES) * 4;
    DEVICE void fill(u32 *table, const u64 *grid) {
        fill_copies<ROWS, ROW_COPIES>(table, [&](int i) {
            u32 low = (u32)grid[i], high = (u32)(grid[i] >> 32);
            return nibbles_of(low >> 4 & 0x03030303u, high >> 4 & 0x03030303u);
        });
        fill_copies<SIGNS, SIGN_COPIES>(table + ROWS * ROW_COPIES,
                                        [&](int i) { return spread_nibbles(SIGNS == 128 ? even_signs(i) : i) << 2; });
    }
    DEVICE void row(const u32 *table, u32 index, u32 signs, u32 out[2]) {
        u32 nibbles = entry_of<ROW_COPIES>(table, index) ^ entry_of<SIGN_COPIES>(table + ROWS * ROW_COPIES, signs);
        chosen_bytes(0x002b1908u, 0x00d5e7f8u, nibbles, out);
    }
    DEVICE void factors(const u8 *block, float &scale, float &) { scale = half_at(block, 0) * 0.125f; }
};

template <> struct Whole<IQ2_XXS> : WholeIq2<256, 128, 32, 32> {
    DEVICE void fill_table(u32 *table) { fill(table, IQ2_XXS_GRID); }
    DEVICE void decode(const u8 *block, u32 r, u32 q, const u32 *table, u32 out[2], int &scale, int &) {
        u32 field;
        words_at<1>(block + 6 + 8 * r, &field);
        row(table, block[2 + 8 * r + q], field >> (7 * q) & 127, out);
        scale = 2 * (field >> 28) + 1;
    }
};

template <> struct Whole<IQ2_XS> : WholeIq2<512, 128, 16, 32> {
    DEVICE void fill_table(u32 *table) { fill(table, IQ2_XS_GRID); }
    DEVICE void decode(const u8 *block, u32 r, u32 q, const u32 *table, u32 out[2], int &scale, int &) {
        u32 field = half_word(block, 2 + 8 * r + 2 * q);
        row(table, field & 511, field >> 9, out);
        scale = 2 * (block[66 + r] >> (q / 2 * 4) & 15) + 1;
    }
};

template <> struct Whole<IQ2_S> : WholeIq2<1024, 256, 8, 16> {
    DEVICE void fill_table(u32 *table) { fill(table, IQ2_S_GRID); }
    DEVICE void decode(const u8 *block, u32 r, u32 q, const u32 *table, u32 out[2], int &scale, int &) {
        u32 high = block[66 + r] >> (2 * q) & 3;
        row(table, block[2 + 4 * r + q] | high << 8, block[34 + 4 * r + q], out);
        scale = 2 * (block[74 + r] >> (q / 2 * 4) & 15) + 1;
    }
};

/// Codebooks of rows of four magnitudes: ROWS rows of bytes.
template <int ROWS, int ROW_COPIES> struct WholeIq3 : OneFactor {
    DEVICE void fill(u32 *table, const u32 *grid) {
        fill_copies<ROWS, ROW_COPIES>(table, [&](int i) { return grid[i]; });
    }
    /// `signs`: as `spread_bytes` leaves them.
    DEVICE void rows(const u32 *table, u32 first, u32 second, u32 signs, u32 out[2]) {
        out[0] = negated(entry_of<ROW_COPIES>(table, first), signs & 0x01010101u);
        out[1] = negated(entry_of<ROW_COPIES>(table, second), signs >> 4 & 0x01010101u);
    }
};

template <> struct Whole<IQ3_XXS> : WholeIq3<256, 32> {
    static const int TABLE = (256 + 128) * 4 * 32;
    DEVICE void fill_table(u32 *table) {
        fill(table, IQ3_XXS_GRID);
        fill_copies<128, 32>(table + 256 * 32, [&](int i) { return spread_bytes(even_signs(i)); });
    }
    DEVICE void factors(const u8 *block, float &scale, float &) { scale = half_at(block, 0) * 0.25f; }
    DEVICE void decode(const u8 *block, u32 r, u32 q, const u32 *table, u32 out[2], int &scale, int &) {
        u32 field, both = half_word(block, 2 + 8 * r + 2 * q);
        words_at<1>(block + 66 + 4 * r, &field);
        rows(table, both & 255, both >> 8, entry_of<32>(table + 256 * 32, field >> (7 * q) & 127), out);
        scale = 2 * (field >> 28) + 1;
    }
};

template <> struct Whole<IQ3_S> : WholeIq3<512, 16> {
    static const int TABLE = 512 * 4 * 16;
    DEVICE void fill_table(u32 *table) { fill(table, IQ3_S_GRID); }
    DEVICE void decode(const u8 *block, u32 r, u32 q, const u32 *table, u32 out[2], int &scale, int &) {
        u32 both = half_word(block, 2 + 8 * r + 2 * q), ninth = block[66 + r] >> (2 * q);
        rows(table, (both & 255) | (ninth & 1) << 8, both >> 8 | (ninth >> 1 & 1) << 8, spread_bytes(block[74 + 4 * r + q]), out);
        scale = 1 + 2 * nibble(block + 106, r);
    }
};

/// The ternary codebook, moved by ±1/8: eight times as much, a whole number.
struct WholeIq1 : WholeBase {
    static const int TABLE = 2048 * 4 * 4;
    DEVICE void fill_table(u32 *table) {
        fill_copies<2048, 4>(table, [&](int i) {
            u32 low = (u32)IQ1_GRID[i], high = (u32)(IQ1_GRID[i] >> 32);
            return nibbles_of(low & 0x03030303u, high & 0x03030303u);
        });
    }
    DEVICE void row(const u32 *table, u32 index, bool down, u32 out[2]) {
        chosen_bytes(0xf9000901u, 0xf70007ffu, entry_of<4>(table, index) ^ (down ? 0x44444444u : 0), out);
    }
};

template <> struct Whole<IQ1_S> : WholeIq1 {
    DEVICE void factors(const u8 *block, float &scale, float &) { scale = half_at(block, 0) * 0.125f; }
    DEVICE void decode(const u8 *block, u32 r, u32 q, const u32 *table, u32 out[2], int &scale, int &) {
        u32 field = half_word(block, 34 + 2 * r);
        row(table, block[2 + 4 * r + q] | (field >> (3 * q) & 7) << 8, field & 0x8000, out);
        scale = 2 * (field >> 12 & 7) + 1;
    }
};

template <> struct Whole<IQ1_M> : WholeIq1 {
    DEVICE void factors(const u8 *block, float &scale, float &) {
        u32 d = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) d |= half_word(block, 48 + 2 * i) >> 12 << (4 * i);
        scale = f16_value((u16)d) * 0.125f;
    }
    DEVICE void decode(const u8 *block, u32 r, u32 q, const u32 *table, u32 out[2], int &scale, int &) {
        u32 high = block[32 + 2 * r + q / 2] >> (q % 2 * 4) & 15;
        row(table, block[4 * r + q] | (high & 7) << 8, high & 8, out);
        scale = 2 * (half_word(block, 48 + r / 2 * 2) >> (r % 2 * 6 + q / 2 * 3) & 7) + 1;
    }
};
