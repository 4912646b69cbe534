// Squeeze and excitation of images of any size in two launches: out = in * gate(in), gate = act2(W2 act(W1 mean(in) + b1) + b2).
// A block takes G groups of eight channels and a share of the pixels of an image. A hidden value is linear in the channel sums: `squeeze` multiplies
// those of each block with W1 and stores S values per block. `excite` adds the values of all blocks of an image in a fixed order, computes the gates of
// the block's channels, and multiplies its pixels.
// Constants: TYPE, G, THREADS, S (hidden values), ACT, ACT2.
#include "common.cuh"
#include "vector.cuh"

constexpr int GC = G * 8, ROWS = THREADS / G, WARPS = THREADS / 32, PARTS = THREADS / GC, UNROLL = 4;
constexpr int OUTS = (S + WARPS - 1) / WARPS, COLUMNS = (GC + 31) / 32;  // of W1 a thread needs OUTS x COLUMNS
static_assert(GC <= THREADS && S <= THREADS, "sizes");

#include "arguments"

#include "channel_sums.cuh"

// The part of an image that a block takes; `group` of eight channels and `row` of pixels of a thread.
struct Place {
    int column, share, image, group, row, first, last;
    long long base;
    bool inside;
    DEV Place(const Args& a, int t) {
        column = blockIdx.x % a.columns, share = blockIdx.x / a.columns, image = blockIdx.y, group = t % G, row = t / G;
        first = (int)((long long)a.pixels * share / a.shares), last = (int)((long long)a.pixels * (share + 1) / a.shares);
        const int channel = column * GC + group * 8;
        base = (long long)image * a.pixels * a.channels + channel;
        inside = row < ROWS && channel < a.channels;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS) squeeze(const __grid_constant__ Args a) {
    __shared__ __align__(16) float accumulators[ROWS][GC];
    __shared__ __align__(16) float mean[GC];
    const int t = threadIdx.x, lane = t % 32, warp = t / 32;
    const Place at(a, t);
    let_next_start();
    float w1[OUTS][COLUMNS];
#pragma unroll
    for (int i = 0; i < OUTS; ++i)
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) {
            const int s = warp + i * WARPS, c = lane + j * 32;
            w1[i][j] = s < S && c < GC ? unpack_as<TYPE>(a.w1[(at.column * S + s) * GC + c]).x : 0.f;
        }
    wait_for_previous();
    float sum[8] = {};
    for (int pixel = at.first + at.row; pixel < at.last; pixel += ROWS * UNROLL) {
        Raw<TYPE> v[UNROLL];
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) {
            const int own = pixel + i * ROWS;
            v[i] = load_raw<TYPE>(a.input, at.base + (long long)own * a.channels, at.inside && own < at.last);
        }
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) {
            const Vec8 x = unpack_raw<TYPE>(v[i]);
#pragma unroll
            for (int e = 0; e < 8; ++e) sum[e] += x.v[e];
        }
    }
    if (at.row < ROWS)
#pragma unroll
        for (int e = 0; e < 8; ++e) accumulators[at.row][at.group * 8 + e] = sum[e];
    __syncthreads();
    float mine = 0.f;
    if (t < PARTS * GC)
        for (int r = t / GC; r < ROWS; r += PARTS) mine += accumulators[r][t % GC];  // the row that it overwrites is read by this thread alone
    by_channel(accumulators, mine, mean, t, [&](float total) { return total / (float)a.pixels; });
    const int blocks = a.columns * a.shares;
#pragma unroll
    for (int i = 0; i < OUTS; ++i) {
        const int s = warp + i * WARPS;
        if (s >= S) continue;
        float acc = 0.f;
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) acc += w1[i][j] * mean[min(lane + j * 32, GC - 1)];
#pragma unroll
        for (int d = 16; d > 0; d /= 2) acc += __shfl_xor_sync(~0u, acc, d);
        if (lane == 0) a.parts[((long long)at.image * S + s) * blocks + blockIdx.x] = acc;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) excite(const __grid_constant__ Args a) {
    __shared__ __align__(16) float accumulators[ROWS][GC];
    __shared__ __align__(16) float gate[GC];
    __shared__ float hidden[S];
    __shared__ __align__(16) u32 w2[S * GC / 2];
    const int t = threadIdx.x, lane = t % 32, warp = t / 32;
    const Place at(a, t);
    let_next_start();
    for (int i = t; i < S * GC / 2; i += THREADS) w2[i] = reinterpret_cast<const u32*>(a.w2)[at.column * (S * GC / 2) + i];
    const float b1 = t < S ? a.b1[t] : 0.f, b2 = t < GC && at.column * GC + t < a.channels ? a.b2[at.column * GC + t] : 0.f;
    wait_for_previous();
    const int blocks = a.columns * a.shares;
    const float* parts = a.parts + (long long)at.image * S * blocks;
    float h[OUTS] = {};
    for (int b = lane; b < blocks; b += 32)
#pragma unroll
        for (int i = 0; i < OUTS; ++i) h[i] += warp + i * WARPS < S ? parts[(warp + i * WARPS) * blocks + b] : 0.f;
#pragma unroll
    for (int i = 0; i < OUTS; ++i) {
#pragma unroll
        for (int d = 16; d > 0; d /= 2) h[i] += __shfl_xor_sync(~0u, h[i], d);
        if (lane == 0 && warp + i * WARPS < S) hidden[warp + i * WARPS] = h[i];
    }
    __syncthreads();
    if (t < S) hidden[t] = activate<ACT>(hidden[t] + b1, a.act);
    __syncthreads();
    float mine = 0.f;
    if (t < PARTS * GC)
        for (int s = t / GC; s < S; s += PARTS) mine += unpack_as<TYPE>(reinterpret_cast<const u16*>(w2)[s * GC + t % GC]).x * hidden[s];
    by_channel(accumulators, mine, gate, t, [&](float total) { return activate<ACT2>(total + b2, a.act2); });
    if (!at.inside) return;
    float by[8];
#pragma unroll
    for (int e = 0; e < 8; ++e) by[e] = gate[at.group * 8 + e];
    for (int pixel = at.first + at.row; pixel < at.last; pixel += ROWS * UNROLL) {
        Raw<TYPE> v[UNROLL];
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) {
            const int own = pixel + i * ROWS;
            v[i] = load_raw<TYPE>(a.input, at.base + (long long)own * a.channels, own < at.last);
        }
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) {
            const int own = pixel + i * ROWS;
            if (own >= at.last) continue;
            Vec8 x = unpack_raw<TYPE>(v[i]);
#pragma unroll
            for (int e = 0; e < 8; ++e) x.v[e] *= by[e];
            store8<TYPE>(a.out, at.base + (long long)own * a.channels, x);
        }
    }
}
