// What all kernels share. NVRTC brings no headers for half precision, so conversions are written out.
//
// bf16 and f16 numbers are `u16`; pairs of them `u32`, the first in the low half.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE static __device__ __forceinline__
#define KERNEL extern "C" __global__

/// The matrix of an expert: where a table says, or in the order of the file behind expert 0's.
DEVICE const u8 *expert_at(const u8 *first, long stride, const u64 *places, u32 expert) {
    return places ? (const u8 *)places[expert] : first + expert * stride;
}

/// Positions of a page of keys and values: [attention layer][key, value][kv head][PAGE][dim].
const int PAGE = 256;

/// The numbers of one head in a page, keys (side 0) or values (1): [PAGE][dim].
template <class T> DEVICE T *head_in_page(T *page, int layer, int side, int kv_heads, int head, int dim) {
    return page + ((long)(layer * 2 + side) * kv_heads + head) * PAGE * dim;
}

/// The next kernel may begin as far as it does not depend on this one.
DEVICE void next() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// Everything before this kernel is done.
DEVICE void previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Has bytes brought to the second cache, where there is an instruction for that; both numbers multiples of 16.
DEVICE void prefetch_bulk(const void *from, u32 bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
#endif
}

/// Two floats to a pair of bf16, to nearest even.
DEVICE u32 bf16_pair(float low, float high) {
    u32 out;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    return out;
}

DEVICE u16 bf16(float x) { return (u16)bf16_pair(x, 0.0f); }

DEVICE float bf16_value(u16 bits) { return __uint_as_float((u32)bits << 16); }

/// Two floats to a pair of f16, to nearest even; what is too large becomes the largest finite number.
DEVICE u32 f16_pair(float low, float high) {
    low = fminf(fmaxf(low, -65504.0f), 65504.0f);
    high = fminf(fmaxf(high, -65504.0f), 65504.0f);
    u32 out;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    return out;
}

/// The same of numbers that are not too large.
DEVICE u32 half_pair(float low, float high) {
    u32 out;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    return out;
}

/// A float to f16 as the host rounds it: what is too large becomes infinite.
DEVICE u16 f16(float x) {
    u16 out;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out) : "f"(x));
    return out;
}

DEVICE float f16_value(u16 bits) {
    float out;
    asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(bits));
    return out;
}

/// Right but for 2^-20 or so, in few instructions.
DEVICE float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

DEVICE float silu(float x) { return x * sigmoid(x); }

/// log(1 + exp(x)); from 20 on x itself, as the models were trained.
DEVICE float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

/// The sum over a warp, in every lane, always in the same order.
DEVICE float warp_sum(float x) {
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

DEVICE u32 shared_address(const void *pointer) { return (u32)__cvta_generic_to_shared(pointer); }

/// Copies 16 bytes from global to shared memory, asynchronously; zeros instead if not `valid`.
DEVICE void copy_16(u32 to, const void *from, bool valid) {
    int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

DEVICE void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/// Waits until at most N of this thread's committed groups are in flight.
template <int N> DEVICE void copies_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

/// Waits for all of this thread's copies.
DEVICE void copies_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

/// Four 8×8 matrices of 16-bit numbers from shared memory; lane l names row l % 8 of matrix l / 8.
DEVICE void load_matrices(u32 out[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(address)
                 : "memory");
}

/// As `load_matrices`, each matrix transposed.
DEVICE void load_transposed(u32 out[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(address)
                 : "memory");
}

/// c += a · b: a [16, 16] row-major, b [16, 8] column-major, c [16, 8]; bf16, sums in f32.
///
/// Lane l holds of c rows l / 4 (c0, c1) and l / 4 + 8 (c2, c3), columns 2 (l % 4) and the next.
DEVICE void multiply_bf16(float c[4], const u32 a[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// As `multiply_bf16`, of f16.
DEVICE void multiply_f16(float c[4], const u32 a[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
