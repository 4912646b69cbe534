// The pixels of the image under a tile of a first convolution, on their way to a thread: as floats, or as integers (TO, and QUANT of a float image).
// Included after Args and Tile of stem.cu; uses its constants.
#if TO
typedef u32 Number;
typedef int Accumulator;
#else
typedef float Number;
typedef float Accumulator;
#endif

#if TO
DEV u32 pixel(const Args& a, const u8* image, int at) {
#if defined(QUANT) && QUANT
    const float y = rintf(load1<FROM>(image, at) * a.image_per_step) + (float)a.in_zero;
    return y == y ? (u32)(int)fminf(fmaxf(y, IN8 == 4 ? 0.f : -128.f), IN8 == 4 ? 255.f : 127.f) & 0xff : 0;
#else
    return image[at];
#endif
}
#endif

// This thread's pixels of the image under a tile; zeros outside.
DEV void fetch(const Args& a, const Tile& t, Number (&v)[EACH][C * UNIT]) {
    const int y0 = (t.ty * DOWN - POOL_PAD) * STRIDE_H - a.pad_h, x0 = (t.tx * RIGHT - POOL_PAD) * STRIDE_W - a.pad_w, plane = a.h * a.w;
    const u8* image = a.input + (long long)t.n * plane * C * Element<FROM>::BYTES;
#if PAIRS
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
        const int i = threadIdx.x + j * THREADS, r = i / (COLUMNS / 2), y = y0 + r, x = x0 + (i - r * (COLUMNS / 2)) * 2, at = y * a.w + x;
        const bool inside = (j + 1 < EACH || i < UNITS) && (u32)y < (u32)a.h && (u32)x < (u32)a.w;
#pragma unroll
        for (int c = 0; c < C; ++c) {
            const float2 two = inside ? *reinterpret_cast<const float2*>(image + (c * plane + at) * 4) : make_float2(0.f, 0.f);
            v[j][c] = two.x;
            v[j][C + c] = two.y;
        }
    }
#else
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
        const int i = threadIdx.x + j * THREADS, r = i / COLUMNS, y = y0 + r, x = x0 + i - r * COLUMNS, at = y * a.w + x;
        const bool inside = (j + 1 < EACH || i < PIXELS) && (u32)y < (u32)a.h && (u32)x < (u32)a.w;
#pragma unroll
        for (int c = 0; c < C; ++c) {
#if TO
            const int place = NHWC ? at * C + c : c * plane + at;
            v[j][c] = inside ? pixel(a, image, place) : (u32)a.in_zero & 0xff;
#else
            v[j][c] = inside ? load1<FROM>(image, NHWC ? at * C + c : c * plane + at) : 0.f;
#endif
        }
    }
#endif
}
