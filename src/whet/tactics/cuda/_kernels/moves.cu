// Moves and arithmetic between them in one pass: each element of the result is computed from the elements that it comes from, by generated code.
// STEPS is that code: it sets values[i] of EACH elements, through EVERY(code of one); source(i, place) reads a source, p.constants holds
// constants in f32. Where SPAN is 0 a thread has elements at `at`, a block apart. Else a warp has elements of MANY rows of SPAN, at `column` of `row`:
// what depends on the row alone is reckoned once, and the loads of all rows are on their way before the first is computed with.
// Constants: FROM, TO (types as in vector.cuh), SPAN, MANY, EACH, STEPS.
#include "common.cuh"
#include "vector.cuh"

struct Args {
    u8* out;
    const u8* in[4];
    const float* constants;
    u32 count;
};

#if SPAN
#define HERE const u32 column = min(first + i * 32u, SPAN - 1u);
#else
#define HERE const u32 at = min(first + i * 256u, p.count - 1);
#endif
#define EVERY(...) _Pragma("unroll") for (u32 i = 0; i < EACH; ++i) { HERE __VA_ARGS__ }

DEV void elements(const Args& p, u32 row, u32 first, float (&values)[EACH]) {
    auto source = [&](int i, u32 place) { return load1<FROM>(p.in[i], place); };
    STEPS
}

extern "C" __global__ void __launch_bounds__(256) moves(const __grid_constant__ Args p) {
    let_next_start();
    wait_for_previous();
#if SPAN
    constexpr u32 WIDE = 32 * EACH, PARTS = (SPAN + WIDE - 1) / WIDE;  // of a warp, of a row
    const u32 warp = __shfl_sync(0xffffffff, (blockIdx.x * 256 + threadIdx.x) / 32, 0), rows = p.count / SPAN;
    const u32 row = warp / PARTS * MANY, first = warp % PARTS * WIDE + threadIdx.x % 32;
    if (row >= rows) return;
    float values[MANY][EACH];
#pragma unroll
    for (u32 r = 0; r < MANY; ++r) elements(p, MANY > 1 ? min(row + r, rows - 1) : row, first, values[r]);
#pragma unroll
    for (u32 r = 0; r < MANY; ++r)
#pragma unroll
        for (u32 i = 0; i < EACH; ++i)
            if (first + i * 32 < SPAN && row + r < rows) store1<TO>(p.out, (row + r) * SPAN + first + i * 32, values[r][i]);
#else
    float values[EACH];
    const u32 first = blockIdx.x * (256 * EACH) + threadIdx.x;
    elements(p, 0, first, values);
#pragma unroll
    for (u32 i = 0; i < EACH; ++i)
        if (first + i * 256 < p.count) store1<TO>(p.out, first + i * 256, values[i]);
#endif
}
