"""Engines timed interleaved on equal inputs: latencies, differences with confidence intervals, and differences of their outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from math import inf, log10
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from whet.errors import ShapeError
from whet.measure.benchmark import draw_inputs
from whet.measure.compare import compare, time_calls
from whet.measure.policy import LAYERS_SIDE_BY_SIDE, Block, Budget, Policy, Stage
from whet.measure.statistics import compute_confidence_interval
from whet.measure.tensorrt_engine import ComparedEngine

if TYPE_CHECKING:
    from whet.engine import EnginePlan
    from whet.runtime.engine import Engine


@dataclass(frozen=True)
class EngineRow:
    """One engine. `change` is its time relative to the first engine's minus 1, with its 95 % confidence interval; `snr_db` and `max_error` compare
    its outputs with the first engine's (None: no output of the same name and shape)."""

    name: str
    latency_ms: float
    interval_ms: tuple[float, float]
    change: float
    change_interval: tuple[float, float]
    snr_db: float | None
    max_error: float | None

    @property
    def verdict(self) -> str:
        """The difference from the first engine, in words."""
        low, high = (100 * c for c in self.change_interval)
        if low <= 0 <= high:
            return f"no difference from the first that this measurement shows ({low:+.1f} to {high:+.1f} %)"
        word = "slower" if self.change > 0 else "faster"
        return f"{abs(100 * self.change):.1f} % {word} than the first (95 % interval {low:+.1f} to {high:+.1f} %)"

    def to_dict(self) -> dict[str, Any]:
        """JSON data."""
        return {**asdict(self), "verdict": self.verdict}


def compare_engines(
    engines: Mapping[str, ComparedEngine], *, shapes: Mapping[str, tuple[int, ...]] | None = None, seconds: float = 1.0
) -> list[EngineRow]:
    """Times `engines` interleaved, each for about `seconds`, on seeded inputs of `shapes` (default: the first engine's opt shapes).

    Raises ShapeError if an engine does not take these inputs.
    """
    names, loaded = list(engines), list(engines.values())
    with ExitStack() as stack:
        contexts = [stack.enter_context(e.create_context()) for e in loaded]
        feed = draw_inputs(loaded[0], contexts[0].input_shapes(shapes))
        outputs = []
        for name, engine, context in zip(names, loaded, contexts, strict=True):
            inputs = _convert_inputs(name, engine, feed)
            outputs.append(context.run(inputs))
            for n, a in inputs.items():
                buffer = context.input_array(n)
                np.copyto(buffer, a)
                context.bind(n, buffer)
            for n in context.bindable_outputs:
                context.bind(n, context.output_array(n))
        policy = Policy(stages=(Stage(rounds=(7, 100_000), budget=Budget(seconds, "candidate")),), warmup_rounds=3, block=Block(10e-3, 20))
        ranking = compare([time_calls(c.execute) for c in contexts], policy, watch=loaded[0].backend.watch)
    rows = []
    for k, name in enumerate(names):
        ratios = [r - 1 for r in ranking.ratios(k)]
        low, high = ranking.interval(k)
        snr, worst = compute_output_difference(outputs[0], outputs[k])
        change = (median(ratios), compute_confidence_interval(ratios)) if k else (0.0, (0.0, 0.0))
        rows.append(EngineRow(name, 1e3 * median(ranking.samples[k]), (1e3 * low, 1e3 * high), *change, snr, worst))
    return rows


def compute_output_differences(
    engines: Mapping[str, Engine], shapes: Mapping[str, tuple[int, ...]] | None = None
) -> list[tuple[float | None, float | None]]:
    """`compute_output_difference` of each engine from the first, on the inputs of `compare_engines`. Raises ShapeError as it does."""
    first = next(iter(engines.values()))
    with first.create_context() as context:
        feed = draw_inputs(first, context.input_shapes(shapes))
    outputs = []
    for name, engine in engines.items():
        with engine.create_context() as context:
            outputs.append(context.run(_convert_inputs(name, engine, feed)))
    return [compute_output_difference(outputs[0], o) for o in outputs]


@dataclass(frozen=True)
class LayerMilliseconds:
    """Median milliseconds by layer of `plan`, the part of an engine that ran."""

    plan: EnginePlan
    ms: Mapping[str, float]


def compare_layers(engines: Mapping[str, Engine], *, shapes: Mapping[str, tuple[int, ...]] | None = None) -> dict[str, LayerMilliseconds]:
    """Times the layers of `engines`, launch by launch, with the engines interleaved: external load and clocks affect all alike.

    Inputs and errors are those of `compare_engines`. The layers of an engine that runs each sample by itself are timed with one sample.
    """
    names = list(engines)
    with ExitStack() as stack:
        contexts = {n: stack.enter_context(e.create_context()) for n, e in engines.items()}
        feed = draw_inputs(engines[names[0]], contexts[names[0]].input_shapes(shapes))
        runs: dict[str, list[list[float]]] = {n: [] for n in names}
        plans = {}

        def make_runner(name: str) -> Callable[[], float]:
            context, inputs = contexts[name], _convert_inputs(name, engines[name], feed)
            for n, a in inputs.items():
                context.set_input_shape(n, a.shape)
            bound = context.launches()
            plans[name] = bound.shaped.plan
            bound.feed(inputs)
            bound.run()

            def run() -> float:
                runs[name].append(bound.run_timed())
                return sum(runs[name][-1])

            return run

        compare([make_runner(n) for n in names], LAYERS_SIDE_BY_SIDE, watch=engines[names[0]].backend.watch)
    layers = {n: [layer.name for layer in plans[n].network.layers] for n in names}
    return {n: LayerMilliseconds(plans[n], {x: 1e3 * median(r[i] for r in runs[n]) for i, x in enumerate(layers[n])}) for n in names}


def _convert_inputs(name: str, engine: ComparedEngine, feed: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The inputs in the types of `engine`. Raises ShapeError for other input names."""
    if set(engine.inputs) != set(feed):
        raise ShapeError(f"{name} takes the inputs {', '.join(engine.inputs)}, the first engine {', '.join(feed)}: they cannot be compared")
    return {n: feed[n].astype(engine.dtype(n).numpy, copy=False) for n in engine.inputs}


def compute_output_difference(wanted: Mapping[str, np.ndarray], got: Mapping[str, np.ndarray]) -> tuple[float | None, float | None]:
    """(the lowest SNR in dB, the largest absolute difference) of the outputs that both have in equal shapes; (None, None) without any."""
    snrs: list[float] = []
    worst: list[float] = []
    for name, a in wanted.items():
        if name not in got or got[name].shape != a.shape or not a.size:
            continue
        x, y = a.astype(np.float64), got[name].astype(np.float64)
        signal, noise = float(np.sum(x * x)), float(np.sum((x - y) ** 2))
        snrs.append(inf if noise == 0 else -inf if signal == 0 else 10 * log10(signal / noise))
        worst.append(float(np.max(np.abs(x - y))))
    return (min(snrs), max(worst)) if snrs else (None, None)


def make_comparison_records(rows: Sequence[EngineRow]) -> list[dict[str, Any]]:
    """JSON data of all rows; infinite SNRs are null."""
    return [{k: None if isinstance(v, float) and abs(v) == inf else v for k, v in r.to_dict().items()} for r in rows]
