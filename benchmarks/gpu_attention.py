"""Fused attention: each CUDA tactic's fastest configuration and torch's scaled_dot_product_attention backends on the same shapes, interleaved.

Usage: python3 benchmarks/gpu_attention.py [WORD ...]      results in $OUT/attention.json; only cases whose names contain every word

The time of a launch: a CUDA graph of equal dependent launches on one set of operands, divided by their number; replays are isolated, candidates
interleaved, medians of the rounds. Operands below 60 MB stay in the L2 cache, for both sides. Floors: bytes read and written once at 4.25 TB/s,
products at 738 TFLOP/s (both measured on an H200), exp2 at 16 per clock and multiprocessor (1.755 GHz).
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from _record import provenance

sys.path.insert(0, "src")
from whet.backends import get_backend
from whet.backends.cuda.launch import Graph
from whet.backends.cuda.stream import Event, Stream
from whet.composites.attention import make_attention_sample
from whet.network import Layer
from whet.network.types import F16
from whet.ops import sample_layer
from whet.tactics import Args, list_tactics

ROUNDS = 15
TACTICS = ("cuda/attention", "cuda/attention_fused")


@dataclass(frozen=True)
class Case:
    """Sizes of one attention.

    mask: "" | "keys" (at run time; batch item 0 sees all keys, others half of them to all) | "bias" (a constant per head) | "causal".
    """

    batch: int
    heads: int
    rows: int
    keys: int
    size: int
    mask: str = ""
    group: int = 1

    def layer(self) -> Layer:
        """The fused layer, with heads as projections leave them."""
        shape = {"keys": (self.batch, 1, 1, self.keys), "bias": (1, self.heads, self.rows, self.keys)}.get(self.mask, ())
        how: dict[str, Any] = {"mask": shape, "constant": self.mask == "bias", "causal": -np.inf if self.mask == "causal" else None}
        sample = make_attention_sample(self.batch, self.heads, self.rows, self.keys, self.size, layout="rows", scale="Mul", group=self.group, **how)
        return sample_layer("Fused", sample)[1]

    @property
    def scores(self) -> float:
        """Number of computed scores: hidden keys above the diagonal are excluded."""
        half = 0.5 * (1 + 1 / self.rows) if self.mask == "causal" and self.rows == self.keys else 1.0
        return self.batch * self.heads * self.rows * self.keys * half

    def floors(self) -> dict[str, float]:
        """Lower bounds in microseconds of bytes, products and exp2."""
        queries, keys = self.batch * self.heads * self.rows * self.size, self.batch * self.heads // self.group * self.keys * self.size
        nbytes = 2 * (2 * queries + 2 * keys) + {"keys": 2 * self.batch * self.keys, "bias": 2 * self.heads * self.rows * self.keys}.get(self.mask, 0)
        return {"bytes": nbytes / 4.25e6, "products": 4 * self.scores * self.size / 738e6, "exp2": self.scores / (16 * 132 * 1755)}


CASES = {
    "BERT-base s128 b1": Case(1, 12, 128, 128, 64, "keys"),
    "BERT-base s384 b1": Case(1, 12, 384, 384, 64, "keys"),
    "BERT-base s128 b32": Case(32, 12, 128, 128, 64, "keys"),
    "BERT-base s384 b32": Case(32, 12, 384, 384, 64, "keys"),
    "BERT-base s128 b1 without mask": Case(1, 12, 128, 128, 64),
    "BERT-base s128 b32 without mask": Case(32, 12, 128, 128, 64),
    "ViT-B/16 b1": Case(1, 12, 197, 197, 64),
    "ViT-B/16 b8": Case(8, 12, 197, 197, 64),
    "ViT-B/16 b32": Case(32, 12, 197, 197, 64),
    "Swin-T stage 1 b1": Case(64, 3, 49, 49, 32, "bias"),
    "Swin-T stage 3 b1": Case(4, 12, 49, 49, 32, "bias"),
    "Swin-T stage 1 b32": Case(2048, 3, 49, 49, 32, "bias"),
    "Swin-T stage 3 b32": Case(128, 12, 49, 49, 32, "bias"),
    "GPT-2 prefill 512 b1": Case(1, 12, 512, 512, 64, "causal"),
    "GPT-2 prefill 512 b8": Case(8, 12, 512, 512, 64, "causal"),
    "Whisper-tiny 1500 b1": Case(1, 6, 1500, 1500, 64),
    "Whisper-tiny 1500 b8": Case(8, 6, 1500, 1500, 64),
    "Llama 512 GQA b1": Case(1, 32, 512, 512, 128, "causal", 4),
    "Llama 512 GQA b8": Case(8, 32, 512, 512, 128, "causal", 4),
    "T5-small encoder 512 b1": Case(1, 8, 512, 512, 64, "bias"),
    "CLIP text 77 b8": Case(8, 8, 77, 77, 64, "causal"),
    "SegFormer-B0 stage 1 b1": Case(1, 1, 16384, 256, 32),
    "ViT-H 577 b1, heads of 80": Case(1, 16, 577, 577, 80),
    "2048, heads of 96": Case(1, 16, 2048, 2048, 96),
    "2048, heads of 128": Case(1, 16, 2048, 2048, 128),
    "2048 b4": Case(4, 16, 2048, 2048, 64),
}


class Operands:
    """One case's inputs as torch tensors on the GPU, in the order of the layer's inputs, and the reference in f32."""

    def __init__(self, case: Case, layer: Layer) -> None:
        import torch

        generator = torch.Generator("cuda").manual_seed(0)

        def random(*shape: int) -> Any:
            return torch.randn(shape, generator=generator, device="cuda", dtype=torch.float32).half()

        kv = case.heads // case.group
        self.q = random(case.batch, case.rows, case.heads, case.size)
        self.k, self.v = random(case.batch, case.keys, kv, case.size), random(case.batch, case.keys, kv, case.size)
        self.mask = None
        if case.mask == "keys":
            lengths = torch.randint(case.keys // 2, case.keys + 1, (case.batch, 1, 1, 1), generator=generator, device="cuda")
            lengths[0] = case.keys
            self.mask = torch.where(torch.arange(case.keys, device="cuda") < lengths, 0.0, -65504.0).half()
        if case.mask == "bias":
            constant = next(t for t in layer.inputs if t is not None and t.is_constant and t.type.rank == 4)
            self.mask = torch.from_numpy(np.array(constant.array())).cuda().half()
        self.inputs = [self.q, self.k, self.v, None, self.mask if case.mask == "keys" else None]
        self.inputs = [*self.inputs, *[None] * len(layer.inputs)][: len(layer.inputs)]
        self.out = torch.empty_like(self.q)
        q, k, v = (t.transpose(1, 2).float() for t in (self.q, self.k, self.v))
        k, v = k.repeat_interleave(case.group, 1), v.repeat_interleave(case.group, 1)
        hidden = torch.ones(case.rows, case.keys, device="cuda", dtype=torch.bool).triu(1 + case.keys - case.rows) if case.mask == "causal" else None
        self.want = torch.empty_like(q)
        for b in range(case.batch):
            scores = q[b] @ k[b].transpose(1, 2) * case.size**-0.5
            if self.mask is not None:
                scores = scores + self.mask[b if case.mask == "keys" else 0].float()
            scores = scores if hidden is None else scores.masked_fill(hidden, -float("inf"))
            self.want[b] = scores.softmax(-1) @ v[b]
        self.want = self.want.transpose(1, 2).contiguous()

    def error(self, out: Any) -> float:
        """||out - reference|| / ||reference||; NaN if an element was not written."""
        return float((out.float() - self.want).norm() / self.want.norm())


def torch_contenders(case: Case, x: Operands) -> dict[str, Callable[[], Any]]:
    """torch's backends that accept the case."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (t.transpose(1, 2) for t in (x.q, x.k, x.v))
    mask = None if x.mask is None else x.mask.expand(case.batch, case.heads, case.rows, case.keys)
    kinds = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION}
    usable = {}
    for name, backend in kinds.items():

        def run(backend: Any = backend) -> Any:
            with sdpa_kernel(backend):
                call = torch.nn.functional.scaled_dot_product_attention
                return call(q, k, v, attn_mask=mask, is_causal=case.mask == "causal", enable_gqa=case.group > 1)

        try:
            run()
            torch.cuda.synchronize()
            usable[name] = run
        except RuntimeError:
            continue
    return usable


class TorchGraph:
    """Equal launches of a torch function as a CUDA graph."""

    def __init__(self, run: Callable[[], Any], count: int) -> None:
        import torch

        self._torch, self._count = torch, count
        for _ in range(3):
            self.out = run()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for _ in range(count):
                self.out = run()

    def us(self) -> float:
        """Microseconds of one launch, from an isolated replay."""
        a, b = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._torch.cuda.synchronize()
        a.record()
        self._graph.replay()
        b.record()
        b.synchronize()
        return float(a.elapsed_time(b) * 1000 / self._count)


class WhetGraph:
    """Equal launches of a planned kernel as a CUDA graph."""

    def __init__(self, launches: list, count: int, stream: Stream) -> None:
        self._graph, self._count, self._stream = Graph(launches * count, stream), count * len(launches), stream

    def us(self) -> float:
        """Microseconds of one launch, from an isolated replay."""
        start, end = Event(), Event()
        self._stream.synchronize()
        start.record(self._stream)
        self._graph.run(self._stream)
        end.record(self._stream)
        end.synchronize()
        return float(end.since(start) * 1000 / self._count)

    def close(self) -> None:
        """Release the executable graph."""
        self._graph.close()


def kernels_of(machine: Any, layer: Layer, x: Operands, weights: dict[str, Any]) -> Any:
    """(tactic, configuration, kernel, launches) of all f16 offers of the attention tactics; packed weights are added to `weights`."""
    import torch

    for t in list_tactics("cuda"):
        if t.name not in TACTICS or t.why_not(layer):
            continue
        for signature in t.signatures(layer, machine):
            if any(o is not None and o.dtype != F16 for o in (*signature.inputs, *signature.outputs)) or t.refuses(layer, signature, machine):
                continue
            for config in t.configs(layer, signature, machine):
                kernel = t.plan(layer, signature, config, machine)
                for p in kernel.packed:
                    if p.key not in weights:
                        weights[p.key] = torch.from_numpy(p.make().copy()).cuda()
                packed = tuple(weights[p.key].data_ptr() for p in kernel.packed)
                args = Args(tuple(0 if a is None else a.data_ptr() for a in x.inputs), (x.out.data_ptr(),), packed, 0)
                torch.cuda.synchronize()
                yield t.name.removeprefix("cuda/"), config, kernel, list(kernel.launches(args))


def row_of(machine: Any, name: str, case: Case) -> dict[str, Any]:
    """One case: the fastest configuration of each tactic, verified, then interleaved with torch's backends."""
    import torch

    layer = case.layer()
    x, stream = Operands(case, layer), Stream()
    count = 20 if case.scores < 3e8 else 5
    best: dict[str, tuple[float, WhetGraph, str, float]] = {}
    weights: dict[str, Any] = {}  # must outlive the graphs that read them
    for tactic, config, kernel, launches in kernels_of(machine, layer, x, weights):
        x.out.fill_(float("nan"))
        torch.cuda.synchronize()
        graph = WhetGraph(launches, count, stream)
        us = min(graph.us() for _ in range(4))
        error = x.error(x.out)
        if not error < 4e-3:
            raise SystemExit(f"{name}: {tactic} {config} is wrong: relative error {error}")
        if tactic not in best or us < best[tactic][0]:
            if tactic in best:
                best[tactic][1].close()
            best[tactic] = us, graph, f"{kernel.implementation} {dict(config)}", error
        else:
            graph.close()
    contenders: dict[str, Any] = {k: v[1] for k, v in best.items()}
    contenders |= {f"torch {k}": TorchGraph(run, count) for k, run in torch_contenders(case, x).items()}
    times: dict[str, list[float]] = {k: [] for k in contenders}
    for _ in range(ROUNDS):
        for k, graph in contenders.items():
            times[k].append(graph.us())
    us = {k: round(statistics.median(v), 2) for k, v in times.items()}
    ours, theirs = min((v, k) for k, v in us.items() if k in best), min(((v, k) for k, v in us.items() if k not in best), default=(0.0, ""))
    for graph in (v[1] for v in best.values()):
        graph.close()
    floors = {k: round(v, 2) for k, v in case.floors().items()}
    return {
        "case": name, "whet_us": ours[0], "tactic": ours[1], "torch_us": theirs[0], "torch": theirs[1].removeprefix("torch "),
        "torch_over_whet": round(theirs[0] / ours[0], 2), "floors_us": floors, "us": us,
        "kernels": {k: v[2] for k, v in best.items()}, "errors": {k: float(f"{v[3]:.2g}") for k, v in best.items()},
    }  # fmt: skip


def main() -> None:
    machine, rows = get_backend("cuda"), []
    head = provenance(("numpy", "cuda-bindings", "torch")) | {"device": machine.describe()["model"]}
    for name, case in CASES.items():
        if not all(word in name for word in sys.argv[1:]):
            continue
        rows.append(row_of(machine, name, case))
        gc.collect()
        shown = {k: v for k, v in rows[-1].items() if k not in ("kernels", "errors")}
        print(" | ".join(f"{k} {v}" for k, v in shown.items()), flush=True)
        with open(os.environ.get("OUT", ".") + "/attention.json", "w") as out:
            json.dump({**head, "state": machine.state(), "rows": rows}, out, indent=1)


if __name__ == "__main__":
    main()
