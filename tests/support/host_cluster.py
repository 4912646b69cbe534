"""CUDA kernels whose threads cooperate (clusters, warp shuffles, mma.sync, st.async), run as C++ on the host: each thread is a coroutine.

A thread runs until it has to wait: for its warp, its block, its cluster or an mbarrier. Errors are a launch in which all threads wait, bytes that
arrive at a block that has exited, and more arrivals at an mbarrier than it counts. Warps run in random order, by `seed`.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from support.host_cuda import align_arguments, compile_for_host
from whet.network import Layer, static_shape, to_stored
from whet.tactics._base import Args, Config, Operand, Signature
from whet.tactics.cuda._device.arguments import Arguments, emit_c_structs
from whet.tactics.cuda._device.source import list_kernel_paths

_RUNTIME = r"""
#include <ucontext.h>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <vector>
using namespace std;
typedef unsigned char u8; typedef unsigned short u16; typedef unsigned int u32; typedef unsigned long long u64;
#define DEV inline
#define __global__
#define __grid_constant__
#define __align__(n)
#define __launch_bounds__(...)
struct float4 { float x, y, z, w; }; struct uint4 { u32 x, y, z, w; }; struct uint2 { u32 x, y; }; struct float2 { float x, y; };
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
struct Dim { unsigned x, y, z; };
struct Act { float a, b; };

struct Barrier { int count = 0, arrived = 0; u64 phase = 0; long tx = 0; };
struct Meeting { int arrived = 0, all = 0; u64 generation = 0; };
struct Warp { Meeting meeting; int asleep = 0; u32 words[32]; const u32* a[32]; u32 b[32][2]; };
struct Block {
    vector<u8> memory;
    Meeting meeting; Meeting* cluster; Block* first;
    Barrier barriers[16];
    vector<Warp> warps;
    int running;
};
struct Thread {
    ucontext_t context; vector<u8> stack;
    Block* block; Warp* warp;
    int index, block_index, block_y, block_z; u64 cluster_generation;
    bool done = false;
};
static Thread* self; static ucontext_t scheduler; static bool progress; static const char* failure;
static void fail(const char* text) { if (!failure) failure = text; swapcontext(&self->context, &scheduler); }
static void pause() { swapcontext(&self->context, &scheduler); }
static void join(Meeting& m) {
    const u64 generation = m.generation;
    if (++m.arrived == m.all) { m.arrived = 0; ++m.generation; progress = true; }
    else while (m.generation == generation) pause();
}
#define blockIdx (Dim{(unsigned)self->block_index, (unsigned)self->block_y, (unsigned)self->block_z})
#define threadIdx (Dim{(unsigned)self->index, 0u, 0u})
#define blockDim (Dim{(unsigned)self->block->warps.size() * 32u, 1u, 1u})
static void let_next_start() {}
static void wait_for_previous() {}
static void __syncthreads() { join(self->block->meeting); }
static u32 __shfl_xor_sync(u32, u32 v, int mask) {
    Warp& w = *self->warp;
    w.words[self->index % 32] = v;
    join(w.meeting);
    const u32 r = w.words[(self->index % 32) ^ mask];
    join(w.meeting);
    return r;
}
static float __uint_as_float(u32 v) { float r; memcpy(&r, &v, 4); return r; }
static u32 __float_as_uint(float v) { u32 r; memcpy(&r, &v, 4); return r; }
static float __int_as_float(int v) { return __uint_as_float((u32)v); }
static float __shfl_xor_sync(u32 all, float v, int mask) { return __uint_as_float(__shfl_xor_sync(all, __float_as_uint(v), mask)); }
static u32 __byte_perm(u32 a, u32 b, u32 s) {
    const u64 all = (u64)b << 32 | a;
    u32 r = 0;
    for (int i = 0; i < 4; ++i) r |= (u32)(all >> 8 * (s >> 4 * i & 7) & 255) << 8 * i;
    return r;
}
static float __fdiv_rn(float a, float b) { return a / b; }
static float max_nan(float a, float b) { return a != a || b != b ? NAN : a > b ? a : b; }
static float min_nan(float a, float b) { return a != a || b != b ? NAN : a < b ? a : b; }
template <int KIND> float in_steps(float x, float per_step, float zero) { return KIND == 5 ? x * per_step : rintf(x * per_step) + zero; }
static float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }
template <int KIND> u16 narrow(float v) {
    if (KIND == 2) { const u32 bits = __float_as_uint(v); return v != v ? 0x7fc0 : (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16); }
    const _Float16 half = (_Float16)v;
    u16 r; memcpy(&r, &half, 2); return r;
}
template <int KIND> float widen(u16 v) {
    if (KIND == 2) return __uint_as_float((u32)v << 16);
    _Float16 half; memcpy(&half, &v, 2); return (float)half;
}
template <int KIND> u32 pack_as(float a, float b) { return narrow<KIND>(a) | (u32)narrow<KIND>(b) << 16; }
template <int KIND> float2 unpack_as(u32 v) { return {widen<KIND>((u16)v), widen<KIND>((u16)(v >> 16))}; }
template <int KIND> float load1(const u8* base, long long i) {
    if (KIND == 0) return reinterpret_cast<const float*>(base)[i];
    return widen<KIND>(reinterpret_cast<const u16*>(base)[i]);
}
template <int KIND> void store1(u8* base, long long i, float v) {
    if (KIND == 0) reinterpret_cast<float*>(base)[i] = v;
    else reinterpret_cast<u16*>(base)[i] = narrow<KIND>(v);
}
template <int KIND> struct Element { static constexpr int BYTES = KIND == 0 ? 4 : 2; };
struct Vec8 { float v[8]; };
template <int KIND> struct Raw { Vec8 values; };
template <int KIND> Vec8 load8(const u8* base, long long i) {
    Vec8 r;
    for (int e = 0; e < 8; ++e) r.v[e] = load1<KIND>(base, i + e);
    return r;
}
template <int KIND> Raw<KIND> load_raw(const u8* base, long long i, bool inside, u32 = 0) {
    return inside ? Raw<KIND>{load8<KIND>(base, i)} : Raw<KIND>{};
}
template <int KIND> Vec8 unpack_raw(const Raw<KIND>& raw) { return raw.values; }
template <int KIND> void store8(u8* base, long long i, const Vec8& r) { for (int e = 0; e < 8; ++e) store1<KIND>(base, i + e, r.v[e]); }
template <int KIND> float activate(float x, Act p) {
    static_assert(KIND == 0 || KIND == 1 || KIND == 4 || KIND == 7, "the host has clips, SiLU, and (hard) sigmoids only");
    if (KIND == 1) return x * sigmoid(x);
    if (KIND == 4) return sigmoid(x);
    if (KIND == 7) return min_nan(max_nan(p.a * x + p.b, 0.f), 1.f);
    return min_nan(max_nan(x, p.a), p.b);
}
// Static arrays follow each other from the start of a block's memory: a place for each declaration of a kernel.
static size_t static_bytes;
static size_t reserve_static(size_t size) { const size_t at = static_bytes; static_bytes += (size + 15) / 16 * 16; return at; }
// d[16 x 8] += a[16 x 16] @ b[16 x 8], with the fragments of mma.m16n8k16
template <int KIND> void multiply_as(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    Warp& w = *self->warp;
    const int lane = self->index % 32, g = lane / 4, q = lane % 4;
    w.a[lane] = a; w.b[lane][0] = b0; w.b[lane][1] = b1;
    join(w.meeting);
    for (int e = 0; e < 4; ++e)
        for (int k = 0; k < 16; ++k) {
            const u32 from_a = w.a[g * 4 + k % 8 / 2][e / 2 + k / 8 * 2], from_b = w.b[(q * 2 + e % 2) * 4 + k % 8 / 2][k / 8];
            const float2 x = unpack_as<KIND>(from_a), y = unpack_as<KIND>(from_b);
            d[e] += k % 2 ? x.y * y.y : x.x * y.x;
        }
    join(w.meeting);
}
// Addresses: bytes from the start of a block's memory, with the block's number in the cluster from bit 24 on. Barriers are counted outside it.
static u32 own_rank() { return (u32)(self->block - self->block->first); }
static u32 shared_address(const void* p) { return (u32)((const u8*)p - self->block->memory.data()) | own_rank() << 24; }
static u32 remote_address(u32 a, u32 rank) { return (a & 0xffffff) | rank << 24; }
static Barrier& barrier_at(u32 a) { return self->block->first[a >> 24].barriers[(a & 0xffffff) / 8]; }
static void settle(Barrier& b) { if (b.arrived == b.count && b.tx == 0) { b.arrived = 0; ++b.phase; progress = true; } }
static void barrier_init(u32 a, u32 count) { barrier_at(a) = Barrier{(int)count}; }
static void barrier_init_fence() {}
static void barrier_expect(u32 a, u32 bytes) {
    Barrier& b = barrier_at(a);
    if (++b.arrived > b.count) fail("a barrier has more arrivals than it counts");
    b.tx += bytes; settle(b);
}
static void barrier_wait(u32 a, u32 parity) { while ((barrier_at(a).phase & 1) == parity) pause(); }
static void store_remote4(u32 a, float x, float y, float z, float w, u32 bar) {
    if (a >> 24 != bar >> 24) fail("a store and its barrier are in different blocks");
    Block& to = self->block->first[a >> 24];
    if (!to.running) fail("bytes arrive at a block that has exited");
    if ((a & 0xffffff) % 16 || (a & 0xffffff) + 16 > to.memory.size()) fail("a store is outside shared memory or not aligned");
    const float v[4] = {x, y, z, w};
    memcpy(to.memory.data() + (a & 0xffffff), v, 16);
    Barrier& b = barrier_at(bar);
    b.tx -= 16; settle(b);
}
static void cluster_arrive() {
    Meeting& m = *self->block->cluster;
    self->cluster_generation = m.generation;
    if (++m.arrived == m.all) { m.arrived = 0; ++m.generation; progress = true; }
}
static void cluster_arrive_release() { cluster_arrive(); }
static void cluster_wait() { while (self->block->cluster->generation == self->cluster_generation) pause(); }

using Entry = void (*)(const void*);
static const char* run_grid(Entry entry, const void* given, int blocks, int rows, int layers, int threads, int cluster, int shared, int seed) {
    mt19937 random(seed);
    failure = nullptr;
    static const void* arguments; arguments = given;
    static Entry function; function = entry;
    for (int y = 0; y < rows * layers; ++y)
        for (int start = 0; start < blocks; start += cluster) {
            vector<Block> group(cluster);
            Meeting all; all.all = cluster * threads;
            vector<unique_ptr<Thread>> running;
            for (int i = 0; i < cluster; ++i) {
                Block& b = group[i];
                b.memory.assign(shared, 0xff); b.meeting.all = threads; b.cluster = &all; b.first = group.data(); b.running = threads;
                b.warps.resize(threads / 32);
                for (auto& w : b.warps) w.meeting.all = 32;
                for (int t = 0; t < threads; ++t) {
                    auto x = make_unique<Thread>();
                    x->block = &b; x->warp = &b.warps[t / 32]; x->index = t; x->block_index = start + i; x->block_y = y % rows; x->block_z = y / rows;
                    x->stack.resize(32 << 10);
                    getcontext(&x->context);
                    x->context.uc_stack.ss_sp = x->stack.data(); x->context.uc_stack.ss_size = x->stack.size(); x->context.uc_link = &scheduler;
                    makecontext(&x->context, (void (*)())+[] { function(arguments); self->done = true; --self->block->running; progress = true; }, 0);
                    running.push_back(move(x));
                }
            }
            while (!running.empty()) {
                progress = false;
                // warps in a new order each time; some sleep for as long as others take for several steps
                vector<int> order(running.size() / 32 + 1);
                for (size_t i = 0; i < order.size(); ++i) order[i] = (int)i;
                shuffle(order.begin(), order.end(), random);
                bool skipped = false;
                for (int group_of : order) {
                    if ((size_t)group_of * 32 >= running.size()) continue;
                    Warp& warp = *running[group_of * 32]->warp;
                    if (warp.asleep > 0) { --warp.asleep; skipped = true; continue; }
                    if (random() % 256 == 0) warp.asleep = random() % 600;
                    for (size_t i = group_of * 32; i < min(running.size(), (size_t)(group_of + 1) * 32); ++i) {
                        self = running[i].get();
                        if (!self->done) swapcontext(&scheduler, &self->context);
                        if (failure) return failure;
                    }
                }
                running.erase(remove_if(running.begin(), running.end(), [](auto& x) { return x->done; }), running.end());
                if (!progress && !skipped) return "all threads wait";
            }
        }
    return nullptr;
}
"""


@dataclass(frozen=True)
class ClusterLaunch:
    """A launch whose arguments contain addresses of host memory."""

    kernel: str  # file
    entry: str
    constants: Mapping[str, Any]
    arguments: bytes
    grid: tuple[int, int, int]
    threads: int
    cluster: int
    shared: int

    @property
    def instance(self) -> str:
        """Equal for launches of functions of the same text."""
        return f"{self.kernel} {sorted(self.constants.items())}"

    @staticmethod
    def of(
        entry: str, arguments: Arguments, constants: Mapping[str, Any], grid: tuple[int, int, int], block: int, *,
        shared: int = 0, cluster: int = 1, label: str = "",
    ) -> ClusterLaunch:  # fmt: skip
        """The host's form of a tactic's launch."""
        return ClusterLaunch(arguments.kernel_file, entry, dict(constants), arguments.pack(), grid, block, cluster, shared)


def _host_text(launch: ClusterLaunch) -> str:
    """The kernel after its shared headers, with shared memory in the block's memory. Static arrays follow the dynamic memory."""
    text = list_kernel_paths()[launch.kernel].read_text()
    text = re.sub(r'#include "(common|vector|mma).cuh"', "", text)
    text = re.sub(r'#include "(\w+\.cuh)"', lambda include: list_kernel_paths()[include.group(1)].read_text(), text)
    text = text.replace('#include "arguments"', emit_c_structs(launch.kernel)).replace('extern "C" __global__', "static")
    text = re.sub(r"DEV void cluster_arrive_release.*", "", text)
    text = re.sub(r"extern __shared__ .*? u8 (\w+)\[\];", r"u8* \1 = self->block->memory.data();", text)
    place = r"static const size_t \2_at = reserve_static(sizeof(\1\3)); auto& \2 = *reinterpret_cast<\1(*)\3>(self->block->memory.data() + \2_at);"
    text = re.sub(r"__shared__ (?:__align__\(\d+\) )?(\w+) (\w+)((?:\[[^;]*\])+);", place, text)
    multiply = "DEV void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { multiply_as<BF16 ? 2 : 1>(d, a, b0, b1); }\n"
    return (multiply if "multiply(" in text else "") + text


def address(a: np.ndarray | None) -> int:
    """The address of an array's values; 0 without an array."""
    return 0 if a is None else a.ctypes.data


def plan_on_host(
    monkeypatch: Any, module: ModuleType, tactic: Any, layer: Layer, arrays: Sequence[Any], signature: Signature, config: Config, backend: Any
) -> tuple[list[ClusterLaunch], Any, list[np.ndarray | None], list[np.ndarray], Any]:
    """The launches of a layer by a tactic of `module`; the planned kernel; its inputs and outputs as stored, and other memory that must stay alive
    until the launches have run. Outputs and scratch memory have values that a kernel must overwrite."""
    launches: list[ClusterLaunch] = []

    def record(*operands: Any, **options: Any) -> ClusterLaunch:
        launches.append(ClusterLaunch.of(*operands, **options))
        return launches[-1]

    monkeypatch.setattr(module, "launch", record)
    kernel = tactic.plan(layer, signature, config, backend)
    with np.errstate(all="ignore"):
        ins = [None if a is None or o is None else store(a, o) for a, o in zip(arrays, signature.inputs, strict=True)]
        outs = [store(np.full(static_shape(t.shape), 77, np.float32), o) for t, o in zip(layer.outputs, signature.outputs, strict=True)]
    packed, scratch = [p.make() for p in kernel.packed], np.full(kernel.scratch, 0xFF, np.uint8)
    assert [p.nbytes for p in packed] == [p.nbytes for p in kernel.packed]
    kernel.launches(Args(tuple(map(address, ins)), tuple(map(address, outs)), tuple(map(address, packed)), address(scratch)))
    return launches, kernel, ins, outs, (packed, scratch)


def store(array: np.ndarray, operand: Operand) -> np.ndarray:
    """A copy in a storage type and format."""
    return np.array(to_stored(array.astype(operand.dtype.numpy), operand.format), order="C")


def run_on_host(launches: Sequence[ClusterLaunch], seed: int = 0) -> None:
    """Runs launches one after the other; their kernels are compiled together. Raises AssertionError if one of them cannot end."""
    text, numbers = _RUNTIME, dict[str, int]()
    for x in launches:
        if x.instance in numbers:
            continue
        n = numbers[x.instance] = len(numbers)
        text += "".join(f"#define {k} {v}\n" for k, v in x.constants.items()) + f"namespace n{n} {{\n{_host_text(x)}\n}}\n"
        text += "".join(f"#undef {k}\n" for k in x.constants)
        for entry in {y.entry: None for y in launches if y.instance == x.instance}:
            text += f"""
            extern "C" const char* run{n}_{entry}(const void* given, int x, int y, int z, int threads, int cluster, int shared, int seed) {{
                auto entry = +[](const void* p) {{ n{n}::{entry}(*reinterpret_cast<const n{n}::Args*>(p)); }};
                return run_grid(entry, given, x, y, z, threads, cluster, shared, seed);
            }}
            """
    compiled = compile_for_host(text, "-O1")
    for x in launches:
        _memory, at = align_arguments(x.arguments)
        run = compiled[f"run{numbers[x.instance]}_{x.entry}"]
        run.restype = ctypes.c_char_p
        static = 1 << 18  # bytes for arrays that are not dynamic, those of all kernels
        said = run(ctypes.c_void_p(at), *x.grid, x.threads, x.cluster, x.shared or static, seed)
        assert said is None, f"{x.entry}: {said.decode()}"
