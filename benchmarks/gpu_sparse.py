"""2:4 sparse against dense on one GPU: matrix products and convolutions as single kernels, with synthetic weights.

    python benchmarks/gpu_sparse.py [--cases TEXT,...] [--seconds N] [--tiles N]       $OUT/sparse.json, and a table
    python benchmarks/gpu_sparse.py --compile [--cases TEXT,...] [--tiles N]           compiles the kernels of the cases; needs no GPU
    python benchmarks/gpu_sparse.py --networks resnet34:128:int8,bert_large_linear:32  $OUT/sparse_networks.json
    python benchmarks/gpu_sparse.py --merge PART... [--networks any] [--result NAME]   results/h200/sparse.json, sparse_networks.json or NAME.json

A case is a shape in one precision. Dense: the fastest of whet's own tensor-core convolution over its candidate tiles, of cuBLASLt through torch
for products (INT8 with INT32 results, the only ones that torch offers), and of cuDNN through torch for convolutions of floats (torch has no INT8
convolution). Sparse: the fastest tile of the sparse kernel. For comparison, `cusparselt_us` is the best of cuSPARSELt's algorithms for the same
product, which is no dense time. Each candidate is timed by itself; the fastest of each kind are then interleaved, and a row has the medians of
those rounds. A time is that of one launch in a CUDA graph of several on different operands that together exceed the L2 cache.
Operands are random: zeros are faster than real data. `floor_us`: the larger of bytes over 4.25 TB/s and of multiplications over the sparse
peak (1979 T/s for 16 bits, 3958 for 8), a lower bound for every sparse kernel.

A network is built twice, with its weights and with 2:4 weights by magnitude (`force_two_four`), in FP16 or INT8 (with placeholder ranges, which
affect no time); both engines are interleaved and timed on the GPU, without transfers. Weights are random: times are real, accuracy is not
measured here. `bert_large_linear` are the 144 linear layers of the encoder of BERT-large with 384 tokens per sample, one after the other.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import ml_dtypes
import numpy as np
from _record import provenance

from whet.backends.cuda.compile import compile_ahead, compile_cubin
from whet.backends.cuda.compile_only import DEVICES
from whet.backends.cuda.driver import open_device
from whet.backends.cuda.launch import Graph, Launch
from whet.backends.cuda.memory import DeviceBuffer
from whet.backends.cuda.stream import Event, Stream
from whet.errors import BackendError
from whet.tactics.cuda.conv._conv import NONE, ConvShape, EightBitTypes, PostOps, Scales, View
from whet.tactics.cuda.conv._conv_config import ConvConfig, pick_varied
from whet.tactics.cuda.conv._conv_launch import ConvProblem, Features, emit_conv_source, make_conv_launch
from whet.tactics.cuda.conv._conv_tiles import list_conv_configs, why_not_config
from whet.tactics.cuda.sparse._kernel_text import emit_sparse_source
from whet.tactics.cuda.sparse._launch import Packed24, Types, count_padded_rows, make_sparse_constants, make_sparse_launch, step_elements
from whet.tactics.cuda.sparse._tile import SparseTile, list_sparse_tiles, pick_varied_tiles

RESULT = Path(__file__).parent / "results" / "h200" / "sparse.json"
COLD_BYTES, BYTES_PER_S, SPARSE_PEAK = 200e6, 4.25e12, {2: 1979e12, 1: 3958e12}
RANDOM_BYTES = 1 << 30
FINISH = PostOps(NONE)
_PATTERNS = (0b0100, 0b1000, 0b1100, 0b1001, 0b1101, 0b1110)  # metadata of the six pairs of positions


@dataclass(frozen=True)
class Case:
    """A layer in one precision: "f16", "bf16", "i8" or "f8e4m3"."""

    name: str
    shape: ConvShape
    kind: str

    @property
    def size(self) -> int:
        """Bytes of an element."""
        return 1 if self.kind in ("i8", "f8e4m3") else 2


def all_cases() -> list[Case]:
    """The project's target cases: products, 3x3 and 1x1 convolutions."""
    cases = []
    for kind in ("f16", "i8", "f8e4m3"):
        cases.append(Case(f"product 8192^3 {kind}", ConvShape(1, 1, 8192, 8192, 8192), kind))
        cases.append(Case(f"product 4096x1024x16384 {kind}", ConvShape(1, 1, 16384, 1024, 4096), kind))
    for kind in ("f16", "i8"):
        for channels in (256, 512):
            for size in (14, 28):
                for batch in (32, 128):
                    shape = ConvShape(batch, size, size, channels, channels, 3, 3, pad=(1, 1, 1, 1))
                    cases.append(Case(f"conv 3x3 {channels} {size}x{size} batch {batch} {kind}", shape, kind))
        for c, k in ((512, 512), (1024, 256), (512, 2048), (2048, 512)):
            cases.append(Case(f"conv 1x1 {c}-{k} 14x14 batch 128 {kind}", ConvShape(128, 14, 14, c, k), kind))
    return cases


def random_operands(kind: str) -> np.ndarray:
    """Bytes of random numbers in the type of the operands."""
    rng = np.random.default_rng(24)
    if kind == "i8":
        return rng.integers(-127, 128, 1 << 24).astype(np.int8).view(np.uint8)
    normal = rng.standard_normal(1 << 23).astype(np.float32)
    dtype = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "f8e4m3": ml_dtypes.float8_e4m3fn}[kind]
    return (normal / (16 if kind != "f8e4m3" else 1)).astype(dtype).view(np.uint8)


class Memory:
    """Device memory with random operands, from which launches take their addresses, and random metadata."""

    def __init__(self, kind: str) -> None:
        chunk = random_operands(kind)
        self.noise = DeviceBuffer(RANDOM_BYTES)
        for at in range(0, RANDOM_BYTES, chunk.nbytes):
            self.noise.write(chunk[: RANDOM_BYTES - at], at)
        nibbles = np.random.default_rng(4).choice(np.array(_PATTERNS, np.uint8), 1 << 23)
        self.metadata = DeviceBuffer.of(np.tile(nibbles[::2] | nibbles[1::2] << 4, 4))
        self.floats = DeviceBuffer.of(np.full(1 << 17, 1e-3, np.float32))

    def take(self, sizes: list[int], which: int) -> list[int]:
        """Addresses of a set of operands of these sizes in bytes."""
        total = sum(-(-s // 1024) * 1024 for s in sizes)
        at = self.noise.address + total * which % max(1, RANDOM_BYTES - total) // 1024 * 1024
        found = []
        for s in sizes:
            found.append(at)
            at += -(-s // 1024) * 1024
        return found


def sets_of(case: Case) -> int:
    """Sets of operands that together exceed the L2 cache."""
    s = case.shape
    each = case.size * (s.n * s.h * s.w * s.c + s.k * s.r * s.s * s.c + s.m * s.k)
    return int(min(24, max(2, COLD_BYTES // each)))


def eight_of(case: Case) -> EightBitTypes | None:
    """Types of an 8-bit product for the dense kernel: 8-bit results, as in a quantized network."""
    return None if case.size == 2 else EightBitTypes(case.kind, case.kind, fold=True)


@functools.cache
def multiprocessors() -> int:
    """Those of the GPU; without one those of the H100 and H200, for which kernels are then compiled."""
    try:
        return open_device().multiprocessors
    except BackendError:
        return DEVICES["sm_90"][0]


def dense_configs(case: Case, most: int) -> list[ConvConfig]:
    """Candidates of the dense kernel."""
    return pick_varied(
        [
            c
            for c in list_conv_configs(case.shape, multiprocessors(), case.size)
            if c.valid() and why_not_config(c, case.shape) is None and c.outs < 3
        ],
        most,
    )


def dense_launches(case: Case, config: Any, memory: Memory) -> list[Launch]:
    """Launches of the dense kernel on different operands."""
    s, size, launches = case.shape, case.size, []
    scales = None if size == 2 else Scales(memory.floats.address, per_step=127.0, zero=12582912.0)
    for i in range(sets_of(case)):
        x, w, y = memory.take([s.n * s.h * s.w * s.c * size, -(-s.k // 32) * 32 * s.steps(config.bk) * config.bk * size, s.m * s.k * size], i)
        problem = ConvProblem(
            shape=s,
            input=View(x, s.c),
            weights=w,
            bias=memory.floats.address,
            output=View(y, s.k),
            post_ops=FINISH,
            bf16=case.kind == "bf16",
            types8=eight_of(case),
            scales=scales,
        )
        launches.append(make_conv_launch(config, problem, multiprocessors=open_device().multiprocessors))
    return launches


def sparse_tiles(case: Case, most: int) -> list[SparseTile]:
    """Candidates of the sparse kernel."""
    s, size = case.shape, case.size
    return pick_varied_tiles(list_sparse_tiles(s.m, s.k, s.steps(step_elements(size)), size, size, False, multiprocessors()), most)


def sparse_launches(case: Case, tile: Any, memory: Memory) -> list[Launch]:
    """Launches of the sparse kernel on different operands."""
    s, size, launches = case.shape, case.size, []
    types = Types(case.kind, case.kind, fold=size == 1)
    row = s.steps(step_elements(size)) * step_elements(size) // 2 * size
    for i in range(sets_of(case)):
        x, w, y = memory.take([s.n * s.h * s.w * s.c * size, count_padded_rows(tile, s.k) * row, s.m * s.k * size], i)
        packed = Packed24(w, memory.metadata.address, memory.floats.address)
        launches.append(
            make_sparse_launch(tile, s, View(x, s.c), packed, View(y, s.k), types, post_ops=FINISH, multiprocessors=open_device().multiprocessors)
        )
    return launches


def torch_dense(case: Case) -> tuple[str, Callable[[], Any]] | None:
    """(library, function) of torch's dense layer: cuBLASLt for products, cuDNN for convolutions of floats; None if torch has no fast one."""
    s = case.shape
    if not s.plain and case.size == 1:
        return None
    import torch

    torch.backends.cudnn.benchmark = True
    if case.kind == "i8":
        x, w = (torch.randint(-127, 128, (n, s.c), device="cuda", dtype=torch.int8) for n in (s.m, s.k))
        result = torch.empty(s.m, s.k, device="cuda", dtype=torch.int32)
        return "cublaslt", lambda: torch._int_mm(x, w.t(), out=result)
    if case.kind == "f8e4m3":
        x = torch.randn(s.m, s.c, device="cuda").to(torch.float8_e4m3fn)
        w = torch.randn(s.k, s.c, device="cuda").to(torch.float8_e4m3fn)
        one = torch.ones((), device="cuda")
        return "cublaslt", lambda: torch._scaled_mm(x, w.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
    kind = torch.bfloat16 if case.kind == "bf16" else torch.half
    if s.plain:
        x, w = (torch.randn(n, s.c, device="cuda", dtype=kind) / 16 for n in (s.m, s.k))
        out = torch.empty(s.m, s.k, device="cuda", dtype=kind)
        return "cublaslt", lambda: torch.mm(x, w.t(), out=out)
    image, filters = (
        (torch.randn(*size, device="cuda", dtype=kind) / 16).to(memory_format=torch.channels_last)
        for size in ((s.n, s.c, s.h, s.w), (s.k, s.c, s.r, s.s))
    )
    return "cudnn", lambda: torch.nn.functional.conv2d(image, filters, stride=s.stride, padding=s.pad[:2])


def torch_sparse(case: Case) -> Callable[[], Any] | None:
    """The product by cuSPARSELt through torch, with the library's fastest algorithm; None for other layers, or if torch refuses the type."""
    s = case.shape
    if not s.plain:
        return None
    import torch

    kind = {"f16": torch.half, "bf16": torch.bfloat16, "i8": torch.int8, "f8e4m3": torch.float8_e4m3fn}[case.kind]
    pairs = torch.tensor([1, 1, 0, 0], device="cuda").repeat(s.c // 4)
    if case.kind == "i8":
        x, w = (torch.randint(-127, 128, (n, s.c), device="cuda", dtype=torch.int8) for n in (s.m, s.k))
        w = w * pairs.to(torch.int8)
    else:
        x, w = (torch.randn(n, s.c, device="cuda") / 16 for n in (s.m, s.k))
        x, w = x.to(kind), (w * pairs).to(kind)
    out = torch.half if case.size == 1 else kind
    try:
        compressed = torch._cslt_compress(w)
        best = torch._cslt_sparse_mm_search(compressed, x.t(), out_dtype=out if case.size == 1 else None)
        run = lambda: torch._cslt_sparse_mm(compressed, x.t(), out_dtype=out if case.size == 1 else None, alg_id=best)  # noqa: E731
        run()
    except RuntimeError as e:
        print(f"cuSPARSELt refuses {case.name}: {str(e).splitlines()[0][:120]}", flush=True)
        return None
    return run


class Timed:
    """A CUDA graph of several launches: `us()` is the time of one of them."""

    def __init__(self, launches: list[Launch], stream: Stream) -> None:
        self.repeats = max(1, 6 // len(launches))
        self.graph, self.stream, self.count = Graph(launches * self.repeats, stream), stream, len(launches) * self.repeats

    def us(self) -> float:
        """Microseconds of one launch of the graph, replayed once."""
        start, end = Event(), Event()
        self.stream.synchronize()
        start.record(self.stream)
        self.graph.run(self.stream)
        end.record(self.stream)
        end.synchronize()
        return end.since(start) * 1000 / self.count


class TimedTorch:
    """The same for a torch function."""

    def __init__(self, run: Callable[[], Any]) -> None:
        import torch

        self.torch, self.count = torch, 6
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            run()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.kept = [run() for _ in range(self.count)]

    def us(self) -> float:
        """Microseconds of one product."""
        a, b = self.torch.cuda.Event(enable_timing=True), self.torch.cuda.Event(enable_timing=True)
        self.torch.cuda.synchronize()
        a.record()
        self.graph.replay()
        b.record()
        b.synchronize()
        return a.elapsed_time(b) * 1000 / self.count


def fastest(makers: dict[str, Callable[[], Any]], deadline: float) -> tuple[str, Any, list[tuple[float, str]]] | None:
    """(name, configuration, all times) of the fastest candidate; the others are freed. Stops at `deadline`."""
    times, best = [], None
    for name, make in makers.items():
        if best is not None and time.time() > deadline:
            break
        timed = make()
        timed.us()
        us = statistics.median(timed.us() for _ in range(3))
        times.append((round(us, 2), name))
        if best is None or us < best[0]:
            best = (us, name, timed)
    return None if best is None else (best[1], best[2], sorted(times))


def measure(case: Case, memory: Memory, stream: Stream, tiles: int, rounds: int, seconds: float) -> dict[str, Any]:
    """The row of a case."""
    s, size, until = case.shape, case.size, time.time() + seconds
    dense = dense_configs(case, tiles)
    sparse = sparse_tiles(case, tiles)
    found = {
        "dense": fastest({str(c): lambda c=c: Timed(dense_launches(case, c, memory), stream) for c in dense}, until - seconds / 2),
        "sparse": fastest({str(t): lambda t=t: Timed(sparse_launches(case, t, memory), stream) for t in sparse}, until),
    }
    library = torch_dense(case)
    runs = {k: v[1] for k, v in found.items() if v is not None} | ({} if library is None else {library[0]: TimedTorch(library[1])})
    if (other := torch_sparse(case)) is not None:
        runs["cusparselt"] = TimedTorch(other)
    times: dict[str, list[float]] = {k: [] for k in runs}
    for _ in range(rounds):
        for k, run in runs.items():
            times[k].append(run.us())
    us = {k: statistics.median(v) for k, v in times.items()}
    best = min(v for k, v in us.items() if k not in ("sparse", "cusparselt"))
    nbytes = size * (s.n * s.h * s.w * s.c + s.k * s.r * s.s * s.c * (0.5 + 0.125 / size) + s.m * s.k)
    return {
        "case": case.name, **{f"{k}_us": round(v, 2) for k, v in us.items()}, "speedup": round(best / us["sparse"], 3),
        "sparse_tflops": round(s.flops / us["sparse"] / 1e6), "dense_tflops": round(s.flops / best / 1e6),
        "floor_us": round(max(nbytes / BYTES_PER_S, s.flops / SPARSE_PEAK[size]) * 1e6, 2),
        "tiles": {k: v[0] for k, v in found.items() if v is not None}, "candidates": {k: v[2] for k, v in found.items() if v is not None},
        "rounds": rounds,
    }  # fmt: skip


def cases_named(names: list[str]) -> list[Case]:
    """The cases with one of `names` in their names; all if there are none."""
    return [c for c in all_cases() if not names or any(n in c.name for n in names)]


def sources_of(case: Case, tiles: int) -> list[str]:
    """Source texts of the kernels that `measure` times."""
    s, types = case.shape, Types(case.kind, case.kind, fold=case.size == 1)
    features = [
        (c, Features(im2col=not s.plain and not c.halo, bf16=case.kind == "bf16", odd=s.k % 8 != 0, types8=eight_of(case)))
        for c in dense_configs(case, tiles)
    ]
    sparse = [emit_sparse_source(make_sparse_constants(t, types, not s.plain, FINISH)) for t in sparse_tiles(case, tiles)]
    return sparse + [emit_conv_source(c, f) for c, f in features]


def compile_kernels(names: list[str], tiles: int) -> int:
    """Compiles the kernels of the cases into the kernel cache ($WHET_CUDA_CACHE); returns their number. Raises BackendError if one fails."""
    texts = list(dict.fromkeys(text for case in cases_named(names) for text in sources_of(case, tiles)))
    compile_ahead(texts)
    for text in texts:
        compile_cubin(text)
    return len(texts)


def run(names: list[str], seconds: float, tiles: int, rounds: int) -> list[dict[str, Any]]:
    """Rows of the cases whose names contain one of `names`; written after each, since the session may end."""
    open_device(0)
    stream, rows, memory, kind = Stream(), [], None, ""
    cases = cases_named(names)
    until = time.time() + seconds
    for case in cases:
        compile_ahead(sources_of(case, tiles))
    for case in cases:
        if time.time() > until:
            print(f"no time left for {case.name}", flush=True)
            continue
        if case.kind != kind:
            memory, kind = None, case.kind
            memory = Memory(kind)
        assert memory is not None
        row = measure(case, memory, stream, tiles, rounds, max(4.0, (until - time.time()) / 3))
        rows.append(row)
        told = " ".join(f"{k} {row[f'{k}_us']}" for k in ("dense", "cublaslt", "cudnn", "cusparselt", "sparse") if f"{k}_us" in row)
        print(f"{case.name}: {told} us, {row['speedup']}x, {row['sparse_tflops']} T/s, floor {row['floor_us']}; {row['tiles']}", flush=True)
        out = Path(os.environ.get("OUT", ".")) / "sparse.json"
        out.write_text(json.dumps({**provenance(["numpy", "cuda-bindings"]), **_machine(), "rows": rows}, indent=1))
    return rows


def bert_large_linear(batch: int, tokens: int = 384, layers: int = 24) -> Any:
    """The linear layers of BERT-large's encoder (four of 1024 to 1024 and two of the feed-forward part per block) as a chain, in FP16."""
    from whet.network import Network, parse_type

    rng, net = np.random.default_rng(24), Network("bert_large_linear", "source")
    x = net.add_input("x", parse_type(f"f16[{batch * tokens},1024]"))
    for block in range(layers):
        for k, (inputs, outputs) in enumerate([(1024, 1024)] * 4 + [(1024, 4096), (4096, 1024)]):
            w = (rng.standard_normal((inputs, outputs), np.float32) / np.sqrt(inputs)).astype(np.float16)
            x = net.add("MatMul", x, net.constant(w, f"w{block}_{k}"))
            x = net.add("Add", x, net.constant(np.full(outputs, 0.01, np.float16), f"b{block}_{k}"))
    net.mark_output(x, "y")
    return net


def measure_network(name: str, batch: int, precision: str, level: int) -> dict[str, Any]:
    """The row of a network: milliseconds of the dense and of the sparse engine, and the layers that run sparse."""
    from _half import half

    from whet import zoo
    from whet.builder import BuildConfig
    from whet.frontends.onnx import network_from_onnx
    from whet.pruning.truth import measure_engines
    from whet.sparsity import force_two_four
    from whet.sparsity.report import list_sparse_layers

    if name == "bert_large_linear":
        net = bert_large_linear(batch)
    else:
        model = zoo.build(name, batch=batch)
        net = network_from_onnx(half(model) if precision == "fp16" else model)
    times = os.environ.get("WHET_TIMES", str(Path(os.environ.get("OUT", ".")) / "times.sqlite"))
    precisions = ("fp16",) if precision == "fp16" else ("int8", "fp16")
    config = BuildConfig(backend="cuda", precisions=precisions, timing_cache=times, optimization_level=level)
    begun = time.time()
    dense, sparse = measure_engines([net, force_two_four(net)[0]], config, seconds=1.0)
    low, high = (round(1 / r, 3) for r in reversed(sparse.ratio_interval))
    return {
        "case": f"{name} batch {batch} {precision}", "dense_ms": round(dense.ms, 4), "sparse_ms": round(sparse.ms, 4),
        "speedup": round(1 / sparse.ratio, 3), "speedup_interval": [low, high], "sparse_layers": len(list_sparse_layers(sparse.plan)),
        "layers": len(sparse.plan.network.layers), "level": level, "built_s": round(time.time() - begun, 1),
        "picks": [[x.name, sparse.plan.choices[x.name].tactic] for x in sparse.plan.network.layers],
    }  # fmt: skip


def run_networks(names: list[str], level: int) -> None:
    """Rows of networks, written after each."""
    rows = []
    for text in names:
        name, batch, precision = (*text.split(":"), "fp16")[:3]
        rows.append(measure_network(name, int(batch), precision, level))
        print(json.dumps({k: v for k, v in rows[-1].items() if k != "picks"}), flush=True)
        out = Path(os.environ.get("OUT", ".")) / "sparse_networks.json"
        out.write_text(json.dumps({**provenance(["numpy", "cuda-bindings"]), **_machine(), "rows": rows}, indent=1))


def _machine() -> dict[str, Any]:
    from whet.backends import get_backend

    return {"machine": str(get_backend("cuda").describe().get("model", ""))}


def merge(parts: list[str], result: Path) -> None:
    """Adds runs to a result file, a list of records; a later row of a case replaces earlier ones."""
    records: list[dict[str, Any]] = []
    for part in [str(result)] * result.exists() + parts:
        told = json.loads(Path(part).read_text())
        records += told if isinstance(told, list) else [told]
    last = {r["case"]: i for i, record in enumerate(records) for r in record["rows"]}
    order = {c.name: i for i, c in enumerate(all_cases())}
    for i, record in enumerate(records):
        record["rows"] = sorted((r for r in record["rows"] if last[r["case"]] == i), key=lambda r: order.get(r["case"], 99))
    result.write_text(json.dumps([r for r in records if r["rows"]], indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="", help="parts of names of cases, separated by commas (all)")
    parser.add_argument("--seconds", type=float, default=400)
    parser.add_argument("--tiles", type=int, default=10, help="candidates of each kind")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--networks", default="", help="networks with batch and precision, as resnet50:128:int8,bert_large_linear:32")
    parser.add_argument("--level", type=int, default=3, help="optimization level of the builds of --networks")
    parser.add_argument("--merge", nargs="+", help="result files to join")
    parser.add_argument("--compile", action="store_true", help="only compile the kernels of --cases, on any machine")
    parser.add_argument("--result", help="name of the result file of --merge, as sparse_libraries")
    given = parser.parse_args()
    if given.merge:
        merge(given.merge, RESULT.with_name(f"{given.result or ('sparse_networks' if given.networks else 'sparse')}.json"))
    elif given.compile:
        print(f"{compile_kernels([n for n in given.cases.split(',') if n], given.tiles)} kernels are in the cache")
    elif given.networks:
        run_networks(given.networks.split(","), given.level)
    else:
        run([n for n in given.cases.split(",") if n], given.seconds, given.tiles, given.rounds)


if __name__ == "__main__":
    main()
