// The choice of experts, by one warp for a row. Loops are left as loops: code that runs once is as slow as it is long.

/// A number whose order as a whole number is that of `x`; 0 for what is not a number.
DEVICE u32 order_of(float x) {
    u32 bits = __float_as_uint(x);
    return x == x ? bits ^ ((int)bits < 0 ? 0xffffffffu : 0x80000000u) : 0;
}

/// Softmax over all experts, the largest ones by falling weight (ties to the lower number), their weights brought to a
/// sum of 1, and their order by ascending number. `logits`: [experts]; `keys`: as many numbers of shared memory; `ids`,
/// `weights`, `order`: [used], used at most 32.
DEVICE void choose(const float *logits, int experts, int used, u32 *keys, u32 *ids, float *weights, u32 *order) {
    int lane = threadIdx.x % 32;
    u32 best = 0, place = 0;
#pragma unroll 8
    for (int e = lane; e < experts; e += 32) {
        u32 key = order_of(logits[e]);
        keys[e] = key;
        if (key > best) best = key, place = e;
    }
    u32 own = 0;
    float logit = 0.0f, most = 0.0f;
#pragma unroll 1
    for (int i = 0; i < used; i++) {
        u32 key = __reduce_max_sync(~0u, best);
        u32 id = __reduce_min_sync(~0u, best == key && key > 0 ? place : 0xffffffffu);
        float x = __uint_as_float(key ^ ((int)key < 0 ? 0x80000000u : 0xffffffffu));
        // Logits that are not numbers choose nothing: the lowest experts stand in, and the result shows it.
        if (key == 0) id = i, x = __int_as_float(0x7fffffff);
        if (i == 0) most = x;
        if (i == lane) own = id, logit = x;
        if (id == place && key > 0 && best == key) {
            keys[id] = 0, best = 0;
#pragma unroll 16
            for (int e = lane; e < experts; e += 32) {
                u32 other = keys[e];
                if (other > best) best = other, place = e;
            }
        }
    }
    float weight = lane < used ? expf(logit - most) : 0.0f, total = warp_sum(weight);
    int rank = 0;
#pragma unroll 1
    for (int j = 0; j < used; j++) {
        u32 other = __shfl_sync(~0u, own, j);
        rank += other < own || (other == own && j < lane);
    }
    if (lane < used) ids[lane] = own, weights[lane] = weight / total, order[rank] = lane;
}
