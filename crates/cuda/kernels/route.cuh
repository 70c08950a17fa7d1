// The choice of experts, by one warp for a row. Loops are left as loops: code that runs once is as slow as it is long.

/// A number whose order as a whole number is that of `x`; 0 for what is not a number.
DEVICE u32 order_of(float x) {
    u32 bits = __float_as_uint(x);
    return x == x ? bits ^ ((int)bits < 0 ? 0xffffffffu : 0x80000000u) : 0;
}

/// How many of 32 lanes hold a larger key, or the same one and a lower number.
DEVICE int rank_of(u32 key) {
    int lane = threadIdx.x % 32, rank = 0;
#pragma unroll 8
    for (int i = 0; i < 32; i++) {
        u32 other = __shfl_sync(~0u, key, i);
        rank += other > key || (other == key && i < lane);
    }
    return rank;
}

const int KEYS_OF_LANE = 16;

/// Chooses where every lane's keys fit its registers: lane l holds those of the experts l, l + 32, … Returns false where keys are
/// no numbers, or too many equal ones. Stores `ids`, logits, `order`; `list`: 32 numbers, or one for each expert if there are fewer.
DEVICE bool choose_listed(const float *logits, const u32 own[KEYS_OF_LANE], u32 best, int used, u32 *list, u32 *ids, float *values, u32 *order) {
    int lane = threadIdx.x % 32, count = 0;
    // At least `used` keys are no less than the `used`-th of what lanes hold most.
    u32 bound = __shfl_sync(~0u, best, __ffs(__ballot_sync(~0u, rank_of(best) == used - 1)) - 1), before = (1u << lane) - 1;
    if (bound == 0) return false;
#pragma unroll
    for (int i = 0; i < KEYS_OF_LANE; i++) {
        bool listed = own[i] >= bound;
        u32 mask = __ballot_sync(~0u, listed);
        int at = count + __popc(mask & before);
        if (listed && at < 32) list[at] = lane + 32 * i;
        count += __popc(mask);
    }
    __syncwarp(); // behind which the list may also be written over
    if (count > 32) return false;
    // The list ascends by number, so that lanes break ties.
    u32 id = lane < count ? list[lane] : 0;
    float logit = lane < count ? logits[id] : 0.0f;
    int rank = rank_of(lane < count ? order_of(logit) : 0);
    u32 chosen = __ballot_sync(~0u, rank < used);
    if (rank < used) ids[rank] = id, values[rank] = logit, order[__popc(chosen & before)] = rank;
    __syncwarp();
    return true;
}

/// The same of any keys, by looking for the largest again and again. `keys`: [experts].
DEVICE void choose_slowly(const float *logits, int experts, int used, u32 *keys, u32 *ids, float *values, u32 *order) {
    int lane = threadIdx.x % 32;
    u32 best = 0, place = 0, own = 0;
    for (int e = lane; e < experts; e += 32) {
        u32 key = order_of(logits[e]);
        keys[e] = key;
        if (key > best) best = key, place = e;
    }
    float logit = 0.0f;
#pragma unroll 1
    for (int i = 0; i < used; i++) {
        u32 key = __reduce_max_sync(~0u, best);
        u32 id = __reduce_min_sync(~0u, best == key && key > 0 ? place : 0xffffffffu);
        float x = __uint_as_float(key ^ ((int)key < 0 ? 0x80000000u : 0xffffffffu));
        // Logits that are not numbers choose nothing: the lowest experts stand in, and the result shows it.
        if (key == 0) id = i, x = __int_as_float(0x7fffffff);
        if (i == lane) own = id, logit = x;
        if (id == place && key > 0 && best == key) {
            keys[id] = 0, best = 0;
            for (int e = lane; e < experts; e += 32) {
                u32 other = keys[e];
                if (other > best) best = other, place = e;
            }
        }
    }
    int rank = 0;
#pragma unroll 1
    for (int j = 0; j < used; j++) {
        u32 other = __shfl_sync(~0u, own, j);
        rank += other < own || (other == own && j < lane);
    }
    if (lane < used) ids[lane] = own, values[lane] = logit, order[rank] = lane;
    __syncwarp();
}

/// Logits by falling size to weights with a sum of 1, by a warp.
DEVICE void softmax_of_chosen(float *weights, int used) {
    int lane = threadIdx.x % 32;
    float logit = weights[lane < used ? lane : 0], most = __shfl_sync(~0u, logit, 0);
    float weight = lane < used ? expf(logit - most) : 0.0f, total = warp_sum(weight);
    __syncwarp(); // lanes without a choice have read the first one's
    if (lane < used) weights[lane] = weight / total;
}

/// Softmax over all experts, the largest ones by falling weight (ties to the lower number), their weights brought to a
/// sum of 1, and their order by ascending number. `logits`: [experts]; `keys`: as many numbers of shared memory; `ids`,
/// `weights`, `order`: [used], used at most 32.
DEVICE void choose(const float *logits, int experts, int used, u32 *keys, u32 *ids, float *weights, u32 *order) {
    int lane = threadIdx.x % 32;
    u32 own[KEYS_OF_LANE], best = 0;
#pragma unroll
    for (int i = 0; i < KEYS_OF_LANE; i++) {
        own[i] = lane + 32 * i < experts ? order_of(logits[lane + 32 * i]) : 0;
        best = max(best, own[i]);
    }
    bool listed = experts <= 32 * KEYS_OF_LANE && choose_listed(logits, own, best, used, keys, ids, weights, order);
    if (!listed) choose_slowly(logits, experts, used, keys, ids, weights, order);
    softmax_of_chosen(weights, used);
}
