// Copies of neighbouring rows of a matrix to shared memory, by a warp: by the copy engine where there is one.

const int LINE = 128; // bytes of a line of memory

/// Neighbouring rows as they lie in a file, in whole words of 16 bytes; none of plain numbers, which stay where they are.
struct Lines {
    const u8 *from;
    int odd, bytes;

    DEVICE Lines of(const Experts &e, const u8 *matrix, int first, int count) { return at(e, matrix + (long)first * e.row_bytes, count); }

    DEVICE Lines at(const Experts &e, const u8 *from, int count) {
        Lines lines;
        lines.odd = (int)(u64)from & 15;
        lines.from = from - lines.odd, lines.bytes = e.plain || count == 0 ? 0 : (lines.odd + count * e.row_bytes + 15) & ~15;
        return lines;
    }
};

/// Whole lines of memory: what lies in those of shared memory as in those it comes from comes over the link twice as fast.
DEVICE void widen(Lines &lines) {
    int before = (int)(u64)lines.from & LINE - 1;
    lines.from -= before, lines.odd += before, lines.bytes = lines.bytes ? (lines.bytes + before + LINE - 1) & -LINE : 0;
}

/// How often a barrier is arrived at for a copy.
DEVICE int arrivals() {
#if __CUDA_ARCH__ >= 900
    return 1;
#else
    return 33;
#endif
}

#if __CUDA_ARCH__ >= 900
/// Begins to copy up to two blocks of lines, by a thread; a barrier waits for them, and for what it wrote before.
DEVICE void begin_copies_alone(u32 barrier, u32 to, const Lines &a, u32 second_to, const Lines &b) {
    barrier_expect(barrier, a.bytes + b.bytes);
    if (a.bytes) bulk_copy(to, a.from, a.bytes, barrier);
    if (b.bytes) bulk_copy(second_to, b.from, b.bytes, barrier);
}
#endif

/// Begins to copy up to two blocks of lines, by a warp; a barrier waits for them, and for what its first lane wrote before.
DEVICE void begin_copies(u32 barrier, u32 to, const Lines &a, u32 second_to, const Lines &b) {
    int lane = threadIdx.x % 32;
#if __CUDA_ARCH__ >= 900
    if (lane == 0) begin_copies_alone(barrier, to, a, second_to, b);
#else
    for (int i = 16 * lane; i < a.bytes; i += 32 * 16) copy_16(to + i, a.from + i, true);
    for (int i = 16 * lane; i < b.bytes; i += 32 * 16) copy_16(second_to + i, b.from + i, true);
    barrier_arrive_copied(barrier);
    if (lane == 0) barrier_arrive(barrier);
#endif
}
