"""2:4 sparse against dense on the CPU: linear layers and 1x1 convolutions with few rows, every candidate of the builder, synthetic weights.

    python benchmarks/cpu_sparse.py [--cases TEXT,...] [--rounds N] [--threads N] [--out FILE]       results/cpu/sparse.json, and a table

A case is a layer in FP32, BF16 (on a CPU with its instructions) or INT8 with 2:4 weights. Dense: the fastest of oneDNN's and whet's own dense
tactics over all signatures and configs; for INT8 on a CPU without VNNI, where oneDNN has no exact products, the fastest in FP32. Sparse: the fastest
config of `cpu/sparse_linear` or `cpu/sparse_qlinear`. Each candidate is first timed by itself; the fastest of each kind are then interleaved, and a
row has the medians of those
rounds. "hot": the same operands in each call, so that weights stay in the caches if they fit. "cold": copies of the weights in turn, together
160 MB (at least two copies), as in a network larger than the caches. `others`: load of other processes in CPUs. `floor`: dense over sparse weight
bytes of FP32, 1.88: the gain of a layer whose time is proportional to its weight bytes.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import numpy as np
from _record import provenance

from whet.backends import Call
from whet.backends.cpu import CpuBackend
from whet.backends.cpu.info import read_cpuinfo
from whet.backends.cpu.load import watch
from whet.composites.quantized import make_conv_body_builder, make_op_body_builder, make_quantized_sample
from whet.network import BF16, Layer, Network, parse_type
from whet.ops import sample_layer
from whet.sparsity import two_four
from whet.tactics import Args, Tactic, list_tactics
from whet.tactics._base import PlanRefused, Signature

RESULT = Path(__file__).parent / "results" / "cpu" / "sparse.json"
SPARSE = ("cpu/sparse_linear", "cpu/sparse_qlinear")
COLD_BYTES = 160 << 20
FLOOR = 16 / 8.5


@dataclass(frozen=True)
class Case:
    """A layer: rows of `inputs` by `channels`; a convolution if it has a spatial size."""

    inputs: int
    channels: int
    rows: int
    side: int = 0
    kind: str = "f32"  # or "bf16", the storage type of an f32 layer, or "i8"

    @property
    def name(self) -> str:
        kind = f"conv 1x1 {self.side}x{self.side}" if self.side else f"linear M={self.rows}"
        return f"{kind} {self.inputs}-{self.channels} {self.kind}"

    def layer(self) -> Layer:
        """The layer, with random 2:4 weights."""
        return self._integer_layer() if self.kind == "i8" else self._float_layer()

    def _integer_layer(self) -> Layer:
        """u8 by i8, with u8 results."""
        rng = np.random.default_rng(24)
        w = two_four(rng.integers(-127, 128, (self.channels, self.inputs)).astype(np.float32), 1).astype(np.int8)
        scale, bias = np.full(self.channels, 1e-4, np.float32), np.zeros(self.channels, np.float32)
        if self.side:
            x, body = f"full u8[1,{self.inputs},{self.side},{self.side}]", make_conv_body_builder("Relu")
            sample = make_quantized_sample("Conv", [(x, 0.02, 0, 1), (w[:, :, None, None], scale, None, 0), bias], body, (0.03, 0, "u8"))
        else:
            data: list[Any] = [(f"full u8[{self.rows},{self.inputs}]", 0.02, 0, 1), (w, scale, None, 0), bias]
            sample = make_quantized_sample("Gemm", data, make_op_body_builder("Gemm", transB=1), (0.03, 0, "u8"))
        return sample_layer("Fused", sample)[1]

    def _float_layer(self) -> Layer:
        rng, net = np.random.default_rng(24), Network("case", "lowered")
        w = two_four(rng.standard_normal((self.channels, self.inputs)).astype(np.float32) / np.float32(np.sqrt(self.inputs)), 1)
        if self.side:
            x = net.add_input("x", parse_type(f"f32[1,{self.inputs},{self.side},{self.side}]"))
            y = net.add("Conv", x, net.constant(w[:, :, None, None], "w"))
        else:
            x = net.add_input("x", parse_type(f"f32[{self.rows},{self.inputs}]"))
            y = net.add("MatMul", x, net.constant(np.ascontiguousarray(w.T), "w"))
        net.mark_output(y)
        return net.layers[0]


def all_cases() -> list[Case]:
    """Linear layers with one and eight rows, and 1x1 convolutions at batch 1."""
    shapes = [(768, 768), (768, 3072), (3072, 768), (2048, 1000), (4096, 4096)]
    cases = [Case(k, n, rows) for rows in (1, 8) for k, n in shapes]
    cases += [Case(c, k, side * side, side) for side in (1, 7) for c, k in ((512, 512), (512, 2048), (1024, 1024), (2048, 512), (2048, 2048))]
    return [*cases, *(replace(c, kind=kind) for kind in ("bf16", "i8") for c in cases)]


class Calls:
    """A planned candidate with operands: call `i` uses the i-th copy of the weights."""

    def __init__(self, layer: Layer, tactic: Tactic, signature: Signature, config: Any, backend: CpuBackend, copies: int) -> None:
        kernel = tactic.plan(layer, signature, config, backend)
        self.name = f"{tactic.name} {' '.join(f'{k}={v}' for k, v in config)}".strip()
        rng = np.random.default_rng(7)
        stored = BF16.numpy if signature.outputs[0].dtype == BF16 else np.float32
        count = 4 // np.dtype(stored).itemsize
        self.arrays: list[np.ndarray] = [
            rng.standard_normal(count * (max(16, n) // 4 + 16)).astype(stored) for n in (*kernel.inputs, *kernel.outputs)
        ]
        at = [_aligned(a) for a in self.arrays]
        inputs = tuple(a if n else 0 for a, n in zip(at, kernel.inputs, strict=False))
        outputs, scratch = tuple(at[len(kernel.inputs) :]), np.zeros(kernel.scratch + 64, np.uint8)
        self.arrays.append(scratch)
        self.calls: list[list[Call]] = []
        self.packed: list[list[int]] = []  # addresses of each copy's packed operands
        first = [p.make() for p in kernel.packed]
        for _ in range(copies):
            packed = [_copy(p) for p in first]
            self.arrays += [p for p, _ in packed]
            self.packed.append([a for _, a in packed])
            recorded: list[Call] = []

            class Recorder:
                def record(self, call: Call, recorded: list[Call] = recorded) -> None:
                    recorded.append(call)

            kernel.enqueue(Args(inputs, outputs, tuple(a for _, a in packed), _aligned(scratch)), Recorder())
            self.calls.append(recorded)
        self.kernel = kernel
        self.at = 0

    def block(self, seconds: float = 0.004) -> float:
        """Seconds of a call: the mean over calls for at least `seconds`."""
        count, start = 0, time.perf_counter()
        while True:
            for _ in range(4):
                for call in self.calls[self.at]:
                    call.run()
                self.at = (self.at + 1) % len(self.calls)
            count += 4
            if (spent := time.perf_counter() - start) > seconds:
                return spent / count


def _aligned(a: np.ndarray) -> int:
    return -(-a.ctypes.data // 64) * 64


def _copy(packed: np.ndarray) -> tuple[np.ndarray, int]:
    """A copy of a packed operand at a 64-byte boundary, and its address."""
    memory = np.empty(packed.nbytes + 64, np.uint8)
    at = _aligned(memory)
    memory[at - memory.ctypes.data :][: packed.nbytes] = packed
    return memory, at


def candidates(layer: Layer, kind: str, backend: CpuBackend, wanted: Callable[[Tactic], bool], copies: int) -> list[Calls]:
    """All planned candidates of the tactics that `wanted` accepts; of f32 layers those that store "f32" or "bf16"."""
    calls = []
    for tactic in list_tactics("cpu"):
        if tactic.fallback or not wanted(tactic) or tactic.unavailable() or tactic.why_not(layer):
            continue
        for signature in tactic.signatures(layer, backend):
            if signature.inplace or (kind != "i8" and signature.outputs[0].dtype.name != kind) or tactic.refuses(layer, signature, backend):
                continue
            for config in tactic.configs(layer, signature, backend):
                try:
                    calls.append(Calls(layer, tactic, signature, config, backend, copies))
                except PlanRefused:
                    continue
    return calls


def fastest(calls: list[Calls]) -> Calls:
    """The candidate with the smallest minimum of five blocks."""
    times = {id(c): min(c.block() for _ in range(5)) for c in calls}
    return min(calls, key=lambda c: times[id(c)])


def measure(case: Case, backend: CpuBackend, rounds: int) -> list[dict[str, Any]]:
    """The rows of a case, hot and cold, with times in microseconds."""
    layer = case.layer()
    nbytes = case.inputs * case.channels * {"f32": 4, "bf16": 2, "i8": 1}[case.kind]
    rows: list[dict[str, Any]] = []
    for caches, copies in (("hot", 1), ("cold", max(2, COLD_BYTES // nbytes))):
        sparse = candidates(layer, case.kind, backend, lambda t: t.name in SPARSE, copies)
        if not sparse:
            return []  # BF16 without its instructions
        dense = candidates(layer, case.kind, backend, lambda t: t.name not in SPARSE, copies)
        if not dense:
            fewer = max(2, copies // 4) if copies > 1 else 1
            dense = candidates(replace(case, kind="f32").layer(), "f32", backend, lambda t: t.name not in SPARSE, fewer)
        both = {"dense": fastest(dense), "sparse": fastest(sparse)}
        times: dict[str, list[float]] = {n: [] for n in both}
        with watch() as load:
            for i in range(rounds):
                for name in list(both)[:: 1 if i % 2 else -1]:
                    times[name].append(both[name].block())
        gain = median(d / s for d, s in zip(times["dense"], times["sparse"], strict=True))
        us = {f"{n}_us": round(median(t) * 1e6, 1) for n, t in times.items()}
        tactics = {f"{n}_tactic": c.name for n, c in both.items()}
        rows.append({"case": case.name, "caches": caches, **us, "speedup": round(gain, 2), **tactics, "others": round(load.others or 0.0, 2)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="", help="names of cases, or parts of names")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    backend = CpuBackend(threads=args.threads)
    rows: list[dict[str, Any]] = []
    backend.activate()
    print(f"{'case':28} {'':4} {'dense us':>9} {'2:4 us':>9} {'gain':>6}  fastest dense; fastest 2:4")
    for case in all_cases():
        if args.cases and not any(text in case.name for text in args.cases.split(",")):
            continue
        for r in measure(case, backend, args.rounds):
            rows.append(r)
            times = f"{r['dense_us']:9.1f} {r['sparse_us']:9.1f} {r['speedup']:6.2f}"
            print(f"{r['case']:28} {r['caches']:4} {times}  {r['dense_tactic']}; {r['sparse_tactic']}", flush=True)
        head = {"cpu": read_cpuinfo().get("model name"), "threads": args.threads, "floor": round(FLOOR, 3)}
        data = provenance(["numpy", "llvmlite"]) | head | {"rows": rows}
        args.out.write_text(json.dumps(data, indent=1) + "\n")  # after each case: a run may be ended early


if __name__ == "__main__":
    main()
