// Global average pooling and the following product with a constant matrix, for few samples: out[n, o] = sum of mean(in[n, :, c]) * w[o, c] + bias[o].
// A cluster of RANKS blocks computes 64 outputs of all samples. Each block takes 32 * I channels: it averages them, with the loads of all pixels in flight, and
// multiplies with its part of the weights, which its threads load into registers before the preceding kernel ends; the partial sums
// are added in the cluster's shared memory. A single block is launched without a cluster, where st.async is an illegal instruction: it uses plain stores.
// Constants: TYPE (of input and weights), TO (of the result), I, RANKS, IMAGES, PIXELS.
#include "common.cuh"
#include "vector.cuh"

constexpr int CHANNELS = 32 * I, GROUPS = CHANNELS / 8, LANES = 256 / GROUPS, READS = (PIXELS + LANES - 1) / LANES;
constexpr int SHARE = (32 + RANKS - 1) / RANKS * 2;  // outputs that a block finishes

#include "arguments"

extern "C" __global__ void __launch_bounds__(256) pool_gemm(const __grid_constant__ Args a) {
    __shared__ __align__(16) float accumulators[LANES][CHANNELS];
    __shared__ __align__(16) float mean[IMAGES][CHANNELS];
    __shared__ __align__(16) float parts[RANKS][IMAGES][SHARE];
    __shared__ __align__(8) u64 barrier;
    const int t = threadIdx.x, rank = blockIdx.x % RANKS, tile = blockIdx.x / RANKS, own = min(SHARE, 64 - rank * SHARE);
    const u32 bar = shared_address(&barrier);
    if constexpr (RANKS > 1) {
        if (t == 0) {
            barrier_init(bar, 1);
            barrier_init_fence();
            barrier_expect(bar, RANKS * IMAGES * own * 4);
        }
        __syncthreads();
        cluster_arrive();
    }
    let_next_start();
    uint4 w[I];
#pragma unroll
    for (int i = 0; i < I; ++i) w[i] = a.weights[((long long)(tile * RANKS + rank) * I + i) * 256 + t];
    const int output = tile * 64 + rank * SHARE + t % SHARE;  // that this thread finishes
    const float bias = t < IMAGES * SHARE && t % SHARE < own ? a.bias[output] : 0.f;
    const int group = t % GROUPS, lane = t / GROUPS, channel = rank * CHANNELS + group * 8;
    wait_for_previous();
    for (int n = 0; n < IMAGES; ++n) {
        Raw<TYPE> v[READS];
#pragma unroll
        for (int j = 0; j < READS; ++j) {
            const int pixel = lane + j * LANES;
            v[j] = load_raw<TYPE>(a.input, ((long long)n * PIXELS + pixel) * a.c + channel, pixel < PIXELS && channel < a.c);
        }
        Vec8 sum;
#pragma unroll
        for (int e = 0; e < 8; ++e) sum.v[e] = 0.f;
#pragma unroll
        for (int j = 0; j < READS; ++j) {
            const Vec8 x = unpack_raw<TYPE>(v[j]);
#pragma unroll
            for (int e = 0; e < 8; ++e) sum.v[e] += x.v[e];
        }
        float4* to = reinterpret_cast<float4*>(&accumulators[lane][group * 8]);
        to[0] = make_float4(sum.v[0], sum.v[1], sum.v[2], sum.v[3]);
        to[1] = make_float4(sum.v[4], sum.v[5], sum.v[6], sum.v[7]);
        __syncthreads();
        if (t < CHANNELS) {
            float total = 0.f;
#pragma unroll
            for (int j = 0; j < LANES; ++j) total += accumulators[j][t];
            mean[n][t] = total / (float)PIXELS;
        }
        __syncthreads();
    }
    if constexpr (RANKS > 1) cluster_wait();  // all blocks of the cluster run: their shared memory may be written
    for (int n = 0; n < IMAGES; ++n) {
        float acc = 0.f;
#pragma unroll
        for (int i = 0; i < I; ++i) {  // the four lanes of an output take groups of eight channels round-robin
            const float4* from = reinterpret_cast<const float4*>(&mean[n][(i * 4 + t % 4) * 8]);
            const float4 x = from[0], y = from[1];
            const float2 w0 = unpack_as<TYPE>(w[i].x), w1 = unpack_as<TYPE>(w[i].y), w2 = unpack_as<TYPE>(w[i].z), w3 = unpack_as<TYPE>(w[i].w);
            acc += x.x * w0.x + x.y * w0.y + x.z * w1.x + x.w * w1.y + y.x * w2.x + y.y * w2.y + y.z * w3.x + y.w * w3.y;
        }
        acc += __shfl_xor_sync(~0u, acc, 1);
        acc += __shfl_xor_sync(~0u, acc, 2);
        const float next = __shfl_down_sync(~0u, acc, 4);
        const int o = t / 4, to = o / SHARE;
        if constexpr (RANKS > 1) {
            if (t % 8 == 0) store_remote(remote_address(shared_address(&parts[rank][n][o - to * SHARE]), to), acc, next, remote_address(bar, to));
        } else if (t % 8 == 0) {
            parts[0][n][o] = acc;
            parts[0][n][o + 1] = next;
        }
    }
    if constexpr (RANKS > 1)
        barrier_wait(bar, 0);
    else
        __syncthreads();
    if (t < IMAGES * SHARE && t % SHARE < own && output < a.outputs) {
        float total = bias;
#pragma unroll
        for (int r = 0; r < RANKS; ++r) total += parts[r][t / SHARE][t % SHARE];
        store1<TO>(a.out, (long long)(t / SHARE) * a.outputs + output, total);
    }
}
