// Values of any element type as Number: f32 for floats up to 32 bits, f64 for f64, 64-bit integers for integers and bools.
// Kinds: 0 f32, 1 f16, 2 bf16, 3 i64, 4 i32, 5 u8, 6 i8, 7 bool, 8 f64, 9 i16, 10 u16, 11 u32, 12 u64. Floats are truncated to integers.
template <int KIND, typename Number> DEV Number number(const u8* base, long long i) {
    if (KIND == 3) return (Number)reinterpret_cast<const long long*>(base)[i];
    if (KIND == 4) return (Number)reinterpret_cast<const int*>(base)[i];
    if (KIND == 5 || KIND == 7) return (Number)base[i];
    if (KIND == 6) return (Number)reinterpret_cast<const signed char*>(base)[i];
    if (KIND == 8) return (Number)reinterpret_cast<const double*>(base)[i];
    if (KIND == 9) return (Number)reinterpret_cast<const short*>(base)[i];
    if (KIND == 10) return (Number)reinterpret_cast<const u16*>(base)[i];
    if (KIND == 11) return (Number)reinterpret_cast<const u32*>(base)[i];
    if (KIND == 12) return (Number)reinterpret_cast<const u64*>(base)[i];
    return (Number)load1<KIND < 3 ? KIND : 0>(base, i);
}

template <int KIND, typename Number> DEV void store(u8* base, long long i, Number v) {
    if (KIND == 3) reinterpret_cast<long long*>(base)[i] = (long long)v;
    else if (KIND == 4) reinterpret_cast<int*>(base)[i] = (int)(long long)v;
    else if (KIND == 5) base[i] = (u8)(long long)v;
    else if (KIND == 6) reinterpret_cast<signed char*>(base)[i] = (signed char)(long long)v;
    else if (KIND == 7) base[i] = v != 0;
    else if (KIND == 8) reinterpret_cast<double*>(base)[i] = (double)v;
    else if (KIND == 9) reinterpret_cast<short*>(base)[i] = (short)(long long)v;
    else if (KIND == 10) reinterpret_cast<u16*>(base)[i] = (u16)(long long)v;
    else if (KIND == 11) reinterpret_cast<u32*>(base)[i] = (u32)(long long)v;
    else if (KIND == 12) reinterpret_cast<u64*>(base)[i] = (u64)v;
    else store1<KIND < 3 ? KIND : 0>(base, i, (float)v);
}

// An index into an axis; negative ones count from the end, others outside become the nearest inside.
DEV long long inside(long long k, long long size) {
    if (k < 0) k += size;
    return k < 0 ? 0 : k >= size ? size - 1 : k;
}
