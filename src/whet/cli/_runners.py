"""Runners for `whet run`: whet's engine, a saved engine, ONNX Runtime, or the reference. Each returns every value by name."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from whet.errors import ContextError, FrontendError, UsageError
from whet.network import Network

Feeds = Mapping[str, np.ndarray]


def is_engine(path: str) -> bool:
    """True if a file is a whet engine (by its magic bytes). Raises UsageError if it cannot be read."""
    from whet.engine.layout import MAGIC

    try:
        with open(path, "rb") as f:
            return f.read(len(MAGIC)) == MAGIC
    except OSError as e:
        raise UsageError(f"{path} cannot be read: {e.strerror}") from e


def compute_all_values(plan: Any, feeds: Feeds) -> dict[str, np.ndarray]:
    """Runs an engine plan layer by layer and returns every value; quantized values are also returned dequantized."""
    from whet.backends import get_backend
    from whet.runtime import bind

    if plan.arenas[0].concurrent_samples:
        return _compute_values_per_sample(plan, feeds)
    backend = get_backend(plan.backend, threads=plan.threads)
    bound = bind(plan, backend, {t.name: np.shape(feeds[t.name]) for t in plan.network.inputs})
    bound.feed(feeds)
    computed: dict[str, np.ndarray] = {}
    with np.errstate(all="ignore"):
        for layer, _, outs in bound.walk():
            for t, a in zip(layer.outputs, outs, strict=True):
                computed[t.name] = a.astype(t.dtype.numpy, copy=False)
            dequantized = _dequantize_output(layer, outs)
            if dequantized is not None:
                computed.setdefault(*dequantized)
    computed.update(bound.fetch())
    return computed


def _compute_values_per_sample(plan: Any, feeds: Feeds) -> dict[str, np.ndarray]:
    """The values of an engine that runs samples separately, concatenated along the batch axis."""
    from whet.ops import batch_symbol

    one, batch = plan.of_one_sample(), batch_symbol(plan.network) or ""
    each = [compute_all_values(one, {n: a[i : i + 1] for n, a in feeds.items()}) for i in range(len(next(iter(feeds.values()))))]
    shapes = {t.name: [str(d) for d in t.shape] for t in plan.network.tensors()}
    joined = {}
    for name, first in each[0].items():
        axis = shapes[name].index(batch) if batch in shapes.get(name, ()) else None
        joined[name] = first if axis is None else np.concatenate([values[name] for values in each], axis)
    return joined


def _dequantize_output(layer: Any, outs: list[np.ndarray]) -> tuple[str, np.ndarray] | None:
    """The name and values of the float tensor that a quantized layer's output represents, or None."""
    q = layer.regions["body"].layers[-1] if layer.op == "Fused" else layer
    if q.op != "QuantizeLinear" or not q.inputs:
        return None
    if layer.op == "Fused":
        outer = dict(zip(layer.regions["body"].inputs, layer.inputs, strict=True))
        scale, zero = (outer.get(t) for t in (q.inputs[1], q.input(2)))
    else:
        scale, zero = q.inputs[1], q.input(2)
    if scale is None or not scale.is_constant or (scale.type.rank != 0 and scale.array().size != 1):
        return None
    offset = float(zero.array().reshape(-1)[0]) if zero is not None and zero.is_constant else 0.0
    return q.inputs[0].name, ((outs[0].astype(np.float32) - np.float32(offset)) * np.float32(scale.array().reshape(-1)[0])).astype(np.float32)


class OnnxRuntime:
    """Runs a model in ONNX Runtime on the CPU without graph optimizations, with all values as outputs. Raises UsageError if it is not installed."""

    def __init__(self, path: str, outputs_only: bool = False):
        from whet.frontends.onnx_all_outputs import with_all_outputs

        try:
            ort = importlib.import_module("onnxruntime")
        except ImportError as e:
            raise UsageError(f"--against onnxruntime: {e}. pip install onnxruntime, or compare with the reference: --against reference") from e
        data, _ = with_all_outputs(path, () if outputs_only else None)
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.log_severity_level = 3
        state = ort.capi.onnxruntime_pybind11_state
        kinds = ("Fail", "InvalidArgument", "InvalidGraph", "InvalidProtobuf", "NotImplemented", "RuntimeException")
        self.failures = tuple(getattr(state, n) for n in kinds)
        try:
            self.session = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        except self.failures as e:
            raise FrontendError(f"ONNX Runtime refuses {path}: {e}") from e
        self.names = [o.name for o in self.session.get_outputs()]
        self.inputs = {i.name for i in self.session.get_inputs()}

    def __call__(self, feeds: Feeds) -> dict[str, np.ndarray]:
        try:
            got = self.session.run(None, {n: a for n, a in feeds.items() if n in self.inputs})
        except self.failures as e:
            raise ContextError(f"ONNX Runtime fails on these inputs: {e}") from e
        return {n: a for n, a in zip(self.names, got, strict=True) if isinstance(a, np.ndarray)}


class Reference:
    """Runs the NumPy reference in float64."""

    def __init__(self, net: Network):
        self.net = net

    def __call__(self, feeds: Feeds) -> dict[str, np.ndarray]:
        from whet.ops import run_network

        computed: dict[str, np.ndarray] = {}
        with np.errstate(all="ignore"):
            computed.update(run_network(self.net, feeds, widen=True, watch=lambda t, a: computed.__setitem__(t.name, a)))
        return computed


class BuiltEngine:
    """Builds and runs an engine of a model: all values, or with `fused` those that remain after fusion."""

    def __init__(self, net: Network, config: Any, fused: bool):
        self.net, self.config, self.fused = net, config, fused
        self.plans: dict[tuple, Any] = {}

    def __call__(self, feeds: Feeds) -> dict[str, np.ndarray]:
        shapes = {t.name: tuple(np.shape(feeds[t.name])) for t in self.net.inputs}
        key = tuple(shapes.items())
        if key not in self.plans:
            self.plans[key] = self._plan(shapes)
        return compute_all_values(self.plans[key], feeds)

    def _plan(self, shapes: dict[str, tuple[int, ...]]) -> Any:
        import dataclasses

        from whet.builder import build

        profiles = ((shapes, shapes, shapes),) if any(not t.type.static for t in self.net.inputs) else ()
        config = dataclasses.replace(self.config, profiles=profiles)
        if not self.fused:
            config = dataclasses.replace(config, passes=("none",), verify=False)
        return build(self.net, config)


class SavedEngine:
    """Runs a saved engine."""

    def __init__(self, path: str):
        from whet.engine import read_engine

        self.plan = read_engine(path)

    def __call__(self, feeds: Feeds) -> dict[str, np.ndarray]:
        return compute_all_values(self.plan, feeds)
