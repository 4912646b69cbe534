// Resampling of two adjacent axes: out[o][a][b][i] = sum over taps of weight_a[a][s] * weight_b[b][t] * in[o][at_a[a][s]][at_b[b][t]][i].
// An unchanged axis has one index and one tap. A first tap of -1: the output is outside and takes the value `beyond`.
// Constants: TYPE (0 f32, 1 f16, 2 bf16), VEC (8: groups of eight along i, or 1).
#include "common.cuh"
#include "vector.cuh"

#include "arguments"

extern "C" __global__ void __launch_bounds__(256) resize(const __grid_constant__ Args p) {
    let_next_start();
    const u32 index = blockIdx.x * 256 + threadIdx.x;  // fewer than 2^31: divisions of 64 bits cost more than all else here
    wait_for_previous();
    if (index >= p.count) return;
    const u32 line = index / p.inner, plane = line / p.out_b, outer = plane / p.out_a;
    const u32 i = index - line * p.inner, b = line - plane * p.out_b, a = plane - outer * p.out_a;
    const int *at_a = p.at_a + a * p.taps_a, *at_b = p.at_b + b * p.taps_b;
    const float *weight_a = p.weight_a + a * p.taps_a, *weight_b = p.weight_b + b * p.taps_b;
    float sum[VEC] = {};
    if (at_a[0] < 0 || at_b[0] < 0)
#pragma unroll
        for (int e = 0; e < VEC; ++e) sum[e] = p.beyond;
    else
        for (int s = 0; s < p.taps_a; ++s) {
            const u32 from = (outer * p.in_a + at_a[s]) * p.in_b;
            const float by = weight_a[s];
            for (int t = 0; t < p.taps_b; ++t) {
                const u32 place = ((from + at_b[t]) * p.inner + i) * VEC;
                const float w = by * weight_b[t];
                if (VEC == 8) {
                    const Vec8 x = load8<TYPE>(p.input, place);
#pragma unroll
                    for (int e = 0; e < VEC; ++e) sum[e] += w * x.v[e % 8];
                } else
                    sum[0] += w * load1<TYPE>(p.input, place);
            }
        }
    if (VEC == 8) {
        Vec8 y;
#pragma unroll
        for (int e = 0; e < 8; ++e) y.v[e] = sum[e % VEC];
        store8<TYPE>(p.out, index * 8, y);
    } else
        store1<TYPE>(p.out, index, sum[0]);
}
