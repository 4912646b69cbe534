// Rows of a row-major tensor, each seen whole: softmax, log-softmax, layer, group, instance and root-mean-square norms, rows of unit length.
// Constants: TYPE, OP (0 softmax, 1 log-softmax, 2 mean and variance, 3 root mean square, 4 Euclidean norm of at least epsilon), T (threads of a row: 4 to 32 lanes of a warp, 128, 512),
// ITEMS (groups of eight that a thread keeps in registers; 0: rows too long for that are read again), WIDE (rows are multiples of eight), EARLY (a scale
// and, if 2, a shift for each element of a row, which a thread loads before the kernel in front has ended; needs ITEMS and WIDE), STORED (the 8-bit type, as in
// vector.cuh, in which results are stored in `quantized`; 0: none), KEEPS (results are stored in `out` as TYPE).
#include "common.cuh"
#include "vector.cuh"
#define INF __int_as_float(0x7f800000)

#include "arguments"

// Over the threads of a row. OP 0: sum, 1: largest, NaN wins.
template <int MAX> DEV float over_row(float v) {
#pragma unroll
    for (int d = T < 32 ? T / 2 : 16; d; d >>= 1) {
        const float o = __shfl_xor_sync(~0u, v, d);
        v = MAX ? max_nan(v, o) : v + o;
    }
    if (T > 32) {
        __shared__ float parts[32];
        __syncthreads();   // those of the sum before have been read
        if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = v;
        __syncthreads();
        v = parts[0];
#pragma unroll
        for (int w = 1; w < T / 32; ++w) v = MAX ? max_nan(v, parts[w]) : v + parts[w];
    }
    return v;
}

DEV Vec8 load_part(const Args& p, long long row, int at) {
    if (WIDE) return load8<TYPE>(p.input, row * p.length + at);
    Vec8 r;
#pragma unroll
    for (int e = 0; e < 8; ++e) r.v[e] = at + e < p.length ? load1<TYPE>(p.input, row * p.length + at + e) : 0.f;
    return r;
}

// Stores eight results of a row from element `at` of the tensor on, or the first `count` of them.
DEV void store_part(const Args& p, long long at, const Vec8& y, int count) {
    Vec8 steps;
    if (STORED)
#pragma unroll
        for (int e = 0; e < 8; ++e) steps.v[e] = in_steps<STORED>(y.v[e], p.per_step, p.zero);
    if (WIDE) {
        if (KEEPS) store8<TYPE>(p.out, at, y);
        if (STORED) store8<STORED>(p.quantized, at, steps);
    } else
#pragma unroll
        for (int e = 0; e < 8; ++e)
            if (e < count) {
                if (KEEPS) store1<TYPE>(p.out, at + e, y.v[e]);
                if (STORED) store1<STORED>(p.quantized, at + e, steps.v[e]);
            }
}

// Calls f(first element of eight, the eight) for this thread's part of the row.
#if ITEMS
#define FOR_PART(AT, X) \
    _Pragma("unroll") for (int i = 0; i < ITEMS; ++i) if (const int AT = (i * T + lane) * 8; AT < p.length) if (Vec8& X = kept[i]; true)
#else
#define FOR_PART(AT, X) for (int AT = lane * 8; AT < p.length; AT += T * 8) if (Vec8 X = load_part(p, row, AT); true)
#endif

extern "C" __global__ void __launch_bounds__(T > 128 ? T : 128) normalize(const __grid_constant__ Args p) {
    let_next_start();
    const int lane = threadIdx.x % T;
    const long long own = (long long)blockIdx.x * (blockDim.x / T) + threadIdx.x / T;
    const bool present = own < p.rows;
    if (T >= 32 && !present) return;   // whole warps leave; with T > 32 a block has one row
    const long long row = present ? own : p.rows - 1;
#if EARLY
    Vec8 scales[ITEMS], shifts[EARLY > 1 ? ITEMS : 1];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
        if (const int at = (i * T + lane) * 8; at < p.length) {
            scales[i] = load8<0>(reinterpret_cast<const u8*>(p.scale), at);
            if (EARLY > 1) shifts[i] = load8<0>(reinterpret_cast<const u8*>(p.shift), at);
        }
#endif
    wait_for_previous();
#if ITEMS
    Vec8 kept[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) if ((i * T + lane) * 8 < p.length) kept[i] = load_part(p, row, (i * T + lane) * 8);
#endif
    float middle = 0.f, factor = 1.f;
    if (OP < 2) {
        float top = -INF, sum = 0.f;
        FOR_PART(at, x)
#pragma unroll
            for (int e = 0; e < 8; ++e) if (at + e < p.length) top = max_nan(top, x.v[e]);
        top = over_row<1>(top);
        FOR_PART(at, x)
#pragma unroll
            for (int e = 0; e < 8; ++e) if (at + e < p.length) sum += expf(x.v[e] - top);
        sum = over_row<0>(sum);
        middle = top;
        factor = OP == 0 ? 1.f / sum : logf(sum);
    } else {
        float sum = 0.f, square = 0.f;
        if (OP == 2) {
            FOR_PART(at, x)
#pragma unroll
                for (int e = 0; e < 8; ++e) if (at + e < p.length) sum += x.v[e];
            middle = over_row<0>(sum) / p.length;
        }
        FOR_PART(at, x)
#pragma unroll
            for (int e = 0; e < 8; ++e) if (at + e < p.length) square += (x.v[e] - middle) * (x.v[e] - middle);
        factor = OP == 4 ? 1.f / max_nan(sqrtf(over_row<0>(square)), p.epsilon) : 1.f / sqrtf(over_row<0>(square) / p.length + p.epsilon);
    }
#if EARLY
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
        if (const int at = (i * T + lane) * 8; at < p.length && present) {
            Vec8 y;
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                const float x = (kept[i].v[e] - middle) * factor;
                y.v[e] = EARLY > 1 ? fmaf(x, scales[i].v[e], shifts[i].v[e]) : x * scales[i].v[e];
            }
            store_part(p, row * p.length + at, y, 8);
        }
#else
    if (!present) return;
    const int first = (int)(row % p.groups) * (p.length / p.per);
    FOR_PART(at, x) {
        Vec8 y;
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            if (OP == 0) y.v[e] = expf(x.v[e] - middle) * factor;
            else if (OP == 1) y.v[e] = x.v[e] - middle - factor;
            else {
                y.v[e] = (x.v[e] - middle) * factor;
                if (at + e < p.length) {
                    const int where = first + (p.per == 1 ? at + e : (at + e) / p.per);
                    if (p.scale) y.v[e] *= p.scale[where];
                    if (p.shift) y.v[e] += p.shift[where];
                }
            }
        }
        store_part(p, row * p.length + at, y, p.length - at);
    }
#endif
}

// Softmax along an axis that is not the last: one line per thread, adjacent lines in adjacent threads.

extern "C" __global__ void __launch_bounds__(128) lines(const __grid_constant__ Lines p) {
    let_next_start();
    wait_for_previous();
    const long long i = (long long)blockIdx.x * 128 + threadIdx.x;
    if (i >= p.count) return;
    const long long from = i / p.inner * p.length * p.inner + i % p.inner;
    float top = -INF, sum = 0.f;
    for (int k = 0; k < p.length; ++k) top = max_nan(top, load1<TYPE>(p.input, from + (long long)k * p.inner));
    for (int k = 0; k < p.length; ++k) sum += expf(load1<TYPE>(p.input, from + (long long)k * p.inner) - top);
    const float factor = OP == 0 ? 1.f / sum : logf(sum);
    for (int k = 0; k < p.length; ++k) {
        const long long at = from + (long long)k * p.inner;
        const float x = load1<TYPE>(p.input, at) - top;
        store1<TYPE>(p.out, at, OP == 0 ? expf(x) * factor : x - factor);
    }
}
