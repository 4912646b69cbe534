// Rounded to nearest when the tensor cores truncate the low 13 bits; the largest values are only truncated, so that they stay finite.
DEV u32 to_tf32(float v) {
    u32 bits = __float_as_uint(v);
    asm("{ .reg .pred p; .reg .f32 a; abs.f32 a, %1; setp.lt.f32 p, a, 0f7f7ff000; @p add.u32 %0, %0, 0x1000; }" : "+r"(bits) : "f"(v));
    return bits;
}
// Sixteen bytes at once: the compiler splits a float4 store into four if its values are not in adjacent registers.
DEV void store_four(float* to, float a, float b, float c, float d) {
    asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}
