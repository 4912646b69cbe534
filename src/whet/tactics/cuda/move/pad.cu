// Pad of up to six axes. Negative padding cuts off. Constants: UNIT (bytes of an element, or of adjacent ones that move as one),
// MODE (0 constant, 1 edge, 2 reflect, 3 wrap).
#include "common.cuh"

#include "arguments"

extern "C" __global__ void __launch_bounds__(256) pad(const __grid_constant__ Args p) {
    let_next_start();
    wait_for_previous();
    const u32 index = blockIdx.x * 256 + threadIdx.x;
    if (index >= p.count) return;
    u32 rest = index;
    long long from = 0;
    bool inside = true;
#pragma unroll
    for (int d = 5; d >= 0; --d) {
        const u32 next = rest / p.size[d];
        int i = (int)(rest - next * p.size[d]) - p.before[d];
        rest = next;
        const int low = p.low[d], high = p.high[d];
        if (MODE == 0) inside = inside && i >= low && i < high;
        if (MODE == 1) i = max(low, min(i, high - 1));
        if (MODE == 2) i = i < low ? 2 * low - i : i >= high ? 2 * (high - 1) - i : i;
        if (MODE == 3) i = i < low ? i + (high - low) : i >= high ? i - (high - low) : i;
        from += i * p.stride[d];
    }
    if (UNIT == 1) p.out[index] = inside ? p.input[from] : (u8)p.value;
    if (UNIT == 2) reinterpret_cast<u16*>(p.out)[index] = inside ? reinterpret_cast<const u16*>(p.input)[from] : (u16)p.value;
    if (UNIT == 4) reinterpret_cast<u32*>(p.out)[index] = inside ? reinterpret_cast<const u32*>(p.input)[from] : (u32)p.value;
    if (UNIT == 8) reinterpret_cast<u64*>(p.out)[index] = inside ? reinterpret_cast<const u64*>(p.input)[from] : p.value;
    if (UNIT == 16) {
        const u32 low = (u32)p.value, high = (u32)(p.value >> 32);
        reinterpret_cast<uint4*>(p.out)[index] = inside ? reinterpret_cast<const uint4*>(p.input)[from] : make_uint4(low, high, low, high);
    }
}
