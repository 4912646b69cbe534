"""Builds and runs a candidate's engine: builder options from the recipe, input shapes for the batch, predictions for a metric."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from whet.backends import get_capabilities
from whet.builder import BuildConfig
from whet.builder.assemble import compute_model_digest
from whet.builder.build import build
from whet.builder.lock.relock import read_recipe
from whet.builder.precision.float8 import build_float8
from whet.builder.precision.int8 import Calibration, build_int8, is_explicit, prepare, quantize_network
from whet.engine.plan import EnginePlan
from whet.errors import UsageError
from whet.network import Network
from whet.runtime import Context, Engine, Runtime
from whet.search.recipe.metrics import Predict
from whet.search.recipe.recipe import AutoRecipe, list_switches
from whet.search.recipe.space import Candidate

Feeds = Mapping[str, np.ndarray]


def make_input_shapes(net: Network, recipe: AutoRecipe, batch: int) -> dict[str, tuple[int, ...]]:
    """Shapes of all inputs for `batch` samples. Raises UsageError if the recipe leaves a dimension undefined."""
    shapes = recipe.shapes or {}
    unknown = [n for n in shapes if n not in {t.name for t in net.inputs}]
    if unknown:
        raise UsageError(f"'shapes': the model has no input {unknown[0]!r}; its inputs: {', '.join(f'{t.name} {t.type}' for t in net.inputs)}")
    result = {}
    for t in net.inputs:
        dims = list(shapes.get(t.name, ()))
        if dims and len(dims) != t.type.rank:
            raise UsageError(f"'shapes.{t.name}' has {len(dims)} dimensions, the input is {t.type}")
        shape: list[int] = []
        for i, d in enumerate(t.shape):
            if isinstance(d, int):
                shape.append(d)
            elif i == 0:
                shape.append(batch)
            elif dims:
                shape.append(dims[i])
            else:
                raise UsageError(f"the input {t.name} {t.type} has more dynamic dimensions than its batch: give `shapes: {{{t.name}: ...}}`")
        result[t.name] = tuple(shape)
    return result


def build_config(net: Network, recipe: AutoRecipe, candidate: Candidate, level: int) -> BuildConfig:
    """The builder's options for a candidate. On a GPU, 8-bit precisions also permit FP16 for the layers that stay in floating point."""
    name = candidate.precision
    also = get_capabilities(recipe.backend).with_8_bits if name in ("int8", "fp8") else ()
    permitted = () if name == "fp32" else (*also, name)  # in the flags' order
    shapes = make_input_shapes(net, recipe, candidate.batch)
    static = all(t.type.static for t in net.inputs)
    return BuildConfig(
        objective="latency" if recipe.target.engine_size is None else "size",
        backend=recipe.backend,
        threads=recipe.threads,
        precisions=permitted,
        sparsity="enable" if candidate.two_four else "disable",
        profiles=() if static else ((shapes, shapes, shapes),),
        optimization_level=level,
        passes=list_switches(candidate.fusion),
        timing_cache=recipe.timing_cache,
        profiling_verbosity="detailed",
        whole_engines=2 if level < 3 else 4,
    )


def build_engine_plan(net: Network, config: BuildConfig, calibration: Feeds, folder: Path, progress: Any = None) -> EnginePlan:
    """Builds a network's engine; in INT8 and FP8 with ranges from `calibration` (stacked samples), saved as calibration.json in `folder`."""
    if not {"int8", "fp8"} & set(config.precisions):
        return build(net, config, progress=progress)
    samples = [{n: a[i : i + 1] for n, a in calibration.items()} for i in range(len(next(iter(calibration.values()))))]
    fixed = {t.name: t.shape[0] for t in net.inputs if isinstance(t.shape[0], int)}
    if any(d != 1 for d in fixed.values()):
        samples = [dict(calibration)]
    source = Calibration(samples=lambda: samples, cache=str(folder / "calibration.json"))
    return (build_int8 if "int8" in config.precisions else build_float8)(net, config, source, progress=progress)


def rebuild_plan(net: Network, config: BuildConfig) -> EnginePlan:
    """Builds the engine of `config.lock` from its network (with Q/DQ, or in floating point). Raises LockError."""
    if is_explicit(net) or not {"int8", "fp8"} & set(config.precisions):
        return build(net, config)
    return (build_int8 if "int8" in config.precisions else build_float8)(net, config, Calibration())  # ranges come from the lock


def find_quantized_source(net: Network, config: BuildConfig, plan: EnginePlan) -> Network | None:
    """The Q/DQ network of a calibrated INT8 plan; None for floating-point and FP8 plans (their lock is complete)."""
    if "int8" not in config.precisions or plan.report.quantized is None:
        return None
    chosen = quantize_network(prepare(net, config), read_recipe(plan.report.quantized))
    return chosen if compute_model_digest(chosen) == plan.model_digest else None


def build_quick_engine(net: Network, recipe: AutoRecipe, batch: int = 1) -> Engine:
    """A CPU engine built without timing, to score a network between steps."""
    shapes = make_input_shapes(net, recipe, batch)
    dynamic = any(not t.type.static for t in net.inputs)
    config = BuildConfig(
        threads=recipe.threads, optimization_level=0, verify=False, timing_cache="", whole_engines=0,
        profiles=((shapes, shapes, shapes),) if dynamic else (),
    )  # fmt: skip
    return Runtime(backend="cpu", threads=recipe.threads).load(build(net, config))


def make_predictor(context: Context) -> Predict:
    """Returns a function that runs any number of samples in a context of fixed batch; the last batch is padded with the last sample."""
    shapes = context.input_shapes()
    batch = next((s[0] for s in shapes.values() if s), 1)

    def predict(feeds: Feeds) -> dict[str, np.ndarray]:
        arrays = {n: np.asarray(a) for n, a in feeds.items()}
        samples = min(len(a) for a in arrays.values())
        parts: list[dict[str, np.ndarray]] = []
        for start in range(0, samples, batch):
            chunk = {n: a[start : start + batch] for n, a in arrays.items()}
            have = min(batch, samples - start)
            if have < batch:
                chunk = {n: np.concatenate([a, np.repeat(a[-1:], batch - have, axis=0)]) for n, a in chunk.items()}
            out = context.run(chunk)
            parts.append({n: (a[:have] if a.ndim and len(a) == batch else a) for n, a in out.items()})
        return {n: np.concatenate([np.atleast_1d(p[n]) for p in parts]) for n in parts[0]}

    return predict


def sample_feed(context: Context, data: Feeds) -> dict[str, np.ndarray]:
    """The first samples of `data` at the context's shapes, repeated if there are too few."""
    feed = {}
    for name, shape in context.input_shapes().items():
        a = data[name]
        n = shape[0] if shape else 1
        feed[name] = np.ascontiguousarray(np.concatenate([a] * -(-n // len(a)))[:n])
    return feed
