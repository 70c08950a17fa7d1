// The choice of experts, by one warp for a row.

/// Softmax over all experts, the largest ones by falling weight (ties to the lower number), their weights brought to a
/// sum of 1, and their order by ascending number. `logits`: [experts], at most 1024; `ids`, `weights`, `order`: [used], in
/// shared or global memory.
template <int EACH>
DEVICE void choose_experts(const float *logits, int experts, int used, u32 *ids, float *weights, u32 *order) {
    int lane = threadIdx.x % 32;
    float score[EACH], largest = -3.0e38f, sum = 0.0f;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        int e = i * 32 + lane;
        score[i] = e < experts ? logits[e] : -3.0e38f;
        largest = fmaxf(largest, score[i]);
    }
    for (int step = 16; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
    // Scores as whole numbers of the same order, 0 for what cannot be chosen: not a number, or chosen already.
    u32 key[EACH], best = 0, place = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        float x = i * 32 + lane < experts ? expf(score[i] - largest) : 0.0f;
        sum += x;
        score[i] = x;
    }
    sum = warp_sum(sum);
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        float x = score[i] / sum;
        key[i] = i * 32 + lane < experts && x >= 0.0f ? __float_as_uint(x) + 1 : 0;
        if (key[i] > best) best = key[i], place = i;
    }
    float total = 0.0f, own = 0.0f;
    u32 own_id = 0;
    for (int i = 0; i < used; i++) {
        u32 most = __reduce_max_sync(~0u, best);
        u32 id = __reduce_min_sync(~0u, best == most && most > 0 ? place * 32 + lane : 0xffffffffu);
        float value = __uint_as_float(most - 1);
        // Logits that are not numbers choose nothing: the lowest experts stand in, and the result shows it.
        if (most == 0) id = i, value = __int_as_float(0x7fffffff);
        if (i == lane) own = value, own_id = id;
        total += value;
        if (id % 32 == lane && most > 0) {
            best = 0;
#pragma unroll
            for (int j = 0; j < EACH; j++) {
                if (j == id / 32) key[j] = 0;
                if (key[j] > best) best = key[j], place = j;
            }
        }
    }
    if (lane < used) ids[lane] = own_id, weights[lane] = own / total;
    int rank = 0;
    for (int j = 0; j < used; j++) {
        u32 other = __shfl_sync(~0u, own_id, j);
        rank += other < own_id || (other == own_id && j < lane);
    }
    if (lane < used) order[rank] = lane;
}

DEVICE void choose(const float *logits, int experts, int used, u32 *ids, float *weights, u32 *order) {
    if (experts <= 512) choose_experts<16>(logits, experts, used, ids, weights, order);
    else choose_experts<32>(logits, experts, used, ids, weights, order);
}
