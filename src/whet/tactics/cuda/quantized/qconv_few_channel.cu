// A convolution of integers with few channels (32 or 64, in and out) and several taps, strides of 1 or 2: the input of a tile is copied
// to shared memory once, by bulk copies, and read in place for every tap (rows of C bytes, swizzled; with a stride of 2 even and odd
// columns are stored separately, so that adjacent results read adjacent rows). Weights are operand A, see weights_as_a.cuh.
// Pixels outside the image become the zero point before the products, so one bias applies to all results.
// Constants: C (bytes of a pixel, 32 or 64), KC (output channels), R, S, STRIDE, PAD_H, PAD_W (leading), BN (results per row of the tile), TALL
// (passes of 64 / KC result rows), RESIDUAL (0 none, 3 i8, 4 u8), LATE (added after the activation), IN8, TO, ACT, FOLD 1, BLOCKS,
// WEIGHTS_AS_A 1.
#include "common.cuh"
#include "vector.cuh"
#include "wgmma"

constexpr int WIDE = BN;                                            // pixels of a stored row
#include "weights_as_a.cuh"

constexpr int LINES = TALL * SIDE, ROWS = (LINES - 1) * STRIDE + R; // of results, and of the image
constexpr int DEPTH = (SIDE - 1) * STRIDE + R, HALVES = C / 32, STEPS = DEPTH * S * HALVES;
constexpr int SIDES = STRIDE;                                       // parts of the tile: even and odd columns
DEV constexpr int column_of(int tap) { return STRIDE == 1 ? tap - PAD_W : (tap - PAD_W) >> 1; }  // in its part, from the first result's on
constexpr int FIRST = STRIDE == 1 ? -PAD_W : -((PAD_W + 1) / 2);    // column_of(0)
constexpr int COLUMNS = BN + (STRIDE == 1 ? S - 1 - PAD_W : (S - 1 - PAD_W) >> 1) - FIRST;
constexpr int PART_BYTES = (ROWS * COLUMNS * C + 1023) / 1024 * 1024;
constexpr int RESIDUALS = (SIDE * WIDE * PARTS + THREADS - 1) / THREADS;  // 16-byte parts a thread
static_assert((C == 32 || C == 64) && (STRIDE == 1 || STRIDE == 2) && FOLD, "sizes");

#include "arguments"

struct Tile {
    int n, y, x;            // image, and the first result
    DEV Tile(const Args& a, int tile) {
        const int line = tile / a.tiles_x;
        n = line / a.tiles_y; y = (line - n * a.tiles_y) * LINES; x = (tile - line * a.tiles_x) * BN;
    }
};

DEV void ask(const Args& a, const Tile& t, u32 patch, u32 bar) {
    barrier_expect(bar, SIDES * ROWS * COLUMNS * C);
#pragma unroll
    for (int side = 0; side < SIDES; ++side) load_box4(patch + side * PART_BYTES, &a.image, bar, side * C, t.x + FIRST, t.y * STRIDE - PAD_H, t.n);
}

// The part of a border tile outside the image.
DEV void fill_outside(const Args& a, const Tile& t, u32 patch) {
    for (int i = threadIdx.x; i < SIDES * ROWS * COLUMNS; i += THREADS) {
        const int side = i / (ROWS * COLUMNS), rest = i - side * (ROWS * COLUMNS), r = rest / COLUMNS, column = t.x + FIRST + rest - r * COLUMNS;
        if ((u32)(t.y * STRIDE - PAD_H + r) < (u32)a.h && (u32)column < (u32)a.columns) continue;
#pragma unroll
        for (int part = 0; part < C / 16; ++part)  // all of a row are alike: no swizzle to follow
            asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(patch + side * PART_BYTES + rest * C + part * 16), "r"(a.outside) : "memory");
    }
}

// Accumulators of row `line` of the tile (and of the next, if operand A holds two).
DEV void multiply(int (&acc)[BN / 2], const u32 (&weights)[STEPS][4], u32 patch, int line) {
    const u32 at = patch + line * STRIDE * COLUMNS * C;
    mma_begin();
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
        const int half = s % HALVES, tap = s / HALVES % S, row = s / HALVES / S;
        const int side = STRIDE == 1 ? 0 : (tap - PAD_W) & 1, place = side * PART_BYTES + (row * COLUMNS + column_of(tap) - FIRST) * C;
        wgmma_registers(acc, weights[s], operand<C>(at + place) + half * 2, s > 0);
    }
    mma_commit();
    mma_wait<0>();
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) qconv_few_channel(const __grid_constant__ Args a) {
    extern __shared__ u8 raw[];
    const u32 base = shared_address(raw), patch = (base + 1023) & ~1023u, bar = patch + SIDES * PART_BYTES + 2 * STAGE;
    u8* stages = raw + (patch - base) + SIDES * PART_BYTES;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, quad = lane % 4;
    if (threadIdx.x == 0) {
        barrier_init(bar, 1);
        barrier_init_fence();
    }
    let_next_start();
    u32 weights[STEPS][4];
    load_weights(weights, a.weights);
    const int part = warp % PARTS, side = warp / PARTS, channel = part * 16 + lane / 4 * 2;  // this thread's two channels, its row of two
    const float2 by = *reinterpret_cast<const float2*>(a.factor + channel), add = *reinterpret_cast<const float2*>(a.bias + channel);
    wait_for_previous();
    if (threadIdx.x == 0 && blockIdx.x < a.tiles) ask(a, Tile(a, blockIdx.x), patch, bar);
    __syncthreads();
    u32 parity = 0;
    int flip = 0;
    for (int tile = blockIdx.x; tile < a.tiles; tile += gridDim.x, parity ^= 1) {
        const Tile t(a, tile);
        const int bottom = t.y * STRIDE - PAD_H, left = t.x + FIRST;
        barrier_wait(bar, parity);
        if (bottom < 0 || left < 0 || bottom + ROWS > a.h || left + COLUMNS > a.columns) {
            fill_outside(a, t, patch);
            fence_async();
            __syncthreads();
        }
        for (int j = 0; j < TALL; ++j) {
            u8* stage = stages + flip * STAGE;
#if RESIDUAL
            uint4 other[RESIDUALS];
#pragma unroll
            for (int e = 0; e < RESIDUALS; ++e) {
                const int i = threadIdx.x + e * THREADS, pixel = i / PARTS % WIDE, row = i / PARTS / WIDE, p = t.y + j * SIDE + row, q = t.x + pixel;
                other[e] = make_uint4(0, 0, 0, 0);
                if (i < SIDE * WIDE * PARTS && p < a.store_p && q < a.store_q)
                    other[e] = *reinterpret_cast<const uint4*>(a.residual + (((long long)t.n * a.store_p + p) * a.store_q + q) * KC + i % PARTS * 16);
            }
#endif
            int acc[BN / 2];
            multiply(acc, weights, patch, j * SIDE);
#if RESIDUAL
#pragma unroll
            for (int e = 0; e < RESIDUALS; ++e) {
                const int i = threadIdx.x + e * THREADS;
                if (i < SIDE * WIDE * PARTS) *reinterpret_cast<uint4*>(stage + place_of(i / PARTS / WIDE, i / PARTS % WIDE, i % PARTS)) = other[e];
            }
#endif
            if (RESIDUAL || j + 1 == TALL) __syncthreads();
            if (j + 1 == TALL && threadIdx.x == 0 && tile + gridDim.x < a.tiles) {  // all have read the tile
                fence_async();
                ask(a, Tile(a, tile + gridDim.x), patch, bar);
            }
#pragma unroll
            for (int i = 0; i < BN / 8; i += 2) {
                float v[8], late[8];
#pragma unroll
                for (int e = 0; e < 8; ++e) {
                    v[e] = fmaf((float)acc[i * 4 + e], e & 2 ? by.y : by.x, e & 2 ? add.y : add.x);
                    late[e] = a.act.b;
                }
#if RESIDUAL
#pragma unroll
                for (int e = 0; e < 8; e += e % 4 ? 3 : 1) {  // 0, 1, 4, 5: a pixel each, both channels
                    const int pixel = (i + e / 4) * 8 + quad * 2 + e % 2;
                    const u32 two = *reinterpret_cast<const u16*>(stage + place_of(side, pixel, part) + lane / 4 * 2);
                    const float x = byte_as_float<RESIDUAL>(two, 0), y = byte_as_float<RESIDUAL>(two, 1);
                    if (LATE) {
                        late[e] = fmaf(x, a.add_step, late[e]);
                        late[e + 2] = fmaf(y, a.add_step, late[e + 2]);
                    } else {
                        v[e] = fmaf(x, a.add_step, v[e]);
                        v[e + 2] = fmaf(y, a.add_step, v[e + 2]);
                    }
                }
                __syncwarp();  // other threads of the warp overwrite this memory next
#endif
                fold<ACT>(v, a.act, late);
#pragma unroll
                for (int o = 0; o < 2; ++o)
                    store_turned(shared_address(stage) + place_of(side, (i + o) * 8 + (lane & 7), part), four(v[o * 4], v[o * 4 + 2], v[o * 4 + 1], v[o * 4 + 3], a));
            }
            __syncthreads();
            send(a, stage, t.n, t.y + j * SIDE, t.x);
            flip ^= 1;
        }
    }
}
