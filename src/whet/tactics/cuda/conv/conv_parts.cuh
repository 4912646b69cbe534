// Parts of conv.cu, which defines the constants and Args: the epilogue of a result, and the addresses that a tile and a K step read and write.
#if GATED
#define COMBINE(X, R) ((X) * (R))
#else
#define COMBINE(X, R) ((X) + (R))
#endif
// The end of every result: v is the sum with its bias, r the residual.
DEV float finish(const Args& p, float v, float r) {
    const float x = activate<ACT>(p.has_residual == 1 ? v + r : v, p.act);
    return p.has_residual == 2 ? COMBINE(x, r) : x;
}
// Converts two of them to 16-bit floats.
DEV u32 finish_two(const Args& p, float x, float y, float2 r) {
    if (ACT != 1 && ACT != 3 && ACT != 8) return pack(finish(p, x, r.x), finish(p, y, r.y));
    x = p.has_residual == 1 ? x + r.x : x;
    y = p.has_residual == 1 ? y + r.y : y;
    activate_two<ACT>(x, y, p.act);
    return p.has_residual == 2 ? pack(COMBINE(x, r.x), COMBINE(y, r.y)) : pack(x, y);
}
// Offset of a pixel's 16-bit values from output channel `col` on.
DEV u8* result(const Args& p, int row, int col) {
#if DUAL_OUTPUT
    if (col >= p.second_from) return p.second_out + ((long long)row * p.second_pitch + col - p.second_from) * 2;
#endif
    return p.out + ((long long)row * p.out_pitch + col) * 2;
}
// A panel of the output tile goes to the pixels from m on and the output channels from col on.
DEV void store_panel(const Args& p, u32 from, int col, int m) {
#if DUAL_OUTPUT
    if (col >= p.second_from) return store_box2(&p.fork, from, col - p.second_from, m);
#endif
    store_box2(&p.d, from, col, m);
}

#if NORM
// Sums over the channels of one row of the input that a lane reads: it has half of each K step's, its neighbour the others. They are sums of differences to the
// first value, so that a mean far from 0 costs no digits.
struct RowSums {
    float first, sum, square;
    DEV void add(u32 tile, int t, bool starts) {
        const int row = t / 2, part = t % 2 * (ROW / 32), mix = ROW == 128 ? row & 7 : ROW == 64 ? row >> 1 & 3 : row >> 2 & 1;
#pragma unroll
        for (int j = 0; j < ROW / 32; ++j) {
            const float4 piece = load_shared_f4(tile + row * ROW + (((part + j) ^ mix) << 4));
            const float words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float2 v = unpack(__float_as_uint(words[e]));
                if (NORM == 1 && starts && j == 0 && e == 0) first = v.x;
                const float x = NORM == 1 ? v.x - first : v.x, y = NORM == 1 ? v.y - first : v.y;
                if (NORM == 1) sum += x + y;
                square = fmaf(x, x, fmaf(y, y, square));
            }
        }
    }
    // Mean and sum of squared deviations (NORM == 2: 0 and sum of squares) of both lanes, each with `count` values.
    DEV float2 moments(int count) const {
        if (NORM == 2) return make_float2(0.f, square + __shfl_xor_sync(~0u, square, 1));
        const float by = 1.f / count, mean = fmaf(sum, by, first), deviations = fmaf(-sum * by, sum, square);
        const float other = __shfl_xor_sync(~0u, mean, 1), apart = other - mean;
        return make_float2(.5f * (mean + other), deviations + __shfl_xor_sync(~0u, deviations, 1) + apart * apart * (.5f * count));
    }
};
// 1 / deviation and -mean / deviation of a row from the moments of SK equal parts of its channels, `stride` bytes from each other.
DEV float2 row_of_parts(const Args& p, u32 at, int stride, const int (&counts)[SK]) {
    float mean = 0.f, square = 0.f;
#pragma unroll
    for (int q = 0; q < SK; ++q) mean = fmaf(load_shared_f2(at + q * stride).x, counts[q] * p.per_channel, mean);
#pragma unroll
    for (int q = 0; q < SK; ++q) {
        const float2 part = load_shared_f2(at + q * stride);
        square += fmaf((part.x - mean) * (part.x - mean), NORM == 1 ? counts[q] : 0.f, part.y);
    }
    const float by = 1.f / sqrtf(square * p.per_channel + p.epsilon);
    return make_float2(by, -by * mean);
}
DEV float with_bias(float sum, float bias, float column, float2 row) { return fmaf(sum, row.x, fmaf(column, row.y, bias)); }
#define BIASED(SUM, BIAS, COLUMN, ROW_NORM) with_bias(SUM, BIAS, COLUMN, ROW_NORM)
#else
#define BIASED(SUM, BIAS, COLUMN, ROW_NORM) ((SUM) + (BIAS))
#endif

#if IN8
// Eight adjacent channels of a pixel: accumulators to real values, residual, activation, and conversion to the stored type.
DEV void finish_eight(const Args& p, float (&v)[8], const Raw<ADD>& raw, u8* out, long long to, int left) {
    if (FOLD && TO == 5) {  // in steps of the result: the upper limit is e4m3's own
        if (p.has_residual) {
            const Vec8 r = unpack_raw<ADD>(raw);
#pragma unroll
            for (int e = 0; e < 8; ++e) v[e] = fmaf(r.v[e], p.add_step, v[e]);
        }
#pragma unroll
        for (int e = 0; e < 8; ++e) v[e] = max_nan(v[e], p.act.a);
        const u32 low = bytes_of<5>(v[0], v[1], v[2], v[3]), high = bytes_of<5>(v[4], v[5], v[6], v[7]);
        if (!ODD) *reinterpret_cast<uint2*>(out + to) = make_uint2(low, high);
        else
#pragma unroll
            for (int e = 0; e < 8; ++e) if (e < left) out[to + e] = (u8)((e < 4 ? low : high) >> e % 4 * 8);
        return;
    }
    if (FOLD) {
        float late[8];
#pragma unroll
        for (int e = 0; e < 8; ++e) late[e] = p.act.b;
        if (BETWEEN || p.has_residual) {
            const Vec8 r = unpack_raw<ADD>(raw);
            if (ACT == 1 && p.has_residual == 2) {
#pragma unroll
                for (int e = 0; e < 8; ++e) late[e] = fmaf(r.v[e], p.add_step, late[e]);
            } else {
#pragma unroll
                for (int e = 0; e < 8; ++e) v[e] = fmaf(r.v[e], p.add_step, v[e]);
            }
        }
        fold<ACT>(v, p.act, late);
        const u32 low = steps_of(v[0], v[1], v[2], v[3], p.per_step, p.zero), high = steps_of(v[4], v[5], v[6], v[7], p.per_step, p.zero);
        if (!ODD) *reinterpret_cast<uint2*>(out + to) = make_uint2(low, high);
        else
#pragma unroll
            for (int e = 0; e < 8; ++e) if (e < left) out[to + e] = (u8)((e < 4 ? low : high) >> e % 4 * 8);
        return;
    }
    Vec8 r;
    if (p.has_residual) {
        r = unpack_raw<ADD>(raw);
#pragma unroll
        for (int e = 0; e < 8; ++e) r.v[e] = ADD >= 3 && ADD < 5 ? r.v[e] * p.add_step + p.add_shift : r.v[e] * p.add_step;
    }
    if (p.has_residual == 1)
#pragma unroll
        for (int e = 0; e < 8; ++e) v[e] += r.v[e];
#pragma unroll
    for (int e = 0; e < 8; e += 2) {
        if (TO) activate_two<ACT>(v[e], v[e + 1], p.act);   // to 16 or 8 bits
        else { v[e] = activate<ACT>(v[e], p.act); v[e + 1] = activate<ACT>(v[e + 1], p.act); }
    }
    if (p.has_residual == 2)
#pragma unroll
        for (int e = 0; e < 8; ++e) v[e] += r.v[e];
    Vec8 y;
#pragma unroll
    for (int e = 0; e < 8; ++e) y.v[e] = TO >= 3 ? v[e] * p.per_step + p.zero : v[e];
    if (!ODD) store8<TO>(out, to, y);
    else  // rows begin anywhere
#pragma unroll
        for (int e = 0; e < 8; ++e) if (e < left) store1<TO>(out, to + e, y.v[e]);
}
DEV Vec8 shared_eight(u32 at) {
    const float4 a = load_shared_f4(at), b = load_shared_f4(at + 16);
    return Vec8{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
}
#if BETWEEN
// Sums of a thread's rows as the integers that would be stored: `column` is the first of its eight channels in every 32.
DEV void keep_integers(const Args& p, const Accumulator (&acc)[MI][BN / 2], uint2 (&kept)[MI][2][BN / 32], int column) {
#pragma unroll
    for (int g = 0; g < BN / 32; ++g) {
        const Vec8 by = load8<0>(reinterpret_cast<const u8*>(p.between_factor), column + g * 32), add = load8<0>(reinterpret_cast<const u8*>(p.between_bias), column + g * 32);
#pragma unroll
        for (int i = 0; i < MI; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float v[8];
#pragma unroll
                for (int e = 0; e < 8; ++e) v[e] = __saturatef(fmaf((float)acc[i][g * 16 + half * 2 + e / 2 * 4 + e % 2], by.v[e], add.v[e]));
                kept[i][half][g] = make_uint2(steps_of(v[0], v[1], v[2], v[3], p.between_span, p.between_base), steps_of(v[4], v[5], v[6], v[7], p.between_span, p.between_base));
            }
    }
}
#endif
DEV const float* bias_of(const Args& p, int pixel) { return BORDER ? p.bias + (pixel < 0 ? 0 : p.classes[pixel % p.pixels]) * p.class_pitch : p.bias; }
#endif

// The pixel that row m of a tile is stored to, or -1.
DEV int out_pixel(const Args& p, int tile, int m) {
    if (!HALO) { const int row = tile * BM + m; return row < p.m ? row : -1; }
    const int per = (p.height + p.rows - 1) / p.rows, image = tile / per, y = m / p.wide, x = m - y * p.wide, row = (tile - image * per) * p.rows + y;
    return y < p.rows && row < p.height && x < p.width ? (image * p.height + row) * p.width + x : -1;
}

DEV float bits(float v) { return v; }
DEV float bits(int v) { return __int_as_float(v); }
DEV float unbits(float v, float) { return v; }
DEV int unbits(float v, int) { return __float_as_int(v); }

struct Corner {  // input coordinates of a tile
    int m0, n0, image, h, w;
#if GROUPED
    int c0;  // the first channel of the tile's groups
#endif
#if SECOND_INPUT == 2
    int second_image, second_h, second_w;
#endif
    DEV Corner(const Args& p, int tile) {
        const int mt = tile / p.tiles_n;
        m0 = mt * BM;
        n0 = (tile - mt * p.tiles_n) * BN;
#if GROUPED
        c0 = n0 / p.group_k * p.group_c & ~7;
#endif
        image = h = w = 0;
#if SECOND_INPUT == 2
        second_image = m0 / p.pixels;
        const int place = m0 - second_image * p.pixels, line = place / p.width;
        second_h = line * p.second_stride_h;
        second_w = (place - line * p.width) * p.second_stride_w;
#endif
        if (IM2COL) {
            image = m0 / p.pixels;
            const int pixel = m0 - image * p.pixels, y = pixel / p.width;
            h = y * p.stride_h - p.pad_h;
            w = (pixel - y * p.width) * p.stride_w - p.pad_w;
        }
        if (HALO) {
            const int per = (p.height + p.rows - 1) / p.rows;
            image = mt / per;
            h = (mt - image * per) * p.rows * (DW ? DW : 1) - p.pad_h;
            w = -p.pad_w;
        }
    }
};

#if GROUPED
#define FIRST_CHANNEL at_tile.c0 +
#else
#define FIRST_CHANNEL
#endif

struct Walk {  // input coordinates of K step k
    int c, s, r;
    DEV Walk(const Args& p, int k) { int tap = k / p.csteps; c = k - tap * p.csteps; r = tap / p.taps_w; s = tap - r * p.taps_w; }
    DEV void next(const Args& p) { if (++c == p.csteps) { c = 0; if (++s == p.taps_w) { s = 0; ++r; } } }
};

#if DW
constexpr int DW_BYTES = (DW_R * DW_S + 1) * BK * 4;                        // taps and biases of a K step
constexpr int DW_PARTS = BK / 8, DW_RUN = DW_ROWS < 4 ? DW_ROWS : 4;
static_assert(HALO && !IN8 && !IM2COL && DW_ROWS % DW_RUN == 0 && DW_ROWS * 128 / DW_PARTS <= MI * 64, "depthwise");

DEV void load_bytes(u32 dst, const void* from, u32 bytes, u32 bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst), "l"(from), "r"(bytes), "r"(bar) : "memory");
}
DEV void shared_floats(u32 at, float (&v)[8]) {
    const float4 a = load_shared_f4(at), b = load_shared_f4(at + 16);
    v[0] = a.x; v[1] = a.y; v[2] = a.z; v[3] = a.w; v[4] = b.x; v[5] = b.y; v[6] = b.z; v[7] = b.w;
}
DEV void shared_halves(u32 at, float (&v)[8]) {
    u32 w[4];
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "r"(at));
#pragma unroll
    for (int i = 0; i < 4; ++i) { const float2 f = unpack(w[i]); v[2 * i] = f.x; v[2 * i + 1] = f.y; }
}

// Rows of a warpgroup's operand: a thread computes eight channels of DW_ROWS adjacent rows, DW_RUN at a time. In an input tile of stride 1 a tap is the
// same pixels at an offset, across image rows; results at the ends of rows, and of operand rows that no thread writes, are not stored.
DEV void depthwise_rows(const Args& p, u32 slot, u32 weights, u32 to, int first, int t) {
    const int part = t % DW_PARTS, row0 = first + t / DW_PARTS * DW_ROWS, last = p.rows * p.wide - 1;
#pragma unroll 1
    for (int row = row0; row < row0 + DW_ROWS; row += DW_RUN) {
        float sum[DW_RUN][8];
        shared_floats(weights + (DW_R * DW_S * BK + part * 8) * 4, sum[0]);
#pragma unroll
        for (int j = 1; j < DW_RUN; ++j)
#pragma unroll
            for (int e = 0; e < 8; ++e) sum[j][e] = sum[0][e];
#pragma unroll
        for (int r = 0; r < DW_R; ++r) {
            float w[DW_S][8];
#pragma unroll
            for (int s = 0; s < DW_S; ++s) shared_floats(weights + ((r * DW_S + s) * BK + part * 8) * 4, w[s]);
            if (DW == 1) {
                const u32 from = slot + (row + r * p.slot_wide) * ROW + part * 16;
#pragma unroll
                for (int i = 0; i < DW_RUN + DW_S - 1; ++i) {
                    float x[8];
                    shared_halves(from + i * ROW, x);
#pragma unroll
                    for (int s = 0; s < DW_S; ++s)
                        if (i >= s && i - s < DW_RUN)
#pragma unroll
                            for (int e = 0; e < 8; ++e) sum[i >= s && i - s < DW_RUN ? i - s : 0][e] = fmaf(x[e], w[s][e], sum[i >= s && i - s < DW_RUN ? i - s : 0][e]);
                }
            } else {
#pragma unroll
                for (int j = 0; j < DW_RUN; ++j) {
                    const int m = min(row + j, last), y = m / p.wide;
                    const u32 from = slot + ((y * DW + r) * p.slot_wide + (m - y * p.wide) * DW) * ROW + part * 16;
#pragma unroll
                    for (int s = 0; s < DW_S; ++s) {
                        float x[8];
                        shared_halves(from + s * ROW, x);
#pragma unroll
                        for (int e = 0; e < 8; ++e) sum[j][e] = fmaf(x[e], w[s][e], sum[j][e]);
                    }
                }
            }
        }
#pragma unroll
        for (int j = 0; j < DW_RUN; ++j) {
            const int m = row + j, mix = ROW == 128 ? m & 7 : ROW == 64 ? m >> 1 & 3 : m >> 2 & 1;
            u32 v[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) v[i] = pack(activate<DW_ACT>(sum[j][2 * i], p.dw_act), activate<DW_ACT>(sum[j][2 * i + 1], p.dw_act));
            asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to + m * ROW + ((part ^ mix) << 4)), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
        }
    }
}
#endif
