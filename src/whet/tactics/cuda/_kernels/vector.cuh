// Eight elements of any float type as float registers: one 16-byte access for 16-bit types, two for f32. TYPE: 0 f32, 1 f16, 2 bf16.
template <int KIND> struct Element { static constexpr int BYTES = KIND == 0 ? 4 : 2; };
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
template <int KIND> DEV Vec8 load8(const u8* base, long long element) {
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
// Eight elements as they lie, or `fill` in every 32-bit word: several loads can be on their way before the first is unpacked.
template <int KIND> struct Raw { uint4 a, b; };
template <int KIND> DEV Raw<KIND> load_raw(const u8* base, long long element, bool inside, u32 fill = 0) {
    Raw<KIND> r;
    const uint4* p = reinterpret_cast<const uint4*>(base + element * Element<KIND>::BYTES);
    r.a = r.b = make_uint4(fill, fill, fill, fill);
    if (inside) { r.a = p[0]; if (KIND == 0) r.b = p[1]; }
    return r;
}
template <int KIND> DEV Vec8 unpack_raw(const Raw<KIND>& raw) {
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
    return unpack_as<KIND>(reinterpret_cast<const u16*>(base)[element]).x;
}
template <int KIND> DEV void store1(u8* base, long long element, float v) {
    if (KIND == 0) reinterpret_cast<float*>(base)[element] = v;
    else reinterpret_cast<u16*>(base)[element] = (u16)pack_as<KIND>(v, 0.f);
}
