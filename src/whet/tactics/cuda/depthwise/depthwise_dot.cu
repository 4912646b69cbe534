// Depthwise convolution of NHWC integers by dot products of four bytes: as depthwise_tile.cu (tiles, copies, bands, strips), but a thread's row of
// pixels is transposed so that a word has four neighbouring pixels of one channel, and a dot product with a word of taps takes up to four of them at once.
// Words begin at even pixels: an output at an odd one takes taps that are moved by one (ODD = 1 of the packed weights).
// Constants: FROM, TO (3 i8, 4 u8), R, S, STRIDE_H, STRIDE_W, TH, RG, TW, WIDE, CG, STAGES, BLOCKS, ACT, FOLD (as in conv.cu).
#include "common.cuh"
#include "vector.cuh"

constexpr int IN = 1;
#include "depthwise_parts.cuh"
constexpr int KINDS = STRIDE_W % 2 && WIDE > 1 ? 2 : 1;                      // outputs at even pixels, and at odd ones
constexpr int TAKEN = (S + KINDS - 1 + 3) / 4;                               // words of an output's taps
constexpr int WORDS = (WIDE - 1) * STRIDE_W / 2 + 2 * (TAKEN - 1) + 1;       // words of a row of pixels, one at every even pixel
static_assert(CG % 16 == 0 && TW % WIDE == 0, "tile");

#include "arguments"

DEV int dot(u32 x, int w, int sum) {
    int r;
    if (FROM == 4) asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(r) : "r"(x), "r"(w), "r"(sum));
    else asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(r) : "r"(x), "r"(w), "r"(sum));
    return r;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) depthwise_dot(const __grid_constant__ Args a) {
    extern __shared__ u8 raw[];
    const Tiles tiles(a, raw);
    const int lane = threadIdx.x % LANES, strip = threadIdx.x / LANES % STRIPS, band = threadIdx.x / (LANES * STRIPS);
    const int channel = tiles.channel0 + lane * 4;
    const bool mine = threadIdx.x < USED && channel < a.c;
    tiles.prepare(&a.input);
    let_next_start();
    int weight[R][KINDS][TAKEN][4];
    float4 bias, factor;
    if (mine) {
        bias = *reinterpret_cast<const float4*>(a.factors + channel);
        factor = *reinterpret_cast<const float4*>(a.factors + a.pitch + channel);
#pragma unroll
        for (int r = 0; r < R; ++r)
#pragma unroll
            for (int k = 0; k < KINDS; ++k)
#pragma unroll
                for (int i = 0; i < TAKEN; ++i) {
                    const int4 w = *reinterpret_cast<const int4*>(a.weights + (long long)((r * KINDS + k) * TAKEN + i) * a.c + channel);
                    weight[r][k][i][0] = w.x; weight[r][k][i][1] = w.y; weight[r][k][i][2] = w.z; weight[r][k][i][3] = w.w;
                }
    }
    __syncthreads();
    wait_for_previous();
    tiles.begin(a);
    int slot = 0, phase = 0;
    for (int tile = tiles.first; tile < a.tiles; tile += tiles.stride) {
        tiles.ask_later(a, tile, slot);
        const Place at(a, tile);
        barrier_wait(tiles.bars + 8 * slot, phase);
        if (mine) {
            const u32 from = tiles.base + slot * SLOT + (band * TH * STRIDE_H * COLUMNS + strip * WIDE * STRIDE_W) * CG + lane * 4;
            const int q0 = at.x + strip * WIDE, p0 = at.y + band * TH;
            u8* out = a.out + ((long long)(at.n * a.p + p0) * a.q + q0) * a.c + channel;
            int sum[SUMS][WIDE][4];
#pragma unroll 1
            for (int y0 = 0; y0 < OWN_ROWS; y0 += TURN) {
#pragma unroll
                for (int u = 0; u < TURN; ++u) {
                    if (y0 + u >= OWN_ROWS) break;
                    u32 pixel[SPAN];
#pragma unroll
                    for (int j = 0; j < SPAN; ++j) pixel[j] = load_shared(from + ((y0 + u) * COLUMNS + j) * CG);
                    u32 pair[WORDS + 1][2], word[WORDS][4];  // the last pixel is repeated beyond the end: its taps are 0
#pragma unroll
                    for (int i = 0; i < WORDS + 1; ++i) {
                        const u32 x = pixel[2 * i < SPAN ? 2 * i : SPAN - 1], y = pixel[2 * i + 1 < SPAN ? 2 * i + 1 : SPAN - 1];
                        pair[i][0] = __byte_perm(x, y, 0x5140);
                        pair[i][1] = __byte_perm(x, y, 0x7362);
                    }
#pragma unroll
                    for (int i = 0; i < WORDS; ++i)
#pragma unroll
                        for (int half = 0; half < 2; ++half) {
                            word[i][2 * half] = __byte_perm(pair[i][half], pair[i + 1][half], 0x5410);
                            word[i][2 * half + 1] = __byte_perm(pair[i][half], pair[i + 1][half], 0x7632);
                        }
#pragma unroll
                    for (int r = 0; r < R; ++r) {
                        if ((u - r) % STRIDE_H != 0) continue;
                        constexpr int MANY = 8 * SUMS;  // keeps the index positive
                        const int place = ((u - r) / STRIDE_H + MANY) % SUMS;
#pragma unroll
                        for (int k = 0; k < WIDE; ++k)
#pragma unroll
                            for (int e = 0; e < 4; ++e) {
                                int x = r == 0 ? 0 : sum[place][k][e];
#pragma unroll
                                for (int i = 0; i < TAKEN; ++i)
                                    x = dot(word[k * STRIDE_W / 2 + 2 * i][e], weight[r][KINDS == 2 ? k * STRIDE_W % 2 : 0][i][e], x);
                                sum[place][k][e] = x;
                            }
                    }
                    if ((u - R + 1) % STRIDE_H != 0) continue;  // no output row ends here
                    const int place = ((u - R + 1) / STRIDE_H + 8 * SUMS) % SUMS, row = (y0 + u - R + 1) / STRIDE_H;
                    if (y0 + u >= R - 1 && p0 + row < a.p)
#pragma unroll
                        for (int k = 0; k < WIDE; ++k) {
                            if (q0 + k >= a.q) break;
                            float x[4] = {fmaf((float)sum[place][k][0], factor.x, bias.x), fmaf((float)sum[place][k][1], factor.y, bias.y),
                                          fmaf((float)sum[place][k][2], factor.z, bias.z), fmaf((float)sum[place][k][3], factor.w, bias.w)};
                            u32* to = reinterpret_cast<u32*>(out + ((long long)row * a.q + k) * a.c);
                            if (FOLD) {
                                fold<ACT>(x, a.act, {a.act.b, a.act.b, a.act.b, a.act.b});
                                *to = steps_of(x[0], x[1], x[2], x[3], a.per_step, a.zero);
                            } else {
#pragma unroll
                                for (int e = 0; e < 4; ++e) x[e] = activate<ACT>(x[e], a.act) * a.per_step + a.zero;
                                *to = bytes_of<TO>(x[0], x[1], x[2], x[3]);
                            }
                        }
                }
            }
        }
        __syncthreads();  // the slot may be filled again
        if (++slot == STAGES) { slot = 0; phase ^= 1; }
    }
}
