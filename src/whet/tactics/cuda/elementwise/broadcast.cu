// Elementwise with broadcasting along any axes, one value a thread: out = f(a, b), or a choice of b and c by the truth of a.
// Constants: EXPRESSION over a, b, c; A_KIND, B_KIND, C_KIND, TO: kinds of the operands and the result (0 f32, 1 f16, 2 bf16, 3 i64, 4 i32, 5 u8,
// 6 i8, 7 bool); INTEGERS: computes in 64-bit integers, else in f32 (integers become the nearest float, floats are truncated to integers).
#include "common.cuh"
#include "vector.cuh"

#include "arguments"

#if INTEGERS
using Number = long long;
#else
using Number = float;
#endif

template <int KIND> DEV Number number(const u8* base, long long i) {
    if (KIND == 3) return (Number)reinterpret_cast<const long long*>(base)[i];
    if (KIND == 4) return (Number)reinterpret_cast<const int*>(base)[i];
    if (KIND == 5 || KIND == 7) return (Number)base[i];
    if (KIND == 6) return (Number)reinterpret_cast<const signed char*>(base)[i];
    return (Number)load1<KIND < 3 ? KIND : 0>(base, i);
}

template <int KIND> DEV void store(u8* base, long long i, Number v) {
    if (KIND == 3) reinterpret_cast<long long*>(base)[i] = (long long)v;
    else if (KIND == 4) reinterpret_cast<int*>(base)[i] = (int)(long long)v;
    else if (KIND == 5) base[i] = (u8)(long long)v;
    else if (KIND == 6) reinterpret_cast<signed char*>(base)[i] = (signed char)(long long)v;
    else if (KIND == 7) base[i] = v != 0;
    else store1<KIND < 3 ? KIND : 0>(base, i, (float)v);
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
    const Number a = number<A_KIND>(p.a, at), b = p.b ? number<B_KIND>(p.b, bt) : (Number)0, c = p.c ? number<C_KIND>(p.c, ct) : (Number)0;
    const Number v = (Number)(EXPRESSION);
    store<TO>(p.out, i, v);
}
