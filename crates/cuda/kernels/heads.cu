// The projections of an attention layer of many rows on Hopper, to `dense.cu`'s products: norms and rotation of heads, and the
// store of queries, keys and values, while a tile's sums are in registers.
//
// A tile's 256 columns are a head: q | gate | k | v. Lane l has of 16 rows those l / 4 and l / 4 + 8, of each columns
// 8 j + 2 (l % 4) and the next for j up to 32: both numbers of a pair that is rotated, i and i + 32, and a quarter of the row.

const int HEAD = 256, TURNED = 64; // numbers of a head, and those that are rotated

struct Heads {
    Map queries;            // f16 [m, heads · HEAD], in boxes of 16 rows of 128 bytes
    const float *norms[2];  // [HEAD]: of queries, of keys
    const float *rotations; // [m, TURNED]: cosines, then sines
    u16 *const *const *pages; // of each row: the pages of its sequence, f16
    const u32 *positions;     // of each row
    float eps;
    int heads, kv_heads, layer;
};

struct DenseHeads {
    Dense dense; // out: f32, where queries are left out
    Heads heads;
};

/// Norm and rotation of a lane's two rows of a head.
struct Turn {
    const float *norm, *rotations[2]; // at the lane's first number of eight
    float factors[2];
};

DEVICE Turn turn_of(const Heads &h, const float *norm, const float *c, int row, int rows) {
    int lane = threadIdx.x % 32;
    Turn t;
    t.norm = norm + lane % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        t.rotations[half] = h.rotations + (long)min(row + half * 8 + lane / 4, rows - 1) * TURNED + lane % 4 * 2;
        float squares = 0.0f;
#pragma unroll
        for (int j = 0; j < HEAD / 8; j++) {
            const float *x = c + 4 * j + 2 * half;
            squares += x[0] * x[0] + x[1] * x[1];
        }
        squares += __shfl_xor_sync(~0u, squares, 1);
        squares += __shfl_xor_sync(~0u, squares, 2);
        t.factors[half] = rsqrtf(squares * (1.0f / HEAD) + h.eps);
    }
    return t;
}

/// The lane's numbers j of a row, normed.
DEVICE float2 normed(const Turn &t, const float *c, int j, int half) {
    float2 w = *(const float2 *)(t.norm + 8 * j);
    return make_float2(c[4 * j + 2 * half] * (t.factors[half] * w.x), c[4 * j + 2 * half + 1] * (t.factors[half] * w.y));
}

/// The same, rotated. j is known when this is compiled.
DEVICE float2 turned(const Turn &t, const float *c, int j, int half) {
    const int PAIR = TURNED / 16; // eighths from a number to the one it is rotated with
    float2 x = normed(t, c, j, half);
    if (j >= 2 * PAIR) return x;
    bool first = j < PAIR;
    float2 y = normed(t, c, first ? j + PAIR : j - PAIR, half);
    const float *at = t.rotations[half] + 8 * (first ? j : j - PAIR);
    float2 cosine = *(const float2 *)at, sine = *(const float2 *)(at + TURNED / 2);
    if (first) sine.x = -sine.x, sine.y = -sine.y;
    return make_float2(x.x * cosine.x + y.x * sine.x, x.y * cosine.y + y.y * sine.y);
}

/// Stores a head of keys (side 0) or values (1) where the rows' positions are in their pages.
template <class F> DEVICE void put_positions(const Heads &h, int side, int head, int row, int rows, const F &of) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int r = row + half * 8 + lane / 4;
        if (r >= rows) continue;
        u32 position = h.positions[r];
        u16 *page = h.pages[r][position / PAGE], *to = head_in_page(page, h.layer, side, h.kv_heads, head, HEAD);
        to += position % PAGE * HEAD + lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < HEAD / 8; j++) {
            float2 x = of(j, half);
            *(u32 *)(to + 8 * j) = f16(x.x) | (u32)f16(x.y) << 16;
        }
    }
}

template <class K> DEVICE void dense_heads(const DenseHeads &p) {
    static_assert(K::COLUMNS == HEAD, "a head is a tile's columns");
    const Heads &h = p.heads;
    int rows = p.dense.m, end = p.dense.n;
    dense<K>(p.dense, [&](const float *c, int row, int n, u32 &buffer) {
        int head = n / HEAD, key = head - 2 * h.heads, value = key - h.kv_heads;
        auto as_is = [&](int j, int half) { return make_float2(c[4 * j + 2 * half], c[4 * j + 2 * half + 1]); };
        if (head < h.heads) {
            Turn t = turn_of(h, h.norms[0], c, row, rows);
            put_pairs<HEAD / 8>(h.queries, row, n, end, buffer, [&](int j, int half) {
                float2 x = turned(t, c, j, half);
                return f16_pair(x.x, x.y);
            });
        } else if (key >= 0 && value < 0) {
            Turn t = turn_of(h, h.norms[1], c, row, rows);
            auto of = [&](int j, int half) { return turned(t, c, j, half); };
            put_positions(h, 0, key, row, rows, of);
            put_floats<false, HEAD / 8>(p.dense.out, row, n, end, buffer, of);
        } else {
            if (value >= 0) put_positions(h, 1, value, row, rows, as_is);
            put_floats<false, HEAD / 8>(p.dense.out, row, n, end, buffer, as_is);
        }
    });
}

THREADS(288) dense_heads_128x256(__grid_constant__ const DenseHeads p) { dense_heads<Large<STORE>>(p); }
THREADS(160) dense_heads_64x256(__grid_constant__ const DenseHeads p) { dense_heads<Kind<STORE, 1, 256>>(p); }
