// Recurrent layers on a cluster of thread blocks that keeps the recurrent weights of a direction on chip for all steps.
//
// `project` multiplies the inputs of all steps by W and adds the biases. `recur` runs the steps: a cluster takes a direction and SAMPLES sequences, each
// block some of the hidden units with all their gates, so that gates and cells stay in registers. Four units are a tile: its four gates (slots) are the 16
// rows of an operand of mma.sync. Weights are in registers, the rest of them in shared memory. The other operand is h: two adjacent columns are a
// sequence, h rounded to 16 bits and the remainder, so the product is nearly that of h in f32. After each step a warp sends its h to every block of the
// cluster with st.async, which counts its bytes at a barrier there; no other barrier is needed in the loop:
//   - h of step s + 1 goes into the other of two buffers. A block writes it after it has read h of step s, and h of step s + 2, which overwrites that buffer, is
//     only computed from all of h of step s + 1.
//   - The last step sends nothing, and each warp waits for all that is sent to its block: no block exits while others write to it.
//
// Constants: DIRECTIONS, STEPS, SEQUENCES, INPUTS, UNITS: sizes; TYPE of values and weights (0 f32, 1 f16, 2 bf16); MODEL: 0 RNN, 1 GRU, 2 LSTM; BATCH_FIRST;
// BACKWARDS: the first direction is the reverse one; LINEAR_BEFORE_RESET; those of cell.cuh; CLUSTER: blocks; WARPS of a block; TILES of a warp;
// COLUMNS: groups of four sequences of a cluster; IN_REGISTERS: steps of 16 units whose weights are in registers; BF16.
// Of `project`: ROW_WARPS and K_WARPS of a block along rows and inputs, POSITIONS: groups of eight (step, sequence) of a warp.
#include "common.cuh"
#include "vector.cuh"
#include "mma.cuh"
#include "cell.cuh"

#include "arguments"

constexpr int UNIT_TILES = (UNITS + 3) / 4, ROWS = UNIT_TILES * 16, DEPTH = (UNIT_TILES + 3) / 4, PLACES = STEPS * SEQUENCES;
constexpr int SAMPLES = 4 * COLUMNS, BATCHES = (SEQUENCES + SAMPLES - 1) / SAMPLES, THREADS = WARPS * 32;
constexpr int HALF = TYPE == 2 ? 2 : 1;          // the 16-bit type of the products
constexpr int PARTS = TYPE == 0 ? 2 : 1;         // f32 weights: rounded to f16, and the remainder
constexpr int PITCH = DEPTH * 64 + (DEPTH % 2 ? 0 : 64);  // bytes of a sequence's h: 16 per tile. An odd multiple of 64: reads have no bank conflicts
constexpr int STATE = SAMPLES * PITCH, STATES = MODEL == 1 && !LINEAR_BEFORE_RESET ? 3 : 2;
constexpr int IN_SHARED = DEPTH - IN_REGISTERS;
constexpr int CHAINS = TILES * COLUMNS >= 4 ? 1 : 4 / (TILES * COLUMNS);  // independent sums that hide the latency of products

#if TYPE == 0
// A thread computes a row for eight positions.
extern "C" __global__ void __launch_bounds__(128) project(const __grid_constant__ Args p) {
    __shared__ float x[8][64];
    const int thread = threadIdx.x, all = (int)blockIdx.x * 128 + thread, first = blockIdx.y * 8;
    const bool inside = all < DIRECTIONS * ROWS;
    const int d = inside ? all / ROWS : 0, row = inside ? all % ROWS : 0;
    const float* w = reinterpret_cast<const float*>(p.w) + (long long)d * INPUTS * ROWS + row;
    const float bias = p.bias[d * ROWS + row];
    let_next_start();
    wait_for_previous();
    float sum[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) sum[j] = bias;
    for (int from = 0; from < INPUTS; from += 64) {
        __syncthreads();
        for (int i = thread; i < 512; i += 128) {
            const int place = first + i / 64, k = from + i % 64;
            x[i / 64][i % 64] = place < PLACES && k < INPUTS ? load1<0>(p.x, (long long)place * INPUTS + k) : 0.f;
        }
        __syncthreads();
        const int count = INPUTS - from < 64 ? INPUTS - from : 64;
#pragma unroll 16
        for (int k = 0; k < count; ++k) {
            const float by = w[(long long)(from + k) * ROWS];
#pragma unroll
            for (int j = 0; j < 8; ++j) sum[j] = fmaf(by, x[j][k], sum[j]);
        }
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const int place = first + j;
        if (!inside || place >= PLACES) continue;
        const int t = BATCH_FIRST ? place % STEPS : place / SEQUENCES, n = BATCH_FIRST ? place / STEPS : place % SEQUENCES;
        p.projected[(((long long)d * STEPS + t) * SEQUENCES + n) * ROWS + row] = sum[j];
    }
}
#else
// Eight inputs from k on; zeros past the last.
DEV uint4 load_inputs(const u8* x, long long place, int k) {
    const u16* from = reinterpret_cast<const u16*>(x) + place * INPUTS + k;
    if (INPUTS % 8 == 0) return k < INPUTS ? *reinterpret_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
    u32 v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = (k + 2 * i < INPUTS ? from[2 * i] : 0u) | (k + 2 * i + 1 < INPUTS ? (u32)from[2 * i + 1] << 16 : 0u);
    return make_uint4(v[0], v[1], v[2], v[3]);
}

// A warp multiplies 16 rows with 8 * POSITIONS positions. The order of the inputs within 32 is that of 16-byte loads, for both operands.
extern "C" __global__ void __launch_bounds__(ROW_WARPS * K_WARPS * 32) project(const __grid_constant__ Args p) {
    __shared__ float partial[K_WARPS > 1 ? ROW_WARPS * K_WARPS : 1][K_WARPS > 1 ? POSITIONS : 1][4][32];
    constexpr int ALL = (INPUTS + 31) / 32 * 32;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, part = warp % K_WARPS, g = lane / 4, q = lane % 4;
    const int wanted = (int)blockIdx.x * ROW_WARPS + warp / K_WARPS, first = (int)blockIdx.y * POSITIONS * 8;
    const bool inside = wanted < DIRECTIONS * UNIT_TILES;
    const int tile = inside ? wanted : 0;
    const u16* low = reinterpret_cast<const u16*>(p.w) + ((long long)tile * 16 + g) * ALL + 8 * q;
    const u16* high = low + 8 * ALL;
    let_next_start();
    wait_for_previous();
    float acc[POSITIONS][4] = {};
#pragma unroll 2
    for (int k = part * 32; k < ALL; k += K_WARPS * 32) {
        const uint4 a = *reinterpret_cast<const uint4*>(low + k), b = *reinterpret_cast<const uint4*>(high + k);
        const u32 even[4] = {a.x, b.x, a.y, b.y}, odd[4] = {a.z, b.z, a.w, b.w};
        uint4 x[POSITIONS];
#pragma unroll
        for (int j = 0; j < POSITIONS; ++j) {
            const int place = first + j * 8 + g;
            x[j] = load_inputs(p.x, place < PLACES ? place : PLACES - 1, k + 8 * q);
        }
#pragma unroll
        for (int j = 0; j < POSITIONS; ++j) {
            multiply(acc[j], even, x[j].x, x[j].y);
            multiply(acc[j], odd, x[j].z, x[j].w);
        }
    }
    if (K_WARPS > 1) {
#pragma unroll
        for (int j = 0; j < POSITIONS; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) partial[warp][j][e][lane] = acc[j][e];
        __syncthreads();
    }
    const float* bias = p.bias + tile * 16;
#pragma unroll
    for (int j = 0; j < POSITIONS; ++j) {
        if (j % K_WARPS != part) continue;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            float sum = acc[j][e];
            if (K_WARPS > 1) {
                sum = 0.f;
#pragma unroll
                for (int other = 0; other < K_WARPS; ++other) sum += partial[warp - part + other][j][e][lane];
            }
            const int row = g + e / 2 * 8, place = first + j * 8 + 2 * q + e % 2;
            if (!inside || place >= PLACES) continue;
            const int t = BATCH_FIRST ? place % STEPS : place / SEQUENCES, n = BATCH_FIRST ? place / STEPS : place % SEQUENCES;
            const int d = tile / UNIT_TILES;
            p.projected[(((long long)d * STEPS + t) * SEQUENCES + n) * ROWS + tile % UNIT_TILES * 16 + row] = sum + bias[row];
        }
    }
}
#endif

// Unlike cluster_arrive, it makes this thread's writes to shared memory visible to the blocks that wait.
DEV void cluster_arrive_release() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }

// A value as two of 16 bits: rounded (low half) and the remainder. The remainder of an infinity is 0, so products with it are not NaN.
DEV u32 split(float v) {
    const u32 near = pack_as<HALF>(v, 0.f) & 0xffff;
    const float back = unpack_as<HALF>(near).x;
    return near | pack_as<HALF>(fabsf(back) <= 3.4028235e38f ? v - back : 0.f, 0.f) << 16;
}

// Sends a tile's four units of a sequence to all blocks of the cluster: lanes 4 * r + s have unit r % 4 of sequence s, those with r = b % 8 send to block b.
DEV void send(float v, u32 to, u32 bar, bool real, int r) {
    const u32 word = split(v), other = __shfl_xor_sync(~0u, word, 4), even = r & 1 ? other : word, odd = r & 1 ? word : other;
    const u32 near = __byte_perm(even, odd, 0x5410), rest = __byte_perm(even, odd, 0x7632);
    const u32 near2 = __shfl_xor_sync(~0u, near, 8), rest2 = __shfl_xor_sync(~0u, rest, 8);
    const bool high = r & 2;
    const float a = __uint_as_float(high ? near2 : near), b = __uint_as_float(high ? near : near2);
    const float c = __uint_as_float(high ? rest2 : rest), e = __uint_as_float(high ? rest : rest2);
#pragma unroll
    for (int block = r; block < CLUSTER; block += 8)
        if (real) store_remote4(remote_address(to, block), a, b, c, e, remote_address(bar, block));
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) recur(const __grid_constant__ Args p) {
    extern __shared__ __align__(128) u8 shared[];  // barriers, h, weights
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, r = lane / 4, s = lane % 4;
    const int rank = blockIdx.x % CLUSTER, cluster = blockIdx.x / CLUSTER, d = cluster / BATCHES, first = cluster % BATCHES * SAMPLES;
    const int count = SEQUENCES - first < SAMPLES ? SEQUENCES - first : SAMPLES, own = (rank * WARPS + warp) * TILES;
    const bool backwards = BACKWARDS || d == 1;
    u8 *states = shared + 128, *rest = states + STATES * STATE;
    const u32 bar = shared_address(shared), bytes = UNIT_TILES * 16 * count;
    if (threadIdx.x == 0) {
#pragma unroll
        for (int i = 0; i < STATES; ++i) barrier_init(bar + 8 * i, 1);
        barrier_init_fence();
#pragma unroll
        for (int i = 0; i < STATES; ++i) barrier_expect(bar + 8 * i, bytes);
    }
    for (int i = threadIdx.x; i < STATES * STATE / 16; i += THREADS) reinterpret_cast<uint4*>(states)[i] = make_uint4(0, 0, 0, 0);
    cluster_arrive_release();
    let_next_start();

    u32 weights[TILES][PARTS][IN_REGISTERS > 0 ? IN_REGISTERS : 1][4];
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            const uint4* from = reinterpret_cast<const uint4*>(p.r) + (((long long)d * UNIT_TILES + own + i) * PARTS + part) * DEPTH * 32 + lane;
            const bool real = own + i < UNIT_TILES;
#pragma unroll
            for (int k = 0; k < IN_REGISTERS; ++k) {
                const uint4 v = real ? from[k * 32] : make_uint4(0, 0, 0, 0);
                weights[i][part][k][0] = v.x, weights[i][part][k][1] = v.y, weights[i][part][k][2] = v.z, weights[i][part][k][3] = v.w;
            }
            for (int k = 0; k < IN_SHARED; ++k)  // a lane reads what it has written
                reinterpret_cast<uint4*>(rest)[(((warp * TILES + i) * PARTS + part) * IN_SHARED + k) * 32 + lane] =
                    real ? from[(IN_REGISTERS + k) * 32] : make_uint4(0, 0, 0, 0);
        }
    wait_for_previous();

    int last = p.lengths ? 0 : STEPS;  // steps of the longest sequence of this cluster
    if (p.lengths)
        for (int i = 0; i < count; ++i) last = max(last, min((int)p.lengths[first + i], STEPS));
    int length[COLUMNS];
    long long at[COLUMNS];  // first unit of a sequence in the states' tensors
    bool present[COLUMNS];
    u32 column[COLUMNS];  // of h that this lane multiplies, bytes
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) {
        const int n = first + 4 * j + s;
        present[j] = n < SEQUENCES;
        length[j] = p.lengths && present[j] ? p.lengths[n] : STEPS;
        at[j] = (BATCH_FIRST ? (long long)n * DIRECTIONS + d : (long long)d * SEQUENCES + n) * UNITS;
        column[j] = min(4 * j + r / 2, count - 1) * PITCH + s * 16 + r % 2 * 8;
    }
    float h[TILES][COLUMNS], c[TILES][COLUMNS];
    Peepholes hole[TILES];
    float4 x[TILES][COLUMNS];
    auto load_projected = [&](int step) {
        const int t = backwards ? last - 1 - step : step;
#pragma unroll
        for (int i = 0; i < TILES; ++i)
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j) {
                const long long from = (((long long)d * STEPS + t) * SEQUENCES + first + 4 * j + s) * ROWS + (own + i) * 16 + r % 4 * 4;
                x[i][j] = present[j] && own + i < UNIT_TILES ? *reinterpret_cast<const float4*>(p.projected + from) : make_float4(0.f, 0.f, 0.f, 0.f);
            }
    };
    auto store_y = [&](int t, int i, int j, float v) {
        const int n = first + 4 * j + s, unit = (own + i) * 4 + r;
        const long long y = (BATCH_FIRST ? ((long long)n * STEPS + t) * DIRECTIONS + d : ((long long)t * DIRECTIONS + d) * SEQUENCES + n) * UNITS;
        if (r < 4 && present[j] && unit < UNITS) store1<TYPE>(p.y, y + unit, v);
    };
    if (last > 0) load_projected(0);
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
        const int unit = (own + i) * 4 + r % 4;
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) {
            h[i][j] = p.first_h && present[j] && unit < UNITS ? load1<TYPE>(p.first_h, at[j] + unit) : 0.f;
            c[i][j] = p.first_c && present[j] && unit < UNITS ? load1<TYPE>(p.first_c, at[j] + unit) : 0.f;
            for (int t = last; t < STEPS; ++t) store_y(t, i, j, 0.f);  // past its end a sequence outputs zeros
        }
        const float* from = p.peepholes + d * 3 * UNITS + unit;
        const bool real = PEEPHOLES && unit < UNITS;
        hole[i] = Peepholes{real ? from[0] : 0.f, real ? from[UNITS] : 0.f, real ? from[2 * UNITS] : 0.f};
    }
    __syncthreads();  // the zeros are written
    if (p.first_h)
        for (int i = threadIdx.x; i < count * UNITS; i += THREADS) {
            const int n = i / UNITS, unit = i % UNITS;
            const long long from = (BATCH_FIRST ? (long long)(first + n) * DIRECTIONS + d : (long long)d * SEQUENCES + first + n) * UNITS + unit;
            const u32 word = split(load1<TYPE>(p.first_h, from));
            u16* to = reinterpret_cast<u16*>(states + n * PITCH + unit / 4 * 16) + unit % 4;
            to[0] = (u16)word;
            to[4] = (u16)(word >> 16);
        }
    __syncthreads();
    cluster_wait();  // all blocks of the cluster have set up their barriers and zeros

    float gate[TILES][COLUMNS][2];  // slots 0 and 2 of unit r, or 1 and 3 of unit r - 4, of sequence s
    auto product = [&](const u8* state) {
        float acc[TILES][COLUMNS][CHAINS][4] = {};
#pragma unroll
        for (int k = 0; k < DEPTH; ++k)
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j) {
                const uint2 b = *reinterpret_cast<const uint2*>(state + column[j] + k * 64);
#pragma unroll
                for (int i = 0; i < TILES; ++i)
#pragma unroll
                    for (int part = 0; part < PARTS; ++part) {
                        if (k < IN_REGISTERS) {
                            multiply(acc[i][j][k % CHAINS], weights[i][part][k < IN_REGISTERS ? k : 0], b.x, b.y);
                        } else {
                            const uint4 v = reinterpret_cast<const uint4*>(rest)[(((warp * TILES + i) * PARTS + part) * IN_SHARED + k - IN_REGISTERS) * 32 + lane];
                            const u32 a[4] = {v.x, v.y, v.z, v.w};
                            multiply(acc[i][j][k % CHAINS], a, b.x, b.y);
                        }
                    }
            }
#pragma unroll
        for (int i = 0; i < TILES; ++i)
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j) {
                gate[i][j][0] = gate[i][j][1] = 0.f;
#pragma unroll
                for (int chain = 0; chain < CHAINS; ++chain) {
                    gate[i][j][0] += acc[i][j][chain][0] + acc[i][j][chain][1];
                    gate[i][j][1] += acc[i][j][chain][2] + acc[i][j][chain][3];
                }
            }
    };
    auto slots = [&](int i, int j) {  // all four of unit r % 4
        const float a = gate[i][j][0], b = gate[i][j][1], a2 = __shfl_xor_sync(~0u, a, 16), b2 = __shfl_xor_sync(~0u, b, 16);
        return r < 4 ? make_float4(a, a2, b, b2) : make_float4(a2, a, b2, b);
    };
    auto place = [&](int buffer, int i, int j) {  // where the h of a tile and a sequence is, in each block
        return shared_address(states) + buffer * STATE + (4 * j + s) * PITCH + (own + i) * 16;
    };

    // A warp without units neither sends nor waits: it could fall behind by two phases of a barrier, which look alike.
    for (int step = 0; step < (own < UNIT_TILES ? last : 0); ++step) {
        const int t = backwards ? last - 1 - step : step, now = step % 2;
        if (step > 0) {
            barrier_wait(bar + 8 * now, (step - 1) / 2 % 2);
            if (threadIdx.x == 0) barrier_expect(bar + 8 * now, bytes);  // of step + 2
        }
        product(states + now * STATE);
        float update[TILES][COLUMNS];  // GRU: z
        if (STATES == 3) {  // GRU whose last product takes r * h
#pragma unroll
            for (int i = 0; i < TILES; ++i)
#pragma unroll
                for (int j = 0; j < COLUMNS; ++j) {
                    const float4 v = slots(i, j);
                    update[i][j] = act0(clipped(x[i][j].x + v.x), d);
                    const float reset = (own + i) * 4 + r % 4 < UNITS ? act0(clipped(x[i][j].y + v.y), d) * h[i][j] : 0.f;
                    send(reset, place(2, i, j), bar + 16, present[j] && own + i < UNIT_TILES, r);
                }
            barrier_wait(bar + 16, step % 2);
            if (threadIdx.x == 0) barrier_expect(bar + 16, bytes);
            product(states + 2 * STATE);
        }
#pragma unroll
        for (int i = 0; i < TILES; ++i)
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j) {
                const float4 v = slots(i, j), in = x[i][j];
                float next, cell = c[i][j];
                if (MODEL == 0) {
                    next = act0(clipped(in.x + v.x), d);
                } else if (MODEL == 1) {  // z, r, h; the bias of the product of h if it is multiplied by r
                    const float z = STATES == 3 ? update[i][j] : act0(clipped(in.x + v.x), d);
                    const float product = STATES == 3 ? v.z : act0(clipped(in.y + v.y), d) * (v.z + in.w);
                    next = (1.f - z) * act1(clipped(in.z + product), d) + z * h[i][j];
                } else {  // i, o, f, c
                    next = lstm_cell(in.x + v.x, in.y + v.y, in.z + v.z, in.w + v.w, cell, hole[i], d);
                }
                if (t < length[j] && (own + i) * 4 + r % 4 < UNITS) {  // past its end a sequence keeps its state
                    h[i][j] = next;
                    c[i][j] = cell;
                }
                if (step + 1 < last) send(h[i][j], place(1 - now, i, j), bar + 8 * (1 - now), present[j] && own + i < UNIT_TILES, r);
                store_y(t, i, j, t < length[j] ? next : 0.f);
            }
        if (step + 1 < last) load_projected(step + 1);
    }
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) {
            const int unit = (own + i) * 4 + r;
            if (r >= 4 || !present[j] || unit >= UNITS) continue;
            if (p.last_h) store1<TYPE>(p.last_h, at[j] + unit, h[i][j]);
            if (p.last_c) store1<TYPE>(p.last_c, at[j] + unit, c[i][j]);
        }
}
