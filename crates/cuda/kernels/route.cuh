// The choice of experts, by one warp for a row. Loops are left as loops: code that runs once is as slow as it is long.

/// A number whose order as a whole number is that of `x`; 0 for what is not a number.
DEVICE u32 order_of(float x) {
    u32 bits = __float_as_uint(x);
    return x == x ? bits ^ ((int)bits < 0 ? 0xffffffffu : 0x80000000u) : 0;
}

const int KEYS_OF_LANE = 16;

/// Chooses where every lane's keys fit its registers: lane l holds those of the experts l, l + 32, … Returns false where keys are
/// no numbers, or too many are alike. Stores `ids` and logits; `list`: 32 numbers, or one for each expert if there are fewer.
DEVICE bool choose_listed(const float *logits, const u32 own[KEYS_OF_LANE], u32 best, int used, u32 *list, u32 *ids, float *values) {
    int lane = threadIdx.x % 32, count = 0, rank = 0;
    // At least `used` keys are no less than the `used`-th of what lanes hold most; than a later one where some are alike.
    u32 bound = 0;
#pragma unroll 2
    for (int i = 0; i < used; i++) {
        bound = __reduce_max_sync(~0u, best);
        best = best == bound ? 0 : best;
    }
    if (bound == 0) return false;
#pragma unroll
    for (int i = 0; i < KEYS_OF_LANE; i++) count += own[i] >= bound;
    int end = count;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        int before = __shfl_up_sync(~0u, end, step);
        end += lane >= step ? before : 0;
    }
    int all = __shfl_sync(~0u, end, 31), at = end - count;
    if (all > 32) return false;
#pragma unroll
    for (int i = 0; i < KEYS_OF_LANE; i++) {
        if (own[i] >= bound) list[at++] = lane + 32 * i;
    }
    __syncwarp();
    u32 id = lane < all ? list[lane] : 0;
    float logit = logits[id];
    u32 key = order_of(logit);
#pragma unroll 2
    for (int i = 0; i < all; i++) {
        u32 other = __shfl_sync(~0u, key, i), number = __shfl_sync(~0u, id, i);
        rank += other > key || (other == key && number < id);
    }
    if (lane < all && rank < used) ids[rank] = id, values[rank] = logit;
    __syncwarp();
    return true;
}

/// The same of any keys, by looking for the largest again and again. `keys`: [experts].
DEVICE void choose_slowly(const float *logits, int experts, int used, u32 *keys, u32 *ids, float *values) {
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
    if (lane < used) ids[lane] = own, values[lane] = logit;
    __syncwarp();
}

/// Chooses the experts with the largest logits (ties to the lower number), those with larger ones first. `logits`: [experts]; `keys`:
/// as many numbers of shared memory; `ids`, `values`, their logits: [used], used at most 32. By a warp.
DEVICE void choose_experts(const float *logits, int experts, int used, u32 *keys, u32 *ids, float *values) {
    int lane = threadIdx.x % 32;
    u32 own[KEYS_OF_LANE], best = 0;
#pragma unroll
    for (int i = 0; i < KEYS_OF_LANE; i++) {
        own[i] = lane + 32 * i < experts ? order_of(logits[lane + 32 * i]) : 0;
        best = max(best, own[i]);
    }
    bool listed = experts <= 32 * KEYS_OF_LANE && choose_listed(logits, own, best, used, keys, ids, values);
    if (!listed) choose_slowly(logits, experts, used, keys, ids, values);
}

/// Of chosen experts: their order by ascending number, and `weights`, their logits, to what softmax makes of them with a sum of 1.
DEVICE void weigh_experts(const u32 *ids, int used, float *weights, u32 *order) {
    int lane = threadIdx.x % 32, rank = 0, own = lane < used ? lane : 0;
    u32 id = ids[own];
#pragma unroll 1
    for (int j = 0; j < used; j++) {
        // Where logits are no numbers the same expert may stand twice.
        u32 other = __shfl_sync(~0u, id, j);
        rank += other < id || (other == id && j < lane);
    }
    if (lane < used) order[rank] = lane;
    float logit = weights[own], most = __shfl_sync(~0u, logit, 0), weight = lane < used ? expf(logit - most) : 0.0f, total = warp_sum(weight);
    __syncwarp(); // lanes without a choice have read the first one's
    if (lane < used) weights[lane] = weight / total;
}

/// The choice with weights and order.
DEVICE void choose(const float *logits, int experts, int used, u32 *keys, u32 *ids, float *weights, u32 *order) {
    choose_experts(logits, experts, used, keys, ids, weights);
    weigh_experts(ids, used, weights, order);
}
