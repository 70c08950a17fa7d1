// Products of spans: 256 columns of 16 rows of weights times up to eight rows of x, by one warp.
//
// Lane l holds two runs (32 weights) of the rows l / 4 and l / 4 + 8, and the same runs of row l / 4 of x: which two is up to the
// type, so that they share bytes. c is the product's layout (`multiply_bf16`).
//
// Factors are f16: whole numbers q times whole scales of a few bits are exact there (Q6_K's but for 2^-12), and the scale of a
// block is applied to its sums; Q8_0's is multiplied into the weights, rounded to f16. Small numbers are made as the mantissa of 1024 + q, two at a time: the bytes 0 and 2 of a word,
// then 1 and 3. x comes in that order: columns 4 i, 4 i + 2, 4 i + 1, 4 i + 3.

DEVICE u32 half_fma(u32 a, u32 b, u32 c) {
    u32 out;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
    return out;
}

DEVICE u32 half_add(u32 a, u32 b) {
    u32 out;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
}

DEVICE u32 half_multiply(u32 a, u32 b) {
    u32 out;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
}

/// Bits of `a` where `mask` has ones, of `b` elsewhere: one instruction, which the compiler would take apart.
DEVICE u32 mixed(u32 a, u32 b, u32 mask) {
    u32 out;
    asm("lop3.b32 %0, %1, %2, %3, 0xe4;" : "=r"(out) : "r"(a), "r"(b), "r"(mask));
    return out;
}

/// 1024 + q for the bytes 0 and 2 of a word, of which `mask` says which bits count.
DEVICE u32 even_bytes(u32 word, u32 mask) {
    u32 out;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(out) : "r"(word), "r"(mask), "r"(0x64006400u));
    return out;
}

/// The same of bytes 1 and 3.
DEVICE u32 odd_bytes(u32 word, u32 mask) { return even_bytes(word >> 8, mask); }

/// A whole number from byte `which` of `bytes`, less than 128, as a pair of f16.
DEVICE u32 half_of_byte(u32 bytes, u32 which) {
    return half_add(__byte_perm(bytes, 0x64646464u, 0x4040u + which * 0x101u), 0xe400e400u);
}

DEVICE u32 shared_word(u32 address) {
    u32 out;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(out) : "r"(address));
    return out;
}

/// Selects a word that begins at `address` from the two it lies in.
DEVICE u32 unaligned(u32 address, u32 before, u32 after) { return __byte_perm(before, after, address & 2 ? 0x5432 : 0x3210); }

/// Which runs of a span are a lane's: two neighbours; and in which order it takes their words.
struct Neighbours {
    DEVICE int own(int i) { return threadIdx.x % 4 * 2 + i; }
    DEVICE int order(int i) { return i; }
};

/// Types without a product of spans.
template <class T> struct Span {
    static const bool EXISTS = false;
};

/// What a lane needs of a row of Q4_K and Q5_K: scales and mins of two neighbouring runs.
struct RowK {
    u32 scale[2], bias[2], min[2]; // pairs of f16: scale · small number + bias is a whole number times a whole scale
    float d, dmin;

    /// Steps of the two runs' small numbers are 1 / `first` and 1 / `second`, as pairs of f16.
    DEVICE RowK of(const u8 *block, u32 first, u32 second) {
        uint4 head = *(const uint4 *)block;
        int t = threadIdx.x % 4, shift = t % 2 * 16;
        u32 a = head.y >> shift, b = head.z >> shift, c = head.w >> shift;
        u32 scales = t < 2 ? a & 0x3f3f : (c & 0x0f0f) | (a >> 2 & 0x3030);
        u32 mins = t < 2 ? b & 0x3f3f : (c >> 4 & 0x0f0f) | (b >> 2 & 0x3030);
        RowK row;
        row.d = f16_value((u16)head.x), row.dmin = f16_value((u16)(head.x >> 16));
#pragma unroll
        for (int i = 0; i < 2; i++) {
            row.scale[i] = half_multiply(half_of_byte(scales, i), i == 0 ? first : second);
            row.bias[i] = half_multiply(row.scale[i], 0xe400e400u); // −1024
            row.min[i] = half_of_byte(mins, i);
        }
        return row;
    }
};

/// Q4_K and Q5_K. A lane's runs are the halves of the same 32 bytes.
template <int AT, bool FIFTH> struct SpanK : Neighbours {
    static const bool EXISTS = true;

    /// Four words of a row: of each word, pairs of its first run, then of its second.
    DEVICE void numbers(const u8 *block, int quarter, const RowK &row, u32 out[4][4]) {
        int t = threadIdx.x % 4;
        uint4 q = ((const uint4 *)(block + AT + 32 * t))[quarter], f = make_uint4(0, 0, 0, 0);
        if (FIFTH) f = ((const uint4 *)(block + 16))[quarter];
        u32 words[4] = {q.x, q.y, q.z, q.w}, fifths[4] = {f.x, f.y, f.z, f.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 w = words[i], low = w, high = w, low_mask = 0x000f000fu, high_mask = 0x00f000f0u;
            if (FIFTH) {
                // Fifth bits to the bits 6 and 7 of their bytes.
                u32 top = fifths[i] * (64u >> (2 * t));
                low = mixed(w << 2, top, 0x3f3f3f3fu), low_mask = 0x007c007cu;
                high = mixed(w >> 1, top, 0x7f7f7f7fu), high_mask = 0x00f800f8u;
            }
            out[i][0] = half_fma(even_bytes(low, low_mask), row.scale[0], row.bias[0]);
            out[i][1] = half_fma(odd_bytes(low, low_mask), row.scale[0], row.bias[0]);
            out[i][2] = half_fma(even_bytes(high, high_mask), row.scale[1], row.bias[1]);
            out[i][3] = half_fma(odd_bytes(high, high_mask), row.scale[1], row.bias[1]);
        }
    }

    DEVICE void multiply(float c[4], const u8 *low, const u8 *high, const u32 x[2][16], int) {
        // 1 / 4 and 1 / 8, or 1 and 1 / 16.
        const u32 first = FIFTH ? 0x34003400u : 0x3c003c00u, second = FIFTH ? 0x30003000u : 0x2c002c00u;
        RowK l = RowK::of(low, first, second), h = RowK::of(high, first, second);
        float sums[4] = {}, mins[4] = {};
#pragma unroll
        for (int quarter = 0; quarter < 2; quarter++) {
            u32 a[4][4], b[4][4];
            numbers(low, quarter, l, a);
            numbers(high, quarter, h, b);
#pragma unroll
            for (int i = 0; i < 4; i++) {
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    u32 even = x[j][8 * quarter + 2 * i], odd = x[j][8 * quarter + 2 * i + 1];
                    u32 weights[4] = {a[i][2 * j], b[i][2 * j], a[i][2 * j + 1], b[i][2 * j + 1]};
                    u32 rest[4] = {l.min[j], h.min[j], l.min[j], h.min[j]};
                    multiply_f16(sums, weights, even, odd);
                    multiply_f16(mins, rest, even, odd);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            c[i] = fmaf(i < 2 ? l.d : h.d, sums[i], fmaf(i < 2 ? -l.dmin : -h.dmin, mins[i], c[i]));
        }
    }
};

template <> struct Span<Q4_K> : SpanK<16, false> {};
template <> struct Span<Q5_K> : SpanK<48, true> {};

/// A lane's runs share the low bits' bytes: the first and third of a half block, or the second and fourth.
template <> struct Span<Q6_K> {
    static const bool EXISTS = true;
    DEVICE int own(int i) { return threadIdx.x % 4 / 2 * 4 + threadIdx.x % 2 + 2 * i; }

    /// The lanes of a row begin at different words of 16 bytes, which lie in different banks.
    DEVICE int order(int i) { return (i & 4) | (i + threadIdx.x) % 4; }

    /// The words of 16 bytes at an even address, in that order.
    DEVICE void words(u32 at, u32 out[4]) {
        u32 first = at & ~3u, last = shared_word(first + 16), found[4];
#pragma unroll
        for (int i = 0; i < 4; i++) found[i] = shared_word(first + 4 * order(i));
#pragma unroll
        for (int i = 0; i < 4; i++) out[i] = unaligned(at, found[i], order(i) == 3 ? last : found[(i + 1) % 4]);
    }

    /// Half a run of a row (16 bytes) in pairs of its first run, then of its second.
    DEVICE void numbers(const u8 *block, int half, u32 out[4][4]) {
        int t = threadIdx.x % 4;
        u32 lows[4], highs[4];
        words(shared_address(block) + 32 * t + 16 * half, lows);
        words(shared_address(block) + 128 + t / 2 * 32 + 16 * half, highs);
        u32 scales = half_word(block, 192 + t / 2 * 8 + t % 2 * 2);
        u32 others = half_word(block, 196 + t / 2 * 8 + t % 2 * 2);
        u32 both = (scales >> (8 * half) & 255) | (others >> (8 * half) & 255) << 8;
        // As 1024 + 128 + scale, then the scale.
        u32 first = half_add(__byte_perm(both ^ 0x8080u, 0x64646464u, 0x4040u), 0xe480e480u);
        u32 second = half_multiply(half_add(__byte_perm(both ^ 0x8080u, 0x64646464u, 0x4141u), 0xe480e480u), 0x34003400u);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 w = lows[i], top = highs[i] * (t % 2 ? 1u : 4u);
            u32 low = mixed(w, top << 2, 0x0f0f0f0fu), high = mixed(w >> 2, top, 0x3f3f3f3fu);
            // 1024 + q − 1056, and 1024 + 4 q − 1152.
            out[i][0] = half_multiply(half_add(even_bytes(low, 0x003f003fu), 0xe420e420u), first);
            out[i][1] = half_multiply(half_add(odd_bytes(low, 0x003f003fu), 0xe420e420u), first);
            out[i][2] = half_multiply(half_add(even_bytes(high, 0x00fc00fcu), 0xe480e480u), second);
            out[i][3] = half_multiply(half_add(odd_bytes(high, 0x00fc00fcu), 0xe480e480u), second);
        }
    }

    DEVICE void multiply(float c[4], const u8 *low, const u8 *high, const u32 x[2][16], int) {
        float sums[4] = {};
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 a[4][4], b[4][4];
            numbers(low, half, a);
            numbers(high, half, b);
#pragma unroll
            for (int i = 0; i < 4; i++) {
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    u32 weights[4] = {a[i][2 * j], b[i][2 * j], a[i][2 * j + 1], b[i][2 * j + 1]};
                    multiply_f16(sums, weights, x[j][8 * half + 2 * i], x[j][8 * half + 2 * i + 1]);
                }
            }
        }
        float first = half_at(low, 208), second = half_at(high, 208);
#pragma unroll
        for (int i = 0; i < 4; i++) c[i] = fmaf(i < 2 ? first : second, sums[i], c[i]);
    }
};

template <> struct Span<Q8_0> : Neighbours {
    static const bool EXISTS = true;

    DEVICE void numbers(const u8 *row, int run, int cols, u32 out[16]) {
        const u8 *block = row + run * Q8_0::BYTES;
        u32 d = run * 32 < cols ? half_word(block, 0) * 0x10001u : 0;
        u32 at = shared_address(block) + 2, before = shared_word(at & ~3u);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            u32 after = shared_word((at & ~3u) + 4 * i + 4), bytes = unaligned(at, before, after) ^ 0x80808080u;
            before = after;
            out[2 * i] = half_multiply(half_add(__byte_perm(bytes, 0x64646464u, 0x4240), 0xe480e480u), d);
            out[2 * i + 1] = half_multiply(half_add(__byte_perm(bytes, 0x64646464u, 0x4341), 0xe480e480u), d);
        }
    }

    DEVICE void multiply(float c[4], const u8 *low, const u8 *high, const u32 x[2][16], int cols) {
#pragma unroll
        for (int j = 0; j < 2; j++) {
            u32 a[16], b[16];
            numbers(low, own(j), cols, a);
            numbers(high, own(j), cols, b);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                u32 weights[4] = {a[2 * i], b[2 * i], a[2 * i + 1], b[2 * i + 1]};
                multiply_f16(c, weights, x[j][2 * i], x[j][2 * i + 1]);
            }
        }
    }
};
