// A chain of elementwise steps, eight elements a thread. STEPS is generated: statements on `x` (8 floats), operands through operand(i).
// Kinds of operands: 0 the result's elements; the others have a value for element i at i / outer * stride + i / inner % count (without the first
// term if outer is 0), which for the eight elements of a thread is 1 eight adjacent values, 2 one value, 3 anything. Type 0: f32.
// Constants: TYPE, INDEX (type of an element's index), STEPS.
#include "common.cuh"
#include "vector.cuh"

struct Operand { const u8* at; int kind, type; u32 outer, stride, inner, count; };
#include "arguments"

DEV long long place(const Operand& o, INDEX i) {
    return (o.outer ? (long long)(i / o.outer) * o.stride : 0) + (long long)(i / o.inner % o.count);
}

DEV float one(const Operand& o, long long where) { return o.type == 0 ? reinterpret_cast<const float*>(o.at)[where] : load1<TYPE>(o.at, where); }

DEV Vec8 operand(const Args& p, int i, long long at, int length) {
    const Operand o = p.input[i];
    Vec8 r;
    if (o.kind == 0 && length < 8) {
#pragma unroll
        for (int e = 0; e < 8; ++e) r.v[e] = e < length ? one(o, at + e) : 0.f;
        return r;
    }
    if (o.kind < 2) {   // of kind 1 there are only whole groups of eight
        const long long where = o.kind == 0 ? at : place(o, (INDEX)at);
        return o.type == 0 ? load8<0>(o.at, where) : load8<TYPE>(o.at, where);
    }
    const float value = one(o, place(o, (INDEX)at));
#pragma unroll
    for (int e = 0; e < 8; ++e) r.v[e] = o.kind == 2 || e == 0 || e >= length ? value : one(o, place(o, (INDEX)at + e));
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
