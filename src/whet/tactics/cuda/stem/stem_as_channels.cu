// Before a stem convolution: an image of few channels becomes [n][h][LEFT + w + right][CP] with zeros before and after each row, so that the
// taps of a filter row are adjacent and count as channels. Constants: FROM, TO (types), CP (4 or 8), NHWC.
#include "common.cuh"
#include "vector.cuh"

#include "arguments"

DEV void store_wide(u8* out, long long at, const float (&v)[8]) {
    float4* to = reinterpret_cast<float4*>(reinterpret_cast<float*>(out) + at);
    to[0] = make_float4(v[0], v[1], v[2], v[3]);
    if (CP == 8) to[1] = make_float4(v[4], v[5], v[6], v[7]);
}

extern "C" __global__ void __launch_bounds__(256) widen(const __grid_constant__ Args p) {
    let_next_start();
    wait_for_previous();
    const long long pixels = (long long)p.n * p.h * p.wide;
    for (long long i = (long long)blockIdx.x * 256 + threadIdx.x; i < pixels; i += (long long)gridDim.x * 256) {
        const int x = (int)(i % p.wide) - p.left;
        const long long line = i / p.wide, image = line / p.h;
        const int y = (int)(line - image * p.h);
        float v[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        if (x >= 0 && x < p.w)
#pragma unroll
            for (int c = 0; c < CP; ++c)
                if (c < p.c) v[c] = load1<FROM>(p.input, NHWC ? (line * p.w + x) * p.c + c : ((image * p.c + c) * p.h + y) * p.w + x);
        if (TO == 0) {
            store_wide(p.out, i * CP, v);
            continue;
        }
        uint2* to = reinterpret_cast<uint2*>(p.out + i * CP * 2);
        to[0] = make_uint2(pack_as<TO>(v[0], v[1]), pack_as<TO>(v[2], v[3]));
        if (CP == 8) to[1] = make_uint2(pack_as<TO>(v[4], v[5]), pack_as<TO>(v[6], v[7]));
    }
}
