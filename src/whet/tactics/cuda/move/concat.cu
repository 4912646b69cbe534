// Concatenation in one launch: row r of the result is that of each part in turn. Constants: UNIT (bytes that move as one), PARTS (at most),
// EACH (units of a thread; their loads are issued before the first store). Missing parts start at 2^31 - 1. With SHIFTED a part's row is that many rows
// further within a period of rows, and zeros beyond its ends.
#include "common.cuh"

#include "arguments"
struct alignas(16) Sixteen { u32 w[4]; };
template <int BYTES> struct Of {};
template <> struct Of<1> { typedef u8 type; };
template <> struct Of<2> { typedef u16 type; };
template <> struct Of<4> { typedef u32 type; };
template <> struct Of<8> { typedef u64 type; };
template <> struct Of<16> { typedef Sixteen type; };

extern "C" __global__ void __launch_bounds__(256) concat(const __grid_constant__ Args p) {
    typedef Of<UNIT>::type Unit;
    let_next_start();
    wait_for_previous();
    const u32 first = blockIdx.x * (256u * EACH) + threadIdx.x;
    Unit value[EACH];
    u32 to[EACH];
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
        const u32 i = min(first + e * 256u, p.count - 1), row = i / p.width, column = i - row * p.width;
        int part = 0;
#pragma unroll
        for (int k = 1; k < PARTS; ++k) part += column >= (u32)p.start[k];
        const u32 start = p.start[part], end = min((u32)p.start[part + 1], p.width);
#if SHIFTED
        const u32 from = row + p.shift[part];
        value[e] = Unit{};
        if (row % p.period + p.shift[part] < p.period) value[e] = reinterpret_cast<const Unit*>(p.input[part])[from * (end - start) + column - start];
#else
        value[e] = reinterpret_cast<const Unit*>(p.input[part])[row * (end - start) + column - start];
#endif
        to[e] = row * p.pitch + column;
    }
#pragma unroll
    for (int e = 0; e < EACH; ++e)
        if (first + e * 256u < p.count) reinterpret_cast<Unit*>(p.out)[to[e]] = value[e];
}
