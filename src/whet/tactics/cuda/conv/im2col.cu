// The windows of a convolution as rows of a matrix: out[pixel][r][s][c], zeros outside the image and after the last
// column. For library products; whet's kernels read windows in place. Constants: UNIT (bytes moved at once).
#include "common.cuh"

#include "arguments"
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
