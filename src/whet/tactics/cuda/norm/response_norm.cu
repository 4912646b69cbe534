// Norms of channels from sums of squares, divided by their mean over the channels: a block per image, up to KEPT channels a thread.
// Constants: TO (type of the result), KEPT, THREADS.
#include "common.cuh"
#include "vector.cuh"

#include "arguments"

extern "C" __global__ void __launch_bounds__(THREADS) response_norm(const __grid_constant__ Args p) {
    __shared__ float of_warp[THREADS / 32];
    let_next_start();
    wait_for_previous();
    const long long from = (long long)blockIdx.x * p.channels, step = (long long)p.images * p.channels;
    float norms[KEPT], sum = 0.f;
#pragma unroll
    for (int k = 0; k < KEPT; ++k) {
        const int c = threadIdx.x + k * THREADS;
        norms[k] = 0.f;
        if (c >= p.channels) continue;
#pragma unroll 4
        for (int s = 0; s < p.shares; ++s) norms[k] += p.parts[s * step + from + c];
        norms[k] = sqrtf(norms[k]);
        sum += norms[k];
    }
#pragma unroll
    for (int d = 16; d; d >>= 1) sum += __shfl_xor_sync(~0u, sum, d);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = sum;
    __syncthreads();
    float total = 0.f;
#pragma unroll
    for (int w = 0; w < THREADS / 32; ++w) total += of_warp[w];
    const float divisor = total / (float)p.channels + p.epsilon;
#pragma unroll
    for (int k = 0; k < KEPT; ++k) {
        const int c = threadIdx.x + k * THREADS;
        if (c < p.channels) store1<TO>(p.out, from + c, norms[k] / divisor);
    }
}
