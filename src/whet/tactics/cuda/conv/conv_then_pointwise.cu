// A convolution of several taps (stride 1) and the following 1x1 convolution in one launch, for few pixels. A cluster of CL blocks processes BN pixels:
// each block accumulates 64 output channels of the first convolution over 1/SK of its input channels; partial sums are sent to the block that owns
// their pixels (st.async, counted by a barrier there). It applies the epilogue and sends the results to all blocks of the cluster, so each block's shared
// memory holds the whole operand of the second product; each block computes 64 * MI of its output channels. Intermediate values stay on chip.
// Weights are operand A, pixels operand B: blocks exchange half of the bytes that tiles of 64 pixels need, and this exchange takes most of the time.
// Pixels are laid out as in conv.cu's HALO: a tile is `rows` rows of one image, each `wide` = width + TAPS_W - 1 long, a tap is the same matrix shifted.
// Weights of both stream through one ring of STAGES slots; as many loads as fit are issued before waiting for the previous kernel.
// Constants: BN (pixels), BK (channels a step of the first), SK, GROUPS (inner channels / 64), CHUNKS (K steps of a tap in a block), MI, TAPS_H, TAPS_W,
// STAGES, ACT and ACT2, BF16, IN8 (0, or 3 i8, 4 u8: type of the input and the intermediate values; weights are i8 then). With IN8 accumulators are scaled to [0, 1], the
// range of the stored integers, by a factor and a bias per channel (FOLD of conv.cu, for both products); ADD: type of the residual.
#include "common.cuh"
#include "vector.cuh"
#include "wgmma"

constexpr int SIZE = IN8 ? 1 : 2;                                           // bytes of an element
constexpr int CL = SK * GROUPS, ROW = BK * SIZE, TAPS = TAPS_H * TAPS_W, INNER = 64 * GROUPS, BN2 = 64 * MI;
constexpr int WIDE = INNER * SIZE % 128 ? 64 : 128, PANELS = INNER * SIZE / WIDE;  // the value between the products, in panels of so many bytes a pixel
constexpr int STEPS = CHUNKS * TAPS, ALL = STEPS + PANELS * MI;
constexpr int SLOT = 64 * 128, PANEL = BN * WIDE;                           // of weights; of a panel
constexpr int OWN = BN / SK, LINE = OWN * 2 + 4, PARTS = SK * 32 * LINE * 4;  // pixels that a block finishes; floats of two channels in a partial sum
constexpr int WORKERS = 128, THREADS = WORKERS + 32, ITEMS = (OWN * 8 + 127) / 128, PITCH = BN2 + 4, ENDS = BN * BN2 / 8 / 128;
#if IN8
typedef int Accumulator;
typedef uint2 Held;  // eight channels
#else
typedef float Accumulator;
typedef uint4 Held;
#endif
static_assert(CL > 1 && OWN % 8 == 0 && BN % 16 == 0 && 128 % (BN2 / 8) == 0 && BN * PITCH * 4 <= STAGES * SLOT && !(IN8 && CL % 2), "tile");

#include "arguments"

DEV void store_remote16(u32 a, uint4 v, u32 bar) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];"
                 ::"r"(a), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(bar) : "memory");
}
DEV u32 word(float v) { return __float_as_uint(v); }
DEV u32 word(int v) { return v; }
DEV float sum_of(u32 v, float) { return __uint_as_float(v); }
DEV int sum_of(u32 v, int) { return v; }
DEV void keep_four(u32 a, Accumulator x, Accumulator y, Accumulator z, Accumulator w) { store_shared_f4(a, __uint_as_float(word(x)), __uint_as_float(word(y)), __uint_as_float(word(z)), __uint_as_float(word(w))); }
#if IN8
// Eight channels from fractions of their range to integers.
template <int KIND> DEV uint2 integers(float (&v)[8], Act act, float per_step, float zero) {
    const float late[8] = {act.b, act.b, act.b, act.b, act.b, act.b, act.b, act.b};
    fold<KIND>(v, act, late);
    return make_uint2(steps_of(v[0], v[1], v[2], v[3], per_step, zero), steps_of(v[4], v[5], v[6], v[7], per_step, zero));
}
#endif
DEV void load_eight(float4 (&to)[2], const float* from) {
    to[0] = *reinterpret_cast<const float4*>(from);
    to[1] = *reinterpret_cast<const float4*>(from + 4);
}
DEV float finish(const Args& p, float v, float r) {
    const float x = activate<ACT2>(p.has_residual == 1 ? v + r : v, p.act2);
    return p.has_residual == 2 ? x + r : x;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) conv_then_pointwise(const __grid_constant__ Args p) {
    extern __shared__ u8 raw[];
    const u32 base = (shared_address(raw) + 1023) & ~1023u;
    const u32 ring = base, mid = ring + STAGES * SLOT, input = mid + PANELS * PANEL, parts_s = input + CHUNKS * p.slot_bytes;
    const u32 full = parts_s + PARTS, empty = full + STAGES * 8, a_full = empty + STAGES * 8, parts = a_full + CHUNKS * 8, whole = parts + 8;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const bool one = elect();
    const int rank = blockIdx.x % CL, tile = blockIdx.x / CL, slice = rank / GROUPS, group = rank % GROUPS, n2 = rank * BN2;
    const int per = (p.height + p.rows - 1) / p.rows, image = tile / per, top = (tile - image * per) * p.rows;

    if (threadIdx.x == WORKERS) {
        map_prefetch(&p.a);
        map_prefetch(&p.b);
        map_prefetch(&p.b2);
        for (int i = 0; i < STAGES; ++i) { barrier_init(full + 8 * i, 1); barrier_init(empty + 8 * i, 1); }
        for (int i = 0; i < CHUNKS; ++i) barrier_init(a_full + 8 * i, 1);
        barrier_init(parts, 1);
        barrier_init(whole, 1);
        if (SK > 1) barrier_expect(parts, (SK - 1) * OWN * 64 * 4);  // a block's own part stays in it
        barrier_expect(whole, BN * INNER * SIZE);
        barrier_init_fence();
    }
    __syncthreads();
    cluster_arrive();
    let_next_start();

    if (warp == 4) {  // ---- input and weights
        auto ask = [&](int k) {
            const u32 slot = ring + k % STAGES * SLOT, bar = full + k % STAGES * 8;
            if (k < STEPS) {
                barrier_expect(bar, 64 * ROW);
                load_box2(slot, &p.b, bar, (k % TAPS * p.csteps + slice * CHUNKS + k / TAPS) * BK, group * 64);
            } else {
                barrier_expect(bar, 64 * WIDE);
                load_box2(slot, &p.b2, bar, (k - STEPS) / MI * (WIDE / SIZE), n2 + (k - STEPS) % MI * 64);
            }
        };
        if (one)
            for (int k = 0; k < (ALL < STAGES ? ALL : STAGES); ++k) ask(k);
        wait_for_previous();
        if (one)
            for (int c = 0; c < CHUNKS; ++c) {
                barrier_expect(a_full + 8 * c, p.box_bytes);
                load_box4(input + c * p.slot_bytes, &p.a, a_full + 8 * c, (slice * CHUNKS + c) * BK, -p.pad_w, top - p.pad_h, image);
            }
        for (int k = STAGES; k < ALL; ++k) {
            barrier_wait(empty + k % STAGES * 8, (k / STAGES - 1) & 1);
            if (one) ask(k);
        }
        __syncwarp();
        cluster_wait();
        return;
    }
    // ---- multiply, finish, store
    const int t = threadIdx.x, eight = t % (BN2 / 8) * 8;
    // An item: eight channels of a pixel. Of 8 bits two lanes have sixteen together, which they send to one half of the blocks each.
    auto pixel_of = [](int item) { return IN8 ? item / 2 % OWN : item % OWN; };
    auto eight_of = [](int item) { return IN8 ? item / 2 / OWN * 2 + item % 2 : item / OWN; };
    float4 bias[ITEMS][2], bias2[2];
    [[maybe_unused]] float4 factor[ITEMS][2], factor2[2];
    int pixel[ENDS];
    Held residual[ENDS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const int from = group * 64 + eight_of(t + i * 128) % 8 * 8;
        load_eight(bias[i], p.bias + from);
#if IN8
        load_eight(factor[i], p.factor + from);
#endif
    }
    load_eight(bias2, p.bias2 + n2 + eight);
#if IN8
    load_eight(factor2, p.factor2 + n2 + eight);
#endif
#pragma unroll
    for (int i = 0; i < ENDS; ++i) {
        const int m = (t + i * 128) / (BN2 / 8), y = m / p.wide, x = m - y * p.wide, row = top + y;
        pixel[i] = y < p.rows && row < p.height && x < p.width ? (image * p.height + row) * p.width + x : -1;
    }
    wait_for_previous();
#pragma unroll
    for (int i = 0; i < ENDS; ++i) {
        residual[i] = Held();
        if (p.has_residual && pixel[i] >= 0)
            residual[i] = *reinterpret_cast<const Held*>(p.residual + ((long long)pixel[i] * p.res_pitch + n2 + eight) * SIZE);
    }

    Accumulator acc[BN / 2];
#pragma unroll
    for (int k = 0; k < STEPS; ++k) {
        const int tap = k % TAPS, chunk = k / TAPS;
        if (tap == 0) barrier_wait(a_full + 8 * chunk, 0);
        barrier_wait(full + k % STAGES * 8, k / STAGES & 1);
        const u64 a = operand<ROW>(ring + k % STAGES * SLOT), b = operand<ROW>(input + chunk * p.slot_bytes + (tap / TAPS_W * p.wide + tap % TAPS_W) * ROW);
        mma_begin();
#pragma unroll
        for (int i = 0; i < ROW / 32; ++i) wgmma(acc, a + i * 2, b + i * 2, k > 0 || i > 0);
        mma_commit();
        if (k > 0 && k - 1 + STAGES < ALL) {  // the slot of the step before is wanted again
            mma_wait<1>();
            if (t == 0) barrier_arrive(empty + (k - 1) % STAGES * 8);
        }
    }
    mma_wait<0>();
    if (STEPS - 1 + STAGES < ALL && t == 0) barrier_arrive(empty + (STEPS - 1) % STAGES * 8);

    cluster_wait();  // all blocks of the cluster run: their shared memory may be written
#pragma unroll
    for (int j = 0; j < BN / 8; ++j) {  // channels c and c + 8 of two pixels together
        const int owner = j * 8 / OWN;
        const u32 at = parts_s + ((slice * 32 + warp * 8 + lane / 4) * LINE + (j * 8 % OWN + lane % 4 * 2) * 2) * 4;
        if (owner == slice) keep_four(at, acc[j * 4], acc[j * 4 + 1], acc[j * 4 + 2], acc[j * 4 + 3]);
        else {
            const u32 to_rank = owner * GROUPS + group;
            const uint4 four = make_uint4(word(acc[j * 4]), word(acc[j * 4 + 1]), word(acc[j * 4 + 2]), word(acc[j * 4 + 3]));
            store_remote16(remote_address(at, to_rank), four, remote_address(parts, to_rank));
        }
    }
    named_barrier(8, WORKERS);
    if (SK > 1) barrier_wait(parts, 0);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const int item = t + i * 128, x = pixel_of(item), c8 = eight_of(item);
        if (c8 >= 8) continue;  // whole warps
        const float add[8] = {bias[i][0].x, bias[i][0].y, bias[i][0].z, bias[i][0].w, bias[i][1].x, bias[i][1].y, bias[i][1].z, bias[i][1].w};
        Accumulator s[8] = {};
#if !IN8
#pragma unroll
        for (int e = 0; e < 8; ++e) s[e] = add[e];
#endif
#pragma unroll
        for (int q = 0; q < SK; ++q)
#pragma unroll
            for (int e = 0; e < 8; ++e)
                s[e] += sum_of(load_shared(parts_s + ((q * 32 + c8 / 2 * 8 + e) * LINE + x / 2 * 4 + c8 % 2 * 2 + x % 2) * 4), Accumulator());
#if IN8
        const float by[8] = {factor[i][0].x, factor[i][0].y, factor[i][0].z, factor[i][0].w, factor[i][1].x, factor[i][1].y, factor[i][1].z, factor[i][1].w};
        float v[8];
#pragma unroll
        for (int e = 0; e < 8; ++e) v[e] = fmaf((float)s[e], by[e], add[e]);
        const uint2 own = integers<ACT>(v, p.act, p.per_step, p.zero);
        const uint2 beside = make_uint2(__shfl_xor_sync(~0u, own.x, 1), __shfl_xor_sync(~0u, own.y, 1));
        const uint4 w = c8 % 2 ? make_uint4(beside.x, beside.y, own.x, own.y) : make_uint4(own.x, own.y, beside.x, beside.y);
#else
        u32 h[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) h[e] = pack(activate<ACT>(s[2 * e], p.act), activate<ACT>(s[2 * e + 1], p.act));
        const uint4 w = make_uint4(h[0], h[1], h[2], h[3]);
#endif
        const u32 m = slice * OWN + x, byte = (group * 64 + c8 * 8) * SIZE, mix = WIDE == 128 ? m & 7 : m >> 1 & 3;
        const u32 at = mid + byte / WIDE * PANEL + m * WIDE + ((byte % WIDE / 16 ^ mix) << 4);
#pragma unroll
        for (int q = 0; q < CL / (IN8 ? 2 : 1); ++q) {
            const int other = ((IN8 ? q * 2 + c8 % 2 : q) + rank) % CL;  // not all to the same block at once
            store_remote16(remote_address(at, other), w, remote_address(whole, other));
        }
    }
    barrier_wait(whole, 0);
    fence_async();  // the operand came by ordinary stores

    Accumulator sum[MI][BN / 2];
#pragma unroll
    for (int k = 0; k < PANELS * MI; ++k) {
        const int step = STEPS + k;
        barrier_wait(full + step % STAGES * 8, step / STAGES & 1);
        const u64 a = operand<WIDE>(ring + step % STAGES * SLOT), b = operand<WIDE>(mid + k / MI * PANEL);
        mma_begin();
#pragma unroll
        for (int i = 0; i < WIDE / 32; ++i) wgmma(sum[k % MI], a + i * 2, b + i * 2, k >= MI || i > 0);
        mma_commit();
        if (k > 0 && step - 1 + STAGES < ALL) {
            mma_wait<1>();
            if (t == 0) barrier_arrive(empty + (step - 1) % STAGES * 8);
        }
    }
    mma_wait<0>();
    named_barrier(8, WORKERS);  // the weights are no longer read: accumulators are transposed in their memory
#pragma unroll
    for (int i = 0; i < MI; ++i)
#pragma unroll
        for (int j = 0; j < BN / 2; ++j)
            store_shared(ring + ((j / 4 * 8 + lane % 4 * 2 + j % 2) * PITCH + i * 64 + warp * 16 + lane / 4 + j % 4 / 2 * 8) * 4, word(sum[i][j]));
    named_barrier(8, WORKERS);
#pragma unroll
    for (int i = 0; i < ENDS; ++i) {
        if (pixel[i] < 0) continue;
        const u32 from = ring + ((t + i * 128) / (BN2 / 8) * PITCH + eight) * 4;
        const float4 u = load_shared_f4(from), v = load_shared_f4(from + 16);
        u8* to = p.out + ((long long)pixel[i] * p.out_pitch + n2 + eight) * SIZE;
#if IN8
        const float s[8] = {u.x, u.y, u.z, u.w, v.x, v.y, v.z, v.w}, add[8] = {bias2[0].x, bias2[0].y, bias2[0].z, bias2[0].w, bias2[1].x, bias2[1].y, bias2[1].z, bias2[1].w};
        const float by[8] = {factor2[0].x, factor2[0].y, factor2[0].z, factor2[0].w, factor2[1].x, factor2[1].y, factor2[1].z, factor2[1].w};
        float y[8];
#pragma unroll
        for (int e = 0; e < 8; ++e) y[e] = fmaf((float)__float_as_int(s[e]), by[e], add[e]);
        if (p.has_residual) {
            const Vec8 r = words_as_floats<ADD>(residual[i]);
#pragma unroll
            for (int e = 0; e < 8; ++e) y[e] = fmaf(r.v[e], p.add_step, y[e]);
        }
        *reinterpret_cast<uint2*>(to) = integers<ACT2>(y, p.act2, p.per_step2, p.zero2);
#else
        const float2 r0 = unpack(residual[i].x), r1 = unpack(residual[i].y), r2 = unpack(residual[i].z), r3 = unpack(residual[i].w);
        *reinterpret_cast<uint4*>(to) = make_uint4(
            pack(finish(p, u.x + bias2[0].x, r0.x), finish(p, u.y + bias2[0].y, r0.y)), pack(finish(p, u.z + bias2[0].z, r1.x), finish(p, u.w + bias2[0].w, r1.y)),
            pack(finish(p, v.x + bias2[1].x, r2.x), finish(p, v.y + bias2[1].y, r2.y)), pack(finish(p, v.z + bias2[1].z, r3.x), finish(p, v.w + bias2[1].w, r3.y)));
#endif
    }
}
