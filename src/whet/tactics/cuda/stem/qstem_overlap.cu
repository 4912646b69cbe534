// A quantized stem convolution of stride 2 from a float image, on integers, with or without the following 3x3 max pooling of stride 2.
// A block quantizes its tile of the image and stores two rows and two columns of all channels as 16 bytes of shared memory: a
// cell. The convolution then has stride 1 over TY x TX cells, and eight consecutive cells are eight rows of a K-major
// operand without a swizzle, whose halves of 16 bytes may have any address: windows overlap in shared memory, nothing is gathered.
// Weights are operand A and stay in registers: an accumulator's row is a channel, its column a pixel, so a thread has two channels and pairs
// of adjacent pixels. Maxima are taken of the accumulators (scales are not negative and a clip is monotonic, so rounding can follow), and
// bytes turn to channels last as they go to shared memory.
// Constants: C (channels, at most 4), TY, TX (cells of a window), BN (results of a row of the tile, multiple of 16), KC (channels out, 32 or
// 64; with 32 operand A holds two rows of results), TALL (rows of the tile: of maxima, or passes of 64 / KC rows of results), POOL, Q
// (columns of the convolution, with POOL), IN8, TO (3 i8, 4 u8), ACT, FOLD (as in conv.cu), BLOCKS, WEIGHTS_AS_A 1.
#include "common.cuh"
#include "vector.cuh"
#include "wgmma"

constexpr int WIDE = POOL ? BN / 2 : BN;                            // pixels of a row that is stored
#include "weights_as_a.cuh"

constexpr int LINES = POOL ? 2 * TALL + 1 : TALL * SIDE;           // rows of results of a tile
constexpr int ROWS = LINES + TY - 1, COLUMNS = BN + TX - 1, PLACES = ROWS * COLUMNS, PITCH = COLUMNS * 16;
constexpr int DEPTH = TY + SIDE - 1, PAIRS = TX / 2, STEPS = DEPTH * PAIRS + TX % 2 * ((DEPTH + 1) / 2);
constexpr int EACH = 4;                                            // cells of a thread whose pixels are in flight at once
constexpr int LOWEST = -2147483647 - 1;
static_assert(C <= 4 && (!POOL || (SIDE == 1 && Q <= BN)), "sizes");

#include "arguments"

// The two cells of K of a step: the first, and the offset of the second (multiplied by 0 if there is none).
DEV constexpr int step_place(int s) { return s < DEPTH * PAIRS ? s / (PAIRS ? PAIRS : 1) * COLUMNS + s % (PAIRS ? PAIRS : 1) * 2 : (s - DEPTH * PAIRS) * 2 * COLUMNS + TX - 1; }
DEV constexpr int step_apart(int s) { return s < DEPTH * PAIRS ? 1 : (s - DEPTH * PAIRS) * 2 + 1 < DEPTH ? COLUMNS : 0; }

// Rows of 16 bytes in groups of eight, without a swizzle: the second half of K is `apart` rows after the first.
DEV u64 plain_operand(u32 address, int apart) { return (u64)((address & 0x3ffff) >> 4) | ((u64)apart << 16) | (8ull << 32); }

DEV u32 quantized(float x, const Args& a) {  // in the low byte; NaN becomes 0
    const float low = (IN8 == 4 ? 0.f : -128.f) - (float)a.in_zero, y = x * a.image_per_step;
    const u32 bits = __float_as_uint(fminf(fmaxf(y, low), low + 255.f) + 12582912.f);  // 1.5 * 2^23: rounds, ties to even
    return y == y ? bits + a.in_zero : 0;
}

// Two adjacent pixels, or zeros; as assembly, so that all of a thread's loads are issued before the first is waited for.
DEV float2 two_pixels(const float* at, bool inside) {
    float2 v;
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %3, 0; mov.f32 %0, 0f00000000; mov.f32 %1, 0f00000000; @p ld.global.v2.f32 {%0, %1}, [%2]; }"
                 : "=&f"(v.x), "=&f"(v.y) : "l"(at), "r"((int)inside));
    return v;
}

// Four bytes, the low ones of four words.
DEV u32 word_of(u32 a, u32 b, u32 c, u32 d) { return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410); }

// All cells of a tile with its first result in row y and column x of the convolution.
DEV void fill(const Args& a, u32 patch, int n, int y, int x) {
    const float* image = a.image + (long long)n * C * a.h * a.w;
    const int plane = a.h * a.w;
    for (int first = threadIdx.x; first < PLACES; first += THREADS * EACH) {
        float2 v[EACH][2][C];
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
            const int i = first + e * THREADS, r = i / COLUMNS, column = (x + i - r * COLUMNS) * 2 - a.left;
#pragma unroll
            for (int d = 0; d < 2; ++d) {
                const int row = (y + r) * 2 - a.top + d;
                const bool inside = i < PLACES && (u32)row < (u32)a.h && (u32)column < (u32)a.w;  // outside are zeros: the zero point
#pragma unroll
                for (int c = 0; c < C; ++c) v[e][d][c] = two_pixels(image + c * plane + row * a.w + column, inside);
            }
        }
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
            u32 byte[16];
#pragma unroll
            for (int i = 0; i < 16; ++i) {  // row, column, channel
                const int d = i / (2 * C), side = i / C % 2, c = i % C;
                byte[i] = i < 4 * C ? quantized(side ? v[e][d & 1][c].y : v[e][d & 1][c].x, a) : 0;
            }
            u32 word[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) word[i] = word_of(byte[4 * i], byte[4 * i + 1], byte[4 * i + 2], byte[4 * i + 3]);
            const int i = first + e * THREADS;
            if (i < PLACES)
                asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(patch + i * 16), "r"(word[0]), "r"(word[1]), "r"(word[2]), "r"(word[3]) : "memory");
        }
    }
}

// Accumulators of row `line` of the tile (and of the next, if operand A holds two).
DEV void multiply(int (&acc)[BN / 2], const u32 (&weights)[STEPS][4], u32 patch, int line) {
    const u32 at = patch + line * PITCH;
    mma_begin();
#pragma unroll
    for (int s = 0; s < STEPS; ++s) wgmma_registers(acc, weights[s], plain_operand(at + step_place(s) * 16, step_apart(s)), s > 0);
    mma_commit();
    mma_wait<0>();
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) qstem_overlap(const __grid_constant__ Args a) {
    extern __shared__ u8 raw[];
    const u32 base = shared_address(raw), patch = (base + 1023) & ~1023u;
    u8* stages = raw + (patch - base) + (PLACES * 16 + 127) / 128 * 128;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, quad = lane % 4;
    let_next_start();
    u32 weights[STEPS][4];
    load_weights(weights, a.weights);
    const int part = warp % PARTS, side = warp / PARTS, channel = part * 16 + lane / 4 * 2;  // this thread's two channels, its row of two
    const float2 by = *reinterpret_cast<const float2*>(a.factor + channel), add = *reinterpret_cast<const float2*>(a.bias + channel);
    wait_for_previous();
    int flip = 0;
    for (int tile = blockIdx.x; tile < a.tiles; tile += gridDim.x) {
        const int line = tile / a.tiles_x, tx = tile - line * a.tiles_x, n = line / a.tiles_y, ty = line - n * a.tiles_y;
        const int y0 = POOL ? ty * TALL * 2 - 1 : ty * LINES, x0 = tx * BN;  // of results
        fill(a, patch, n, y0, x0);
        fence_async();
        __syncthreads();
        int acc[BN / 2];
#if POOL
        int most[BN / 8][2];  // of the rows so far, in each eight columns: the thread's window, two channels
#pragma unroll
        for (int i = 0; i < BN / 8; ++i) most[i][0] = most[i][1] = LOWEST;
        for (int j = 0; j < LINES; ++j) {
            if ((u32)(y0 + j) < (u32)a.p) multiply(acc, weights, patch, j);
            else
#pragma unroll
                for (int i = 0; i < BN / 2; ++i) acc[i] = LOWEST;
            const bool ends = j && j % 2 == 0;  // a row of windows
            u8* stage = stages + flip * STAGE;
#pragma unroll
            for (int i = 0; i < BN / 8; i += 2) {
                float v[4];
#pragma unroll
                for (int o = 0; o < 2; ++o)
#pragma unroll
                    for (int c = 0; c < 2; ++c) {
                        int(&m)[BN / 2] = acc;
                        const int at = (i + o) * 4 + c * 2, column = (i + o) * 8 + quad * 2;
                        if (Q < BN) {  // columns that are not there
                            if (column >= Q) m[at] = LOWEST;
                            if (column + 1 >= Q) m[at + 1] = LOWEST;
                        }
                        const int behind = i + o ? m[i + o ? at - 3 : 0] : LOWEST;  // the last column of the preceding eight
                        const int left = __shfl_sync(~0u, quad == 3 ? behind : m[at + 1], (lane & ~3) | ((lane + 3) & 3));
                        const int window = max(max(left, m[at]), m[at + 1]);
                        const int all = max(most[i + o][c], window);
                        most[i + o][c] = ends || j == 0 ? window : all;
                        v[o * 2 + c] = fmaf((float)all, c ? by.y : by.x, c ? add.y : add.x);
                    }
                if (ends) {
                    finish(v, a);
                    const int pixel = i * 4 + (lane & 7) / 2 + (lane & 1) * 4;
                    store_turned(shared_address(stage) + place_of(0, pixel, part), four(v[0], v[1], v[2], v[3], a));
                }
            }
            if (ends) {
                __syncthreads();
                send(a, stage, n, ty * TALL + j / 2 - 1, 0);
                flip ^= 1;
            }
        }
#else
        for (int j = 0; j < TALL; ++j) {
            u8* stage = stages + flip * STAGE;
            multiply(acc, weights, patch, j * SIDE);
#pragma unroll
            for (int i = 0; i < BN / 8; i += 2) {
                float v[8];
#pragma unroll
                for (int e = 0; e < 8; ++e) v[e] = fmaf((float)acc[i * 4 + e], e & 2 ? by.y : by.x, e & 2 ? add.y : add.x);
                finish(v, a);
#pragma unroll
                for (int o = 0; o < 2; ++o)
                    store_turned(shared_address(stage) + place_of(side, (i + o) * 8 + (lane & 7), part), four(v[o * 4], v[o * 4 + 2], v[o * 4 + 1], v[o * 4 + 3], a));
            }
            __syncthreads();
            send(a, stage, n, y0 + j * SIDE, x0);
            flip ^= 1;
        }
#endif
        __syncthreads();  // the cells may be overwritten
    }
}
