// Between row-major (NCHW) and channels-last (NHWC), and between types. Constants: FROM, TO (types as in vector.cuh), AFFINE (0 no,
// 1 quantize: round(x * step) + zero, NaN becomes 0 (e4m3: x * step, which storing rounds and saturates, NaN stays); 2 dequantize: (x - zero) * step).
#include "common.cuh"
#include "vector.cuh"

#include "arguments"
#ifndef AFFINE
#define AFFINE 0
#endif
DEV float affine(const Args& p, float x) {
    if (AFFINE == 1) return in_steps<TO>(x, p.step, p.zero);
    return AFFINE == 2 ? (x - p.zero) * p.step : x;
}

extern "C" __global__ void __launch_bounds__(256) convert(const __grid_constant__ Args p) {  // same order, another type
    let_next_start();
    wait_for_previous();
    const long long at = ((long long)blockIdx.x * 256 + threadIdx.x) * 8;
    if (at + 8 <= p.count) {
        Vec8 v = load8<FROM>(p.input, at);
#pragma unroll
        for (int e = 0; e < 8; ++e) v.v[e] = affine(p, v.v[e]);
        store8<TO>(p.out, at, v);
    } else
        for (long long i = at; i < p.count; ++i) store1<TO>(p.out, i, affine(p, load1<FROM>(p.input, i)));
}

extern "C" __global__ void __launch_bounds__(256) transpose(const __grid_constant__ Args p) {  // tiles of 32 x 32; block z is the image
    __shared__ float tile[32][33];
    let_next_start();
    wait_for_previous();
    const int x = threadIdx.x % 32, y = threadIdx.x / 32, column0 = blockIdx.x * 32, row0 = blockIdx.y * 32;
    const long long image = (long long)blockIdx.z * p.rows * p.columns;
#pragma unroll
    for (int i = 0; i < 32; i += 8) {
        const int row = row0 + y + i, column = column0 + x;
        if (row < p.rows && column < p.columns) tile[y + i][x] = load1<FROM>(p.input, image + (long long)row * p.columns + column);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 32; i += 8) {
        const int column = column0 + y + i, row = row0 + x;
        if (row < p.rows && column < p.columns) store1<TO>(p.out, image + (long long)column * p.rows + row, affine(p, tile[x][y + i]));
    }
}


extern "C" __global__ void __launch_bounds__(256) rows(const __grid_constant__ Rows p) {  // copies a slice of each row
    let_next_start();
    wait_for_previous();
    const long long i = (long long)blockIdx.x * 256 + threadIdx.x;
    if (i >= p.rows * p.width) return;
    const long long row = i / p.width, at = i - row * p.width;
    if (UNIT == 16) reinterpret_cast<uint4*>(p.out)[row * p.out_pitch + at] = reinterpret_cast<const uint4*>(p.input)[row * p.in_pitch + at];
    if (UNIT == 4) reinterpret_cast<u32*>(p.out)[row * p.out_pitch + at] = reinterpret_cast<const u32*>(p.input)[row * p.in_pitch + at];
    if (UNIT == 2) reinterpret_cast<u16*>(p.out)[row * p.out_pitch + at] = reinterpret_cast<const u16*>(p.input)[row * p.in_pitch + at];
    if (UNIT == 1) p.out[row * p.out_pitch + at] = p.input[row * p.in_pitch + at];
}
