// A gate on integers: each channel of each sample times a factor (squeeze and excitation), channels last, eight values at a time.
// Constants: FROM, TO (3 i8, 4 u8), GATE (type of the factors: 0 f32, 1 f16, 2 bf16).
#include "common.cuh"
#include "vector.cuh"

constexpr int EACH = 4;  // groups of eight of a thread, a block apart: all are in flight before the first is used

#include "arguments"

extern "C" __global__ void __launch_bounds__(256) qmul(const __grid_constant__ Args p) {
    let_next_start();
    wait_for_previous();
    const u32 first = blockIdx.x * (256 * EACH) + threadIdx.x;
    Raw<FROM> x[EACH];
    Raw<GATE> g[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const u32 at = first + i * 256;
        x[i] = load_raw<FROM>(p.x, (long long)at * 8, at < p.count);
        g[i] = load_raw<GATE>(p.gate, (long long)(at / p.image * p.channels + at % p.channels) * 8, at < p.count);
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const u32 at = first + i * 256;
        if (at >= p.count) break;
        const Vec8 v = unpack_raw<FROM>(x[i]), by = unpack_raw<GATE>(g[i]);
        Vec8 y;
#pragma unroll
        for (int e = 0; e < 8; ++e) y.v[e] = fmaf(fmaf(v.v[e], p.step, p.shift), by.v[e], p.zero);
        store8<TO>(p.out, (long long)at * 8, y);
    }
}
