// What a GPU can do at most: products that read nothing but shared memory or registers, and reads of memory no cache holds.

struct Peak {
    const uint4 *from;
    u32 *out; // never written: nothing may be left out, though
    long count;
    int rounds;
};

/// Some number of about -1 to 1 as bf16: products of zeros take less power, so that the GPU would be faster.
DEVICE u32 some_pair(u32 seed) {
    u32 x = seed * 2654435761u;
    x ^= x >> 15, x *= 2246822519u, x ^= x >> 13;
    return bf16_pair((float)(x & 0xffff) / 32768.0f - 1.0f, (float)(x >> 16) / 32768.0f - 1.0f);
}

/// Reads `count` words of 16 bytes, `rounds` times.
KERNEL void peak_read(Peak p) {
    uint4 sum = make_uint4(0, 0, 0, 0);
    long step = (long)gridDim.x * blockDim.x;
    for (int round = 0; round < p.rounds; round++) {
#pragma unroll 8
        for (long i = (long)blockIdx.x * blockDim.x + threadIdx.x; i < p.count; i += step) {
            uint4 x;
            asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                         : "l"(p.from + i));
            sum.x ^= x.x, sum.y ^= x.y, sum.z ^= x.z, sum.w ^= x.w;
        }
    }
    if ((sum.x ^ sum.y ^ sum.z ^ sum.w) == 0x9e3779b9u) *p.out = sum.x;
}

#if WGMMA

/// Products of [64, 64] with [64, 256] in each of the block's two groups of four warps, `rounds` times.
/// 49 KB of shared memory: two first factors, then the second.
KERNEL void peak_products(Peak p) {
    extern __shared__ __align__(1024) u32 room[];
    for (int i = threadIdx.x; i < 12 << 10; i += blockDim.x) room[i] = some_pair(i + (blockIdx.x << 16));
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    float c[128];
    for (int i = 0; i < 128; i++) c[i] = 0.0f;
    u32 base = (shared_address(room) + 1023) & ~1023u;
    u64 a = descriptor(base + threadIdx.x / 128 * 8192), b = descriptor(base + 16384);
    products_begin();
    for (int round = 0; round < p.rounds; round++) {
#pragma unroll
        for (int part = 0; part < 4; part++) multiply_tile<256>(c, a + 2 * part, b + 2 * part);
        products_commit();
        products_wait<1>();
    }
    products_wait<0>();
    float sum = 0.0f;
    for (int i = 0; i < 128; i++) sum += c[i];
    if (sum == 0.123f) *p.out = 1;
}

#else

/// 128 products of [16, 16] with [16, 8] in registers in each of the block's eight warps, `rounds` times: as many operations as
/// the other kernel of this name does.
KERNEL void peak_products(Peak p) {
    u32 a[4], b[2];
    for (int i = 0; i < 4; i++) a[i] = some_pair(threadIdx.x * 8 + i);
    for (int i = 0; i < 2; i++) b[i] = some_pair(threadIdx.x * 8 + 4 + i);
    float c[8][4];
    for (int i = 0; i < 32; i++) c[i / 4][i % 4] = 0.0f;
    for (int round = 0; round < p.rounds; round++) {
#pragma unroll
        for (int i = 0; i < 128; i++) multiply_bf16(c[i % 8], a, b[0], b[1]);
    }
    float sum = 0.0f;
    for (int i = 0; i < 32; i++) sum += c[i / 4][i % 4];
    if (sum == 0.123f) *p.out = 1;
}

#endif
