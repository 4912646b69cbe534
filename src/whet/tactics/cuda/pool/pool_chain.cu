// Consecutive max poolings and their input, concatenated along channels; NHWC. A block keeps SIDE * 16 bytes of channels of one image in shared
// memory; windows are separable: rows, then columns. SIDE 2 writes whole memory sectors, SIDE 1 gives more blocks.
// Constants: TYPE (0 f32, 1 f16, 2 bf16, 3 i8, 4 u8), H, W, R (side of the window, odd), POOLS, SIDE, THREADS.
#include "common.cuh"

#include "arguments"

DEV u32 larger(u32 a, u32 b) {
    if (TYPE >= 3) return TYPE == 4 ? __vmaxu4(a, b) : __vmaxs4(a, b);
    if (TYPE == 0) return __float_as_uint(max_nan(__uint_as_float(a), __uint_as_float(b)));
    u32 r;
    if (TYPE == 1) asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    else asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
DEV uint4 larger(uint4 a, uint4 b) { return make_uint4(larger(a.x, b.x), larger(a.y, b.y), larger(a.z, b.z), larger(a.w, b.w)); }

extern "C" __global__ void __launch_bounds__(THREADS) pool_chain(const __grid_constant__ Args a) {
    extern __shared__ uint4 image[];
    constexpr int ALL = H * W * SIDE, LINE = W * SIDE;
    uint4* across = image + ALL;   // maxima along rows
    let_next_start();
    wait_for_previous();
    const long long first = (long long)blockIdx.y * H * W;
    const uint4* in = a.input + first * a.groups + blockIdx.x * SIDE;
    uint4* out = a.out + first * a.groups * (POOLS + 1) + blockIdx.x * SIDE;
    for (int i = threadIdx.x; i < ALL; i += THREADS) {
        const uint4 v = in[i / SIDE * a.groups + i % SIDE];
        image[i] = v;
        out[i / SIDE * a.groups * (POOLS + 1) + i % SIDE] = v;
    }
#pragma unroll 1
    for (int part = 1; part <= POOLS; ++part) {
        __syncthreads();
        for (int i = threadIdx.x; i < ALL; i += THREADS) {
            const int x = i / SIDE % W;
            uint4 most = image[i];
#pragma unroll
            for (int d = 1; d <= R / 2; ++d) {
                if (x >= d) most = larger(most, image[i - d * SIDE]);
                if (x + d < W) most = larger(most, image[i + d * SIDE]);
            }
            across[i] = most;
        }
        __syncthreads();
        for (int i = threadIdx.x; i < ALL; i += THREADS) {
            const int y = i / LINE;
            uint4 most = across[i];
#pragma unroll
            for (int d = 1; d <= R / 2; ++d) {
                if (y >= d) most = larger(most, across[i - d * LINE]);
                if (y + d < H) most = larger(most, across[i + d * LINE]);
            }
            image[i] = most;
            out[i / SIDE * a.groups * (POOLS + 1) + part * a.groups + i % SIDE] = most;
        }
    }
}
