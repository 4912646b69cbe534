// A first convolution (few input channels) straight from the image: a block takes TH x TW output pixels, puts the piece of the image that
// they need into shared memory (16-bit, channels filled to 4), and multiplies with the windows read as register fragments; the weights
// stay in shared memory. K runs over filter rows, the TAPS of a row, the 4 channels. The next tile's pixels are on their way meanwhile.
// If windows start at even pixels (an even STRIDE_W) two taps are 16 aligned bytes, and one instruction reads a whole fragment.
// With PAIRS (a f32 image, channels first; tiles and rows begin at even pixels) two pixels of a channel come with one load.
// Constants: C (channels, at most 4), R, TAPS (multiple of 4; with floats of 2 where R * TAPS is one of 4), STRIDE_H, STRIDE_W, TH, TW (multiple of 8), BN (multiple of 16), FROM (type), NHWC, ACT, BF16, BLOCKS,
// TO (0: 16 bits; 3 i8, 4 u8: integers in, products and out; pixels outside are the zero point, which the bias takes back; weight rows are
// permuted as in conv.cu, BN is a multiple of 32), IN8 (FROM with TO, else 0), FOLD (as in conv.cu, without a residual).
// With QUANT (FROM a float, IN8 the integers) pixels become integers on their way: round(x * image_per_step) + in_zero, NaN becomes 0.
// With POOL (BN 64) a block computes the maxima of POOL_H x POOL_W square windows, POOL_STRIDE apart, POOL_PAD results outside; TH and TW
// are the results that they read, in any number; results at the border of two blocks are computed by both.
#include "common.cuh"
#include "vector.cuh"
#include "wgmma"

#ifndef PAIRS
#define PAIRS 0
#endif

constexpr int GROUPS = (TH * TW + 63) / 64, THREADS = GROUPS * 128;
constexpr int ROWS = (TH - 1) * STRIDE_H + R, COLUMNS = (TW - 1) * STRIDE_W + TAPS;
constexpr int FOURS = R * TAPS / 4, STEPS = TO ? (FOURS + 1) / 2 : FOURS, CHUNKS = (STEPS + 3) / 4;               // of 16 and of 64 elements of K
constexpr int PIXELS = ROWS * COLUMNS, PIXEL = TO ? 4 : 8, PATCH_BYTES = PIXELS * PIXEL;
constexpr int UNIT = PAIRS ? 2 : 1, UNITS = PIXELS / UNIT, EACH = (UNITS + THREADS - 1) / THREADS;  // pixels that are fetched together
constexpr bool WHOLE = !TO && STRIDE_W % 2 == 0 && COLUMNS % 2 == 0;        // fragments by one instruction
constexpr int DEEP = 2;                                                     // steps with fragments read at once
#if POOL
constexpr int WINDOW = TH - (POOL_H - 1) * POOL_STRIDE;                     // rows and columns of a window
constexpr int DOWN = POOL_H * POOL_STRIDE, RIGHT = POOL_W * POOL_STRIDE;    // results from tile to tile
constexpr int RESULT = TO ? 64 : 128, PARTS = RESULT / 16;                  // bytes of a result's channels, and 16-byte parts of them
DEV int placed(int m, int part) { return m * RESULT + ((TO ? part ^ (m >> 1 & 3) : part ^ (m & 7)) << 4); }
static_assert(BN == 64 && WINDOW == TW - (POOL_W - 1) * POOL_STRIDE && WINDOW > 0, "pooling");
#else
constexpr int DOWN = TH, RIGHT = TW, POOL_PAD = 0;
static_assert(TH * TW % 64 == 0 && TW % 8 == 0, "tile");
#endif
static_assert(R * TAPS % 4 == 0 && TAPS % (TO ? 4 : 2) == 0 && BN % 16 == 0 && !(PAIRS && (TO || FROM || NHWC || COLUMNS % 2)), "tile");

#include "arguments"
#if POOL
DEV u32 larger(u32 a, u32 b) {
    if (TO) return TO == 4 ? __vmaxu4(a, b) : __vmaxs4(a, b);
    u32 r;
    if (BF16) asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    else asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
#endif

#include "image_tiles.cuh"

#include "stem_image.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) stem(const __grid_constant__ Args a) {
    extern __shared__ u8 raw[];
    const u32 base = (shared_address(raw) + 1023) & ~1023u, patch = base + CHUNKS * BN * 128, bar = patch + (PATCH_BYTES + 15) / 16 * 16;
#if POOL
    const u32 results = (bar + 8 + 127) & ~127u;  // of a tile: rows of 16-byte parts in an order that spreads over the banks
#endif
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;  // the shuffle tells the compiler: equal in a warp
    if (threadIdx.x == 0) {
        barrier_init(bar, 1);
        barrier_init_fence();
        barrier_expect(bar, CHUNKS * BN * 128);
        for (int i = 0; i < CHUNKS; ++i) load_box2(base + i * BN * 128, &a.weights, bar, i * (TO ? 128 : 64), 0);
    }
    let_next_start();
    float2 bias[BN / 8];
    if (!TO)
#pragma unroll
    for (int j = 0; j < BN / 8; ++j) bias[j] = *reinterpret_cast<const float2*>(a.bias + j * 8 + lane % 4 * 2);
    Vec8 kept_factor[TO ? BN / 32 : 1], kept_bias[TO ? BN / 32 : 1];
    if (TO)
#pragma unroll
        for (int g = 0; g < BN / 32; ++g) {
            kept_factor[TO ? g : 0] = load8<0>(reinterpret_cast<const u8*>(a.factor), g * 32 + lane % 4 * 8);
            kept_bias[TO ? g : 0] = load8<0>(reinterpret_cast<const u8*>(a.bias), g * 32 + lane % 4 * 8);
        }
    Number pixels[EACH][C * UNIT];
    Tile here(a, blockIdx.x), next = here;
    const Tile step(a, gridDim.x);
    wait_for_previous();
    if (blockIdx.x < a.tiles) fetch(a, here, pixels);
    __syncthreads();
    bool fresh = true;
    for (int tile = blockIdx.x; tile < a.tiles; tile += gridDim.x) {
#pragma unroll
        for (int j = 0; j < EACH; ++j) {
            const int i = threadIdx.x + j * THREADS;
            const Number* v = pixels[j];
#if TO
            if (i < PIXELS) store_shared(patch + i * 4, v[0] | (C > 1 ? v[1 % C] << 8 : 0) | (C > 2 ? v[2 % C] << 16 : 0) | (C > 3 ? v[3 % C] << 24 : 0));
#else
            u32 w[2 * UNIT];
#pragma unroll
            for (int u = 0; u < UNIT; ++u) {
                w[2 * u] = pack(v[u * C], C > 1 ? v[u * C + 1 % C] : 0.f);
                w[2 * u + 1] = pack(C > 2 ? v[u * C + 2 % C] : 0.f, C > 3 ? v[u * C + 3 % C] : 0.f);
            }
#if PAIRS
            if (i < UNITS) asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(patch + i * 16), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]) : "memory");
#else
            if (i < PIXELS) asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(patch + i * 8), "r"(w[0]), "r"(w[1]) : "memory");
#endif
#endif
        }
        __syncthreads();
        next.add(a, step);
        if (tile + gridDim.x < a.tiles) fetch(a, next, pixels);
        if (fresh) { barrier_wait(bar, 0); fresh = false; }
        const int row = warp % 4 * 16 + lane / 4 + warp / 4 * 64;  // of the block's pixels; the fragment's other half is 8 further
        u32 from[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int m = TH * TW % 64 == 0 ? row + half * 8 : min(row + half * 8, TH * TW - 1);
            from[half] = patch + window_of(m) + lane % 4 * 4;
        }
        if (WHOLE) {  // this lane's address gives one pixel's taps; lanes of the upper half give the second two: next to the first two, or a row further
            const int m = min(warp % 4 * 16 + warp / 4 * 64 + lane % 16, TH * TW - 1);
            from[0] = patch + window_of(m) + lane / 16 * 16;
            from[1] = from[0] + lane / 16 * (COLUMNS - TAPS) * 8;
        }
        Accumulator acc[BN / 2];
        u32 f[2][DEEP][4];
#pragma unroll
        for (int s = 0; s < STEPS; s += DEEP) {
            u32(&g)[DEEP][4] = f[s / DEEP % 2];
#pragma unroll
            for (int d = 0; d < DEEP && s + d < STEPS; ++d) {
#if TO
#pragma unroll
                for (int h = 0; h < 2; ++h) {  // four taps of four channels: 16 bytes
                    const int four = (s + d) * 2 + h < FOURS ? (s + d) * 2 + h : 0, at = four * 4 / TAPS * COLUMNS * 4 + four * 4 % TAPS * 4;
                    g[d][2 * h] = load_shared(from[0] + at);
                    g[d][2 * h + 1] = load_shared(from[1] + at);
                }
#else
                const int two = (s + d) * 4, at = two / TAPS * COLUMNS * 8 + two % TAPS * 8;  // twice two taps of four channels: 16 bytes each
                const int more = (two + 2) / TAPS * COLUMNS * 8 + (two + 2) % TAPS * 8;
                if (WHOLE) load_fragment(g[d], from[more == at + 16 ? 0 : 1] + at);
                else {
                    g[d][0] = load_shared(from[0] + at);
                    g[d][1] = load_shared(from[1] + at);
                    g[d][2] = load_shared(from[0] + more);
                    g[d][3] = load_shared(from[1] + more);
                }
#endif
            }
            mma_begin();
#pragma unroll
            for (int d = 0; d < DEEP && s + d < STEPS; ++d)
                wgmma_registers(acc, g[d], operand<128>(base + (s + d) / 4 * BN * 128) + (s + d) % 4 * 2, s + d > 0);
            mma_commit();
            mma_wait<1>();
        }
        mma_wait<0>();
        __syncthreads();  // the patch may be filled again
        if (TO) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int m = row + half * 8, p = here.ty * DOWN - POOL_PAD + m / TW, q = here.tx * RIGHT - POOL_PAD + m % TW;
#pragma unroll
                for (int g = 0; g < BN / 32; ++g) {
                    const int col = g * 32 + lane % 4 * 8;
                    const Vec8 by = kept_factor[TO ? g : 0], add = kept_bias[TO ? g : 0];
                    Vec8 v;
#pragma unroll
                    for (int e = 0; e < 8; ++e) {
                        const float x = fmaf((float)acc[g * 16 + e / 2 * 4 + half * 2 + e % 2], by.v[e], add.v[e]);
                        v.v[e] = FOLD ? x : activate<ACT>(x, a.act) * a.per_step + a.zero;
                    }
                    if (FOLD) {
                        const float late[8] = {a.act.b, a.act.b, a.act.b, a.act.b, a.act.b, a.act.b, a.act.b, a.act.b};
                        fold<ACT>(v.v, a.act, late);
                    }
#if POOL
                    u8* out = raw + (results - shared_address(raw)) + placed(m, col / 16) + (col & 8);
                    constexpr long long to = 0;
                    constexpr u32 LEAST = TO == 4 ? 0 : 0x80808080u;  // value outside all windows
                    if ((u32)p >= (u32)a.p || (u32)q >= (u32)a.q) *reinterpret_cast<uint2*>(out) = make_uint2(LEAST, LEAST);
                    else {
#else
                    u8* out = a.out;
                    const long long to = (((long long)here.n * a.p + p) * a.q + q) * a.k + col;
                    if (p < a.p && q < a.q && col < a.k) {
#endif
                        if (FOLD) *reinterpret_cast<uint2*>(out + to) = make_uint2(steps_of(v.v[0], v.v[1], v.v[2], v.v[3], a.per_step, a.zero),
                                                                                     steps_of(v.v[4], v.v[5], v.v[6], v.v[7], a.per_step, a.zero));
                        else store8<TO == 0 ? 4 : TO>(out, to, v);
                    }
                }
            }
#if !POOL
            here = next;
            continue;
#endif
        }
#pragma unroll
        for (int b = 0; b < (TO ? 0 : BN / 16); ++b) {
            u32 v[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int j = (b * 4 + i) % (BN / 8), half = (b * 4 + i) / (BN / 8);
                float x = acc[j * 4 + half * 2] + bias[j].x, y = acc[j * 4 + half * 2 + 1] + bias[j].y;
                activate_two<ACT>(x, y, a.act);
                v[i] = pack(x, y);
            }
            transpose_quad(v, lane);
            const int item = b * 4 + lane % 4, col = item % (BN / 8) * 8, m = row + item / (BN / 8) * 8;
            const int p = here.ty * DOWN - POOL_PAD + m / TW, q = here.tx * RIGHT - POOL_PAD + m % TW;
#if POOL
            if ((u32)p >= (u32)a.p || (u32)q >= (u32)a.q) v[0] = v[1] = v[2] = v[3] = BF16 ? 0xff80ff80u : 0xfc00fc00u;  // no window sees them
            asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(results + placed(m, col / 8)), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
#else
            if (p < a.p && q < a.q && col < a.k)
                reinterpret_cast<uint4*>(a.out)[((here.n * a.p + p) * a.q + q) * (u32)(a.k / 8) + col / 8] = make_uint4(v[0], v[1], v[2], v[3]);
#endif
        }
#if POOL
        __syncthreads();
        for (int i = threadIdx.x; i < POOL_H * POOL_W * PARTS; i += THREADS) {  // 16 bytes of channels of a window each
            const int part = i % PARTS, x = i / PARTS % POOL_W, y = i / PARTS / POOL_W, p = here.ty * POOL_H + y, q = here.tx * POOL_W + x;
            uint4 v[WINDOW][WINDOW];
#pragma unroll
            for (int r = 0; r < WINDOW; ++r)
#pragma unroll
                for (int s = 0; s < WINDOW; ++s) {
                    const int m = (y * POOL_STRIDE + r) * TW + x * POOL_STRIDE + s;
                    const u32 at = results + placed(m, part);
                    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v[r][s].x), "=r"(v[r][s].y), "=r"(v[r][s].z), "=r"(v[r][s].w) : "r"(at));
                }
            uint4 most = v[0][0];
#pragma unroll
            for (int k = 1; k < WINDOW * WINDOW; ++k) {
                const uint4 w = v[k / WINDOW][k % WINDOW];
                most = make_uint4(larger(most.x, w.x), larger(most.y, w.y), larger(most.z, w.z), larger(most.w, w.w));
            }
            if (p < a.pool_p && q < a.pool_q && part * (TO ? 16 : 8) < a.k)
                *reinterpret_cast<uint4*>(a.out + (((long long)here.n * a.pool_p + p) * a.pool_q + q) * a.k * (TO ? 1 : 2) + part * 16) = most;
        }
#endif
        here = next;
    }
    if (fresh) barrier_wait(bar, 0);  // the weights are still on their way into this block's memory
}
