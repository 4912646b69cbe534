// out[i0, ..., i5] = in[start + sum of (i / divisor) * stride]: transposes, slices and splits, enlarging by whole factors. UNIT: bytes of
// an element (or of a run of them).
#include "common.cuh"

#include "arguments"
struct alignas(16) Sixteen { u32 w[4]; };

extern "C" __global__ void __launch_bounds__(256) gather(const __grid_constant__ Args p) {
    let_next_start();
    wait_for_previous();
    const u32 i = blockIdx.x * 256 + threadIdx.x;
    if (i >= p.count) return;
    u32 rest = i;
    long long from = p.start;
#pragma unroll
    for (int d = 5; d >= 0; --d) {
        const u32 next = rest / p.size[d], at = rest - next * p.size[d];
        from += at / p.divisor[d] * p.stride[d];
        rest = next;
    }
    if (UNIT == 1) p.out[i] = p.input[from];
    if (UNIT == 2) reinterpret_cast<u16*>(p.out)[i] = reinterpret_cast<const u16*>(p.input)[from];
    if (UNIT == 4) reinterpret_cast<u32*>(p.out)[i] = reinterpret_cast<const u32*>(p.input)[from];
    if (UNIT == 8) reinterpret_cast<u64*>(p.out)[i] = reinterpret_cast<const u64*>(p.input)[from];
    if (UNIT == 16) reinterpret_cast<Sixteen*>(p.out)[i] = reinterpret_cast<const Sixteen*>(p.input)[from];
}
