// Attention of 16-bit operands on Hopper: out = softmax(scale * q @ k^T + mask) @ v. Both products by wgmma, softmax in f32 registers with exp2.
// The schedule is that of FlashAttention-3 (Shah et al. 2024): a producer warp loads q, k and v with TMA into a ring, WGS warpgroups of 64 query rows multiply.
// Persistent: a block takes units u, u + gridDim.x, ... of (batch, head, row block), and the producer loads the next unit while the current one is multiplied.
// A warpgroup processes `row_turns` row tiles of a unit one after the other; with more than one, the keys of a unit stay in the ring (STAGES >= key steps).
// SPLIT warpgroups of a block and CLUSTER blocks of a cluster share the keys of the same rows (flash decoding); their partial results are combined in
// a fixed order, so that results do not depend on timing.
// q, k, v: slabs of 64 elements per row (128 bytes, 128-byte swizzle; 32 elements for rows of at most 32); TMA fills the elements past a row's end and the rows past the end with zeros.
// Constants: D (elements of a row of q and k, rounded up to a multiple of 16), DV (of v and out, a multiple of 8), both at most 256, BN (keys per step), WGS, SPLIT, CLUSTER, STAGES (of the k and v ring), QB (buffers of a row tile's q),
// OVERLAP (1: the values of a step are multiplied while the softmax of the next one is computed), PINGPONG (two warpgroups issue products alternately),
// CAUSAL, GUARDED (rows that are 0: 1 rows of NaN, 2 rows of which every key is hidden by -infinity, whose sum is 0), CAPPED (scores become tanh(cap_scale * score) before the scale), MASK (0 none, 1 one row of keys through shared memory, 2 rows from global memory, 3 constant tiles in accumulator order), MASK_TYPE (0 f32,
// 1 f16, 2 bf16), MASK_PAIRS (2: two keys per load), BF16, STORED (8-bit type of the result, as in vector.cuh; 0: that of q), REGISTERS (of a thread at launch), TAKE (registers of a multiplying thread after setmaxnreg; 0: as launched).
#include "common.cuh"
#include "vector.cuh"
#include "wgmma"
#include "wgmma_transposed"

#include "arguments"

constexpr int GROUPS = WGS / SPLIT, PARTS = SPLIT * CLUSTER;        // row tiles of a block at a time; shares of the keys
constexpr int ROW = D <= 32 ? 64 : 128, V_ROW = DV <= 32 ? 64 : 128;   // bytes of a row of a slab, and its swizzle
constexpr int SLABS = (D + 63) / 64, Q_SLAB = 64 * ROW, Q_TILE = SLABS * Q_SLAB, K_SLAB = BN * ROW, KEYS = SLABS * K_SLAB;
constexpr int V_SLABS = (DV + 63) / 64, V_SLAB = BN * V_ROW, VALUES = V_SLABS * V_SLAB;
constexpr int PITCH = DV + 8, OWN_ROWS = GROUPS * 64 / CLUSTER;      // of partial results, in f32
static_assert(SHARED_K - SHARED_Q == GROUPS * QB * Q_TILE && SHARED_V - SHARED_K == STAGES * KEYS && SHARED_Q_FULL - SHARED_V == STAGES * VALUES &&
              SHARED_ENDS - SHARED_PARTIALS == (PARTS > 1 ? PARTS * OWN_ROWS * PITCH * 4 : 0), "shared memory");
constexpr int MASK_WORDS = MASK == 2 || MASK == 3 ? (MASK_TYPE == 0 ? BN / 2 : BN / 4) : 1;
static_assert(D % 16 == 0 && D <= 256 && DV % 8 == 0 && DV <= 256 && BN % 16 == 0 && WGS % SPLIT == 0 && (!PINGPONG || (WGS == 2 && PARTS == 1)), "tile");
#define INFINITY_F __uint_as_float(0x7f800000)
constexpr float HIDES = -3e4f;   // a mask value from here down: next to any ordinary score, exp2 of the difference is 0

// An operand with N along the rows and K across the rows; the next 64 columns of N are V_SLAB bytes further.
DEV u64 values_operand(u32 address) {
    return (u64)((address & 0x3ffff) >> 4) | ((u64)(V_SLAB >> 4) << 16) | ((u64)(V_ROW * 8 >> 4) << 32) | ((V_ROW == 128 ? 1ull : 2ull) << 62);
}
template <int N> DEV void pin(float (&v)[N]) {   // keeps reads of asynchronous results after the wait
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(v[i])::"memory");
}
template <int COUNT> DEV void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <int COUNT> DEV void release_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }
DEV void arrive_named(int id, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
DEV void cluster_arrive_release() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
DEV u32 cluster_rank() { u32 r; asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }
DEV void store_partial(u32 a, float x, float y) {
    if (CLUSTER > 1) asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(a), "f"(x), "f"(y) : "memory");
    else asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(a), "f"(x), "f"(y) : "memory");
}
constexpr int OUT_BYTES = STORED ? 1 : 2;   // of an element of the result
DEV u32 pack_results(const Args& p, float a, float b) {   // two results as they are stored, in the low bits
    return STORED ? bytes_of<STORED>(in_steps<STORED>(a, p.per_step, p.zero), in_steps<STORED>(b, p.per_step, p.zero), 0.f, 0.f) & 0xffff : pack(a, b);
}
DEV void store_eight(u8* to, u32 a, u32 b, u32 c, u32 d) {   // four pairs; as C++ the compiler makes four stores of some
    if (STORED) asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(a | b << 16), "r"(c | d << 16) : "memory");
    else asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
DEV void copy_bulk(u32 to, const void* from, u32 bytes, u32 bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes), "r"(bar) : "memory");
}
DEV float2 halves(u32 v) {   // two mask values
    if (MASK_TYPE == 2) return make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u));
    float2 r;
    asm("{ .reg .f16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }" : "=f"(r.x), "=f"(r.y) : "r"(v));
    return r;
}
DEV float guarded(float x, float total) { return (GUARDED == 1 && !(total > 0.f)) || (GUARDED == 2 && total == 0.f) ? 0.f : x; }   // `total`: the sum of the row's weights
DEV float quad_max(float x) {
#pragma unroll
    for (int i = 1; i < 4; i *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, i));
    return x;
}
DEV float quad_sum(float x) {
#pragma unroll
    for (int i = 1; i < 4; i *= 2) x += __shfl_xor_sync(~0u, x, i);
    return x;
}

struct Unit { int batch, mask_item, head, k_head, v_head, row_block, steps; };   // steps: of keys, that some row of the unit needs

DEV int steps_of(const Args& p, int last_row) {
    const int all = (p.keys + BN - 1) / BN;
    return CAUSAL ? max(1, min(all, (min(last_row, p.rows - 1) + p.diagonal) / BN + 1)) : all;
}
DEV int quotient(int n, u32 reciprocal) { return reciprocal ? __umulhi(n, reciprocal) : n; }
DEV Unit unit_of(const Args& p, int u) {
    Unit unit;
    int pair;
    if (CAUSAL) {   // the longest units first
        const int block = quotient(u, p.by_pairs);
        unit.row_block = p.row_blocks - 1 - block;
        pair = u - block * p.pairs;
    } else {
        pair = quotient(u, p.by_row_blocks);
        unit.row_block = u - pair * p.row_blocks;
    }
    unit.batch = quotient(pair, p.by_heads);
    unit.mask_item = MASK ? (int)((u32)unit.batch % (u32)p.mask_period) : 0;
    unit.head = pair - unit.batch * p.heads;
    unit.k_head = quotient(unit.head, p.by_k_group);
    unit.v_head = quotient(unit.head, p.by_v_group);
    unit.steps = steps_of(p, (unit.row_block + 1) * p.row_turns * GROUPS * 64 - 1);
    return unit;
}

extern "C" __global__ void __maxnreg__(REGISTERS) attention_fused(const __grid_constant__ Args p) {
    extern __shared__ u8 raw[];
    const u32 base = (shared_address(raw) + 1023) & ~1023u, q_at = base + SHARED_Q, k_at = base + SHARED_K, v_at = base + SHARED_V;
    const u32 q_full = base + SHARED_Q_FULL, q_empty = base + SHARED_Q_EMPTY, k_full = base + SHARED_K_FULL, k_empty = base + SHARED_K_EMPTY;
    const u32 v_full = base + SHARED_V_FULL, v_empty = base + SHARED_V_EMPTY;
    const u32 partials = base + SHARED_PARTIALS, ends = base + SHARED_ENDS, mask_at = base + SHARED_MASK;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const bool one = elect();
    const int rank = CLUSTER > 1 ? cluster_rank() : 0, first_unit = blockIdx.x / CLUSTER, unit_stride = gridDim.x / CLUSTER;
    if (threadIdx.x == WGS * 128) {
        map_prefetch(&p.q);
        map_prefetch(&p.k);
        map_prefetch(&p.v);
        for (int i = 0; i < GROUPS * QB; ++i) {
            barrier_init(q_full + 8 * i, 1);
            barrier_init(q_empty + 8 * i, SPLIT * 4);
        }
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(k_full + 8 * i, 1);
            barrier_init(v_full + 8 * i, 1);
            barrier_init(k_empty + 8 * i, GROUPS * 4);
            barrier_init(v_empty + 8 * i, GROUPS * 4);
        }
        barrier_init_fence();
    }
    __syncthreads();
    if (CLUSTER > 1) { __syncwarp(); cluster_arrive(); cluster_wait(); }   // every block of the cluster runs before partial results are sent to it
    let_next_start();

    if (warp >= WGS * 4) {  // ---- producer
        if (TAKE) release_registers<24>();
        if (warp > WGS * 4) return;
        Unit unit = unit_of(p, first_unit);
        wait_for_previous();
        if (one) {
            int ring = 0, q_count[GROUPS] = {};
            for (int u = first_unit; u < p.units; u += unit_stride) {
                const auto load_q = [&](int turn) {
#pragma unroll
                    for (int g = 0; g < GROUPS; ++g) {
                        const int row0 = ((unit.row_block * p.row_turns + turn) * GROUPS + g) * 64;
                        if (row0 >= p.rows && !PINGPONG) continue;
                        const int buffer = g * QB + q_count[g] % QB;
                        if (q_count[g] >= QB) barrier_wait(q_empty + 8 * buffer, (q_count[g] / QB - 1) & 1);
                        ++q_count[g];
                        barrier_expect(q_full + 8 * buffer, Q_TILE + (MASK == 1 ? p.mask_bytes : 0));
#pragma unroll
                        for (int s = 0; s < SLABS; ++s) load_box4(q_at + buffer * Q_TILE + s * Q_SLAB, &p.q, q_full + 8 * buffer, s * 64, row0, unit.head, unit.batch);
                        if (MASK == 1)
                            copy_bulk(mask_at + buffer * p.mask_bytes, p.mask + (unit.mask_item * p.mask_batch + unit.head * p.mask_head) * (MASK_TYPE ? 2 : 4),
                                      p.mask_bytes, q_full + 8 * buffer);
                    }
                };
                const auto load_keys = [&](u32 to, u32 slab, int slabs, const TensorMap* map, u32 full, u32 empty, int index, int step, int head, int batch) {
                    const int slot = index % STAGES;
                    if (index >= STAGES) barrier_wait(empty + 8 * slot, (index / STAGES - 1) & 1);
                    barrier_expect(full + 8 * slot, slabs * slab);
#pragma unroll
                    for (int s = 0; s < slabs; ++s) load_box4(to + slot * slabs * slab + s * slab, map, full + 8 * slot, s * 64, step * BN, head, batch);
                };
                load_q(0);
#pragma unroll 1
                for (int i = 0; i < unit.steps; i += PARTS)
#pragma unroll
                    for (int s = 0; s < SPLIT; ++s) {
                        const int step = i + rank * SPLIT + s, index = ring + i / PARTS * SPLIT + s;
                        if (step >= unit.steps) break;
                        load_keys(k_at, K_SLAB, SLABS, &p.k, k_full, k_empty, index, step, unit.k_head, unit.batch * p.k_batch);
                        load_keys(v_at, V_SLAB, V_SLABS, &p.v, v_full, v_empty, index, step, unit.v_head, unit.batch * p.v_batch);
                    }
#pragma unroll 1
                for (int turn = 1; turn < p.row_turns; ++turn) load_q(turn);
                ring += unit.steps;
                if (u + unit_stride < p.units) unit = unit_of(p, u + unit_stride);
            }
        }
        return;
    }
    // ---- products and softmax
    if (TAKE) take_registers<TAKE ? TAKE : 24>();
    const int wg = warp / 4, group = wg / SPLIT, part = wg % SPLIT, share = rank * SPLIT + part;
    const float factor = p.scale;
    float s[BN / 2], out[DV / 2] = {}, top[2], sum[2], by[2];
    bool rescales = false;
    u32 weights[BN / 16][4], mask_words[MASK_WORDS];
    int ring = 0, q_count = 0;
    if (PINGPONG && wg == 1) arrive_named(1, 256);
    if (MASK == 2) wait_for_previous();
    Unit unit = unit_of(p, first_unit);
    for (int u = first_unit; u < p.units; u += unit_stride) {
        for (int turn = 0; turn < p.row_turns; ++turn) {
            const bool last_turn = turn + 1 == p.row_turns;
            const int tile = (unit.row_block * p.row_turns + turn) * GROUPS + group, row0 = tile * 64, row = row0 + warp % 4 * 16 + lane / 4;
            const bool present = row0 < p.rows || PINGPONG;
            const int buffer = group * QB + q_count % QB;
            int steps = !present ? 0 : PINGPONG ? unit.steps : min(unit.steps, steps_of(p, row0 + 63));
            if (MASK == 1 && !PINGPONG && steps > PARTS) {   // padding: steps after the last visible key are left out, unless no key is visible
                barrier_wait(q_full + 8 * buffer, q_count / QB & 1);
                int visible = -1;
                for (int key = lane * 2; key < p.keys; key += 64) {
                    const u32 at = mask_at + buffer * p.mask_bytes + key * (MASK_TYPE ? 2 : 4);
                    const float2 m = MASK_TYPE ? halves(load_shared(at)) : load_shared_f2(at);
                    if (!(m.x <= HIDES)) visible = key;
                    if (!(m.y <= HIDES)) visible = key + 1;
                }
                visible = __reduce_max_sync(~0u, visible);
                if (visible >= 0) steps = min(steps, visible / BN + 1);
            }
            const int count = (steps - share + PARTS - 1) / PARTS;   // steps of this warpgroup
            const u32 q = q_at + buffer * Q_TILE;
            const bool warp_has_rows = row0 + warp % 4 * 16 < p.rows;
            const auto release = [&](u32 empty, int i) { if (lane == 0) barrier_arrive(empty + 8 * ((ring + i * SPLIT + part) % STAGES)); };
            const auto scores = [&](int i) {
                const int index = ring + i * SPLIT + part, slot = index % STAGES;
                const u32 k = k_at + slot * KEYS;
                barrier_wait(k_full + 8 * slot, index / STAGES & 1);
                mma_begin();
#pragma unroll
                for (int c = 0; c < D / 16; ++c) wgmma(s, operand<ROW>(q + c / 4 * Q_SLAB + c % 4 * 32), operand<ROW>(k + c / 4 * K_SLAB + c % 4 * 32), c > 0);
                mma_commit();
            };
            const auto values = [&](int i) {
                const int index = ring + i * SPLIT + part, slot = index % STAGES;
                const u32 v = v_at + slot * VALUES;
                barrier_wait(v_full + 8 * slot, index / STAGES & 1);
                mma_begin();
#pragma unroll
                for (int c = 0; c < BN / 16; ++c) wgmma_transposed(out, weights[c], values_operand(v + c * 16 * V_ROW), c > 0 || i > 0);
                mma_commit();
            };
            const auto load_mask = [&](int i) {
                const int step = i * PARTS + share;
                if (MASK == 3) {
                    const long long at = (unit.mask_item * p.mask_batch + unit.head * p.mask_head + min(tile, (p.rows - 1) / 64) * p.mask_row + step) * (64 * BN);
                    const uint4* from = reinterpret_cast<const uint4*>(p.mask + (at + warp % 4 * 16 * BN) * (MASK_TYPE ? 2 : 4)) + lane;
#pragma unroll
                    for (int c = 0; c < MASK_WORDS / 4; ++c) {
                        const uint4 v = __ldg(from + c * 32);
                        mask_words[4 * c] = v.x; mask_words[4 * c + 1] = v.y; mask_words[4 * c + 2] = v.z; mask_words[4 * c + 3] = v.w;
                    }
                }
                if (MASK == 2) {
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const u8* line = p.mask + (unit.mask_item * p.mask_batch + unit.head * p.mask_head + min(row + half * 8, p.rows - 1) * p.mask_row) * (MASK_TYPE ? 2 : 4);
#pragma unroll
                        for (int c = 0; c < BN / 8; ++c) {
                            const int key = step * BN + c * 8 + lane % 4 * 2;
                            const long long x = min(key, p.keys - MASK_PAIRS) * p.mask_key, y = min(key + 1, p.keys - 1) * p.mask_key;
                            if (MASK_TYPE == 0) {
                                if (MASK_PAIRS == 2) {
                                    const uint2 v = *reinterpret_cast<const uint2*>(line + x * 4);
                                    mask_words[(4 * c + 2 * half) % MASK_WORDS] = v.x;
                                    mask_words[(4 * c + 2 * half + 1) % MASK_WORDS] = v.y;
                                } else {
                                    mask_words[(4 * c + 2 * half) % MASK_WORDS] = *reinterpret_cast<const u32*>(line + x * 4);
                                    mask_words[(4 * c + 2 * half + 1) % MASK_WORDS] = *reinterpret_cast<const u32*>(line + y * 4);
                                }
                            } else {
                                mask_words[2 * c + half] = MASK_PAIRS == 2 ? *reinterpret_cast<const u32*>(line + x * 2)
                                    : *reinterpret_cast<const u16*>(line + x * 2) | (u32)*reinterpret_cast<const u16*>(line + y * 2) << 16;
                            }
                        }
                    }
                }
            };
            const auto softmax = [&](int i) {  // scores become exp2 relative to the running maximum; `by` rescales the accumulators
                rescales = false;
                if (CAPPED)
#pragma unroll
                    for (int e = 0; e < BN / 2; ++e) s[e] = tanh_fast(s[e] * p.cap_scale);
                const int key0 = (i * PARTS + share) * BN + lane % 4 * 2;
                const auto hide = [&](float& score, float m) {
                    if (MASK_TYPE == 1) score = fmaf(m, p.mask_scale, score);
                    else {   // rows of lowest values alone are means, rows of -infinity NaN; times `factor`, a power of two is exact
                        const float y = m * p.mask_scale;
                        score += y < -67108864.f && m != -INFINITY_F ? -0x1p120f : y;
                    }
                };
                const auto key_mask = [&](int c) { return mask_at + buffer * p.mask_bytes + min(key0 + c * 8, p.keys - 2) * (MASK_TYPE ? 2 : 4); };
                u32 seen = MASK > 1;
                if (MASK == 1)
#pragma unroll
                    for (int c = 0; c < BN / 8; ++c) seen |= MASK_TYPE ? load_shared(key_mask(c)) : load_shared(key_mask(c)) | load_shared(key_mask(c) + 4);
                if (MASK && __any_sync(~0u, seen)) {   // most steps hide no key
#pragma unroll
                    for (int c = 0; c < BN / 8; ++c)
#pragma unroll
                        for (int half = 0; half < 2; ++half) {
                            const int x = (2 * c + half) * (MASK_TYPE ? 1 : 2) % MASK_WORDS;
                            const float2 m = MASK == 1 ? MASK_TYPE ? halves(load_shared(key_mask(c))) : load_shared_f2(key_mask(c))
                                : MASK_TYPE ? halves(mask_words[x]) : make_float2(__uint_as_float(mask_words[x]), __uint_as_float(mask_words[(x + 1) % MASK_WORDS]));
                            hide(s[4 * c + 2 * half], m.x);
                            hide(s[4 * c + 2 * half + 1], m.y);
                        }
                }
                const int step0 = (i * PARTS + share) * BN, diagonal = CAUSAL ? row0 + warp % 4 * 16 + p.diagonal : p.keys;
                if ((MASK != 3 && step0 + BN > p.keys) || (CAUSAL && step0 + BN - 1 > diagonal)) {   // MASK 3 hides the keys past the end itself
#pragma unroll
                    for (int e = 0; e < BN / 2; ++e) {
                        const int key = key0 + e / 4 * 8 + e % 2;
                        if (key >= p.keys || (CAUSAL && key > row + e / 2 % 2 * 8 + p.diagonal)) s[e] = -INFINITY_F;
                    }
                }
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    float high = top[half];
#pragma unroll
                    for (int e = 0; e < BN / 2; e += 4) high = fmaxf(high, fmaxf(s[e + half * 2], s[e + half * 2 + 1]));
                    high = quad_max(high);
                    // The reference value follows the maximum in steps of at least 2^8, so that most steps leave `out` as it is: weights stay below 2^8.
                    const bool grows = (high - top[half]) * factor > 8.f;
                    by[half] = grows ? exp2_fast((top[half] - high) * factor) : 1.f;
                    if (grows) { top[half] = high; rescales = true; }
                    const float from = (MASK || PARTS > 1) && top[half] == -INFINITY_F ? 0.f : top[half] * factor;   // every key so far is hidden
                    float total = 0.f;
#pragma unroll
                    for (int e = 0; e < BN / 2; e += 4)
#pragma unroll
                        for (int x = 0; x < 2; ++x) {
                            s[e + half * 2 + x] = exp2_fast(fmaf(s[e + half * 2 + x], factor, -from));
                            total += s[e + half * 2 + x];
                        }
                    sum[half] = fmaf(sum[half], by[half], total);
                }
            };
            const auto round_weights = [&] {  // the A operand of the second product
#pragma unroll
                for (int c = 0; c < BN / 16; ++c)
#pragma unroll
                    for (int e = 0; e < 4; ++e) weights[c][e] = pack(s[c * 8 + e * 2], s[c * 8 + e * 2 + 1]);
            };
            const auto rescale = [&] {
                if (__any_sync(~0u, rescales))
#pragma unroll
                    for (int e = 0; e < DV / 2; ++e) out[e] *= by[e / 2 % 2];
            };
#pragma unroll
            for (int half = 0; half < 2; ++half) { top[half] = -INFINITY_F; sum[half] = 0.f; by[half] = 1.f; }
            if (count > 0) {
                load_mask(0);
                barrier_wait(q_full + 8 * buffer, q_count / QB & 1);
                if (OVERLAP) {
                    scores(0);
                    mma_wait<0>();
                    pin(s);
                    if (last_turn) release(k_empty, 0);
                    if (warp_has_rows) softmax(0);
                    round_weights();
#pragma unroll 1
                    for (int i = 1; i < count; ++i) {
                        if (PINGPONG) named_barrier(1 + wg, 256);
                        scores(i);
                        values(i - 1);
                        if (PINGPONG) arrive_named(2 - wg, 256);
                        load_mask(i);
                        mma_wait<1>();
                        pin(s);
                        if (last_turn) release(k_empty, i);
                        if (warp_has_rows) softmax(i);
                        mma_wait<0>();
                        pin(out);
                        if (last_turn) release(v_empty, i - 1);
                        rescale();
                        round_weights();
                    }
                    if (MASK != 1 && lane == 0) barrier_arrive(q_empty + 8 * buffer);
                    values(count - 1);
                    mma_wait<0>();
                    pin(out);
                    if (last_turn) release(v_empty, count - 1);
                } else {
#pragma unroll 1
                    for (int i = 0; i < count; ++i) {
                        scores(i);
                        if (i > 0) load_mask(i);
                        mma_wait<0>();
                        pin(s);
                        if (last_turn) release(k_empty, i);
                        if (warp_has_rows) softmax(i);
                        if (i > 0) rescale();
                        round_weights();
                        values(i);
                        mma_wait<0>();
                        pin(out);
                        if (last_turn) release(v_empty, i);
                    }
                    if (MASK != 1 && lane == 0) barrier_arrive(q_empty + 8 * buffer);
                }
                if (MASK == 1 && lane == 0) barrier_arrive(q_empty + 8 * buffer);
            } else if (present && lane == 0) barrier_arrive(q_empty + 8 * buffer);
            if (present) ++q_count;
            if (last_turn)
#pragma unroll 1
                for (int i = count; i * PARTS + share < unit.steps; ++i) {   // loaded for other warpgroups; a slot is released once in each of its phases
                    const int index = ring + i * SPLIT + part, slot = index % STAGES;
                    barrier_wait(k_full + 8 * slot, index / STAGES & 1);
                    release(k_empty, i);
                    barrier_wait(v_full + 8 * slot, index / STAGES & 1);
                    release(v_empty, i);
                }
#pragma unroll
            for (int half = 0; half < 2; ++half) sum[half] = quad_sum(sum[half]);
            if (PARTS == 1) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int line = row + half * 8;
                    const float over = 1.f / sum[half];
                    u8* const to = p.out + (unit.batch * p.out_batch + unit.head * p.out_head + line * p.out_row) * OUT_BYTES;
#pragma unroll
                    for (int c = 0; c < DV / 8; c += 4) {
                        u32 y[4];
#pragma unroll
                        for (int e = 0; e < 4; ++e) {
                            const int at = (c + e < DV / 8 ? c + e : 0) * 4 + half * 2;
                            y[e] = pack_results(p, guarded(out[at] * over, sum[half]), guarded(out[at + 1] * over, sum[half]));
                        }
                        if (c + 4 <= DV / 8) {
                            transpose_quad(y, lane);  // each lane of a quad gets eight elements
                            if (line < p.rows) store_eight(to + (c + lane % 4) * 8 * OUT_BYTES, y[0], y[1], y[2], y[3]);
                        } else if (line < p.rows)
#pragma unroll
                            for (int e = 0; e < 4; ++e)
                                if (c + e < DV / 8) {
                                    u8* const pair = to + ((c + e) * 8 + lane % 4 * 2) * OUT_BYTES;
                                    if (STORED) *reinterpret_cast<u16*>(pair) = (u16)y[e];
                                    else *reinterpret_cast<u32*>(pair) = y[e];
                                }
                    }
                }
            } else {   // one unit per block, one row turn
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int line = group * 64 + warp % 4 * 16 + lane / 4 + half * 8, mine = line % OWN_ROWS;
                    u32 to = partials + (share * OWN_ROWS + mine) * PITCH * 4 + lane % 4 * 8, end = ends + (share * OWN_ROWS + mine) * 8;
                    if (CLUSTER > 1) { to = remote_address(to, line / OWN_ROWS); end = remote_address(end, line / OWN_ROWS); }
#pragma unroll
                    for (int c = 0; c < DV / 8; ++c) store_partial(to + c * 32, out[c * 4 + half * 2], out[c * 4 + half * 2 + 1]);
                    if (lane % 4 == 0) store_partial(end, top[half] * factor, sum[half]);
                }
                if (CLUSTER > 1) { __syncwarp(); cluster_arrive_release(); cluster_wait(); } else named_barrier(3, WGS * 128);
                for (int i = threadIdx.x; i < OWN_ROWS * (DV / 8); i += WGS * 128) {   // eight elements of a row
                    const int mine = i / (DV / 8), column = i % (DV / 8) * 8, line = unit.row_block * GROUPS * 64 + rank * OWN_ROWS + mine;
                    if (line >= p.rows) continue;
                    float high = -INFINITY_F, total = 0.f, y[8] = {};
                    float2 end[PARTS];
#pragma unroll
                    for (int w = 0; w < PARTS; ++w) {
                        end[w] = load_shared_f2(ends + (w * OWN_ROWS + mine) * 8);
                        high = fmaxf(high, end[w].x);
                    }
                    high = high == -INFINITY_F ? 0.f : high;
#pragma unroll
                    for (int w = 0; w < PARTS; ++w) {
                        const float weight = exp2_fast(end[w].x - high);
                        const u32 at = partials + ((w * OWN_ROWS + mine) * PITCH + column) * 4;
                        const float4 a = load_shared_f4(at), b = load_shared_f4(at + 16);
                        total = fmaf(weight, end[w].y, total);
                        y[0] = fmaf(weight, a.x, y[0]); y[1] = fmaf(weight, a.y, y[1]); y[2] = fmaf(weight, a.z, y[2]); y[3] = fmaf(weight, a.w, y[3]);
                        y[4] = fmaf(weight, b.x, y[4]); y[5] = fmaf(weight, b.y, y[5]); y[6] = fmaf(weight, b.z, y[6]); y[7] = fmaf(weight, b.w, y[7]);
                    }
                    const float over = 1.f / total;
                    u8* const to = p.out + (unit.batch * p.out_batch + unit.head * p.out_head + line * p.out_row + column) * OUT_BYTES;
#pragma unroll
                    for (int e = 0; e < 8; ++e) y[e] = guarded(y[e] * over, total);
                    store_eight(to, pack_results(p, y[0], y[1]), pack_results(p, y[2], y[3]), pack_results(p, y[4], y[5]), pack_results(p, y[6], y[7]));
                }
            }
        }
        ring += unit.steps;
        if (u + unit_stride < p.units) unit = unit_of(p, u + unit_stride);
    }
}
