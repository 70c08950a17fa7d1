// Weights as whole numbers of a byte for the integer tensor cores, of every type of blocks: passes of single rows.
//
// A lane decodes a run of 32 weights: `open` reads what belongs to all of it, `eight` gives the weights 8 t .. 8 t + 8 as two words
// of bytes. A weight is such a number times the scale of its half of the run, less its minimum where MIN, whole numbers each; times
// the block's two factors. Sums of whole numbers are exact: rounding begins with the factors.
//
// `block`: where the run's block begins, on an even address except for MXFP4; `r`: the run in it. Tables lie in shared memory in
// copies, word by word, of which every lane reads its own: 32 of them have no bank conflicts at all. TABLE_COPIES is 32, or 8 for
// GPUs whose blocks have little shared memory; large tables have a half or a quarter of them, but 4 at least.

const int ALL_COPIES = TABLE_COPIES, HALF_COPIES = TABLE_COPIES / 2, QUARTER_COPIES = TABLE_COPIES / 4 > 4 ? TABLE_COPIES / 4 : 4;

DEVICE u32 permute(u32 a, u32 b, u32 select) {
    u32 out;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(select));
    return out;
}

/// A word of a table, `at` bytes behind its beginning.
DEVICE u32 table_word(const u32 *table, u32 at) { return *(const u32 *)((const u8 *)table + at); }

/// The same of a table whose address in shared memory is a number.
DEVICE u32 table_word(u32 table, u32 at) {
    u32 out;
    asm("ld.shared.u32 %0, [%1];" : "=r"(out) : "r"(table + at));
    return out;
}

/// The table that begins so many words behind.
DEVICE const u32 *behind(const u32 *table, int words) { return table + words; }
DEVICE u32 behind(u32 table, int words) { return table + 4 * words; }

/// Threads that fill a table together: how many, and which of them this is.
struct Threads {
    int thread, threads;
};

/// Stores `entry(i)` of ROWS entries, each in COPIES copies (a multiple of 4).
template <int ROWS, int COPIES_OF, class Entry> DEVICE void fill_copies(u32 *table, Threads by, Entry entry) {
    const int CHUNKS = COPIES_OF / 4;
    for (int i = by.thread; i < ROWS; i += by.threads) {
        u32 word = entry(i);
#pragma unroll
        for (int j = 0; j < CHUNKS; j++) ((uint4 *)table)[i * CHUNKS + (j + i) % CHUNKS] = make_uint4(word, word, word, word);
    }
}

/// The entry of such a table whose number is the WIDTH bits of `word` from bit `at` on: an address in as few instructions as can be.
template <int COPIES_OF, int WIDTH, class Table> DEVICE u32 entry_of(Table table, u32 word, int at) {
    const int LOG = COPIES_OF == 32 ? 7 : COPIES_OF == 16 ? 6 : COPIES_OF == 8 ? 5 : 4;
    u32 offset = (at < LOG ? word << (LOG - at) : word >> (at - LOG)) & ((1u << WIDTH) - 1) << LOG;
    return table_word(table, offset | threadIdx.x % COPIES_OF * 4);
}

/// Byte `byte` of `word` as the number of an entry of two tables of 256 in turns: with all copies, its address is the byte put in place.
DEVICE u32 byte_entry(const u32 *table, u32 word, int byte, int second) {
    u32 lane = threadIdx.x % ALL_COPIES * 4;
    u32 at = ALL_COPIES == 32 ? permute(word, lane, 0x5504 | byte << 4) : (word >> (8 * byte) & 255) * (8 * ALL_COPIES) | lane;
    return ((const u32 *)((const u8 *)table + at))[second * ALL_COPIES];
}

/// The same of a table whose address is a number: one instruction works out the place, with the address.
DEVICE u32 byte_entry(u32 table, u32 word, int byte, int second) {
    u32 lane = table + threadIdx.x % ALL_COPIES * 4, each = 8 * ALL_COPIES << (byte % 2 * 16), at;
    if (byte < 2) asm("dp2a.lo.u32.u32 %0, %1, %2, %3;" : "=r"(at) : "r"(each), "r"(word), "r"(lane));
    else asm("dp2a.hi.u32.u32 %0, %1, %2, %3;" : "=r"(at) : "r"(each), "r"(word), "r"(lane));
    return table_word(at, second * ALL_COPIES * 4);
}

const int BYTE_TABLES = 256 * 2 * ALL_COPIES * 4; // bytes

/// Stores `first(i)` and `second(i)` there.
template <class First, class Second> DEVICE void fill_bytes(u32 *table, Threads by, First first, Second second) {
    const int CHUNKS = ALL_COPIES / 4;
    for (int i = by.thread; i < 256; i += by.threads) {
        u32 words[2] = {first(i), second(i)};
#pragma unroll
        for (int j = 0; j < 2 * CHUNKS; j++) {
            int chunk = (j + i) % (2 * CHUNKS);
            u32 word = chunk < CHUNKS ? words[0] : words[1];
            ((uint4 *)table)[i * 2 * CHUNKS + chunk] = make_uint4(word, word, word, word);
        }
    }
}

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
    static const int HALVES = 1; // of a run, with scales of their own
    DEVICE void fill_table(u32 *, Threads) {}
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

/// Eight words of bytes, with a scale for each half.
struct Bytes {
    u32 words[8];
    int scales[2], mins[2];
};

DEVICE void eight_of(const Bytes &run, int t, u32 out[2]) { out[0] = run.words[2 * t], out[1] = run.words[2 * t + 1]; }

template <> struct Whole<Q8_0> : OneFactor {
    typedef Bytes Run;
    DEVICE void open(const u8 *block, u32, Run &run) { words_at<8>(block + 2, run.words); }
    template <class Table> DEVICE void eight(const Run &run, int t, Table, u32 out[2]) { eight_of(run, t, out); }
};

/// Nibbles of 16 bytes, byte j holding the weights j and j + 16; FIFTH: where the fifth bits are, or 0; less ZERO.
template <int AT, int FIFTH, int ZERO, class Factors> struct Nibbles : Factors {
    struct Run {
        u32 words[4], fifth;
        int scales[2], mins[2];
    };
    DEVICE void open(const u8 *block, u32, Run &run) {
        words_at<4>(block + AT, run.words);
        run.fifth = FIFTH ? word(block, FIFTH) : 0;
    }
    template <class Table> DEVICE void eight(const Run &run, int t, Table, u32 out[2]) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            out[i] = run.words[t % 2 * 2 + i] >> (t / 2 * 4) & 0x0f0f0f0fu;
            if (FIFTH) out[i] |= spread_bits(run.fifth >> (8 * t + 4 * i)) << 4;
            if (ZERO) out[i] = less(out[i], ZERO);
        }
    }
};

template <> struct Whole<Q4_0> : Nibbles<2, 0, 8, OneFactor> {};
template <> struct Whole<Q5_0> : Nibbles<6, 2, 16, OneFactor> {};
template <> struct Whole<Q4_1> : Nibbles<4, 0, 0, TwoFactors<-1>> {};
template <> struct Whole<Q5_1> : Nibbles<8, 4, 0, TwoFactors<-1>> {};

/// Pairs of sixteen values, a byte each: entry a + 16 b.
template <class Value> DEVICE void fill_byte_pairs(u32 *table, Threads by, const Value *values) {
    fill_copies<256, ALL_COPIES>(table, by, [&](int i) { return (u32)(u8)values[i % 16] | (u32)(u8)values[i / 16] << 8; });
}

/// Nibbles of 16 bytes in a table of pairs of values.
template <class Factors> struct Uneven : Factors {
    static const int TABLE = 256 * 4 * ALL_COPIES;
    struct Run {
        u32 words[4];
        int scales[2], mins[2];
    };
    template <class Table> DEVICE void eight(const Run &run, int t, Table table, u32 out[2]) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            u32 four = run.words[t % 2 * 2 + i] >> (t / 2 * 4) & 0x0f0f0f0fu, pairs = four | four >> 4;
            out[i] = entry_of<ALL_COPIES, 8>(table, pairs, 0) | entry_of<ALL_COPIES, 8>(table, pairs, 16) << 16;
        }
    }
};

template <> struct Whole<IQ4_NL> : Uneven<OneFactor> {
    DEVICE void fill_table(u32 *table, Threads by) { fill_byte_pairs(table, by, IQ4_NL_VALUES); }
    DEVICE void open(const u8 *block, u32, Run &run) { words_at<4>(block + 2, run.words); }
};

template <> struct Whole<IQ4_XS> : Uneven<OneFactor> {
    DEVICE void fill_table(u32 *table, Threads by) { fill_byte_pairs(table, by, IQ4_NL_VALUES); }
    DEVICE void open(const u8 *block, u32 r, Run &run) {
        run.scales[0] = (int)(nibble(block + 4, r) | (half_word(block, 2) >> (2 * r) & 3) << 4) - 32;
        words_at<4>(block + 8 + 16 * r, run.words);
    }
};

template <> struct Whole<MXFP4> : Uneven<WholeBase> {
    DEVICE void fill_table(u32 *table, Threads by) { fill_byte_pairs(table, by, MXFP4_VALUES); }
    DEVICE void factors(const u8 *block, float &scale, float &) {
        u32 e = block[0];
        scale = __uint_as_float(e < 2 ? 1u << (21 + e) : (e - 1) << 23);
    }
    DEVICE void open(const u8 *block, u32, Run &run) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const u8 *at = block + 1 + 4 * i;
            run.words[i] = at[0] | at[1] << 8 | at[2] << 16 | (u32)at[3] << 24;
        }
    }
};

/// Two-bit numbers of run `r`: 32 bytes hold four runs.
DEVICE void two_bit_run(const u8 *field, u32 r, u32 out[8]) {
    words_at<8>(field + r / 4 * 32, out);
#pragma unroll
    for (int i = 0; i < 8; i++) out[i] = out[i] >> (r % 4 * 2) & 0x03030303u;
}

template <> struct Whole<Q2_K> : WholeBase {
    static const bool MIN = true;
    static const int HALVES = 2;
    typedef Bytes Run;
    DEVICE void factors(const u8 *block, float &scale, float &min) { scale = half_at(block, 80), min = half_at(block, 82); }
    DEVICE void open(const u8 *block, u32 r, Run &run) {
        u32 both = half_word(block, 2 * r);
        run.scales[0] = both & 15, run.mins[0] = both >> 4 & 15, run.scales[1] = both >> 8 & 15, run.mins[1] = both >> 12;
        two_bit_run(block + 16, r, run.words);
    }
    template <class Table> DEVICE void eight(const Run &run, int t, Table, u32 out[2]) { eight_of(run, t, out); }
};

template <> struct Whole<Q3_K> : WholeBase {
    static const int HALVES = 2;
    typedef Bytes Run;
    DEVICE void factors(const u8 *block, float &scale, float &) { scale = half_at(block, 108); }
    DEVICE void open(const u8 *block, u32 r, Run &run) {
        u32 thirds[8];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 sixteen = 2 * r + half;
            u32 low = block[96 + sixteen % 8] >> (sixteen / 8 * 4) & 15, high = block[104 + sixteen % 4] >> (sixteen / 4 * 2) & 3;
            run.scales[half] = (int)(low | high << 4) - 32;
        }
        two_bit_run(block + 32, r, run.words);
        words_at<8>(block, thirds);
#pragma unroll
        for (int i = 0; i < 8; i++) run.words[i] = less(run.words[i] | (thirds[i] >> r & 0x01010101u) << 2, 4);
    }
    template <class Table> DEVICE void eight(const Run &run, int t, Table, u32 out[2]) { eight_of(run, t, out); }
};

/// Q4_K and Q5_K: nibbles at AT, five bits with FIFTH.
template <int AT, bool FIFTH> struct WholeK : TwoFactors<1> {
    typedef Bytes Run;
    DEVICE void open(const u8 *block, u32 r, Run &run) {
        u32 scale, min;
        six_bit_scales(block + 4, r, scale, min);
        run.scales[0] = scale, run.mins[0] = min;
        const u32 *four = (const u32 *)(block + AT + r / 2 * 32), *fifth = (const u32 *)(block + 16);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            run.words[i] = four[i] >> (r % 2 * 4) & 0x0f0f0f0fu;
            if (FIFTH) run.words[i] |= (fifth[i] >> r & 0x01010101u) << 4;
        }
    }
    template <class Table> DEVICE void eight(const Run &run, int t, Table, u32 out[2]) { eight_of(run, t, out); }
};

template <> struct Whole<Q4_K> : WholeK<16, false> {};
template <> struct Whole<Q5_K> : WholeK<48, true> {};

template <> struct Whole<Q6_K> : WholeBase {
    static const int HALVES = 2;
    typedef Bytes Run;
    DEVICE void factors(const u8 *block, float &scale, float &) { scale = half_at(block, 208); }
    DEVICE void open(const u8 *block, u32 r, Run &run) {
        u32 scales = half_word(block, 192 + 2 * r), highs[8];
        run.scales[0] = (signed char)scales, run.scales[1] = (signed char)(scales >> 8);
        words_at<8>(block + r / 4 * 64 + r % 2 * 32, run.words);
        words_at<8>(block + 128 + r / 4 * 32, highs);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            u32 low = run.words[i] >> (r % 4 / 2 * 4) & 0x0f0f0f0fu, high = highs[i] >> (r % 4 * 2) & 0x03030303u;
            run.words[i] = less(low | high << 4, 32);
        }
    }
    template <class Table> DEVICE void eight(const Run &run, int t, Table, u32 out[2]) { eight_of(run, t, out); }
};

/// What a run of a codebook needs: indices and signs, in two words of each.
struct Fields {
    u32 rows[2], signs;
    int scales[2], mins[2];
};

/// A row of the magnitudes 8, 25, 43: which of them, a nibble each.
DEVICE u32 magnitude_nibbles(u64 row) { return nibbles_of((u32)row >> 4 & 0x03030303u, (u32)(row >> 36) & 0x03030303u); }

/// Such nibbles, with signs at their third bits.
DEVICE void signed_magnitudes(u32 nibbles, u32 out[2]) { chosen_bytes(0x002b1908u, 0x00d5e7f8u, nibbles, out); }

/// Codebooks of the magnitudes 8, 25, 43 in ROWS rows: a table of nibbles, then one of signs at their third bits, SIGNS entries.
template <int ROWS, int SIGNS, int ROW_COPIES, int SIGN_COPIES> struct WholeIq2 : WholeBase {
    static const int TABLE = (ROWS * ROW_COPIES + SIGNS * SIGN_COPIES) * 4;
    typedef Fields Run;
    DEVICE void fill(u32 *table, Threads by, const u64 *grid) {
        fill_copies<ROWS, ROW_COPIES>(table, by, [&](int i) { return magnitude_nibbles(grid[i]); });
        fill_copies<SIGNS, SIGN_COPIES>(table + ROWS * ROW_COPIES, by,
                                        [&](int i) { return spread_nibbles(SIGNS == 128 ? even_signs(i) : i) << 2; });
    }
    /// Bits `at` of `index` and `sign_at` of `signs` on.
    template <class Table> DEVICE void row(Table table, u32 index, int at, u32 signs, int sign_at, u32 out[2]) {
        const int WIDTH = ROWS == 512 ? 9 : 10;
        u32 nibbles = entry_of<ROW_COPIES, WIDTH>(table, index, at);
        nibbles += entry_of<SIGN_COPIES, SIGNS == 128 ? 7 : 8>(behind(table, ROWS * ROW_COPIES), signs, sign_at);
        signed_magnitudes(nibbles, out);
    }
    DEVICE void factors(const u8 *block, float &scale, float &) { scale = half_at(block, 0) * 0.125f; }
};

template <> struct Whole<IQ2_XXS> : WholeBase {
    static const int TABLE = BYTE_TABLES;
    typedef Fields Run;
    DEVICE void fill_table(u32 *table, Threads by) {
        fill_bytes(table, by, [&](int i) { return magnitude_nibbles(IQ2_XXS_GRID[i]); }, [&](int i) { return spread_nibbles(even_signs(i >> 1)) << 2; });
    }
    DEVICE void factors(const u8 *block, float &scale, float &) { scale = half_at(block, 0) * 0.125f; }
    DEVICE void open(const u8 *block, u32 r, Run &run) {
        u32 words[2];
        words_behind<2>(block + 2, 8 * r, words);
        run.rows[0] = words[0], run.signs = words[1];
        run.scales[0] = words[1] >> 27 | 1;
    }
    template <class Table> DEVICE void eight(const Run &run, int t, Table table, u32 out[2]) {
        signed_magnitudes(byte_entry(table, run.rows[0], t, 0) + byte_entry(table, run.signs << (25 - 7 * t), 3, 1), out);
    }
};

template <> struct Whole<IQ2_XS> : WholeIq2<512, 128, HALF_COPIES, ALL_COPIES> {
    static const int HALVES = 2;
    DEVICE void fill_table(u32 *table, Threads by) { fill(table, by, IQ2_XS_GRID); }
    DEVICE void open(const u8 *block, u32 r, Run &run) {
        u32 scales = block[66 + r];
        words_at<2>(block + 2 + 8 * r, run.rows);
        run.scales[0] = 2 * (scales & 15) + 1, run.scales[1] = 2 * (scales >> 4) + 1;
    }
    template <class Table> DEVICE void eight(const Run &run, int t, Table table, u32 out[2]) {
        row(table, run.rows[t / 2], t % 2 * 16, run.rows[t / 2], t % 2 * 16 + 9, out);
    }
};

template <> struct Whole<IQ2_S> : WholeIq2<1024, 256, QUARTER_COPIES, HALF_COPIES> {
    static const int HALVES = 2;
    DEVICE void fill_table(u32 *table, Threads by) { fill(table, by, IQ2_S_GRID); }
    DEVICE void open(const u8 *block, u32 r, Run &run) {
        u32 scales = block[74 + r];
        run.rows[0] = word(block, 2 + 4 * r), run.rows[1] = block[66 + r], run.signs = word(block, 34 + 4 * r);
        run.scales[0] = 2 * (scales & 15) + 1, run.scales[1] = 2 * (scales >> 4) + 1;
    }
    template <class Table> DEVICE void eight(const Run &run, int t, Table table, u32 out[2]) {
        row(table, (run.rows[0] >> (8 * t) & 255) | (run.rows[1] >> (2 * t) & 3) << 8, 0, run.signs, 8 * t, out);
    }
};

/// Rows of four magnitudes. `signs`: as `spread_bytes` leaves them.
DEVICE void signed_pair(u32 first, u32 second, u32 signs, u32 out[2]) {
    out[0] = negated(first, signs & 0x01010101u);
    out[1] = negated(second, signs >> 4 & 0x01010101u);
}

template <> struct Whole<IQ3_XXS> : WholeBase {
    static const int TABLE = BYTE_TABLES;
    typedef Fields Run;
    DEVICE void fill_table(u32 *table, Threads by) {
        fill_bytes(table, by, [&](int i) { return IQ3_XXS_GRID[i]; }, [&](int i) { return spread_bytes(even_signs(i >> 1)); });
    }
    DEVICE void factors(const u8 *block, float &scale, float &) { scale = half_at(block, 0) * 0.25f; }
    DEVICE void open(const u8 *block, u32 r, Run &run) {
        words_at<2>(block + 2 + 8 * r, run.rows);
        words_at<1>(block + 66 + 4 * r, &run.signs);
        run.scales[0] = run.signs >> 27 | 1;
    }
    template <class Table> DEVICE void eight(const Run &run, int t, Table table, u32 out[2]) {
        u32 both = run.rows[t / 2], signs = byte_entry(table, run.signs << (25 - 7 * t), 3, 1);
        signed_pair(byte_entry(table, both, t % 2 * 2, 0), byte_entry(table, both, t % 2 * 2 + 1, 0), signs, out);
    }
};

template <> struct Whole<IQ3_S> : OneFactor {
    static const int TABLE = 512 * 4 * HALF_COPIES;
    struct Run {
        u32 rows[2], signs, ninth;
        int scales[2], mins[2];
    };
    DEVICE void fill_table(u32 *table, Threads by) {
        fill_copies<512, HALF_COPIES>(table, by, [&](int i) { return IQ3_S_GRID[i]; });
    }
    DEVICE void open(const u8 *block, u32 r, Run &run) {
        words_at<2>(block + 2 + 8 * r, run.rows);
        run.signs = word(block, 74 + 4 * r), run.ninth = block[66 + r];
        run.scales[0] = 1 + 2 * nibble(block + 106, r);
    }
    template <class Table> DEVICE void eight(const Run &run, int t, Table table, u32 out[2]) {
        u32 both = run.rows[t / 2] >> (t % 2 * 16), ninth = run.ninth >> (2 * t);
        u32 first = (both & 255) | (ninth & 1) << 8, second = (both >> 8 & 255) | (ninth >> 1 & 1) << 8;
        signed_pair(entry_of<HALF_COPIES, 9>(table, first, 0), entry_of<HALF_COPIES, 9>(table, second, 0), spread_bytes(run.signs >> (8 * t) & 255), out);
    }
};

/// The ternary codebook, moved by ±1/8: eight times as much, a whole number.
struct WholeIq1 : WholeBase {
    static const int TABLE = 2048 * 4 * 4;
    typedef Fields Run;
    DEVICE void fill_table(u32 *table, Threads by) {
        fill_copies<2048, 4>(table, by, [&](int i) {
            u32 low = (u32)IQ1_GRID[i], high = (u32)(IQ1_GRID[i] >> 32);
            return nibbles_of(low & 0x03030303u, high & 0x03030303u);
        });
    }
    template <class Table> DEVICE void row(Table table, u32 index, bool down, u32 out[2]) {
        chosen_bytes(0xf9000901u, 0xf70007ffu, entry_of<4, 11>(table, index, 0) ^ (down ? 0x44444444u : 0), out);
    }
};

template <> struct Whole<IQ1_S> : WholeIq1 {
    DEVICE void factors(const u8 *block, float &scale, float &) { scale = half_at(block, 0) * 0.125f; }
    DEVICE void open(const u8 *block, u32 r, Run &run) {
        run.signs = half_word(block, 34 + 2 * r), run.rows[0] = word(block, 2 + 4 * r);
        run.scales[0] = 2 * (run.signs >> 12 & 7) + 1;
    }
    template <class Table> DEVICE void eight(const Run &run, int t, Table table, u32 out[2]) {
        row(table, (run.rows[0] >> (8 * t) & 255) | (run.signs >> (3 * t) & 7) << 8, run.signs & 0x8000, out);
    }
};

template <> struct Whole<IQ1_M> : WholeIq1 {
    static const int HALVES = 2;
    DEVICE void factors(const u8 *block, float &scale, float &) {
        u32 d = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) d |= half_word(block, 48 + 2 * i) >> 12 << (4 * i);
        scale = f16_value((u16)d) * 0.125f;
    }
    DEVICE void open(const u8 *block, u32 r, Run &run) {
        run.rows[0] = word(block, 4 * r), run.signs = half_word(block, 32 + 2 * r);
        u32 scales = half_word(block, 48 + r / 2 * 2) >> (r % 2 * 6);
        run.scales[0] = 2 * (scales & 7) + 1, run.scales[1] = 2 * (scales >> 3 & 7) + 1;
    }
    template <class Table> DEVICE void eight(const Run &run, int t, Table table, u32 out[2]) {
        u32 high = run.signs >> (4 * t);
        row(table, (run.rows[0] >> (8 * t) & 255) | (high & 7) << 8, high & 8, out);
    }
};
