// Convolutions of 64 channels to up to 64 by filters of several taps, stride 1, for many pixels: weights are the tall operand and stay in shared memory,
// pixels are the wide one, so a product reads less than it multiplies. A tile is ROWS rows of results of one image; its input, with the pixels of all taps,
// lies in shared memory as rows of WIDE pixels, and a tap is the same matrix further on; the ends of rows make results that nobody stores.
// Two warpgroups take tiles in turns: one multiplies while the other finishes. A lane's two rows of the operand are neighbouring channels of the result.
// With NEXT a 1x1 convolution to NEXT * 64 channels stands behind it: what lies between takes the place of the tile's input and is stored nowhere.
// Constants: TAPS_H, TAPS_W, WIDE (even), ROWS, BN (ROWS * WIDE in eights), SLOTS (tiles of input on their way), NEXT, ACT, ACT2 (behind the second),
// RES (what is added at the end: 0 nothing, 1 before, 2 behind the last activation), BF16.
#include "common.cuh"
#include "wgmma"

constexpr int TAPS = TAPS_H * TAPS_W, BOX = (ROWS + TAPS_H - 1) * WIDE * 128, FILTERS = 8192;  // bytes of a tile's input and of 64 x 64 weights
constexpr int READ = (BN + (TAPS_H - 1) * WIDE + TAPS_W - 1) * 128, SLOT = ((BOX > READ ? BOX : READ) + 1023) / 1024 * 1024;
constexpr bool EARLY = NEXT && RES && BN <= 128;  // residuals of the next 64 channels are on their way while these are finished
static_assert(WIDE % 2 == 0 && BN % 8 == 0 && BN >= ROWS * WIDE && BN <= 256, "tile");

struct Args {
    TensorMap weights, in, next;  // [64][TAPS * 64] and [NEXT * 64][64] in boxes of 64 x 64; [n][h][w][64]
    const float* bias;
    const float* bias2;
    const u8* residual;
    u8* out;
    int k, height, width, per, tiles, pad_h, pad_w;  // channels and size of the result, tiles of an image
    Act act, act2;
};

DEV float2 activated(float a, float b, Act act) { return make_float2(activate<ACT>(a, act), activate<ACT>(b, act)); }
DEV u32 ended(float a, float b, u32 residual, Act act) {  // two channels of a result
    constexpr int KIND = NEXT ? ACT2 : ACT;
    const float2 r = RES ? unpack(residual) : make_float2(0.f, 0.f);
    if (RES == 1) { a += r.x; b += r.y; }
    a = activate<KIND>(a, act);
    b = activate<KIND>(b, act);
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
DEV void load_tile(const Args& a, int tile, u32 slot, u32 bar) {
    const int image = tile / a.per, row = (tile - image * a.per) * ROWS;
    barrier_expect(bar, BOX);
    load_box4(slot, &a.in, bar, 0, -a.pad_w, row - a.pad_h, image);
}

extern "C" __global__ void __launch_bounds__(256, 1) upright(const __grid_constant__ Args a) {
    extern __shared__ u8 raw[];
    const u32 filters = (shared_address(raw) + 1023) & ~1023u, next = filters + TAPS * FILTERS, slots = next + NEXT * FILTERS, bars = slots + SLOTS * SLOT;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), group = warp / 4, lane = threadIdx.x % 32;
    if (warp == 0 && elect()) {
        for (int i = 0; i <= SLOTS; ++i) barrier_init(bars + i * 8, 1);
        barrier_init_fence();
        barrier_expect(bars + SLOTS * 8, (TAPS + NEXT) * FILTERS);
        for (int i = 0; i < TAPS; ++i) load_box2(filters + i * FILTERS, &a.weights, bars + SLOTS * 8, i * 64, 0);
        for (int i = 0; i < NEXT; ++i) load_box2(next + i * FILTERS, &a.next, bars + SLOTS * 8, 0, i * 64);
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
    u32 parity = 0;
    for (int tile = blockIdx.x + group * gridDim.x; tile < a.tiles; tile += 2 * gridDim.x) {
        const u32 slot = __shfl_sync(~0u, slots + place * SLOT, 0), bar = bars + place * 8;  // the shuffle: equal in a warp
        const int image = tile / a.per, row = (tile - image * a.per) * ROWS;
        Out o{((image * a.height + row) * a.width) * a.k + channel, channel < a.k ? min(ROWS, a.height - row) : 0, a.width, a.k, lane % 4 * 2};
        float acc[BN / 2];
        u32 residual[EARLY ? 2 : 1][BN / 4];
        barrier_wait(bar, parity);
        mma_begin();
#pragma unroll
        for (int tap = 0; tap < TAPS; ++tap)
#pragma unroll
            for (int k = 0; k < 4; ++k)
                wgmma(acc, operand<128>(filters + tap * FILTERS) + k * 2, operand<128>(slot + (tap / TAPS_W * WIDE + tap % TAPS_W) * 128) + k * 2, tap + k > 0);
        mma_commit();
        if (EARLY || (RES && !NEXT)) load_residual(a.residual, o, residual[0]);
        mma_wait<0>();
        named_barrier(1 + group, 128);  // nobody reads the slot any more
#if NEXT
        const u32 to = slot + lane % 4 * 256 + channel % 8 * 2;
        const u32 even = to + ((channel / 8 ^ lane % 4 * 2) << 4), odd = to + 128 + ((channel / 8 ^ lane % 4 * 2 + 1) << 4);
#pragma unroll
        for (int j = 0; j < BN / 8; ++j) {  // rows of the next product's operand
            const float2 v = activated(acc[4 * j] + bias.x, acc[4 * j + 2] + bias.y, a.act), w = activated(acc[4 * j + 1] + bias.x, acc[4 * j + 3] + bias.y, a.act);
            store_shared(even + j * 1024, pack(v.x, v.y));
            store_shared(odd + j * 1024, pack(w.x, w.y));
        }
        fence_async();
        named_barrier(1 + group, 128);
#pragma unroll(EARLY ? NEXT : 1)
        for (int c = 0; c < NEXT; ++c) {
            const float2 bias2 = *reinterpret_cast<const float2*>(a.bias2 + c * 64 + channel);
            mma_begin();
#pragma unroll
            for (int k = 0; k < 4; ++k) wgmma(acc, operand<128>(next + c * FILTERS) + k * 2, operand<128>(slot) + k * 2, k > 0);
            mma_commit();
            const Out here = o;
            o.first += 64;
            if (RES && !EARLY) load_residual(a.residual, here, residual[0]);
            if (EARLY && c + 1 < NEXT) load_residual(a.residual, o, residual[EARLY ? (c + 1) % 2 : 0]);
            mma_wait<0>();
            if (c == NEXT - 1) {
                named_barrier(1 + group, 128);
                if (warp % 4 == 0 && elect() && tile + SLOTS * gridDim.x < a.tiles) load_tile(a, tile + SLOTS * gridDim.x, slot, bar);
            }
            store(a.out, here, acc, residual[EARLY ? c % 2 : 0], bias2, a.act2);
        }
#else
        if (warp % 4 == 0 && elect() && tile + SLOTS * gridDim.x < a.tiles) load_tile(a, tile + SLOTS * gridDim.x, slot, bar);
        store(a.out, o, acc, residual[0], bias, a.act);
#endif
        place += 2;
        if (place >= SLOTS) { place -= SLOTS; parity ^= 1; }
    }
}
