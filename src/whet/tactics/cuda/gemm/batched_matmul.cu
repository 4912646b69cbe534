// Products of stacks of matrices that are both computed at run time: out[z] = act((a[z] @ b[z]) * scale), on tensor cores (mma.sync).
// Tiles of 64 x 64, four warps of 32 x 32; the next tiles are fetched into registers while these are multiplied.
// Constants: TYPE (1 f16, 2 bf16), BF16, OUT (as TYPE, or 0 f32), WIDE_A, WIDE_B (rows are multiples of eight elements), ACT.
#include "common.cuh"
#include "vector.cuh"
#include "mma.cuh"

#include "arguments"
constexpr int PITCH_A = 40, PITCH_B = 72;   // elements: rows shifted against each other, so that eight rows meet no bank twice

DEV uint4 fetch(const u8* base, long long at, int inside, bool wide) {   // eight elements, zeros from `inside` on
    const u16* p = reinterpret_cast<const u16*>(base) + at;
    if (inside <= 0) return make_uint4(0, 0, 0, 0);
    if (wide && inside >= 8) return *reinterpret_cast<const uint4*>(p);
    u32 w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i] = (2 * i < inside ? p[2 * i] : 0) | (2 * i + 1 < inside ? (u32)p[2 * i + 1] << 16 : 0u);
    return make_uint4(w[0], w[1], w[2], w[3]);
}

extern "C" __global__ void __launch_bounds__(128) bmm(const __grid_constant__ Args p) {
    __shared__ alignas(16) u16 tile_a[64 * PITCH_A];
    __shared__ alignas(16) u16 tile_b[32 * PITCH_B];
    let_next_start();
    wait_for_previous();
    const int t = threadIdx.x, lane = t % 32, warp = t / 32;
    const int m0 = blockIdx.y * 64, n0 = blockIdx.x * 64, wm = warp / 2 * 32, wn = warp % 2 * 32;
    const long long a0 = blockIdx.z * p.a_step, b0 = blockIdx.z * p.b_step;
    uint4 next_a[2], next_b[2];
    const auto ask = [&](int k0) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {   // a: 64 rows of 4 groups of eight; b: 32 rows of 8 groups of eight
            const int c = t + i * 128, ar = c / 4, ak = k0 + c % 4 * 8, bk = k0 + c / 8, bn = n0 + c % 8 * 8;
            next_a[i] = fetch(p.a, a0 + (long long)(m0 + ar) * p.k + ak, m0 + ar < p.m ? p.k - ak : 0, WIDE_A);
            next_b[i] = fetch(p.b, b0 + (long long)bk * p.n + bn, bk < p.k ? p.n - bn : 0, WIDE_B);
        }
    };
    float accumulators[2][4][4] = {};
    ask(0);
    for (int k0 = 0; k0 < p.k; k0 += 32) {
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int c = t + i * 128;
            *reinterpret_cast<uint4*>(tile_a + c / 4 * PITCH_A + c % 4 * 8) = next_a[i];
            *reinterpret_cast<uint4*>(tile_b + c / 8 * PITCH_B + c % 8 * 8) = next_b[i];
        }
        __syncthreads();
        if (k0 + 32 < p.k) ask(k0 + 32);
#pragma unroll
        for (int kk = 0; kk < 32; kk += 16) {
            u32 a[2][4], b[2][4];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                matrices(a[i], shared_address(tile_a + (wm + i * 16 + lane % 16) * PITCH_A + kk + lane / 16 * 8), false);
                matrices(b[i], shared_address(tile_b + (kk + lane % 16) * PITCH_B + wn + i * 16 + lane / 16 * 8), true);
            }
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) multiply(accumulators[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
        }
    }
    const long long out = (long long)blockIdx.z * p.m * p.n;
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int row = m0 + wm + i * 16 + lane / 4 + e / 2 * 8, column = n0 + wn + j * 8 + lane % 4 * 2 + e % 2;
                if (row < p.m && column < p.n) store1<OUT>(p.out, out + (long long)row * p.n + column, activate<ACT>(accumulators[i][j][e] * p.scale, p.act));
            }
}

// The same in f32, one value a thread: slow, always there.
extern "C" __global__ void __launch_bounds__(256) plain(const __grid_constant__ Args p) {
    let_next_start();
    wait_for_previous();
    const int column = blockIdx.x * 32 + threadIdx.x % 32, row = blockIdx.y * 8 + threadIdx.x / 32;
    if (column >= p.n || row >= p.m) return;
    const long long a = blockIdx.z * p.a_step + (long long)row * p.k, b = blockIdx.z * p.b_step + column;
    float sum = 0.f;
    for (int k = 0; k < p.k; ++k) sum += load1<TYPE>(p.a, a + k) * load1<TYPE>(p.b, b + (long long)k * p.n);
    store1<OUT>(p.out, ((long long)blockIdx.z * p.m + row) * p.n + column, activate<ACT>(sum * p.scale, p.act));
}
