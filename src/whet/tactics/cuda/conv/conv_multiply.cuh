// Part of conv() (conv.cu): the products of one tile, into `acc`, as its K steps come; slots are given back once products have read them.
Accumulator chain[CHAINS][MI][BN / 2];
Accumulator(&acc)[MI][BN / 2] = chain[0];
#if NORM
RowSums rows[MI] = {};
#endif
int previous = 0, left = -1;  // left: the input slot that the step before was the last to read
int tap = HALO ? k0 % taps : 0, s = HALO ? tap % p.taps_w : 0, shift = HALO ? tap / p.taps_w * p.wide + s : 0;
if (HOLD && turn == 0) barrier_wait(held, 0);
#if ONCE
#pragma unroll
for (int i = 0; i < ONCE; ++i) {
    if (!HALO || i == 0) barrier_wait(full + 8 * i, 0);
    if (HALO && (i == 0 || tap == 0)) barrier_wait(a_full + 8 * a_slot, 0);
    const u64 a = operand<ROW>(ring_a + (HALO ? a_slot : i) * a_bytes + (group * MI * 64 + shift) * ROW), b = operand<ROW>(ring_b + i * B_BYTES);
    mma_begin();
#pragma unroll
    for (int q = 0; q < ROW / 32; ++q)
#pragma unroll
        for (int j = 0; j < MI; ++j) wgmma(chain[q % CHAINS][j], a + (j * 64 * ROW >> 4) + q * 2, b + q * 2, i > 0 || q >= CHAINS);
    mma_commit();
#if NORM
#pragma unroll
    for (int j = 0; j < MI; ++j) rows[j].add(ring_a + i * a_bytes + (group * MI + j) * 64 * ROW, t, i == 0);
#endif
    if (HALO) {
        ++shift;
        if (++s == p.taps_w) { s = 0; shift += p.wide - p.taps_w; }
        if (++tap == taps) { tap = s = shift = 0; ++a_slot; }
    }
}
#else
#pragma unroll
for (int accumulators = 0; accumulators <= BETWEEN; ++accumulators) {
#if BETWEEN
    const int begin = accumulators ? p.first_steps : k0, end = accumulators ? k1 : p.first_steps;  // a row of accumulators from each input
#else
    const int begin = k0, end = k1;
#endif
    for (int k = begin; k < end; ++k) {
        if (!(HALO && HOLD)) barrier_wait(full + 8 * slot, phase);
        if (HALO && (k == k0 || tap == 0)) barrier_wait(a_full + 8 * a_slot, a_phase);
#if DW
        depthwise_rows(p, ring_a + a_slot * a_bytes, dw_weights + a_slot * DW_BYTES, made + (k & 1) * A_BYTES, group * MI * 64, t);
        fence_async();
        mma_wait<0>();  // the previous product has read its operand: after the barrier every warp may write there
        named_barrier(1 + group, 128);
        if (t == 0) barrier_arrive(a_empty + 8 * a_slot);
        const u64 a = operand<ROW>(made + (k & 1) * A_BYTES + group * MI * 64 * ROW), b = operand<ROW>(ring_b + (HOLD ? k : slot) * B_BYTES);
#else
        const u64 a = operand<ROW>(ring_a + (HALO ? a_slot : slot) * a_bytes + (group * MI * 64 + shift) * ROW), b = operand<ROW>(ring_b + (HOLD ? k : slot) * B_BYTES);
#endif
        mma_begin();
#pragma unroll
        for (int i = 0; i < ROW / 32; ++i)
#pragma unroll
            for (int j = 0; j < MI; ++j) wgmma(chain[i % CHAINS][j], a + (j * 64 * ROW >> 4) + i * 2, b + i * 2, k > begin || i >= CHAINS);
        mma_commit();
#if NORM
#pragma unroll
        for (int j = 0; j < MI; ++j) rows[j].add(ring_a + slot * a_bytes + (group * MI + j) * 64 * ROW, t, k == k0);
        __syncwarp();
#endif
        mma_wait<1>();
        if (!(HALO && HOLD) && k > k0 && (NORM ? lane : t) == 0) barrier_arrive(empty + 8 * previous);
        if (HALO) {
            if (!DW && left >= 0 && t == 0) barrier_arrive(a_empty + 8 * left);
            left = -1;
            ++shift;
            if (++s == p.taps_w) { s = 0; shift += p.wide - p.taps_w; }
            if (++tap == taps || k + 1 == k1) {
                tap = s = shift = 0;
                left = a_slot;
                if (++a_slot == HALO) { a_slot = 0; a_phase ^= 1; }
            }
        }
        previous = slot;
        if (++slot == STAGES) { slot = 0; phase ^= 1; }
    }
#if BETWEEN
    if (accumulators == 0) {
        mma_wait<0>();
        keep_integers(p, acc, kept_between, n0 + lane % 4 * 8);
    }
#endif
}
#endif
mma_wait<0>();
#pragma unroll
for (int c = 1; c < CHAINS; ++c)
#pragma unroll
    for (int i = 0; i < MI; ++i)
#pragma unroll
        for (int j = 0; j < BN / 2; ++j) acc[i][j] += chain[c][i][j];
if (!(HALO && HOLD) && !ONCE && (NORM ? lane : t) == 0) barrier_arrive(empty + 8 * previous);
if (HALO && !DW && !ONCE && t == 0) barrier_arrive(a_empty + 8 * left);
#if NORM
float2 row_norm[MI][2];  // SK == 1: 1 / deviation of a thread's rows, and -mean / deviation
#pragma unroll
for (int i = 0; i < MI; ++i) {
    const float2 moments = rows[i].moments((k1 - k0) * BK / 2);
    if (SK == 1) {
        const float by = 1.f / sqrtf(moments.y * p.per_channel + p.epsilon), shift = -by * moments.x;
#pragma unroll
        for (int half = 0; half < 2; ++half)
            row_norm[i][half] = make_float2(__shfl_sync(~0u, by, lane / 4 * 2 + half * 16), __shfl_sync(~0u, shift, lane / 4 * 2 + half * 16));
    } else row_norm[i][0] = moments;
}
#endif
