// Attention of long sequences, without a mask: out = softmax(scale * q @ k^T) @ v. Products by wgmma, accumulators and softmax in f32, scores never leave the
// registers; while a step's softmax is computed the values of the step before are multiplied (Shah et al. 2024, "FlashAttention-3").
// A block has WGS warpgroups of 64 rows of q each, and a warp that fetches keys and values, BN of them at a time, through a ring of STAGES slots.
// TURNS: two warpgroups start their products in turns, so that one computes its softmax while the other multiplies.
// Operands lie as boxes of 64 elements a row (128 bytes, swizzled); values are an operand whose K runs over the rows.
// Constants: BN, D (elements of a head: 64 or 128), WGS, STAGES, TURNS, BF16, DEAL (the fetching warp belongs to a warpgroup of its own, which gives
// its registers to those that multiply).
#include "common.cuh"
#include "wgmma"
#include "wgmma_transposed"

#include "arguments"

constexpr int SLABS = D / 64, Q_SLAB = WGS * 64 * 128, SLAB = BN * 128, OPERAND = SLABS * SLAB, REGISTERS = WGS == 1 ? 240 : WGS == 2 ? 168 : 128;   // of each of three or four warps that share a file
static_assert(D % 64 == 0 && BN % 16 == 0 && (!TURNS || WGS == 2) && (!DEAL || WGS > 1), "tile");
#define INFINITY_F __uint_as_float(0x7f800000)

// An operand whose rows of 128 bytes run along N, and K over the rows, eight to a pattern; the next 64 of N lie SLAB bytes on.
DEV u64 turned_operand(u32 address) {
    return (u64)((address & 0x3ffff) >> 4) | ((u64)(SLAB >> 4) << 16) | (64ull << 32) | (1ull << 62);
}
template <int N> DEV void hold(float (&v)[N]) {   // nothing that reads these moves up over the wait in front
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(v[i])::"memory");
}
template <int COUNT> DEV void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <int COUNT> DEV void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }
DEV void arrive_at(int id, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
DEV float over_quad(float x, bool largest) {
#pragma unroll
    for (int i = 1; i < 4; i *= 2) { const float y = __shfl_xor_sync(~0u, x, i); x = largest ? fmaxf(x, y) : x + y; }
    return x;
}

extern "C" __global__ void __maxnreg__(REGISTERS) attention_long(const __grid_constant__ Args p) {
    extern __shared__ u8 raw[];
    const u32 q_at = (shared_address(raw) + 1023) & ~1023u, k_at = q_at + SLABS * Q_SLAB, v_at = k_at + STAGES * OPERAND;
    const u32 q_full = v_at + STAGES * OPERAND, k_full = q_full + 8, k_empty = k_full + STAGES * 8, v_full = k_empty + STAGES * 8, v_empty = v_full + STAGES * 8;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const bool one = elect();
    const int batch = blockIdx.y / p.heads, head = blockIdx.y % p.heads, row0 = blockIdx.x * WGS * 64, steps = (p.keys + BN - 1) / BN;
    if (threadIdx.x == WGS * 128) {
        map_prefetch(&p.q);
        map_prefetch(&p.k);
        map_prefetch(&p.v);
        barrier_init(q_full, 1);
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(k_full + 8 * i, 1);
            barrier_init(v_full + 8 * i, 1);
            barrier_init(k_empty + 8 * i, WGS * 4);
            barrier_init(v_empty + 8 * i, WGS * 4);
        }
        barrier_init_fence();
    }
    __syncthreads();
    let_next_start();

    if (warp >= WGS * 4) {  // ---- fetch
        if (DEAL) give_registers<24>();
        if (warp > WGS * 4) return;
        wait_for_previous();
        if (one) {
            const auto ask = [&](u32 to, const TensorMap* m, u32 bar, int from, int bytes) {
                barrier_expect(bar, SLABS * bytes);
#pragma unroll
                for (int s = 0; s < SLABS; ++s) load_box4(to + s * bytes, m, bar, s * 64, from, head, batch);
            };
            ask(q_at, &p.q, q_full, row0, Q_SLAB);
            for (int j = 0; j < steps; ++j) {
                const int slot = j % STAGES, before = (j / STAGES - 1) & 1;
                if (j >= STAGES) barrier_wait(k_empty + 8 * slot, before);
                ask(k_at + slot * OPERAND, &p.k, k_full + 8 * slot, j * BN, SLAB);
                if (j >= STAGES) barrier_wait(v_empty + 8 * slot, before);
                ask(v_at + slot * OPERAND, &p.v, v_full + 8 * slot, j * BN, SLAB);
            }
        }
        return;
    }
    // ---- multiply
    if (DEAL) take_registers<WGS == 2 ? 240 : 160>();
    const int group = warp / 4;
    float s[BN / 2], out[D / 2] = {}, top[2] = {-INFINITY_F, -INFINITY_F}, sum[2] = {0.f, 0.f}, by[2];
    u32 weights[BN / 16][4];
    const auto scores = [&](int j) {
        const u32 slot = j % STAGES, q = q_at + group * 64 * 128, k = k_at + slot * OPERAND;
        barrier_wait(k_full + 8 * slot, j / STAGES & 1);
        mma_begin();
#pragma unroll
        for (int i = 0; i < D / 16; ++i) wgmma(s, operand<128>(q + i / 4 * Q_SLAB + i % 4 * 32), operand<128>(k + i / 4 * SLAB + i % 4 * 32), i > 0);
        mma_commit();
    };
    const auto values = [&](int j) {
        const u32 slot = j % STAGES, v = v_at + slot * OPERAND;
        barrier_wait(v_full + 8 * slot, j / STAGES & 1);
        mma_begin();
#pragma unroll
        for (int i = 0; i < BN / 16; ++i) wgmma_transposed(out, weights[i], turned_operand(v + i * 16 * 128), 1);
        mma_commit();
    };
    const auto free_slot = [&](u32 bar, int j) { if (lane == 0) barrier_arrive(bar + j % STAGES * 8); };
    const auto softmax = [&](int j) {  // scores to powers of two relative to the largest so far; `by`: what earlier accumulators are to be multiplied by
        if (j == steps - 1 && p.keys % BN)
#pragma unroll
            for (int i = 0; i < BN / 2; ++i)
                if (j * BN + i / 4 * 8 + lane % 4 * 2 + i % 2 >= p.keys) s[i] = -INFINITY_F;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float high = top[half];
#pragma unroll
            for (int i = 0; i < BN / 2; i += 4) high = fmaxf(high, fmaxf(s[i + half * 2], s[i + half * 2 + 1]));
            high = over_quad(high, true);
            by[half] = exp2_fast((top[half] - high) * p.scale);
            top[half] = high;
            const float from = high * p.scale;
            float total = 0.f;
#pragma unroll
            for (int i = 0; i < BN / 2; i += 4)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    s[i + half * 2 + e] = exp2_fast(fmaf(s[i + half * 2 + e], p.scale, -from));
                    total += s[i + half * 2 + e];
                }
            sum[half] = fmaf(sum[half], by[half], total);
        }
    };
    const auto narrow = [&] {  // as the second product wants them
#pragma unroll
        for (int i = 0; i < BN / 16; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) weights[i][e] = pack(s[i * 8 + e * 2], s[i * 8 + e * 2 + 1]);
    };
    barrier_wait(q_full, 0);
    scores(0);
    mma_wait<0>();
    hold(s);
    free_slot(k_empty, 0);
    softmax(0);
    narrow();
    if (TURNS && group == 1) arrive_at(1, 256);
    for (int j = 1; j < steps; ++j) {
        if (TURNS) named_barrier(1 + group, 256);
        scores(j);
        values(j - 1);
        if (TURNS) arrive_at(2 - group, 256);
        mma_wait<1>();
        hold(s);
        free_slot(k_empty, j);
        softmax(j);
        mma_wait<0>();
        hold(out);
        free_slot(v_empty, j - 1);
#pragma unroll
        for (int i = 0; i < D / 2; ++i) out[i] *= by[i / 2 % 2];
        narrow();
    }
    values(steps - 1);
    mma_wait<0>();
    hold(out);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = row0 + group * 64 + warp % 4 * 16 + lane / 4 + half * 8;
        const float share = 1.f / over_quad(sum[half], false);
        u16* const to = reinterpret_cast<u16*>(p.out) + batch * p.batch_step + head * p.head_step + row * p.row_step;
#pragma unroll
        for (int j = 0; j < D / 8; j += 4) {
            u32 y[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) y[e] = pack(out[(j + e) * 4 + half * 2] * share, out[(j + e) * 4 + half * 2 + 1] * share);
            transpose_quad(y, lane);  // a lane of a quad gets eight elements
            if (row < p.rows) *reinterpret_cast<uint4*>(to + (j + lane % 4) * 8) = make_uint4(y[0], y[1], y[2], y[3]);
        }
    }
}
