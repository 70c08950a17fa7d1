// Experts that the GPU fetches by itself: all of them lie in pinned memory of the host, some in slots besides. A layer's experts
// are computed from wherever a table says they are: in a slot, or, over the link, where they lie.
//
// For a single row, experts' kernels fetch what is missing by themselves (`keep.cuh`). For several, what a layer has chosen and
// what is in no slot is copied to an empty one before its experts are computed (`fetch_missing`). While they and the next layer's
// mixer are, that layer's router is asked what it would choose of the residual stream as it is (`fetch_look`), and what of that is
// missing is copied too, beside the kernels of the token (`fetch_missing` again).
//
// An expert leaves its slot behind the last layer of a pass only (`fetch_settle`), when nobody reads it: so many slots are empty
// then as the next pass will probably fill.

const int COPIED = 32; // experts that are copied by one launch, at most

/// As `pick`, of at most 32 · KEYS experts.
template <int KEYS> DEVICE int pick_of(const float *logits, int experts, int used) {
    int lane = threadIdx.x % 32, picked = 0;
    u32 own[KEYS], best = 0;
#pragma unroll
    for (int i = 0; i < KEYS; i++) {
        own[i] = lane + 32 * i < experts ? order_of(logits[lane + 32 * i]) : 0;
        best = max(best, own[i]);
    }
#pragma unroll 1
    for (int rank = 0; rank < used; rank++) {
        u32 most = __reduce_max_sync(~0u, best);
        bool first = __ffs(__ballot_sync(~0u, best == most)) - 1 == lane;
        int place = 0;
        best = 0;
#pragma unroll
        for (int i = 0; i < KEYS; i++) {
            bool is = first && own[i] == most;
            place = is ? i : place;
            own[i] = is ? 0 : own[i];
            best = max(best, own[i]);
        }
        int expert = __reduce_max_sync(~0u, first ? lane + 32 * place : 0);
        if (lane == rank) picked = min(expert, experts - 1);
    }
    return picked;
}

/// The `used` largest logits of a row by falling size, by a warp: lane l gets the expert of rank l. What is no number, and equal
/// ones of a lane, may give others than are computed.
DEVICE int pick(const float *logits, int experts, int used) {
    return experts <= 512 ? pick_of<16>(logits, experts, used) : pick_of<32>(logits, experts, used);
}

struct Look {
    const float *router; // [experts, cols]
    const float *norm;   // [cols]
    const float *hidden; // [rows, cols]
    float *logits;       // [rows, experts]
    int rows, cols, experts;
};

// Blocks beside those that compute are small, so that they find room wherever those leave some.
const int THREADS = 64, WARPS = THREADS / 32;

/// Logits of a layer's router, but for a factor that is the same for all of a row. Any grid of THREADS threads; a warp takes an
/// expert at a time.
KERNEL __launch_bounds__(THREADS) void fetch_look(Look p) {
    int lane = threadIdx.x % 32;
    for (int e = blockIdx.x * WARPS + threadIdx.x / 32; e < p.experts; e += gridDim.x * WARPS) {
        const float4 *weights = (const float4 *)(p.router + (long)e * p.cols), *norm = (const float4 *)p.norm;
        for (int r = 0; r < p.rows; r++) {
            const float4 *x = (const float4 *)(p.hidden + (long)r * p.cols);
            float sum = 0.0f;
#pragma unroll 8
            for (int i = lane; i < p.cols / 4; i += 32) {
                float4 a = weights[i], b = norm[i], c = x[i];
                sum += a.x * b.x * c.x + a.y * b.y * c.y + a.z * b.z * c.z + a.w * b.w * c.w;
            }
            sum = warp_sum(sum);
            if (lane == 0) p.logits[r * p.experts + e] = sum;
        }
    }
}

const int WORDS = 4, PIECE = THREADS * WORDS * 16; // bytes that a block copies at a time

struct Missing {
    Book book;
    const float *logits; // [rows, …] of `stride` numbers: what a layer's router said, or would say
    long stride;
    int rows, layer, most;
};

/// Copies a block's share of an expert to a slot.
DEVICE void copy_share(const Book &p, int layer, int expert, int slot) {
    int first = blockIdx.x;
    for (int matrix = 0; matrix < 3; matrix++) {
        const u8 *from = home(p, layer, matrix, expert);
        // Up to 15 bytes before and behind come along.
        u64 misaligned = (u64)from & 15;
        long words = (long)(p.homes[layer * 3 + matrix].bytes + misaligned + 15) / 16;
        int pieces = (int)((words * 16 + PIECE - 1) / PIECE);
        const uint4 *source = (const uint4 *)(from - misaligned);
        uint4 *to = (uint4 *)(room(p, slot, matrix, from) - misaligned);
        for (; first < pieces; first += gridDim.x) {
            uint4 held[WORDS];
            long at = (long)first * (PIECE / 16) + threadIdx.x;
#pragma unroll
            for (int w = 0; w < WORDS; w++) {
                if (at + w * THREADS < words) held[w] = source[at + w * THREADS];
            }
#pragma unroll
            for (int w = 0; w < WORDS; w++) {
                if (at + w * THREADS < words) to[at + w * THREADS] = held[w];
            }
        }
        first -= pieces;
    }
}

/// Lists which experts that rows choose are to be copied, most likely ones first. Returns how many.
DEVICE int list_missing(const Missing &p, const int *ids, int *missing, int *list) {
    const Book &book = p.book;
    const int *slot_of = book.slot_of + p.layer * book.experts;
    int items = p.rows * book.used;
    for (int i = threadIdx.x; i < items; i += THREADS) {
        int expert = ids[i % p.rows * 32 + i / p.rows];
        missing[i] = slot_of[expert] < 0 ? expert : -1;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        int count = 0, most = min(min(p.most, COPIED), book.state->free);
        for (int i = 0; i < items && count < most; i++) {
            bool is_new = missing[i] >= 0;
            for (int j = 0; is_new && j < count; j++) is_new = list[j] != missing[i];
            if (is_new) list[count++] = missing[i];
        }
        list[COPIED] = count;
    }
    __syncthreads();
    return list[COPIED];
}

/// Copies what rows choose of a layer and what is in no slot to empty ones, as many as there are and at most `most`. Any grid of
/// THREADS threads. Shared memory: 32 numbers and one for each choice of each row.
KERNEL __launch_bounds__(THREADS, 16) void fetch_missing(Missing p) {
    extern __shared__ int ids[];
    __shared__ int list[COPIED + 1];
    const Book &book = p.book;
    int *missing = ids + p.rows * 32;
    next();
    previous();
    for (int r = threadIdx.x / 32; r < p.rows; r += WARPS) {
        ids[r * 32 + threadIdx.x % 32] = pick(p.logits + r * p.stride, book.experts, book.used);
    }
    __syncthreads();
    int free = book.state->free, count = list_missing(p, ids, missing, list);
    if (count == 0) return;
    for (int i = 0; i < count; i++) copy_share(book, p.layer, list[i], book.free[free - 1 - i]);
    // Every block has read what changes now when the last one comes here.
    __syncthreads();
    if (threadIdx.x > 0 || atomicAdd(&book.state->arrived, 1) < (int)gridDim.x - 1) return;
    book.state->arrived = 0;
    book.state->free = free - count;
    book.state->fetched += count;
    for (int i = 0; i < count; i++) {
        int expert = list[i], slot = book.free[free - 1 - i];
        book.slot_of[p.layer * book.experts + expert] = slot;
        book.owner[slot] = p.layer * book.experts + expert;
        book.since[slot] = book.state->token;
        for (int m = 0; m < 3; m++) *place(book, p.layer, m, expert) = (u64)room(book, slot, m, home(book, p.layer, m, expert));
    }
}

struct Settle {
    Book book;
    const float *logits; // of the routers: [layers, …] of [rows, …]
    long layer_stride, row_stride;
    int rows;
    int spare;           // slots that are to be empty beside what was fetched
};

/// log₂ of the factor that a choice is worth less after each pass: half of it after two hundred.
const float AGING = 0.005f;

/// Passes behind which what experts are worth is counted from another one, so that it never becomes too large for its digits.
const int AGE = 12800;

/// Notes what was chosen, a warp for each layer: how much experts are worth, which were found. By all threads of a block.
DEVICE void note_choices(const Settle &p, int now) {
    const Book &book = p.book;
    int lane = threadIdx.x % 32, found = 0, missed = 0, age = now - book.state->origin;
    __syncthreads();
    if (age >= AGE) {
        for (int i = threadIdx.x; i < book.layers * book.experts; i += blockDim.x) book.worth[i] -= age * AGING;
        if (threadIdx.x == 0) book.state->origin = now;
        age = 0;
        __syncthreads();
    }
    // A sum of powers of two, by its logarithm as it will be when those of this pass are one.
    float base = age * AGING;
    for (int layer = threadIdx.x / 32; layer < book.layers; layer += blockDim.x / 32) {
        for (int r = 0; r < p.rows; r++) {
            int expert = pick(p.logits + layer * p.layer_stride + r * p.row_stride, book.experts, book.used);
            int number = layer * book.experts + expert, slot = book.slot_of[number];
            if (lane < book.used) {
                float worth = log2f(exp2f(book.worth[number] - base) + 1.0f) + base;
                book.worth[number] = worth;
                bool before = slot >= 0 && book.since[slot] < now;
                found += before, missed += !before;
            }
            __syncwarp();
        }
    }
    found = __reduce_add_sync(~0u, found), missed = __reduce_add_sync(~0u, missed);
    if (lane == 0) {
        atomicAdd(book.sums, (u64)found);
        atomicAdd(book.sums + 1, (u64)missed);
    }
}

const int BUCKETS = 2048;

DEVICE u32 key_of(const Book &p, int slot) { return p.owner[slot] < 0 ? 0xffffffffu : order_of(p.worth[p.owner[slot]]); }

/// The `need`-th least key of all slots, and in `need` how many of those that have this very key belong to the `need` least.
/// `counts`: [BUCKETS + 2] numbers of shared memory.
DEVICE u32 least_keys(const Book &p, int &need, int *counts) {
    u32 prefix = 0;
    int lane = threadIdx.x % 32;
    for (int shift = 21, bits = 11; bits > 0; bits = shift < 11 ? shift : 11, shift -= bits) {
        for (int i = threadIdx.x; i < BUCKETS; i += blockDim.x) counts[i] = 0;
        __syncthreads();
        for (int s = threadIdx.x; s < p.count; s += blockDim.x) {
            u32 key = key_of(p, s);
            if (shift + bits == 32 || key >> (shift + bits) == prefix) atomicAdd(&counts[key >> shift & ((1u << bits) - 1)], 1);
        }
        __syncthreads();
        if (threadIdx.x < 32) {
            const int EACH = BUCKETS / 32;
            int own = 0, sum;
            for (int i = 0; i < EACH; i++) own += counts[lane * EACH + i];
            sum = own;
            for (int step = 1; step < 32; step *= 2) {
                int other = __shfl_up_sync(~0u, sum, step);
                if (lane >= step) sum += other;
            }
            if (sum >= need && sum - own < need) {
                int before = sum - own, i = lane * EACH;
                while (before + counts[i] < need) before += counts[i++];
                counts[BUCKETS] = i, counts[BUCKETS + 1] = need - before;
            }
        }
        __syncthreads();
        prefix = prefix << bits | (u32)counts[BUCKETS];
        need = counts[BUCKETS + 1];
        __syncthreads();
    }
    return prefix;
}

/// Behind the last layer of a pass, when nobody reads a slot: notes what was chosen, and empties slots. One block of 1024 threads.
KERNEL __launch_bounds__(1024) void fetch_settle(Settle p) {
    __shared__ int counts[BUCKETS + 2], ties, end;
    const Book &book = p.book;
    int now = book.state->token, free = book.state->free;
    note_choices(p, now);
    int goal = min(2 * book.state->fetched + p.spare, min(max(book.count / 4, 1), book.count)), need = goal - free;
    if (threadIdx.x == 0) ties = 0, end = free;
    __syncthreads();
    if (need > 0) {
        u32 least = least_keys(book, need, counts);
        for (int s = threadIdx.x; s < book.count; s += blockDim.x) {
            u32 key = key_of(book, s);
            if (key > least || (key == least && atomicAdd(&ties, 1) >= need)) continue;
            int gone = book.owner[s], layer = gone / book.experts, expert = gone % book.experts;
            for (int m = 0; m < 3; m++) *place(book, layer, m, expert) = (u64)home(book, layer, m, expert);
            book.slot_of[gone] = -1;
            book.owner[s] = -1;
            book.free[atomicAdd(&end, 1)] = s;
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) book.state->token = now + 1, book.state->free = end, book.state->fetched = 0;
}
