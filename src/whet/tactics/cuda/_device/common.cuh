// Shared by all kernels: value types, activations, and wrappers for PTX instructions without a CUDA C++ intrinsic.
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
#define DEV __device__ __forceinline__

struct alignas(64) TensorMap { u64 words[16]; };  // filled by the host: cuTensorMapEncode*

// ---- pairs of 16-bit floats in a register (element 0 in the low half) ----
#if BF16
DEV float2 unpack(u32 v) { return make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u)); }
DEV u32 pack(float a, float b) { u32 r; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a)); return r; }
#else
DEV float2 unpack(u32 v) {
    float2 r;
    asm("{ .reg .f16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }" : "=f"(r.x), "=f"(r.y) : "r"(v));
    return r;
}
DEV u32 pack(float a, float b) { u32 r; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a)); return r; }
#endif

// ---- activations; max.NaN and min.NaN keep a NaN, as ONNX does ----
DEV float max_nan(float a, float b) { float r; asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r; }
DEV float min_nan(float a, float b) { float r; asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r; }
// Two special functions and three plain instructions: the exact forms of both functions also handle values below 2^-126, which are negligible next to 1.
DEV float exp2_fast(float x) { float r; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }
DEV float reciprocal(float x) { float r; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }
DEV float tanh_fast(float x) { return fmaf(reciprocal(1.f + exp2_fast(x * 2.8853900817779268f)), -2.f, 1.f); }   // off by about 2^-23
DEV float sigmoid(float x) { return reciprocal(1.f + exp2_fast(x * -1.4426950408889634f)); }
struct Act { float a, b; };  // clip: lower, upper; leaky and elu: slope; hardsigmoid: slope, offset
template <int KIND> DEV float activate(float x, Act p) {
    if (KIND == 0) return min_nan(max_nan(x, p.a), p.b);                               // clip, relu, relu6, none (infinite bounds)
    if (KIND == 1) return x * sigmoid(x);                                              // silu
    if (KIND == 2) return x * min_nan(max_nan(x * (1.f / 6.f) + .5f, 0.f), 1.f);       // hardswish
    if (KIND == 3) return .5f * x * (1.f + erff(x * .70710678f));                      // gelu
    if (KIND == 4) return sigmoid(x);
    if (KIND == 5) return tanhf(x);
    if (KIND == 6) return x >= 0.f ? x : p.a * x;                                      // leaky relu
    if (KIND == 7) return min_nan(max_nan(p.a * x + p.b, 0.f), 1.f);                   // hardsigmoid
    if (KIND == 8) return .5f * x * (1.f + tanhf(.79788456f * (x + .044715f * x * x * x)));  // gelu, tanh form
    if (KIND == 9) return x >= 0.f ? x : p.a * (__expf(x) - 1.f);                      // elu
    if (KIND == 10) return x * tanhf(x > 20.f ? x : log1pf(__expf(x)));                // mish
    return x;
}

// Of two values that are then converted to 16-bit floats or to 8 bits. SiLU as half of x * (1 + tanh(x / 2)): one special function instead of two (16 a clock and multiprocessor, the limit
// of SiLU). The instruction's tanh is off by at most 2^-11 of itself, so a result by 2^-12 of x: no more than rounding x to 16 bits.
DEV float silu_of_half(float x) { float t; asm("tanh.approx.f32 %0, %1;" : "=f"(t) : "f"(x)); return fmaf(x, t, x); }
// GELU with the same instruction: half of x * (1 + tanh(t)). For the exact form, t is an odd polynomial fitted to atanh(erf(x / sqrt(2))): the result is off by at most
// 2.6e-5, 5 % of the rounding of 1 to f16, besides the instruction's error. The polynomial falls from 6 on, so its argument is limited; tanh is 1 there.
DEV float gelu_of(float x, float t) { const float half = .5f * x; float y; asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(t)); return fmaf(half, y, half); }
DEV float gelu_16bit(float x) {
    const float s = fminf(x * x, 32.f);
    return gelu_of(x, x * fmaf(s, fmaf(s, -3.5203263e-4f, .037008822f), .79750439f));
}
DEV float gelu_tanh_16bit(float x) { return gelu_of(x, x * fmaf(x * x, .035677408f, .79788456f)); }
// With HALF_INPUTS the host has halved weights and biases, so both inputs are half of their value: a multiplication less.
template <int KIND, bool HALF_INPUTS = false> DEV void activate_two(float& x, float& y, Act p) {
    if (KIND == 1) {
        x = silu_of_half(HALF_INPUTS ? x : x * .5f);
        y = silu_of_half(HALF_INPUTS ? y : y * .5f);
        return;
    }
    if (KIND == 3) { x = gelu_16bit(x); y = gelu_16bit(y); return; }
    if (KIND == 8) { x = gelu_tanh_16bit(x); y = gelu_tanh_16bit(y); return; }
    x = activate<KIND>(x, p);
    y = activate<KIND>(y, p);
}

// ---- programmatic dependent launch: let the next kernel start; wait until the one in front is complete and visible ----
#if __CUDA_ARCH__ >= 900
DEV void let_next_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
DEV void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
#else   // launches follow each other
DEV void let_next_start() {}
DEV void wait_for_previous() {}
#endif

// ---- registers of each thread of a warpgroup: MORE waits until others have given theirs back ----
template <int REGISTER_COUNT, bool MORE> DEV void set_registers() {
    if (MORE) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTER_COUNT));
    else asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTER_COUNT));
}

// ---- one lane of a warp, in a form that the compiler knows ----
DEV bool elect() {
    u32 yes;
    asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(yes));
    return yes;
}

// ---- shared memory, barriers ----
DEV u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }
DEV void barrier_init(u32 bar, u32 count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count)); }
DEV void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEV void barrier_arrive(u32 bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory"); }
DEV void barrier_expect(u32 bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
DEV void barrier_wait(u32 bar, u32 parity) {
    asm volatile("{ .reg .pred p;\nagain: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra done;\nbra again;\ndone: }"
                 ::"r"(bar), "r"(parity) : "memory");
}
DEV void named_barrier(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
DEV u32 load_shared(u32 a) { u32 v; asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(a)); return v; }
DEV void store_shared(u32 a, u32 v) { asm volatile("st.shared.b32 [%0], %1;" ::"r"(a), "r"(v) : "memory"); }
DEV float2 load_shared_f2(u32 a) { float2 v; asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(a)); return v; }
DEV float4 load_shared_f4(u32 a) {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(a));
    return v;
}
DEV void store_shared_f4(u32 a, float x, float y, float z, float w) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(a), "f"(x), "f"(y), "f"(z), "f"(w) : "memory");
}
DEV void store_shared_f(u32 a, float v) { asm volatile("st.shared.f32 [%0], %1;" ::"r"(a), "f"(v) : "memory"); }

// ---- bulk tensor copies (TMA) ----
DEV void map_prefetch(const TensorMap* m) { asm volatile("prefetch.tensormap [%0];" ::"l"(m) : "memory"); }
DEV void load_box2(u32 dst, const TensorMap* m, u32 bar, int x, int y) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
                 ::"r"(dst), "l"(m), "r"(bar), "r"(x), "r"(y) : "memory");
}
DEV void load_box4(u32 dst, const TensorMap* m, u32 bar, int x, int y, int z, int w) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];"
                 ::"r"(dst), "l"(m), "r"(bar), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}
DEV void load_window(u32 dst, const TensorMap* m, u32 bar, int c, int w, int h, int n, u16 dw, u16 dh) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2], {%7, %8};"
                 ::"r"(dst), "l"(m), "r"(bar), "r"(c), "r"(w), "r"(h), "r"(n), "h"(dw), "h"(dh) : "memory");
}
DEV void store_box2(const TensorMap* m, u32 src, int x, int y) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(m), "r"(src), "r"(x), "r"(y) : "memory");
}
DEV void store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int PENDING = 0> DEV void store_wait_read() { asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory"); }
DEV void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- clusters ----
// The arrival orders no data: it says that this block runs and has set up its barriers (barrier_init_fence).
DEV void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
DEV void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
DEV u32 remote_address(u32 a, u32 rank) { u32 r; asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(rank)); return r; }
DEV void store_remote(u32 a, float x, float y, u32 bar) {  // reports its bytes to `bar`, which is in the same block
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(a), "f"(x), "f"(y), "r"(bar) : "memory");
}
DEV void store_remote4(u32 a, float x, float y, float z, float w, u32 bar) {  // twice as fast as two stores of eight bytes
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
                 ::"r"(a), "f"(x), "f"(y), "f"(z), "f"(w), "r"(bar) : "memory");
}

// Four lanes hold parts 0..3 of items v[0..3]; afterwards lane q holds all parts of item q. Its own inverse.
DEV void transpose_quad(u32 (&v)[4], int lane) {
    const bool odd = lane & 1, high = lane & 2;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const u32 got = __shfl_xor_sync(~0u, odd ? v[i] : v[i + 1], 1);
        if (odd) v[i] = got; else v[i + 1] = got;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const u32 got = __shfl_xor_sync(~0u, high ? v[i] : v[i + 2], 2);
        if (high) v[i] = got; else v[i + 2] = got;
    }
}

// Four 8x8 matrices of 16-bit values, each lane giving the address of a row (16 bytes): an operand's fragment of 16 x 16.
DEV void load_fragment(u32 (&f)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(f[0]), "=r"(f[1]), "=r"(f[2]), "=r"(f[3]) : "r"(at));
}
DEV void store_fragment(const u32 (&f)[4], u32 at) {  // the way back
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(f[0]), "r"(f[1]), "r"(f[2]), "r"(f[3]) : "memory");
}

// ---- tensor cores ----
DEV void mma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEV void mma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> DEV void mma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
// A K-major operand in shared memory, rows of ROW bytes with the swizzle of that width, eight rows to a pattern.
template <int ROW> DEV u64 operand(u32 address) {
    const u64 layout = ROW == 128 ? 1 : ROW == 64 ? 2 : 3;
    return (u64)((address & 0x3ffff) >> 4) | (1ull << 16) | ((u64)(ROW * 8 / 16) << 32) | (layout << 62);
}
