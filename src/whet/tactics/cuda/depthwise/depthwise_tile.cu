// Depthwise convolution of NHWC tensors through shared memory: a block loads the input of a tile (RG*TH rows, TW columns, CG channels) by one
// bulk copy, zeros around the image included, while it computes the tile before. A thread walks down TH rows of WIDE pixels of VEC channels: each
// input row is read and widened once and added to all output rows that it touches. Weights [R][S][c] as f32 stay in registers, as a block
// keeps its channels: four for filters of up to 25 taps, two (of 16-bit floats) for larger ones. Constants: FROM, TO (types as in vector.cuh), R, S, STRIDE_H,
// STRIDE_W, TH, RG, TW, WIDE, CG, VEC, STAGES, BLOCKS, ACT, FOLD (as in conv.cu).
#include "common.cuh"
#include "vector.cuh"

constexpr int IN = Element<FROM>::BYTES, OUT = Element<TO>::BYTES;
#include "depthwise_parts.cuh"
static_assert(CG % 8 == 0 && TW % WIDE == 0 && (VEC == 4 || (VEC == 2 && IN == 2 && OUT == 2)), "tile");

#include "arguments"

struct Part { float v[VEC]; };
DEV Part load_part(u32 at) {
    Part r;
#if VEC == 2
    const float2 x = unpack_as<FROM>(load_shared(at));
    r.v[0] = x.x; r.v[1] = x.y;
#else
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
#endif
    return r;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) depthwise_tile(const __grid_constant__ Args a) {
    extern __shared__ u8 raw[];
    const Tiles tiles(a, raw);
    const int lane = threadIdx.x % LANES, strip = threadIdx.x / LANES % STRIPS, band = threadIdx.x / (LANES * STRIPS);
    const int channel = tiles.channel0 + lane * VEC;
    const bool mine = threadIdx.x < USED && channel < a.c;
    tiles.prepare(&a.input);
    let_next_start();
    Part weight[R][S], bias;
    if (mine) {
        bias = *reinterpret_cast<const Part*>(a.bias + channel);
#pragma unroll
        for (int r = 0; r < R; ++r)
#pragma unroll
            for (int s = 0; s < S; ++s) weight[r][s] = *reinterpret_cast<const Part*>(a.weights + (long long)(r * S + s) * a.c + channel);
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
            const u32 from = tiles.base + slot * SLOT + ((band * TH * STRIDE_H * COLUMNS + strip * WIDE * STRIDE_W) * CG + lane * VEC) * IN;
            const int q0 = at.x + strip * WIDE, p0 = at.y + band * TH;
            u8* out = a.out + (((long long)(at.n * a.p + p0) * a.q + q0) * a.c + channel) * OUT;
            Part sum[SUMS][WIDE];
#pragma unroll 1
            for (int y0 = 0; y0 < OWN_ROWS; y0 += TURN) {
#pragma unroll
                for (int u = 0; u < TURN; ++u) {
                    if (y0 + u >= OWN_ROWS) break;
                    Part v[SPAN];
#pragma unroll
                    for (int j = 0; j < SPAN; ++j) v[j] = load_part(from + ((y0 + u) * COLUMNS + j) * (CG * IN));
#pragma unroll
                    for (int r = 0; r < R; ++r) {
                        if ((u - r) % STRIDE_H != 0) continue;
                        constexpr int MANY = 8 * SUMS;  // keeps the index positive
                        const int place = ((u - r) / STRIDE_H + MANY) % SUMS;
                        if (VEC == 2 && (y0 + u < r || y0 + u - r > (TH - 1) * STRIDE_H)) continue;  // many taps: rows of no result cost more than the test
#pragma unroll
                        for (int k = 0; k < WIDE; ++k)
#pragma unroll
                            for (int e = 0; e < VEC; ++e) {
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
                            float x[VEC];
#pragma unroll
                            for (int e = 0; e < VEC; ++e) x[e] = FOLD ? sum[place][k].v[e] : activate<ACT>(sum[place][k].v[e], a.act);
                            u8* to = out + ((long long)row * a.q + k) * a.c * OUT;
#if VEC == 2
                            *reinterpret_cast<u32*>(to) = pack_as<TO>(x[0], x[1]);
#else
                            if (FOLD) fold<ACT>(x, a.act, {a.act.b, a.act.b, a.act.b, a.act.b});
                            if (FOLD) *reinterpret_cast<u32*>(to) = steps_of(x[0], x[1], x[2], x[3], a.per_step, a.zero);
                            else if (OUT == 1) *reinterpret_cast<u32*>(to) = bytes_of<TO>(x[0] * a.per_step + a.zero, x[1] * a.per_step + a.zero, x[2] * a.per_step + a.zero, x[3] * a.per_step + a.zero);
                            else *reinterpret_cast<uint2*>(to) = make_uint2(pack_as<TO>(x[0], x[1]), pack_as<TO>(x[2], x[3]));
#endif
                        }
                }
            }
        }
        __syncthreads();  // the slot may be filled again
        if (++slot == STAGES) { slot = 0; phase ^= 1; }
    }
}
