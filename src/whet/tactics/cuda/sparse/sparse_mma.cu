// Convolution (and product) with 2:4 weights on sparse tensor cores by `mma.sp`: warps of 32 threads, 16-bit operands. For GPUs before Hopper, and for few
// pixels. Constants: WM, WN (warps along channels and pixels), MI, NI (tiles of 16 channels and of 8 pixels per warp), STAGES, BF16, ACT, TO, ADD, RESIDUAL,
// SPLIT (the blocks of a column z compute `per` K steps each; their sums go to `partial` as floats, and `finish` adds them in order).
//
// The product is [channels x K] sparse by [K x pixels]: weights are the first operand, compressed to two of every four values, with metadata as
// _compress.py describes them (one word serves the two instructions of a K step of 64). Pixels are gathered tap by tap with cp.async, zeros outside.
#include "common.cuh"
#include "vector.cuh"

#include "arguments"

constexpr int THREADS = WM * WN * 32, BM = WM * MI * 16, BN = WN * NI * 8, BK = 64;
constexpr int A_BYTES = BM * BK, B_BYTES = BN * BK * 2, STAGE_BYTES = A_BYTES + B_BYTES;  // half of the 16-bit values of A are stored
constexpr int A_CHUNKS = BM * 4 / THREADS, B_CHUNKS = BN * 8 / THREADS, PITCH = BM + 4;   // chunks of 16 bytes; floats of a pixel of the result
static_assert(BM * 4 % THREADS == 0 && BN * 8 % THREADS == 0 && NI % 2 == 0, "every thread copies whole chunks");

DEV void copy_async(u32 to, const void* from, bool inside) {  // 16 bytes, or zeros
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(inside ? 16 : 0) : "memory");
}
DEV void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> DEV void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }

// Rows of 64 and of 128 bytes; chunks are permuted so that eight rows of one chunk are in different banks.
DEV u32 place_a(int row, int chunk) { return row * 64 + ((chunk ^ (row >> 1 & 3)) << 4); }
DEV u32 place_b(int row, int chunk) { return row * 128 + ((chunk ^ (row & 7)) << 4); }

// d[16 x 8] += a[16 x 32] b[32 x 8], a compressed; SELECTOR: which threads of a quad have the metadata.
template <int SELECTOR> DEV void multiply_sparse(float (&d)[4], const u32 (&a)[4], const u32 (&b)[4], u32 metadata) {
#if BF16
    asm volatile("mma.sp.sync.aligned.m16n8k32.row.col.f32.bf16.bf16.f32 "
#else
    asm volatile("mma.sp.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32 "
#endif
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9, %10, %11}, {%0, %1, %2, %3}, %12, %13;"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(metadata), "n"(SELECTOR));
}

// Eight results of a pixel from their sums.
DEV void store_results(const Args& p, long long element, int channel, Vec8 v) {
    Vec8 add = {};
    if (RESIDUAL) add = load8<ADD>(p.residual, element);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
        const float sum = v.v[e] + p.bias[channel + e];
        v.v[e] = activate<ACT>(RESIDUAL == 1 ? sum + add.v[e] : sum, p.act) + (RESIDUAL == 2 ? add.v[e] : 0.f);
    }
    store8<TO>(p.out, element, v);
}

extern "C" __global__ void __launch_bounds__(256) finish(const __grid_constant__ Args p) {
    const long long element = ((long long)blockIdx.x * 256 + threadIdx.x) * 8, count = (long long)p.pixels * p.k;
    wait_for_previous();
    let_next_start();
    if (element >= count) return;
    Vec8 v = load8<0>(p.partial, element);
    for (int z = 1; z < p.splits; ++z) {
        const Vec8 more = load8<0>(p.partial, z * count + element);
#pragma unroll
        for (int e = 0; e < 8; ++e) v.v[e] += more.v[e];
    }
    store_results(p, element, (int)(element % p.k), v);
}

extern "C" __global__ void __launch_bounds__(THREADS) sparse_mma(const __grid_constant__ Args p) {
    extern __shared__ u8 raw[];
    const u32 base = (shared_address(raw) + 127) & ~127u;
    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, wm = warp % WM, wn = warp / WM;
    const int m0 = blockIdx.x * BM, n0 = blockIdx.y * BN;

    // The pixels whose chunks this thread copies.
    long long image[B_CHUNKS];
    int top[B_CHUNKS], left[B_CHUNKS];
#pragma unroll
    for (int i = 0; i < B_CHUNKS; ++i) {
        const int pixel = n0 + (tid + i * THREADS) / 8, line = pixel / p.q, n = line / p.p;
        image[i] = pixel < p.pixels ? (long long)n * p.h * p.w : -1;
        top[i] = (line - n * p.p) * p.stride_h - p.pad_h;
        left[i] = (pixel - line * p.q) * p.stride_w - p.pad_w;
    }
    const int begin = SPLIT ? blockIdx.z * p.per : 0, steps = SPLIT ? min(p.steps - begin, p.per) : p.steps;
    const int tap = begin / p.tap_steps;
    int c0 = (begin - tap * p.tap_steps) * BK, r = tap / p.taps_w, s = tap - r * p.taps_w;  // of the next step to copy
    auto copy_step = [&](int step) {
        const u32 a = base + step % STAGES * STAGE_BYTES, b = a + A_BYTES;
#pragma unroll
        for (int i = 0; i < A_CHUNKS; ++i) {
            const int at = tid + i * THREADS, row = at / 4, chunk = at % 4;
            const bool inside = m0 + row < p.k;
            copy_async(a + place_a(row, chunk), p.kept + (inside ? ((long long)(m0 + row) * p.steps + begin + step) * 64 + chunk * 16 : 0), inside);
        }
#pragma unroll
        for (int i = 0; i < B_CHUNKS; ++i) {
            const int at = tid + i * THREADS, row = at / 8, chunk = at % 8, c = c0 + chunk * 8;
            const int y = top[i] + r * p.dil_h, x = left[i] + s * p.dil_w;
            const bool inside = image[i] >= 0 && (unsigned)y < (unsigned)p.h && (unsigned)x < (unsigned)p.w && c < p.c;
            copy_async(b + place_b(row, chunk), p.input + (inside ? ((image[i] + (long long)y * p.w + x) * p.c + c) * 2 : 0), inside);
        }
        c0 += BK;
        if (c0 >= p.c) {
            c0 = 0;
            if (++s == p.taps_w) { s = 0; ++r; }
        }
    };
    // One word of metadata for each tile of 16 channels of the warp.
    const u32* metadata = reinterpret_cast<const u32*>(p.metadata);
    auto read_metadata = [&](u32 (&to)[MI], int step) {
#pragma unroll
        for (int i = 0; i < MI; ++i) {
            const int tile = m0 / 16 + wm * MI + i;
            to[i] = metadata[((long long)(begin + step) * p.row_tiles + tile / 4) * 128 + tile % 4 * 32 + lane];
        }
    };

    wait_for_previous();
    let_next_start();
    float acc[MI][NI][4] = {};
    u32 words[MI], next[MI];
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) {
        if (i < steps) copy_step(i);
        copy_commit();
    }
    read_metadata(next, 0);
    for (int step = 0; step < steps; ++step) {
        copy_wait<STAGES - 2>();
        __syncthreads();  // the step has arrived, and nobody reads the stage that is filled next
        if (step + STAGES - 1 < steps) copy_step(step + STAGES - 1);
        copy_commit();
#pragma unroll
        for (int i = 0; i < MI; ++i) words[i] = next[i];
        if (step + 1 < steps) read_metadata(next, step + 1);
        const u32 a = base + step % STAGES * STAGE_BYTES, b = a + A_BYTES;
#pragma unroll
        for (int half = 0; half < 2; ++half) {  // 32 of K
            u32 from_a[MI][4];
#pragma unroll
            for (int i = 0; i < MI; ++i) load_fragment(from_a[i], a + place_a((wm * MI + i) * 16 + lane % 16, half * 2 + lane / 16));
#pragma unroll
            for (int j = 0; j < NI; ++j) {
                u32 from_b[4];
                load_fragment(from_b, b + place_b((wn * NI + j) * 8 + lane % 8, half * 4 + lane / 8));
#pragma unroll
                for (int i = 0; i < MI; ++i) {
                    if (half == 0) multiply_sparse<0>(acc[i][j], from_a[i], from_b, words[i]);
                    else multiply_sparse<1>(acc[i][j], from_a[i], from_b, words[i]);
                }
            }
        }
    }
    copy_wait<0>();
    __syncthreads();

    // Results [pixel][channel] as floats in shared memory, then eight channels of a pixel per thread.
#pragma unroll
    for (int i = 0; i < MI; ++i)
#pragma unroll
        for (int j = 0; j < NI; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int channel = (wm * MI + i) * 16 + lane / 4 + e / 2 * 8, pixel = (wn * NI + j) * 8 + lane % 4 * 2 + e % 2;
                store_shared_f(base + (pixel * PITCH + channel) * 4, acc[i][j][e]);
            }
    __syncthreads();
    for (int at = tid; at < BN * BM / 8; at += THREADS) {
        const int pixel = at / (BM / 8), channel = at % (BM / 8) * 8;
        if (n0 + pixel >= p.pixels || m0 + channel >= p.k) continue;
        const long long element = (long long)(n0 + pixel) * p.k + m0 + channel;
        const float4 low = load_shared_f4(base + (pixel * PITCH + channel) * 4), high = load_shared_f4(base + (pixel * PITCH + channel + 4) * 4);
        const Vec8 v = {{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}};
        if (SPLIT) store8<0>(p.partial, (long long)blockIdx.z * p.pixels * p.k + element, v);
        else store_results(p, element, m0 + channel, v);
    }
}
