// A convolution of few channels (16, 32 or 64) by tiles of the image: a block computes TH x TW output pixels, one bulk copy loads the input
// of their windows, and every tap is read from it as register fragments, for any stride. The weights of a block's output channels stay in
// shared memory. conv.cu copies the pixels of each tap; here an input pixel is copied once (twice at the border of two tiles).
// Shared memory has rows of 128 bytes with PACK pixels each, in TMA's 128-byte swizzle: the image is viewed with PACK times the channels and 1 / PACK
// of the width, so a tile's first pixel is a multiple of PACK, LEAD pixels before its windows.
// With FRONT the input first passes a 1x1 convolution with equal channel counts (activation FRONT_ACT): every pixel of an input tile is multiplied once in
// shared memory, and the results (zeros outside the image) are stored after it in the same order. Pixels at the border of two tiles are computed twice.
// Where BN is a multiple of 32, rows of the weights are permuted in 32s so that a thread's accumulators are eight adjacent channels of a pixel (PERMUTED), which it
// stores directly; else the threads of a quad exchange values. Weights and biases of SiLU are halved unless a residual is added before it (HALVED; FRONT_HALVED).
// With RUN > 1 (stride 1) a warp computes RUN consecutive rows of 16 pixels: a loaded fragment is used for all rows with windows that contain it. A residual
// that equals the input is then read from the input's tile (OWN).
// A block may have several GROUPS of threads with separate tiles: they share the weights and do not synchronize, so products and epilogues overlap.
// Constants: C, R, S, STRIDE_H, STRIDE_W, LEAD, TH, TW (TH * TW a multiple of 64), SLOTS (input tiles at a time), BN (multiple of 16), BLOCKS, ACT, BF16,
// RESIDUAL (0 none, 1 before the activation, 2 after it), RUN, OWN, GROUPS.
#include "common.cuh"
#include "wgmma"

#ifndef FRONT
#define FRONT 0
#endif
#ifndef RUN
#define RUN 1
#endif
#ifndef GROUPS
#define GROUPS 1
#endif
#ifndef OWN
#define OWN 0
#endif

constexpr int THREADS = TH * TW * 2 / RUN, PACK = 64 / C, PIXEL = C * 2;
constexpr int ROWS = (TH - 1) * STRIDE_H + R, COLUMNS = (LEAD + (TW - 1) * STRIDE_W + S + PACK - 1) / PACK * PACK;
constexpr int SLOT = (ROWS * COLUMNS * PIXEL + 1023) / 1024 * 1024;
constexpr int STEPS = R * S * C / 16, CHUNKS = (STEPS + 3) / 4;             // of 16 and of 64 elements of K
constexpr int READ = (RUN - 1 + R) * S * C / 16;                            // fragments that a warp reads
constexpr int TALL = (ROWS * COLUMNS + 63) / 64, ROOM = (SLOTS + FRONT) * SLOT;  // FRONT: 64s of pixels; bytes of a group's tiles
constexpr u32 NOWHERE = ~0u;
constexpr bool PERMUTED = BN % 32 == 0;
constexpr int DEEP = 2;                                                     // steps with fragments read at once
static_assert(TH * TW % 64 == 0 && BN % 16 == 0 && 64 % C == 0 && C >= 16 && TW * STRIDE_W % PACK == 0, "tile");
static_assert(RUN == 1 || (STRIDE_H == 1 && TH % RUN == 0 && TW % 16 == 0 && TH * TW % (64 * RUN) == 0), "rows of a warp");

#include "arguments"

#include "image_tiles.cuh"

DEV u32 swizzled(u32 at) { return at ^ (at & 0x380) >> 3; }  // index of sixteen bytes in rows of 128: slots start at whole swizzle patterns, so the address determines it

// Accumulators start with their biases, those of column j * 8 at `bias` + j * apart (in every four of columns permuted).
template <int COUNT> DEV void begin_with(float (&accumulators)[COUNT / 2], u32 bias, int apart) {
#pragma unroll
    for (int j = 0; j < COUNT / 8; ++j) {
        const float2 v = load_shared_f2(bias + (apart == 8 ? j / 4 * 128 + j % 4 * 8 : j * apart));
        accumulators[j * 4] = accumulators[j * 4 + 2] = v.x;
        accumulators[j * 4 + 1] = accumulators[j * 4 + 3] = v.y;
    }
}

DEV void load_shared4(u32 (&v)[4], u32 a) {
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(a));
}

extern "C" __global__ void __launch_bounds__(THREADS * GROUPS, BLOCKS) few_channel(const __grid_constant__ Args a) {
    extern __shared__ u8 raw[];
    const int all = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;  // the shuffle tells the compiler: equal in a warp
    const int warp = GROUPS == 1 ? all : all % (THREADS / 32), group = GROUPS == 1 ? 0 : all / (THREADS / 32);
    const u32 base = (shared_address(raw) + 1023) & ~1023u, front = base + CHUNKS * BN * 128, rooms = front + (FRONT ? C * 128 : 0);
    const u32 between = rooms + group * ROOM, patches = between + (FRONT ? SLOT : 0), bias = rooms + GROUPS * ROOM;
    const u32 held = bias + BN * 4 + (FRONT ? C * 4 : 0), full = held + 8 + group * SLOTS * 8;
    const int n0 = (int)blockIdx.x % a.tiles_n * BN, blocks = (int)gridDim.x / a.tiles_n, stride = blocks * GROUPS;
    const int first = (int)blockIdx.x / a.tiles_n + group * blocks;
    auto together = [&]() {  // everyone of the group
        if (GROUPS == 1) __syncthreads();
        else named_barrier(group + 1, THREADS);
    };
    const bool one = elect();
    auto ask = [&](int tile, int slot) {
        const Tile t(a, tile);
        barrier_expect(full + 8 * slot, ROWS * COLUMNS * PIXEL);
        load_box4(patches + slot * SLOT, &a.input, full + 8 * slot, 0, (t.tx * TW * STRIDE_W - a.pad_w - LEAD) / PACK, t.ty * TH * STRIDE_H - a.pad_h, t.n);
    };
    Tile here(a, first);
    const Tile step(a, stride);
    if (all == 0 && one) {
        map_prefetch(&a.input);
        barrier_init(held, 1);
        for (int i = 0; i < GROUPS * SLOTS; ++i) barrier_init(full + 8 * i, 1);
        barrier_init_fence();
        barrier_expect(held, CHUNKS * BN * 128 + (FRONT ? C * 128 : 0));
        for (int i = 0; i < CHUNKS; ++i) load_box2(base + i * BN * 128, &a.weights, held, i * 64, n0);
#if FRONT
        load_box2(front, &a.front, held, 0, 0);
#endif
    }
    let_next_start();
    if (threadIdx.x < BN) store_shared_f(bias + threadIdx.x * 4, a.bias[n0 + threadIdx.x]);
#if FRONT
    if (threadIdx.x < C) store_shared_f(bias + BN * 4 + threadIdx.x * 4, a.front_bias[threadIdx.x]);
#endif
    __syncthreads();
    wait_for_previous();
    int asked = first;
    for (int i = 0; i < SLOTS && asked < a.tiles; ++i, asked += stride)
        if (warp == 0 && one) ask(asked, i);
    int slot = 0, phase = 0;
    auto ask_next = [&]() {  // into the slot that everyone has read
        if (asked >= a.tiles) return;
        if (warp == 0 && one) ask(asked, slot);
        asked += stride;
    };
    const int row = warp * 16 / TW * RUN * TW + warp * 16 % TW, m0 = row + lane % 16;  // of the tile's pixels: the warp's first, and the one whose channels this lane's address gives
    const u32 own = window_of(m0) + LEAD * PIXEL + lane / 16 * 16;
    auto place_of = [&](int r, int b) {  // destination of this thread's sixteen bytes, in units of sixteen, or NOWHERE
        const int item = b * 4 + lane % 4, col = n0 + (PERMUTED ? b / 2 * 32 + lane % 4 * 8 : item % (BN / 8) * 8);
        const int m = row + lane / 4 + (PERMUTED ? b % 2 : item / (BN / 8)) * 8;
        const int p = here.ty * TH + m / TW + r, q = here.tx * TW + m % TW;
        return p < a.p && q < a.q && col < a.k ? ((here.n * a.p + p) * a.q + q) * (u32)(a.k / 8) + col / 8 : NOWHERE;
    };
    for (int tile = first; tile < a.tiles; tile += stride) {
#if RUN == 1
        u32 to[BN / 16];
#pragma unroll
        for (int b = 0; b < BN / 16; ++b) to[b] = place_of(0, b);
#endif
#if RESIDUAL && !OWN
        uint4 residual[RUN][BN / 16];
#pragma unroll
        for (int i = 0; i < RUN * BN / 16; ++i) {
            const int r = i / (BN / 16), b = i % (BN / 16);
#if RUN == 1
            const u32 from = to[b];
#else
            const u32 from = place_of(r, b);
#endif
            residual[r][b] = from != NOWHERE ? a.residual[from] : make_uint4(0, 0, 0, 0);
        }
#endif
        if (tile == first) barrier_wait(held, 0);
        barrier_wait(full + 8 * slot, phase);
#if FRONT
        for (int i = warp / 4; i < TALL; i += THREADS / 128) {
            const int top = i * 64 + warp % 4 * 16, last = ROWS * COLUMNS - 1;
            const u32 at = min(top + lane % 16, last) * PIXEL + lane / 16 * 16, place = swizzled(at);
            float accumulators[C / 2];
            u32 g[C / 16][4];
#pragma unroll
            for (int s = 0; s < C / 16; ++s) load_fragment(g[s], patches + slot * SLOT + (place ^ s * 32));
            begin_with<C>(accumulators, bias + BN * 4 + lane % 4 * 8, 32);
            mma_begin();
#pragma unroll
            for (int s = 0; s < C / 16; ++s) wgmma_registers(accumulators, g[s], operand<128>(front) + s * 2, 1);
            mma_commit();
            bool inside[2];  // rows beyond the tile are its last pixel again
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int px = min(top + lane / 4 + half * 8, last), y = px / COLUMNS, x = px - y * COLUMNS;
                inside[half] = (u32)(here.ty * TH * STRIDE_H - a.pad_h + y) < (u32)a.h && (u32)(here.tx * TW * STRIDE_W - a.pad_w - LEAD + x) < (u32)a.w;
            }
            mma_wait<0>();
#pragma unroll
            for (int s = 0; s < C / 16; ++s) {
                u32 v[4];
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    float x = accumulators[(s * 2 + e / 2) * 4 + e % 2 * 2], y = accumulators[(s * 2 + e / 2) * 4 + e % 2 * 2 + 1];
                    activate_two<FRONT_ACT, FRONT_HALVED>(x, y, a.front_act);
                    v[e] = inside[e % 2] ? pack(x, y) : 0;
                }
                store_fragment(v, between + (place ^ s * 32));
            }
        }
        together();
        if (!OWN) ask_next();
        const u32 from = between + own;
#else
        const u32 from = patches + slot * SLOT + own;
#endif
        float acc[RUN][BN / 2];
#pragma unroll
        for (int r = 0; r < RUN; ++r) begin_with<BN>(acc[r], bias + lane % 4 * (PERMUTED ? 32 : 8), PERMUTED ? 8 : 32);
        u32 f[2][DEEP][4];
#pragma unroll
        for (int s = 0; s < READ; s += DEEP) {
            u32(&g)[DEEP][4] = f[s / DEEP % 2];
#pragma unroll
            for (int d = 0; d < DEEP && s + d < READ; ++d) {
                const int tap = (s + d) * 16 / C, part = (s + d) * 16 % C / 16;
                const u32 at = from + (tap / S * COLUMNS + tap % S) * PIXEL;
                load_fragment(g[d], swizzled(at) ^ part * 32);
            }
            mma_begin();
#pragma unroll
            for (int d = 0; d < DEEP && s + d < READ; ++d)
#pragma unroll
                for (int r = 0; r < RUN; ++r) {
                    const int k = s + d - r * S * C / 16;  // the step of row r
                    if (k >= 0 && k < STEPS) wgmma_registers(acc[r], g[d], operand<128>(base + k / 4 * BN * 128) + k % 4 * 2, 1);
                }
            mma_commit();
            mma_wait<1>();
        }
        if (!OWN) together();  // everyone has read the tile
        if (!FRONT) ask_next();
        mma_wait<0>();
#pragma unroll
        for (int i = 0; i < RUN * BN / 16; ++i) {
            const int r = i / (BN / 16), b = i % (BN / 16);
            u32 v[4];
#if OWN
            u32 add[4];
            const int m = row + lane / 4 + b % 2 * 8;
            const u32 at = patches + slot * SLOT + ((m / TW + r + a.pad_h) * COLUMNS + m % TW + LEAD + a.pad_w) * PIXEL + (b / 2 * 4 + lane % 4) * 16;
            load_shared4(add, swizzled(at));
#elif RESIDUAL
            u32 add[4] = {residual[r][b].x, residual[r][b].y, residual[r][b].z, residual[r][b].w};
            if (!PERMUTED) transpose_quad(add, lane);
#endif
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int j = PERMUTED ? b / 2 * 4 + i : (b * 4 + i) % (BN / 8), half = PERMUTED ? b % 2 : (b * 4 + i) / (BN / 8);
                float x = acc[r][j * 4 + half * 2], y = acc[r][j * 4 + half * 2 + 1];
#if RESIDUAL
                const float2 other = unpack(add[i]);
                if (RESIDUAL == 1) { x += other.x; y += other.y; }
#endif
                activate_two<ACT, HALVED>(x, y, a.act);
#if RESIDUAL == 2
                x += other.x;
                y += other.y;
#endif
                v[i] = pack(x, y);
            }
            if (!PERMUTED) transpose_quad(v, lane);
#if RUN == 1
            const u32 into = to[b];
#else
            const u32 into = place_of(r, b);
#endif
            if (into != NOWHERE) a.out[into] = make_uint4(v[0], v[1], v[2], v[3]);
        }
        if (OWN) {
            together();  // all threads have read the tile and the value between
            ask_next();
        }
        if (++slot == SLOTS) { slot = 0; phase ^= 1; }
        here.add(a, step);
    }
}
