// Pooling of up to three spatial axes, one output a thread. Constants: TYPE (0 f32, 1 f16, 2 bf16), MAX, PADDED (the mean counts padding),
// LAST (channels last; else planes).
#include "common.cuh"
#include "vector.cuh"

#include "arguments"

extern "C" __global__ void __launch_bounds__(256) pool(const __grid_constant__ Args p) {
    let_next_start();
    const long long index = (long long)blockIdx.x * 256 + threadIdx.x;
    wait_for_previous();
    if (index >= p.count) return;
    long long rest = index;
    int channel = 0, at[3];
    if (LAST) { channel = (int)(rest % p.channels); rest /= p.channels; }
#pragma unroll
    for (int d = 2; d >= 0; --d) { at[d] = (int)(rest % p.out_size[d]) * p.stride[d] - p.before[d]; rest /= p.out_size[d]; }
    const long long plane = rest;   // image, or image and channel
    float found = MAX ? __uint_as_float(0xff800000u) : 0.f;
    int counted = 0;
    for (int a = 0; a < p.kernel[0]; ++a) {
        const int z = at[0] + a * p.dilation[0];
        for (int b = 0; b < p.kernel[1]; ++b) {
            const int y = at[1] + b * p.dilation[1];
            for (int c = 0; c < p.kernel[2]; ++c) {
                const int x = at[2] + c * p.dilation[2];
                const bool inside = z >= 0 && z < p.in_size[0] && y >= 0 && y < p.in_size[1] && x >= 0 && x < p.in_size[2];
                if (PADDED ? z < p.in_size[0] + p.after[0] && y < p.in_size[1] + p.after[1] && x < p.in_size[2] + p.after[2] : inside) ++counted;
                if (!inside) continue;
                const long long pixel = ((plane * p.in_size[0] + z) * p.in_size[1] + y) * p.in_size[2] + x;
                const float v = load1<TYPE>(p.input, LAST ? pixel * p.channels + channel : pixel);
                found = MAX ? max_nan(found, v) : found + v;
            }
        }
    }
    store1<TYPE>(p.out, index, MAX ? found : found / (float)counted);
}
