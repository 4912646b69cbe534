// Convolution and matrix product on Hopper's tensor cores: out[pixel, k] = act(sum over taps and channels of in * weight + bias[k] + residual).
// One block works on BM pixels x BN output channels; its first WGS*4 warps multiply, the last warp loads input and weight
// tiles through TMA into a ring of STAGES. With SK > 1 a cluster of SK blocks shares one tile: each
// sums a part of K, then adds the parts of its own rows, which the others have put into its shared memory (each store counts down a barrier there).
// With DIRECT (few tiles: latency counts) results go from registers to memory, else through shared memory and TMA.
// With HALO (stride 1, SK > 1 or DIRECT) a tile is some rows of one image, each `wide` = width + taps_w - 1 long: the input pixels of all
// filter taps are loaded once a channel step, and a tap is the same matrix shifted by r * wide + s rows; the ends of rows are not stored.
// With ONCE (the K steps of a block, which makes one tile) every step has a slot of its own: none is given back, and products are issued without waiting.
// With HOLD (all K steps; SK == 1) a block keeps its output channels and their weights, and only inputs stream.
// With GROUPED (a convolution of several groups) a tile of output channels reads the window of input channels that its groups have, and K runs over
// that window alone; weights within it that belong to no pair of a group are zeros.
// With PAIR the sum goes on over a second input, a 1x1 convolution of its own to the same output (1: stride 1, 2: any stride); its weights follow.
// With BETWEEN (integers; PAIR, no cluster, FOLD) the second input has sums of its own: those of the first become integers of type ADD, as if they were
// stored, which stay in registers and are what is added at the end.
// With DW (a stride; needs HALO and a 1x1 product) the product's input is a depthwise convolution of DW_R x DW_S taps that this kernel computes itself: a
// K step's input tile holds the pixels of all taps, and the multiplying warps make their rows of the operand from it, DW_ROWS a thread, ended by DW_ACT.
// With FORK (floats of 16 bits; how many channels of both results a panel has) the output channels are those of two results: from fork_from on, of the second.
// OUTS (1 to 3) output tiles take turns: with more than one the residual of the next OUTS - 1 tiles comes, and the last one leaves, while this one is finished.
// Constants: BM = 64*MI*WGS, BN, BK (channels a step), STAGES, SK, DIRECT, IM2COL, ACT, BLOCKS (resident per multiprocessor), BF16,
// OUT_F32 (f32 results; SK > 1 or DIRECT only), ODD (any number of output channels; DIRECT only), HALO (0, or slots for input tiles),
// IN8 (0, or 3 i8, 4 u8, 5 e4m3: input and weights of 8 bits). With IN8 a sum becomes a real number by a factor a channel, results are of
// type TO (numbers as in vector.cuh; 8-bit ones by a scale and a zero point), the residual of type ADD. Weight rows are permuted in
// 32s so that the sums of a thread belong to eight neighbouring channels. FOLD (integers out, activation a clip or SiLU: vector.cuh): factors, biases and the
// residual's step are such that the range of results is [0, 1]; per_step is their number less one, zero 1.5 * 2^23 + the lowest. With e4m3 out FOLD means that factors,
// biases, the residual's step and the lower limit are in steps of the result. BORDER: the bias depends on the pixel (input zero points at padding).
#include "common.cuh"
#include "vector.cuh"
#include "wgmma"

#ifndef DW
#define DW 0
#endif
#ifndef ONCE
#define ONCE 0
#endif
#ifndef BETWEEN
#define BETWEEN 0
#endif
#ifndef FORK
#define FORK 0
#endif

constexpr int BM = 64 * MI * WGS, ROW = BK * (IN8 ? 1 : 2);
constexpr int SIZE = IN8 ? Element<TO>::BYTES : OUT_F32 ? 4 : 2;           // bytes of a result
constexpr int A_BYTES = BM * ROW, B_BYTES = (BN * ROW + 1023) / 1024 * 1024;
constexpr int WIDEST = FORK ? FORK : 128 / SIZE;                            // the output tile lies in panels of PW columns
constexpr int PW = BN % WIDEST == 0 ? WIDEST : BN % (WIDEST / 2) == 0 ? WIDEST / 2 : WIDEST / 4, PANELS = BN / PW, PROW = PW * SIZE;
constexpr int PANEL_BYTES = 64 * PROW, OUT_BYTES = BM * BN * SIZE;
constexpr int PITCH = BN + 8;                                              // floats between rows of a partial sum: no bank conflicts
constexpr int SLICE = BM / SK;                                             // rows that each block of a cluster finishes
constexpr int EXTRA_BYTES = SK > 1 ? SK * SLICE * PITCH * 4 : DIRECT ? 0 : OUTS * OUT_BYTES;
constexpr bool STAGED = SK == 1 && !DIRECT;
constexpr int FACTOR_BYTES = IN8 ? WGS * BN * 16 : WGS * BN * 4;           // biases (IN8: factors too, and two turns of both)
// A product must wait for the one before on the same sums: small tiles keep several sets of sums.
constexpr int CHAINS = DW || BETWEEN ? 1 : !STAGED && MI * BN <= 32 && ROW >= 128 ? 4 : !STAGED && MI * BN <= 64 && ROW >= 64 ? 2 : 1;
constexpr int WORKERS = WGS * 128, THREADS = WORKERS + 32;
static_assert(BN % PW == 0 && BM % SK == 0 && !((OUT_F32 || HALO || ODD) && STAGED) && !(ODD && SK > 1), "tile");
static_assert(!FORK || (PW == FORK && FORK <= 64 && !IN8 && !OUT_F32 && !ODD && !HALO), "two results");
static_assert(!HOLD || SK == 1, "weights are held by blocks that work alone");
static_assert(!ONCE || (ONCE <= STAGES && !STAGED && !HOLD && !DW), "steps with slots of their own");
constexpr u32 PART_BYTES = BM * BN * 4 / SK * (SK - 1);  // of the sums that others send; a block's own stay in it
#if BETWEEN
static_assert(SK == 1 && !HALO && !ONCE && IN8 && FOLD && ADD >= 3, "two sums");
#endif
static_assert(!IN8 || (BN % 32 == 0 && !(STAGED && SIZE != 1)), "tile of 8-bit operands");
#if IN8 == 3 || IN8 == 4
typedef int Sum;
#else
typedef float Sum;
#endif

struct Args {
    TensorMap a, b, d, r;      // input, weights, output, residual
    const float* bias;         // [tiles_n * BN]
    const u8* residual;        // SK > 1 only: plain addresses, pitches in elements
    u8* out;
    int res_pitch, out_pitch;
    int m, n;                  // pixels, output channels
    int steps, csteps;         // K steps in all, and of one filter tap
    int taps_w;                // filter width
    int pixels, width;         // output pixels of an image, output width
    int stride_h, stride_w, pad_h, pad_w, dil_h, dil_w;
    int tiles, tiles_n;
    int has_residual;          // 1: added before the activation, 2: after it
    Act act;
    int wide, rows, height;    // HALO: pixels from row to row in a tile, output rows of a tile, output height
    int slot_bytes, box_bytes; // HALO: bytes of an input slot, and those that a copy fills
#if GROUPED
    int group_k, group_c;      // output and input channels of a group
#endif
#if IN8
    const float* factor;       // [tiles_n * BN]: real value of a step of the sum
    const u16* classes;        // BORDER: which of the biases each pixel of an image takes
    float per_step, zero;      // 8-bit results: steps of a real one, and the zero point
    float add_step, add_shift; // 8-bit residual: real = integer * step + shift
    int class_pitch;           // floats from bias to bias
#endif
#if PAIR
    TensorMap second;          // the second input; its K steps come last
    int first_steps, second_stride_h, second_stride_w;
#endif
#if BETWEEN
    const float *between_bias, *between_factor;  // [tiles_n * BN]: of the first sums
    float between_span, between_base;            // steps and lowest number of their integers, as per_step and zero with FOLD
#endif
#if DW
    const float* depthwise;    // [K steps][taps and a bias][BK]
    Act dw_act;
    int slot_wide;             // pixels from row to row in an input tile (`wide` counts its results)
#endif
#if FORK
    TensorMap fork;            // the second result, as `d`
    u8* fork_out;              // SK > 1 or DIRECT, as `out`
    int fork_from, fork_pitch; // its first output channel; elements from pixel to pixel
#endif
#if TRACE
    u64* trace;                // 16 times of each block
#endif
};
#if TRACE
#define MARK(i) { u64 now; asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now) :: "memory"); p.trace[blockIdx.x * 16 + i] = now; }
#else
#define MARK(i) {}
#endif

#include "conv_parts.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) conv(const __grid_constant__ Args p) {
    extern __shared__ u8 raw[];
    const u32 base = (shared_address(raw) + 1023) & ~1023u;
    const u32 a_bytes = HALO ? p.slot_bytes : A_BYTES;
    const u32 ring_a = base, ring_b = base + (HALO ? HALO : STAGES) * a_bytes, made = ring_b + (HOLD ? HOLD : STAGES) * B_BYTES;
    const u32 extra = made + (DW ? 2 * A_BYTES : 0);  // DW: two operands take turns in `made`
    const u32 bias_s = extra + EXTRA_BYTES, bars = bias_s + FACTOR_BYTES;
    const u32 full = bars, empty = bars + STAGES * 8, res_full = empty + STAGES * 8, a_full = res_full + WGS * OUTS * 8, a_empty = a_full + HALO * 8;
    const u32 parts = a_empty + HALO * 8, held = parts + 8;
#if DW
    const u32 dw_weights = (held + 8 + 15) & ~15u;
#endif
    const int taps = p.steps / p.csteps;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;  // the shuffle tells the compiler: equal in a warp
    const bool one = elect();
    const int rank = SK > 1 ? blockIdx.x % SK : 0;  // in the cluster
    const int first = SK > 1 ? blockIdx.x / SK : blockIdx.x, stride = SK > 1 ? p.tiles : gridDim.x;  // SK > 1: one tile a cluster
    const int k0 = SK > 1 ? p.steps * rank / SK : 0, k1 = SK > 1 ? p.steps * (rank + 1) / SK : p.steps;

    if (threadIdx.x == WORKERS) {
        MARK(0)
        map_prefetch(&p.a);
        map_prefetch(&p.b);
#if PAIR
        map_prefetch(&p.second);
#endif
        if (STAGED) { map_prefetch(&p.d); map_prefetch(&p.r); }
        for (int i = 0; i < STAGES; ++i) { barrier_init(full + 8 * i, 1); barrier_init(empty + 8 * i, WGS); }
        for (int i = 0; i < WGS * OUTS; ++i) barrier_init(res_full + 8 * i, 1);
        for (int i = 0; i < HALO; ++i) { barrier_init(a_full + 8 * i, 1); barrier_init(a_empty + 8 * i, WGS); }
        if (HOLD) barrier_init(held, 1);
        if (SK > 1) { barrier_init(parts, 1); barrier_expect(parts, PART_BYTES); }
        barrier_init_fence();
    }
    __syncthreads();
    if (SK > 1) cluster_arrive();
    let_next_start();

    if (warp == WGS * 4) {  // ---- input and weights: the whole warp walks, one lane asks (so that addresses stay uniform)
        constexpr u32 STEP_BYTES = HALO ? BN * ROW : HOLD ? A_BYTES : A_BYTES + BN * ROW;
        const int ahead = HOLD ? 0 : min(k1 - k0, STAGES);  // weights do not depend on the kernel in front: load them before waiting for it
        const int tap0 = HALO ? k0 % taps : 0, c0 = HALO ? k0 / taps : 0;
        Corner at_tile(p, first);  // divisions before the wait, not after it
        const Walk at_first(p, k0);
        for (int i = 0, tap = tap0, c = c0; i < ahead; ++i) {
            if (one) {
                const u32 bar = full + (HALO && ONCE ? 0 : 8 * i);  // ONCE: all weights on one barrier
                if (!(HALO && ONCE)) barrier_expect(bar, STEP_BYTES);
                else if (i == 0) barrier_expect(bar, ONCE * STEP_BYTES);
                load_box2(ring_b + i * B_BYTES, &p.b, bar, (HALO ? tap * p.csteps + c : k0 + i) * BK, at_tile.n0);
            }
            if (HALO && ++tap == taps) { tap = 0; ++c; }
        }
        if (HOLD && one) {
            barrier_expect(held, HOLD * BN * ROW);
            for (int i = 0; i < HOLD; ++i)
                load_box2(ring_b + i * B_BYTES, &p.b, held, (HALO ? i % taps * p.csteps + i / taps : i) * BK, at_tile.n0);
        }
        if (one) MARK(1)
        wait_for_previous();
        if (one) MARK(2)
        int slot = 0, turn = 0, a_slot = 0, a_turn = 0;
        for (int tile = first; tile < p.tiles; tile += stride) {
            if (tile != first) at_tile = Corner(p, tile);
            Walk at = at_first;
            int tap = tap0, c = c0;
            for (int k = k0; k < k1; ++k) {
                const u32 bar = full + 8 * slot;
                if (HALO && (k == k0 || tap == 0)) {
                    if (a_turn > 0) barrier_wait(a_empty + 8 * a_slot, (a_turn - 1) & 1);
                    if (one) {
#if DW
                        barrier_expect(a_full + 8 * a_slot, p.box_bytes + DW_BYTES);
                        load_bytes(dw_weights + a_slot * DW_BYTES, p.depthwise + c * (DW_BYTES / 4), DW_BYTES, a_full + 8 * a_slot);
#else
                        barrier_expect(a_full + 8 * a_slot, p.box_bytes);
#endif
                        load_box4(ring_a + a_slot * a_bytes, &p.a, a_full + 8 * a_slot, FIRST_CHANNEL c * BK, at_tile.w, at_tile.h, at_tile.image);
                    }
                    if (++a_slot == HALO) { a_slot = 0; ++a_turn; }
                }
                if (HALO && HOLD) {
                    if (++tap == taps) { tap = 0; ++c; }
                    continue;
                }
                const bool later = turn > 0 || slot >= ahead;
                if (turn > 0) barrier_wait(empty + 8 * slot, (turn - 1) & 1);
                if (one) {
                    if (later) {
                        barrier_expect(bar, STEP_BYTES);
                        if (!HOLD) load_box2(ring_b + slot * B_BYTES, &p.b, bar, (HALO ? tap * p.csteps + c : k) * BK, at_tile.n0);
                    }
                    if (HALO) {
#if PAIR == 1
                    } else if (k >= p.first_steps) {
                        load_box2(ring_a + slot * A_BYTES, &p.second, bar, (k - p.first_steps) * BK, at_tile.m0);
#elif PAIR
                    } else if (k >= p.first_steps) {
                        load_window(ring_a + slot * A_BYTES, &p.second, bar, (k - p.first_steps) * BK, at_tile.second_w, at_tile.second_h, at_tile.second_image, 0, 0);
#endif
                    } else if (IM2COL) {
                        load_window(ring_a + slot * A_BYTES, &p.a, bar, FIRST_CHANNEL at.c * BK, at_tile.w, at_tile.h, at_tile.image, at.s * p.dil_w, at.r * p.dil_h);
                    } else {
                        load_box2(ring_a + slot * A_BYTES, &p.a, bar, FIRST_CHANNEL k * BK, at_tile.m0);
                    }
                }
                if (IM2COL) at.next(p);
                if (HALO && ++tap == taps) { tap = 0; ++c; }
                if (++slot == STAGES) { slot = 0; ++turn; }
            }
        }
    } else {  // ---- multiply, finish, store
        const int group = warp / 4, t = threadIdx.x % 128;
        int slot = 0, phase = 0, turn = 0, a_slot = 0, a_phase = 0;
        constexpr int ITEMS = SK > 1 ? (SLICE * (BN / 8) + WORKERS - 1) / WORKERS : 1;
#if IN8
        Raw<ADD> residual[ITEMS];
        float4 factor[ITEMS][2];
#else
        uint4 residual[ITEMS];
#endif
        float4 bias[ITEMS][2];
        int target[ITEMS];  // the pixel that an item is stored to, or -1
        if (SK > 1) {  // what finishes this block's rows, fetched before it is needed
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) {
                const int item = threadIdx.x + i * WORKERS, col = first % p.tiles_n * BN + item % (BN / 8) * 8;
                const int line = item / (BN / 8);
                target[i] = line < SLICE && col < p.n ? out_pixel(p, first / p.tiles_n, rank * SLICE + line) : -1;
#if IN8
                const float* from = bias_of(p, target[i]);
                factor[i][0] = *reinterpret_cast<const float4*>(p.factor + col);
                factor[i][1] = *reinterpret_cast<const float4*>(p.factor + col + 4);
#else
                const float* from = p.bias;
#endif
                bias[i][0] = *reinterpret_cast<const float4*>(from + col);
                bias[i][1] = *reinterpret_cast<const float4*>(from + col + 4);
            }
            wait_for_previous();
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) {
                const int col = first % p.tiles_n * BN + (threadIdx.x + i * WORKERS) % (BN / 8) * 8;
#if IN8
                residual[i] = load_raw<ADD>(p.residual, (long long)target[i] * p.res_pitch + col, p.has_residual && target[i] >= 0);
#else
                residual[i] = make_uint4(0, 0, 0, 0);
                if (p.has_residual && target[i] >= 0)
                    residual[i] = *reinterpret_cast<const uint4*>(p.residual + ((long long)target[i] * p.res_pitch + col) * 2);
#endif
            }
        }
        for (int tile = first; tile < p.tiles; tile += stride, ++turn) {
            const int m0 = tile / p.tiles_n * BM, n0 = tile % p.tiles_n * BN;
            constexpr int BATCHES = DIRECT ? BN / 16 : 1;  // of four 8-channel items, one for each lane of a quad
#if IN8
            Raw<ADD> res_items[MI][2][DIRECT ? BN / 32 : 1];
#else
            uint4 res_items[MI][BATCHES];
            float2 bias_pairs[DIRECT ? BN / 8 : 1];
#endif
            int pixel[MI][2];
            if (DIRECT) {
#if !IN8
#pragma unroll
                for (int j = 0; j < BN / 8; ++j) bias_pairs[j] = *reinterpret_cast<const float2*>(p.bias + n0 + j * 8 + lane % 4 * 2);
#endif
#pragma unroll
                for (int i = 0; i < MI; ++i)
#pragma unroll
                    for (int half = 0; half < 2; ++half)
                        pixel[i][half] = out_pixel(p, tile / p.tiles_n, (group * MI + i) * 64 + warp % 4 * 16 + lane / 4 + half * 8);
                if (tile == first) wait_for_previous();
#if IN8
#pragma unroll
                for (int i = 0; i < MI; ++i)
#pragma unroll
                    for (int half = 0; half < 2; ++half)
#pragma unroll
                        for (int g = 0; g < BN / 32; ++g) {
                            const int row = pixel[i][half], col = n0 + g * 32 + lane % 4 * 8;
                            res_items[i][half][g] = load_raw<ADD>(p.residual, (long long)row * p.res_pitch + col, p.has_residual && row >= 0 && col < p.n);
                        }
#else
#pragma unroll
                for (int i = 0; i < MI; ++i)
#pragma unroll
                    for (int b = 0; b < BATCHES; ++b) {
                        const int item = b * 4 + lane % 4, col = n0 + item % (BN / 8) * 8, row = item / (BN / 8) ? pixel[i][1] : pixel[i][0];
                        res_items[i][b] = make_uint4(0, 0, 0, 0);
                        if (p.has_residual && row >= 0 && col < p.n)
                            res_items[i][b] = *reinterpret_cast<const uint4*>(p.residual + ((long long)row * p.res_pitch + col) * 2);
                    }
#endif
            }
            [[maybe_unused]] float bias_early[(BN + 127) / 128], factor_early[(BN + 127) / 128];
            const int own_out = OUTS == 3 ? turn % 3 : OUTS == 2 ? turn & 1 : 0;
            const u32 place = extra + own_out * OUT_BYTES, res_bar = res_full + 8 * (group * OUTS + own_out);
            const int res_parity = (OUTS == 3 ? turn / 3 : OUTS == 2 ? turn >> 1 : turn) & 1;
            auto ask_residual = [&](int which, u32 to, u32 bar) {  // into the place of the result: the stores before have read it
                const int m = which / p.tiles_n * BM, n = which % p.tiles_n * BN;
                barrier_expect(bar, OUT_BYTES / WGS);
                for (int i = group * MI; i < group * MI + MI; ++i)
                    for (int j = 0; j < PANELS; ++j) load_box2(to + (i * PANELS + j) * PANEL_BYTES, &p.r, bar, n + j * PW, m + i * 64);
            };
            if (STAGED && p.has_residual && (OUTS == 1 || turn == 0) && warp % 4 == 0 && one) {
                if (turn == 0) wait_for_previous();
                ask_residual(tile, place, res_bar);
                if (OUTS == 3 && tile + stride < p.tiles) ask_residual(tile + stride, extra + OUT_BYTES, res_full + 8 * (group * OUTS + 1));
            }
            if (STAGED || (IN8 && DIRECT && BN > 64))
#pragma unroll
                for (int i = 0; i < (BN + 127) / 128; ++i) {
                    bias_early[i] = t + i * 128 < BN ? p.bias[n0 + t + i * 128] : 0.f;
#if IN8
                    factor_early[i] = t + i * 128 < BN ? p.factor[n0 + t + i * 128] : 0.f;
#endif
                }
#if IN8
            constexpr bool KEPT = DIRECT && BN <= 64;  // factors and biases in registers: no way through shared memory at the end
            Vec8 kept_bias[KEPT ? BN / 32 : 1], kept_factor[KEPT ? BN / 32 : 1];
            if (KEPT)
#pragma unroll
                for (int g = 0; g < BN / 32; ++g) {
                    kept_factor[g] = load8<0>(reinterpret_cast<const u8*>(p.factor), n0 + g * 32 + lane % 4 * 8);
                    if (!BORDER) kept_bias[g] = load8<0>(reinterpret_cast<const u8*>(p.bias), n0 + g * 32 + lane % 4 * 8);
                }
#endif
#if BETWEEN
            uint2 kept_between[MI][2][BN / 32];
#endif
            Sum chain[CHAINS][MI][BN / 2];
            Sum(&acc)[MI][BN / 2] = chain[0];
            int previous = 0, left = -1;  // left: the input slot that the step before was the last to read
            int tap = HALO ? k0 % taps : 0, s = HALO ? tap % p.taps_w : 0, shift = HALO ? tap / p.taps_w * p.wide + s : 0;
            if (HOLD && turn == 0) barrier_wait(held, 0);
#if ONCE
#pragma unroll
            for (int i = 0; i < ONCE; ++i) {
                if (!HALO || i == 0) barrier_wait(full + 8 * i, 0);
                if (threadIdx.x == 0 && i == 0) MARK(3)
                if (HALO && (i == 0 || tap == 0)) barrier_wait(a_full + 8 * a_slot, 0);
                const u64 a = operand<ROW>(ring_a + (HALO ? a_slot : i) * a_bytes + (group * MI * 64 + shift) * ROW), b = operand<ROW>(ring_b + i * B_BYTES);
                mma_begin();
#pragma unroll
                for (int q = 0; q < ROW / 32; ++q)
#pragma unroll
                    for (int j = 0; j < MI; ++j) wgmma(chain[q % CHAINS][j], a + (j * 64 * ROW >> 4) + q * 2, b + q * 2, i > 0 || q >= CHAINS);
                mma_commit();
                if (HALO) {
                    ++shift;
                    if (++s == p.taps_w) { s = 0; shift += p.wide - p.taps_w; }
                    if (++tap == taps) { tap = s = shift = 0; ++a_slot; }
                }
            }
#else
#pragma unroll
            for (int sums = 0; sums <= BETWEEN; ++sums) {
#if BETWEEN
                const int begin = sums ? p.first_steps : k0, end = sums ? k1 : p.first_steps;  // a row of sums from each input
#else
                const int begin = k0, end = k1;
#endif
                for (int k = begin; k < end; ++k) {
                    if (!(HALO && HOLD)) barrier_wait(full + 8 * slot, phase);
                    if (threadIdx.x == 0 && k == k0) MARK(3)
                    if (HALO && (k == k0 || tap == 0)) barrier_wait(a_full + 8 * a_slot, a_phase);
#if DW
                    depthwise_rows(p, ring_a + a_slot * a_bytes, dw_weights + a_slot * DW_BYTES, made + (k & 1) * A_BYTES, group * MI * 64, t);
                    fence_async();
                    mma_wait<0>();  // the product before has read its operand: behind the barrier every warp may write there
                    named_barrier(1 + group, 128);
                    if (t == 0) barrier_arrive(a_empty + 8 * a_slot);
                    const u64 a = operand<ROW>(made + (k & 1) * A_BYTES + group * MI * 64 * ROW), b = operand<ROW>(ring_b + (HOLD ? k : slot) * B_BYTES);
#else
                    const u64 a = operand<ROW>(ring_a + (HALO ? a_slot : slot) * a_bytes + (group * MI * 64 + shift) * ROW), b = operand<ROW>(ring_b + (HOLD ? k : slot) * B_BYTES);
#endif
                    mma_begin();
#pragma unroll
                    for (int i = 0; i < ROW / 32; ++i)
#pragma unroll
                        for (int j = 0; j < MI; ++j) wgmma(chain[i % CHAINS][j], a + (j * 64 * ROW >> 4) + i * 2, b + i * 2, k > begin || i >= CHAINS);
                    mma_commit();
                    mma_wait<1>();
                    if (!(HALO && HOLD) && k > k0 && t == 0) barrier_arrive(empty + 8 * previous);
                    if (HALO) {
                        if (!DW && left >= 0 && t == 0) barrier_arrive(a_empty + 8 * left);
                        left = -1;
                        ++shift;
                        if (++s == p.taps_w) { s = 0; shift += p.wide - p.taps_w; }
                        if (++tap == taps || k + 1 == k1) {
                            tap = s = shift = 0;
                            left = a_slot;
                            if (++a_slot == HALO) { a_slot = 0; a_phase ^= 1; }
                        }
                    }
                    previous = slot;
                    if (++slot == STAGES) { slot = 0; phase ^= 1; }
                }
#if BETWEEN
                if (sums == 0) {
                    mma_wait<0>();
                    keep_integers(p, acc, kept_between, n0 + lane % 4 * 8);
                }
#endif
            }
#endif
            mma_wait<0>();
#pragma unroll
            for (int c = 1; c < CHAINS; ++c)
#pragma unroll
                for (int i = 0; i < MI; ++i)
#pragma unroll
                    for (int j = 0; j < BN / 2; ++j) acc[i][j] += chain[c][i][j];
            if (!(HALO && HOLD) && !ONCE && t == 0) barrier_arrive(empty + 8 * previous);
            if (HALO && !DW && !ONCE && t == 0) barrier_arrive(a_empty + 8 * left);
            if (threadIdx.x == 0) MARK(4)
            if (STAGED && OUTS > 1 && warp % 4 == 0 && one) {
                if (p.has_residual && tile + (OUTS - 1) * stride < p.tiles) {
                    const int other = OUTS == 3 ? (own_out ? own_out - 1 : 2) : own_out ^ 1;
                    store_wait_read();  // of the other place
                    ask_residual(tile + (OUTS - 1) * stride, extra + other * OUT_BYTES, res_full + 8 * (group * OUTS + other));
                } else
                    store_wait_read<OUTS - 1>();  // of this place
            }

#if IN8
            const int row0 = group * MI * 64 + warp % 4 * 16 + lane / 4, eight = lane % 4 * 8;  // the first row and channel of this thread
            if (SK == 1) {
                const u32 mine = bias_s + (turn & 1) * (FACTOR_BYTES / 2) + group * BN * 8;  // other warps may still read those of the turn before
                if (!KEPT) {
#pragma unroll
                    for (int i = 0; i < (BN + 127) / 128; ++i)
                        if (t + i * 128 < BN) {
                            store_shared_f(mine + (t + i * 128) * 4, bias_early[i]);
                            store_shared_f(mine + (BN + t + i * 128) * 4, factor_early[i]);
                        }
                    if (STAGED && p.has_residual) barrier_wait(res_bar, res_parity);
                    named_barrier(1 + group, 128);
                }
#pragma unroll
                for (int g = 0; g < BN / 32; ++g) {
                    const int col = g * 32 + eight;
                    const Vec8 by = KEPT ? kept_factor[KEPT ? g : 0] : shared_eight(mine + (BN + col) * 4);
                    Vec8 add = KEPT ? kept_bias[KEPT ? g : 0] : shared_eight(mine + col * 4);
#pragma unroll
                    for (int i = 0; i < MI; ++i)
#pragma unroll
                        for (int half = 0; half < 2; ++half) {
                            const int line = warp % 4 * 16 + lane / 4 + half * 8, mix = PROW == 128 ? line & 7 : PROW == 64 ? line >> 1 & 3 : line >> 2 & 1;
                            const int row = DIRECT ? pixel[i][half] : m0 + row0 + i * 64 + half * 8;
                            if (BORDER) add = load8<0>(reinterpret_cast<const u8*>(bias_of(p, row < p.m ? row : -1)), n0 + col);
                            float v[8];
#pragma unroll
                            for (int e = 0; e < 8; ++e) v[e] = fmaf((float)acc[i][g * 16 + half * 2 + e / 2 * 4 + e % 2], by.v[e], add.v[e]);
#if BETWEEN
                            Raw<ADD> between;
                            between.a = make_uint4(kept_between[i][half][g].x, kept_between[i][half][g].y, 0, 0);
                            between.b = make_uint4(0, 0, 0, 0);
#endif
                            if (DIRECT) {
#if BETWEEN
                                res_items[i][half][g] = between;
#endif
                                if (row >= 0 && n0 + col < p.n)
                                    finish_eight(p, v, res_items[i][half][g], p.out, (long long)row * p.out_pitch + n0 + col, ODD ? p.n - n0 - col : 8);
                            } else {
                                const u32 at = place + ((group * MI + i) * PANELS + g * 32 / PW) * PANEL_BYTES + line * PROW + ((((g * 32 % PW + eight) >> 4) ^ mix) << 4) + (eight & 8);
                                u8* to = raw + (at - shared_address(raw));
                                Raw<ADD> other;
                                other.a = other.b = make_uint4(0, 0, 0, 0);
#if BETWEEN
                                other = between;
#endif
                                if (p.has_residual) other = load_raw<ADD>(to, 0, true);
                                finish_eight(p, v, other, to, 0, 8);
                            }
                        }
                }
                if (STAGED) {
                    fence_async();
                    named_barrier(1 + group, 128);
                    if (warp % 4 == 0 && one) {
                        if (turn == 0) wait_for_previous();  // nothing may be written while the kernel in front still reads it
#pragma unroll
                        for (int i = 0; i < MI; ++i)
                            for (int j = 0; j < PANELS; ++j)
                                store_box2(&p.d, place + ((group * MI + i) * PANELS + j) * PANEL_BYTES, n0 + j * PW, m0 + (group * MI + i) * 64);
                        store_commit();
                        if (OUTS == 1) store_wait_read();
                    }
                }
            } else {
                cluster_wait();  // all blocks of the cluster run: their shared memory may be written
#pragma unroll
                for (int i = 0; i < MI; ++i)
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const int row = row0 + i * 64 + half * 8, owner = row / SLICE;
                        const u32 at = extra + ((rank * SLICE + row % SLICE) * PITCH + lane % 4 * 4) * 4;  // in 16s of channels: four of a lane together
                        const u32 to = remote_address(at, owner), bar = remote_address(parts, owner);
#pragma unroll
                        for (int j = 0; j < BN / 16; ++j) {
                            const Sum* v = acc[i] + j * 8 + half * 2;
                            if (owner == rank) store_shared_f4(at + j * 64, bits(v[0]), bits(v[1]), bits(v[4]), bits(v[5]));
                            else store_remote4(to + j * 64, bits(v[0]), bits(v[1]), bits(v[4]), bits(v[5]), bar);
                        }
                    }
                named_barrier(8, WORKERS);
                barrier_wait(parts, 0);
#pragma unroll
                for (int i = 0; i < ITEMS; ++i) {
                    const int item = threadIdx.x + i * WORKERS, line = item / (BN / 8), column = item % (BN / 8) * 8;
                    if (target[i] < 0) continue;
                    Sum sum[8] = {};
#pragma unroll
                    for (int q = 0; q < SK; ++q)
#pragma unroll
                        for (int j = 0; j < 2; ++j) {
                            const float4 x = load_shared_f4(extra + ((q * SLICE + line) * PITCH + column / 32 * 32 + column % 32 / 2 + j * 16) * 4);
                            sum[j * 4] += unbits(x.x, Sum());
                            sum[j * 4 + 1] += unbits(x.y, Sum());
                            sum[j * 4 + 2] += unbits(x.z, Sum());
                            sum[j * 4 + 3] += unbits(x.w, Sum());
                        }
                    const Vec8 add = {bias[i][0].x, bias[i][0].y, bias[i][0].z, bias[i][0].w, bias[i][1].x, bias[i][1].y, bias[i][1].z, bias[i][1].w};
                    const Vec8 by = {factor[i][0].x, factor[i][0].y, factor[i][0].z, factor[i][0].w, factor[i][1].x, factor[i][1].y, factor[i][1].z, factor[i][1].w};
                    float v[8];
#pragma unroll
                    for (int e = 0; e < 8; ++e) v[e] = fmaf((float)sum[e], by.v[e], add.v[e]);
                    finish_eight(p, v, residual[i], p.out, (long long)target[i] * p.out_pitch + first % p.tiles_n * BN + column, 8);
                }
            }
#else
            if (DIRECT && (OUT_F32 || ODD)) {  // no residual
#pragma unroll
                for (int i = 0; i < MI; ++i)
#pragma unroll
                    for (int j = 0; j < BN / 4; ++j) {
                        const int row = pixel[i][j % 2], col = n0 + j / 2 * 8 + lane % 4 * 2;
                        const float2 v = make_float2(finish(p, acc[i][j * 2] + bias_pairs[j / 2].x, 0.f), finish(p, acc[i][j * 2 + 1] + bias_pairs[j / 2].y, 0.f));
                        const long long to = (long long)row * p.out_pitch + col;
                        if (ODD && row >= 0) {  // channels in no eights: rows begin anywhere
                            u16* out = reinterpret_cast<u16*>(p.out) + to;
                            if (col < p.n) out[0] = (u16)pack(v.x, 0.f);
                            if (col + 1 < p.n) out[1] = (u16)pack(v.y, 0.f);
                        }
                        if (!ODD && row >= 0 && col < p.n) *reinterpret_cast<float2*>(p.out + to * 4) = v;
                    }
            } else if (DIRECT) {
#pragma unroll
                for (int i = 0; i < MI; ++i)
#pragma unroll
                    for (int b = 0; b < BATCHES; ++b) {
                        u32 v[4] = {res_items[i][b].x, res_items[i][b].y, res_items[i][b].z, res_items[i][b].w};
                        if (p.has_residual) turn_quad(v, lane);
#pragma unroll
                        for (int q = 0; q < 4; ++q) {
                            const int j = (b * 4 + q) % (BN / 8), half = (b * 4 + q) / (BN / 8);
                            v[q] = finish_two(p, acc[i][j * 4 + half * 2] + bias_pairs[j].x, acc[i][j * 4 + half * 2 + 1] + bias_pairs[j].y, unpack(v[q]));
                        }
                        turn_quad(v, lane);
                        const int item = b * 4 + lane % 4, col = n0 + item % (BN / 8) * 8, row = item / (BN / 8) ? pixel[i][1] : pixel[i][0];
                        if (row >= 0 && col < p.n) *reinterpret_cast<uint4*>(result(p, row, col)) = make_uint4(v[0], v[1], v[2], v[3]);
                    }
            } else if (SK == 1) {
                const u32 mine = bias_s + group * BN * 4;
#pragma unroll
                for (int i = 0; i < (BN + 127) / 128; ++i) if (t + i * 128 < BN) store_shared_f(mine + (t + i * 128) * 4, bias_early[i]);
                if (p.has_residual) barrier_wait(res_bar, res_parity);
                named_barrier(1 + group, 128);
#pragma unroll
                for (int i = 0; i < MI; ++i)
#pragma unroll
                    for (int j = 0; j < BN / 8; ++j) {
                        const int row = warp % 4 * 16 + lane / 4, col = j % (PW / 8);
                        const u32 panel = place + ((group * MI + i) * PANELS + j / (PW / 8)) * PANEL_BYTES;
                        const float2 add = load_shared_f2(mine + (j * 8 + lane % 4 * 2) * 4);
#pragma unroll
                        for (int half = 0; half < 2; ++half) {
                            const int line = row + half * 8, mix = PROW == 128 ? line & 7 : PROW == 64 ? line >> 1 & 3 : line >> 2 & 1;
                            const u32 at = panel + line * PROW + ((col ^ mix) << 4) + lane % 4 * 4;
                            const float2 r = p.has_residual ? unpack(load_shared(at)) : make_float2(0.f, 0.f);
                            store_shared(at, finish_two(p, acc[i][j * 4 + half * 2] + add.x, acc[i][j * 4 + half * 2 + 1] + add.y, r));
                        }
                    }
                fence_async();
                named_barrier(1 + group, 128);
                if (warp % 4 == 0 && one) {
                    if (turn == 0) wait_for_previous();  // nothing may be written while the kernel in front still reads it
#pragma unroll
                    for (int i = 0; i < MI; ++i)
                        for (int j = 0; j < PANELS; ++j) store_panel(p, place + ((group * MI + i) * PANELS + j) * PANEL_BYTES, n0 + j * PW, m0 + (group * MI + i) * 64);
                    store_commit();
                    if (OUTS == 1) store_wait_read();
                }
            } else {
                cluster_wait();  // all blocks of the cluster run: their shared memory may be written
                if (threadIdx.x == 0) MARK(5)
#pragma unroll
                for (int i = 0; i < MI; ++i)
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const int row = (group * MI + i) * 64 + warp % 4 * 16 + lane / 4 + half * 8, owner = row / SLICE;
                        const u32 at = extra + ((rank * SLICE + row % SLICE) * PITCH + lane % 4 * 4) * 4;  // in 16s of channels: four of a lane together
                        const u32 to = remote_address(at, owner), bar = remote_address(parts, owner);
#pragma unroll
                        for (int j = 0; j < BN / 16; ++j) {
                            const float* v = acc[i] + j * 8 + half * 2;
                            if (owner == rank) store_shared_f4(at + j * 64, v[0], v[1], v[4], v[5]);
                            else store_remote4(to + j * 64, v[0], v[1], v[4], v[5], bar);
                        }
                    }
                named_barrier(8, WORKERS);
                barrier_wait(parts, 0);
                if (threadIdx.x == 0) MARK(6)
#pragma unroll
                for (int i = 0; i < ITEMS; ++i) {
                    const int item = threadIdx.x + i * WORKERS, line = item / (BN / 8), column = item % (BN / 8) * 8;
                    const int row = target[i], col = n0 + column;
                    if (row < 0) continue;
                    float4 u = bias[i][0], v = bias[i][1];
#pragma unroll
                    for (int q = 0; q < SK; ++q) {
                        const u32 from = extra + ((q * SLICE + line) * PITCH + column / 16 * 16 + column % 16 / 4) * 4;
                        const float2 x = load_shared_f2(from), y = load_shared_f2(from + 16), z = load_shared_f2(from + 32), w = load_shared_f2(from + 48);
                        u.x += x.x; u.y += x.y; u.z += y.x; u.w += y.y;
                        v.x += z.x; v.y += z.y; v.z += w.x; v.w += w.y;
                    }
                    const float2 r0 = unpack(residual[i].x), r1 = unpack(residual[i].y), r2 = unpack(residual[i].z), r3 = unpack(residual[i].w);
                    if (OUT_F32) {
                        float4* out = reinterpret_cast<float4*>(p.out + ((long long)row * p.out_pitch + col) * 4);
                        out[0] = make_float4(finish(p, u.x, r0.x), finish(p, u.y, r0.y), finish(p, u.z, r1.x), finish(p, u.w, r1.y));
                        out[1] = make_float4(finish(p, v.x, r2.x), finish(p, v.y, r2.y), finish(p, v.z, r3.x), finish(p, v.w, r3.y));
                    } else {
                        *reinterpret_cast<uint4*>(result(p, row, col)) =
                            make_uint4(finish_two(p, u.x, u.y, r0), finish_two(p, u.z, u.w, r1), finish_two(p, v.x, v.y, r2), finish_two(p, v.z, v.w, r3));
                    }
                }
            }
#endif
        }
        if (STAGED && OUTS > 1 && warp % 4 == 0 && one) store_wait_read();  // shared memory must outlive its readers
    }
    if (SK > 1 && warp >= WGS * 4) { __syncwarp(); cluster_wait(); }
    if (threadIdx.x == 0) MARK(7)
}
