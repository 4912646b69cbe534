// Convolution and matrix product on Hopper's tensor cores: out[pixel, k] = act(sum over taps and channels of in * weight + bias[k] + residual).
// One block works on BM pixels x BN output channels; its first WGS*4 warps multiply, one warp loads input and weight tiles
// through TMA into a ring of STAGES, one warp loads residual tiles. With SK > 1 a cluster of SK blocks shares one tile: each
// sums a part of K, then adds the parts of its own rows, which the others have put into its shared memory.
// Constants: BM = 64*MI*WGS, BN, BK (channels a step), STAGES, SK, IM2COL, ACT, BLOCKS (resident per multiprocessor), BF16.
#include "common.cuh"
#include "wgmma"

constexpr int BM = 64 * MI * WGS, ROW = BK * 2;
constexpr int A_BYTES = BM * ROW, B_BYTES = (BN * ROW + 1023) / 1024 * 1024;
constexpr int PW = BN < 64 ? BN : 64, PANELS = BN / PW, PROW = PW * 2;      // the output tile lies in panels of PW columns
constexpr int PANEL_BYTES = 64 * PROW, OUT_BYTES = BM * BN * 2;
constexpr int PITCH = BN + 8;                                              // floats between rows of a partial sum: no bank conflicts
constexpr int SLICE = BM / SK;                                             // rows that each block of a cluster finishes
constexpr int EXTRA_BYTES = SK > 1 ? SK * SLICE * PITCH * 4 : OUT_BYTES;
constexpr int WORKERS = WGS * 128, THREADS = WORKERS + 64;
static_assert(BN % PW == 0 && BM % SK == 0, "tile");

struct Args {
    TensorMap a, b, d, r;      // input, weights, output, residual
    const float* bias;         // [tiles_n * BN]
    const u8* residual;        // SK > 1 only: plain addresses, pitches in elements
    u8* out;
    int res_pitch, out_pitch;
    int m, n;                  // pixels, output channels
    int steps, csteps;         // K steps in all, and of one filter tap
    int taps_w;                // filter width
    int pixels, width;         // output pixels of an image, output width
    int stride_h, stride_w, pad_h, pad_w, dil_h, dil_w;
    int tiles, tiles_n;
    int has_residual;
    Act act;
};

struct Walk {  // where K step k reads the input
    int c, s, r;
    DEV Walk(const Args& p, int k) { int tap = k / p.csteps; c = k - tap * p.csteps; r = tap / p.taps_w; s = tap - r * p.taps_w; }
    DEV void next(const Args& p) { if (++c == p.csteps) { c = 0; if (++s == p.taps_w) { s = 0; ++r; } } }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) conv(const __grid_constant__ Args p) {
    extern __shared__ u8 raw[];
    const u32 base = (shared_address(raw) + 1023) & ~1023u;
    const u32 ring_a = base, ring_b = base + STAGES * A_BYTES, extra = ring_b + STAGES * B_BYTES;
    const u32 bias_s = extra + EXTRA_BYTES, bars = bias_s + WGS * BN * 4;
    const u32 full = bars, empty = bars + STAGES * 8, res_full = empty + STAGES * 8, res_empty = res_full + 8;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int rank = SK > 1 ? cluster_rank() : 0;
    const int first = SK > 1 ? blockIdx.x / SK : blockIdx.x, stride = SK > 1 ? p.tiles : gridDim.x;  // SK > 1: one tile a cluster
    const int k0 = SK > 1 ? p.steps * rank / SK : 0, k1 = SK > 1 ? p.steps * (rank + 1) / SK : p.steps;

    if (threadIdx.x == WORKERS) {
        map_prefetch(&p.a);
        map_prefetch(&p.b);
        for (int i = 0; i < STAGES; ++i) { barrier_init(full + 8 * i, 1); barrier_init(empty + 8 * i, WGS); }
        barrier_init(res_full, 1);
        barrier_init(res_empty, WGS);
        barrier_init_fence();
    }
    __syncthreads();
    if (SK > 1) cluster_arrive();
    let_next_start();

    if (warp == WGS * 4) {  // ---- input and weights
        if (lane == 0) {
            const int ahead = min(k1 - k0, STAGES);  // weights do not depend on the kernel in front: load them before waiting for it
            for (int i = 0; i < ahead; ++i) {
                barrier_expect(full + 8 * i, A_BYTES + BN * ROW);
                load_box2(ring_b + i * B_BYTES, &p.b, full + 8 * i, (k0 + i) * BK, first % p.tiles_n * BN);
            }
            wait_for_previous();
            int slot = 0, turn = 0;
            for (int tile = first; tile < p.tiles; tile += stride) {
                const int m0 = tile / p.tiles_n * BM, n0 = tile % p.tiles_n * BN;
                Walk at(p, k0);
                const int image = IM2COL ? m0 / p.pixels : 0, pixel = m0 - image * p.pixels;
                const int y = IM2COL ? pixel / p.width : 0, x = pixel - y * p.width;
                const int h = y * p.stride_h - p.pad_h, w = x * p.stride_w - p.pad_w;
                for (int k = k0; k < k1; ++k) {
                    const u32 bar = full + 8 * slot;
                    if (turn > 0 || slot >= ahead) {
                        if (turn > 0) barrier_wait(empty + 8 * slot, (turn - 1) & 1);
                        barrier_expect(bar, A_BYTES + BN * ROW);
                        load_box2(ring_b + slot * B_BYTES, &p.b, bar, k * BK, n0);
                    }
                    if (IM2COL) {
                        load_window(ring_a + slot * A_BYTES, &p.a, bar, at.c * BK, w, h, image, at.s * p.dil_w, at.r * p.dil_h);
                        at.next(p);
                    } else {
                        load_box2(ring_a + slot * A_BYTES, &p.a, bar, k * BK, m0);
                    }
                    if (++slot == STAGES) { slot = 0; ++turn; }
                }
            }
        }
    } else if (warp == WGS * 4 + 1) {  // ---- residual
        if (SK == 1 && lane == 0 && p.has_residual) {
            wait_for_previous();
            int turn = 0;
            for (int tile = first; tile < p.tiles; tile += stride, ++turn) {
                const int m0 = tile / p.tiles_n * BM, n0 = tile % p.tiles_n * BN;
                if (turn > 0) barrier_wait(res_empty, (turn - 1) & 1);
                barrier_expect(res_full, OUT_BYTES);
                for (int i = 0; i < BM / 64; ++i)
                    for (int j = 0; j < PANELS; ++j) load_box2(extra + (i * PANELS + j) * PANEL_BYTES, &p.r, res_full, n0 + j * PW, m0 + i * 64);
            }
        }
    } else {  // ---- multiply, finish, store
        const int group = warp / 4, t = threadIdx.x % 128;
        int slot = 0, phase = 0, turn = 0;
        constexpr int ITEMS = SK > 1 ? (SLICE * (BN / 8) + WORKERS - 1) / WORKERS : 1;
        uint4 residual[ITEMS];
        float4 bias[ITEMS][2];
        if (SK > 1) {  // what finishes this block's rows, fetched before it is needed
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) {
                const int item = threadIdx.x + i * WORKERS, col = first % p.tiles_n * BN + item % (BN / 8) * 8;
                bias[i][0] = *reinterpret_cast<const float4*>(p.bias + col);
                bias[i][1] = *reinterpret_cast<const float4*>(p.bias + col + 4);
            }
            wait_for_previous();
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) {
                const int item = threadIdx.x + i * WORKERS, line = item / (BN / 8);
                const int row = first / p.tiles_n * BM + rank * SLICE + line, col = first % p.tiles_n * BN + item % (BN / 8) * 8;
                residual[i] = make_uint4(0, 0, 0, 0);
                if (p.has_residual && line < SLICE && row < p.m && col < p.n)
                    residual[i] = *reinterpret_cast<const uint4*>(p.residual + ((long long)row * p.res_pitch + col) * 2);
            }
        }
        for (int tile = first; tile < p.tiles; tile += stride, ++turn) {
            const int m0 = tile / p.tiles_n * BM, n0 = tile % p.tiles_n * BN;
            float bias_early[(BN + 127) / 128];
            if (SK == 1)
#pragma unroll
                for (int i = 0; i < (BN + 127) / 128; ++i) bias_early[i] = t + i * 128 < BN ? p.bias[n0 + t + i * 128] : 0.f;
            float acc[MI][BN / 2];
            int previous = 0;
            for (int k = k0; k < k1; ++k) {
                barrier_wait(full + 8 * slot, phase);
                const u64 a = operand<ROW>(ring_a + slot * A_BYTES + group * MI * 64 * ROW), b = operand<ROW>(ring_b + slot * B_BYTES);
                mma_begin();
#pragma unroll
                for (int i = 0; i < BK / 16; ++i)
#pragma unroll
                    for (int j = 0; j < MI; ++j) wgmma(acc[j], a + (j * 64 * ROW >> 4) + i * 2, b + i * 2, k > k0 || i > 0);
                mma_commit();
                mma_wait<1>();
                if (k > k0 && t == 0) barrier_arrive(empty + 8 * previous);
                previous = slot;
                if (++slot == STAGES) { slot = 0; phase ^= 1; }
            }
            mma_wait<0>();
            if (t == 0) barrier_arrive(empty + 8 * previous);

            if (SK == 1) {
                const u32 mine = bias_s + group * BN * 4;
#pragma unroll
                for (int i = 0; i < (BN + 127) / 128; ++i) if (t + i * 128 < BN) store_shared_f(mine + (t + i * 128) * 4, bias_early[i]);
                if (p.has_residual) barrier_wait(res_full, turn & 1);
                named_barrier(1 + group, 128);
#pragma unroll
                for (int i = 0; i < MI; ++i)
#pragma unroll
                    for (int j = 0; j < BN / 8; ++j) {
                        const int row = warp % 4 * 16 + lane / 4, col = j % (PW / 8);
                        const u32 panel = extra + ((group * MI + i) * PANELS + j / (PW / 8)) * PANEL_BYTES;
                        const float2 add = load_shared_f2(mine + (j * 8 + lane % 4 * 2) * 4);
#pragma unroll
                        for (int half = 0; half < 2; ++half) {
                            const int line = row + half * 8, mix = PROW == 128 ? line & 7 : PROW == 64 ? line >> 1 & 3 : line >> 2 & 1;
                            const u32 at = panel + line * PROW + ((col ^ mix) << 4) + lane % 4 * 4;
                            float x = acc[i][j * 4 + half * 2] + add.x, y = acc[i][j * 4 + half * 2 + 1] + add.y;
                            if (p.has_residual) { const float2 r = unpack(load_shared(at)); x += r.x; y += r.y; }
                            store_shared(at, pack(activate<ACT>(x, p.act), activate<ACT>(y, p.act)));
                        }
                    }
                fence_async();
                named_barrier(1 + group, 128);
                if (t == 0) {
                    if (turn == 0) wait_for_previous();  // nothing may be written while the kernel in front still reads it
#pragma unroll
                    for (int i = 0; i < MI; ++i)
                        for (int j = 0; j < PANELS; ++j)
                            store_box2(&p.d, extra + ((group * MI + i) * PANELS + j) * PANEL_BYTES, n0 + j * PW, m0 + (group * MI + i) * 64);
                    store_commit();
                    store_wait_read();
                    barrier_arrive(res_empty);
                }
            } else {
                cluster_wait();  // all blocks of the cluster run: their shared memory may be written
#pragma unroll
                for (int i = 0; i < MI; ++i)
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const int row = (group * MI + i) * 64 + warp % 4 * 16 + lane / 4 + half * 8;
                        const u32 to = remote_address(extra + ((rank * SLICE + row % SLICE) * PITCH + lane % 4 * 2) * 4, row / SLICE);
#pragma unroll
                        for (int j = 0; j < BN / 8; ++j) store_remote(to + j * 32, acc[i][j * 4 + half * 2], acc[i][j * 4 + half * 2 + 1]);
                    }
                cluster_arrive();
                cluster_wait();
#pragma unroll
                for (int i = 0; i < ITEMS; ++i) {
                    const int item = threadIdx.x + i * WORKERS, line = item / (BN / 8), column = item % (BN / 8) * 8;
                    const int row = m0 + rank * SLICE + line, col = n0 + column;
                    if (line >= SLICE || row >= p.m || col >= p.n) continue;
                    float4 u = bias[i][0], v = bias[i][1];
#pragma unroll
                    for (int q = 0; q < SK; ++q) {
                        const u32 from = extra + ((q * SLICE + line) * PITCH + column) * 4;
                        const float4 x = load_shared_f4(from), y = load_shared_f4(from + 16);
                        u.x += x.x; u.y += x.y; u.z += x.z; u.w += x.w;
                        v.x += y.x; v.y += y.y; v.z += y.z; v.w += y.w;
                    }
                    const float2 r0 = unpack(residual[i].x), r1 = unpack(residual[i].y), r2 = unpack(residual[i].z), r3 = unpack(residual[i].w);
                    uint4 out;
                    out.x = pack(activate<ACT>(u.x + r0.x, p.act), activate<ACT>(u.y + r0.y, p.act));
                    out.y = pack(activate<ACT>(u.z + r1.x, p.act), activate<ACT>(u.w + r1.y, p.act));
                    out.z = pack(activate<ACT>(v.x + r2.x, p.act), activate<ACT>(v.y + r2.y, p.act));
                    out.w = pack(activate<ACT>(v.z + r3.x, p.act), activate<ACT>(v.w + r3.y, p.act));
                    *reinterpret_cast<uint4*>(p.out + ((long long)row * p.out_pitch + col) * 2) = out;
                }
            }
        }
    }
    if (SK > 1 && warp >= WGS * 4) { __syncwarp(); cluster_wait(); cluster_arrive(); cluster_wait(); }
    if (SK == 1) store_wait_all();  // the stores read shared memory: do not leave before they are done
}
