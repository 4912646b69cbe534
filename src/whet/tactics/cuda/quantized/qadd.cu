// Sum of two quantized tensors: out = act((a - za) * sa + (b - zb) * sb), in steps of the result; eight elements a thread.
// Constants: A, B, TO (types as in vector.cuh), ACT.
#include "common.cuh"
#include "vector.cuh"

#include "arguments"

extern "C" __global__ void __launch_bounds__(256) qadd(const __grid_constant__ Args p) {
    let_next_start();
    wait_for_previous();
    const long long at = ((long long)blockIdx.x * 256 + threadIdx.x) * 8;
    if (at + 8 <= p.count) {
        const Vec8 a = load8<A>(p.a, at), b = load8<B>(p.b, at);
        Vec8 r;
#pragma unroll
        for (int e = 0; e < 8; ++e) r.v[e] = activate<ACT>(a.v[e] * p.step_a + b.v[e] * p.step_b + p.shift, p.act) * p.per_step + p.zero;
        store8<TO>(p.out, at, r);
    } else
        for (long long i = at; i < p.count; ++i)
            store1<TO>(p.out, i, activate<ACT>(load1<A>(p.a, i) * p.step_a + load1<B>(p.b, i) * p.step_b + p.shift, p.act) * p.per_step + p.zero);
}
