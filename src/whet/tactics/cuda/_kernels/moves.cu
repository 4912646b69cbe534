// Moves and arithmetic between them in one pass: each element of the result is computed from the elements that it comes from, by generated code.
// STEPS is that code: from `at`, the place of an element in memory, to `value`; source(i, place) reads a source, p.constants holds constants in f32.
// Constants: FROM, TO (types as in vector.cuh), STEPS.
#include "common.cuh"
#include "vector.cuh"

constexpr int EACH = 4;  // elements of a thread, a block apart

struct Args {
    u8* out;
    const u8* in[4];
    const float* constants;
    u32 count;
};

DEV float element(const Args& p, u32 at) {
    auto source = [&](int i, u32 place) { return load1<FROM>(p.in[i], place); };
    float value = 0.f;
    STEPS
    return value;
}

extern "C" __global__ void __launch_bounds__(256) moves(const __grid_constant__ Args p) {
    let_next_start();
    wait_for_previous();
    const u32 first = blockIdx.x * (256 * EACH) + threadIdx.x;
    float v[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) v[i] = first + i * 256 < p.count ? element(p, first + i * 256) : 0.f;
#pragma unroll
    for (int i = 0; i < EACH; ++i)
        if (first + i * 256 < p.count) store1<TO>(p.out, first + i * 256, v[i]);
}
