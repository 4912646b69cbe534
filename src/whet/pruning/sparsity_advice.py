"""The 2:4 advisor: times dense against sparse tactics of every weighted layer as if its weights were 2:4 already, before any fine-tuning."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from whet.backends import Backend
from whet.builder.batching.profiles import OPT, resolve_profiles
from whet.builder.candidates.compile_ahead import start_compiling
from whet.builder.candidates.enumerate import Candidates, count_macs, list_candidates
from whet.builder.config import BuildConfig
from whet.errors import PruneError
from whet.measure.option import Option
from whet.network import Layer, Network, evaluate, parse_type
from whet.pruning.latency_cost import lower_to_static_layers
from whet.pruning.latency_table import LatencyTable
from whet.pruning.meter import Meter
from whet.pruning.truth import measure_engines
from whet.sparsity import find_reduction_axis, force_two_four, is_two_four, two_four
from whet.sparsity.report import is_sparse, list_sparse_layers

_CONFIGS = 8  # configs timed per tactic and signature
_FINALISTS = 3  # dense and as many sparse options that are timed with cold weights too
_SMALL = 0.02  # share of a network's time; a smaller gain does not pay for fine-tuning
_REPEATS = 0.02  # share by which the times of the fastest options of a layer differ between two measurements
_IDLE = 0.35  # a layer whose floor at the peak rates is below this share of its time is bound by neither bytes nor arithmetic
_PROBE = 256  # channels of the layers that tell if the device has sparse tactics

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class LayerAdvice:
    """Dense and sparse time of a layer in ms (None: not timed), the share (0..1) of the weights' magnitude that 2:4 removes, and the reason
    why 2:4 does not pay ("" if it does). A difference of at most `noise_ms` does not count.

    `node` is the node of the model that has the weights. `kind` is "linear" or the extent of the filters ("3x3"); `in_channels` are those of
    one group.
    """

    layer: str
    node: str
    kind: str
    in_channels: int
    out_channels: int
    dense_ms: float | None
    sparse_ms: float | None
    dense_tactic: str
    sparse_tactic: str
    removed_magnitude: float | None
    reason: str
    noise_ms: float = 0.0

    @property
    def saved_ms(self) -> float:
        """Milliseconds that the sparse tactic saves; 0 if 2:4 does not pay."""
        if self.reason or self.dense_ms is None or self.sparse_ms is None:
            return 0.0
        return self.dense_ms - self.sparse_ms

    @property
    def speedup(self) -> float | None:
        """Dense over sparse time; None if one of them was not timed."""
        return self.dense_ms / self.sparse_ms if self.dense_ms and self.sparse_ms else None


@dataclass(frozen=True)
class EngineTimes:
    """Measured times in ms of the engine with the model's weights and of the one with forced 2:4 weights, timed interleaved, the number of
    layers that run a sparse tactic in the latter, and the 95 % interval of the share (0..1) of the time that it saves.

    Times are those of the computation: on a GPU they exclude the transfer of inputs and outputs.
    """

    dense_ms: float
    sparse_ms: float
    sparse_layers: int
    saved_interval: tuple[float, float]

    @property
    def is_noise(self) -> bool:
        """True if the measurement does not show a difference."""
        low, high = self.saved_interval
        return low <= 0 <= high


@dataclass(frozen=True)
class SparsityAdvice:
    """Advice for a network at one batch and one set of permitted precisions.

    `total_ms` is the sum of the dense times of all timed layers with weights, `other_ms` that of the other layers. `no_sparse_reason` says why
    the device has no sparse tactics ("" if it has). `load` is a remark on external load while layers were timed ("" if there was none).
    """

    backend: str
    precision: str
    batch: int | None
    no_sparse_reason: str
    other_ms: float
    layers: tuple[LayerAdvice, ...]
    engine: EngineTimes | None = None
    load: str = ""

    @property
    def has_sparse_tactics(self) -> bool:
        """True if the device computes with 2:4 weights in one of the permitted precisions."""
        return not self.no_sparse_reason

    @property
    def total_ms(self) -> float:
        return sum(x.dense_ms or 0.0 for x in self.layers)

    @property
    def saved_ms(self) -> float:
        return sum(x.saved_ms for x in self.layers)

    @property
    def predicted_share(self) -> float:
        """The predicted share (0..1) of the network's time that 2:4 saves."""
        whole = self.total_ms + self.other_ms
        return self.saved_ms / whole if whole else 0.0

    @property
    def measured_share(self) -> float | None:
        """The share (0..1) of the engine's time that forced 2:4 weights save; None if no engine was built."""
        return None if self.engine is None else 1 - self.engine.sparse_ms / self.engine.dense_ms

    @property
    def label(self) -> str:
        """The setting in a few characters: "fp16, batch 8"."""
        return self.precision + ("" if self.batch is None else f", batch {self.batch}")

    @property
    def verdict(self) -> str:
        """One to three sentences: what to do."""
        if not self.has_sparse_tactics:
            return (
                f"Do not fine-tune for 2:4 here: {self.no_sparse_reason}. "
                "Ask again with --backend=cuda on a Hopper GPU, or remove whole channels (whet prune --latency=0.7x)."
            )
        other = "whet prune --latency=0.7x removes whole channels."
        if not self.saved_ms:
            return f"Do not fine-tune for 2:4: no layer is faster with a sparse tactic. {other}"
        count = sum(x.saved_ms > 0 for x in self.layers)
        text = (
            f"2:4 saves {self.saved_ms:.4f} of {self.total_ms + self.other_ms:.4f} ms ({self.predicted_share:.1%}, predicted from single layers) "
            f"in {count} of {len(self.layers)} layers with weights."
        )
        if self.engine is not None and self.measured_share is not None:
            text += (
                f" The whole engine takes {self.engine.dense_ms:.4f} ms dense and {self.engine.sparse_ms:.4f} ms with forced 2:4 weights "
                f"({self.measured_share:+.1%} saved, measured, 95 % interval {self.engine.saved_interval[0]:+.1%} to "
                f"{self.engine.saved_interval[1]:+.1%}; {self.engine.sparse_layers} layers run sparse)."
            )
            if self.engine.is_noise:
                return f"Do not fine-tune for 2:4: the measured difference is noise. {text} {other}"
        share = self.predicted_share if self.measured_share is None else self.measured_share
        return text if share >= _SMALL else f"Do not fine-tune for 2:4: the gain is below {_SMALL:.0%}. {text} {other}"

    def to_json(self) -> dict[str, Any]:
        """JSON data; times in milliseconds."""
        rows = [{**asdict(x), "saved_ms": x.saved_ms, "speedup": x.speedup} for x in self.layers]
        return {
            "backend": self.backend, "precision": self.precision, "batch": self.batch, "has_sparse_tactics": self.has_sparse_tactics,
            "total_ms": self.total_ms, "other_ms": self.other_ms, "saved_ms": self.saved_ms, "predicted_share": self.predicted_share,
            "engine": None if self.engine is None else {**asdict(self.engine), "measured_share": self.measured_share},
            "verdict": self.verdict, "load": self.load, "layers": rows,
        }  # fmt: skip


@dataclass(frozen=True)
class _Timed:
    """A layer with its fastest dense and sparse option, the reasons of sparse tactics that refused it, and the sum of its parts' times if no
    tactic computes it fused."""

    layer: Layer
    dense: Option | None
    sparse: Option | None
    refused: list[str]
    parts_ms: float | None = None


def advise_sparsity(net: Network, config: BuildConfig, progress: Progress | None = None, *, engines: bool = False) -> SparsityAdvice:
    """Times each Conv, Gemm and MatMul with constant weights at the opt shapes, dense and sparse, with the builder's timer and timing cache;
    on GPUs the fastest ones again with weights out of the L2 cache, as a network reads them.

    `engines`: if a layer gains, also builds the engine with and without forced 2:4 weights and measures both. The sum of layer times excludes
    reformats. Raises BackendError without the device, and BuildError if an engine cannot be built.
    """
    config = replace(config, sparsity="enable")
    layers = lower_to_static_layers(force_two_four(net)[0], config, filled=True)
    nodes = {x.name for x in net.layers if find_reduction_axis(x) is not None}
    timed, other_ms = [], 0.0
    with Meter(config, LatencyTable(), layers) as meter:
        listed = {name: _list(layer, meter) for name, layer in layers.items() if find_reduction_axis(layer) is not None}
        meter.announce(layer for name, layer in layers.items() if name not in listed)
        for i, (name, layer) in enumerate(layers.items()):
            if progress is not None:
                progress(i, len(layers), name)
            if name in listed:
                timed.append(_time(listed.pop(name), meter))
                continue
            try:
                other_ms += meter.ms(layer)
            except PruneError:  # the build names layers that nothing computes
                continue
        reason = "" if any(x.sparse is not None for x in timed) else _why_no_sparse_tactics(config, meter)
        rates = PeakRates.of(meter.backend, timed)
    removed = _compute_removed_magnitudes(net)
    first = next(iter(resolve_profiles(net, config)[0][0].shapes.values()), ((), (), ()))[OPT] if net.inputs else ()
    advice = SparsityAdvice(
        meter.backend.name,
        "+".join(config.precisions) or "fp32",
        int(first[0]) if first else None,
        reason,
        other_ms,
        tuple(_make_advice(x, nodes, removed, rates) for x in timed),
        load=meter.timer.loads.describe("these times may be off. Run the command again when it is idle."),
    )
    if not engines or not advice.saved_ms:
        return advice
    dense, sparse = measure_engines([net, force_two_four(net)[0]], config, progress=progress)
    low, high = sparse.ratio_interval
    return replace(advice, engine=EngineTimes(dense.ms, sparse.ms, len(list_sparse_layers(sparse.plan)), (1 - high, 1 - low)))


def _list(layer: Layer, meter: Meter) -> Candidates:
    """The candidates of a layer; starts compiling those without a cached time."""
    listed = list_candidates(layer, meter.tactics, meter.backend, meter.permissions)
    listed.options = _limit(listed.options)
    if meter.backend.capabilities.compiles_ahead and not meter.timer.is_cached(listed.options, listed.text):
        start_compiling(listed.options, meter.backend)
    return listed


def _time(listed: Candidates, meter: Meter) -> _Timed:
    layer, options, timer = listed.layer, listed.options, meter.timer
    refused = [c.reason for c in listed.refused if is_sparse(c.tactic, c.config) and not c.reason.startswith("computes ")]
    if layer.op == "Fused" and all(o.tactic.fallback for o in options):
        return _Timed(layer, None, None, refused, meter.ms(layer))  # the build runs its parts
    timer.time(layer, listed.text, options, keep=True)
    dense, sparse = ([o for o in options if o.ms is not None and _is_sparse(o) == kind] for kind in (False, True))
    finalists = [o for group in (dense, sparse) for o in sorted(group, key=lambda o: o.cost)[:_FINALISTS]]
    timer.time_cold(layer, listed.text, sorted(finalists, key=lambda o: o.rank))
    return _Timed(
        layer,
        min((o for o in finalists if not _is_sparse(o)), key=lambda o: o.cost, default=None),
        min((o for o in finalists if _is_sparse(o)), key=lambda o: o.cost, default=None),
        refused,
    )


def _is_sparse(o: Option) -> bool:
    return is_sparse(o.tactic.name, o.config)


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


def _why_no_sparse_tactics(config: BuildConfig, meter: Meter) -> str:
    """Why the device computes no 2:4 weights in the permitted precisions, asked with a matrix product and a convolution that suit all sparse
    kernels; "" if it does."""
    reasons: dict[str, str] = {}
    for layer in lower_to_static_layers(_build_probe(), replace(config, profiles=()), filled=True).values():
        if find_reduction_axis(layer) is None:
            continue
        listed = list_candidates(layer, meter.tactics, meter.backend, meter.permissions)
        if any(map(_is_sparse, listed.options)):
            return ""
        reasons |= {c.tactic: c.reason for c in listed.refused if is_sparse(c.tactic, c.config) and not c.reason.startswith("computes ")}
    if not reasons:
        return f"backend '{meter.backend.name}' has no tactic that computes with 2:4 weights, so zeros are multiplied like other values"
    name, why = next(iter(reasons.items()))
    return f"the sparse tactics of backend '{meter.backend.name}' refuse this device or precision ({name}: {why})"


def _build_probe() -> Network:
    """A matrix product and a 3x3 convolution with 2:4 weights."""
    rng = np.random.default_rng(0)
    net = Network("probe", "source")
    x = net.add_input("x", parse_type(f"f32[{_PROBE},{_PROBE}]"))
    net.mark_output(net.add("MatMul", x, net.constant(two_four(rng.standard_normal((_PROBE, _PROBE), np.float32), 0), "w")), "y")
    image = net.add_input("image", parse_type(f"f32[1,{_PROBE},8,8]"))
    filters = net.constant(two_four(rng.standard_normal((_PROBE, _PROBE, 3, 3), np.float32), 1), "filters")
    net.mark_output(net.add("Conv", image, filters, pads=(1,) * 4), "features")
    return net


@dataclass(frozen=True)
class PeakRates:
    """Peak bytes and multiply-adds per ms: declared by the device, else (`declared` is empty) the highest rates of this network's layers.
    `sparse_arithmetic`: the device multiplies 2:4 weights at a higher rate than dense ones."""

    bytes_per_ms: float
    macs_per_ms: float
    declared: Mapping[str, float]
    sparse_arithmetic: bool

    @staticmethod
    def of(backend: Backend, timed: list[_Timed]) -> PeakRates:
        best = [(x.layer, x.dense) for x in timed if x.dense is not None and x.dense.ms]
        peaks = backend.peaks()
        return PeakRates(
            peaks["bytes"] / 1e3 if peaks else max((count_traffic_bytes(layer, o) / o.cost for layer, o in best), default=0.0),
            max((count_macs(layer) / o.cost for layer, o in best), default=0.0),
            peaks,
            "wgmma" in backend.capabilities.features,
        )

    def floors_ms(self, layer: Layer, o: Option) -> tuple[float, float]:
        """Least milliseconds for the memory traffic and for the multiply-adds of an option."""
        stored = next((s.dtype.name for s in o.signature.inputs if s is not None), "f32")
        kind = {"u8": "i8"}.get(stored, "f8" if stored.startswith("f8") else stored)
        peak = self.declared.get(kind, 0.0) / 2e3 or self.macs_per_ms
        return count_traffic_bytes(layer, o) / self.bytes_per_ms if self.bytes_per_ms else 0.0, count_macs(layer) / peak if peak else 0.0


def count_traffic_bytes(layer: Layer, o: Option) -> int:
    """Bytes that a kernel reads and writes, weights included: as packed, else as they are in the network."""
    constants = [t for t, s in zip(layer.inputs, o.signature.inputs, strict=True) if t is not None and t.is_constant and s is None]
    weights = sum(p.nbytes for p in o.kernel.packed) or sum(evaluate(t.type.nbytes, {}) for t in constants)
    return sum(o.kernel.inputs) + sum(o.kernel.outputs) + weights


def _make_advice(x: _Timed, nodes: set[str], removed: Mapping[str, float], rates: PeakRates) -> LayerAdvice:
    found = find_reduction_axis(x.layer)
    assert found is not None
    w, axis = found
    is_conv = "Conv" in (x.layer.op, x.layer.composite)
    node = next((s for s in (x.layer.name, *x.layer.sources) if s in nodes), x.layer.name)
    outputs = 0 if is_conv or axis != w.type.rank - 2 else w.type.rank - 1
    return LayerAdvice(
        x.layer.name,
        node,
        "x".join(map(str, w.shape[2:])) if is_conv else "linear",
        int(w.shape[axis]),
        int(w.shape[outputs]),
        x.dense.cost if x.dense else x.parts_ms,
        x.sparse.cost if x.sparse else None,
        x.dense.tactic.name if x.dense else "",
        x.sparse.tactic.name if x.sparse else "",
        removed.get(node),
        _why_not(x, rates),
        _compute_noise_ms(x),
    )


def _compute_noise_ms(x: _Timed) -> float:
    """The largest difference in ms of the dense and the sparse time that does not count: the spread of both, and at least what two measurements of
    the same layer differ by."""
    if x.dense is None or x.sparse is None:
        return 0.0
    return max(x.sparse.noise_ms, x.dense.noise_ms, _REPEATS * x.dense.cost)


def _why_not(x: _Timed, rates: PeakRates) -> str:
    """The reason why 2:4 does not pay for a layer; "" if it does."""
    found = find_reduction_axis(x.layer)
    assert found is not None
    w, axis = found
    if not is_two_four(w.array(), axis):
        return f"alignment: {w.shape[axis]} input channels per group are no multiple of 4"
    if x.sparse is None:
        return x.refused[0] if x.refused else "no sparse tactic for this layer"
    if x.dense is None or x.sparse.cost + _compute_noise_ms(x) < x.dense.cost:
        return ""
    memory, compute = rates.floors_ms(x.layer, x.dense)
    floors = f"{memory:.4f} ms for its bytes, {compute:.4f} ms for its multiply-adds at the {'device' if rates.declared else 'network'}'s peak rates"
    if max(memory, compute) < _IDLE * x.dense.cost:
        return f"slower or equal: too little work for the device ({floors}); a larger batch may help"
    if memory > compute:
        return f"slower or equal: memory bound ({floors}), and 2:4 halves the weights' bytes only"
    if not rates.sparse_arithmetic:
        return f"slower or equal: compute bound ({floors}), and the sparse kernels of this backend save bytes, not multiply-adds"
    return f"slower or equal: too few rows or channels fill the sparse kernel's tiles ({floors}); a larger batch may help"


def _compute_removed_magnitudes(net: Network) -> dict[str, float]:
    """By layer name: the share (0..1) of sum(|w|) that 2:4 by magnitude sets to zero."""
    shares = {}
    for layer in net.layers:
        found = find_reduction_axis(layer)
        if found is None or found[0].shape[found[1]] % 4:
            continue
        w = np.asarray(found[0].array(), np.float32)
        total = float(np.abs(w).sum(dtype=np.float64))
        shares[layer.name] = 1 - float(np.abs(two_four(w, found[1])).sum(dtype=np.float64)) / total if total else 0.0
    return shares
