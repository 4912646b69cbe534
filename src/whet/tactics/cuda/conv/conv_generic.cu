// Any convolution of two spatial axes (and any product with constant weights) without tensor cores: a thread computes one value, adjacent
// threads adjacent channels of a pixel. Weights [R][S][channels of a group][k] as f32. Constants: FROM, TO, ADD (types of input, result,
// residual), ACT. With FACTOR an integer accumulator, without its zero point, is multiplied by a factor per channel.
#include "common.cuh"
#include "vector.cuh"

#include "arguments"

extern "C" __global__ void __launch_bounds__(256) direct(const __grid_constant__ Args a) {
    let_next_start();
    const long long i = (long long)blockIdx.x * 256 + threadIdx.x;
    wait_for_previous();
    if (i >= a.count) return;
    const long long pixel = i / a.k, line = pixel / a.q;
    const int k = (int)(i - pixel * a.k), q = (int)(pixel - line * a.q), n = (int)(line / a.p), p = (int)(line - (long long)n * a.p);
    const int c0 = k / a.group_k * a.group_c;
    float sum = FACTOR ? 0.f : a.bias[k];
    for (int r = 0; r < a.r; ++r) {
        const int y = p * a.stride_h - a.pad_h + r * a.dil_h;
        if (y < 0 || y >= a.h) continue;
        for (int s = 0; s < a.s; ++s) {
            const int x = q * a.stride_w - a.pad_w + s * a.dil_w;
            if (x < 0 || x >= a.w) continue;
            const long long from = (((long long)n * a.h + y) * a.w + x) * a.c + c0;
            const float* weight = a.weights + (long long)(r * a.s + s) * a.group_c * a.k + k;
#pragma unroll 4
            for (int c = 0; c < a.group_c; ++c) sum += (load1<FROM>(a.input, from + c) - (FACTOR ? a.in_zero : 0.f)) * weight[(long long)c * a.k];
        }
    }
    if (FACTOR) sum = sum * a.factor[k] + a.bias[k];
    const float extra = a.has_residual ? load1<ADD>(a.residual, i) * (FACTOR ? a.add_step : 1.f) + (FACTOR ? a.add_shift : 0.f) : 0.f;
    const float v = activate<ACT>(a.has_residual == 1 ? sum + extra : sum, a.act);
    const float y = a.has_residual == 2 ? v + extra : v;
    store1<TO>(a.out, i, FACTOR ? y * a.per_step + a.zero : y);
}
