// Products of spans by whole numbers: 256 columns of 16 rows of weights times up to eight rows of x, by one warp.
//
// Weights of blocks are whole numbers q of a byte times whole scales of a few bits, times one factor a block. x becomes two whole
// numbers of a byte too, planes of 2^0 and 2^8 that hold 15 bits counted from the largest of a span. So the sum of a block is a
// whole number, which is exact, and few instructions: a word of four weights is a factor as it comes out of its mask.
//
// The product (16 · 8, 32 columns) takes four columns of eight from each lane: lane l holds the columns 8 (l % 4) … 8 (l % 4) + 8
// of each run of the rows l / 4 and l / 4 + 8. Its eight columns are the planes of four rows of x, one beside the other: a SET. So
// lane l has both sums of row 4 s + l % 4 of x.
//
// What is taken off each weight (a min, or the middle of its range) is multiplied with sums of x, by one product of f16.
//
// A span of a row of x in shared memory, SPAN_X bytes: two planes of [8 runs][32], 288 bytes apart, so that eight of them lie in
// different banks; at SUMS_AT for each run, then for each half of one, the sum of x: 1024 times a whole number, then what is left,
// as f16; at SCALE_AT what sums are multiplied with, and the sum of squares, f32.

const int SPAN = 256, PLANE_X = 288, SUMS_AT = 2 * PLANE_X, SCALE_AT = SUMS_AT + 96, SPAN_X = 704;
static_assert(SCALE_AT + 8 <= SPAN_X, "a record holds planes, sums, and two numbers");

DEVICE int spans_of(int cols) { return (cols + SPAN - 1) / SPAN; }

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

/// The bytes 0 and 1 of a word, whole numbers from 0 to 255, as a pair of f16, less `middle`: −(1024 + what is taken off), twice.
DEVICE u32 halves_of(u32 bytes, u32 middle) { return half_add(__byte_perm(bytes, 0x64646464u, 0x4140), middle); }

DEVICE u32 shared_word(u32 address) {
    u32 out;
    asm("ld.shared.u32 %0, [%1];" : "=r"(out) : "r"(address));
    return out;
}

/// How bytes at an even address of shared memory lie in words of 4.
DEVICE u32 halves_at(u32 address) { return address & 2 ? 0x5432 : 0x3210; }

/// Eight bytes, some words behind an address of this order.
DEVICE uint2 eight_at(u32 address, u32 order, int behind) {
    u32 first = (address & ~3u) + behind, a = shared_word(first), b = shared_word(first + 4), c = shared_word(first + 8);
    return make_uint2(__byte_perm(a, b, order), __byte_perm(b, c, order));
}

/// c = a · b: a [16, 32], b [32, 8], of whole numbers of a byte.
///
/// Lane l holds of a rows l / 4 (a0, a2) and l / 4 + 8 (a1, a3), of c these rows (c0, c1; c2, c3), columns 2 (l % 4) and the next.
DEVICE void product_whole(int c[4], const u32 a[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
        : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(0));
}

/// c += a · b of f16: a [16, 16], b [16, 8].
DEVICE void add_halves(float c[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/// A span of x, as lanes take it.
template <int SETS> struct SpanX {
    const u8 *own[SETS];   // where this lane's columns of the runs begin
    const u8 *pairs;       // its sums of x: of the column that comes to lie beside what it has of set 0 or 1
    const u8 *scales[SETS];

    /// Of a lane. `at`: the span's record of row 0; those of `count` rows lie `stride` bytes apart.
    DEVICE SpanX of(int lane, const u8 *at, int stride, int count) {
        int column = lane / 4, t = lane % 4;
        auto row = [&](int r) { return at + min(r, count - 1) * stride; };
        SpanX x;
        x.pairs = row(column % 2 * 4 + column / 2) + SUMS_AT + t * 4;
#pragma unroll
        for (int s = 0; s < SETS; s++) {
            x.own[s] = row(4 * s + column / 2) + column % 2 * PLANE_X + t * 8;
            x.scales[s] = row(4 * s + t) + SCALE_AT;
        }
        return x;
    }

    /// Goes on by some spans.
    DEVICE void advance(SpanX &x, int spans) {
        x.pairs += spans * SPAN_X;
#pragma unroll
        for (int s = 0; s < SETS; s++) x.own[s] += spans * SPAN_X, x.scales[s] += spans * SPAN_X;
    }

    DEVICE uint2 run(const SpanX &x, int s, int r) { return *(const uint2 *)(x.own[s] + 32 * r); }

    /// A pair of sums, which begins at number `at`.
    DEVICE u32 sums(const SpanX &x, int at) { return *(const u32 *)(x.pairs + 2 * at); }

    DEVICE float scale(const SpanX &x, int s) { return *(const float *)x.scales[s]; }
};

/// The larger magnitude of two numbers; none if either is none.
DEVICE float larger(float a, float b) {
    float out;
    asm("{ .reg .f32 x, y; abs.f32 x, %1; abs.f32 y, %2; max.NaN.f32 %0, x, y; }" : "=f"(out) : "f"(a), "f"(b));
    return out;
}

/// Puts eight columns of a span down, each lane its own: of some rows side by side, `count` of which are there. `squares`: in lane
/// 8 r of row r.
template <int ROWS> DEVICE void put_x(u8 *record, int stride, int count, const float y[ROWS][8], float squares) {
    // As the mantissa of a float, with the zero of both bytes at 128.
    const float ZERO = 12582912.0f + 32896.0f;
    const u32 ZERO_BITS = 0x4b400000u + 32896u;
    int lane = threadIdx.x % 32;
    u32 most[ROWS], words[ROWS][4];
    int sums[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        float high = larger(larger(larger(y[r][0], y[r][1]), larger(y[r][2], y[r][3])),
                            larger(larger(y[r][4], y[r][5]), larger(y[r][6], y[r][7])));
        most[r] = __reduce_max_sync(~0u, __float_as_uint(high));
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        // The largest becomes 127 · 256. What is next to nothing becomes that.
        float up = most[r] < 0x0d000000u ? 0.0f : __fdividef(32512.0f, __uint_as_float(most[r]));
        u32 whole[8], sum = 0;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            whole[i] = __float_as_uint(fmaf(y[r][i], up, ZERO));
            sum += whole[i];
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const u32 *v = whole + i * 4;
            u32 first = __byte_perm(v[0], v[1], 0x5140), second = __byte_perm(v[2], v[3], 0x5140);
            words[r][i] = __byte_perm(first, second, 0x5410) ^ 0x80808080u;
            words[r][2 + i] = __byte_perm(first, second, 0x7632) ^ 0x80808080u;
        }
        sums[r] = (int)(sum - 8 * ZERO_BITS);
        sums[r] += __shfl_xor_sync(~0u, sums[r], 1);
    }
    // Sums of the runs are put down by every fourth lane, those of their halves by even ones.
    bool whole_run = lane % 4 == 1;
    int at = SUMS_AT + (whole_run ? lane / 4 : 16 + lane / 2) * 2, apart = whole_run ? 16 : 32;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        int all = sums[r] + __shfl_xor_sync(~0u, sums[r], 2);
        u8 *to = record + r * stride;
        if (r >= count) continue;
        ((uint2 *)to)[lane] = make_uint2(words[r][0], words[r][1]);
        ((uint2 *)(to + PLANE_X))[lane] = make_uint2(words[r][2], words[r][3]);
        float sum = (float)(whole_run ? all : sums[r]), thousands = rintf(sum * (1.0f / 1024.0f));
        u32 both = half_pair(thousands, fmaf(thousands, -1024.0f, sum));
        if (lane % 4 < 3) *(u16 *)(to + at) = (u16)both, *(u16 *)(to + at + apart) = (u16)(both >> 16);
        if (lane == 8 * r) {
            // What is no number stays none.
            float down = most[r] < 0x0d000000u ? 0.0f : __uint_as_float(most[r] >= 0x7f800000u ? 0x7fffffffu : most[r]) * (1.0f / 32512.0f);
            *(float2 *)(to + SCALE_AT) = make_float2(down, squares);
        }
    }
}

/// What sums of both planes come to.
DEVICE float joined(int low, int high) { return fmaf((float)high, 256.0f, (float)low); }

/// Types without a product of spans.
template <class T> struct Span {
    static const bool EXISTS = false;
};

/// Q4_K and Q5_K: nibbles at AT, five bits with FIFTH.
template <int AT, bool FIFTH> struct SpanK {
    static const bool EXISTS = true;

    /// c[2 s + h] += row l / 4 + 8 h of weights, `low` or `high`, times row 4 s + l % 4 of x; t: l % 4.
    template <int SETS> DEVICE void multiply(float *c, const u8 *low, const u8 *high, const SpanX<SETS> &x, int t, int) {
        const u8 *rows[2] = {low, high};
        int whole[SETS][4] = {};
        u32 scales[2][2], mins[2];
        uint2 fifth[2] = {};
#pragma unroll
        for (int h = 0; h < 2; h++) {
            uint4 head = *(const uint4 *)rows[h];
            if (FIFTH) fifth[h] = *(const uint2 *)(rows[h] + 16 + 8 * t);
            scales[h][0] = head.y & 0x3f3f3f3fu;
            scales[h][1] = (head.w & 0x0f0f0f0fu) | (head.y >> 2 & 0x30303030u);
        }
#pragma unroll
        for (int step = 0; step < 4; step++) {
            // The runs 2 j and 2 j + 1: j and j + 2 one after the other, whose fifth bits lie four apart.
            const int j = step / 2 + step % 2 * 2;
            u32 a[2][4];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                uint2 v = *(const uint2 *)(rows[h] + AT + 32 * j + 8 * t);
                u32 words[2] = {v.x, v.y}, tops[2] = {fifth[h].x, fifth[h].y};
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    u32 word = words[i / 2] >> (i % 2 * 4);
                    if (FIFTH) {
                        // Bits 0 and 4 of each byte, the first of which belongs to bit 4.
                        u32 both = tops[i / 2] >> (j % 2 * 2 + i % 2) & 0x11111111u;
                        a[i % 2][i / 2 * 2 + h] = mixed(word, j < 2 ? both << 4 : both, 0x0f0f0f0fu);
                    } else {
                        a[i % 2][i / 2 * 2 + h] = word & 0x0f0f0f0fu;
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int r = 2 * j + i;
#pragma unroll
                for (int s = 0; s < SETS; s++) {
                    int part[4];
                    uint2 v = SpanX<SETS>::run(x, s, r);
                    product_whole(part, a[i], v.x, v.y);
#pragma unroll
                    for (int k = 0; k < 4; k++) whole[s][k] += part[k] * (int)(scales[k / 2][r / 4] >> (8 * (r % 4)) & 255);
                }
            }
        }
        float rest[4] = {}, factors[2], less[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            uint4 head = *(const uint4 *)rows[h];
            factors[h] = f16_value((u16)head.x), less[h] = f16_value((u16)(head.x >> 16)) * -1024.0f;
            u32 b = head.z >> (t % 2 * 16), w = head.w >> (t % 2 * 16);
            mins[h] = halves_of(t < 2 ? b & 0x3f3fu : (w >> 4 & 0x0f0fu) | (b >> 2 & 0x3030u), 0xe400e400u);
        }
        add_halves(rest, mins[0], mins[1], half_multiply(mins[0], 0x14001400u), half_multiply(mins[1], 0x14001400u),
                   SpanX<SETS>::sums(x, 0), SpanX<SETS>::sums(x, 8));
#pragma unroll
        for (int s = 0; s < SETS; s++) {
            float scale = SpanX<SETS>::scale(x, s);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float sum = factors[h] * joined(whole[s][2 * h], whole[s][2 * h + 1]);
                c[2 * s + h] = fmaf(fmaf(less[h], rest[2 * h + s], sum), scale, c[2 * s + h]);
            }
        }
    }
};

template <> struct Span<Q4_K> : SpanK<16, false> {};
template <> struct Span<Q5_K> : SpanK<48, true> {};

/// Scales belong to halves of runs, which lie in two lanes each: products of either have zeros for the other's.
template <> struct Span<Q6_K> {
    static const bool EXISTS = true;

    template <int SETS> DEVICE void multiply(float *c, const u8 *low, const u8 *high, const SpanX<SETS> &x, int t, int) {
        const u8 *rows[2] = {low, high};
        int whole[SETS][4] = {};
        u32 first_half = t < 2 ? ~0u : 0u;
        // Rows two apart lie whole words apart.
        u32 at[2] = {shared_address(low), shared_address(high)}, own[2] = {at[0] + 8 * t, at[1] + 8 * t}, order = halves_at(at[0]);
        float rest[4] = {};
#pragma unroll
        for (int which = 0; which < 2; which++) {
            u32 words[2][3][2]; // of each row: low bits of the runs 0 and 2, of 1 and 3, high bits
            uint2 scales[2];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                uint2 a = eight_at(own[h], order, 64 * which), b = eight_at(own[h], order, 64 * which + 32);
                uint2 top = eight_at(own[h], order, 128 + 32 * which);
                words[h][0][0] = a.x, words[h][0][1] = a.y, words[h][1][0] = b.x, words[h][1][1] = b.y;
                words[h][2][0] = top.x, words[h][2][1] = top.y;
                scales[h] = eight_at(at[h], order, 192 + 8 * which);
            }
#pragma unroll
            for (int r = 0; r < 4; r++) {
                u32 a[4];
#pragma unroll
                for (int h = 0; h < 2; h++) {
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        u32 word = words[h][r % 2][i], top = words[h][2][i];
                        top = r == 0 ? top << 4 : r == 1 ? top << 2 : r == 2 ? top : top >> 2;
                        a[2 * i + h] = mixed(r < 2 ? word : word >> 4, top, 0x0f0f0f0fu) & 0x3f3f3f3fu;
                    }
                }
#pragma unroll
                for (int half = 0; half < 2; half++) {
#pragma unroll
                    for (int s = 0; s < SETS; s++) {
                        uint2 v = SpanX<SETS>::run(x, s, 4 * which + r);
                        u32 mask = half == 0 ? first_half : ~first_half;
                        int part[4];
                        product_whole(part, a, v.x & mask, v.y & mask);
#pragma unroll
                        for (int k = 0; k < 4; k++) {
                            u32 word = r < 2 ? scales[k / 2].x : scales[k / 2].y;
                            whole[s][k] += part[k] * (int)(signed char)(word >> (8 * (r % 2 * 2 + half)));
                        }
                    }
                }
            }
        }
        u32 pairs[2][2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
#pragma unroll
            for (int i = 0; i < 2; i++) pairs[h][i] = halves_of(half_word(rows[h], 192 + 8 * i + 2 * t) ^ 0x8080u, 0xe480e480u);
        }
        add_halves(rest, pairs[0][0], pairs[1][0], pairs[0][1], pairs[1][1], SpanX<SETS>::sums(x, 16), SpanX<SETS>::sums(x, 24));
        const u32 SMALL = 0x14001400u; // 1 / 1024
        add_halves(rest, half_multiply(pairs[0][0], SMALL), half_multiply(pairs[1][0], SMALL), half_multiply(pairs[0][1], SMALL),
                   half_multiply(pairs[1][1], SMALL), SpanX<SETS>::sums(x, 32), SpanX<SETS>::sums(x, 40));
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float factor = half_at(rows[h], 208);
#pragma unroll
            for (int s = 0; s < SETS; s++) {
                // 32 is the middle of a weight.
                float sum = fmaf(rest[2 * h + s], -32.0f * 1024.0f, joined(whole[s][2 * h], whole[s][2 * h + 1]));
                c[2 * s + h] = fmaf(factor * sum, SpanX<SETS>::scale(x, s), c[2 * s + h]);
            }
        }
    }
};

/// A factor for each run. Behind column `cols` there is anything.
template <> struct Span<Q8_0> {
    static const bool EXISTS = true;

    template <int SETS> DEVICE void multiply(float *c, const u8 *low, const u8 *high, const SpanX<SETS> &x, int t, int cols) {
        const u8 *rows[2] = {low, high};
        // Rows two apart lie whole words apart, and every other run.
        u32 own[2][2], orders[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            own[0][i] = shared_address(low) + 2 + 8 * t + i * Q8_0::BYTES, own[1][i] = shared_address(high) + 2 + 8 * t + i * Q8_0::BYTES;
            orders[i] = halves_at(own[0][i]);
        }
        float sums[SETS][2] = {};
#pragma unroll
        for (int r = 0; r < 8; r++) {
            int behind = r / 2 * 2 * Q8_0::BYTES;
            uint2 a = eight_at(own[0][r % 2], orders[r % 2], behind), b = eight_at(own[1][r % 2], orders[r % 2], behind);
            u32 both[4] = {a.x, b.x, a.y, b.y};
            bool inside = r * 32 < cols;
#pragma unroll
            for (int s = 0; s < SETS; s++) {
                int part[4];
                uint2 v = SpanX<SETS>::run(x, s, r);
                product_whole(part, both, v.x, v.y);
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    float factor = inside ? half_at(rows[h] + r * Q8_0::BYTES, 0) : 0.0f;
                    sums[s][h] = fmaf(factor, (float)(part[2 * h + 1] * 256 + part[2 * h]), sums[s][h]);
                }
            }
        }
#pragma unroll
        for (int s = 0; s < SETS; s++) {
            float scale = SpanX<SETS>::scale(x, s);
#pragma unroll
            for (int h = 0; h < 2; h++) c[2 * s + h] = fmaf(sums[s][h], scale, c[2 * s + h]);
        }
    }
};
