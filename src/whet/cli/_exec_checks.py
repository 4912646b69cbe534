"""Checks of `whet exec` before any work: values, files, and inputs of the model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from whet.backends import get_capabilities
from whet.backends.cpu.threads import count_affinity_cpus
from whet.cli import _exec_values as values
from whet.cli._exec_config import MOST_EFFORT, Options
from whet.cli._exec_flags import NUMBERS
from whet.cli._output_files import check_writable
from whet.errors import UsageError

_WRITTEN = ("saveEngine", "saveLock", "exportTimes", "exportOutput", "exportProfile", "exportLayerInfo", "timingCacheFile")

_READ = ("onnx", "torch", "deploy", "model", "lock", "calib", "calibData", "refitFromOnnx")


def check_values(o: Options) -> None:
    """Reads every number, shape and list of percentiles. Raises UsageError for the first that cannot be read."""
    for name in NUMBERS:
        if name in o and o.get(name) != "auto":
            o.number(name)
    if "shapes" in o:
        values.parse_shapes(o.get("shapes"), "shapes")
    if "percentile" in o:
        values.parse_percentiles(o.get("percentile"))


def check_files(o: Options) -> None:
    """Refuses files that cannot be written or read. Raises UsageError."""
    given = [path for _, path in values.split_names(o.get("loadInputs"))] if "loadInputs" in o else []
    check_writable(*(o.get(name) for name in _READ if name in o), *given, **{name: o.get(name) for name in _WRITTEN if name in o})
    target = Path(o.get("saveEngine"))
    if "saveEngine" in o and target.exists() and not target.is_file():
        raise UsageError(
            f"--saveEngine={target} is not a regular file, and writing the engine would replace it; leave the flag out to keep no engine"
        )
    for name, path in values.split_names(o.get("loadInputs")) if "loadInputs" in o else []:
        if not Path(path).is_file():
            raise UsageError(f"--loadInputs: there is no file {path} for '{name}'")


def list_unused_values(o: Options) -> list[str]:
    """Warnings about values that are clamped, or have no meaning on this backend."""
    texts = []
    if o.number("builderOptimizationLevel") > MOST_EFFORT:
        texts.append(f"--builderOptimizationLevel={o.get('builderOptimizationLevel')} is treated as {MOST_EFFORT}, the highest.")
    if "device" in o and not get_capabilities(o.get("backend", "cpu")).numbered_devices and "loadEngine" not in o:
        texts.append("--device chooses a GPU, and this backend has one device. It is ignored. --backend=cuda builds for GPUs.")
    usable = count_affinity_cpus()
    if o.get("numThreads") != "auto" and o.number("numThreads") > usable:
        texts.append(f"--numThreads={o.get('numThreads')} is more than the {usable} CPUs that this process may use: they will share cores.")
    return texts


def check_against(o: Options, inputs: Mapping[str, tuple[Any, ...]]) -> None:
    """Compares --shapes and --loadInputs with the model's inputs (name -> shape; dynamic dimensions are symbols). Raises UsageError or ShapeError."""
    if "shapes" in o:
        values.parse_model_shapes(o.get("shapes"), "shapes", inputs)
    for name, _ in values.split_names(o.get("loadInputs")) if "loadInputs" in o else []:
        values.get_input_shape(name, "loadInputs", inputs)
