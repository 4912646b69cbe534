// Eight elements of any type as float registers: 16-byte accesses for 16-bit types, two for f32, 8 bytes for integers.
// Types: 0 f32, 1 f16, 2 bf16, 3 i8, 4 u8, 5 f8e4m3. Integers are rounded (ties to even) and saturated when stored.
template <int KIND> struct Element { static constexpr int BYTES = KIND == 0 ? 4 : KIND >= 3 ? 1 : 2; };
struct Vec8 { float v[8]; };

template <int KIND> DEV float2 unpack_as(u32 w) {
    float2 r;
    if (KIND == 2) return make_float2(__uint_as_float(w << 16), __uint_as_float(w & 0xffff0000u));
    asm("{ .reg .f16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }" : "=f"(r.x), "=f"(r.y) : "r"(w));
    return r;
}
template <int KIND> DEV u32 pack_as(float a, float b) {
    u32 r;
    if (KIND == 2) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a));
    else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a));
    return r;
}
// Byte i of a word as a float, by the bits of 2^23 + byte: two instructions at full rate; a conversion runs at a quarter of it.
template <int KIND> DEV float byte_as_float(u32 w, int i) {
    const u32 bits = __byte_perm(KIND == 3 ? w ^ 0x80808080u : w, 0x4b000000u, 0x7440 + i);
    return __uint_as_float(bits) - (KIND == 3 ? 8388736.f : 8388608.f);
}
// Rounded and saturated; NaN becomes the lowest value.
template <int KIND> DEV u32 float_as_byte(float x) {
    const float low = KIND == 3 ? -128.f : 0.f, high = KIND == 3 ? 127.f : 255.f;
    return __float_as_uint(fminf(fmaxf(x, low), high) + 12582912.f);  // 1.5 * 2^23: the integer is in the low bits
}
// FOLD: v into [0, 1], the range of results. A clip's limits are those of the range. For SiLU v is a fraction of the range; act.a is the factor of the exponent
// of 2, late[e] is the position of 0 in the range and the residual after the activation. Two values share a reciprocal: special functions are the bottleneck
// of SiLU (16 a clock and multiprocessor). Beyond an exponent of 60 the result is 0.
template <int KIND, int N> DEV void fold(float (&v)[N], Act act, const float (&late)[N]) {
    if (KIND != 1) {
#pragma unroll
        for (int e = 0; e < N; ++e) v[e] = __saturatef(v[e]);
        return;
    }
#pragma unroll
    for (int e = 0; e < N; e += 2) {
        const float a = 1.f + exp2_fast(fminf(v[e] * act.a, 60.f)), b = 1.f + exp2_fast(fminf(v[e + 1] * act.a, 60.f)), r = reciprocal(a * b);
        v[e] = __saturatef(fmaf(v[e], r * b, late[e]));
        v[e + 1] = __saturatef(fmaf(v[e + 1], r * a, late[e + 1]));
    }
}
// Four integers from values in [0, 1]: span and base (1.5 * 2^23 + lowest) put them into the low bits. The limits cost nothing: products saturate.
DEV u32 steps_of(float a, float b, float c, float d, float span, float base) {
    const u32 low = __byte_perm(__float_as_uint(fmaf(a, span, base)), __float_as_uint(fmaf(b, span, base)), 0x0040);
    const u32 high = __byte_perm(__float_as_uint(fmaf(c, span, base)), __float_as_uint(fmaf(d, span, base)), 0x0040);
    return __byte_perm(low, high, 0x5410);
}
template <int KIND> DEV u32 bytes_of(float a, float b, float c, float d) {
    if (KIND == 5) {
        u32 r;
        asm("{ .reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, %2, %1; cvt.rn.satfinite.e4m3x2.f32 h, %4, %3; mov.b32 %0, {l, h}; }"
            : "=r"(r) : "f"(a), "f"(b), "f"(c), "f"(d));
        return r;
    }
    const u32 low = __byte_perm(float_as_byte<KIND>(a), float_as_byte<KIND>(b), 0x0040);
    const u32 high = __byte_perm(float_as_byte<KIND>(c), float_as_byte<KIND>(d), 0x0040);
    return __byte_perm(low, high, 0x5410);
}
// A value in steps of an 8-bit type, which storing rounds and saturates. NaN becomes 0, and stays in e4m3.
template <int KIND> DEV float in_steps(float x, float per_step, float zero) {
    if (KIND == 5) return x * per_step;
    const float y = rintf(x * per_step) + zero;
    return y == y ? y : 0.f;
}

template <int KIND> DEV Vec8 words_as_floats(uint2 w) {
    Vec8 r;
    if (KIND == 5) {
        const u32 word[2] = {w.x, w.y};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            u32 low, high;
            asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h; }" : "=r"(low), "=r"(high) : "r"(word[i]));
            const float2 a = unpack_as<1>(low), b = unpack_as<1>(high);
            r.v[i * 4] = a.x; r.v[i * 4 + 1] = a.y; r.v[i * 4 + 2] = b.x; r.v[i * 4 + 3] = b.y;
        }
        return r;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) { r.v[i] = byte_as_float<KIND>(w.x, i); r.v[i + 4] = byte_as_float<KIND>(w.y, i); }
    return r;
}
template <int KIND> DEV Vec8 load8(const u8* base, long long element) {
    if (KIND >= 3) return words_as_floats<KIND>(*reinterpret_cast<const uint2*>(base + element));
    Vec8 r;
    const uint4* p = reinterpret_cast<const uint4*>(base + element * Element<KIND>::BYTES);
    if (KIND == 0) {
        const uint4 a = p[0], b = p[1];
        const u32 w[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
        for (int i = 0; i < 8; ++i) r.v[i] = __uint_as_float(w[i]);
    } else {
        const uint4 a = p[0];
        const u32 w[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) { const float2 f = unpack_as<KIND>(w[i]); r.v[2 * i] = f.x; r.v[2 * i + 1] = f.y; }
    }
    return r;
}
// Eight elements unconverted, or `fill` in every 32-bit word: several loads can be in flight before the first is unpacked.
template <int KIND> struct Raw { uint4 a, b; };
template <int KIND> DEV Raw<KIND> load_raw(const u8* base, long long element, bool inside, u32 fill = 0) {
    Raw<KIND> r;
    const uint4* p = reinterpret_cast<const uint4*>(base + element * Element<KIND>::BYTES);
    r.a = r.b = make_uint4(fill, fill, fill, fill);
    if (KIND >= 3) {
        if (inside) { const uint2 v = *reinterpret_cast<const uint2*>(base + element); r.a.x = v.x; r.a.y = v.y; }
    } else if (inside) { r.a = p[0]; if (KIND == 0) r.b = p[1]; }
    return r;
}
template <int KIND> DEV Vec8 unpack_raw(const Raw<KIND>& raw) {
    if (KIND >= 3) return words_as_floats<KIND>(make_uint2(raw.a.x, raw.a.y));
    Vec8 r;
    const u32 w[8] = {raw.a.x, raw.a.y, raw.a.z, raw.a.w, raw.b.x, raw.b.y, raw.b.z, raw.b.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        if (KIND == 0) r.v[i] = __uint_as_float(w[i]);
        else if (i < 4) { const float2 f = unpack_as<KIND>(w[i]); r.v[2 * i] = f.x; r.v[2 * i + 1] = f.y; }
    }
    return r;
}
template <int KIND> DEV void store8(u8* base, long long element, const Vec8& r) {
    if (KIND >= 3) {
        const float* v = r.v;
        *reinterpret_cast<uint2*>(base + element) = make_uint2(bytes_of<KIND>(v[0], v[1], v[2], v[3]), bytes_of<KIND>(v[4], v[5], v[6], v[7]));
        return;
    }
    uint4* p = reinterpret_cast<uint4*>(base + element * Element<KIND>::BYTES);
    if (KIND == 0) {
        const float* v = r.v;
        p[0] = make_uint4(__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]), __float_as_uint(v[3]));
        p[1] = make_uint4(__float_as_uint(v[4]), __float_as_uint(v[5]), __float_as_uint(v[6]), __float_as_uint(v[7]));
    } else {
        p[0] = make_uint4(pack_as<KIND>(r.v[0], r.v[1]), pack_as<KIND>(r.v[2], r.v[3]), pack_as<KIND>(r.v[4], r.v[5]), pack_as<KIND>(r.v[6], r.v[7]));
    }
}
template <int KIND> DEV float load1(const u8* base, long long element) {
    if (KIND == 0) return reinterpret_cast<const float*>(base)[element];
    if (KIND == 5) return words_as_floats<5>(make_uint2(base[element], 0)).v[0];
    if (KIND >= 3) return byte_as_float<KIND>(base[element], 0);
    return unpack_as<KIND>(reinterpret_cast<const u16*>(base)[element]).x;
}
template <int KIND> DEV void store1(u8* base, long long element, float v) {
    if (KIND == 0) reinterpret_cast<float*>(base)[element] = v;
    else if (KIND >= 3) base[element] = (u8)bytes_of<KIND>(v, 0.f, 0.f, 0.f);
    else reinterpret_cast<u16*>(base)[element] = (u16)pack_as<KIND>(v, 0.f);
}
