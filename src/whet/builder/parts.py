"""The cost of the operations in fused layers when each runs as a layer of its own, for comparison with the fused layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from whet.builder.build import build
from whet.builder.config import BuildConfig
from whet.engine import EnginePlan
from whet.errors import BuildError, NetworkError
from whet.network import Layer, Network, Tensor

_PRECISIONS = {"f16": "fp16", "bf16": "bf16"}


@dataclass(frozen=True)
class PartTime:
    """An operation of a fused layer. `ms`: the time of its fastest tactic as a layer of its own, without reformats; None with the reason in `why`."""

    op: str
    node: str
    ms: float | None
    why: str = ""


def time_parts(plan: EnginePlan, layers: Sequence[Layer], *, timing_cache: str | None = None,
               progress: Callable[[int, int, str], object] = lambda *_: None) -> dict[str, list[PartTime]]:  # fmt: skip
    """Builds and times each operation in the fused layers among `layers` (with static shapes) on the plan's backend, by name of the layer.

    Equal operations are built once. A part that no tactic computes alone has a reason instead of a time.
    """
    fused = [x for x in layers if x.op == "Fused"]
    known: dict[tuple[Any, ...], tuple[float | None, str]] = {}
    times: dict[str, list[PartTime]] = {}
    for k, layer in enumerate(fused):
        progress(k, len(fused), layer.name)
        choice = plan.choices[layer.name]
        stored = {o[1] for o in (*choice.inputs, *choice.outputs) if o is not None}
        config = BuildConfig(
            backend=plan.backend, threads=plan.threads, optimization_level=2, passes=("none",), verify=False, timing_cache=timing_cache,
            precisions=tuple(name for kind, name in _PRECISIONS.items() if kind in stored),
        )  # fmt: skip
        parts = []
        for x, inputs in _iterate_operations(layer, {}):
            key = (x.op, str(x.attrs), tuple(None if t is None else (str(t.type), t.is_constant) for t in inputs), config.precisions)
            if key not in known:
                known[key] = _time(x, inputs, config)
            parts.append(PartTime(x.op, x.sources[0] if x.sources else "", *known[key]))
        times[layer.name] = parts
    return times


def _iterate_operations(layer: Layer, outer: Mapping[Tensor, Tensor | None]) -> Iterator[tuple[Layer, list[Tensor | None]]]:
    """The layers of a fused layer's body, those of nested fused layers included, each with its inputs. Inputs of the body are replaced by
    those of the fused layer, since its weights are constants only there. `outer` replaces inputs of `layer`."""
    body = layer.regions["body"]
    given = {inner: None if t is None else outer.get(t, t) for inner, t in zip(body.inputs, layer.inputs, strict=True)}
    for x in body.layers:
        if x.op == "Fused":
            yield from _iterate_operations(x, given)
        else:
            yield x, [None if t is None else given.get(t, t) for t in x.inputs]


def _time(layer: Layer, inputs: Sequence[Tensor | None], config: BuildConfig) -> tuple[float | None, str]:
    """(ms, "") of an engine of this one layer, or (None, the reason)."""
    if layer.regions:
        return None, "it has a region"
    net = Network(layer.op)
    seen: dict[Tensor, Tensor] = {}
    for k, t in enumerate(inputs):
        if t is not None and t not in seen:
            seen[t] = net.constant(t.array(), f"c{k}") if t.is_constant else net.add_input(f"x{k}", t.type)
    if not net.inputs:
        return None, "it is computed by the build"
    try:
        new = net.add_layer(layer.op, [None if t is None else seen[t] for t in inputs], layer.attrs)
        for k, t in enumerate(new.outputs):
            net.mark_output(t, f"y{k}")
        plan = build(net, config)
    except (BuildError, NetworkError) as e:
        return None, str(e).splitlines()[0]
    # the fastest candidate in any format, as in the network the formats would follow the adjacent layers
    own = []
    for x in plan.network.layers:
        times = [c.ms for c in plan.report.candidates.get(x.name, ()) if c.ms is not None]
        if x.op != "Reformat" and not times:
            return None, "the build timed nothing"
        own += [min(times)] if x.op != "Reformat" else []
    return sum(own), ""
