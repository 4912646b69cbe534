// Convolution and matrix product on Hopper's tensor cores: out[pixel, k] = act(sum over taps and channels of in * weight + bias[k] + residual).
// One block works on BM pixels x BN output channels; its first WGS*4 warps multiply, the last warp loads input and weight
// tiles through TMA into a ring of STAGES. With SK > 1 a cluster of SK blocks shares one tile: each
// sums a part of K, then adds the parts of its own rows, which the others have put into its shared memory (each store counts down a barrier there).
// With DIRECT (few tiles: latency counts) results go from registers to memory, else through shared memory and TMA.
// With HALO (stride 1, SK > 1 or DIRECT) a tile is some rows of one image, each `wide` = width + taps_w - 1 long: the input pixels of all
// filter taps are loaded once a channel step, and a tap is the same matrix shifted by r * wide + s rows; the ends of rows are not stored.
// With ONCE (the K steps of a block, which computes one tile) every step has a slot: no slot is reused, and products are issued without waiting.
// With HOLD (all K steps; SK == 1) a block keeps its output channels and their weights, and only inputs stream.
// With GROUPED (a convolution of several groups) a tile of output channels reads the window of input channels that its groups have, and K runs over
// that window alone; weights within it that belong to no pair of a group are zeros.
// With SECOND_INPUT the sum goes on over a second input, a 1x1 convolution of its own to the same output (1: stride 1, 2: any stride); its weights follow.
// With BETWEEN (integers; SECOND_INPUT, no cluster, FOLD) the second input has accumulators of its own: those of the first become integers of type ADD, as if they were
// stored; they stay in registers as the residual of the second.
// With DW (a stride; needs HALO and a 1x1 product) the product's input is a depthwise convolution of DW_R x DW_S taps that this kernel computes itself: a
// K step's input tile holds the pixels of all taps, and the multiplying warps make their rows of the operand from it, DW_ROWS a thread, ended by DW_ACT.
// With DUAL_OUTPUT (floats of 16 bits; how many channels of both results a panel has) the output channels are those of two results: from second_from on, of the second.
// With NORM (1 layer norm, 2 root mean square) a row of the input is normalized over all its channels, the K of a plain product: the weights contain the scales, and
// the warps that multiply also read the rows for their mean and deviation, from which the epilogue computes (sum - mean * column_sums[k]) / deviation.
// With GATED the residual after the activation is multiplied, not added.
// OUTS (1 to 3) output tiles are buffered: with more than one, the residual of the next OUTS - 1 tiles is loaded and the last tile stored during the current epilogue.
// REALLOCATE (registers): with three warpgroups that multiply, the loading warp is one of a warpgroup, which gives its registers to them (setmaxnreg): each of their
// threads has so many instead of 128.
// conv_parts.cuh has its functions; of the kernel itself conv_load.cuh has the warp that loads, conv_multiply.cuh the products of a tile,
// conv_epilogue_16bit.cuh and conv_epilogue_8bit.cuh have the epilogues.
// CHAINS: a product must wait for the one before on the same accumulators, so small tiles keep several sets of them (ConvConfig.chains).
// Constants: BM = 64*MI*WGS, BN, BK (channels a step), STAGES, SK, DIRECT, IM2COL, ACT, BLOCKS (resident per multiprocessor), BF16,
// OUT_F32 (f32 results; SK > 1 or DIRECT only), ODD (any number of output channels; DIRECT only), HALO (0, or slots for input tiles),
// IN8 (0, or 3 i8, 4 u8, 5 e4m3: input and weights of 8 bits). With IN8 a sum becomes a real number by a factor a channel, results are of
// type TO (numbers as in vector.cuh; 8-bit ones by a scale and a zero point), the residual of type ADD. Weight rows are permuted in
// 32s so that the accumulators of a thread belong to eight neighbouring channels. FOLD (integers out, activation a clip or SiLU: vector.cuh): factors, biases and the
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
#ifndef DUAL_OUTPUT
#define DUAL_OUTPUT 0
#endif
#ifndef NORM
#define NORM 0
#endif

#ifndef GATED
#define GATED 0
#endif
#ifndef REALLOCATE
#define REALLOCATE 0
#endif

constexpr int BM = 64 * MI * WGS, ROW = BK * (IN8 ? 1 : 2);
constexpr int SIZE = IN8 ? Element<TO>::BYTES : OUT_F32 ? 4 : 2;           // bytes of a result
constexpr int A_BYTES = BM * ROW, B_BYTES = (BN * ROW + 1023) / 1024 * 1024;
constexpr int WIDEST = DUAL_OUTPUT ? DUAL_OUTPUT : 128 / SIZE;                            // the output tile consists of panels of PW columns
constexpr int PW = BN % WIDEST == 0 ? WIDEST : BN % (WIDEST / 2) == 0 ? WIDEST / 2 : WIDEST / 4, PANELS = BN / PW, PROW = PW * SIZE;
constexpr int PANEL_BYTES = 64 * PROW, OUT_BYTES = BM * BN * SIZE;
constexpr int PITCH = BN + 8;                                              // floats between rows of a partial sum: no bank conflicts
constexpr int SLICE = BM / SK;                                             // rows that each block of a cluster finishes
constexpr int EXTRA_BYTES = SK > 1 ? SK * SLICE * PITCH * 4 : DIRECT ? 0 : OUTS * OUT_BYTES;
constexpr bool STAGED = SK == 1 && !DIRECT;
constexpr int FACTOR_BYTES = IN8 ? WGS * BN * 16 : WGS * BN * (NORM ? 8 : 4);  // biases (IN8: also factors, both double-buffered; NORM: column sums)
constexpr int RELEASES = NORM ? WGS * 4 : WGS;                             // arrivals that give a slot back: NORM: each warp reads its rows
constexpr int WORKERS = WGS * 128, THREADS = WORKERS + (REALLOCATE ? 128 : 32);
static_assert(BN % PW == 0 && BM % SK == 0 && !((OUT_F32 || HALO || ODD) && STAGED) && !(ODD && SK > 1), "tile");
static_assert(!DUAL_OUTPUT || (PW == DUAL_OUTPUT && DUAL_OUTPUT <= 64 && !IN8 && !OUT_F32 && !ODD && !HALO), "two results");
static_assert(!HOLD || SK == 1, "weights are held by blocks that work alone");
static_assert(!GATED || !IN8, "gates of 16-bit floats");
static_assert(!ONCE || (ONCE <= STAGES && !STAGED && !HOLD && !DW), "steps with slots of their own");
static_assert(!REALLOCATE || (SK == 1 && BLOCKS == 1 && WORKERS * REALLOCATE + 128 * 32 <= 65536), "registers of a multiprocessor");
static_assert(!NORM || !(IN8 || HALO || IM2COL || DW || DUAL_OUTPUT), "rows are normalized in plain products of 16-bit floats");
constexpr u32 PART_BYTES = (BM * BN * 4 + (NORM ? BM * 8 : 0)) / SK * (SK - 1);  // of the accumulators that others send; a block's own stay in it
#if BETWEEN
static_assert(SK == 1 && !HALO && !ONCE && IN8 && FOLD && ADD >= 3, "two accumulators");
#endif
static_assert(!IN8 || (BN % 32 == 0 && !(STAGED && SIZE > 2)), "tile of 8-bit operands");
#if IN8 == 3 || IN8 == 4
typedef int Accumulator;
#else
typedef float Accumulator;
#endif

#include "arguments"

#include "conv_parts.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) conv(const __grid_constant__ Args p) {
    extern __shared__ u8 raw[];
    const u32 base = (shared_address(raw) + 1023) & ~1023u;
    const u32 a_bytes = HALO ? p.slot_bytes : A_BYTES;
    const u32 ring_a = base, ring_b = base + (HALO ? HALO : STAGES) * a_bytes, made = ring_b + (HOLD ? HOLD : STAGES) * B_BYTES;
    const u32 extra = made + (DW ? 2 * A_BYTES : 0);  // DW: two operands alternate in `made`
    const u32 bias_s = extra + EXTRA_BYTES, bars = bias_s + FACTOR_BYTES;
    const u32 full = bars, empty = bars + STAGES * 8, res_full = empty + STAGES * 8, a_full = res_full + WGS * OUTS * 8, a_empty = a_full + HALO * 8;
    const u32 parts = a_empty + HALO * 8, held = parts + 8;
#if NORM
    const u32 row_parts = (held + 8 + 15) & ~15u;  // SK > 1: mean and squared deviations of this block's rows in each block's channels
#endif
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
        map_prefetch(&p.a);
        map_prefetch(&p.b);
#if SECOND_INPUT
        map_prefetch(&p.second);
#endif
        if (STAGED) { map_prefetch(&p.d); map_prefetch(&p.r); }
        for (int i = 0; i < STAGES; ++i) { barrier_init(full + 8 * i, 1); barrier_init(empty + 8 * i, RELEASES); }
        for (int i = 0; i < WGS * OUTS; ++i) barrier_init(res_full + 8 * i, 1);
        for (int i = 0; i < HALO; ++i) { barrier_init(a_full + 8 * i, 1); barrier_init(a_empty + 8 * i, WGS); }
        if (HOLD) barrier_init(held, 1);
        if (SK > 1) { barrier_init(parts, 1); barrier_expect(parts, PART_BYTES); }
        barrier_init_fence();
    }
    __syncthreads();
    if (SK > 1) cluster_arrive();
    let_next_start();

    if (warp >= WGS * 4) {  // ---- input and weights: the whole warp walks, one lane asks (so that addresses stay uniform)
#if REALLOCATE
        set_registers<32, false>();
        if (warp > WGS * 4) return;
#endif
#include "conv_load.cuh"
    } else {  // ---- multiply, finish, store
#if REALLOCATE
        set_registers<REALLOCATE, true>();
#endif
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
#if NORM
        float4 column_sum[ITEMS][2];
#endif
        int target[ITEMS];  // the pixel that an item is stored to, or -1
        if (SK > 1) {  // bias and factors of this block's rows, fetched ahead of time
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
#if NORM
                column_sum[i][0] = *reinterpret_cast<const float4*>(p.column_sums + col);
                column_sum[i][1] = *reinterpret_cast<const float4*>(p.column_sums + col + 4);
#endif
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
#if NORM
            float2 column_pairs[DIRECT ? BN / 8 : 1];
#endif
#endif
            int pixel[MI][2];
            if (DIRECT) {
#if !IN8
#pragma unroll
                for (int j = 0; j < BN / 8; ++j) {
                    bias_pairs[j] = *reinterpret_cast<const float2*>(p.bias + n0 + j * 8 + lane % 4 * 2);
#if NORM
                    column_pairs[j] = *reinterpret_cast<const float2*>(p.column_sums + n0 + j * 8 + lane % 4 * 2);
#endif
                }
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
            [[maybe_unused]] float bias_early[(BN + 127) / 128], factor_early[(BN + 127) / 128];  // NORM: factor_early are column sums
            const int own_out = OUTS == 3 ? turn % 3 : OUTS == 2 ? turn & 1 : 0;
            const u32 place = extra + own_out * OUT_BYTES, res_bar = res_full + 8 * (group * OUTS + own_out);
            const int res_parity = (OUTS == 3 ? turn / 3 : OUTS == 2 ? turn >> 1 : turn) & 1;
            auto ask_residual = [&](int which, u32 to, u32 bar) {  // into the result's slot: the previous stores have read it
                const int m = which / p.tiles_n * BM, n = which % p.tiles_n * BN;
                barrier_expect(bar, OUT_BYTES / WGS);
                for (int i = group * MI; i < group * MI + MI; ++i)
                    for (int j = 0; j < PANELS; ++j) load_box2(to + (i * PANELS + j) * PANEL_BYTES, &p.r, bar, n + j * PW, m + i * 64);
            };
            if (STAGED && p.has_residual && (OUTS == 1 || turn == 0) && warp % 4 == 0 && one) {
                if (turn == 0) wait_for_previous();
                else store_wait_read();  // of the tile before, from the same slot
                ask_residual(tile, place, res_bar);
                if (OUTS == 3 && tile + stride < p.tiles) ask_residual(tile + stride, extra + OUT_BYTES, res_full + 8 * (group * OUTS + 1));
            }
            if (STAGED || (IN8 && DIRECT && BN > 64))
#pragma unroll
                for (int i = 0; i < (BN + 127) / 128; ++i) {
                    bias_early[i] = t + i * 128 < BN ? p.bias[n0 + t + i * 128] : 0.f;
#if NORM
                    factor_early[i] = t + i * 128 < BN ? p.column_sums[n0 + t + i * 128] : 0.f;
#endif
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
#include "conv_multiply.cuh"
            if (STAGED && warp % 4 == 0 && one) {
                if (OUTS > 1 && p.has_residual && tile + (OUTS - 1) * stride < p.tiles) {
                    const int other = OUTS == 3 ? (own_out ? own_out - 1 : 2) : own_out ^ 1;
                    store_wait_read();  // of the other slot
                    ask_residual(tile + (OUTS - 1) * stride, extra + other * OUT_BYTES, res_full + 8 * (group * OUTS + other));
                } else
                    store_wait_read<OUTS - 1>();  // of this slot
            }

#if IN8
#include "conv_epilogue_8bit.cuh"
#else
#include "conv_epilogue_16bit.cuh"
#endif
        }
        if (STAGED && warp % 4 == 0 && one) store_wait_read();  // shared memory must outlive its readers
    }
    if (SK > 1 && warp >= WGS * 4) { __syncwarp(); cluster_wait(); }
}
