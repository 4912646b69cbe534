// Reductions over any axes of a row-major tensor: a warp or a block per result for many elements, a thread for few.
// Few results of many elements: `shares` of the elements (blockIdx.y) give f32 accumulators, which a second launch joins.
// Constants: TYPE, TO (types of input and result), OP (0 sum, 1 mean, 2 max, 3 min, 4 product, 5 sum of squares, 6 L2, 7 L1, 8 log of the sum, 9 log of the sum of exponentials),
// T (threads of a result: 1, 32, 256), WIDE (eight neighbouring elements are read at once: 1 all of one result, 2 of eight neighbouring results; the
// last size and stride count eights there), PART (1 the results are accumulators of a share, 2 the input is such accumulators).
#include "common.cuh"
#include "vector.cuh"
#define INF __int_as_float(0x7f800000)

#include "arguments"
constexpr int EACH = WIDE ? 8 : 1, RESULTS = WIDE == 2 ? 8 : 1;

DEV float join(float a, float b) {
    if (OP == 2 || OP == 9) return max_nan(a, b);
    if (OP == 3) return min_nan(a, b);
    if (OP == 4) return a * b;
    return a + b;
}
DEV float seen(float x, float top) {
    if (PART == 2) return x;
    if (OP == 5 || OP == 6) return x * x;
    if (OP == 7) return fabsf(x);
    return x;
}
DEV float nothing() { return OP == 2 || OP == 9 ? -INF : OP == 3 ? INF : OP == 4 ? 1.f : 0.f; }
DEV long long place(u32 i, const u32 (&size)[4], const long long (&stride)[4]) {
    long long at = 0;
#pragma unroll
    for (int d = 3; d >= 0; --d) {
        const u32 next = i / size[d];
        at += (i - next * size[d]) * stride[d];
        i = next;
    }
    return at;
}
DEV void read(float (&x)[EACH], const Args& p, long long at) {
    if (WIDE) {
        const Vec8 y = load8<TYPE>(p.input, at);
#pragma unroll
        for (int e = 0; e < EACH; ++e) x[e] = y.v[e];
    } else x[0] = load1<TYPE>(p.input, at);
}
template <int SUM> DEV float together(float v) {
    if (T >= 32) {
#pragma unroll
        for (int d = 16; d; d >>= 1) { const float o = __shfl_xor_sync(~0u, v, d); v = SUM ? v + o : join(v, o); }
    }
    if (T > 32) {
        __shared__ float parts[32];
        __syncthreads();
        if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = v;
        __syncthreads();
        v = parts[0];
        for (int w = 1; w < T / 32; ++w) v = SUM ? v + parts[w] : join(v, parts[w]);
    }
    return v;
}

extern "C" __global__ void __launch_bounds__(256) reduce(const __grid_constant__ Args p) {
    let_next_start();
    wait_for_previous();
    const int lane = threadIdx.x % T;
    const long long i = (long long)blockIdx.x * (256 / T) + threadIdx.x / T;
    if (i >= p.results) return;
    const u32 first = blockIdx.y * p.share + lane, last = min(p.count, (blockIdx.y + 1) * p.share);
    const long long from = place((u32)i, p.kept, p.kept_stride);
    float v[RESULTS], x[EACH];
#pragma unroll
    for (int r = 0; r < RESULTS; ++r) v[r] = nothing();
    for (u32 k = first; k < last; k += T) {
        read(x, p, from + place(k, p.over, p.over_stride));
#pragma unroll
        for (int e = 0; e < EACH; ++e) v[e % RESULTS] = join(v[e % RESULTS], seen(x[e], 0.f));
    }
#pragma unroll
    for (int r = 0; r < RESULTS; ++r) v[r] = together<0>(v[r]);
    if (OP == 9) {
        float top[RESULTS];
#pragma unroll
        for (int r = 0; r < RESULTS; ++r) { top[r] = isinf(v[r]) ? 0.f : v[r]; v[r] = 0.f; }   // infinite values count as they are
        for (u32 k = first; k < last; k += T) {
            read(x, p, from + place(k, p.over, p.over_stride));
#pragma unroll
            for (int e = 0; e < EACH; ++e) v[e % RESULTS] += expf(x[e] - top[e % RESULTS]);
        }
#pragma unroll
        for (int r = 0; r < RESULTS; ++r) v[r] = logf(together<1>(v[r])) + top[r];
    }
#pragma unroll
    for (int r = 0; r < RESULTS; ++r) {
        if (PART == 1) continue;
        if (OP == 1) v[r] /= p.elements;
        if (OP == 6) v[r] = sqrtf(v[r]);
        if (OP == 8) v[r] = logf(v[r]);
    }
    if (lane) return;
    const long long to = (blockIdx.y * p.results + i) * RESULTS;
    if (WIDE == 2) {
        Vec8 y;
#pragma unroll
        for (int e = 0; e < 8; ++e) y.v[e] = v[e % RESULTS];
        store8<TO>(p.out, to, y);
    } else store1<TO>(p.out, to, v[0]);
}
