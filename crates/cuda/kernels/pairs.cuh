// What the products of pairs of expert and row share (`experts.cu`, `rest.cu`): tiles, parameters, turns, outputs.

const int STEP = 128;
const int SPAN = 256; // weights
const int SPAN_BYTES = SPAN / TYPE::LEN * TYPE::BYTES;
const int WINDOW = (SPAN_BYTES + 30 - (TYPE::BYTES % 2 == 0)) / 16 * 16 | 16; // bytes of a row: an odd number of 16-byte words around a span

struct Tile {
    int first; // of the sorted pairs
    int rows;  // at most TOKENS
    int matrix, expert;
};

struct Pairs {
    const u16 *x;         // shuffled rows of k numbers: GATED: of the pass; else: of the sorted pairs
    u16 *out;             // GATED: [pairs, n], sorted and shuffled; else [pairs, n]
    const float *weights; // of each pair
    const u32 *pairs;     // sorted
    const Tile *tiles;
    const int *count;     // of tiles
    const u8 *blocks[2];  // gate and up (or down) of expert 0, bytes to the next expert's, or where each one's are
    long strides[2];
    const u64 *places[2];
    int n, k, used;
};

/// Has all of these computed before anything that follows: products must not find them unfinished.
DEVICE void settle(u32 a[16]) {
    asm volatile(""
                 : "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3]), "+r"(a[4]), "+r"(a[5]), "+r"(a[6]), "+r"(a[7]),
                   "+r"(a[8]), "+r"(a[9]), "+r"(a[10]), "+r"(a[11]), "+r"(a[12]), "+r"(a[13]), "+r"(a[14]), "+r"(a[15])
                 :
                 : "memory");
}

/// Gives registers of the producers to the consumers, who hold the sums.
template <class S> DEVICE void more_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(S::MORE)); }

template <class S> DEVICE void less_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(S::LESS)); }

/// Pairs of a tile that are multiplied, with what fills it up.
DEVICE int multiplied(int rows) { return (rows + 15) / 16 * 16; }

/// One lane of a warp tells, for all of it.
DEVICE void warp_arrives(u32 barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
}

template <int N> struct Width {
    static const int VALUE = N;
};

/// Calls `f` with the width of `wide` pairs, a multiple of 16 up to N. The widest are found first: they are what takes time.
template <int N, class F> DEVICE void of_width(int wide, const F &f) {
    if constexpr (N > 16) {
        if (wide <= N - 16) return of_width<N - 16>(wide, f);
    }
    f(Width<N>());
}

/// Bytes of a row of weights.
DEVICE u32 row_bytes(const Pairs &p) { return p.k / TYPE::LEN * TYPE::BYTES; }

/// Pairs of a tile and their weights: lane l has number l, and those 32 behind, and so on.
template <int TOKENS> DEVICE void look_up_pairs(const Pairs &p, const Tile &tile, u32 pairs[(TOKENS + 31) / 32], float weights[(TOKENS + 31) / 32]) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < (TOKENS + 31) / 32; i++) pairs[i] = __ldg(p.pairs + tile.first + min(i * 32 + lane, tile.rows - 1));
#pragma unroll
    for (int i = 0; i < (TOKENS + 31) / 32; i++) weights[i] = __ldg(p.weights + pairs[i]);
}

/// Weighted outputs of pairs that have been looked up.
template <int TOKENS>
DEVICE void store_pairs(const Pairs &p, const Tile &tile, int n, const float c[TOKENS / 2], const u32 *pairs, const float *weights) {
    int lane = threadIdx.x % 32;
    n += lane / 4 * 2;
#pragma unroll
    for (int j = 0; j < TOKENS / 8; j++) {
        if (8 * j >= tile.rows) break;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int from = j % 4 * 8 + lane % 4 * 2 + i;
            u32 pair = __shfl_sync(~0u, pairs[j / 4], from);
            float weight = __shfl_sync(~0u, weights[j / 4], from);
            u32 both = bf16_pair(c[4 * j + i] * weight, c[4 * j + 2 + i] * weight);
            if (j / 4 * 32 + from < tile.rows && n < p.n) *(u32 *)(p.out + (long)pair * p.n + n) = both;
        }
    }
}
