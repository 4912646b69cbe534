// Attention of one head: out = softmax(scale * q @ k^T + mask) @ v, accumulators and softmax in f32, scores never leave the registers (Dao et al. 2022).
// A block has WR * MI * 16 rows of q and WR * WK warps. Keys and values come by asynchronous copies in chunks of KC * WK, the next while these are multiplied;
// warp (r, w) works on MI * 16 rows and the w-th KC keys of each chunk, with its own maximum and sum; the WK parts of a row are put together at the end.
// With MI 2 a warp takes 32 rows and reads keys and values from shared memory once for both halves; shared memory bounds long sequences.
// q, k, v and out are accessed in place: rows of SIZE elements (v and out: VALUE_SIZE) with strides for batch, head and row. TRANSPOSED: k is [SIZE][keys].
// The products are over multiples of 16 elements, D and DV; shared memory holds zeros in the elements past the end of a row.
// Constants: TYPE (1 f16, 2 bf16), BF16, SIZE, VALUE_SIZE (1 to 256), Q_UNIT, K_UNIT, V_UNIT, OUT_UNIT (1, 2, 4 or 8: elements of a row per access; they divide
// every row and its address), Q_SHARED (1: q is read from shared memory for each step, as heads of many elements do not fit into registers), KC, WR, WK, MI,
// STAGES, TRANSPOSED, MASK (-1 none and a scale above 0, 0 f32, TYPE: its type), SAME (rows have one mask), CAPPED (scores become cap * tanh(scale * score)).
#include "common.cuh"
#include "vector.cuh"
#include "mma.cuh"

struct Place { long long batch, head, row; };   // strides in elements

#include "arguments"

constexpr int CHUNK = KC * WK, WARPS = WR * WK, THREADS = WARPS * 32;
constexpr int D = (SIZE + 15) / 16 * 16, DV = (VALUE_SIZE + 15) / 16 * 16;
constexpr int Q_PITCH = D + 8, V_PITCH = DV + 8;                // elements: rows shifted against each other, so that eight rows meet no bank twice
constexpr int K_ROWS = TRANSPOSED ? D : CHUNK, K_LONG = TRANSPOSED ? CHUNK : D, K_PITCH = K_LONG + 8;
constexpr int K_BYTES = K_ROWS * K_PITCH * 2, V_BYTES = CHUNK * V_PITCH * 2, STAGE_BYTES = K_BYTES + V_BYTES;
constexpr int TILES = KC / 8, OUT = DV / 8;                     // of eight keys, of eight elements
constexpr int WHOLE = OUT_UNIT == 8 ? VALUE_SIZE / 8 : 0;       // groups of eight elements that are stored at once
#define INFINITY_F __uint_as_float(0x7f800000)
// GUARDED: rows of probabilities that are 0. 1: rows of NaN; 2: rows of which every key is hidden by -infinity, whose `total` of weights is 0.
DEV float guarded(float x, float total) { return (GUARDED == 1 && !(total > 0.f)) || (GUARDED == 2 && total == 0.f) ? 0.f : x; }
constexpr float LOG2E = 1.4426950408889634f;

template <int UNIT> DEV void ask(u32 to, const u16* from, bool inside) {   // zeros for elements outside
    if (UNIT == 8) asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(inside ? 16 : 0) : "memory");
    else if (UNIT > 1) asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(UNIT > 1 ? UNIT * 2 : 4), "r"(inside ? UNIT * 2 : 0) : "memory");
    else asm volatile("st.shared.b16 [%0], %1;" ::"r"(to), "h"(inside ? *from : (u16)0) : "memory");
}
DEV u32 load_pair(const u16* row, int column) {   // of q
    if (column >= SIZE) return 0u;
    if (Q_UNIT > 1) return *reinterpret_cast<const u32*>(row + column);
    return row[column] | (column + 1 < SIZE ? (u32)row[column + 1] << 16 : 0u);
}
DEV void store_pair(u16* row, int column, u32 pair) {
    if (OUT_UNIT > 1) { if (column < VALUE_SIZE) *reinterpret_cast<u32*>(row + column) = pair; return; }
    if (column < VALUE_SIZE) row[column] = (u16)pair;
    if (column + 1 < VALUE_SIZE) row[column + 1] = (u16)(pair >> 16);
}
DEV void asked() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> DEV void arrived() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }
DEV float power2(float x) { float r; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }
DEV float over_quad(float x, bool largest) {
#pragma unroll
    for (int i = 1; i < 4; i *= 2) { const float y = __shfl_xor_sync(~0u, x, i); x = largest ? fmaxf(x, y) : x + y; }
    return x;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention(const __grid_constant__ Args p) {
    extern __shared__ uint4 raw[];
    const u32 base = shared_address(raw);
    let_next_start();
    const int t = threadIdx.x, lane = t % 32, warp = t / 32, part = warp % WK;
    const int batch = blockIdx.y / p.heads, head = blockIdx.y % p.heads;
    const int row0 = (blockIdx.x * WR + warp / WK) * (MI * 16) + lane / 4;   // and row0 + 8, and so on
    const int k_head = head / p.k_group, v_head = head / p.v_group;
    const u16* const q = reinterpret_cast<const u16*>(p.q) + batch * p.q_at.batch + head * p.q_at.head;
    const u16* const k = reinterpret_cast<const u16*>(p.k) + batch * p.k_at.batch + k_head * p.k_at.head;
    const u16* const v = reinterpret_cast<const u16*>(p.v) + batch * p.v_at.batch + v_head * p.v_at.head;
    const int chunks = (p.keys + CHUNK - 1) / CHUNK;
    const u8* masks[MI * 2];   // the masks of this thread's rows
#pragma unroll
    for (int line = 0; line < MI * 2; ++line) {
        const long long at = batch % p.mask_period * p.mask_at.batch + head * p.mask_at.head + min(row0 + line * 8, p.rows - 1) * p.mask_at.row;
        masks[line] = p.mask + at * Element<MASK < 0 ? 0 : MASK>::BYTES;
    }
    const auto ask_chunk = [&](int chunk) {
        const u32 at = base + chunk % STAGES * STAGE_BYTES;
        const int key0 = chunk * CHUNK;
#pragma unroll
        for (int i = t; i < K_ROWS * K_LONG / K_UNIT; i += THREADS) {
            const int row = i / (K_LONG / K_UNIT), column = i % (K_LONG / K_UNIT) * K_UNIT;
            const bool inside = key0 + (TRANSPOSED ? column : row) < p.keys && (TRANSPOSED ? row : column) < SIZE;
            ask<K_UNIT>(at + (row * K_PITCH + column) * 2, inside ? k + (TRANSPOSED ? row : key0 + row) * p.k_at.row + (TRANSPOSED ? key0 : 0) + column : k, inside);
        }
#pragma unroll
        for (int i = t; i < CHUNK * DV / V_UNIT; i += THREADS) {
            const int row = i / (DV / V_UNIT), column = i % (DV / V_UNIT) * V_UNIT;
            const bool inside = key0 + row < p.keys && column < VALUE_SIZE;
            ask<V_UNIT>(at + K_BYTES + (row * V_PITCH + column) * 2, inside ? v + (key0 + row) * p.v_at.row + column : v, inside);
        }
        asked();
    };
    wait_for_previous();
    const u32 q_at = base + STAGES * STAGE_BYTES, my_q = q_at + warp / WK * (MI * 16) * Q_PITCH * 2;
    if (Q_SHARED)
#pragma unroll
        for (int i = t; i < WR * MI * 16 * D / Q_UNIT; i += THREADS) {
            const int row = i / (D / Q_UNIT), column = i % (D / Q_UNIT) * Q_UNIT, line = blockIdx.x * (WR * MI * 16) + row;
            const bool inside = line < p.rows && column < SIZE;
            ask<Q_UNIT>(q_at + (row * Q_PITCH + column) * 2, inside ? q + line * p.q_at.row + column : q, inside);
        }
    ask_chunk(0);
    u32 rows[MI][Q_SHARED ? 1 : D / 16][4];   // q, as the products want it
    if (!Q_SHARED)
#pragma unroll
        for (int m = 0; m < MI; ++m)
#pragma unroll
            for (int i = 0; i < D / 16; ++i)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int row = row0 + m * 16 + e % 2 * 8;
                    rows[m][Q_SHARED ? 0 : i][e] = row < p.rows ? load_pair(q + row * p.q_at.row, i * 16 + e / 2 * 8 + lane % 4 * 2) : 0u;
                }
    float out[MI][OUT][4] = {}, largest[MI * 2], sum[MI * 2];
#pragma unroll
    for (int line = 0; line < MI * 2; ++line) { largest[line] = -INFINITY_F; sum[line] = 0.f; }
    const float scale = CAPPED ? 1.f : p.scale, factor = scale * LOG2E;   // of the scores after the cap
    for (int chunk = 0; chunk < chunks; ++chunk) {
        if (STAGES > 1 && chunk + 1 < chunks) { ask_chunk(chunk + 1); arrived<1>(); } else arrived<0>();
        __syncthreads();
        const u32 keys_at = base + chunk % STAGES * STAGE_BYTES, values_at = keys_at + K_BYTES;
        const int first = part * KC, key0 = chunk * CHUNK + first;
        if (key0 < p.keys) {
            float s[MI][TILES][4] = {};
#pragma unroll
            for (int i = 0; i < D / 16; ++i) {
                if (Q_SHARED)
#pragma unroll
                    for (int m = 0; m < MI; ++m) matrices(rows[m][0], my_q + ((m * 16 + lane % 16) * Q_PITCH + i * 16 + lane / 16 * 8) * 2, false);
#pragma unroll
                for (int j = 0; j < TILES; j += 2) {
                    u32 b[4];
                    if (TRANSPOSED) matrices(b, keys_at + ((i * 16 + lane % 16) * K_PITCH + first + j * 8 + lane / 16 * 8) * 2, true);
                    else matrices(b, keys_at + ((first + j * 8 + lane / 16 * 8 + lane % 8) * K_PITCH + i * 16 + lane / 8 % 2 * 8) * 2, false);
#pragma unroll
                    for (int m = 0; m < MI; ++m) {
                        multiply(s[m][j], rows[m][Q_SHARED ? 0 : i], b[0], b[1]);
                        multiply(s[m][j + 1], rows[m][Q_SHARED ? 0 : i], b[2], b[3]);
                    }
                }
            }
            if (CAPPED)
#pragma unroll
                for (int m = 0; m < MI; ++m)
#pragma unroll
                    for (int j = 0; j < TILES; ++j)
#pragma unroll
                        for (int e = 0; e < 4; ++e) s[m][j][e] = p.cap * tanh_fast(s[m][j][e] * p.scale);
            if (MASK < 0 && key0 + KC > p.keys)   // the last keys; masked ones are checked separately
#pragma unroll
                for (int j = 0; j < TILES; ++j)
#pragma unroll
                    for (int e = 0; e < 4; ++e)
                        if (key0 + j * 8 + lane % 4 * 2 + e % 2 >= p.keys)
#pragma unroll
                            for (int m = 0; m < MI; ++m) s[m][j][e] = -INFINITY_F;
#pragma unroll
            for (int m = 0; m < MI; ++m) {
                float top[2] = {largest[m * 2], largest[m * 2 + 1]}, by[2];   // with MASK < 0 of plain scores, else of powers of 2
#pragma unroll
                for (int j = 0; j < TILES; ++j)
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        if (MASK >= 0) {
                            const int key = key0 + j * 8 + lane % 4 * 2 + e % 2;
                            const float x = s[m][j][e] * scale + load1<MASK < 0 ? 0 : MASK>(masks[SAME ? 0 : m * 2 + e / 2], min(key, p.keys - 1) * p.mask_key);
                            const float y = x * LOG2E;   // a mask of the lowest finite value is not infinite: a row of such masks is a mean
                            s[m][j][e] = key >= p.keys ? -INFINITY_F : MASK != 1 && x > -INFINITY_F ? fmaxf(y, -3.4028235e38f) : y;
                        }
                        top[e / 2] = fmaxf(top[e / 2], s[m][j][e]);
                    }
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    top[half] = over_quad(top[half], true);
                    const float from = top[half] == -INFINITY_F ? 0.f : top[half];   // nothing seen yet: nothing to scale
                    by[half] = power2((largest[m * 2 + half] - from) * (MASK < 0 ? factor : 1.f));
                    largest[m * 2 + half] = top[half];
                    top[half] = MASK < 0 ? from * factor : from;
                    sum[m * 2 + half] *= by[half];
                }
#pragma unroll
                for (int j = 0; j < TILES; ++j)
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        s[m][j][e] = power2(MASK < 0 ? fmaf(s[m][j][e], factor, -top[e / 2]) : s[m][j][e] - top[e / 2]);
                        sum[m * 2 + e / 2] += s[m][j][e];
                    }
#pragma unroll
                for (int j = 0; j < OUT; ++j)
#pragma unroll
                    for (int e = 0; e < 4; ++e) out[m][j][e] *= by[e / 2];
            }
#pragma unroll
            for (int i = 0; i < KC / 16; ++i) {
                u32 a[MI][4];
#pragma unroll
                for (int m = 0; m < MI; ++m)
#pragma unroll
                    for (int e = 0; e < 4; ++e) a[m][e] = pack(s[m][2 * i + e / 2][e % 2 * 2], s[m][2 * i + e / 2][e % 2 * 2 + 1]);
#pragma unroll
                for (int j = 0; j < OUT; j += 2) {
                    u32 b[4];
                    matrices(b, values_at + ((first + i * 16 + lane % 16) * V_PITCH + j * 8 + lane / 16 * 8) * 2, true);
#pragma unroll
                    for (int m = 0; m < MI; ++m) { multiply(out[m][j], a[m], b[0], b[1]); multiply(out[m][j + 1], a[m], b[2], b[3]); }
                }
            }
        }
        __syncthreads();
        if (STAGES == 1 && chunk + 1 < chunks) ask_chunk(chunk + 1);
    }
#pragma unroll
    for (int line = 0; line < MI * 2; ++line) sum[line] = over_quad(sum[line], false);
    if (WK > 1) {   // the parts of a row, each relative to its own maximum; shared memory is free now
        constexpr int WIDE = DV + 4, LINES = MI * 16;
        float* const shared = reinterpret_cast<float*>(raw);
        float* const mine = shared + warp * LINES * WIDE;
        float* const ends = shared + WARPS * LINES * WIDE;   // [warp][line][2]
#pragma unroll
        for (int part_line = 0; part_line < MI * 2; ++part_line) {
            const int row = lane / 4 + part_line * 8;
#pragma unroll
            for (int j = 0; j < OUT; ++j)
                *reinterpret_cast<float2*>(mine + row * WIDE + j * 8 + lane % 4 * 2) =
                    make_float2(out[part_line / 2][j][part_line % 2 * 2], out[part_line / 2][j][part_line % 2 * 2 + 1]);
            if (lane % 4 == 0) { ends[(warp * LINES + row) * 2] = largest[part_line]; ends[(warp * LINES + row) * 2 + 1] = sum[part_line]; }
        }
        __syncthreads();
        for (int i = t; i < WR * LINES * OUT; i += THREADS) {   // eight elements of a row
            const int line = i / OUT, column = i % OUT * 8, row = blockIdx.x * WR * LINES + line;
            if (row >= p.rows) continue;
            float top = -INFINITY_F, total = 0.f, y[8] = {};
#pragma unroll
            for (int w = 0; w < WK; ++w) top = fmaxf(top, ends[((line / LINES * WK + w) * LINES + line % LINES) * 2]);
            top = top == -INFINITY_F ? 0.f : top;
#pragma unroll
            for (int w = 0; w < WK; ++w) {
                const int at = (line / LINES * WK + w) * LINES + line % LINES;
                const float by = power2((ends[at * 2] - top) * (MASK < 0 ? factor : 1.f));
                total += by * ends[at * 2 + 1];
#pragma unroll
                for (int e = 0; e < 8; ++e) y[e] += by * shared[at * WIDE + column + e];
            }
            const float by = 1.f / total;
            u16* to = reinterpret_cast<u16*>(p.out) + batch * p.out_at.batch + head * p.out_at.head + row * p.out_at.row + column;
#pragma unroll
            for (int e = 0; e < 8; ++e) y[e] = guarded(y[e] * by, total);
            if (column / 8 < WHOLE) *reinterpret_cast<uint4*>(to) = make_uint4(pack(y[0], y[1]), pack(y[2], y[3]), pack(y[4], y[5]), pack(y[6], y[7]));
            else
#pragma unroll
                for (int e = 0; e < 8; e += 2) store_pair(to - column, column + e, pack(y[e], y[e + 1]));
        }
        return;
    }
#pragma unroll
    for (int line = 0; line < MI * 2; ++line) {
        const int row = row0 + line * 8;
        const float by = 1.f / sum[line];
        u16* to = reinterpret_cast<u16*>(p.out) + batch * p.out_at.batch + head * p.out_at.head + row * p.out_at.row;
#pragma unroll
        for (int j = 0; j < OUT; j += 4) {
            u32 y[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float* v = out[line / 2][j + e < OUT ? j + e : 0] + line % 2 * 2;
                y[e] = pack(guarded(v[0] * by, sum[line]), guarded(v[1] * by, sum[line]));
            }
            if (j + 4 <= WHOLE) {   // a lane of a quad gets eight elements
                transpose_quad(y, lane);
                if (row < p.rows) *reinterpret_cast<uint4*>(to + (j + lane % 4) * 8) = make_uint4(y[0], y[1], y[2], y[3]);
            } else if (row < p.rows)
#pragma unroll
                for (int e = 0; e < 4; ++e) if (j + e < OUT) store_pair(to, (j + e) * 8 + lane % 4 * 2, y[e]);
        }
    }
}
