"""Engines of one layer for the tactic families (folders) of the CPU and CUDA backends; CUDA's run on a simulated device that computes nothing."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1])] if str(Path(__file__).parents[1]) not in sys.path else []

import whet.composites  # noqa: E402, F401  (its samples)
from support.standin_gpu import StandInCall, StandInGpu  # noqa: E402
from whet.backends import BACKENDS, Backend, get_backend  # noqa: E402
from whet.engine import ArenaPlan, Choice, EnginePlan, engine_bytes  # noqa: E402
from whet.errors import EngineError, WhetError  # noqa: E402
from whet.network import Layer, Network, format_bytes  # noqa: E402
from whet.ops import OPS, sample_layer  # noqa: E402
from whet.tactics import Signature, Tactic, list_tactics  # noqa: E402
from whet.tactics.cuda._device.kernel import GpuKernel  # noqa: E402

LARGEST = 1 << 20  # bytes of a sample's file; a mutant is hashed and parsed whole


def use_standin_gpu(patch: Any = None) -> None:
    """Makes `cuda` the simulated device in this process, or until `patch` (pytest's) is undone: kernels are planned, not compiled or run."""

    def enqueue(self: GpuKernel, args: object, stream: Any) -> None:
        stream.record(StandInCall(1e-6))

    if patch is not None:
        patch.setattr(GpuKernel, "enqueue", enqueue)
        patch.setitem(BACKENDS, "cuda", StandInGpu)
    else:
        GpuKernel.enqueue = enqueue
        BACKENDS["cuda"] = StandInGpu


def family_engines(patch: Any = None, per_family: int = 2) -> dict[str, bytes]:
    """Engines by tactic name: the first `per_family` tactics of each family that compute a sample, in the tactics' order."""
    use_standin_gpu(patch)
    engines: dict[str, bytes] = {}
    for backend in (get_backend("cpu", threads=1), StandInGpu()):
        count: dict[str, int] = {}
        for tactic in list_tactics(backend.name):
            family = type(tactic).__module__.split(".")[3]
            if count.get(family, 0) < per_family and (data := _engine_of(tactic, backend)) is not None:
                engines[tactic.name] = data
                count[family] = count.get(family, 0) + 1
    return engines


@functools.cache
def _sample(op: str, k: int) -> tuple[Network, Layer]:
    """The network and layer of a sample; most samples of fused layers are read by every tactic."""
    return sample_layer(op, OPS[op].samples[k])[:2]


def _engine_of(tactic: Tactic, backend: Backend) -> bytes | None:
    """The engine of the first sample with a static layer that the tactic computes."""
    for op in sorted({*tactic.ops, "Fused"} & set(OPS)) if "*" not in tactic.ops else sorted(OPS):
        for k in range(len(OPS[op].samples)):
            net, layer = _sample(op, k)
            if tactic.why_not(layer) is not None:
                continue
            try:
                for signature in tactic.signatures(layer, backend):
                    if signature.inplace or tactic.refuses(layer, signature, backend) is not None:
                        continue
                    for config in tactic.configs(layer, signature, backend)[:1]:
                        kernel = tactic.plan(layer, signature, config, backend)
                        data = engine_bytes(_plan(net, tactic.name, signature, config, backend, kernel.scratch))
                        if len(data) <= LARGEST:
                            return data
            except (WhetError, EngineError):
                continue
    return None


def _plan(net: Network, tactic: str, signature: Signature, config: tuple, backend: Backend, scratch: int) -> EnginePlan:
    (layer,) = net.layers
    net.stage = "lowered"
    inputs = tuple(None if o is None else (o.format, o.dtype.name) for o in signature.inputs)
    outputs = tuple((o.format, o.dtype.name) for o in signature.outputs)
    stored = {t.name: ("linear", t.dtype.name) for t in net.inputs}
    stored |= {t.name: o for t, o in zip(layer.inputs, inputs, strict=True) if t is not None and o is not None and not t.is_constant}
    stored |= {t.name: o for t, o in zip(layer.outputs, outputs, strict=True)}
    offsets, sizes, at = {}, {}, 0
    types = {t.name: t.type for t in net.tensors()}
    from whet.network import DTYPES

    for name, (fmt, dtype) in stored.items():
        sizes[name], offsets[name] = int(format_bytes(types[name].with_dtype(DTYPES[dtype]), fmt)), at
        at += -(-sizes[name] // 64) * 64
    arena = ArenaPlan(at + scratch, offsets, sizes, at, scratch)
    choice = Choice(tactic, config, inputs, outputs, signature.inplace)
    return EnginePlan(net, {layer.name: choice}, [], [arena], backend.name, backend.describe(), backend.key(), backend.threads)
