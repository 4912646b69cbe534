// Group and instance normalization of images with channels last, and an activation: out = act((in - mean) / deviation * scale + shift).
// A block takes a share of the pixels of an image. `moments` stores for each group the mean of the share and the sum of squares around that mean;
// `normalize_groups` joins the shares of the image in a fixed order. Sums of squares are taken around a near value everywhere: nothing cancels.
// Constants: TYPE, V (groups of eight channels), PER (channels of a normalized group), ACT, THREADS.
#include "common.cuh"
#include "vector.cuh"

constexpr int C = V * 8, GROUPS = C / PER, ROWS = THREADS / V, UNROLL = 4;
constexpr int JOINED = PER % 8 == 0 ? 8 : 1, COLUMNS = C / JOINED;   // channels of a thread that are in one group
constexpr int fit(int lanes) { return lanes > 1 && lanes * GROUPS > THREADS ? fit(lanes / 2) : lanes; }
constexpr int LANES = fit(32), AT_ONCE = THREADS / LANES;            // threads of a group, when its parts are joined
static_assert(V <= THREADS && C % PER == 0, "sizes");

#include "arguments"

// The pixels of the image that share `s` of the block's, or of another, starts with.
DEV int first_pixel(const Args& a, int s) { return (int)((long long)a.pixels * s / a.shares); }

DEV float over_lanes(float v) {
#pragma unroll
    for (int d = LANES / 2; d > 0; d /= 2) v += __shfl_xor_sync(~0u, v, d);
    return v;
}

extern "C" __global__ void __launch_bounds__(THREADS) moments(const __grid_constant__ Args a) {
    __shared__ __align__(16) float means[ROWS][COLUMNS];
    __shared__ __align__(16) float squares[ROWS][COLUMNS];
    const int t = threadIdx.x, column = t % V, row = t / V, share = blockIdx.x, image = blockIdx.y;
    const int first = first_pixel(a, share), last = first_pixel(a, share + 1);
    const long long base = (long long)image * a.pixels * C + column * 8;
    let_next_start();
    wait_for_previous();
    const bool inside = row < ROWS;
    const int count = inside && first + row < last ? (last - first - row - 1) / ROWS + 1 : 0;
    Vec8 near = unpack_raw<TYPE>(load_raw<TYPE>(a.input, base + (long long)(first + row) * C, count > 0));
    float sum[8] = {}, square[8] = {};
    for (int pixel = first + row; inside && pixel < last; pixel += ROWS * UNROLL) {
        Raw<TYPE> v[UNROLL];
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) {
            const int own = pixel + i * ROWS;
            v[i] = load_raw<TYPE>(a.input, base + (long long)own * C, own < last);
        }
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) {
            if (pixel + i * ROWS >= last) continue;
            const Vec8 x = unpack_raw<TYPE>(v[i]);
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                const float d = x.v[e] - near.v[e];
                sum[e] += d;
                square[e] = fmaf(d, d, square[e]);
            }
        }
    }
    const float each = count ? 1.f / (float)count : 0.f;
    float mean[8], joint = 0.f;
#pragma unroll
    for (int e = 0; e < 8; ++e) {
        mean[e] = fmaf(sum[e], each, near.v[e]);
        square[e] = fmaf(-sum[e] * each, sum[e], square[e]);
        joint += mean[e] * .125f;
    }
    if (inside) {
        if (JOINED == 8) {
            float total = 0.f;
#pragma unroll
            for (int e = 0; e < 8; ++e) total += fmaf((float)count * (mean[e] - joint), mean[e] - joint, square[e]);
            means[row][column] = joint;
            squares[row][column] = total;
        } else {
#pragma unroll
            for (int e = 0; e < 8; ++e) means[row][column * 8 / JOINED + e] = mean[e], squares[row][column * 8 / JOINED + e] = square[e];
        }
    }
    __syncthreads();
    constexpr int WIDTH = PER / JOINED, ENTRIES = ROWS * WIDTH;   // of a group
    const int pixels = last - first;
    for (int from = 0; from < GROUPS; from += AT_ONCE) {
        const int group = from + t / LANES, lane = t % LANES;
        const bool present = group < GROUPS;
        float total = 0.f;
        for (int i = lane; present && i < ENTRIES; i += LANES) {
            const int r = i / WIDTH, n = pixels > r ? (pixels - r - 1) / ROWS + 1 : 0;
            total = fmaf((float)n, means[r][group * WIDTH + i % WIDTH], total);
        }
        const float middle = over_lanes(total) / ((float)pixels * WIDTH);
        total = 0.f;
        for (int i = lane; present && i < ENTRIES; i += LANES) {
            const int r = i / WIDTH, n = pixels > r ? (pixels - r - 1) / ROWS + 1 : 0;
            const float d = means[r][group * WIDTH + i % WIDTH] - middle;
            total += fmaf((float)(n * JOINED) * d, d, squares[r][group * WIDTH + i % WIDTH]);
        }
        total = over_lanes(total);
        if (present && lane == 0) {
            float* to = a.parts + (((long long)image * a.shares + share) * GROUPS + group) * 2;
            to[0] = middle;
            to[1] = total;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) normalize_groups(const __grid_constant__ Args a) {
    __shared__ __align__(16) float middles[1][GROUPS];
    __shared__ __align__(16) float factors[1][GROUPS];
    const int t = threadIdx.x, column = t % V, row = t / V, share = blockIdx.x, image = blockIdx.y;
    const int first = first_pixel(a, share), last = first_pixel(a, share + 1);
    const long long base = (long long)image * a.pixels * C + column * 8;
    let_next_start();
    const Vec8 scale = load8<0>(reinterpret_cast<const u8*>(a.scale), column * 8), shift = load8<0>(reinterpret_cast<const u8*>(a.shift), column * 8);
    wait_for_previous();
    const float* parts = a.parts + (long long)image * a.shares * GROUPS * 2;
    for (int from = 0; from < GROUPS; from += AT_ONCE) {
        const int group = from + t / LANES, lane = t % LANES;
        const bool present = group < GROUPS;
        float total = 0.f;
        for (int s = lane; present && s < a.shares; s += LANES)
            total = fmaf((float)(first_pixel(a, s + 1) - first_pixel(a, s)), parts[(s * GROUPS + group) * 2], total);
        const float middle = over_lanes(total) / (float)a.pixels;
        total = 0.f;
        for (int s = lane; present && s < a.shares; s += LANES) {
            const float d = parts[(s * GROUPS + group) * 2] - middle, n = (float)(first_pixel(a, s + 1) - first_pixel(a, s)) * PER;
            total += fmaf(n * d, d, parts[(s * GROUPS + group) * 2 + 1]);
        }
        total = over_lanes(total);
        if (present && lane == 0) {
            middles[0][group] = middle;
            factors[0][group] = 1.f / sqrtf(total / ((float)a.pixels * PER) + a.epsilon);
        }
    }
    __syncthreads();
    if (row >= ROWS) return;
    float middle[8], factor[8];
#pragma unroll
    for (int e = 0; e < 8; ++e) {
        const int group = (column * 8 + e) / PER;
        middle[e] = middles[0][group];
        factor[e] = factors[0][group] * scale.v[e];
    }
    for (int pixel = first + row; pixel < last; pixel += ROWS * UNROLL) {
        Raw<TYPE> v[UNROLL];
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) {
            const int own = pixel + i * ROWS;
            v[i] = load_raw<TYPE>(a.input, base + (long long)own * C, own < last);
        }
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) {
            const int own = pixel + i * ROWS;
            if (own >= last) continue;
            Vec8 x = unpack_raw<TYPE>(v[i]);
#pragma unroll
            for (int e = 0; e < 8; ++e) x.v[e] = activate<ACT>(fmaf(x.v[e] - middle[e], factor[e], shift.v[e]), a.act);
            store8<TYPE>(a.out, base + (long long)own * C, x);
        }
    }
}
