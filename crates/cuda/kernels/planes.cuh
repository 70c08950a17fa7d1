// Products of sixteen rows of experts' weights with planes of x, by one warp, on the integer tensor cores.
//
// Weights of blocks are whole numbers of a byte times scales (`whole.cuh`). x becomes two whole numbers of a byte too, planes of 2^0
// and 2^8 that hold 15 bits counted from the largest of 256 numbers: for a sum of products that is sixteen times as exact as bf16. So
// sums of products are exact within a run of 32 weights, and are scaled once for each half of it.
//
// A warp multiplies two halves of eight rows, of matrices of any two types, by spans of 256 columns, whose blocks lie in shared
// memory in file form. Lane l decodes the runs l % 4 and l % 4 + 4 of a span of one row of each half. Of a product's eight columns,
// 2 q and 2 q + 1 are the planes of what lanes with l % 4 = q decode, and zeros elsewhere: each lane has the sums of its own runs,
// whose scales it knows. The four lanes of a row add up theirs.
//
// A result depends on its row of x and its row of weights alone. Plain numbers are multiplied in f32, as they lie.

const int PLANE = 264;  // bytes of a plane of a span of x, so that two lie in different banks
const int PLANES = 544; // of two of them, and their scale
const int ZEROS = 256;  // bytes of zeros that shared memory begins with

/// One matrix of all experts of a layer, or of one that is the same for all rows.
struct Experts {
    const u8 *at;        // expert 0's
    long stride;         // bytes from one expert to the next
    const u64 *places;   // of each expert's matrix instead; may be null
    int type, row_bytes; // type: its place in TYPES
    int span, plain;     // bytes of 256 weights; whether they are numbers, which stay where they are
};

DEVICE const u8 *matrix_of(const Experts &e, u32 expert) { return expert_at(e.at, e.stride, e.places, expert); }

/// Stores a span of x as whole numbers, eight of each lane: number = whole · scale.
DEVICE void store_planes(u8 *planes, const float x[8]) {
    u32 most = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) most = max(most, __float_as_uint(x[i]) & 0x7fffffffu);
    most = __reduce_max_sync(~0u, most);
    __syncwarp(); // planes may lie where x was
    // The largest becomes 127 · 256. What is next to nothing becomes that; what is no number stays none.
    bool none = most < 0x0d000000u;
    float largest = __uint_as_float(most), up = none ? 0.0f : __fdividef(32512.0f, largest);
    u32 whole[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        // As the mantissa of a float, then with the zero of both bytes moved to 128.
        whole[i] = __float_as_uint(fmaf(x[i], up, 12582912.0f)) + 0x8080u;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const u32 *v = whole + 4 * i;
        u32 low = permute(v[0], v[1], 0x5140), high = permute(v[2], v[3], 0x5140);
        u32 *to = (u32 *)planes + threadIdx.x % 32 * 2 + i;
        to[0] = permute(low, high, 0x5410) ^ 0x80808080u;
        to[PLANE / 4] = permute(low, high, 0x7632) ^ 0x80808080u;
    }
    if (threadIdx.x % 32 == 0) {
        *(float *)(planes + 2 * PLANE) = most >= 0x7f800000u ? __uint_as_float(0x7fffffffu) : none ? 0.0f : largest * (1.0f / 32512.0f);
    }
}

/// c += a · b: a [16, 32], b [32, 8], of whole numbers of a byte.
///
/// Lane l holds of a rows l / 4 (a0, a2) and l / 4 + 8 (a1, a3), of c these rows (c0, c1; c2, c3), columns 2 (l % 4) and the next.
DEVICE void multiply_whole(int c[4], const u32 a[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// This lane's factors of the eight weights t of its run k: of planes, of which its own begin at `x`.
DEVICE uint2 factors(const u8 *x, int k, int t) { return *(const uint2 *)(x + 128 * k + 8 * t); }

/// sums += this lane's part of low · x and high · x, over the first `runs` runs of a span. `x`: where `factors` finds this lane's,
/// `scale`: of x.
template <class T, class X, class Table>
DEVICE void multiply_span(float sums[2], const u8 *low, const u8 *high, X x, float scale, int runs, Table table) {
    typedef Whole<T> W;
    const int EACH = 4 / W::HALVES;
    int q = threadIdx.x % 4;
    const u8 *rows[2] = {low, high};
    int whole[4] = {}, mins[4] = {};
    auto join = [&](int r) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float factor, min = 0.0f;
            W::factors(rows[h] + r * T::BYTES, factor, min);
            float part = factor * joined(whole[2 * h], whole[2 * h + 1]);
            if (W::MIN) part = fmaf(-min, joined(mins[2 * h], mins[2 * h + 1]), part);
            // Behind the last run of a row there is anything.
            if (T::LEN == 256 || r < runs) sums[h] = fmaf(part, scale, sums[h]);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) whole[i] = 0, mins[i] = 0;
    };
#pragma unroll
    for (int k = 0; k < 2; k++) {
        int r = q + 4 * k;
        typename W::Run run[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            run[h].scales[0] = run[h].scales[1] = run[h].mins[0] = run[h].mins[1] = 1;
            W::open(T::LEN == 32 ? rows[h] + r * T::BYTES : rows[h], r, run[h]);
        }
#pragma unroll
        for (int half = 0; half < W::HALVES; half++) {
            int c[4] = {}, of_ones[4] = {};
#pragma unroll
            for (int t = half * EACH; t < (half + 1) * EACH; t++) {
                uint2 b = factors(x, k, t);
                u32 a[4];
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    u32 out[2];
                    W::eight(run[h], t, table, out);
                    a[h] = out[0], a[h + 2] = out[1];
                }
                multiply_whole(c, a, b.x, b.y);
                const u32 ONES[4] = {0x01010101u, 0x01010101u, 0x01010101u, 0x01010101u};
                if (W::MIN) multiply_whole(of_ones, ONES, b.x, b.y);
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
                whole[i] += c[i] * run[i / 2].scales[half];
                if (W::MIN) mins[i] += of_ones[i] * run[i / 2].mins[half];
            }
        }
        if (T::LEN == 32) join(r);
    }
    if (T::LEN == 256) join(0);
}

/// The same of plain numbers, of all spans.
template <class T> DEVICE void multiply_plain(float sums[2], const u8 *low, const u8 *high, const u8 *planes, int columns) {
#pragma unroll 1
    for (int first = threadIdx.x % 4 * 8; first < columns; first += 32) {
        float a[8], b[8];
        T::decode(low + first / 8 * T::BYTES, 0, a);
        T::decode(high + first / 8 * T::BYTES, 0, b);
        const u8 *span = planes + first / SPAN * PLANES;
        const signed char *x = (const signed char *)span + first % SPAN;
        float scale = *(const float *)(span + 2 * PLANE);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            float number = (float)(x[i] + 256 * x[PLANE + i]) * scale;
            sums[0] = fmaf(a[i], number, sums[0]), sums[1] = fmaf(b[i], number, sums[1]);
        }
    }
}

/// Where this lane's rows of both halves lie: in shared memory, or, plain numbers, behind `plain[0]` and `plain[1]`.
struct Halves {
    u32 low, high;
    const u8 **plain;
};

/// sums += this lane's part of its two rows of type number `type` over `columns` of x. `planes`, `table`: where they lie in `shared`.
DEVICE void multiply_halves(float sums[2], int type, const u8 *shared, const Halves &rows, int planes, int columns, int table) {
    int lane = threadIdx.x % 32, q = lane % 4, column = lane / 4;
    bool is_own = column / 2 == q;
    int x = is_own ? planes + column % 2 * PLANE + 32 * q : 0;
    with_type(type, All(), [&](auto type) {
        typedef decltype(type) T;
        if constexpr (T::LEN == 8) {
            multiply_plain<T>(sums, rows.plain[0] + rows.low, rows.plain[1] + rows.high, shared + planes, columns);
        } else {
            const int BYTES = SPAN / T::LEN * T::BYTES;
#pragma unroll 1
            for (int i = 0; i * SPAN < columns; i++) {
                const u8 *at = shared + x + (is_own ? i * PLANES : 0);
                float scale = *(const float *)(shared + planes + i * PLANES + 2 * PLANE);
                auto multiply = [&](const u8 *table) {
                    multiply_span<T>(sums, shared + rows.low + i * BYTES, shared + rows.high + i * BYTES, at, scale, columns / 32 - 8 * i,
                                     (const u32 *)table);
                };
                // A place that is known saves an addition for every look-up.
                if (Whole<T>::TABLE == 0 || table == ZEROS) multiply(shared + ZEROS);
                else multiply(shared + table);
            }
        }
    });
}

DEVICE void fill_table_of(int type, u32 *table, Threads by) {
    with_type(type, All(), [&](auto type) {
        typedef decltype(type) T;
        if constexpr (T::LEN > 8) Whole<T>::fill_table(table, by);
    });
}

/// Sums over the four lanes of a row, as `row_sum` makes them: those of `low` in even lanes, of `high` in odd ones.
DEVICE float row_sums(float low, float high) {
    bool odd = threadIdx.x % 2;
    float sum = (odd ? high : low) + __shfl_xor_sync(~0u, odd ? low : high, 1);
    return sum + __shfl_xor_sync(~0u, sum, 2);
}

/// The sum over the four lanes of a row.
DEVICE float row_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}
