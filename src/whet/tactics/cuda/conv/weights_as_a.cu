// Convolutions of 64 channels to up to 64 by filters of several taps, stride 1, for many pixels: weights are operand A and stay in shared memory,
// pixels are operand B, which reduces the operand traffic. A tile is ROWS result rows of one image; its input, with the pixels of all taps, is in shared
// memory as rows of WIDE pixels, and a tap is the same matrix at an offset; results at the ends of rows are not stored.
// Two warpgroups alternate: one multiplies while the other runs its epilogue. A lane's two rows of operand A are adjacent output channels.
// Constants: TAPS_H, TAPS_W, WIDE (even), ROWS, BN (ROWS * WIDE, rounded up to a multiple of 8), SLOTS (input tiles in flight), ACT,
// RES (residual: 0 none, 1 before, 2 after the activation), STAGE (bytes of a tile's results, if results and residual pass through shared memory in
// whole cache lines; 0: directly between registers and memory), BF16.
#include "common.cuh"
#include "wgmma"

constexpr int TAPS = TAPS_H * TAPS_W, BOX = (ROWS + TAPS_H - 1) * WIDE * 128, FILTERS = 8192;  // bytes of a tile's input and of 64 x 64 weights
constexpr int READ = (BN + (TAPS_H - 1) * WIDE + TAPS_W - 1) * 128, SLOT = ((BOX > READ ? BOX : READ) + 1023) / 1024 * 1024;
static_assert(!STAGE || BN == ROWS * WIDE, "only pixels of the tile are staged");
static_assert(WIDE % 2 == 0 && BN % 8 == 0 && BN >= ROWS * WIDE && BN <= 256, "tile");

#include "arguments"

DEV u32 ended(float a, float b, u32 residual, Act act) {  // two channels of a result
    const float2 r = RES ? unpack(residual) : make_float2(0.f, 0.f);
    if (RES == 1) { a += r.x; b += r.y; }
    a = activate<ACT>(a, act);
    b = activate<ACT>(b, act);
    if (RES == 2) { a += r.x; b += r.y; }
    return pack(a, b);
}

struct Out {  // where a thread's results go: two channels of pixels 8j + 2 (lane % 4) and the next one of a tile
    int first, rows, width, k, pair;  // the image's element of the tile's first pixel, rows of the image that are left
    DEV bool at(int j, int& element) const {
        const int n = j * 8 + pair, y = n / WIDE, x = n - y * WIDE;
        element = first + (y * width + x) * k;
        return x < width && y < rows;
    }
};
DEV void load_residual(const u8* residual, const Out& o, u32 (&r)[BN / 4]) {
#pragma unroll
    for (int j = 0; j < BN / 8; ++j) {
        int e;
        const bool inside = o.at(j, e);
        r[2 * j] = inside ? *reinterpret_cast<const u32*>(residual + 2ll * e) : 0;
        r[2 * j + 1] = inside ? *reinterpret_cast<const u32*>(residual + 2ll * (e + o.k)) : 0;
    }
}
DEV void store(u8* out, const Out& o, const float (&acc)[BN / 2], const u32 (&r)[BN / 4], float2 bias, Act act) {
#pragma unroll
    for (int j = 0; j < BN / 8; ++j) {
        int e;
        if (!o.at(j, e)) continue;
        *reinterpret_cast<u32*>(out + 2ll * e) = ended(acc[4 * j] + bias.x, acc[4 * j + 2] + bias.y, r[2 * j], act);
        *reinterpret_cast<u32*>(out + 2ll * (e + o.k)) = ended(acc[4 * j + 1] + bias.x, acc[4 * j + 3] + bias.y, r[2 * j + 1], act);
    }
}
DEV void store_box4(const TensorMap* m, u32 src, int x, int y, int z, int w) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(m), "r"(src), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}
// The same through shared memory, which already holds the residual; rows of 128 bytes in TMA's 128-byte swizzle.
DEV void store_staged(u32 stage, int width, int rows, int pair, int channel, const float (&acc)[BN / 2], float2 bias, Act act) {
    const u32 part = channel / 8, inner = channel % 8 * 2;
#pragma unroll
    for (int j = 0; j < BN / 8; ++j) {
        const int n = j * 8 + pair, y = n / WIDE, x = n - y * WIDE, p = y * width + x;
        if (x >= width || y >= rows) continue;
        const u32 even = stage + p * 128 + ((part ^ (p & 7)) << 4) + inner, odd = stage + (p + 1) * 128 + ((part ^ (p + 1 & 7)) << 4) + inner;
        const u32 a = RES ? load_shared(even) : 0, b = RES ? load_shared(odd) : 0;
        store_shared(even, ended(acc[4 * j] + bias.x, acc[4 * j + 2] + bias.y, a, act));
        store_shared(odd, ended(acc[4 * j + 1] + bias.x, acc[4 * j + 3] + bias.y, b, act));
    }
}
DEV void load_tile(const Args& a, int tile, u32 slot, u32 bar) {
    const int image = tile / a.per, row = (tile - image * a.per) * ROWS;
    barrier_expect(bar, BOX);
    load_box4(slot, &a.input, bar, 0, -a.pad_w, row - a.pad_h, image);
}

extern "C" __global__ void __launch_bounds__(256, 1) weights_as_a(const __grid_constant__ Args a) {
    extern __shared__ u8 raw[];
    const u32 filters = (shared_address(raw) + 1023) & ~1023u, slots = filters + TAPS * FILTERS, stages = slots + SLOTS * SLOT, bars = stages + 2 * STAGE;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), group = warp / 4, lane = threadIdx.x % 32;
    if (warp == 0 && elect()) {
        for (int i = 0; i <= SLOTS + 2; ++i) barrier_init(bars + i * 8, 1);
        barrier_init_fence();
        barrier_expect(bars + SLOTS * 8, TAPS * FILTERS);
        for (int i = 0; i < TAPS; ++i) load_box2(filters + i * FILTERS, &a.weights, bars + SLOTS * 8, i * 64, 0);
    }
    let_next_start();
    const int channel = warp % 4 * 16 + lane / 4 * 2;
    const float2 bias = *reinterpret_cast<const float2*>(a.bias + channel);
    wait_for_previous();
    if (warp == 0 && elect())
        for (int i = 0; i < SLOTS; ++i)
            if (blockIdx.x + i * gridDim.x < a.tiles) load_tile(a, blockIdx.x + i * gridDim.x, slots + i * SLOT, bars + i * 8);
    __syncthreads();
    barrier_wait(bars + SLOTS * 8, 0);
    int place = group % SLOTS;
    u32 parity = 0, added = 0;
    const u32 stage = __shfl_sync(~0u, stages + group * STAGE, 0), stage_bar = bars + (SLOTS + 1 + group) * 8;
    for (int tile = blockIdx.x + group * gridDim.x; tile < a.tiles; tile += 2 * gridDim.x) {
        const u32 bar = bars + place * 8;
        const int image = tile / a.per, row = (tile - image * a.per) * ROWS;
        Out o{((image * a.height + row) * a.width) * a.k + channel, channel < a.k ? min(ROWS, a.height - row) : 0, a.width, a.k, lane % 4 * 2};
        float acc[BN / 2];
        u32 residual[BN / 4];
        if (STAGE && RES && warp % 4 == 0 && elect()) {
            store_wait_read();  // the tile before has left
            barrier_expect(stage_bar, ROWS * (WIDE - TAPS_W + 1) * 128);
            load_box4(stage, &a.added, stage_bar, 0, row * a.width, image, 0);
        }
        barrier_wait(bar, parity);
        const u32 slot = __shfl_sync(~0u, slots + place * SLOT, 0);  // the shuffle: equal in a warp
        mma_begin();
#pragma unroll
        for (int tap = 0; tap < TAPS; ++tap)
#pragma unroll
            for (int k = 0; k < 4; ++k)
                wgmma(acc, operand<128>(filters + tap * FILTERS) + k * 2, operand<128>(slot + (tap / TAPS_W * WIDE + tap % TAPS_W) * 128) + k * 2, tap + k > 0);
        mma_commit();
        if (RES && !STAGE) load_residual(a.residual, o, residual);
        mma_wait<0>();
        if (STAGE && !RES && warp % 4 == 0 && elect()) store_wait_read();
        named_barrier(1 + group, 128);  // the slot and the previously stored results are no longer read
        if (warp % 4 == 0 && elect() && tile + SLOTS * gridDim.x < a.tiles) load_tile(a, tile + SLOTS * gridDim.x, slot, bar);
#if STAGE
        if (RES) { barrier_wait(stage_bar, added); added ^= 1; }
        store_staged(stage, a.width, a.height - row, lane % 4 * 2, channel, acc, bias, a.act);
        fence_async();
        named_barrier(1 + group, 128);
        if (warp % 4 == 0 && elect()) {
            store_box4(&a.made, stage, 0, row * a.width, image, 0);
            store_commit();
        }
#else
        store(a.out, o, acc, residual, bias, a.act);
#endif
        place += 2;
        if (place >= SLOTS) { place -= SLOTS; parity ^= 1; }
    }
    if (STAGE && warp % 4 == 0 && elect()) store_wait_read();
}
