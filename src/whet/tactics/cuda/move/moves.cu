// Moves and arithmetic between them in one pass: each element of the result is computed from its source elements, by generated code.
// STEPS is that code: it sets values[i] of EACH elements, through EVERY(code of one); source(i, place) reads a source, p.constants has the
// f32 constants. With SPAN 0 a thread has elements at `at`, with the stride of a block. Else a warp has elements of MANY rows of SPAN, at `column` of
// `row`: values that depend only on the row are computed once, and the loads of all rows are issued before the first is used.
// With JOINT a warp's MANY rows are one set of elements: row-dependent values are computed once for the group (it starts at a multiple of MANY, and the
// host has checked that all its rows have the same code), so the loads of all rows are issued together. A warp's rows are contiguous in the result: they
// are stored through shared memory, 16 bytes per thread, or with BULK in one copy, and marked evict-first in L2, since they are not read again soon.
// Constants: FROM, TO (types as in vector.cuh), SPAN, MANY, JOINT, BULK (with JOINT), EACH (elements of STEPS), STEPS.
#include "common.cuh"
#include "vector.cuh"

#include "arguments"

#if JOINT
// Row `start + place` of a group that starts at a multiple of MANY (`group`): a division by a multiple of MANY is the same for the whole group.
struct Row {
    u32 start, place;
    bool group;
    DEV operator u32() const { return start + place; }
};
DEV Row operator/(Row a, u32 n) { return a.group && n % MANY == 0 ? Row{a.start / n, 0, false} : Row{(a.start + a.place) / n, 0, false}; }
DEV Row operator%(Row a, u32 n) { return a.group && n % MANY == 0 ? Row{a.start % n, a.place, true} : Row{(a.start + a.place) % n, 0, false}; }
DEV Row operator+(Row a, u32 n) { return Row{a.start + n, a.place, a.group && n % MANY == 0}; }
DEV Row operator-(Row a, u32 n) { return Row{a.start - n, a.place, a.group && n % MANY == 0}; }
#define HERE const Row row{start, i / (EACH / MANY), true}; const u32 column = min(first + i % (EACH / MANY) * 32u, SPAN - 1u);
#elif SPAN
#define HERE const u32 column = min(first + i * 32u, SPAN - 1u);
#else
#define HERE const u32 at = min(first + i * 256u, p.count - 1);
#endif
#define EVERY(...) _Pragma("unroll") for (u32 i = 0; i < EACH; ++i) { HERE __VA_ARGS__ }

DEV void elements(const Args& p, u32 row, u32 first, float (&values)[EACH]) {
#if JOINT
    const u32 start = row;
#endif
    auto source = [&](int i, u32 place) { return load1<FROM>(p.input[i], place); };
    STEPS
}

extern "C" __global__ void __launch_bounds__(256) moves(const __grid_constant__ Args p) {
    let_next_start();
    wait_for_previous();
#if JOINT
    constexpr u32 BYTES = MANY * SPAN * Element<TO>::BYTES, PER = EACH / MANY;
    __shared__ alignas(16) u8 staged[8][BYTES];
    const u32 warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), lane = threadIdx.x % 32, row = (blockIdx.x * 8 + warp) * MANY;
    if (row >= p.count / SPAN) return;
    float values[EACH];
    elements(p, row, lane, values);
#pragma unroll
    for (u32 i = 0; i < EACH; ++i) {
        const u32 column = lane + i % PER * 32;
        if (column < SPAN) store1<TO>(staged[warp], i / PER * SPAN + column, values[i]);
    }
    u8* out = p.out + (u64)row * (SPAN * Element<TO>::BYTES);
#if BULK
    fence_async();
    __syncwarp();
    if (elect()) {
        u64 policy;
        asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;"
                     ::"l"(out), "r"(shared_address(staged[warp])), "r"(BYTES), "l"(policy) : "memory");
        store_commit();
        store_wait_read();
    }
#else
    __syncwarp();
#pragma unroll
    for (u32 at = 0; at < BYTES; at += 512)
        if (at + lane * 16 < BYTES) __stcs(reinterpret_cast<uint4*>(out + at + lane * 16), *reinterpret_cast<const uint4*>(&staged[warp][at + lane * 16]));
#endif
#elif SPAN
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
