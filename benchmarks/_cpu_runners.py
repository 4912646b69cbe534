"""Runners of the CPU benchmarks: whet, and its peers at their best settings; verdicts by intervals.

ONNX Runtime gets the fastest of its graph optimization levels, then of waiting threads that spin or sleep, then of memory arenas on or off
(`tune_ort`); the row names what was chosen. OpenVINO runs at its own default precision hint, which is BF16 on CPUs with instructions for it,
and at f32.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from _record import median_interval

Run = Callable[[Mapping[str, np.ndarray]], dict[str, np.ndarray]]

DISTURBED = 0.2  # external load in CPUs: rows above it are excluded from claims, means and verdicts
_TUNING_SECONDS = 0.4  # of runs per option


@dataclass(frozen=True)
class OrtOptions:
    """ONNX Runtime's options: `level` is basic, extended or all."""

    level: str = "all"
    spinning: bool = True
    arena: bool = True


def whet_runner(engine: Path, threads: int) -> Run:
    """An engine; inputs are bound without copies."""
    from whet.runtime import Runtime

    loaded = Runtime(backend="cpu", threads=threads).load(engine)
    context, bound = loaded.create_context(), {}

    def run(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        for name, a in arrays.items():
            if bound.get(name) is not a:
                context.bind(name, a)
                bound[name] = a
        context.execute()
        return context.fetch()

    return run


def ort_runner(model: Path, threads: int, chosen: OrtOptions = OrtOptions()) -> Run:
    """ONNX Runtime with the given options, one pool of threads."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, f"ORT_ENABLE_{chosen.level.upper()}")
    options.add_session_config_entry("session.intra_op.allow_spinning", str(int(chosen.spinning)))
    options.enable_cpu_mem_arena = chosen.arena
    options.log_severity_level = 3
    session = ort.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    names = [o.name for o in session.get_outputs()]
    return lambda arrays: dict(zip(names, session.run(names, dict(arrays)), strict=True))


def tune_ort(model: Path, threads: int, arrays: Mapping[str, np.ndarray]) -> OrtOptions:
    """The fastest options for a model on this machine: level, then spinning, then arena; the default wins a tie."""
    chosen, best = OrtOptions(), _typical_ms(ort_runner(model, threads), arrays)
    for option, values in (("level", ("extended", "basic")), ("spinning", (False,)), ("arena", (False,))):
        for value in values:
            candidate = replace(chosen, **{option: value})
            ms = _typical_ms(ort_runner(model, threads, candidate), arrays)
            if ms < best:
                chosen, best = candidate, ms
    return chosen


def openvino_runner(model: Path, threads: int, precision: str | None = None) -> Run:
    """OpenVINO for latency with the hint `precision`, by default its own."""
    import openvino as ov

    settings: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": 1}
    settings |= {} if precision is None else {"INFERENCE_PRECISION_HINT": precision}
    compiled = ov.Core().compile_model(str(model), "CPU", settings)
    request, names = compiled.create_infer_request(), [o.get_any_name() for o in compiled.outputs]

    def run(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        got = request.infer(dict(arrays), share_inputs=True, share_outputs=True)
        return {n: np.asarray(got[i]) for i, n in enumerate(names)}

    return run


def openvino_default_precision() -> str:
    """OpenVINO's own precision hint on this CPU: f32, or bf16 or f16 if the CPU has instructions for it."""
    import openvino as ov

    return str(ov.Core().get_property("CPU", "INFERENCE_PRECISION_HINT").get_type_name())


def verdict(interval: Sequence[float], bar: float, others_cpus: float) -> str:
    """met or lost if the whole interval (median, low, high) is on one side of the bar, else undecided; disturbed under external load."""
    if others_cpus > DISTURBED:
        return "disturbed"
    _, low, high = interval
    return "met" if low >= bar else "lost" if high < bar else "undecided"


def mean_interval(ratios: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """(median, low, high) of the geometric mean over rows; each row has one ratio per process, and process i of all rows makes one mean."""
    return median_interval([float(np.exp(np.mean(np.log(column)))) for column in zip(*ratios, strict=True)])


def require_even(processes: int) -> None:
    """Both orders of loading, equally often. Raises SystemExit."""
    if processes % 2:
        raise SystemExit(f"--processes={processes}: give an even number, since every second process loads whet first")


def as_record(options: OrtOptions) -> str:
    """The options as a row of a result file names them."""
    o = asdict(options)
    return f"{o['level']}, {'spinning' if o['spinning'] else 'no spinning'}, {'arena' if o['arena'] else 'no arena'}"


def _typical_ms(run: Run, arrays: Mapping[str, np.ndarray]) -> float:
    run(arrays)
    times: list[float] = []
    end = time.perf_counter() + _TUNING_SECONDS
    while time.perf_counter() < end or len(times) < 3:
        start = time.perf_counter()
        run(arrays)
        times.append((time.perf_counter() - start) * 1e3)
    return median(times)
