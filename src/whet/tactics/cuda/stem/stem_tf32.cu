// A first convolution (up to 3 input channels) of a f32 image in TF32, straight from the image: a bulk copy brings the piece of the image that a tile needs,
// channel by channel, and the block's threads interleave it: a pixel of four channels is 16 bytes of shared memory, a cell. Pixels of one phase (column
// modulo STRIDE_W) have a separate plane, so the pixels of one tap in eight adjacent windows are eight consecutive cells: rows of a K-major operand
// without a swizzle, which the tensor cores read in place. Nothing is gathered, no fragment is loaded. K runs over the taps, two a step: those of phase
// 0 first, row by row, so that a step's second tap always follows its first.
// Pixels are rounded to TF32 on their way, weights by the host. The fourth channel of every pixel is 1, outside the image too: its weights in the first three
// taps are the bias, in three parts. If the number of taps is odd the last step reads its tap twice, with half of its weights each.
// Rows of the weights are permuted in 16s so that a thread's accumulators are four adjacent channels, 16 bytes that it stores directly.
// A block takes 64 columns x TH rows of results, its warpgroups alternate rows; the next tile's input is prefetched. Input pieces begin at columns that are
// multiples of four, LEAD pixels in front of the first window: the copy engine takes no others (it calls them an illegal instruction).
// Constants: C (at most 3), R, S, STRIDE_H, STRIDE_W (1 or 2), LEAD, TH, WGS, BN (multiple of 16), BLOCKS, ACT, TERMS (1).
#define BF16 0
#include "common.cuh"
#include "tf32.cuh"
#include "wgmma"

constexpr int THREADS = WGS * 128, MINE = TH / WGS;                          // rows of results of a warpgroup
constexpr int TW = 64, PIXEL = 16;
constexpr int ROWS = (TH - 1) * STRIDE_H + R, COLUMNS = (LEAD + 63 * STRIDE_W + S + 3) / 4 * 4;
constexpr int PITCH = COLUMNS / STRIDE_W * 16, PLANE = ROWS * PITCH;         // bytes of a row's pixels of a phase, and of all rows
constexpr int TAPS = R * S, STEPS = (TAPS + 1) / 2, CHUNKS = (STEPS + 3) / 4;
constexpr int PIECE = ROWS * COLUMNS * 4;                                    // bytes of a channel of the image
constexpr int UNITS = ROWS * COLUMNS / 2, EACH = (UNITS + THREADS - 1) / THREADS;  // two pixels are put at once
static_assert(C <= 3 && TAPS >= 3 && TH % WGS == 0 && BN % 16 == 0 && (STRIDE_W == 1 || STRIDE_W == 2) && COLUMNS <= 256 && ROWS <= 256, "tile");

#include "arguments"

#include "image_tiles.cuh"

// Offset of tap i, in the order of K, from its window's first cell.
DEV constexpr int place(int i) {
    for (int phase = 0; phase < STRIDE_W; ++phase) {
        const int first = (phase + LEAD) % STRIDE_W, across = (S - first + STRIDE_W - 1) / STRIDE_W;  // taps of a row with this phase: the first, and their number
        if (i < R * across) return phase * PLANE + i / across * PITCH + ((LEAD + first) / STRIDE_W + i % across) * 16;
        i -= R * across;
    }
    return 0;
}
// Operands from their addresses in units of sixteen: eight windows, the next eight 128 bytes further, the second half of K `apart` bytes after the first; rows of weights.
DEV u64 windows(u32 at, int apart) { return (u64)(at + (apart << 12)) | (8ull << 32); }
DEV u64 filters(u32 at) { return (u64)(at + (1 << 16)) | ((64ull | 1ull << 30) << 32); }

// A pixel: channels that are not there are 0, the fourth is 1.
DEV void put(u32 to, float r, float g, float b) {
    store_shared_f4(to, __uint_as_float(to_tf32(r)), C > 1 ? __uint_as_float(to_tf32(g)) : 0.f, C > 2 ? __uint_as_float(to_tf32(b)) : 0.f, 1.f);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) stem_tf32(const __grid_constant__ Args a) {
    extern __shared__ u8 raw[];
    const u32 base = (shared_address(raw) + 1023) & ~1023u, patch = base + CHUNKS * BN * 128, piece = patch + (STRIDE_W * PLANE + 127) / 128 * 128;
    const u32 held = piece + C * PIECE, full = held + 8;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, group = warp / 4;  // the shuffle tells the compiler: equal in a warp
    const bool one = elect();
    auto ask = [&](const Tile& t) {
        barrier_expect(full, C * PIECE);
        load_box4(piece, &a.input, full, t.tx * 64 * STRIDE_W - a.left, t.ty * TH * STRIDE_H - a.top, 0, t.n);
    };
    if (warp == 0 && one) {
        map_prefetch(&a.input);
        barrier_init(held, 1);
        barrier_init(full, 1);
        barrier_init_fence();
        barrier_expect(held, CHUNKS * BN * 128);
        for (int i = 0; i < CHUNKS; ++i) load_box2(base + i * BN * 128, &a.weights, held, i * 32, 0);
    }
    let_next_start();
    Tile here(a, blockIdx.x);
    const Tile step(a, gridDim.x);
    __syncthreads();  // the barriers are there
    wait_for_previous();
    if (warp == 0 && one) ask(here);
    bool fresh = true;
    for (int tile = blockIdx.x, phase = 0; tile < a.tiles; tile += gridDim.x, phase ^= 1) {
        barrier_wait(full, phase);
#pragma unroll
        for (int j = 0; j < EACH; ++j) {
            const int i = threadIdx.x + j * THREADS;
            if (j + 1 < EACH || i < UNITS) {
                float2 v[3];
#pragma unroll
                for (int c = 0; c < 3; ++c) v[c] = c < C ? load_shared_f2(piece + c * PIECE + i * 8) : make_float2(0.f, 0.f);
                const u32 to = patch + i * (STRIDE_W == 1 ? 32 : 16);
                put(to, v[0].x, v[1].x, v[2].x);
                put(to + (STRIDE_W == 1 ? 16 : PLANE), v[0].y, v[1].y, v[2].y);
            }
        }
        fence_async();
        __syncthreads();
        const int q = here.tx * 64 + warp % 4 * 16 + lane / 4, p0 = here.ty * TH + group * MINE;
        float* out = a.out + (((long long)here.n * a.p + p0) * a.q + q) * a.k + lane % 4 * 4;
        if (tile + gridDim.x < a.tiles) {
            here.add(a, step);
            if (warp == 0 && one) ask(here);
        }
        if (fresh) { barrier_wait(held, 0); fresh = false; }
        // Shuffled again for every tile, so that descriptors are computed in uniform registers when needed, and are not all kept from tile to tile.
        const u32 from = __shfl_sync(~0u, (patch + group * MINE * STRIDE_H * PITCH) >> 4, 0), weights = __shfl_sync(~0u, base >> 4, 0);
        float acc[2][BN / 2];
        auto multiply = [&](int y, float (&sum)[BN / 2]) {
            mma_begin();
#pragma unroll
            for (int s = 0; s < STEPS; ++s) {
                const int apart = 2 * s + 1 < TAPS ? place(2 * s + 1) - place(2 * s) : 0;
                wgmma(sum, windows(from + (y * STRIDE_H * PITCH + place(2 * s)) / 16, apart), filters(weights + s / 4 * BN * 8 + s % 4 * 2), s > 0);
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
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int g = 0; g < BN / 16; ++g) {
                    float v[4];
#pragma unroll
                    for (int e = 0; e < 4; ++e) v[e] = activate<ACT>(sum[g * 8 + e / 2 * 4 + half * 2 + e % 2], a.act);
                    if (p0 + y < a.p && q + half * 8 < a.q && g * 16 + lane % 4 * 4 < a.k)
                        store_four(out + half * 8 * a.k + g * 16, v[0], v[1], v[2], v[3]);
                }
            out += a.q * a.k;
        }
        __syncthreads();  // the patch may be filled again
    }
    if (fresh) barrier_wait(held, 0);
}
