// Depthwise convolution of NHWC tensors: a thread makes WIDE neighbouring pixels of eight channels; weights [R][S][c] as f32.
// Constants: TYPE, R, S, STRIDE (along w), WIDE, ACT.
#include "common.cuh"
#include "vector.cuh"

struct Args {
    const u8* in;
    const float* weights;
    const float* bias;
    const u8* residual;
    u8* out;
    int n, h, w, c, p, q, stride_h, pad_h, pad_w, dil_h, dil_w;
    int has_residual;   // 1: added before the activation, 2: after it
    Act act;
};

extern "C" __global__ void __launch_bounds__(128) depthwise(const __grid_constant__ Args a) {
    const int groups = a.c / 8, strips = (a.q + WIDE - 1) / WIDE;
    const u32 total = (u32)a.n * a.p * strips * groups, i = blockIdx.x * 128 + threadIdx.x;  // the host refuses more
    const u32 strip = i / groups, line = strip / strips;                                      // line: n * p + row
    const int g = i - strip * groups, q0 = (strip - line * strips) * WIDE, n = line / a.p, row = line - n * a.p;
    let_next_start();
    Vec8 sum[WIDE];
    if (i < total) {
        const Vec8 bias = load8<0>(reinterpret_cast<const u8*>(a.bias), g * 8);
#pragma unroll
        for (int k = 0; k < WIDE; ++k) sum[k] = bias;
    }
    wait_for_previous();
    if (i >= total) return;
    constexpr int SPAN = (WIDE - 1) * STRIDE + S;  // input pixels of a strip, without dilation
#pragma unroll
    for (int r = 0; r < R; ++r) {
        const int y = row * a.stride_h - a.pad_h + r * a.dil_h;
        if (y < 0 || y >= a.h) continue;
        const long long start = ((long long)n * a.h + y) * a.w;
        Vec8 weight[S];
#pragma unroll
        for (int s = 0; s < S; ++s) weight[s] = load8<0>(reinterpret_cast<const u8*>(a.weights), (long long)(r * S + s) * a.c + g * 8);
        if (a.dil_w == 1) {
#pragma unroll
            for (int j = 0; j < SPAN; ++j) {
                const int x = q0 * STRIDE - a.pad_w + j;
                if (x < 0 || x >= a.w) continue;
                const Vec8 v = load8<TYPE>(a.in, (start + x) * a.c + g * 8);
#pragma unroll
                for (int k = 0; k < WIDE; ++k) {
                    const int s = j - k * STRIDE;
                    if (s >= 0 && s < S)
#pragma unroll
                        for (int e = 0; e < 8; ++e) sum[k].v[e] += v.v[e] * weight[s].v[e];
                }
            }
        } else {
#pragma unroll
            for (int k = 0; k < WIDE; ++k)
#pragma unroll
                for (int s = 0; s < S; ++s) {
                    const int x = (q0 + k) * STRIDE - a.pad_w + s * a.dil_w;
                    if (x < 0 || x >= a.w) continue;
                    const Vec8 v = load8<TYPE>(a.in, (start + x) * a.c + g * 8);
#pragma unroll
                    for (int e = 0; e < 8; ++e) sum[k].v[e] += v.v[e] * weight[s].v[e];
                }
        }
    }
#pragma unroll
    for (int k = 0; k < WIDE; ++k) {
        if (q0 + k >= a.q) break;
        const long long at = ((long long)line * a.q + q0 + k) * a.c + g * 8;
        Vec8 r;
        if (a.has_residual) r = load8<TYPE>(a.residual, at);
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            const float v = activate<ACT>(a.has_residual == 1 ? sum[k].v[e] + r.v[e] : sum[k].v[e], a.act);
            sum[k].v[e] = a.has_residual == 2 ? v + r.v[e] : v;
        }
        store8<TYPE>(a.out, at, sum[k]);
    }
}
