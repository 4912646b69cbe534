// A chain of elementwise steps, eight elements a thread. STEPS is generated: statements on `x` (8 floats), operands through operand(i).
// Each operand has the result's shape (kind 0), one value a channel (1), one value (2), or one a channel of each image (3); type 0: f32.
// Constants: TYPE, LAST (channels are the last axis), STEPS.
#include "common.cuh"
#include "vector.cuh"

struct Operand { const u8* at; int kind, type; };
#include "arguments"

DEV Vec8 operand(const Args& p, int i, long long at, int length) {
    const Operand o = p.input[i];
    Vec8 r;
    if (o.kind == 0) {
        if (length == 8) return load8<TYPE>(o.at, at);
#pragma unroll
        for (int e = 0; e < 8; ++e) r.v[e] = e < length ? load1<TYPE>(o.at, at + e) : 0.f;
        return r;
    }
#pragma unroll
    for (int e = 0; e < 8; ++e) {
        const long long flat = at + (e < length ? e : 0);
        const long long channel = LAST ? flat % p.channels : flat / p.inner % p.channels;
        const long long image = flat / ((long long)p.channels * p.inner);
        const long long where = o.kind == 2 ? 0 : o.kind == 1 ? channel : image * p.channels + channel;
        r.v[e] = o.type == 0 ? reinterpret_cast<const float*>(o.at)[where] : load1<TYPE>(o.at, where);
    }
    return r;
}

extern "C" __global__ void __launch_bounds__(256) pointwise(const __grid_constant__ Args p) {
    let_next_start();
    wait_for_previous();
    const long long at = ((long long)blockIdx.x * 256 + threadIdx.x) * 8;
    if (at >= p.count) return;
    const int length = (int)min(8ll, p.count - at);
    Vec8 x = operand(p, 0, at, length);
    STEPS
    if (length == 8) store8<TYPE>(p.out, at, x);
    else
#pragma unroll
        for (int e = 0; e < 8; ++e) if (e < length) store1<TYPE>(p.out, at + e, x.v[e]);  // no run-time index: it would move x to memory
}
