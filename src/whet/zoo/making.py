"""Builds a zoo model as an ONNX model or file, and counts its parameters and operations."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.errors import UsageError
from whet.files import LARGEST_MESSAGE, write_onnx
from whet.zoo.counting import count
from whet.zoo.registry import Entry, find_entry
from whet.zoo.writer import GraphWriter

if TYPE_CHECKING:
    import onnx

LOWEST_OPSET = 13                     # Squeeze, Unsqueeze, Split and Softmax have another form in older opsets


@dataclass(frozen=True, kw_only=True)
class Info:
    """Parameters, operations and inputs of a zoo model at batch 1."""

    name: str
    family: str
    about: str
    parameters: int                   # trainable parameters, without running statistics and index tables
    macs: int                         # multiply-accumulates of Conv, Gemm and MatMul
    inputs: dict[str, tuple[str, tuple[int | str, ...]]]    # name -> (type, shape) with build()'s defaults
    outputs: dict[str, tuple[str, tuple[int | str, ...]]]
    options: dict[str, Any]           # name -> default of build()'s further options

    @property
    def gflops(self) -> float:
        """Floating-point operations of one inference in 1e9, a multiply-add counted as two."""
        return 2 * self.macs / 1e9


def build(name: str, *, batch: int | str = "N", opset: int = 17, seed: int = 0, **options: Any) -> "onnx.ModelProto":
    """Writes the network `name` as an ONNX model with random float32 weights.

    batch: a number, or the name of a dynamic dimension. opset: 13 or newer. seed: the same seed gives the same bytes.
    options: the options of the family (info(name).options), e.g. num_classes=10.
    Raises UsageError for an unknown name or option, or an invalid value.
    """
    return _write(find_entry(name), batch=batch, opset=opset, seed=seed, skeleton=False, options=options).model(name)


def save(name: str, path: str | os.PathLike[str], *, external_above: int = LARGEST_MESSAGE, **how: Any) -> Path:
    """Builds `name` (arguments as build()) and writes it to `path`; returns the path.

    More than `external_above` bytes of weights go to `<path>.data`, as ONNX external data.
    """
    import onnx

    path = Path(path)
    if not path.parent.is_dir():
        raise UsageError(f"Cannot write {path}: there is no folder {path.parent}. Create it or choose another path.")
    model = build(name, **how)
    try:
        write_onnx(model, path, onnx.save, external_above)
    except OSError as e:
        raise UsageError(f"Cannot write {path}: {e.strerror}. Free disk space or choose another path.") from e
    return path


def info(name: str) -> Info:
    """Parameters, multiply-accumulates, inputs and outputs of `name`, counted from its graph without generating weights."""
    it = find_entry(name)
    counted = _write(it, batch=1, opset=17, seed=0, skeleton=True, options=it.count_options)
    numbers = count(counted.model(name), counted.trainable)
    shown = _write(it, batch="N", opset=17, seed=0, skeleton=True, options={})
    return Info(name=name, family=it.family, about=it.about, parameters=numbers.parameters, macs=numbers.macs,
                inputs=shown.inputs, outputs=shown.outputs, options=it.options)


def _write(entry: Entry, *, batch: int | str, opset: int, seed: int, skeleton: bool, options: dict[str, Any]) -> GraphWriter:
    from onnx.defs import onnx_opset_version

    if isinstance(batch, int) and batch < 1:
        raise UsageError(f"batch={batch}: a batch has at least one element; give a positive number or a name like 'N'.")
    if isinstance(batch, str) and not batch.isidentifier():
        raise UsageError(f"batch={batch!r} is neither a positive number nor a name like 'N'.")
    if not LOWEST_OPSET <= opset <= onnx_opset_version():
        raise UsageError(f"opset={opset}: the zoo writes opsets {LOWEST_OPSET} to {onnx_opset_version()}.")
    unknown = sorted(set(options) - set(entry.options))
    if unknown:
        takes = ", ".join(f"{k}={v!r}" for k, v in entry.options.items()) or "none"
        raise UsageError(f"{entry.name} has no option {unknown[0]!r}; its options and their defaults: {takes}.")
    g = GraphWriter(batch=batch, opset=opset, seed=seed, skeleton=skeleton)
    entry.builder(g, **entry.fixed, **options)
    return g
