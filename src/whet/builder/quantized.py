"""INT8 from a floating-point network: calibrate, insert Q/DQ, and keep the integers only where the clock says that they pay.

Three kinds of engines are built and timed in turns: floating point as permitted; every layer that can be quantized; the quantized one
without the layers that were slower than their floating-point form. The fastest is kept; within the noise it is the one with fewer integers.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from whet.backends import get_backend
from whet.builder.assemble import model_digest
from whet.builder.building import build
from whet.builder.config import BuildConfig
from whet.builder.progress import Progress
from whet.engine.plan import EnginePlan
from whet.engine.probe import probe_inputs, probe_shapes
from whet.network import Layer, Network
from whet.passes import Phase, run_passes, select
from whet.precision import Ranges, calibrate, find_places, quantize, read_cache, write_cache
from whet.precision.places import never_negative
from whet.precision.ranges import Range
from whet.runtime import Context, Runtime, WeightStore, bind
from whet.tactics import is_quantized

_INVENTED = 4.0  # largest magnitude of every tensor when there are no data, as trtexec invents it
_SECONDS, _ROUNDS = 1.0, (7, 40)  # spent on timing each engine; turns
_ROUNDS_OF_DROPPING = 2
_MOVING = ("QuantizeLinear", "DequantizeLinear", "Reformat")


@dataclass(frozen=True)
class Calibration:
    """Where ranges come from: a cache that exists, else samples (an iterable of inputs by name), else they are invented.

    `cache` is written after calibrating. `method` and `forced` as in precision.calibrate.
    """

    samples: Callable[[], Iterable[Mapping[str, np.ndarray]]] | None = None
    cache: str | None = None
    method: str = "auto"
    forced: tuple[tuple[str, str], ...] = ()
    zero_points: bool = True


def is_explicit(net: Network) -> bool:
    """Whether the network says itself where it is quantized."""
    return any(x.op in ("QuantizeLinear", "DequantizeLinear") for x in net.layers)


def prepared(net: Network, config: BuildConfig) -> Network:
    """A copy of the source network after the passes up to the folding of weights: what calibration looks at and Q/DQ goes into."""
    made = net.clone()
    run_passes(made, [p for p in select(config.optimization_level, config.passes) if p.phase <= Phase.FOLD])
    return made


def calibrated_ranges(net: Network, made: Network, calibration: Calibration, config: BuildConfig, note: Callable[[str], None]) -> Ranges:
    """Ranges for `made` (prepared from `net`), from the cache, the samples, or invented with a loud note."""
    model = model_digest(net)
    if calibration.cache and os.path.exists(calibration.cache):
        return read_cache(calibration.cache, made, model)
    if calibration.samples is None:
        note(
            "INT8 without calibration: the ranges are INVENTED (as trtexec does), so times are real but outputs mean nothing. "
            "Give --calibData=DIR|FILE.npz|FILE.npy|python:MODULE:FUNCTION or --calib=CACHE."
        )
        return invented_ranges(made)
    run = EngineRun(made, find_places(made).names())
    found = calibrate(
        made, calibration.samples(), run=run, method=calibration.method, forced=dict(calibration.forced),
        zero_points=calibration.zero_points, model=model,
    )  # fmt: skip
    if calibration.cache:
        write_cache(calibration.cache, found)
    return found


def invented_ranges(made: Network) -> Ranges:
    """The same range for every tensor: good for timing and nothing else."""
    places = find_places(made)
    return Ranges({t.name: Range(0.0 if never_negative(t) else -_INVENTED, _INVENTED, "invented") for t in places.roots})


class EngineRun:
    """A network's values by an FP32 engine of fixed kernels on one thread: the same bits for the same sample, whatever runs beside it."""

    def __init__(self, net: Network, names: Iterable[str]):
        self.net, self.names = net, list(names)
        self._contexts: dict[tuple, Context] = {}

    def __call__(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        shapes = {t.name: tuple(np.shape(feeds[t.name])) for t in self.net.inputs}
        key = tuple(shapes.items())
        if key not in self._contexts:
            self._contexts[key] = self._context(shapes)
        got = self._contexts[key].run(feeds)
        return {n: feeds[n] if n in shapes else got[n] for n in self.names}

    def _context(self, shapes: dict[str, tuple[int, ...]]) -> Context:
        watched = self.net.clone()
        watched.outputs = []
        inputs = {t.name for t in watched.inputs}
        for name in self.names:
            if name not in inputs:
                watched.mark_output(watched.tensor(name))
        watched.prune_dead()
        dynamic = any(not t.type.static for t in watched.inputs)
        config = BuildConfig(
            threads=1, optimization_level=0, passes=("none",), verify=False, timing_cache="", whole_engines=0,
            profiles=((shapes, shapes, shapes),) if dynamic else (),
        )  # fmt: skip
        return Runtime(backend="cpu", threads=1).load(build(watched, config)).create_context()


def build_int8(
    net: Network,
    config: BuildConfig,
    calibration: Calibration,
    *,
    progress: Progress | None = None,
    inputs: Mapping[str, np.ndarray] | None = None,
) -> EnginePlan:
    """The fastest engine of a floating-point network with INT8 permitted. `config.precisions` names what else is.

    Raises CalibrationError, and what `build` raises. The plan's report says under "precision_choice" what was timed.
    """
    notes: list[str] = []
    made = prepared(net, config)
    places = find_places(made, _pinned(config))
    plain = dataclasses.replace(config, precisions=tuple(p for p in config.precisions if p != "int8"))
    if not places.layers:
        plan = build(net, plain, progress=progress, inputs=inputs)
        plan.report["notes"].append("--int8: the network has no convolution or product with constant weights that 8 bits could compute")
        return plan
    ranges = calibrated_ranges(net, made, calibration, config, notes.append)
    pinned = _pinned(config)

    def integers(skip: frozenset[str]) -> EnginePlan:
        chosen = quantize(made, ranges, skip=lambda x: pinned(x) or bool(skip & _names(x)))
        return build(chosen, config, progress=progress, inputs=inputs)

    full = integers(frozenset())
    machine = get_backend(config.backend, threads=config.threads)
    if not getattr(machine, "runs", True) or config.optimization_level == 0:
        full.report["notes"] += [*notes, "INT8 is used wherever it can be: at this level nothing is timed, so it may not pay"]
        return full
    tried = [("floating point", build(net, plain, progress=progress, inputs=inputs), frozenset[str]()), ("int8", full, frozenset[str]())]
    for _ in range(_ROUNDS_OF_DROPPING):
        _, last, skip = tried[-1]
        slow = slow_layers(tried[0][1], last, places.layers) - skip
        if not slow or len(slow | skip) >= len(places.layers):
            break
        wider = skip | slow
        tried.append((f"int8 without {len(wider)} layers that do not pay", integers(wider), wider))
    times = in_turns([plan for _, plan, _ in tried], machine, config)
    return _kept(tried, times, notes, places.layers)


def _kept(tried: list[tuple[str, EnginePlan, frozenset[str]]], times: list[list[float]], notes: list[str], layers: list[Layer]) -> EnginePlan:
    """The fastest; of those within the noise the one with the fewest integers (floating point, then the fewest layers)."""
    middle = [median(t) * 1e3 for t in times]
    order = sorted(range(len(tried)), key=lambda i: (i > 0, -len(tried[i][2])))
    best = min(middle)
    spread = [(float(np.quantile(t, 0.75)) - float(np.quantile(t, 0.25))) * 500 for t in times]
    fastest = middle.index(best)
    kept = next(i for i in order if middle[i] - best <= max(0.003 * best, min(spread[i], spread[fastest], 0.02 * best)))
    plan = tried[kept][1]
    plan.report["latency_ms"] = middle[kept]
    plan.report["precision_choice"] = [
        {"what": what, "ms": ms, "spread_ms": s, "kept": i == kept, "float_layers": sorted(skip)}
        for i, ((what, _, skip), ms, s) in enumerate(zip(tried, middle, spread, strict=True))
    ]
    shown = ", ".join(f"{what} {ms:.3f} ms" for (what, _, _), ms in zip(tried, middle, strict=True))
    if kept == 0:
        notes.append(f"--int8 is permitted but does not pay here: {shown}. The engine computes in floating point.")
    else:
        left = len(tried[kept][2])
        floats = f"; {left} of {len(layers)} quantizable layers stay in floating point" if left else ""
        notes.append(f"INT8 pays: {shown}{floats}.")
    plan.report["notes"] = [*plan.report.get("notes", []), *notes]
    return plan


def slow_layers(floats: EnginePlan, integers: EnginePlan, layers: list[Layer]) -> frozenset[str]:
    """Names of the layers whose quantized form, with the Q, DQ and reformats around it, took as long as the floating-point one."""
    before, after = _times(floats), _times(integers)
    found = set()
    for layer in layers:
        own = _names(layer)
        mine = [x for x in integers.network.layers if is_quantized(x) and own & _names(x)]
        theirs = [x for x in floats.network.layers if own & _names(x)]
        if len(mine) != 1 or not theirs:
            continue
        cost = after.get(mine[0].name, 0.0) + _around(mine[0], integers, after)
        reference = sum(before.get(x.name, 0.0) + _around(x, floats, before, only="Reformat") for x in theirs)
        if reference and cost >= reference:
            found.add(layer.name)
    return frozenset(found)


def _times(plan: EnginePlan) -> dict[str, float]:
    return dict(plan.report.get("layer_ms", {}))


def _around(layer: Layer, plan: EnginePlan, times: Mapping[str, float], only: str = "") -> float:
    """Milliseconds of the moving layers next to one: those that feed it, and those that read it, shared among their readers."""
    users = plan.network.users()
    kinds = (only,) if only else _MOVING
    cost = 0.0
    for t in layer.inputs:
        if t is not None and t.maker is not None and t.maker.op in kinds:
            cost += times.get(t.maker.name, 0.0) / max(len(users.get(t, [])), 1)
    for t in layer.outputs:
        cost += sum(times.get(r.name, 0.0) for r, _ in users.get(t, []) if r.op in kinds)
    return cost


def _names(layer: Layer) -> frozenset[str]:
    """What a layer is known by in both engines: its source nodes, or the parts of its name."""
    return frozenset(layer.sources) or frozenset(layer.name.split(" + "))


def _pinned(config: BuildConfig) -> Callable[[Layer], bool]:
    """The layers that --layerPrecisions keeps in floating point."""
    from fnmatch import fnmatchcase

    if config.precision_constraints == "none":
        return lambda layer: False
    patterns = [n for n, p in config.layer_precisions if p != "int8"]
    return lambda layer: any(fnmatchcase(name, pattern) for pattern in patterns for name in (layer.name, *layer.sources))


def in_turns(plans: list[EnginePlan], machine: Any, config: BuildConfig) -> list[list[float]]:
    """Seconds of several engines, run in turns on the same inputs."""
    inputs = probe_inputs(plans[0].network, config.seed, probe_shapes(plans[0]))
    store = WeightStore(machine)
    bounds = []
    for plan in plans:
        bound = bind(plan, machine, store=store)
        bound.feed(inputs)
        bound.seconds(2)
        bounds.append(bound)
    once = sum(b.seconds(1)[0] for b in bounds)
    rounds = max(_ROUNDS[0], min(_ROUNDS[1], int(_SECONDS * len(bounds) / max(once, 1e-6))))
    times: list[list[float]] = [[] for _ in bounds]
    for k in range(rounds):
        for i in range(len(bounds)) if k % 2 == 0 else reversed(range(len(bounds))):
            times[i].append(bounds[i].seconds(1)[0])
    return times
