"""Any function of one 8-bit integer as a table of 256 results.

With AVX-512 VBMI two instructions look up 64 results, so that SiLU or GELU takes as long as reading and writing the bytes; else one result is
looked up at a time. The table is computed with the reference, so results are exact.

For coverage: otherwise NumPy computes it.
"""

from __future__ import annotations

from functools import cache, partial

import numpy as np

from whet.backends import Backend
from whet.network import DType, Layer, Tensor, format_fits
from whet.ops import run_layer
from whet.tactics._base import Args, Config, Operand, Packed, Signature, Stream, count_stored_bytes, tactic
from whet.tactics.cpu._llvm import jit
from whet.tactics.cpu._llvm.builder import INT8, INT64, Module, Type
from whet.tactics.cpu._llvm.kernel import LAST_WORDS, CompiledKernel, CompiledTactic
from whet.tactics.cpu._llvm.work_stealing import parallel_kernel
from whet.tactics.cpu.onednn._kernel import is_static

KIND = "QuantizedTable"
_STEP = 64
_WORDS = ("source", "target", "count", *LAST_WORDS)


@cache
def lookup_ir(has_vbmi: bool) -> str:
    """`look_up(context)`; `has_vbmi`: the CPU has AVX-512 VBMI, whose vpermi2b looks up 64 bytes in half of the table."""
    module = Module()
    with parallel_kernel(module, "look_up", _WORDS, "count") as (f, w):
        table, x, y = (word.as_pointer(INT8) for word in (w.packed, w.source, w.target))
        begin = w.begin
        if has_vbmi:
            a, b, c, d = (table.load(k * _STEP, _STEP) for k in range(4))
            permute = partial(f.call_external, "llvm.x86.avx512.vpermi2var.qi.512", Type("i8", _STEP))
            with f.loop(begin, w.end - (_STEP - 1), step=_STEP) as vectors:
                indices = x.load(vectors.index, _STEP)
                low, high = permute(a, indices, b), permute(c, indices, d)
                y.store(f.select(indices < 0, high, low), vectors.index)
            begin = vectors.index
        with f.loop(begin, w.end) as rest:
            y.store(table.load(x.load(rest.index).convert("zext", INT64)), rest.index)
    return str(module)


class TableKernel(CompiledKernel):
    """A planned look-up; its one packed operand is the table."""

    serial_work = 1 << 15  # bytes

    def __init__(self, layer: Layer, signature: Signature, has_vbmi: bool, count: int) -> None:
        super().__init__(layer, signature, count_stored_bytes(layer, signature)[1][0], count)
        self.x = next(i for i, o in enumerate(signature.inputs) if o is not None)
        results = compute_table(layer)
        self.packed = (Packed(f"table|{results.tobytes().hex()}", 256, lambda: results.view(np.uint8)),)
        self.has_vbmi = has_vbmi
        self.implementation = "avx512_vbmi" if has_vbmi else "scalar"

    def enqueue(self, args: Args, stream: Stream) -> None:
        size = self.outputs[0]
        self.launch(stream, lookup_ir(self.has_vbmi), "look_up", args, (("input", self.x), ("output", 0), size), size, _STEP)


@tactic
class Table(CompiledTactic):
    composites = (KIND,)
    quantized = True

    def why_not(self, layer: Layer) -> str | None:
        if layer.composite != KIND:
            return "computes functions of one 8-bit integer"
        return self.unavailable()

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        """In any format, in place or not: elements are independent."""
        if self.why_not(layer) or not is_static(layer):
            return []
        x, signatures = _get_integer_index(layer), []
        for f in ("nhwc", "linear"):
            if format_fits(f, layer.outputs[0].type.rank):
                inputs = tuple(Operand(f, layer.needs(i).dtype) if i == x else None for i in range(len(layer.inputs)))
                out = (Operand(f, layer.outputs[0].dtype),)
                signatures += [Signature(inputs, out, ((x, 0),)), Signature(inputs, out)]
        return signatures

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> TableKernel:
        return TableKernel(layer, signature, jit.has("avx512vbmi"), backend.threads)


def _get_integer_index(layer: Layer) -> int:
    """Index of the input that is looked up."""
    (place,) = (i for i, t in enumerate(layer.inputs) if t is not None and not t.is_constant)
    return place


def compute_table(layer: Layer) -> np.ndarray:
    """The layer's result for each of the 256 bytes, computed with the reference."""
    body, x = layer.regions["body"], _get_integer_index(layer)
    values: dict[Tensor, np.ndarray] = {}
    for i, (inner, t) in enumerate(zip(body.inputs, map(layer.needs, range(len(layer.inputs))), strict=True)):
        values[inner] = _list_values(t.dtype) if i == x else t.array()
    values |= {t: t.array() for t in body.constants.values()}
    for step in body.layers:
        arrays = [None if t is None else values[t] for t in step.inputs]
        values[step.output] = run_layer(step, [a.reshape(()) if a is not None and a.size == 1 else a for a in arrays])[0]
    out = np.asarray(values[body.outputs[0]])
    assert out.shape == (256,), f"{layer.name} is not a function of one integer"
    return np.ascontiguousarray(out)


def _list_values(dtype: DType) -> np.ndarray:
    """All values of an 8-bit type in the order of their bytes."""
    return np.arange(256, dtype=np.uint8).view(dtype.numpy)
