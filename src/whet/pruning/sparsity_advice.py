"""The 2:4 advisor: times dense against sparse tactics of every weighted layer as if its weights were 2:4 already, before any fine-tuning."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from whet.backends import get_backend
from whet.builder.candidates.compile_ahead import start_compiling
from whet.builder.candidates.enumerate import list_candidates, macs
from whet.builder.candidates.tactic_sources import tactics_for
from whet.builder.config import BuildConfig
from whet.builder.precision.permissions import Permissions
from whet.measure.option import Option
from whet.measure.timing import Conditions, Timer
from whet.measure.timing_cache import TimingCache
from whet.measure.timing_key import layer_text
from whet.network import Layer, Network, evaluate
from whet.pruning.latency_cost import static_layers
from whet.sparsity import force_two_four, is_two_four, reduction_axis, two_four

_CONFIGS = 8  # configs timed per tactic and signature
_FEW_MACS_PER_BYTE = 16  # below it a layer's time is that of its memory traffic on all supported machines


@dataclass(frozen=True)
class LayerAdvice:
    """Dense and sparse time of a layer in ms (None: not timed), the share (0..1) of the weights' magnitude that 2:4 removes, and the reason
    why 2:4 does not pay ("" if it does)."""

    layer: str
    dense_ms: float | None
    sparse_ms: float | None
    sparse_tactic: str
    removed_magnitude: float | None
    reason: str

    @property
    def saved_ms(self) -> float:
        """Milliseconds that the sparse tactic saves; 0 if 2:4 does not pay."""
        if self.reason or self.dense_ms is None or self.sparse_ms is None:
            return 0.0
        return self.dense_ms - self.sparse_ms


@dataclass(frozen=True)
class SparsityAdvice:
    """Advice for a network. `total_ms` is the sum of the dense times of all timed layers that have weights."""

    backend: str
    has_sparse_tactics: bool
    layers: tuple[LayerAdvice, ...]

    @property
    def total_ms(self) -> float:
        return sum(x.dense_ms or 0.0 for x in self.layers)

    @property
    def saved_ms(self) -> float:
        return sum(x.saved_ms for x in self.layers)

    @property
    def verdict(self) -> str:
        """One or two sentences: what to do."""
        if not self.has_sparse_tactics:
            return (
                f"Do not fine-tune for 2:4 here: backend '{self.backend}' has no tactic that computes with 2:4 weights, so zeros are multiplied "
                "like other values. Ask again with --backend=cuda on a Hopper GPU, or remove whole channels (whet prune --latency=0.7x)."
            )
        if not self.saved_ms:
            return "Do not fine-tune for 2:4: no layer is faster with a sparse tactic. whet prune --latency=0.7x removes whole channels."
        count = sum(x.saved_ms > 0 for x in self.layers)
        share = self.saved_ms / self.total_ms
        return f"2:4 saves {self.saved_ms:.4f} of {self.total_ms:.4f} ms ({share:.1%}) in {count} of {len(self.layers)} layers with weights."

    def to_json(self) -> dict[str, Any]:
        """JSON data; times in milliseconds."""
        rows = [{**asdict(x), "saved_ms": x.saved_ms} for x in self.layers]
        return {"backend": self.backend, "has_sparse_tactics": self.has_sparse_tactics, "total_ms": self.total_ms,
                "saved_ms": self.saved_ms, "verdict": self.verdict, "layers": rows}  # fmt: skip


def advise_sparsity(net: Network, config: BuildConfig, progress: Callable[[int, int, str], None] | None = None) -> SparsityAdvice:
    """Times each Conv, Gemm and MatMul with constant weights at the opt shapes, dense and sparse, with the builder's timer and timing cache.

    The sum excludes reformats and other layers; `build` with sparsity="force" measures the engine. Raises BackendError without the device.
    """
    removed = _removed_magnitudes(net)
    layers = static_layers(force_two_four(net)[0], replace(config, sparsity="disable"), filled=True)
    backend = get_backend(config.backend, threads=config.threads)
    tactics, permissions = tactics_for(backend.name, config.tactic_sources), Permissions.of(config)
    tensors = {t for x in layers.values() for t in (*x.inputs, *x.outputs) if t is not None}
    footprint = sum(evaluate(t.type.nbytes, {}) for t in tensors if t.type.static)
    cache = TimingCache(config.timing_cache, partial(warnings.warn, stacklevel=2))
    timer = Timer(backend, cache, Conditions.of(backend, footprint), config.avg_timing, config.error_on_cache_miss)
    weighted = {name: x for name, x in layers.items() if reduction_axis(x) is not None}
    rows, sparse_seen = [], any("sparse" in t.name for t in tactics)
    try:
        for i, (name, layer) in enumerate(weighted.items()):
            if progress is not None:
                progress(i, len(weighted), name)
            listed = list_candidates(layer, tactics, backend, permissions)
            options = _limit(listed.options)
            if backend.capabilities.compiles_ahead and not timer.is_cached(options, listed.text):
                start_compiling(options, backend)
            timer.time(layer, layer_text(layer), options)
            sparse_seen = sparse_seen or any(map(_is_sparse, options))
            refused = [c.reason for c in listed.refused if "sparse" in c.tactic and not c.reason.startswith("computes ")]
            rows.append(_advice(layer, options, refused, removed))
    finally:
        cache.close()
    return SparsityAdvice(backend.name, sparse_seen, tuple(rows))


def _is_sparse(o: Option) -> bool:
    return "sparse" in o.tactic.name or bool(dict(o.config).get("sparse"))


def _limit(options: list[Option]) -> list[Option]:
    """The first `_CONFIGS` configs of each tactic and signature, without fallbacks if there is another tactic."""
    seen: dict[object, int] = {}
    kept = []
    for o in [o for o in options if not o.tactic.fallback] or options:
        key = (o.tactic.name, o.signature)
        seen[key] = seen.get(key, 0) + 1
        if seen[key] <= _CONFIGS:
            kept.append(o)
    return kept


def _advice(layer: Layer, options: list[Option], refused: list[str], removed: Mapping[str, float]) -> LayerAdvice:
    timed = [o for o in options if o.ms is not None]
    dense = min((o for o in timed if not _is_sparse(o)), key=lambda o: o.cost, default=None)
    sparse = min((o for o in timed if _is_sparse(o)), key=lambda o: o.cost, default=None)
    share = next((removed[s] for s in (layer.name, *layer.sources) if s in removed), None)
    return LayerAdvice(
        layer.name,
        dense.cost if dense else None,
        sparse.cost if sparse else None,
        sparse.tactic.name if sparse else "",
        share,
        _why_not(layer, dense, sparse, refused),
    )


def _why_not(layer: Layer, dense: Option | None, sparse: Option | None, refused: list[str]) -> str:
    """The reason why 2:4 does not pay for a layer; "" if it does."""
    found = reduction_axis(layer)
    assert found is not None
    w, axis = found
    if not is_two_four(w.array(), axis):
        return f"alignment: {w.shape[axis]} input channels per group are no multiple of 4"
    if sparse is None:
        return refused[0] if refused else "no sparse tactic for this layer"
    if dense is None or sparse.cost + max(sparse.noise_ms, dense.noise_ms) < dense.cost:
        return ""
    moved = sum(dense.kernel.inputs) + sum(dense.kernel.outputs) + sum(p.nbytes for p in dense.kernel.packed)
    if macs(layer) < _FEW_MACS_PER_BYTE * moved:
        return "slower or equal: memory bound (few multiply-adds per byte); a larger batch may help"
    return "slower or equal: too few rows or channels fill the sparse kernel's tiles; a larger batch may help"


def _removed_magnitudes(net: Network) -> dict[str, float]:
    """By layer name: the share (0..1) of sum(|w|) that 2:4 by magnitude sets to zero."""
    shares = {}
    for layer in net.layers:
        found = reduction_axis(layer)
        if found is None or found[0].shape[found[1]] % 4:
            continue
        w = np.asarray(found[0].array(), np.float32)
        total = float(np.abs(w).sum(dtype=np.float64))
        shares[layer.name] = 1 - float(np.abs(two_four(w, found[1])).sum(dtype=np.float64)) / total if total else 0.0
    return shares
