// Part of conv() (conv.cu), with IN8: accumulators of integers or float8 numbers become results, by a factor and a bias a channel, and are stored: straight
// from registers (DIRECT), through shared memory in rounds (SK == 1), or by each block of a cluster for its own rows, from the parts of all.
const int row0 = group * MI * 64 + warp % 4 * 16 + lane / 4, eight = lane % 4 * 8;  // the first row and channel of this thread
if (SK == 1) {
    const u32 mine = bias_s + (turn & 1) * (FACTOR_BYTES / 2) + group * BN * 8;  // other warps may still read those of the turn before
    if (!KEPT) {
#pragma unroll
        for (int i = 0; i < (BN + 127) / 128; ++i)
            if (t + i * 128 < BN) {
                store_shared_f(mine + (t + i * 128) * 4, bias_early[i]);
                store_shared_f(mine + (BN + t + i * 128) * 4, factor_early[i]);
            }
        if (STAGED && p.has_residual) barrier_wait(res_bar, res_parity);
        named_barrier(1 + group, 128);
    }
#pragma unroll
    for (int g = 0; g < BN / 32; ++g) {
        const int col = g * 32 + eight;
        const Vec8 by = KEPT ? kept_factor[KEPT ? g : 0] : shared_eight(mine + (BN + col) * 4);
        Vec8 add = KEPT ? kept_bias[KEPT ? g : 0] : shared_eight(mine + col * 4);
#pragma unroll
        for (int i = 0; i < MI; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int line = warp % 4 * 16 + lane / 4 + half * 8, mix = PROW == 128 ? line & 7 : PROW == 64 ? line >> 1 & 3 : line >> 2 & 1;
                const int row = DIRECT ? pixel[i][half] : m0 + row0 + i * 64 + half * 8;
                if (BORDER) add = load8<0>(reinterpret_cast<const u8*>(bias_of(p, row < p.m ? row : -1)), n0 + col);
                float v[8];
#pragma unroll
                for (int e = 0; e < 8; ++e) v[e] = fmaf((float)acc[i][g * 16 + half * 2 + e / 2 * 4 + e % 2], by.v[e], add.v[e]);
#if BETWEEN
                Raw<ADD> between;
                between.a = make_uint4(kept_between[i][half][g].x, kept_between[i][half][g].y, 0, 0);
                between.b = make_uint4(0, 0, 0, 0);
#endif
                if (DIRECT) {
#if BETWEEN
                    res_items[i][half][g] = between;
#endif
                    if (row >= 0 && n0 + col < p.n)
                        finish_eight(p, v, res_items[i][half][g], p.out, (long long)row * p.out_pitch + n0 + col, ODD ? p.n - n0 - col : 8);
                } else {
                    const int byte = (g * 32 % PW + eight) * SIZE;   // of the row of a panel
                    const u32 at = place + ((group * MI + i) * PANELS + g * 32 / PW) * PANEL_BYTES + line * PROW + (((byte >> 4) ^ mix) << 4) + (byte & 15);
                    u8* to = raw + (at - shared_address(raw));
                    Raw<ADD> other;
                    other.a = other.b = make_uint4(0, 0, 0, 0);
#if BETWEEN
                    other = between;
#endif
                    if (p.has_residual) other = load_raw<ADD>(to, 0, true);
                    finish_eight(p, v, other, to, 0, 8);
                }
            }
    }
    if (STAGED) {
        fence_async();
        named_barrier(1 + group, 128);
        if (warp % 4 == 0 && one) {
            if (turn == 0) wait_for_previous();  // nothing may be written while the kernel in front still reads it
#pragma unroll
            for (int i = 0; i < MI; ++i)
                for (int j = 0; j < PANELS; ++j)
                    store_box2(&p.d, place + ((group * MI + i) * PANELS + j) * PANEL_BYTES, n0 + j * PW, m0 + (group * MI + i) * 64);
            store_commit();
        }
    }
} else {
    cluster_wait();  // all blocks of the cluster run: their shared memory may be written
#pragma unroll
    for (int i = 0; i < MI; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = row0 + i * 64 + half * 8, owner = row / SLICE;
            const u32 at = extra + ((rank * SLICE + row % SLICE) * PITCH + lane % 4 * 4) * 4;  // in 16s of channels: four of a lane together
            const u32 to = remote_address(at, owner), bar = remote_address(parts, owner);
#pragma unroll
            for (int j = 0; j < BN / 16; ++j) {
                const Accumulator* v = acc[i] + j * 8 + half * 2;
                if (owner == rank) store_shared_f4(at + j * 64, bits(v[0]), bits(v[1]), bits(v[4]), bits(v[5]));
                else store_remote4(to + j * 64, bits(v[0]), bits(v[1]), bits(v[4]), bits(v[5]), bar);
            }
        }
    named_barrier(8, WORKERS);
    barrier_wait(parts, 0);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const int item = threadIdx.x + i * WORKERS, line = item / (BN / 8), column = item % (BN / 8) * 8;
        if (target[i] < 0) continue;
        Accumulator sum[8] = {};
#pragma unroll
        for (int q = 0; q < SK; ++q)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const float4 x = load_shared_f4(extra + ((q * SLICE + line) * PITCH + column / 32 * 32 + column % 32 / 2 + j * 16) * 4);
                sum[j * 4] += unbits(x.x, Accumulator());
                sum[j * 4 + 1] += unbits(x.y, Accumulator());
                sum[j * 4 + 2] += unbits(x.z, Accumulator());
                sum[j * 4 + 3] += unbits(x.w, Accumulator());
            }
        const Vec8 add = {bias[i][0].x, bias[i][0].y, bias[i][0].z, bias[i][0].w, bias[i][1].x, bias[i][1].y, bias[i][1].z, bias[i][1].w};
        const Vec8 by = {factor[i][0].x, factor[i][0].y, factor[i][0].z, factor[i][0].w, factor[i][1].x, factor[i][1].y, factor[i][1].z, factor[i][1].w};
        float v[8];
#pragma unroll
        for (int e = 0; e < 8; ++e) v[e] = fmaf((float)sum[e], by.v[e], add.v[e]);
        finish_eight(p, v, residual[i], p.out, (long long)target[i] * p.out_pitch + first % p.tiles_n * BN + column, 8);
    }
}
