// A stem convolution (up to 3 input channels) of stride 2 along rows, straight from the image: two adjacent pixels of four channels
// are 16 bytes of shared memory, a cell, so the windows of eight adjacent results are eight consecutive cells: rows of a K-major operand without a
// swizzle, which the tensor cores read in place. Nothing is gathered, no fragment is loaded; K runs over the filter's cells, two a step.
// The fourth channel of every pixel is 1, outside the image too: its weights in the first two taps are the bias, in two parts. Rows of the weights are permuted
// in 32s so that a thread's accumulators are eight adjacent channels of a pixel, which it stores directly. Weights of SiLU are halved (HALVED).
// A block takes 64 columns x TH rows of results, its warpgroups alternate rows; the pixels of its next tile are in flight meanwhile.
// Constants: C (at most 3), R, TX (cells of a filter row), STRIDE_H, LEAD (cells of a row before the first window), TH, WGS, BN (multiple of 32),
// BLOCKS, FROM (0 f32, else the type of the results), ACT, HALVED, BF16.
#include "common.cuh"
#include "wgmma"

constexpr int THREADS = WGS * 128, MINE = TH / WGS;                          // rows of results of a warpgroup
constexpr int ROWS = (TH - 1) * STRIDE_H + R, COLUMNS = (LEAD + 64 + TX - 1 + 1) / 2 * 2, PITCH = COLUMNS * 16;
constexpr int PLACES = R * TX, STEPS = (PLACES + 1) / 2, CHUNKS = (STEPS + 3) / 4;
constexpr int QUADS = COLUMNS / 2, UNITS = ROWS * QUADS, EACH = (UNITS + THREADS - 1) / THREADS;  // four pixels are fetched together
constexpr int WORDS = FROM == 0 ? 4 : 2;                                     // of four pixels of a channel
constexpr u32 ONE = BF16 ? 0x3f80 : 0x3c00;
static_assert(C <= 3 && TH % WGS == 0 && BN % 32 == 0 && LEAD < 2, "tile");

#include "arguments"

// Offset of cell i of a window from its first.
DEV constexpr int place(int i) { return i / TX * PITCH + i % TX * 16; }
// Eight consecutive windows, the next eight 128 bytes further; the second half of K is `apart` bytes after the first.
DEV u64 windows(u32 address, int apart) { return (u64)((address & 0x3ffff) >> 4) | ((u64)(apart >> 4) << 16) | (8ull << 32); }

struct Tile {
    int tx, ty, n;
    DEV Tile(const Args& a, int tile) { const int line = tile / a.tiles_w; tx = tile - line * a.tiles_w; n = line / a.tiles_h; ty = line - n * a.tiles_h; }
};

struct Pixels {  // this thread's of a tile
    u32 v[EACH][C][WORDS];
    DEV void fetch(const Args& a, const Tile& t) {
        const int y0 = t.ty * TH * STRIDE_H - a.top, x0 = t.tx * 128 - a.left, plane = a.h * a.w;
        const u8* image = a.input + (long long)t.n * plane * C * WORDS;
#pragma unroll
        for (int j = 0; j < EACH; ++j) {
            const int i = threadIdx.x + j * THREADS, r = i / QUADS, y = y0 + r, x = x0 + (i - r * QUADS) * 4;
            const bool inside = (j + 1 < EACH || i < UNITS) && (u32)y < (u32)a.h && (u32)x < (u32)a.w;
            const u8* from = image + (y * a.w + x) * WORDS;
#pragma unroll
            for (int c = 0; c < C; ++c) {
                if (FROM == 0) {
                    const uint4 g = inside ? *reinterpret_cast<const uint4*>(from + c * plane * 4) : make_uint4(0, 0, 0, 0);
                    v[j][c][0] = g.x; v[j][c][1] = g.y; v[j][c][WORDS - 2] = g.z; v[j][c][WORDS - 1] = g.w;
                } else {
                    const uint2 g = inside ? *reinterpret_cast<const uint2*>(from + c * plane * 2) : make_uint2(0, 0);
                    v[j][c][0] = g.x; v[j][c][1] = g.y;
                }
            }
        }
    }
    DEV u32 two(int j, int c, int d, int i) const {  // channels c and d of pixel i; channel 3 is 1, others that are not there 0
        if (FROM == 0) return pack(c < C ? __uint_as_float(v[j][c < C ? c : 0][i % WORDS]) : 0.f, d == 3 ? 1.f : d < C ? __uint_as_float(v[j][d < C ? d : 0][i % WORDS]) : 0.f);
        const u32 low = c < C ? v[j][c < C ? c : 0][i / 2] : 0, high = d == 3 ? ONE << 16 | ONE : d < C ? v[j][d < C ? d : 0][i / 2] : 0;
        return __byte_perm(low, high, i % 2 ? 0x7632 : 0x5410);
    }
    DEV void put(u32 patch) const {
#pragma unroll
        for (int j = 0; j < EACH; ++j) {
            const int i = threadIdx.x + j * THREADS;
            if (j + 1 < EACH || i < UNITS)
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(patch + i * 32 + half * 16), "r"(two(j, 0, 1, half * 2)), "r"(two(j, 2, 3, half * 2)),
                                 "r"(two(j, 0, 1, half * 2 + 1)), "r"(two(j, 2, 3, half * 2 + 1)) : "memory");
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) stem_overlap(const __grid_constant__ Args a) {
    extern __shared__ u8 raw[];
    const u32 base = (shared_address(raw) + 1023) & ~1023u, patch = base + CHUNKS * BN * 128, bar = patch + ROWS * PITCH;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, group = warp / 4;  // the shuffle tells the compiler: equal in a warp
    if (threadIdx.x == 0) {
        barrier_init(bar, 1);
        barrier_init_fence();
        barrier_expect(bar, CHUNKS * BN * 128);
        for (int i = 0; i < CHUNKS; ++i) load_box2(base + i * BN * 128, &a.weights, bar, i * 64, 0);
    }
    let_next_start();
    Pixels pixels;
    Tile here(a, blockIdx.x);
    wait_for_previous();
    pixels.fetch(a, here);
    __syncthreads();  // the barrier is there
    bool fresh = true;
    for (int tile = blockIdx.x; tile < a.tiles; tile += gridDim.x) {
        pixels.put(patch);
        fence_async();
        __syncthreads();
        const Tile now = here;
        if (tile + gridDim.x < a.tiles) {
            here = Tile(a, tile + gridDim.x);
            pixels.fetch(a, here);
        }
        if (fresh) { barrier_wait(bar, 0); fresh = false; }
        const int q = now.tx * 64 + warp % 4 * 16 + lane / 4, p0 = now.ty * TH + group * MINE;
        u8* out = a.out + ((((long long)now.n * a.p + p0) * a.q + q) * a.k + lane % 4 * 8) * 2;
        const u32 from = patch + group * MINE * STRIDE_H * PITCH + LEAD * 16;
        float acc[2][BN / 2];
        auto multiply = [&](int y, float (&sum)[BN / 2]) {
            mma_begin();
#pragma unroll
            for (int s = 0; s < STEPS; ++s) {
                const int apart = 2 * s + 1 < PLACES ? place(2 * s + 1) - place(2 * s) : 0;  // a single last cell: weights of zero
                wgmma(sum, windows(from + y * STRIDE_H * PITCH + place(2 * s), apart), operand<128>(base + s / 4 * BN * 128) + s % 4 * 2, s > 0);
            }
            mma_commit();
        };
        multiply(0, acc[0]);
#pragma unroll
        for (int y = 0; y < MINE; ++y) {
            if (y + 1 < MINE) {
                multiply(y + 1, acc[(y + 1) % 2]);
                mma_wait<1>();
            } else
                mma_wait<0>();
            const float(&sum)[BN / 2] = acc[y % 2];
#pragma unroll
            for (int g = 0; g < BN / 32; ++g)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    u32 v[4];
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        float x = sum[g * 16 + e * 4 + half * 2], y = sum[g * 16 + e * 4 + half * 2 + 1];
                        activate_two<ACT, HALVED>(x, y, a.act);
                        v[e] = pack(x, y);
                    }
                    if (p0 + y < a.p && q + half * 8 < a.q && g * 32 + lane % 4 * 8 < a.k)
                        *reinterpret_cast<uint4*>(out + ((y * a.q + half * 8) * a.k + g * 32) * 2) = make_uint4(v[0], v[1], v[2], v[3]);
                }
        }
        __syncthreads();  // the patch may be filled again
    }
    if (fresh) barrier_wait(bar, 0);
}
