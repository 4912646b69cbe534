// Depthwise convolution of NHWC tensors through shared memory: a block loads the input of a tile (RG*TH rows, TW columns, CG channels) by one
// bulk copy, zeros around the image included, while it computes the tile before. A thread walks down TH rows of WIDE pixels of four channels: each
// input row is read and widened once and added to all output rows that it touches. Weights [R][S][c] as f32 stay in registers, as a block
// keeps its channels. Constants: FROM, TO (types as in vector.cuh), R, S, STRIDE_H, STRIDE_W, TH, RG, TW, WIDE, CG, STAGES, BLOCKS, ACT, FOLD (as in conv.cu).
#include "common.cuh"
#include "vector.cuh"

constexpr int IN = Element<FROM>::BYTES, OUT = Element<TO>::BYTES;
#include "depthwise_parts.cuh"
static_assert(CG % 8 == 0 && TW % WIDE == 0, "tile");

#include "arguments"

struct Four { float v[4]; };
DEV Four load_four(u32 at) {
    Four r;
    if (IN == 1) {
        const u32 w = load_shared(at);
#pragma unroll
        for (int i = 0; i < 4; ++i) r.v[i] = byte_as_float<FROM>(w, i);
        return r;
    }
    u32 low, high;
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(low), "=r"(high) : "r"(at));
    const float2 a = unpack_as<FROM>(low), b = unpack_as<FROM>(high);
    r.v[0] = a.x; r.v[1] = a.y; r.v[2] = b.x; r.v[3] = b.y;
    return r;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) depthwise_tile(const __grid_constant__ Args a) {
    extern __shared__ u8 raw[];
    const Tiles tiles(a, raw);
    const int lane = threadIdx.x % LANES, strip = threadIdx.x / LANES % STRIPS, band = threadIdx.x / (LANES * STRIPS);
    const int channel = tiles.channel0 + lane * 4;
    const bool mine = threadIdx.x < USED && channel < a.c;
    tiles.prepare(&a.input);
    let_next_start();
    Four weight[R][S], bias;
    if (mine) {
        const float4 b = *reinterpret_cast<const float4*>(a.bias + channel);
        bias.v[0] = b.x; bias.v[1] = b.y; bias.v[2] = b.z; bias.v[3] = b.w;
#pragma unroll
        for (int r = 0; r < R; ++r)
#pragma unroll
            for (int s = 0; s < S; ++s) {
                const float4 w = *reinterpret_cast<const float4*>(a.weights + (long long)(r * S + s) * a.c + channel);
                weight[r][s].v[0] = w.x; weight[r][s].v[1] = w.y; weight[r][s].v[2] = w.z; weight[r][s].v[3] = w.w;
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
            const u32 from = tiles.base + slot * SLOT + ((band * TH * STRIDE_H * COLUMNS + strip * WIDE * STRIDE_W) * CG + lane * 4) * IN;
            const int q0 = at.x + strip * WIDE, p0 = at.y + band * TH;
            u8* out = a.out + (((long long)(at.n * a.p + p0) * a.q + q0) * a.c + channel) * OUT;
            Four sum[SUMS][WIDE];
#pragma unroll 1
            for (int y0 = 0; y0 < OWN_ROWS; y0 += TURN) {
#pragma unroll
                for (int u = 0; u < TURN; ++u) {
                    if (y0 + u >= OWN_ROWS) break;
                    Four v[SPAN];
#pragma unroll
                    for (int j = 0; j < SPAN; ++j) v[j] = load_four(from + ((y0 + u) * COLUMNS + j) * (CG * IN));
#pragma unroll
                    for (int r = 0; r < R; ++r) {
                        if ((u - r) % STRIDE_H != 0) continue;
                        constexpr int MANY = 8 * SUMS;  // keeps the index positive
                        const int place = ((u - r) / STRIDE_H + MANY) % SUMS;
#pragma unroll
                        for (int k = 0; k < WIDE; ++k)
#pragma unroll
                            for (int e = 0; e < 4; ++e) {
                                float x = r == 0 ? bias.v[e] : sum[place][k].v[e];
#pragma unroll
                                for (int s = 0; s < S; ++s) x += v[k * STRIDE_W + s].v[e] * weight[r][s].v[e];
                                sum[place][k].v[e] = x;
                            }
                    }
                    if ((u - R + 1) % STRIDE_H != 0) continue;  // no output row ends here
                    const int place = ((u - R + 1) / STRIDE_H + 8 * SUMS) % SUMS, row = (y0 + u - R + 1) / STRIDE_H;
                    if (y0 + u >= R - 1 && p0 + row < a.p)
#pragma unroll
                        for (int k = 0; k < WIDE; ++k) {
                            if (q0 + k >= a.q) break;
                            float x[4];
#pragma unroll
                            for (int e = 0; e < 4; ++e) x[e] = FOLD ? sum[place][k].v[e] : activate<ACT>(sum[place][k].v[e], a.act);
                            if (FOLD) fold<ACT>(x, a.act, {a.act.b, a.act.b, a.act.b, a.act.b});
                            u8* to = out + ((long long)row * a.q + k) * a.c * OUT;
                            if (FOLD) *reinterpret_cast<u32*>(to) = steps_of(x[0], x[1], x[2], x[3], a.per_step, a.zero);
                            else if (OUT == 1) *reinterpret_cast<u32*>(to) = bytes_of<TO>(x[0] * a.per_step + a.zero, x[1] * a.per_step + a.zero, x[2] * a.per_step + a.zero, x[3] * a.per_step + a.zero);
                            else *reinterpret_cast<uint2*>(to) = make_uint2(pack_as<TO>(x[0], x[1]), pack_as<TO>(x[2], x[3]));
                        }
                }
            }
        }
        __syncthreads();  // the slot may be filled again
        if (++slot == STAGES) { slot = 0; phase ^= 1; }
    }
}
