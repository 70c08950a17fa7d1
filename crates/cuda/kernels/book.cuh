// Where experts are that the GPU fetches by itself.
//
// Experts of all layers are numbered layer · experts + expert; an expert without a slot has slot -1, a slot without an
// expert has owner -1.

/// A matrix of a layer's experts in pinned memory.
struct Home {
    const u8 *at; // expert 0's
    long stride;  // bytes from one expert to the next
    long bytes;   // of one
};

struct State {
    int token;   // passes that were computed
    int free;    // slots without an expert
    int fetched; // experts that came during this pass
    int arrived; // blocks that have copied their part
    int origin;  // the pass that what experts are worth is counted from
};

struct Book {
    const Home *homes; // [layers, 3]
    u64 *places;       // [layers, 3, experts]: where each matrix is
    int *slot_of;      // [layers · experts]
    float *worth;      // [layers · experts]: how often it was chosen, lately more than long ago
    int *owner;        // [slots]
    int *since;        // [slots]: the pass in which its expert came
    int *free;         // [slots]: the first State::free of them are without an expert
    State *state;
    u64 *sums;         // [2]: experts found in slots, and fetched or read where they lie
    u8 *slots;
    long slot_bytes;
    long parts[3];     // where each matrix begins in a slot
    int layers, experts, count, used; // count: of slots
};

/// Where a matrix goes: as far behind a multiple of 16 as it lies in pinned memory.
DEVICE u8 *room(const Book &p, int slot, int matrix, const u8 *from) {
    return p.slots + slot * p.slot_bytes + p.parts[matrix] + ((u64)from & 15);
}

DEVICE const u8 *home(const Book &p, int layer, int matrix, int expert) {
    Home home = p.homes[layer * 3 + matrix];
    return home.at + expert * home.stride;
}

DEVICE u64 *place(const Book &p, int layer, int matrix, int expert) {
    return p.places + (layer * 3L + matrix) * p.experts + expert;
}
