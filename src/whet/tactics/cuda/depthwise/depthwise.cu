// Depthwise convolution of NHWC tensors: a thread makes TALL x WIDE neighbouring pixels of eight channels; weights [R][S][c] as f32, kept
// in registers over the rows where they are few. Constants: FROM, TO (types; the residual has that of the result), R, S, STRIDE (along w),
// WIDE, TALL, ACT. 8-bit input: pixels outside are its zero point (fill), which the bias takes back; 8-bit results: steps and a zero point.
#include "common.cuh"
#include "vector.cuh"

#include "arguments"

constexpr bool KEEP = TALL > 1 && R * S <= 9;  // for one row it costs more (registers, so threads in flight) than it saves
constexpr int SPAN = (WIDE - 1) * STRIDE + S;  // input pixels of a strip, without dilation

DEV Vec8 weights_at(const Args& a, int tap, int channel) {
    return load8<0>(reinterpret_cast<const u8*>(a.weights), (long long)tap * a.c + channel);
}
DEV void accumulate(Vec8& sum, const Vec8& v, const Vec8& weight) {
#pragma unroll
    for (int e = 0; e < 8; ++e) sum.v[e] += v.v[e] * weight.v[e];
}

extern "C" __global__ void __launch_bounds__(128) depthwise(const __grid_constant__ Args a) {
    const u32 groups = a.c / 8, strips = (a.q + WIDE - 1) / WIDE, bands = (a.p + TALL - 1) / TALL;
    const u32 total = (u32)a.n * bands * strips * groups, i = blockIdx.x * 128 + threadIdx.x;  // the host refuses more
    const u32 strip = i / groups, line = strip / strips;
    const int channel = (i - strip * groups) * 8, q0 = (strip - line * strips) * WIDE, n = line / bands, first = (line - n * bands) * TALL;
    let_next_start();
    Vec8 bias, kept[KEEP ? R * S : 1];
    if (i < total) {
        bias = load8<0>(reinterpret_cast<const u8*>(a.bias), channel);
        if (KEEP)
#pragma unroll
            for (int k = 0; k < R * S; ++k) kept[KEEP ? k : 0] = weights_at(a, k, channel);
    }
    wait_for_previous();
    if (i >= total) return;
    for (int row = first; row < min(first + TALL, a.p); ++row) {
        Vec8 sum[WIDE];
#pragma unroll
        for (int k = 0; k < WIDE; ++k) sum[k] = bias;
        if (a.dil_w == 1) {  // all pixels are asked for before the first is used; outside of the image they are zero
            Raw<FROM> raw[R][SPAN];
#pragma unroll
            for (int r = 0; r < R; ++r) {
                const int y = row * a.stride_h - a.pad_h + r * a.dil_h;
                const long long start = (((long long)n * a.h + y) * a.w) * a.c + channel;
#pragma unroll
                for (int j = 0; j < SPAN; ++j) {
                    const int x = q0 * STRIDE - a.pad_w + j;
                    raw[r][j] = load_raw<FROM>(a.input, start + x * a.c, (u32)y < (u32)a.h && (u32)x < (u32)a.w, a.fill);
                }
            }
#pragma unroll
            for (int r = 0; r < R; ++r) {
                Vec8 weight[S];
#pragma unroll
                for (int s = 0; s < S; ++s) weight[s] = KEEP ? kept[KEEP ? r * S + s : 0] : weights_at(a, r * S + s, channel);
#pragma unroll
                for (int j = 0; j < SPAN; ++j) {
                    const Vec8 v = unpack_raw<FROM>(raw[r][j]);
#pragma unroll
                    for (int k = 0; k < WIDE; ++k)
                        if (j - k * STRIDE >= 0 && j - k * STRIDE < S) accumulate(sum[k], v, weight[j - k * STRIDE]);
                }
            }
        } else
#pragma unroll
        for (int r = 0; r < R; ++r) {
            const int y = row * a.stride_h - a.pad_h + r * a.dil_h;
            if (y < 0 || y >= a.h) continue;
            const u8* start = a.input + (((long long)n * a.h + y) * a.w * a.c + channel) * Element<FROM>::BYTES;
#pragma unroll
            for (int k = 0; k < WIDE; ++k)
#pragma unroll
                for (int s = 0; s < S; ++s) {
                    const int x = (q0 + k) * STRIDE - a.pad_w + s * a.dil_w;
                    if (x >= 0 && x < a.w) accumulate(sum[k], load8<FROM>(start, x * a.c), weights_at(a, r * S + s, channel));
                }
        }
#pragma unroll
        for (int k = 0; k < WIDE; ++k) {
            if (q0 + k >= a.q) break;
            const long long at = (((long long)n * a.p + row) * a.q + q0 + k) * a.c + channel;
            Vec8 r;
            if (a.has_residual) r = load8<TO>(a.residual, at);
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                const float v = activate<ACT>(a.has_residual == 1 ? sum[k].v[e] + r.v[e] : sum[k].v[e], a.act);
                sum[k].v[e] = (a.has_residual == 2 ? v + r.v[e] : v) * a.per_step + a.zero;
            }
            store8<TO>(a.out, at, sum[k]);
        }
    }
}
