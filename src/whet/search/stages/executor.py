"""The executor of a search: whet's engine, or the one that NVIDIA's TensorRT builds from the same network, precision and shapes.

With TensorRT each engine file (`model.engine`) has a plan file of the same name (`model.plan`). Plans are timed and scored. whet's engine is still
built: it supplies the INT8 ranges (as Q/DQ nodes), the layers of the report and the lock.
"""

from __future__ import annotations

import os
from pathlib import Path

from whet.builder import BuildConfig
from whet.engine.plan import EnginePlan
from whet.frontends import save_onnx
from whet.measure.tensorrt_engine import ComparedEngine, build_tensorrt, load_tensorrt
from whet.network import Network
from whet.runtime import Runtime
from whet.search.recipe.recipe import AutoRecipe
from whet.search.stages.build_engine import find_quantized_source


def load_executor(path: Path, recipe: AutoRecipe) -> ComparedEngine:
    """The engine to time and score for an engine file: whet's own, or TensorRT's of the plan file. Raises EngineError."""
    if recipe.executor == "tensorrt":
        return load_tensorrt(find_plan_file(path))
    return Runtime(backend=recipe.backend, threads=recipe.threads).load(path)


def write_tensorrt_plan(path: Path, network: Network, config: BuildConfig, plan: EnginePlan) -> None:
    """Builds TensorRT's engine of the network that `plan` computes, and writes the plan file of the engine file `path`. Raises BuildError."""
    quantized = find_quantized_source(network, config, plan)
    model = path.with_suffix(".tensorrt.onnx")
    save_onnx(network if quantized is None else quantized, model)
    try:
        shapes = config.profiles[0][1] if config.profiles else None
        build_tensorrt(str(model), precisions=config.precisions, shapes=shapes, sparse=config.sparsity == "enable").save(find_plan_file(path))
    finally:
        model.unlink()


def find_plan_file(path: Path) -> Path:
    """The file of TensorRT's plan for an engine file."""
    return path.with_suffix(".plan")


def find_executed_file(path: Path) -> Path:
    """The executed file of an engine file: TensorRT's plan if there is one."""
    plan = find_plan_file(path)
    return plan if plan.is_file() else path


def move_engine(path: Path, to: Path) -> None:
    """Renames an engine file, and its plan file if there is one."""
    os.replace(path, to)
    if find_plan_file(path).is_file():
        os.replace(find_plan_file(path), find_plan_file(to))


def remove_engine(path: Path) -> None:
    """Removes an engine file, and its plan file if there is one."""
    path.unlink()
    find_plan_file(path).unlink(missing_ok=True)
