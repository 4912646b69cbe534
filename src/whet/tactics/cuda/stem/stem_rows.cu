// A stem convolution (few input channels, strides of 2) and the following 3x3 max pooling (stride 2, padding 1), row by row down the image. Weights are
// operand A of the product and stay in registers; a row of the image is in shared memory as pixels of four 16-bit channels, so the windows of
// adjacent results, two pixels or 16 bytes apart, are rows of operand B in place: its core matrices overlap. The fourth channel of every
// pixel is 1: three taps of it carry the bias in three parts. Each row of results is pooled in registers.
// Constants: C (channels, at most 3), R (filter rows), HALVES (fours of taps of a filter row), LEAD (columns in front of a result's, even; the filter row begins
// there), PAD_H, BN (columns of results of a block), SKIP (8 of them belong to the block on the left, which pools them, too), FROM (type), BLOCKS, BF16.
#include "common.cuh"
#include "wgmma"

constexpr int STEPS = R * HALVES, GROUPS = BN / 8, RING = 16;  // of K; of eight columns; rows of the image that are kept
constexpr int LEFT = (LEAD + 3) / 4 * 4, QUADS = (2 * BN - 2 + LEFT - LEAD + 4 * HALVES + 3) / 4, ROW = QUADS * 32;  // bytes of a row
constexpr u32 ONE = BF16 ? 0x3f80 : 0x3c00, LEAST = BF16 ? 0xff80ff80u : 0xfc00fc00u;
constexpr int WORDS = FROM == 0 ? 4 : 2;                       // of four pixels of a channel
static_assert(C >= 1 && C <= 3 && R + 2 <= RING && BN % 8 == 0 && LEAD % 2 == 0 && LEAD <= 4 * HALVES, "filter");

#include "arguments"

DEV u32 larger(u32 a, u32 b) {
    u32 r;
    if (BF16) asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    else asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
DEV u32 smaller(u32 a, u32 b) {
    u32 r;
    if (BF16) asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    else asm("min.NaN.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
// Overlapping windows: rows of the operand are 16 bytes apart, the next 16 bytes of K are those of the next row, and eight rows are 128 bytes.
DEV u64 windows(u32 address) { return (u64)((address & 0x3ffff) >> 4) | (1ull << 16) | (8ull << 32); }

struct Place {  // of the block in the image
    const u8* image;
    int x0, h, w;  // the column of slot 0
};
template <int COUNT> struct Piece {  // this thread's pixels of COUNT rows
    static constexpr int EACH = (COUNT * QUADS + 127) / 128;
    u32 v[EACH][C][WORDS];
    DEV void fetch(const Place& at, int first) {
#pragma unroll
        for (int j = 0; j < EACH; ++j) {
            const int i = threadIdx.x + j * 128, row = i / QUADS, y = first + row, x = at.x0 + (i - row * QUADS) * 4;
            const bool inside = row < COUNT && (u32)y < (u32)at.h && (u32)x < (u32)at.w;
#pragma unroll
            for (int c = 0; c < C; ++c) {
                const u8* from = at.image + ((c * at.h + y) * at.w + x) * (FROM == 0 ? 4 : 2);
                if (FROM == 0) {
                    const uint4 g = inside ? *reinterpret_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
                    v[j][c][0] = g.x; v[j][c][1] = g.y; v[j][c][WORDS - 2] = g.z; v[j][c][WORDS - 1] = g.w;
                } else {
                    const uint2 g = inside ? *reinterpret_cast<const uint2*>(from) : make_uint2(0, 0);
                    v[j][c][0] = g.x; v[j][c][1] = g.y;
                }
            }
        }
    }
    DEV u32 two(int j, int c, int i) const {  // pixels 2i and 2i + 1 of a channel, 16 bits each
        if (FROM != 0) return v[j][c][i];
        return pack(__uint_as_float(v[j][c][2 * i % WORDS]), __uint_as_float(v[j][c][(2 * i + 1) % WORDS]));
    }
    DEV void put(u32 ring, int first) const {
#pragma unroll
        for (int j = 0; j < EACH; ++j) {
            const int i = threadIdx.x + j * 128, row = i / QUADS;
            if (row >= COUNT) continue;
            const u32 to = ring + (first + row & RING - 1) * ROW + (i - row * QUADS) * 32;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const u32 a = two(j, 0, half), b = C > 1 ? two(j, C > 1 ? 1 : 0, half) : 0, d = C > 2 ? two(j, C > 2 ? 2 : 0, half) : 0;
                asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to + half * 16), "r"(__byte_perm(a, b, 0x5410)), "r"(__byte_perm(d, ONE, 0x5410)),
                             "r"(__byte_perm(a, b, 0x7632)), "r"(__byte_perm(d, ONE, 0x5432)) : "memory");
            }
        }
    }
};

// A row of results: products are on their way when it returns.
DEV void multiply(float (&acc)[BN / 2], const u32 (&weights)[STEPS][4], u32 ring, int y) {
    mma_begin();
#pragma unroll
    for (int r = 0; r < R; ++r) {
        const u32 row = ring + (2 * y - PAD_H + r & RING - 1) * ROW + (LEFT - LEAD) * 8;
#pragma unroll
        for (int half = 0; half < HALVES; ++half) wgmma_registers(acc, weights[r * HALVES + half], windows(row + half * 32), r + half > 0);
    }
    mma_commit();
}
// Calls use(group, maximum) with the maxima of three adjacent results; a register holds two channels of a pixel. `edge`: the first group is outside the image.
template <class Use> DEV void pool_row(const float (&acc)[BN / 2], int lane, bool edge, Use use) {
    u32 before = LEAST;
#pragma unroll
    for (int j = 0; j < GROUPS; ++j) {
        const u32 even = pack(acc[4 * j], acc[4 * j + 2]);
        u32 odd = pack(acc[4 * j + 1], acc[4 * j + 3]);
        if (SKIP && j == 0 && edge) odd = LEAST;
        const u32 left = __shfl_sync(~0u, lane % 4 == 3 ? before : odd, (lane & ~3) | (lane + 3 & 3));
        use(j, larger(larger(even, odd), left));
        before = odd;
    }
}

extern "C" __global__ void __launch_bounds__(128, BLOCKS) stem_rows(const __grid_constant__ Args a) {
    extern __shared__ u8 raw[];
    const u32 ring = (shared_address(raw) + 127) & ~127u;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    u32 weights[STEPS][4];
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
        const uint4 g = a.weights[(s * 4 + warp) * 32 + lane];
        weights[s][0] = g.x; weights[s][1] = g.y; weights[s][2] = g.z; weights[s][3] = g.w;
    }
    let_next_start();
    const int line = blockIdx.x / a.tiles, tile = blockIdx.x - line * a.tiles, n = line / a.strips, strip = line - n * a.strips;
    const int first = strip * a.rows, last = min(first + a.rows, a.p), q0 = tile * a.wide;
    const Place at{a.input + (long long)n * C * a.h * a.w * (FROM == 0 ? 4 : 2), 2 * (2 * q0 - 8 * SKIP) - LEFT, a.h, a.w};
    const int channel = warp * 16 + lane / 4 * 2, column = q0 + lane % 4 - 4 * SKIP;
    const bool edge = tile == 0;
    const int end = channel < a.k ? min(a.q, q0 + a.wide) - column : 0;  // groups of four before this limit are stored
    u8* out = a.out + (((long long)n * a.p + first) * a.q + column) * a.k * 2 + channel * 2;
    const u32 lower = pack(a.act.a, a.act.a), upper = pack(a.act.b, a.act.b);
    float acc[BN / 2];
    u32 above[GROUPS];  // maxima of the row of results above
    int y = 2 * first - 1;
    wait_for_previous();
    {
        Piece<R> rows;
        rows.fetch(at, 2 * y - PAD_H);
        rows.put(ring, 2 * y - PAD_H);
    }
    fence_async();
    __syncthreads();
    Piece<2> next;
    next.fetch(at, 2 * y - PAD_H + R);
    multiply(acc, weights, ring, y);
    next.put(ring, 2 * y - PAD_H + R);
    fence_async();
    mma_wait<0>();
    pool_row(acc, lane, edge, [&](int j, u32 most) { above[j] = first == 0 ? LEAST : most; });
    __syncthreads();
    for (int row = first; row < last; ++row) {
        ++y;
        next.fetch(at, 2 * y - PAD_H + R);
        multiply(acc, weights, ring, y);
        next.put(ring, 2 * y - PAD_H + R);
        fence_async();
        mma_wait<0>();
        pool_row(acc, lane, edge, [&](int j, u32 most) { above[j] = larger(above[j], most); });
        __syncthreads();
        ++y;
        if (row + 1 < last) next.fetch(at, 2 * y - PAD_H + R);
        multiply(acc, weights, ring, y);
        if (row + 1 < last) next.put(ring, 2 * y - PAD_H + R);
        fence_async();
        mma_wait<0>();
        pool_row(acc, lane, edge, [&](int j, u32 most) {
            const u32 v = smaller(larger(larger(above[j], most), lower), upper);
            if (j >= SKIP && j * 4 < end) *reinterpret_cast<u32*>(out + j * 4 * a.k * 2) = v;
            above[j] = most;
        });
        out += a.q * a.k * 2;
        __syncthreads();
    }
}
