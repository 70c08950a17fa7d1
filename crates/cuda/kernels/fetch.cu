// Experts that the GPU fetches by itself: all of them lie in pinned memory of the host, some in slots besides. Before a
// layer's experts are computed, those that rows have chosen and that are in no slot take the slots that were used least
// recently. What finds no slot is read where it lies.
//
// Experts of all layers are numbered layer · experts + expert; an expert without a slot has slot -1, a slot without an
// expert has owner -1. Stamps count layers that were computed: a slot of this very layer is never taken.

/// A matrix of a layer's experts in pinned memory.
struct Home {
    const u8 *at; // expert 0's
    long stride;  // bytes from one expert to the next
    long bytes;   // of one
};

struct Book {
    const Home *homes;  // [layers, 3]
    u64 *places;        // [layers, 3, experts]: where each matrix is
    int *slot_of;       // [layers · experts]
    int *owner;         // [slots]
    u32 *stamp;         // [slots]
    u32 *now;           // [1]: the last stamp
    u64 *sums;          // [2]: experts found in slots, and fetched or read where they lie
    u8 *slots;
    long slot_bytes;
    long parts[3];      // where each matrix begins in a slot
    int *list;          // [1 + experts]: how many are to be copied, and which
    const int *counts;  // [experts]: rows that chose each
    int experts, count, layer; // count: of slots
};

/// Where a matrix goes: as far behind a multiple of 16 as it lies in pinned memory.
DEVICE u8 *room(const Book &p, int slot, int matrix, const u8 *from) {
    return p.slots + slot * p.slot_bytes + p.parts[matrix] + ((u64)from & 15);
}

DEVICE const u8 *home(const Book &p, int layer, int matrix, int expert) {
    Home home = p.homes[layer * 3 + matrix];
    return home.at + expert * home.stride;
}

/// Gives slots to the chosen experts that have none. One block of 1024 threads, one for each expert.
KERNEL __launch_bounds__(1024) void fetch_choose(Book p) {
    __shared__ int missed[1024], before[32];
    __shared__ u64 least[32];
    int t = threadIdx.x, lane = t % 32, warp = t / 32;
    u32 now = *p.now + 1;
    int *slot_of = p.slot_of + p.layer * p.experts;
    bool wanted = t < p.experts && p.counts[t] > 0;
    int slot = wanted ? slot_of[t] : -1;
    if (slot >= 0) p.stamp[slot] = now;
    // The missing ones in ascending order.
    u32 lanes = __ballot_sync(~0u, wanted && slot < 0), all = __ballot_sync(~0u, wanted);
    if (lane == 0) before[warp] = __popc(lanes) | __popc(all) << 16;
    __syncthreads();
    int sum = 0, first = 0;
    for (int w = 0; w < 32; w++) {
        if (w == warp) first = sum & 0xffff;
        sum += before[w];
    }
    if (wanted && slot < 0) missed[first + __popc(lanes & ((1u << lane) - 1))] = t;
    int missing = sum & 0xffff, chosen = sum >> 16, copied = 0;
    for (int i = 0; i < missing; i++) {
        __syncthreads();
        u64 own = ~0ull;
        for (int s = t; s < p.count; s += 1024) {
            u32 stamp = p.stamp[s];
            u64 key = (u64)stamp << 32 | (u32)s;
            if (stamp != now && key < own) own = key;
        }
        for (int step = 16; step > 0; step /= 2) {
            u64 other = __shfl_xor_sync(~0u, own, step);
            if (other < own) own = other;
        }
        if (lane == 0) least[warp] = own;
        __syncthreads();
        for (int w = 0; w < 32; w++) {
            if (least[w] < own) own = least[w];
        }
        if (own == ~0ull) break; // every slot holds an expert of this layer
        copied++;
        if (t < 3) {
            // The one who leaves is read at home from now on.
            int victim = (int)(u32)own, gone = p.owner[victim], expert = missed[i];
            if (gone >= 0) {
                int layer = gone / p.experts, other = gone % p.experts;
                p.places[(layer * 3L + t) * p.experts + other] = (u64)home(p, layer, t, other);
            }
            const u8 *from = home(p, p.layer, t, expert);
            p.places[(p.layer * 3L + t) * p.experts + expert] = (u64)room(p, victim, t, from);
            __syncwarp(7);
            if (t == 0) {
                if (gone >= 0) p.slot_of[gone] = -1;
                p.owner[victim] = p.layer * p.experts + expert;
                p.stamp[victim] = now;
                slot_of[expert] = victim;
                p.list[1 + i] = expert;
            }
        }
    }
    if (t == 0) {
        p.list[0] = copied;
        *p.now = now;
        p.sums[0] += chosen - missing;
        p.sums[1] += missing;
    }
}

const int WORDS = 4, PIECE = 256 * WORDS * 16;

/// Copies what `fetch_choose` listed, piece by piece. Blocks of 256 threads.
KERNEL __launch_bounds__(256) void fetch_copy(Book p) {
    long pieces[3], each = 0;
    for (int m = 0; m < 3; m++) {
        // Up to 15 bytes before and behind come along.
        pieces[m] = (p.homes[p.layer * 3 + m].bytes + 30 + PIECE - 1) / PIECE;
        each += pieces[m];
    }
    for (long i = blockIdx.x; i < p.list[0] * each; i += gridDim.x) {
        int expert = p.list[1 + i / each], matrix = 0;
        long piece = i % each;
        while (piece >= pieces[matrix]) piece -= pieces[matrix++];
        const u8 *from = home(p, p.layer, matrix, expert);
        u64 misaligned = (u64)from & 15, end = p.homes[p.layer * 3 + matrix].bytes + misaligned;
        const uint4 *words = (const uint4 *)(from - misaligned);
        uint4 *to = (uint4 *)(room(p, p.slot_of[p.layer * p.experts + expert], matrix, from) - misaligned);
        uint4 held[WORDS];
        long at = piece * (PIECE / 16) + threadIdx.x;
#pragma unroll
        for (int w = 0; w < WORDS; w++) {
            if ((at + w * 256) * 16 < (long)end) held[w] = words[at + w * 256];
        }
#pragma unroll
        for (int w = 0; w < WORDS; w++) {
            if ((at + w * 256) * 16 < (long)end) to[at + w * 256] = held[w];
        }
    }
}
