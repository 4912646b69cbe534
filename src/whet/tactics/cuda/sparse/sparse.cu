// Convolutions and matrix products with 2:4 weights: D^T[channel][pixel] = W[channel][K] x X^T[K][pixel] by wgmma.mma_async.sp.
// The sparse operand of the instruction is A, so weights are A (compressed, with metadata: _compress.py) and pixels are the columns of B. A ring of
// STAGES slots holds K steps of 128 bytes of a pixel: values and input by the copy engine, metadata by plain bulk copies. The last warp loads,
// WGS warpgroups multiply. Results pass through shared memory: `stmatrix.trans` stores them channels last.
// With CLUSTER = 2 two blocks compute neighbouring channels of the same pixels: each loads half of the input tile for both.
// Constants: WGS, MI (64-row tiles of a warpgroup), BN (pixels), STAGES, CLUSTER, PX (pixels stored at once), BUFFERS (of PX pixels per
// warpgroup), BLOCKS (resident per multiprocessor), REGS and LOADER_REGS (registers of a multiplying and of a loading
// thread if a loading warpgroup gives some away; 0: all threads have equally many), IM2COL, ACT, RESIDUAL (0 none, 1 before, 2 after the
// activation), IN and TO (types of input and result, numbers as in vector.cuh), FOLD (8-bit results are computed in parts of their range, as in conv.cu). With 8-bit results the rows of weights are
// paired (_compress.pair_rows) and the residual has the type ADD.
#include "common.cuh"
#include "vector.cuh"
#include "wgmma_sparse"

constexpr int BM = 64 * MI * WGS, SIZE = IN >= 3 ? 1 : 2, BK = 128 / SIZE;
constexpr int REGISTERS = SIZE == 1 ? 2 : 1;  // of metadata per thread, K step and 64 rows
constexpr u32 A_BYTES = BM * 64, B_BYTES = BN * 128, META_BYTES = BM / 64 * 512 * REGISTERS, STEP_BYTES = A_BYTES + B_BYTES + META_BYTES;
constexpr int OUT_SIZE = Element<TO>::BYTES, OUT_ROW = 64 * OUT_SIZE;
constexpr int PARTS = BN / PX, CHUNKS = MI * PARTS;
constexpr u32 CHUNK_BYTES = PX * OUT_ROW;
constexpr int WORKERS = WGS * 128, THREADS = WORKERS + (REGS ? 128 : 32);
static_assert(BN % PX == 0 && PX % (OUT_SIZE == 1 ? 32 : 16) == 0 && BN / CLUSTER % 8 == 0 && BN <= 256 && TO != 0, "tile");
static_assert(SHARED_VALUES - SHARED_INPUT == STAGES * B_BYTES && SHARED_RESULTS - SHARED_VALUES == STAGES * A_BYTES &&
              SHARED_METADATA - SHARED_RESULTS == WGS * BUFFERS * CHUNK_BYTES && SHARED_FULL - SHARED_METADATA == STAGES * META_BYTES, "shared memory");
static_assert(!RESIDUAL || BUFFERS == CHUNKS, "the whole residual tile is loaded ahead");
#if IN == 3 || IN == 4
typedef int Sum;
#else
typedef float Sum;
#endif

#include "arguments"

struct Tile {
    int m0, n0;  // first channel and pixel
    DEV Tile(const Args& p, int unit, int rank) {
        const int band = unit / (p.group * p.tiles_n), first = band * p.group, size = min(p.group, p.units_m - first);
        const int rest = unit - first * p.tiles_n, n = rest / size;
        m0 = ((first + rest - n * size) * CLUSTER + rank) * BM;
        n0 = n * BN;
    }
};

DEV void load_bytes(u32 dst, const void* from, u32 bytes, u32 bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst), "l"(from), "r"(bytes), "r"(bar) : "memory");
}
// To the same offset of all blocks of the cluster, completing on the barrier at the same offset of each.
DEV void load_box2_all(u32 dst, const TensorMap* m, u32 bar, int x, int y) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;"
                 ::"r"(dst), "l"(m), "r"(bar), "r"(x), "r"(y), "h"((u16)((1 << CLUSTER) - 1)) : "memory");
}
DEV void load_window_all(u32 dst, const TensorMap* m, u32 bar, int c, int w, int h, int n, u16 dw, u16 dh) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4, %5, %6}], [%2], {%7, %8}, %9;"
                 ::"r"(dst), "l"(m), "r"(bar), "r"(c), "r"(w), "r"(h), "r"(n), "h"(dw), "h"(dh), "h"((u16)((1 << CLUSTER) - 1)) : "memory");
}
DEV void barrier_arrive_in(u32 bar, u32 rank) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(remote_address(bar, rank)) : "memory");
}
DEV void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
DEV u32 metadata_word(u32 at, u32& second) {
    u32 first;
    if (REGISTERS == 2) asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(first), "=r"(second) : "r"(at));
    else first = second = load_shared(at);
    return first;
}
// A use of `value` that never happens, as shared memory has no such address: until then it stays in its register.
DEV void keep(u32 value, u32 base) {
    asm volatile("{ .reg .pred q; setp.eq.u32 q, %1, 0xffffffff; @q st.shared.b32 [%1], %0; }" ::"r"(value), "r"(base) : "memory");
}
DEV void load_transposed(u32 (&f)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(f[0]), "=r"(f[1]), "=r"(f[2]), "=r"(f[3]) : "r"(at) : "memory");
}
DEV void store_transposed(const u32 (&f)[4], u32 at) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(f[0]), "r"(f[1]), "r"(f[2]), "r"(f[3]) : "memory");
}

#if TO < 3
// Two pixels of a channel as 16-bit results; r: the residual.
DEV u32 finish_two(const Args& p, float x, float y, u32 residual) {
    const float2 r = RESIDUAL ? unpack_as<TO>(residual) : make_float2(0.f, 0.f);
    if (RESIDUAL == 1) { x += r.x; y += r.y; }
    activate_two<ACT>(x, y, p.act);
    return RESIDUAL == 2 ? pack_as<TO>(x + r.x, y + r.y) : pack_as<TO>(x, y);
}
#else
// Two channels of two pixels as 8-bit results, in the order of their bytes.
DEV u32 finish_four(const Args& p, float (&v)[4], u32 residual) {
    const Vec8 r = words_as_floats<ADD>(make_uint2(RESIDUAL ? residual : 0, 0));
    if (FOLD) {
        float late[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            late[e] = p.act.b;
            if (RESIDUAL == 2 && ACT == 1) late[e] = fmaf(r.v[e], p.add_step, late[e]);
            else if (RESIDUAL) v[e] = fmaf(r.v[e], p.add_step, v[e]);
        }
        if (TO == 5) {
#pragma unroll
            for (int e = 0; e < 4; ++e) v[e] = max_nan(v[e], p.act.a);
            return bytes_of<5>(v[0], v[1], v[2], v[3]);
        }
        fold<ACT>(v, p.act, late);
        return steps_of(v[0], v[1], v[2], v[3], p.per_step, p.zero);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
        const float add = ADD >= 3 && ADD < 5 ? r.v[e] * p.add_step + p.add_shift : r.v[e] * p.add_step;
        const float x = activate<ACT>(RESIDUAL == 1 ? v[e] + add : v[e], p.act);
        v[e] = (RESIDUAL == 2 ? x + add : x) * p.per_step + p.zero;
    }
    return bytes_of<TO>(v[0], v[1], v[2], v[3]);
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) sparse(const __grid_constant__ Args p) {
    extern __shared__ u8 raw[];
    const u32 base = (shared_address(raw) + 1023) & ~1023u;
    const u32 ring_b = base + SHARED_INPUT, ring_a = base + SHARED_VALUES, stage = base + SHARED_RESULTS, ring_meta = base + SHARED_METADATA;
    const u32 full = base + SHARED_FULL, empty = base + SHARED_EMPTY, res_full = base + SHARED_RESIDUAL;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;  // the shuffle tells the compiler: equal in a warp
    const bool one = elect();
    const int rank = CLUSTER > 1 ? blockIdx.x % CLUSTER : 0, first = blockIdx.x / CLUSTER, stride = gridDim.x / CLUSTER;

    if (threadIdx.x == WORKERS) {
        map_prefetch(&p.a);
        map_prefetch(&p.b);
        map_prefetch(&p.d);
        for (int i = 0; i < STAGES; ++i) { barrier_init(full + 8 * i, 1); barrier_init(empty + 8 * i, WGS * CLUSTER); }
        for (int i = 0; i < WGS * BUFFERS; ++i) barrier_init(res_full + 8 * i, 1);
        barrier_init_fence();
    }
    __syncthreads();
    if (CLUSTER > 1) cluster_sync();
    let_next_start();

    if (warp >= WGS * 4) {  // ---- load: the whole warp walks, one lane asks
#if REGS
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(LOADER_REGS));
#endif
        const int units = warp == WGS * 4 ? p.units : 0;  // the other warps of a loading warpgroup only give their registers away
        const int ahead = min(p.steps, STAGES);
        auto load_weights = [&](int k, int slot, int m0) {
            barrier_expect(full + 8 * slot, STEP_BYTES);
            load_box2(ring_a + slot * A_BYTES, &p.a, full + 8 * slot, k * (BK / 2), m0);
            load_bytes(ring_meta + slot * META_BYTES, p.metadata + ((long long)k * p.row_tiles + m0 / 64) * (512 * REGISTERS), META_BYTES, full + 8 * slot);
        };
        if (one && first < units) {  // weights do not depend on the kernel in front
            const Tile at(p, first, rank);
            for (int k = 0; k < ahead; ++k) load_weights(k, k, at.m0);
        }
        wait_for_previous();
        int slot = 0, turn = 0;
        for (int unit = first; unit < units; unit += stride) {
            const Tile at(p, unit, rank);
            const int from = at.n0 + rank * (BN / CLUSTER);  // the first pixel that this block loads
            int image = 0, h = 0, w = 0, c = 0, r = 0, s = 0;
            if (IM2COL) {
                image = from / p.pixels;
                const int pixel = from - image * p.pixels, y = pixel / p.width;
                h = y * p.stride_h - p.pad_h;
                w = (pixel - y * p.width) * p.stride_w - p.pad_w;
            }
            for (int k = 0; k < p.steps; ++k) {
                const u32 bar = full + 8 * slot, to = ring_b + slot * B_BYTES + rank * (B_BYTES / CLUSTER);
                if (turn > 0) barrier_wait(empty + 8 * slot, (turn - 1) & 1);
                if (one) {
                    if (turn > 0 || slot >= ahead) load_weights(k, slot, at.m0);
                    if (IM2COL && CLUSTER > 1) load_window_all(to, &p.b, bar, c * BK, w, h, image, s * p.dil_w, r * p.dil_h);
                    else if (IM2COL) load_window(to, &p.b, bar, c * BK, w, h, image, s * p.dil_w, r * p.dil_h);
                    else if (CLUSTER > 1) load_box2_all(to, &p.b, bar, k * BK, from);
                    else load_box2(to, &p.b, bar, k * BK, from);
                }
                if (IM2COL && ++c == p.tap_steps) { c = 0; if (++s == p.taps_w) { s = 0; ++r; } }
                if (++slot == STAGES) { slot = 0; ++turn; }
            }
        }
    } else {  // ---- multiply, finish, store
#if REGS
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGS));
#endif
        const int group = warp / 4, t = threadIdx.x % 128, quarter = warp % 4;
        const bool leader = quarter == 0 && one;
        int slot = 0, phase = 0, turn = 0;
        for (int unit = first; unit < p.units; unit += stride, ++turn) {
            const Tile at(p, unit, rank);
            const int row = at.m0 + group * MI * 64;  // of this warpgroup
            float bias[MI][2];
            [[maybe_unused]] float factor[MI][2];
#pragma unroll
            for (int i = 0; i < MI; ++i)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int channel = row + i * 64 + quarter * 16 + (OUT_SIZE == 1 ? lane / 4 * 2 + e : lane / 4 + e * 8);
                    bias[i][e] = p.bias[channel];
                    if (SIZE == 1) factor[i][e] = p.factor[channel];
                }
            const u32 own = stage + group * BUFFERS * CHUNK_BYTES, own_full = res_full + group * BUFFERS * 8;
            if (RESIDUAL && leader) {
                if (turn == 0) wait_for_previous();
                store_wait_read();  // the stores before have left
                for (int chunk = 0; chunk < CHUNKS; ++chunk) {
                    barrier_expect(own_full + 8 * chunk, CHUNK_BYTES);
                    load_box2(own + chunk * CHUNK_BYTES, &p.r, own_full + 8 * chunk, row + chunk / PARTS * 64, at.n0 + chunk % PARTS * PX);
                }
            }
            Sum acc[MI][BN / 2];
            int previous = 0;
            auto release = [&](int which) {
                if (CLUSTER > 1 && t < CLUSTER) barrier_arrive_in(empty + 8 * which, t);
                if (CLUSTER == 1 && t == 0) barrier_arrive(empty + 8 * which);
            };
            // Products read their metadata registers when they run, not when they are issued, and the compiler does not wait for that: two
            // sets alternate, and `keep` holds a set until the products that read it are complete.
            u32 meta[2][MI][2] = {};
            for (int k2 = 0; k2 < p.steps; k2 += 2) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int k = k2 + half;
                    if (k == p.steps) break;
                    barrier_wait(full + 8 * slot, phase);
                    const u32 meta_at = ring_meta + slot * META_BYTES + (group * MI * 128 + t) * (4 * REGISTERS);
#pragma unroll
                    for (int i = 0; i < MI; ++i) meta[half][i][0] = metadata_word(meta_at + i * 512 * REGISTERS, meta[half][i][1]);
                    const u64 a = operand<64>(ring_a + slot * A_BYTES + group * MI * 4096), b = operand<128>(ring_b + slot * B_BYTES);
                    mma_begin();
#pragma unroll
                    for (int i = 0; i < MI; ++i) wgmma_sparse0(acc[i], a + i * (4096 >> 4), b, meta[half][i][0], k > 0);
#pragma unroll
                    for (int i = 0; i < MI; ++i) wgmma_sparse1(acc[i], a + i * (4096 >> 4) + 2, b + 4, meta[half][i][1], 1);
                    mma_commit();
                    mma_wait<1>();
#pragma unroll
                    for (int i = 0; i < MI; ++i)
#pragma unroll
                        for (int e = 0; e < REGISTERS; ++e) keep(meta[half ^ 1][i][e], base);
                    if (k > 0) release(previous);
                    previous = slot;
                    if (++slot == STAGES) { slot = 0; phase ^= 1; }
                }
            }
            mma_wait<0>();
            release(previous);
#pragma unroll
            for (int i = 0; i < MI; ++i)
#pragma unroll
                for (int part = 0; part < PARTS; ++part) {
                    const int chunk = i * PARTS + part, buffer = chunk % BUFFERS;
                    const u32 place = own + buffer * CHUNK_BYTES;
                    if (RESIDUAL) barrier_wait(own_full + 8 * buffer, turn & 1);
                    else {
                        if (leader) store_wait_read<BUFFERS - 1>();
                        named_barrier(1 + group, 128);
                    }
#if TO < 3
#pragma unroll
                    for (int j = 0; j < PX / 16; ++j) {  // 16 channels of 16 pixels
                        const Sum* v = acc[i] + (part * PX / 8 + j * 2) * 4;
                        const int pixel = j * 16 + lane / 16 * 8 + lane % 8, column = quarter * 2 + lane / 8 % 2;
                        const u32 to = place + pixel * 128 + ((column ^ (pixel & 7)) << 4);
                        u32 words[4];
                        if (RESIDUAL) load_transposed(words, to);
#pragma unroll
                        for (int e = 0; e < 4; ++e) {  // channels g and g + 8 of pixels 2q and 2q + 1, then of the next eight pixels
                            float x = (float)v[e * 2], y = (float)v[e * 2 + 1];
                            if (SIZE == 1) { x = fmaf(x, factor[i][e % 2], bias[i][e % 2]); y = fmaf(y, factor[i][e % 2], bias[i][e % 2]); }
                            else { x += bias[i][e % 2]; y += bias[i][e % 2]; }
                            words[e] = finish_two(p, x, y, words[e]);
                        }
                        store_transposed(words, to);
                    }
#else
#pragma unroll
                    for (int j = 0; j < PX / 32; ++j) {  // 16 channels of 32 pixels: a matrix element of `stmatrix` is a pair of channels
                        const Sum* v = acc[i] + (part * PX / 8 + j * 4) * 4;
                        const int pixel = j * 32 + lane;
                        const u32 to = place + pixel * 64 + ((quarter ^ (pixel >> 1 & 3)) << 4);
                        u32 words[4];
                        if (RESIDUAL) load_transposed(words, to);
#pragma unroll
                        for (int e = 0; e < 4; ++e) {
                            float real[4];
#pragma unroll
                            for (int x = 0; x < 4; ++x)  // pixel x / 2, channel x % 2
                                real[x] = fmaf((float)v[e * 4 + x % 2 * 2 + x / 2], factor[i][x % 2], bias[i][x % 2]);
                            words[e] = finish_four(p, real, words[e]);
                        }
                        store_transposed(words, to);
                    }
#endif
                    fence_async();
                    named_barrier(1 + group, 128);
                    if (leader) {
                        if (turn == 0 && chunk == 0) wait_for_previous();  // nothing may be written while the kernel in front still reads it
                        store_box2(&p.d, place, row + i * 64, at.n0 + part * PX);
                        store_commit();
                    }
                }
        }
        if (leader) store_wait_read();  // shared memory must outlive its readers
    }
    if (CLUSTER > 1) { __syncwarp(); cluster_sync(); }  // the other block may still write here
}
