// Reductions over any axes of a row-major tensor: a warp makes one value where many are added, a thread where few are.
// Constants: TYPE, OP (0 sum, 1 mean, 2 max, 3 min, 4 product, 5 sum of squares, 6 L2, 7 L1, 8 log of the sum, 9 log of the sum of exponentials),
// T (threads of a result: 1, 32, 256).
#include "common.cuh"
#include "vector.cuh"
#define INF __int_as_float(0x7f800000)

struct Args {
    const u8* in;
    u8* out;
    long long results;
    long long kept_stride[4], over_stride[4];   // elements; outermost first
    u32 kept[4], over[4];
    u32 count;                                  // elements of one result
};

DEV float join(float a, float b) {
    if (OP == 2 || OP == 9) return max_nan(a, b);
    if (OP == 3) return min_nan(a, b);
    if (OP == 4) return a * b;
    return a + b;
}
DEV float seen(float x, float top) {
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
    const long long from = place((u32)i, p.kept, p.kept_stride);
    float v = nothing();
    for (u32 k = lane; k < p.count; k += T) v = join(v, seen(load1<TYPE>(p.in, from + place(k, p.over, p.over_stride)), 0.f));
    v = together<0>(v);
    if (OP == 9) {
        const float top = isinf(v) ? 0.f : v;   // infinite values count as they are
        v = 0.f;
        for (u32 k = lane; k < p.count; k += T) v += expf(load1<TYPE>(p.in, from + place(k, p.over, p.over_stride)) - top);
        v = logf(together<1>(v)) + top;
    }
    if (OP == 1) v /= p.count;
    if (OP == 6) v = sqrtf(v);
    if (OP == 8) v = logf(v);
    if (lane == 0) store1<TYPE>(p.out, i, v);
}
