// Elementwise with broadcasting along any axes, one value a thread: out = f(a, b), or a choice of b and c by the truth of a.
// Constants: EXPRESSION over a, b, c; A_KIND, B_KIND, C_KIND: kinds of the operands (0 f32, 1 f16, 2 bf16, 3 i64, 4 i32, 5 u8 or bool, 6 i8);
// TO: of the result, a float. Integers become the nearest float.
#include "common.cuh"
#include "vector.cuh"

#include "arguments"

template <int KIND> DEV float number(const u8* base, long long i) {
    if (KIND == 3) return (float)reinterpret_cast<const long long*>(base)[i];
    if (KIND == 4) return (float)reinterpret_cast<const int*>(base)[i];
    if (KIND == 5) return (float)base[i];
    if (KIND == 6) return (float)reinterpret_cast<const signed char*>(base)[i];
    return load1<KIND < 3 ? KIND : 0>(base, i);
}

extern "C" __global__ void __launch_bounds__(256) broadcast(const __grid_constant__ Args p) {
    let_next_start();
    wait_for_previous();
    const u32 i = blockIdx.x * 256 + threadIdx.x;
    if (i >= p.count) return;
    u32 rest = i;
    long long at = 0, bt = 0, ct = 0;
#pragma unroll
    for (int d = 4; d >= 0; --d) {
        const u32 next = rest / p.size[d];
        const int k = (int)(rest - next * p.size[d]);
        at += (long long)k * p.a_stride[d];
        bt += (long long)k * p.b_stride[d];
        ct += (long long)k * p.c_stride[d];
        rest = next;
    }
    const float a = number<A_KIND>(p.a, at), b = p.b ? number<B_KIND>(p.b, bt) : 0.f, c = p.c ? number<C_KIND>(p.c, ct) : 0.f;
    const float v = EXPRESSION;
    store1<TO>(p.out, i, v);
}
