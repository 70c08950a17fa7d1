// What of a row's choice is in no slot: experts' kernels read it from pinned memory of the host and leave it in an empty slot on their
// way, for the next time. Which slot is for which expert all blocks see by themselves, from books that the last of them changes.

struct Keep {
    Book book; // without slots nothing is kept
    int layer;
};

/// What a block knows of that.
struct Kept {
    int slots[32], count; // by rank: the slot that is filled with an expert, or −1; how many are
    u64 known;            // a barrier, passed when they are known
};

/// Whether an expert's matrix lies in pinned memory.
DEVICE bool is_far(const Keep &p, const u8 *matrix) {
    return p.book.slots && (u64)(matrix - p.book.slots) >= (u64)(p.book.count * p.book.slot_bytes);
}

DEVICE u8 *room_of(const Keep &p, int slot, int matrix, u32 expert) { return room(p.book, slot, matrix, home(p.book, p.layer, matrix, expert)); }

/// Keeps rows that lie in shared memory, in whole words around them, by `by.threads` threads of which this warp's begin at `by.thread`.
DEVICE void keep_rows(u8 *to, const u8 *from, int bytes, Threads by) {
    int odd = (int)(u64)to & 15;
    for (int i = 16 * (by.thread + threadIdx.x % 32); i < odd + bytes; i += 16 * by.threads) {
        *(uint4 *)(to - odd + i) = *(const uint4 *)(from - odd + i);
    }
}

/// The slot that the expert of a rank is left in, or −1.
DEVICE int slot_for(const Kept &kept, int rank) {
    barrier_wait(shared_address(&kept.known), 0);
    return kept.slots[rank];
}

/// Finds slots for what is in none, by a warp. `chosen`: by rank, a row's experts of this wave, or ~0.
DEVICE void find_missing(const Keep &p, const u32 *chosen, Kept &kept) {
    const Book &book = p.book;
    int lane = threadIdx.x % 32, slot = -1;
    u32 id = lane < book.used ? chosen[lane] : ~0u;
    bool is_missing = id != ~0u && book.slot_of[p.layer * book.experts + id] < 0;
    if (__any_sync(~0u, is_missing)) {
        // Where logits are no numbers the same expert may stand twice.
        u32 alike = __match_any_sync(~0u, id);
        is_missing = is_missing && __ffs(alike) - 1 == lane;
        u32 all = __ballot_sync(~0u, is_missing);
        int free = book.state->free, rank = __popc(all & ((1u << lane) - 1));
        if (is_missing && rank < free) slot = book.free[free - 1 - rank];
    }
    kept.slots[lane] = slot;
    int count = __popc(__ballot_sync(~0u, slot >= 0));
    if (lane == 0) kept.count = count;
    __syncwarp();
    if (lane == 0) barrier_arrive(shared_address(&kept.known));
}

/// Changes the books when no block reads them any more: the last one that comes here. Behind a barrier of all warps, which read them too.
DEVICE void note_kept(const Keep &p, const u32 *chosen, const Kept &kept) {
    const Book &book = p.book;
    if (threadIdx.x >= 32 || kept.count == 0) return;
    int lane = threadIdx.x, slot = kept.slots[lane], before = 0;
    if (lane == 0) before = atomicAdd(&book.state->arrived, 1);
    if (__shfl_sync(~0u, before, 0) < (int)gridDim.x - 1) return;
    if (lane == 0) book.state->arrived = 0, book.state->free -= kept.count, book.state->fetched += kept.count;
    if (slot < 0) return;
    int expert = chosen[lane];
    book.slot_of[p.layer * book.experts + expert] = slot;
    book.owner[slot] = p.layer * book.experts + expert;
    book.since[slot] = book.state->token;
    for (int m = 0; m < 3; m++) *place(book, p.layer, m, expert) = (u64)room_of(p, slot, m, expert);
}
