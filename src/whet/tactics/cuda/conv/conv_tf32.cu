// Convolution and matrix product of f32 tensors on Hopper's tensor cores: out[pixel, k] = act(sum over taps and channels of in * weight + bias[k] + residual).
// A block works on BM pixels x BN output channels. Its first WGS*4 warps read inputs from shared memory into registers, round them to
// TF32 there (to nearest, ties away from zero: the tensor cores would truncate, a bias towards zero), and multiply by weights that the host
// rounded. TERMS 3: each value is a sum of two TF32 values, and three of the four products are accumulated: 21 bits, close to f32. The tensor cores
// truncate their accumulators, so with PROMOTE these are added to f32 registers every PROMOTE steps.
// The last warp loads tiles through TMA into a ring of STAGES. With SK > 1 a cluster of SK blocks shares one tile, as in conv.cu.
// Within BK channels weights are permuted so that a thread's inputs are adjacent: in step i of eight, index q (q + 4) of a quad's lane q
// is channel BK/4 * q + i (+ BK/8). Rows of the weights are permuted in 16s so that a thread's accumulators are four adjacent output channels.
// With CONCAT_INPUT a 1x1 convolution reads two images, with concatenated channels in K; with DUAL_OUTPUT it has two results, channels below and from `fork` on.
// Inputs are double-buffered in registers: one step is read while the other is multiplied. With SINGLE (many blocks per multiprocessor) there is one buffer:
// without registers for two, ptxas would insert a wait after each product.
// Constants: WGS, BN (multiple of 16), BK, STAGES, SK, BLOCKS, TERMS, PROMOTE, IM2COL, ACT, ODD (any number of output channels), GROUPED, CONCAT_INPUT, DUAL_OUTPUT, SINGLE.
#define BF16 0
#ifndef CONCAT_INPUT
#define CONCAT_INPUT 0
#endif
#ifndef SINGLE
#define SINGLE 0
#endif
#ifndef DUAL_OUTPUT
#define DUAL_OUTPUT 0
#endif
#include "common.cuh"
#include "tf32.cuh"
#include "vector.cuh"
#include "wgmma"

constexpr int BM = 64 * WGS, ROW = BK * 4, INNER = BK / 8, KEPT = BK / 4;   // KEPT: inputs of a row that a thread has
constexpr int PARTS = TERMS == 3 ? 2 : 1;                                   // of a weight
constexpr int A_BYTES = BM * ROW, B_PART = (BN * ROW + 1023) / 1024 * 1024, B_BYTES = PARTS * B_PART;
constexpr int PITCH = BN + 8, SLICE = BM / SK;
constexpr int EXTRA_BYTES = SK > 1 ? BM * PITCH * 4 : 0;
constexpr int WORKERS = WGS * 128, THREADS = WORKERS + 32;

#include "arguments"

// The end of every result: v is the sum with its bias, r the residual.
DEV float finish(const Args& p, float v, float r) {
    const float x = activate<ACT>(p.has_residual == 1 ? v + r : v, p.act);
    return p.has_residual == 2 ? x + r : x;
}

// Address of four channels of a pixel.
DEV float* place_of(const Args& p, int row, int col) {
#if DUAL_OUTPUT
    if (col >= p.fork) return p.other + ((long long)row * p.other_pitch + col - p.fork);
#endif
    return p.out + ((long long)row * p.out_pitch + col);
}

// Applies the epilogue to four adjacent channels of a pixel and stores them.
DEV void end_four(const Args& p, int row, int col, float (&v)[4]) {
    const float* from = p.residual + ((long long)row * p.res_pitch + col);
    float r[4] = {0.f, 0.f, 0.f, 0.f};
    if (p.has_residual) {
        if (!ODD) {
            const float4 all = *reinterpret_cast<const float4*>(from);
            r[0] = all.x; r[1] = all.y; r[2] = all.z; r[3] = all.w;
        } else
#pragma unroll
            for (int e = 0; e < 4; ++e) r[e] = col + e < p.n ? from[e] : 0.f;
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) v[e] = finish(p, v[e], r[e]);
    float* to = place_of(p, row, col);
    if (!ODD) store_four(to, v[0], v[1], v[2], v[3]);
    else
#pragma unroll
        for (int e = 0; e < 4; ++e) if (col + e < p.n) to[e] = v[e];
}

struct Corner {  // input coordinates of a tile
    int m0, n0, c0, image, h, w;
    DEV Corner(const Args& p, int tile) {
        const int mt = tile / p.tiles_n;
        m0 = mt * BM;
        n0 = (tile - mt * p.tiles_n) * BN;
        c0 = GROUPED ? n0 / p.group_k * p.group_c & ~7 : 0;  // the first channel of the tile's groups
        image = h = w = 0;
        if (IM2COL) {
            image = m0 / p.pixels;
            const int pixel = m0 - image * p.pixels, y = pixel / p.width;
            h = y * p.stride_h - p.pad_h;
            w = (pixel - y * p.width) * p.stride_w - p.pad_w;
        }
    }
};

struct Walk {  // input coordinates of K step k
    int c, s, r;
    DEV Walk(const Args& p, int k) { int tap = k / p.csteps; c = k - tap * p.csteps; r = tap / p.taps_w; s = tap - r * p.taps_w; }
    DEV void next(const Args& p) { if (++c == p.csteps) { c = 0; if (++s == p.taps_w) { s = 0; ++r; } } }
};

// The inputs of a K step that this thread multiplies: rows `line` and `line` + 8 of the tile, KEPT adjacent channels of each.
#define INFINITE __uint_as_float(0x7f800000)
struct Inputs { u32 high[INNER][4], low[TERMS == 3 ? INNER : 1][4]; };

DEV void read_inputs(Inputs& x, u32 tile, int line, int lane) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = line + half * 8, mix = ROW == 128 ? row & 7 : ROW == 64 ? row >> 1 & 3 : row >> 2 & 1;
        const u32 start = tile + row * ROW;
        float v[KEPT];
        if (KEPT == 8) {
            const float4 a = load_shared_f4(start + ((lane % 4 * 2 ^ mix) << 4)), b = load_shared_f4(start + (((lane % 4 * 2 + 1) ^ mix) << 4));
            v[0] = a.x; v[1] = a.y; v[2] = a.z; v[3] = a.w;
            v[4 % KEPT] = b.x; v[5 % KEPT] = b.y; v[6 % KEPT] = b.z; v[7 % KEPT] = b.w;
        } else if (KEPT == 4) {
            const float4 a = load_shared_f4(start + ((lane % 4 ^ mix) << 4));
            v[0] = a.x; v[1] = a.y; v[2 % KEPT] = a.z; v[3 % KEPT] = a.w;
        } else {
            const float2 a = load_shared_f2(start + ((lane % 4 / 2 ^ mix) << 4) + lane % 2 * 8);
            v[0] = a.x; v[1] = a.y;
        }
#pragma unroll
        for (int i = 0; i < INNER; ++i)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const float value = v[i + j * INNER];
                if (TERMS == 1) x.high[i][half + j * 2] = to_tf32(value);
                else {
                    const u32 cut = __float_as_uint(value) & 0xffffe000;
                    x.high[i][half + j * 2] = cut;
                    x.low[TERMS == 3 ? i : 0][half + j * 2] = fabsf(value) < INFINITE ? __float_as_uint(value - __uint_as_float(cut)) : 0u;
                }
            }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) conv(const __grid_constant__ Args p) {
    extern __shared__ u8 raw[];
    const u32 base = (shared_address(raw) + 1023) & ~1023u;
    const u32 ring_a = base, ring_b = base + STAGES * A_BYTES, extra = ring_b + STAGES * B_BYTES;
    const u32 full = extra + EXTRA_BYTES, empty = full + STAGES * 8, parts = empty + STAGES * 8;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;  // the shuffle tells the compiler: equal in a warp
    const bool one = elect();
    const int rank = SK > 1 ? blockIdx.x % SK : 0;  // in the cluster
    const int first = SK > 1 ? blockIdx.x / SK : blockIdx.x, stride = SK > 1 ? p.tiles : gridDim.x;  // SK > 1: one tile a cluster
    const int k0 = SK > 1 ? p.steps * rank / SK : 0, k1 = SK > 1 ? p.steps * (rank + 1) / SK : p.steps;

    if (threadIdx.x == WORKERS) {
        map_prefetch(&p.a);
        map_prefetch(&p.b);
        for (int i = 0; i < STAGES; ++i) { barrier_init(full + 8 * i, 1); barrier_init(empty + 8 * i, WGS * 4); }
        if (SK > 1) { barrier_init(parts, 1); barrier_expect(parts, BM * BN * 4); }
        barrier_init_fence();
    }
    __syncthreads();
    if (SK > 1) cluster_arrive();
    let_next_start();

    if (warp == WGS * 4) {  // ---- inputs and weights: the whole warp walks, one lane asks (so that addresses stay uniform)
        const auto ask_weights = [&](int slot, int k, int n0) {
            for (int j = 0; j < PARTS; ++j) load_box2(ring_b + slot * B_BYTES + j * B_PART, &p.b, full + 8 * slot, k * BK, n0 + j * p.low);
        };
        constexpr u32 STEP_BYTES = A_BYTES + PARTS * BN * ROW;
        const int ahead = min(k1 - k0, STAGES);  // weights do not depend on the kernel in front: load them before waiting for it
        Corner at_tile(p, first);
        const Walk at_first(p, k0);
        if (one)
            for (int i = 0; i < ahead; ++i) { barrier_expect(full + 8 * i, STEP_BYTES); ask_weights(i, k0 + i, at_tile.n0); }
        wait_for_previous();
        int slot = 0, turn = 0;
        for (int tile = first; tile < p.tiles; tile += stride) {
            if (tile != first) at_tile = Corner(p, tile);
            Walk at = at_first;
            for (int k = k0; k < k1; ++k) {
                const u32 bar = full + 8 * slot;
                const bool later = turn > 0 || slot >= ahead;
                if (turn > 0) barrier_wait(empty + 8 * slot, (turn - 1) & 1);
                if (one) {
                    if (later) { barrier_expect(bar, STEP_BYTES); ask_weights(slot, k, at_tile.n0); }
                    if (IM2COL)
                        load_window(ring_a + slot * A_BYTES, &p.a, bar, at_tile.c0 + at.c * BK, at_tile.w, at_tile.h, at_tile.image, at.s * p.dil_w, at.r * p.dil_h);
#if CONCAT_INPUT
                    else if (k >= p.csteps)
                        load_box2(ring_a + slot * A_BYTES, &p.second, bar, (k - p.csteps) * BK, at_tile.m0);
#endif
                    else
                        load_box2(ring_a + slot * A_BYTES, &p.a, bar, at_tile.c0 + k * BK, at_tile.m0);
                }
                if (IM2COL) at.next(p);
                if (++slot == STAGES) { slot = 0; ++turn; }
            }
        }
    } else {  // ---- multiply, finish, store
        const int group = warp / 4, line = group * 64 + warp % 4 * 16 + lane / 4;
        int slot = 0, phase = 0;
        bool waited = false;
        for (int tile = first; tile < p.tiles; tile += stride) {
            const int n0 = tile % p.tiles_n * BN;
            float acc[BN / 2], total[PROMOTE ? BN / 2 : 1];
            if (PROMOTE)
#pragma unroll
                for (int j = 0; j < BN / 2; ++j) total[PROMOTE ? j : 0] = 0.f;
            Inputs even, odd;
            int previous = -1, fresh = 0, since = 0;  // fresh: 0 if the accumulators start at zero
            const auto step = [&](Inputs& x) {
                barrier_wait(full + 8 * slot, phase);
                read_inputs(x, ring_a + slot * A_BYTES, line, lane);
                const u64 b = operand<ROW>(ring_b + slot * B_BYTES);
                mma_begin();
#pragma unroll
                for (int i = 0; i < INNER; ++i) {
                    wgmma_registers(acc, x.high[i], b + i * 2, fresh | i);
                    if (TERMS == 3) {
                        wgmma_registers(acc, x.low[TERMS == 3 ? i : 0], b + i * 2, 1);
                        wgmma_registers(acc, x.high[i], b + (B_PART >> 4) + i * 2, 1);
                    }
                }
                mma_commit();
                fresh = 1;
                mma_wait<SINGLE ? 0 : 1>();
                if (SINGLE) previous = slot;
                if (previous >= 0 && lane == 0) barrier_arrive(empty + 8 * previous);
                previous = slot;
                if (++slot == STAGES) { slot = 0; phase ^= 1; }
                if (PROMOTE) {
                    if (++since == PROMOTE) {
                        mma_wait<0>();
#pragma unroll
                        for (int j = 0; j < BN / 2; ++j) total[PROMOTE ? j : 0] += acc[j];
                        since = fresh = 0;
                    }
                }
            };
            int left = k1 - k0;
            if (SINGLE)
                for (; left; --left) step(even);
            for (; left > 1; left -= 2) { step(even); step(odd); }
            if (left) step(even);
            mma_wait<0>();
            if (!SINGLE && lane == 0) barrier_arrive(empty + 8 * previous);
            if (PROMOTE)
#pragma unroll
                for (int j = 0; j < BN / 2; ++j) acc[j] = since ? total[PROMOTE ? j : 0] + acc[j] : total[PROMOTE ? j : 0];

            if (SK == 1) {
                if (!waited) { wait_for_previous(); waited = true; }  // nothing may be written while the kernel in front still reads it
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int row = tile / p.tiles_n * BM + line + half * 8;
                    if (row >= p.m) continue;
#pragma unroll
                    for (int g = 0; g < BN / 16; ++g) {
                        const int col = n0 + g * 16 + lane % 4 * 4;
                        if (col >= p.n) continue;
                        const float4 add = *reinterpret_cast<const float4*>(p.bias + col);
                        float v[4] = {acc[g * 8 + half * 2] + add.x, acc[g * 8 + half * 2 + 1] + add.y, acc[g * 8 + 4 + half * 2] + add.z,
                                      acc[g * 8 + 4 + half * 2 + 1] + add.w};
                        end_four(p, row, col, v);
                    }
                }
            } else {
                cluster_wait();  // all blocks of the cluster run: their shared memory may be written
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int row = line + half * 8;
                    const u32 to = remote_address(extra + ((rank * SLICE + row % SLICE) * PITCH + lane % 4 * 4) * 4, row / SLICE);
                    const u32 bar = remote_address(parts, row / SLICE);
#pragma unroll
                    for (int g = 0; g < BN / 16; ++g)
                        store_remote4(to + g * 64, acc[g * 8 + half * 2], acc[g * 8 + half * 2 + 1], acc[g * 8 + 4 + half * 2], acc[g * 8 + 4 + half * 2 + 1], bar);
                }
                wait_for_previous();
                barrier_wait(parts, 0);
                for (int item = threadIdx.x; item < SLICE * (BN / 4); item += WORKERS) {
                    const int part = item / (BN / 4), column = item % (BN / 4) * 4, col = n0 + column;
                    const int row = tile / p.tiles_n * BM + rank * SLICE + part;
                    if (row >= p.m || col >= p.n) continue;
                    float v[4];
                    const float4 add = *reinterpret_cast<const float4*>(p.bias + col);
                    v[0] = add.x; v[1] = add.y; v[2] = add.z; v[3] = add.w;
#pragma unroll
                    for (int q = 0; q < SK; ++q) {
                        const float4 x = load_shared_f4(extra + ((q * SLICE + part) * PITCH + column) * 4);
                        v[0] += x.x; v[1] += x.y; v[2] += x.z; v[3] += x.w;
                    }
                    end_four(p, row, col, v);
                }
            }
        }
    }
    if (SK > 1 && warp >= WGS * 4) { __syncwarp(); cluster_wait(); }
}
