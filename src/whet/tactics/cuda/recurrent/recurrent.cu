// Recurrent layers: `project` multiplies the inputs of all steps by W, then `recur` runs the steps, a block per direction and sequence.
// Weights are transposed, [direction][entry][row], so that adjacent threads read adjacent rows. Constants: DIRECTIONS, STEPS, SEQUENCES, INPUTS,
// UNITS, GATES: sizes; TYPE (of values) and WEIGHTS (0 f32, 1 f16, 2 bf16); MODEL: 0 RNN, 1 GRU, 2 LSTM; BATCH_FIRST; BACKWARDS: the first direction is
// the reverse one; LINEAR_BEFORE_RESET; BLOCK; those of cell.cuh.
#include "common.cuh"
#include "vector.cuh"
#include "cell.cuh"

#include "arguments"

extern "C" __global__ void __launch_bounds__(256) project(const __grid_constant__ Args p) {
    let_next_start();
    wait_for_previous();
    const long long i = (long long)blockIdx.x * 256 + threadIdx.x;
    if (i >= (long long)DIRECTIONS * STEPS * SEQUENCES * GATES * UNITS) return;
    const int row = (int)(i % (GATES * UNITS)), n = (int)(i / (GATES * UNITS) % SEQUENCES), t = (int)(i / ((long long)GATES * UNITS * SEQUENCES) % STEPS), d = (int)(i / ((long long)GATES * UNITS * SEQUENCES * STEPS));
    const long long x = (BATCH_FIRST ? (long long)n * STEPS + t : (long long)t * SEQUENCES + n) * INPUTS, w = (long long)d * INPUTS * GATES * UNITS + row;
    float sum = p.bias[d * 2 * GATES * UNITS + row];
#pragma unroll 8
    for (int k = 0; k < INPUTS; ++k) sum = fmaf(load1<TYPE>(p.x, x + k), load1<WEIGHTS>(p.w, w + (long long)k * (GATES * UNITS)), sum);
    p.projected[i] = sum;
}

extern "C" __global__ void __launch_bounds__(BLOCK) recur(const __grid_constant__ Args p) {
    __shared__ float h[UNITS], c[UNITS], reset[UNITS], gate[GATES * UNITS];
    let_next_start();
    wait_for_previous();
    const int d = blockIdx.x / SEQUENCES, n = blockIdx.x % SEQUENCES;
    const bool backwards = BACKWARDS || d == 1;
    const int length = p.lengths ? (int)p.lengths[n] : STEPS;
    const long long state = (BATCH_FIRST ? (long long)n * DIRECTIONS + d : (long long)d * SEQUENCES + n) * UNITS;
    const float* bias = p.bias + (d * 2 + 1) * GATES * UNITS;
    auto rows = [&](int from, int to, const float* v) {  // products of R's rows with v
        for (int row = from + threadIdx.x; row < to; row += BLOCK) {
            const long long r = (long long)d * UNITS * GATES * UNITS + row;
            float sum = bias[row];
#pragma unroll 16
            for (int k = 0; k < UNITS; ++k) sum = fmaf(v[k], load1<WEIGHTS>(p.r, r + (long long)k * (GATES * UNITS)), sum);
            gate[row] = sum;
        }
        __syncthreads();
    };
    for (int u = threadIdx.x; u < UNITS; u += BLOCK) {
        h[u] = p.first_h ? load1<TYPE>(p.first_h, state + u) : 0.f;
        c[u] = p.first_c ? load1<TYPE>(p.first_c, state + u) : 0.f;
    }
    __syncthreads();
    for (int step = 0; step < STEPS; ++step) {
        const int t = backwards ? STEPS - 1 - step : step;
        const long long y = (BATCH_FIRST ? ((long long)n * STEPS + t) * DIRECTIONS + d : ((long long)t * DIRECTIONS + d) * SEQUENCES + n) * UNITS;
        if (t >= length) {  // past its end a sequence keeps its state and outputs zeros
            for (int u = threadIdx.x; u < UNITS; u += BLOCK) store1<TYPE>(p.y, y + u, 0.f);
            continue;
        }
        const float* x = p.projected + (((long long)d * STEPS + t) * SEQUENCES + n) * (GATES * UNITS);
        rows(0, MODEL == 1 && !LINEAR_BEFORE_RESET ? 2 * UNITS : GATES * UNITS, h);
        if (MODEL == 1) {  // z, r, h
            for (int u = threadIdx.x; u < UNITS; u += BLOCK) {
                const float r = act0(clipped(x[UNITS + u] + gate[UNITS + u]), d);
                reset[u] = LINEAR_BEFORE_RESET ? r : r * h[u];
            }
            __syncthreads();
            if (!LINEAR_BEFORE_RESET) rows(2 * UNITS, 3 * UNITS, reset);
        }
        for (int u = threadIdx.x; u < UNITS; u += BLOCK) {
            float next;
            if (MODEL == 0) next = act0(clipped(x[u] + gate[u]), d);
            else if (MODEL == 1) {
                const float z = act0(clipped(x[u] + gate[u]), d);
                const float own = LINEAR_BEFORE_RESET ? reset[u] * gate[(GATES - 1) * UNITS + u] : gate[(GATES - 1) * UNITS + u];
                next = (1.f - z) * act1(clipped(x[(GATES - 1) * UNITS + u] + own), d) + z * h[u];
            } else {  // i, o, f, c
                const float* from = p.peepholes + d * 3 * UNITS + u;
                const Peepholes hole = PEEPHOLES ? Peepholes{from[0], from[UNITS], from[2 * UNITS]} : Peepholes{0.f, 0.f, 0.f};
                auto input = [&](int g) { return x[g * GATES / 4 * UNITS + u] + gate[g * GATES / 4 * UNITS + u]; };
                next = lstm_cell(input(0), input(1), input(2), input(3), c[u], hole, d);
            }
            store1<TYPE>(p.y, y + u, next);
            h[u] = next;
        }
        __syncthreads();
    }
    for (int u = threadIdx.x; u < UNITS; u += BLOCK) {
        if (p.last_h) store1<TYPE>(p.last_h, state + u, h[u]);
        if (p.last_c) store1<TYPE>(p.last_c, state + u, c[u]);
    }
}
