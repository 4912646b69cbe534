// A level of a detector's head in one launch: a 1x1 convolution whose channels are anchors x SPAN numbers, and what is computed of each number, by generated
// code (own_moves.py), stored as rows of SPAN f32. A block keeps the weights of one anchor (BN rows of them, those beyond SPAN zeros) and takes
// BM pixels of an image at a time: their input comes by bulk copies, products end in registers, and the tile's rows, which lie behind each other, leave in one
// bulk copy. Nothing in between is stored.
// Constants: SPAN, BN (multiple of 16, SPAN or more), HOLD (steps of 64 input channels), WGS (warpgroups of 64 pixels), BLOCKS, BF16, STEPS (as in moves.cu,
// of this level alone: source(i, place) is the product's number).
#include "common.cuh"
#include "wgmma"

constexpr int BM = WGS * 64, THREADS = WGS * 128, INPUT = HOLD * BM * 128, ROWS_BYTES = BM * SPAN * 4;
static_assert(BN % 16 == 0 && BN >= SPAN && ROWS_BYTES % 16 == 0, "tile");

struct Args {
    TensorMap in, weights;   // boxes of 64 x BM x 1 of [images][pixels][channels], and of 64 x BN of [anchors * BN][HOLD * 64]
    const float* bias;       // [anchors * BN]
    const float* constants;
    u8* out;
    int pixels, tiles_image, tiles, anchors;
    int first, rows;         // of an image's rows: the first of this level, and all
};

#define EACH 1
#define EVERY(...) { constexpr u32 i = 0; __VA_ARGS__ }
DEV float element(const Args& p, u32 row, u32 column, float number) {
    auto source = [&](int, u32) { return number; };
    float values[EACH];
    STEPS
    return values[0];
}

DEV void store_bytes(u8* to, u32 from, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes) : "memory");
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) heads(const __grid_constant__ Args p) {
    extern __shared__ u8 raw[];
    const u32 base = (shared_address(raw) + 1023) & ~1023u, input = base + HOLD * BN * 128, rows = input + INPUT, bias = rows + ROWS_BYTES;
    const u32 held = bias + BN * 4, full = held + 8;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;  // the shuffle tells the compiler: equal in a warp
    const int anchor = (int)blockIdx.x % p.anchors, first = (int)blockIdx.x / p.anchors, stride = (int)gridDim.x / p.anchors;
    const bool one = elect();
    auto ask = [&](int tile) {
        const int image = tile / p.tiles_image;
        barrier_expect(full, INPUT);
        for (int h = 0; h < HOLD; ++h) load_box3(input + h * BM * 128, &p.in, full, h * 64, (tile - image * p.tiles_image) * BM, image);
    };
    if (warp == 0 && one) {
        map_prefetch(&p.in);
        barrier_init(held, 1);
        barrier_init(full, 1);
        barrier_init_fence();
        barrier_expect(held, HOLD * BN * 128);
        for (int h = 0; h < HOLD; ++h) load_box2(base + h * BN * 128, &p.weights, held, h * 64, anchor * BN);
    }
    let_next_start();
    if (threadIdx.x < BN) store_shared_f(bias + threadIdx.x * 4, p.bias[anchor * BN + threadIdx.x]);
    __syncthreads();
    wait_for_previous();
    if (warp == 0 && one && first < p.tiles) ask(first);
    barrier_wait(held, 0);
    int phase = 0;
    for (int tile = first; tile < p.tiles; tile += stride) {
        const int image = tile / p.tiles_image, m0 = (tile - image * p.tiles_image) * BM;
        const u32 row0 = image * p.rows + p.first + anchor * p.pixels + m0;
        barrier_wait(full, phase);
        phase ^= 1;
        float acc[BN / 2];
        mma_begin();
#pragma unroll
        for (int h = 0; h < HOLD; ++h)
#pragma unroll
            for (int q = 0; q < 4; ++q)
                wgmma(acc, operand<128>(input + (h * BM + warp / 4 * 64) * 128) + q * 2, operand<128>(base + h * BN * 128) + q * 2, h + q > 0);
        mma_commit();
        mma_wait<0>();
        if (warp == 0 && one) store_wait_read();  // of the rows before
        __syncthreads();
        if (warp == 0 && one && tile + stride < p.tiles) ask(tile + stride);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int m = warp * 16 + lane / 4 + half * 8;
            const u32 row = row0 + min(m, p.pixels - 1 - m0);  // beyond the image the last pixel's, which nobody stores
#pragma unroll
            for (int j = 0; j < BN / 8; ++j) {
                const float2 add = load_shared_f2(bias + j * 32 + lane % 4 * 8);
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const u32 column = j * 8 | lane % 4 * 2 | e;
                    if (column < SPAN) store_shared_f(rows + (m * SPAN + column) * 4, element(p, row, column, acc[j * 4 + half * 2 + e] + (e ? add.y : add.x)));
                }
            }
        }
        fence_async();
        __syncthreads();
        if (warp == 0 && one) {
            store_bytes(p.out + (long long)row0 * SPAN * 4, rows, min(BM, p.pixels - m0) * SPAN * 4);
            store_commit();
        }
    }
    if (warp == 0 && one) store_wait_read();
}
