// out[o][j][:] = in[o][at[j]][:], rows of `width` units of UNIT bytes. Constants: UNIT, WIDE_INDEX (indices are 64-bit).
// Negative indices count from the end; indices outside are clamped, so that no memory outside the tensor is read.
#include "common.cuh"

#include "arguments"
struct alignas(16) Sixteen { u32 w[4]; };

extern "C" __global__ void __launch_bounds__(256) take(const __grid_constant__ Args p) {
    let_next_start();
    wait_for_previous();
    const long long i = (long long)blockIdx.x * 256 + threadIdx.x;
    if (i >= p.count) return;
    const long long row = i / p.width, outer = row / p.indices;
    const int column = (int)(i - row * p.width), j = (int)(row - outer * p.indices);
    long long k = WIDE_INDEX ? reinterpret_cast<const long long*>(p.at)[j] : (long long)reinterpret_cast<const int*>(p.at)[j];
    if (k < 0) k += p.entries;
    k = max(0ll, min(k, (long long)p.entries - 1));
    const long long from = (outer * p.entries + k) * p.width + column;
    if (UNIT == 1) p.out[i] = p.input[from];
    if (UNIT == 2) reinterpret_cast<u16*>(p.out)[i] = reinterpret_cast<const u16*>(p.input)[from];
    if (UNIT == 4) reinterpret_cast<u32*>(p.out)[i] = reinterpret_cast<const u32*>(p.input)[from];
    if (UNIT == 8) reinterpret_cast<u64*>(p.out)[i] = reinterpret_cast<const u64*>(p.input)[from];
    if (UNIT == 16) reinterpret_cast<Sixteen*>(p.out)[i] = reinterpret_cast<const Sixteen*>(p.input)[from];
}
