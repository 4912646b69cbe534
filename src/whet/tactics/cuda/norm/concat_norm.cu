// out = act(in * scale[channel] + shift[channel]) for channels-last parts that lie one after the other along the channels: a batch
// normalization of a Concat, in groups of eight channels. Constants: TYPE (0 f32, 1 f16, 2 bf16), ACT, PARTS (at most). Missing parts start at
// 2^31 - 1.
#include "common.cuh"
#include "vector.cuh"

#include "arguments"

extern "C" __global__ void __launch_bounds__(256) concat_norm(const __grid_constant__ Args p) {
    let_next_start();
    const u32 i = blockIdx.x * 256u + threadIdx.x;
    if (i >= p.count) return;
    const u32 pixel = i / p.channels, group = i - pixel * p.channels;
    int part = 0;
#pragma unroll
    for (int k = 1; k < PARTS; ++k) part += group >= (u32)p.start[k];
    const u32 start = p.start[part], end = min((u32)p.start[part + 1], p.channels);
    const Vec8 scale = load8<0>(reinterpret_cast<const u8*>(p.scale), group * 8), shift = load8<0>(reinterpret_cast<const u8*>(p.shift), group * 8);
    wait_for_previous();
    Vec8 x = load8<TYPE>(p.input[part], (long long)(pixel * (end - start) + group - start) * 8);
#pragma unroll
    for (int e = 0; e < 8; ++e) x.v[e] = activate<ACT>(fmaf(x.v[e], scale.v[e], shift.v[e]), p.act);
    store8<TYPE>(p.out, (long long)i * 8, x);
}
