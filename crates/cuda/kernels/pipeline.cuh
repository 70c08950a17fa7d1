// Barriers between warps that copy and warps that multiply, and what `wgmma` needs around it.

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define WGMMA 1
#else
#define WGMMA 0
#endif

/// A barrier in shared memory that `count` arrivals complete; its phases have alternating parities.
DEVICE void barrier_init(u32 barrier, int count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

DEVICE void barrier_arrive(u32 barrier) {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(barrier) : "memory");
}

/// Arrives when this thread's asynchronous copies so far are done.
DEVICE void barrier_arrive_copied(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

/// Waits for the end of the phase of this parity.
DEVICE void barrier_wait(u32 barrier, u32 parity) {
    u32 done = 0;
    while (!done) {
#if WGMMA
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
#else
        asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
#endif
    }
}

#if __CUDA_ARCH__ >= 900

/// One more arrival, and `bytes` that copies will bring.
DEVICE void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1; }" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

/// Begins to copy whole words of 16 bytes to shared memory, for which a barrier waits (`barrier_expect`). What is copied is read once:
/// it leaves the second cache before anything else, above all before instructions, which weights would drive out layer by layer.
DEVICE void bulk_copy(u32 to, const void *from, int bytes, u32 barrier) {
    u64 once;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier), "l"(once)
                 : "memory");
}

/// The copy engine may use the barriers that this thread made.
DEVICE void barriers_made() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

#else

DEVICE void barriers_made() {}

#endif

#if WGMMA

/// The descriptor of a swizzled tile: rows of 128 bytes, groups of eight rows 1024 bytes apart.
DEVICE u64 descriptor(u32 address) { return (u64)((address & 0x3ffff) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62; }

DEVICE void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

DEVICE void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

/// Waits until at most N committed groups of products are in flight.
template <int N> DEVICE void products_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }

/// c [64, WIDTH] += a [64, 16] · b [WIDTH, 16], both in shared memory; WIDTH: 128 or 256.
template <int WIDTH> DEVICE void multiply_tile(float c[WIDTH / 2], u64 a, u64 b) {
    if constexpr (WIDTH == 256) multiply_256(c, a, b);
    else multiply_128(c, a, b);
}

/// Has these computed before anything that follows, and nothing of what follows before.
template <int N> DEVICE void settle(float (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(x[i])::"memory");
}

template <int N> DEVICE void settle(u32 (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+r"(x[i])::"memory");
}

/// The copy engine and the tensor cores from now on see what this thread wrote to shared memory.
DEVICE void copies_see_stores() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

DEVICE void stores_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

/// Waits until at most N of this thread's committed stores have yet to read shared memory.
template <int N> DEVICE void stores_wait() { asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory"); }

#else

DEVICE void products_begin() {}

DEVICE void products_commit() {}

template <int N> DEVICE void products_wait() {}

#endif
