"""Comparison of models: parameters, FLOPs, zeros and, with built engines, time and memory, whatever tool pruned them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from whet.builder.config import BuildConfig
from whet.errors import NetworkError
from whet.network import Network
from whet.pruning.counting import count_flops, count_params
from whet.pruning.truth import Measured, measure_engines
from whet.sparsity import list_eligible_layers
from whet.sparsity.report import count_zeros, describe_zero_channels, describe_zeros, explain_dense_layers, list_sparse_layers

Progress = Callable[[int, int, str], None]

@dataclass(frozen=True)
class Facts:
    """Figures of one model: `flops` of one run (None if a symbol has no size), share of unstructured `zeros`, number of
    channels that are wholly zero, number of 2:4 layers."""

    params: int
    flops: int | None
    weight_bytes: int
    zeros: float
    two_four: int
    weighted: int
    zero_channels: int
    ms: float | None = None
    peak_bytes: int | None = None
    engine_bytes: int | None = None

    def to_json(self) -> dict[str, Any]:
        """JSON data."""
        return dict(vars(self))


@dataclass(frozen=True)
class Comparison:
    """All models; the first is the baseline. `said` holds remarks on zeros, `measured` the engines (empty if none was built)."""

    names: tuple[str, ...]
    facts: tuple[Facts, ...]
    said: tuple[str, ...]
    measured: tuple[Measured, ...] = ()

    def rows(self) -> list[tuple[str, ...]]:
        """Table rows: label and one cell per model, with the change against the first."""
        shown: list[tuple[str, Callable[[Facts], float | None], Callable[[float], str]]] = [
            ("parameters", lambda x: x.params, lambda v: f"{v:,.0f}"),
            ("FLOPs of a run", lambda x: x.flops, lambda v: f"{v:,.0f}"),
            ("weights MiB", lambda x: x.weight_bytes / 2**20, lambda v: f"{v:.2f}"),
            ("scattered zeros", lambda x: x.zeros, lambda v: f"{v:.0%}"),
            ("zero channels", lambda x: x.zero_channels, lambda v: f"{v:,.0f}"),
            ("2:4 layers", lambda x: x.two_four, lambda v: f"{v:.0f}"),
            ("median ms", lambda x: x.ms, lambda v: f"{v:.3f}"),
            ("peak memory MiB", lambda x: None if x.peak_bytes is None else x.peak_bytes / 2**20, lambda v: f"{v:.2f}"),
            ("engine's weights MiB", lambda x: None if x.engine_bytes is None else x.engine_bytes / 2**20, lambda v: f"{v:.2f}"),
        ]
        made = []
        for what, of, text in shown:
            first, *_ = values = [of(x) for x in self.facts]
            if all(v is None for v in values):
                continue
            changed = what not in ("scattered zeros", "zero channels", "2:4 layers")
            cells = ["-" if v is None else text(v) + (_change(first, v) if k and changed else "") for k, v in enumerate(values)]
            made.append((what, *cells))
        return made

    def to_json(self) -> dict[str, Any]:
        """JSON data."""
        return {"models": [{"name": n, **x.to_json()} for n, x in zip(self.names, self.facts, strict=True)], "said": list(self.said)}


def compare(
    models: Mapping[str, Network], config: BuildConfig | None = None, *, seconds: float = 1.0, progress: Progress | None = None
) -> Comparison:
    """Counts the models (the first is the original); with `config` builds their engines with equal options and times them interleaved.

    Raises BuildError and subclasses; ShapeError for shapes that a model does not accept.
    """
    names, nets = tuple(models), list(models.values())
    runs: Sequence[Measured | None] = [None] * len(nets) if config is None else measure_engines(nets, config, seconds=seconds, progress=progress)
    facts = tuple(_collect_facts(net, run) for net, run in zip(nets, runs, strict=True))
    said = [s for k, net in enumerate(nets) for s in _list_remarks(names[k], net, facts, runs, k)]
    return Comparison(names, facts, tuple(said), tuple(r for r in runs if r is not None))


def _collect_facts(net: Network, run: Measured | None) -> Facts:
    yes, no = list_eligible_layers(net)
    try:
        flops = count_flops(net)
    except NetworkError:  # a symbol for which 1 is not a valid size
        flops = None
    arrays = {t.weight.digest: t.weight.array.nbytes for t in net.constants.values() if t.weight is not None}
    zeros = count_zeros(net)
    counted = Facts(count_params(net), flops, sum(arrays.values()), zeros.scattered, len(yes), len(yes) + len(no), zeros.channels)
    return counted if run is None else replace(counted, ms=run.ms, peak_bytes=run.peak_bytes, engine_bytes=run.weight_bytes)


def _list_remarks(name: str, net: Network, facts: Sequence[Facts], runs: Sequence[Measured | None], k: int) -> list[str]:
    """Remarks on the zeros of model k, with measured times where engines ran."""
    found = []
    x, run, first = facts[k], runs[k], runs[0]
    if (channels := describe_zero_channels(net)) is not None:
        found.append(f"{name}: {channels}")
    zeros = describe_zeros(net)
    if zeros is not None:
        proof = ""
        if k and run is not None and first is not None:
            same = " Both engines execute the same layers: the difference is noise." if _work(run) == _work(first) else ""
            proof = f" Measured here, interleaved: {first.ms:.3f} -> {run.ms:.3f} ms.{same}"
        found.append(f"{name}: {zeros}{proof}")
    if x.two_four and run is not None and not list_sparse_layers(run.plan):
        found.append(f"{name}: {x.two_four} of {x.weighted} layers have 2:4 weights; {explain_dense_layers(run.plan)}.")
    return found


def _work(run: Measured) -> list[tuple]:
    """The layers of an engine by op and operand types, ignoring weight values."""
    layers = [x for x in run.plan.network.layers if x.op != "Reformat"]
    return [(x.op, x.composite, *(str(t.type) for t in (*x.inputs, *x.outputs) if t is not None)) for x in layers]


def _change(before: float | None, after: float) -> str:
    return f" ({100 * (after / before - 1):+.0f} %)" if before else ""
