// Part of conv() (conv.cu), without IN8: accumulators of 16-bit products become results and are stored: straight from registers (DIRECT), through shared
// memory in rounds (SK == 1), or by each block of a cluster for its own rows, from the parts of all.
if (DIRECT && (OUT_F32 || ODD)) {  // no residual
#pragma unroll
    for (int i = 0; i < MI; ++i)
#pragma unroll
        for (int j = 0; j < BN / 4; ++j) {
            const int row = pixel[i][j % 2], col = n0 + j / 2 * 8 + lane % 4 * 2;
            const float2 v = make_float2(
                finish(p, BIASED(acc[i][j * 2], bias_pairs[j / 2].x, column_pairs[j / 2].x, row_norm[i][j % 2]), 0.f),
                finish(p, BIASED(acc[i][j * 2 + 1], bias_pairs[j / 2].y, column_pairs[j / 2].y, row_norm[i][j % 2]), 0.f));
            const long long to = (long long)row * p.out_pitch + col;
            if (ODD && row >= 0) {  // channels not a multiple of 8: rows start at any address
                u16* out = reinterpret_cast<u16*>(p.out) + to;
                if (col < p.n) out[0] = (u16)pack(v.x, 0.f);
                if (col + 1 < p.n) out[1] = (u16)pack(v.y, 0.f);
            }
            if (!ODD && row >= 0 && col < p.n) *reinterpret_cast<float2*>(p.out + to * 4) = v;
        }
} else if (DIRECT) {
#pragma unroll
    for (int i = 0; i < MI; ++i)
#pragma unroll
        for (int b = 0; b < BATCHES; ++b) {
            u32 v[4] = {res_items[i][b].x, res_items[i][b].y, res_items[i][b].z, res_items[i][b].w};
            if (p.has_residual) transpose_quad(v, lane);
#pragma unroll
            for (int q = 0; q < 4; ++q) {
                const int j = (b * 4 + q) % (BN / 8), half = (b * 4 + q) / (BN / 8);
                v[q] = finish_two(p, BIASED(acc[i][j * 4 + half * 2], bias_pairs[j].x, column_pairs[j].x, row_norm[i][half]),
                                  BIASED(acc[i][j * 4 + half * 2 + 1], bias_pairs[j].y, column_pairs[j].y, row_norm[i][half]), unpack(v[q]));
            }
            transpose_quad(v, lane);
            const int item = b * 4 + lane % 4, col = n0 + item % (BN / 8) * 8, row = item / (BN / 8) ? pixel[i][1] : pixel[i][0];
            if (row >= 0 && col < p.n) *reinterpret_cast<uint4*>(result(p, row, col)) = make_uint4(v[0], v[1], v[2], v[3]);
        }
} else if (SK == 1) {
    const u32 mine = bias_s + group * BN * 4;
#pragma unroll
    for (int i = 0; i < (BN + 127) / 128; ++i) if (t + i * 128 < BN) {
        store_shared_f(mine + (t + i * 128) * 4, bias_early[i]);
        if (NORM) store_shared_f(mine + WGS * BN * 4 + (t + i * 128) * 4, factor_early[i]);
    }
    if (p.has_residual) barrier_wait(res_bar, res_parity);
    named_barrier(1 + group, 128);
#pragma unroll
    for (int i = 0; i < MI; ++i)
#pragma unroll
        for (int j = 0; j < BN / 8; ++j) {
            const int row = warp % 4 * 16 + lane / 4, col = j % (PW / 8);
            const u32 panel = place + ((group * MI + i) * PANELS + j / (PW / 8)) * PANEL_BYTES;
            const float2 add = load_shared_f2(mine + (j * 8 + lane % 4 * 2) * 4);
#if NORM
            const float2 column = load_shared_f2(mine + (WGS * BN + j * 8 + lane % 4 * 2) * 4);
#endif
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int line = row + half * 8, mix = PROW == 128 ? line & 7 : PROW == 64 ? line >> 1 & 3 : line >> 2 & 1;
                const u32 at = panel + line * PROW + ((col ^ mix) << 4) + lane % 4 * 4;
                const float2 r = p.has_residual ? unpack(load_shared(at)) : make_float2(0.f, 0.f);
                store_shared(at, finish_two(p, BIASED(acc[i][j * 4 + half * 2], add.x, column.x, row_norm[i][half]),
                                            BIASED(acc[i][j * 4 + half * 2 + 1], add.y, column.y, row_norm[i][half]), r));
            }
        }
    fence_async();
    named_barrier(1 + group, 128);
    if (warp % 4 == 0 && one) {
        if (turn == 0) wait_for_previous();  // nothing may be written while the kernel in front still reads it
#pragma unroll
        for (int i = 0; i < MI; ++i)
            for (int j = 0; j < PANELS; ++j) store_panel(p, place + ((group * MI + i) * PANELS + j) * PANEL_BYTES, n0 + j * PW, m0 + (group * MI + i) * 64);
        store_commit();
    }
} else {
    cluster_wait();  // all blocks of the cluster run: their shared memory may be written
#pragma unroll
    for (int i = 0; i < MI; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = (group * MI + i) * 64 + warp % 4 * 16 + lane / 4 + half * 8, owner = row / SLICE;
            const u32 at = extra + ((rank * SLICE + row % SLICE) * PITCH + lane % 4 * 4) * 4;  // in 16s of channels: four of a lane together
            const u32 to = remote_address(at, owner), bar = remote_address(parts, owner);
#pragma unroll
            for (int j = 0; j < BN / 16; ++j) {
                const float* v = acc[i] + j * 8 + half * 2;
                if (owner == rank) store_shared_f4(at + j * 64, v[0], v[1], v[4], v[5]);
                else store_remote4(to + j * 64, v[0], v[1], v[4], v[5], bar);
            }
        }
#if NORM
#pragma unroll
    for (int i = 0; i < MI; ++i) {
        const int row = (group * MI + i) * 64 + warp % 4 * 16 + lane / 2, owner = row / SLICE;
        const u32 at = row_parts + (rank * SLICE + row % SLICE) * 8;
        if (lane % 2 == 0) {
            if (owner == rank) { store_shared_f(at, row_norm[i][0].x); store_shared_f(at + 4, row_norm[i][0].y); }
            else store_remote(remote_address(at, owner), row_norm[i][0].x, row_norm[i][0].y, remote_address(parts, owner));
        }
    }
    int counts[SK];
#pragma unroll
    for (int q = 0; q < SK; ++q) counts[q] = (p.steps * (q + 1) / SK - p.steps * q / SK) * BK;
#endif
    named_barrier(8, WORKERS);
    barrier_wait(parts, 0);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const int item = threadIdx.x + i * WORKERS, line = item / (BN / 8), column = item % (BN / 8) * 8;
        const int row = target[i], col = n0 + column;
        if (row < 0) continue;
#if NORM
        float4 u = make_float4(0.f, 0.f, 0.f, 0.f), v = u;
#else
        float4 u = bias[i][0], v = bias[i][1];
#endif
#pragma unroll
        for (int q = 0; q < SK; ++q) {
            const u32 from = extra + ((q * SLICE + line) * PITCH + column / 16 * 16 + column % 16 / 4) * 4;
            const float2 x = load_shared_f2(from), y = load_shared_f2(from + 16), z = load_shared_f2(from + 32), w = load_shared_f2(from + 48);
            u.x += x.x; u.y += x.y; u.z += y.x; u.w += y.y;
            v.x += z.x; v.y += z.y; v.z += w.x; v.w += w.y;
        }
#if NORM
        const float2 norm = row_of_parts(p, row_parts + line * 8, SLICE * 8, counts);
        const float4 c = column_sum[i][0], d = column_sum[i][1], e = bias[i][0], f = bias[i][1];
        u = make_float4(with_bias(u.x, e.x, c.x, norm), with_bias(u.y, e.y, c.y, norm), with_bias(u.z, e.z, c.z, norm), with_bias(u.w, e.w, c.w, norm));
        v = make_float4(with_bias(v.x, f.x, d.x, norm), with_bias(v.y, f.y, d.y, norm), with_bias(v.z, f.z, d.z, norm), with_bias(v.w, f.w, d.w, norm));
#endif
        const float2 r0 = unpack(residual[i].x), r1 = unpack(residual[i].y), r2 = unpack(residual[i].z), r3 = unpack(residual[i].w);
        if (OUT_F32) {
            float4* out = reinterpret_cast<float4*>(p.out + ((long long)row * p.out_pitch + col) * 4);
            out[0] = make_float4(finish(p, u.x, r0.x), finish(p, u.y, r0.y), finish(p, u.z, r1.x), finish(p, u.w, r1.y));
            out[1] = make_float4(finish(p, v.x, r2.x), finish(p, v.y, r2.y), finish(p, v.z, r3.x), finish(p, v.w, r3.y));
        } else {
            *reinterpret_cast<uint4*>(result(p, row, col)) =
                make_uint4(finish_two(p, u.x, u.y, r0), finish_two(p, u.z, u.w, r1), finish_two(p, v.x, v.y, r2), finish_two(p, v.z, v.w, r3));
        }
    }
}
