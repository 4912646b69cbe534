// Squeeze and excitation in one launch: out = in * gate(in), gate = act2(W2 act(W1 mean(in) + b1) + b2), one gate for each sample and channel.
// A cluster of CC * CP blocks takes an image: a block has C / CC channels of its share of the pixels, which its threads keep in registers from
// the means until they are multiplied. A hidden value is linear in the channel sums: each block multiplies its own with W1, and these parts, S
// values from each block to each, are all that blocks exchange. Each block then computes the gates of its channels.
// Constants: TYPE, G (groups of eight channels of a block), CC, CP, THREADS, ITEMS (pixels of a thread), S (hidden values), PIXELS, ACT, ACT2.
#include "common.cuh"
#include "vector.cuh"

constexpr int CL = CC * CP, GC = G * 8, C = GC * CC, ROWS = THREADS / G, WARPS = THREADS / 32;
constexpr int OUTS = (S + WARPS - 1) / WARPS, COLUMNS = (GC + 31) / 32, PARTS = THREADS / GC;  // of W1 a thread holds OUTS x COLUMNS
static_assert(GC <= THREADS && S <= THREADS && CL > 1 && CL <= 16, "sizes");

#include "arguments"

DEV void store_remote1(u32 a, float x, u32 bar) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(a), "r"(__float_as_uint(x)), "r"(bar) : "memory");
}

#include "channel_sums.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1) squeeze(const __grid_constant__ Args a) {
    __shared__ __align__(16) float accumulators[ROWS][GC];
    __shared__ __align__(16) float mean[GC], gate[GC];
    __shared__ float hidden[S], parts[CL][S];
    __shared__ __align__(16) u32 w2[S * GC / 2];
    __shared__ __align__(8) u64 barrier;
    const int t = threadIdx.x, lane = t % 32, warp = t / 32, rank = blockIdx.x % CL, image = blockIdx.x / CL, own = rank % CC, share = rank / CC;
    const int first = PIXELS * share / CP, last = PIXELS * (share + 1) / CP;
    const u32 bar = shared_address(&barrier);
    if (t == 0) {
        barrier_init(bar, 1);
        barrier_init_fence();
        barrier_expect(bar, CL * S * 4);
    }
    __syncthreads();
    cluster_arrive();
    let_next_start();
    float w1[OUTS][COLUMNS];
#pragma unroll
    for (int i = 0; i < OUTS; ++i)
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) {
            const int s = warp + i * WARPS, c = lane + j * 32;
            w1[i][j] = s < S && c < GC ? unpack_as<TYPE>(a.w1[(own * S + s) * GC + c]).x : 0.f;
        }
    for (int i = t; i < S * GC / 2; i += THREADS) w2[i] = reinterpret_cast<const u32*>(a.w2)[own * (S * GC / 2) + i];
    const float b1 = t < S ? a.b1[t] : 0.f, b2 = t < GC ? a.b2[own * GC + t] : 0.f;
    const int group = t % G, row = t / G;
    const long long base = (long long)image * PIXELS * C + own * GC + group * 8;
    wait_for_previous();

    Raw<TYPE> v[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const int pixel = first + row + i * ROWS;
        v[i] = load_raw<TYPE>(a.input, base + (long long)pixel * C, row < ROWS && pixel < last);
    }
    float sum[8] = {};
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const Vec8 x = unpack_raw<TYPE>(v[i]);
#pragma unroll
        for (int e = 0; e < 8; ++e) sum[e] += x.v[e];
    }
    if (row < ROWS) {
        float4* to = reinterpret_cast<float4*>(&accumulators[row][group * 8]);
        to[0] = make_float4(sum[0], sum[1], sum[2], sum[3]);
        to[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
    }
    __syncthreads();
    float mine = 0.f;
    if (t < PARTS * GC)
        for (int r = t / GC; r < ROWS; r += PARTS) mine += accumulators[r][t % GC];  // the row that it overwrites is read by this thread alone
    by_channel(accumulators, mine, mean, t, [](float total) { return total * (1.f / PIXELS); });

    cluster_wait();  // all blocks of the cluster run: their shared memory may be written
#pragma unroll
    for (int i = 0; i < OUTS; ++i) {
        const int s = warp + i * WARPS;
        if (s >= S) continue;
        float acc = 0.f;
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) acc += w1[i][j] * mean[min(lane + j * 32, GC - 1)];
#pragma unroll
        for (int d = 16; d > 0; d /= 2) acc += __shfl_xor_sync(~0u, acc, d);
        if (lane < CL) store_remote1(remote_address(shared_address(&parts[rank][s]), lane), acc, remote_address(bar, lane));
    }
    barrier_wait(bar, 0);
    if (t < S) {
        float h = b1;
#pragma unroll
        for (int q = 0; q < CL; ++q) h += parts[q][t];
        hidden[t] = activate<ACT>(h, a.act);
    }
    __syncthreads();
    mine = 0.f;
    if (t < PARTS * GC)
        for (int s = t / GC; s < S; s += PARTS) mine += unpack_as<TYPE>(reinterpret_cast<const u16*>(w2)[s * GC + t % GC]).x * hidden[s];
    by_channel(accumulators, mine, gate, t, [&](float total) { return activate<ACT2>(total + b2, a.act2); });

    if (row >= ROWS) return;
    float by[8];
#pragma unroll
    for (int e = 0; e < 8; ++e) by[e] = gate[group * 8 + e];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const int pixel = first + row + i * ROWS;
        if (pixel >= last) continue;
        Vec8 x = unpack_raw<TYPE>(v[i]);
#pragma unroll
        for (int e = 0; e < 8; ++e) x.v[e] *= by[e];
        store8<TYPE>(a.out, base + (long long)pixel * C, x);
    }
}
