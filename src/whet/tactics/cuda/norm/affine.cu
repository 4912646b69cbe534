// out = act(in * scale[channel] + shift[channel]), a batch normalization. Constants: TYPE (0 f32, 1 f16, 2 bf16), ACT,
// LAST (channels last, in groups of eight), VEC (8: a group of eight values a thread; with LAST 0 they have one channel).
#include "common.cuh"
#include "vector.cuh"

#include "arguments"

extern "C" __global__ void __launch_bounds__(256) affine(const __grid_constant__ Args p) {
    let_next_start();
    const long long i = (long long)blockIdx.x * 256 + threadIdx.x;
    const bool inside = i < p.count;
    const int channel = inside ? (int)(LAST ? i % p.channels * 8 : i / p.inner % p.channels) : 0;
    float scale[8], shift[8];   // constants: read before the preceding kernel ends
#pragma unroll
    for (int e = 0; e < 8; ++e) {
        scale[e] = LAST ? p.scale[channel + e] : p.scale[channel];
        shift[e] = LAST ? p.shift[channel + e] : p.shift[channel];
    }
    wait_for_previous();
    if (!inside) return;
    if (VEC == 8) {
        Vec8 x = load8<TYPE>(p.input, i * 8);
#pragma unroll
        for (int e = 0; e < 8; ++e) x.v[e] = activate<ACT>(fmaf(x.v[e], scale[e], shift[e]), p.act);
        store8<TYPE>(p.out, i * 8, x);
    } else
        store1<TYPE>(p.out, i, activate<ACT>(fmaf(load1<TYPE>(p.input, i), scale[0], shift[0]), p.act));
}
