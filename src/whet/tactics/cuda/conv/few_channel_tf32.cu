// A convolution of few channels (32 or 64) of f32 tensors in TF32 by tiles of the image: bulk copies load the input of a tile's windows
// once, and the tensor cores read every tap from it in place. conv_tf32.cu copies the pixels of each tap; here an input pixel is copied once (twice at the
// border of two tiles), and rounded to TF32 in place, once for all taps. The weights stay in shared memory.
// In shared memory 32 channels of a pixel are a row of 128 bytes in TMA's 128-byte swizzle. With a stride of 2 along rows,
// pixels of even and of odd columns are stored separately. A product computes 8 x 8 results: eight adjacent pixels are eight consecutive rows of the
// operand, and the next eight rows are one image row further, at any byte distance: the swizzle depends on the address.
// A block's warpgroups have separate tiles and share one copy of the weights; they never wait for each other, so one multiplies while another stores.
// Rows of the weights are permuted in 16s so that a thread's accumulators are four adjacent channels, 16 bytes.
// Constants: C, R, S, STRIDE_H, STRIDE_W (1 or 2), PAD_W, TH, TW (multiples of 8), BN (multiple of 16), GROUPS, BLOCKS, ACT, RESIDUAL (0 none, 1 before the
// activation, 2 after it), TERMS (1).
#define BF16 0
#include "common.cuh"
#include "tf32.cuh"
#include "wgmma"

constexpr int CHUNKS = C / 32, STEPS = R * S * CHUNKS;                         // 32 channels of a pixel, and of all taps
constexpr int BEFORE = (PAD_W + STRIDE_W - 1) / STRIDE_W;                     // cells before a tile's first pixel
constexpr int COLUMNS = TW + BEFORE + (S - 1 - PAD_W > 0 ? (S - 1 - PAD_W) / STRIDE_W : 0), ROWS = (TH - 1) * STRIDE_H + R;
constexpr int PITCH = COLUMNS * 128, PLANE = (ROWS * PITCH + 1023) / 1024 * 1024, PIECE = CHUNKS * STRIDE_W * PLANE;
constexpr int WEIGHTS = STEPS * BN * 128, THREADS = GROUPS * 128;
constexpr u32 ASKED = CHUNKS * STRIDE_W * ROWS * PITCH;                       // bytes of a piece that come
static_assert(C % 32 == 0 && TH % 8 == 0 && TW % 8 == 0 && BN % 16 == 0 && (STRIDE_W == 1 || STRIDE_W == 2) && COLUMNS <= 256 && ROWS <= 256, "tile");
constexpr int PIXEL = 128;

#include "arguments"

#include "image_tiles.cuh"

// Offset of the pixel of tap (r, s) from the tile's first cell.
DEV constexpr int place(int r, int s) {
    const int x = s - PAD_W + BEFORE * STRIDE_W;
    return x % STRIDE_W * PLANE + r * PITCH + x / STRIDE_W * 128;
}
// Operands from their addresses in sixteens: 8 x 8 pixels, and rows of weights, both with the pattern of 128 bytes.
DEV u64 pixels(u32 at) { return (u64)(at + (1 << 16)) | (((u64)(STRIDE_H * PITCH / 16) | 1ull << 30) << 32); }
DEV u64 filters(u32 at) { return (u64)(at + (1 << 16)) | ((64ull | 1ull << 30) << 32); }

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) few_channel_tf32(const __grid_constant__ Args a) {
    extern __shared__ u8 raw[];
    const u32 base = (shared_address(raw) + 1023) & ~1023u, bias = base + WEIGHTS + GROUPS * PIECE, held = bias + BN * 4;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, group = warp / 4;  // the shuffle tells the compiler: equal in a warp
    const u32 piece = base + WEIGHTS + group * PIECE, full = held + 8 + group * 8;
    const int n0 = (int)blockIdx.x % a.tiles_n * BN, blocks = (int)gridDim.x / a.tiles_n, stride = blocks * GROUPS;
    const int first = (int)blockIdx.x / a.tiles_n + group * blocks;
    const bool one = elect();
    auto ask = [&](const Tile& t) {
        barrier_expect(full, ASKED);
#pragma unroll
        for (int i = 0; i < CHUNKS * STRIDE_W; ++i)
            load_box4(piece + i * PLANE, &a.input, full, i % STRIDE_W * C + i / STRIDE_W * 32, t.tx * TW - BEFORE, t.ty * TH * STRIDE_H - a.pad_h, t.n);
    };
    if (warp == 0 && one) {
        map_prefetch(&a.input);
        barrier_init(held, 1);
        for (int i = 0; i < GROUPS; ++i) barrier_init(held + 8 + i * 8, 1);
        barrier_init_fence();
        barrier_expect(held, WEIGHTS);
        for (int i = 0; i < STEPS; ++i) load_box2(base + i * BN * 128, &a.weights, held, i * 32, n0);
    }
    let_next_start();
    if (threadIdx.x < BN) store_shared_f(bias + threadIdx.x * 4, a.bias[n0 + threadIdx.x]);
    Tile here(a, first);
    const Tile step(a, stride);
    __syncthreads();  // barriers and biases are there
    wait_for_previous();
    if (warp % 4 == 0 && one && first < a.tiles) ask(here);
    for (int tile = first, phase = 0; tile < a.tiles; tile += stride, phase ^= 1) {
        barrier_wait(full, phase);
#pragma unroll 4
        for (int i = threadIdx.x % 128; i < PIECE / 16; i += 128) {
            const float4 v = load_shared_f4(piece + i * 16);
            store_shared_f4(piece + i * 16, __uint_as_float(to_tf32(v.x)), __uint_as_float(to_tf32(v.y)), __uint_as_float(to_tf32(v.z)), __uint_as_float(to_tf32(v.w)));
        }
        fence_async();
        named_barrier(group + 1, 128);
        if (tile == first) barrier_wait(held, 0);
#pragma unroll 1
        for (int m = 0; m < TH * TW / 64; ++m) {
            const int y = m / (TW / 8) * 8, x = m % (TW / 8) * 8;
            const int p = here.ty * TH + y + warp % 4 * 2, q = here.tx * TW + x + lane / 4;  // of the first of the two pixels of this thread; the other is below
            const long long at = (((long long)here.n * a.p + p) * a.q + q) * a.k + n0 + lane % 4 * 4;
            const auto stored = [&](int half, int g) { return p + half < a.p && q < a.q && n0 + g * 16 + lane % 4 * 4 < a.k; };
            float4 add[2][RESIDUAL ? BN / 16 : 1];
            if (RESIDUAL)
#pragma unroll
                for (int i = 0; i < BN / 8; ++i) {
                    const int half = i % 2, g = i / 2;
                    add[half][RESIDUAL ? g : 0] =
                        stored(half, g) ? *reinterpret_cast<const float4*>(a.residual + at + half * a.q * a.k + g * 16) : make_float4(0.f, 0.f, 0.f, 0.f);
                }
            float sum[BN / 2];
#pragma unroll
            for (int g = 0; g < BN / 16; ++g) {
                const float4 b = load_shared_f4(bias + (g * 16 + lane % 4 * 4) * 4);
                sum[g * 8] = sum[g * 8 + 2] = b.x;
                sum[g * 8 + 1] = sum[g * 8 + 3] = b.y;
                sum[g * 8 + 4] = sum[g * 8 + 6] = b.z;
                sum[g * 8 + 5] = sum[g * 8 + 7] = b.w;
            }
            // Shuffled again, so that descriptors are computed in uniform registers when needed, and are not all kept.
            const u32 from = __shfl_sync(~0u, (piece + y * STRIDE_H * PITCH + x * 128) >> 4, 0), weights = __shfl_sync(~0u, base >> 4, 0);
            mma_begin();
#pragma unroll
            for (int s = 0; s < STEPS * 4; ++s) {
                const int tap = s / 4 / CHUNKS, chunk = s / 4 % CHUNKS;
                wgmma(sum, pixels(from + (chunk * STRIDE_W * PLANE + place(tap / S, tap % S)) / 16 + s % 4 * 2), filters(weights + s / 4 * BN * 8 + s % 4 * 2), 1);
            }
            mma_commit();
            mma_wait<0>();
            if (m + 1 == TH * TW / 64) {
                named_barrier(group + 1, 128);  // everyone's products have read the piece
                const Tile next = [&] { Tile t = here; t.add(a, step); return t; }();
                if (warp % 4 == 0 && one && tile + stride < a.tiles) ask(next);
            }
#pragma unroll
            for (int i = 0; i < BN / 8; ++i) {
                const int half = i % 2, g = i / 2;
                const float4 r = add[half][RESIDUAL ? g : 0];
                float v[4], w[4] = {r.x, r.y, r.z, r.w};
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    v[e] = sum[g * 8 + e / 2 * 4 + half * 2 + e % 2];
                    v[e] = activate<ACT>(RESIDUAL == 1 ? v[e] + w[e] : v[e], a.act);
                    if (RESIDUAL == 2) v[e] += w[e];
                }
                if (stored(half, g)) store_four(a.out + at + half * a.q * a.k + g * 16, v[0], v[1], v[2], v[3]);
            }
        }
        here.add(a, step);
    }
    if (first >= a.tiles) barrier_wait(held, 0);
}
