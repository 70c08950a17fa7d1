// The choice of experts, by one warp for a row. Loops are left as loops: code that runs once is as slow as it is long.

/// A number whose order as a whole number is that of `x`; 0 for what is not a number.
DEVICE u32 order_of(float x) {
    u32 bits = __float_as_uint(x);
    return x == x ? bits ^ ((int)bits < 0 ? 0xffffffffu : 0x80000000u) : 0;
}

/// The number whose order that is.
DEVICE float number_of(u32 key) { return __uint_as_float(key ^ ((int)key < 0 ? 0x80000000u : 0xffffffffu)); }

const int KEYS_OF_LANE = 16;

/// The expert whose logit is number i of a lane's: four neighbours of each 128.
DEVICE int expert_of(int lane, int i) { return i / 4 * 128 + lane * 4 + i % 4; }

/// This lane's logits: of experts that are not there, nothing. A multiple of four experts, 512 at most.
DEVICE void logits_of_lane(const float *logits, int experts, float own[KEYS_OF_LANE]) {
    float none = __int_as_float(0xff800000);
#pragma unroll
    for (int i = 0; i < KEYS_OF_LANE; i += 4) {
        int expert = expert_of(threadIdx.x % 32, i);
        float4 v = make_float4(none, none, none, none);
        if (expert < experts) v = *(const float4 *)(logits + expert);
        own[i] = v.x, own[i + 1] = v.y, own[i + 2] = v.z, own[i + 3] = v.w;
    }
}

/// Lists the experts of all lanes whose bits are set, 32 at most; their number, or 33 if there are more, or too many of one lane.
DEVICE int list_experts(u32 bits, u32 *list) {
    int lane = threadIdx.x % 32, at = 0, all = 0, count = __popc(bits);
    u32 before = (1u << lane) - 1;
#pragma unroll
    for (int k = 0; k < 3; k++) {
        u32 lanes = __ballot_sync(~0u, count >> k & 1);
        at += __popc(lanes & before) << k, all += __popc(lanes) << k;
    }
    if (all > 32 || __any_sync(~0u, count > 7)) return 33;
#pragma unroll 1
    for (; bits; bits &= bits - 1) list[at++] = expert_of(lane, __ffs(bits) - 1);
    __syncwarp();
    return all;
}

/// How many of `all` keys, one in each lane, are larger than this lane's; of those that are alike, those with lower ids.
DEVICE int rank_of(u32 key, u32 id, int all) {
    int lane = threadIdx.x % 32, rank = 0;
    bool alike = false;
#pragma unroll 1
    for (int first = 0; first < all; first += 8) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            u32 other = __shfl_sync(~0u, key, first + i);
            rank += other > key, alike |= other == key && first + i != lane;
        }
    }
    if (!__any_sync(~0u, alike && lane < all)) return rank;
#pragma unroll 1
    for (int i = 0; i < all; i++) {
        u32 other = __shfl_sync(~0u, key, i), number = __shfl_sync(~0u, id, i);
        rank += other == key && number < id;
    }
    return rank;
}

/// Chooses where every lane's keys fit its registers. Returns false where logits are no numbers, or too many are alike. Stores `ids` and
/// logits; `list`: 32 numbers, or one for each expert if there are fewer.
DEVICE bool choose_listed(const float *logits, int experts, int used, u32 *list, u32 *ids, float *values) {
    int lane = threadIdx.x % 32;
    float own[KEYS_OF_LANE], largest = __int_as_float(0xff800000);
    logits_of_lane(logits, experts, own);
#pragma unroll
    for (int i = 0; i < KEYS_OF_LANE; i++) largest = fmaxf(largest, own[i]);
    // At least `used` keys are no less than the `used`-th of what lanes hold most; than a later one where some are alike.
    u32 best = order_of(largest), bound = 0, bits = 0;
#pragma unroll 2
    for (int i = 0; i < used; i++) {
        bound = __reduce_max_sync(~0u, best);
        best = best == bound ? 0 : best;
    }
    float least = number_of(bound);
    if (bound == 0 || !(least > __int_as_float(0xff800000))) return false;
#pragma unroll
    for (int i = 0; i < KEYS_OF_LANE; i++) bits |= own[i] >= least ? 1u << i : 0;
    int all = list_experts(bits, list);
    if (all > 32) return false;
    u32 id = lane < all ? list[lane] : 0;
    float logit = logits[id];
    int rank = rank_of(lane < all ? order_of(logit) : 0, id, all);
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
        float x = number_of(key);
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
    // Rows of such logits begin at whole words of 16 bytes.
    bool listed = experts % 4 == 0 && experts <= 32 * KEYS_OF_LANE && choose_listed(logits, experts, used, keys, ids, values);
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
