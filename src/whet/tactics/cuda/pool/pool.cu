// Pooling of NHWC tensors, eight channels a thread. Constants: TYPE, TO (types of input and result), MAX (else average), R and S (the window,
// or 0). Averages of integers: their zero point is taken off, `per_step` and `zero` make steps of the result of them.
#include "common.cuh"
#include "vector.cuh"

#include "arguments"

// The larger of two pairs of 16-bit values; bytes travel as two words of two.
DEV u32 larger(u32 a, u32 b) {
    u32 r;
    if (TYPE == 1) asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    else if (TYPE == 2) asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
#if __CUDA_ARCH__ >= 900
    else asm("max.u16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
#else
    else asm("vmax2.u32.u32.u32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(0));
#endif
    return r;
}

// Maxima over a window of constant size, 16 bytes of channels a thread: the whole window is loaded, then compared without conversion.
extern "C" __global__ void __launch_bounds__(256) packed_max(const __grid_constant__ Args a) {
    let_next_start();
    wait_for_previous();
    constexpr int EACH = 16 / Element<TYPE>::BYTES;
    constexpr u32 FLIP = TYPE == 3 ? 0x80808080u : 0u, LOWEST = TYPE == 1 ? 0xfc00fc00u : TYPE == 2 ? 0xff80ff80u : TYPE == 3 ? 0x80808080u : 0u;
    const u32 groups = a.c / EACH, total = (u32)a.n * a.p * a.q * groups, i = blockIdx.x * 256 + threadIdx.x;
    if (i >= total) return;
    const u32 pixel = i / groups, line = pixel / a.q;
    const int g = i - pixel * groups, q = pixel - line * a.q, n = line / a.p, p = line - n * a.p;
    const int y0 = p * a.stride_h - a.pad_h, x0 = q * a.stride_w - a.pad_w;
    const uint4* in = reinterpret_cast<const uint4*>(a.input);
    uint4 v[R > 0 ? R : 1][S > 0 ? S : 1];
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
        for (int s = 0; s < S; ++s) {
            const int y = y0 + r * a.dil_h, x = x0 + s * a.dil_w;
            v[r][s] = make_uint4(LOWEST, LOWEST, LOWEST, LOWEST);
            if ((u32)y < (u32)a.h && (u32)x < (u32)a.w) v[r][s] = in[(((long long)n * a.h + y) * a.w + x) * groups + g];
        }
    u32 out[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        u32 even = 0, odd = 0;
#pragma unroll
        for (int r = 0; r < R; ++r)
#pragma unroll
            for (int s = 0; s < S; ++s) {
                const u32 w = (k == 0 ? v[r][s].x : k == 1 ? v[r][s].y : k == 2 ? v[r][s].z : v[r][s].w) ^ FLIP;
                if (TYPE <= 2) even = r + s == 0 ? w : larger(even, w);
                else { even = larger(even, w & 0x00ff00ffu); odd = larger(odd, w >> 8 & 0x00ff00ffu); }
            }
        out[k] = TYPE <= 2 ? even : (even | odd << 8) ^ FLIP;
    }
    reinterpret_cast<uint4*>(a.out)[i] = make_uint4(out[0], out[1], out[2], out[3]);
}

extern "C" __global__ void __launch_bounds__(256) pool(const __grid_constant__ Args a) {
    let_next_start();
    wait_for_previous();
    const int groups = a.c / 8;
    const u32 total = (u32)a.n * a.p * a.q * groups, i = blockIdx.x * 256 + threadIdx.x;  // the host refuses more
    if (i >= total) return;
    const u32 pixel = i / groups, line = pixel / a.q;
    const int g = i - pixel * groups, q = pixel - line * a.q, n = line / a.p, p = line - n * a.p;
    const int y0 = p * a.stride_h - a.pad_h, x0 = q * a.stride_w - a.pad_w;
    Vec8 sum;
#pragma unroll
    for (int k = 0; k < 8; ++k) sum.v[k] = MAX ? -__int_as_float(0x7f800000) : 0.f;
    int count = 0, read = 0;
    const u32 fill = !MAX || TYPE == 4 ? 0 : TYPE == 3 ? 0x80808080u : TYPE == 5 ? 0xfefefefeu : TYPE == 0 ? 0xff800000u : TYPE == 1 ? 0xfc00fc00u : 0xff80ff80u;  // minus infinity, e4m3: its lowest value
    if (R * S > 0 && R * S <= 25) {  // a window of constant size: all of it is loaded before the first value is used
        Raw<TYPE> raw[R > 0 ? R : 1][S > 0 ? S : 1];
#pragma unroll
        for (int r = 0; r < R; ++r)
#pragma unroll
            for (int s = 0; s < S; ++s) {
                const int y = y0 + r * a.dil_h, x = x0 + s * a.dil_w;
                const bool inside = (u32)y < (u32)a.h && (u32)x < (u32)a.w;
                raw[r][s] = load_raw<TYPE>(a.input, (((long long)n * a.h + y) * a.w + x) * a.c + g * 8, inside, fill);
                read += inside;
                count += inside || (a.whole && y < a.end_h && x < a.end_w);
            }
#pragma unroll
        for (int r = 0; r < R; ++r)
#pragma unroll
            for (int s = 0; s < S; ++s) {
                const Vec8 v = unpack_raw<TYPE>(raw[r][s]);
#pragma unroll
                for (int k = 0; k < 8; ++k) sum.v[k] = MAX ? max_nan(sum.v[k], v.v[k]) : sum.v[k] + v.v[k];
            }
    } else {
        for (int r = 0; r < a.r; ++r) {
            const int y = y0 + r * a.dil_h;
            for (int s = 0; s < a.s; ++s) {
                const int x = x0 + s * a.dil_w;
                if (y < 0 || x < 0 || y >= a.h || x >= a.w) { count += a.whole && y < a.end_h && x < a.end_w; continue; }
                const Vec8 v = load8<TYPE>(a.input, (((long long)n * a.h + y) * a.w + x) * a.c + g * 8);
                ++count;
                ++read;
#pragma unroll
                for (int k = 0; k < 8; ++k) sum.v[k] = MAX ? max_nan(sum.v[k], v.v[k]) : sum.v[k] + v.v[k];
            }
        }
    }
    if (!MAX)
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            if (TO >= 3) sum.v[k] = __fdiv_rn(sum.v[k] - a.in_zero * (float)read, (float)count) * a.per_step + a.zero;
            else sum.v[k] /= (float)count;
        }
    store8<TO>(a.out, (long long)i * 8, sum);
}

// Mean over all pixels: a block of 256 threads takes 64 channels and a share of the pixels, 32 threads side by side of each group of eight. The sums of
// several shares (blockIdx.z) are stored; `join_averages` adds them in order.
DEV void store_average(const Args& a, long long at, float total) {
    const float mean = total / (float)(a.h * a.w);
    store1<TO>(a.out, at, TO >= 3 ? (mean - a.in_zero) * a.per_step + a.zero : mean);
}
extern "C" __global__ void __launch_bounds__(256) global_average(const __grid_constant__ Args a) {
    __shared__ float part[32][65];
    let_next_start();
    wait_for_previous();
    const int g = threadIdx.x % 8, lane = threadIdx.x / 8, channel = blockIdx.x * 64 + g * 8, n = blockIdx.y, pixels = a.h * a.w;
    const int last = (int)((long long)pixels * (blockIdx.z + 1) / a.shares);
    constexpr int UNROLL = 4;
    float sum[8] = {};
    if (channel < a.c)
        for (int i = (int)((long long)pixels * blockIdx.z / a.shares) + lane; i < last; i += 32 * UNROLL) {
            Raw<TYPE> v[UNROLL];
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) v[u] = load_raw<TYPE>(a.input, ((long long)n * pixels + i + u * 32) * a.c + channel, i + u * 32 < last);
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                const Vec8 x = unpack_raw<TYPE>(v[u]);
#pragma unroll
                for (int k = 0; k < 8; ++k) sum[k] += i + u * 32 < last ? x.v[k] : 0.f;
            }
        }
#pragma unroll
    for (int k = 0; k < 8; ++k) part[lane][g * 8 + k] = sum[k];
    __syncthreads();
    const int own = blockIdx.x * 64 + threadIdx.x;
    if (threadIdx.x >= 64 || own >= a.c) return;
    float total = 0.f;
#pragma unroll
    for (int i = 0; i < 32; ++i) total += part[i][threadIdx.x];
    if (a.shares == 1) store_average(a, (long long)n * a.c + own, total);
    else a.parts[((long long)n * a.shares + blockIdx.z) * a.c + own] = total;
}
extern "C" __global__ void __launch_bounds__(256) join_averages(const __grid_constant__ Args a) {
    let_next_start();
    wait_for_previous();
    const int i = blockIdx.x * 256 + threadIdx.x;
    if (i >= a.n * a.c) return;
    const int n = i / a.c, c = i - n * a.c;
    float total = 0.f;
#pragma unroll 8
    for (int s = 0; s < a.shares; ++s) total += a.parts[((long long)n * a.shares + s) * a.c + c];
    store_average(a, i, total);
}
