"""Reformat between any two formats and storage types with NumPy: the fallback where no library reorders."""

from __future__ import annotations

import numpy as np

from whet.backends import Call
from whet.backends.cpu.memory import make_array_at
from whet.network import FORMATS, Layer, compute_stored_shape, format_fits, from_stored, static_shape, to_stored
from whet.network.types import DTYPES
from whet.tactics._base import Args, Config, Operand, Signature, Stream, Tactic, count_operand_bytes, tactic


class ReformatCall(Call):
    """Converts one tensor."""

    def __init__(self, kernel: ReformatKernel, args: Args):
        self.kernel, self.at = kernel, {"input": args.inputs[0], "output": args.outputs[0]}

    def run(self) -> None:
        k = self.kernel
        src = make_array_at(self.at["input"], k.source_shape, k.source.dtype.numpy)
        dst = make_array_at(self.at["output"], k.target_shape, k.target.dtype.numpy)
        with np.errstate(over="ignore", invalid="ignore"):
            values = from_stored(src, k.source.format, k.shape).astype(k.target.dtype.numpy, copy=False)
        np.copyto(dst, to_stored(values, k.target.format))

    def set_address(self, kind: str, index: int, address: int) -> None:
        self.at[kind] = address


class ReformatKernel:
    scratch, packed, rtol, deterministic, implementation = 0, (), 0.0, True, "numpy"

    def __init__(self, layer: Layer, signature: Signature):
        self.source, self.target = signature.needs(0), signature.outputs[0]
        self.shape = static_shape(layer.output.shape)
        self.source_shape = static_shape(compute_stored_shape(self.source.format, self.shape))
        self.target_shape = static_shape(compute_stored_shape(self.target.format, self.shape))
        self.inputs, self.outputs = (count_operand_bytes(layer.needs(0), self.source),), (count_operand_bytes(layer.output, self.target),)

    def enqueue(self, args: Args, stream: Stream) -> None:
        stream.record(ReformatCall(self, args))


@tactic
class NumpyReformat(Tactic):
    ops = ("Reformat",)
    fallback = True

    def signatures(self, layer: Layer, backend) -> list[Signature]:
        a = layer.attrs
        if not all(f in FORMATS and format_fits(f, layer.output.type.rank) for f in (a["source_format"], a["format"])):
            return []
        return [
            Signature((Operand(a["source_format"], DTYPES[a["source_dtype"]]),), (Operand(a["format"], DTYPES[a["dtype"]]),)),
        ]

    def plan(self, layer: Layer, signature: Signature, config: Config, backend) -> ReformatKernel:
        return ReformatKernel(layer, signature)

    def library_version(self) -> str:
        return f"numpy {np.__version__}"
