// Transposed convolution, channels last: out[y][x][k] = act(bias[k] + residual + sum over taps (r, s) that reach (y, x)), where tap (r, s) of input pixel
// (i, j) reaches y = i * stride_h - pad_h + r * dil_h, and x likewise.
// `gather`: columns [pixel][tap][k] hold each pixel's products with each tap (a matrix product made them); VEC output channels a thread.
// `direct`: one output a thread, products and all; any groups and types. Constants: TYPE (0 f32, 1 f16, 2 bf16), VEC (8 or 1), ACT.
#include "common.cuh"
#include "vector.cuh"

#include "arguments"

DEV float finish(const Args& a, float v, float r) {
    const float y = activate<ACT>(a.has_residual == 1 ? v + r : v, a.act);
    return a.has_residual == 2 ? y + r : y;
}
// The input row or column that tap `t` maps to output `to`, or -1.
DEV int source(int to, int t, int stride, int pad, int dil, int size) {
    const int at = to + pad - t * dil;
    if (at < 0 || at % stride) return -1;
    const int i = at / stride;
    return i < size ? i : -1;
}

extern "C" __global__ void __launch_bounds__(256) gather(const __grid_constant__ Args a) {
    let_next_start();
    const long long i = (long long)blockIdx.x * 256 + threadIdx.x;
    wait_for_previous();
    if (i >= a.count) return;
    const int groups = a.k / VEC;
    const long long pixel = i / groups, line = pixel / a.q;
    const int k = (int)(i - pixel * groups) * VEC, x = (int)(pixel - line * a.q), n = (int)(line / a.p), y = (int)(line - (long long)n * a.p);
    float sum[VEC];
#pragma unroll
    for (int e = 0; e < VEC; ++e) sum[e] = a.bias[k + e];
    for (int r = 0; r < a.r; ++r) {
        const int iy = source(y, r, a.stride_h, a.pad_h, a.dil_h, a.h);
        if (iy < 0) continue;
        for (int s = 0; s < a.s; ++s) {
            const int ix = source(x, s, a.stride_w, a.pad_w, a.dil_w, a.w);
            if (ix < 0) continue;
            const long long from = ((((long long)n * a.h + iy) * a.w + ix) * (a.r * a.s) + r * a.s + s) * a.k + k;
            if (VEC == 8) {
                const Vec8 v = load8<TYPE>(a.input, from);
#pragma unroll
                for (int e = 0; e < VEC; ++e) sum[e] += v.v[e % 8];
            } else
                sum[0] += load1<TYPE>(a.input, from);
        }
    }
    if (VEC == 8) {
        Vec8 other = {}, v;
        if (a.has_residual) other = load8<TYPE>(a.residual, i * 8);
#pragma unroll
        for (int e = 0; e < 8; ++e) v.v[e] = finish(a, sum[e % VEC], other.v[e]);
        store8<TYPE>(a.out, i * 8, v);
    } else
        store1<TYPE>(a.out, i, finish(a, sum[0], a.has_residual ? load1<TYPE>(a.residual, i) : 0.f));
}

extern "C" __global__ void __launch_bounds__(256) direct(const __grid_constant__ Args a) {
    let_next_start();
    const long long i = (long long)blockIdx.x * 256 + threadIdx.x;
    wait_for_previous();
    if (i >= a.count) return;
    const long long pixel = i / a.k, line = pixel / a.q;
    const int k = (int)(i - pixel * a.k), x = (int)(pixel - line * a.q), n = (int)(line / a.p), y = (int)(line - (long long)n * a.p);
    const int c0 = k / a.group_k * a.group_c;
    float sum = a.bias[k];
    for (int r = 0; r < a.r; ++r) {
        const int iy = source(y, r, a.stride_h, a.pad_h, a.dil_h, a.h);
        if (iy < 0) continue;
        for (int s = 0; s < a.s; ++s) {
            const int ix = source(x, s, a.stride_w, a.pad_w, a.dil_w, a.w);
            if (ix < 0) continue;
            const long long from = (((long long)n * a.h + iy) * a.w + ix) * a.c + c0;
            const float* weight = a.weights + (long long)(r * a.s + s) * a.group_c * a.k + k;
#pragma unroll 4
            for (int c = 0; c < a.group_c; ++c) sum += load1<TYPE>(a.input, from + c) * weight[(long long)c * a.k];
        }
    }
    store1<TYPE>(a.out, i, finish(a, sum, a.has_residual ? load1<TYPE>(a.residual, i) : 0.f));
}
