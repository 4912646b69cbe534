// The windows of a convolution as rows of a matrix: out[pixel][r][s][c], zeros outside the image and after the last
// column. For products without windows; most of whet's kernels read windows in place. Constants: UNIT (bytes moved at once).
// `patches` does the same from planes: input[n][c][h][w] of type FROM, out[pixel][c][r][s] of type TO. Constants: FROM, TO (types as in vector.cuh),
// RUN (1 or 8: adjacent columns of the window that a thread moves; runs of 8 are at multiples of 8 in the image, inside it or outside as a whole).
#include "common.cuh"
#include "vector.cuh"

#include "arguments"
#ifdef RUN
extern "C" __global__ void __launch_bounds__(256) patches(const __grid_constant__ Args a) {
    let_next_start();
    wait_for_previous();
    const long long i = (long long)blockIdx.x * 256 + threadIdx.x;
    if (i >= a.count) return;
    const long long pixel = i / a.width, image_row = pixel / a.q;
    const int column = (int)(i - pixel * a.width) * RUN, line = column / a.s, r = a.taps / a.s, c = line / r;
    const int q = (int)(pixel - image_row * a.q), n = (int)(image_row / a.p), p = (int)(image_row - (long long)n * a.p);
    const int y = p * a.stride_h - a.pad_h + (line - c * r) * a.dil_h, x = q * a.stride_w - a.pad_w + (column - line * a.s) * a.dil_w;
    const bool inside = c < a.c && y >= 0 && y < a.h && x >= 0 && x < a.w;
    const long long from = (((long long)n * a.c + c) * a.h + y) * a.w + x;
    if (RUN == 8) {
        Vec8 v = {};
        if (inside) v = load8<FROM>(a.input, from);
        store8<TO>(a.out, i * 8, v);
    } else
        store1<TO>(a.out, i, inside ? load1<FROM>(a.input, from) : 0.f);
}
#else
struct alignas(16) Sixteen { u32 w[4]; };
template <int BYTES> struct Of {};
template <> struct Of<2> { typedef u16 type; };
template <> struct Of<4> { typedef u32 type; };
template <> struct Of<8> { typedef u64 type; };
template <> struct Of<16> { typedef Sixteen type; };

extern "C" __global__ void __launch_bounds__(256) im2col(const __grid_constant__ Args a) {
    typedef Of<UNIT>::type Unit;
    let_next_start();
    wait_for_previous();
    const long long i = (long long)blockIdx.x * 256 + threadIdx.x;
    if (i >= a.count) return;
    const long long pixel = i / a.width, line = pixel / a.q;
    const int column = (int)(i - pixel * a.width), tap = column / a.c, c = column - tap * a.c;
    const int q = (int)(pixel - line * a.q), n = (int)(line / a.p), p = (int)(line - (long long)n * a.p);
    const int y = p * a.stride_h - a.pad_h + tap / a.s * a.dil_h, x = q * a.stride_w - a.pad_w + tap % a.s * a.dil_w;
    Unit v = {};
    if (tap < a.taps && y >= 0 && y < a.h && x >= 0 && x < a.w) v = reinterpret_cast<const Unit*>(a.input)[(((long long)n * a.h + y) * a.w + x) * a.c + c];
    reinterpret_cast<Unit*>(a.out)[i] = v;
}
#endif
