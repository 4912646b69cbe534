"""Ops with output shapes that depend on the data, such as NonZero: the unknown sizes are symbols of their own.

Layers that depend on them run on the host after the engine's kernels (whet.engine.host_tail); known inputs become constants when a model is read.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Sequence

import numpy as np

from whet.network import Expr, Layer, make_symbol
from whet.ops._base import OPS, Infer, Kind, Reference, find_known_array, op


def make_size_symbol(layer: Layer, *which: int) -> Expr:
    """The symbol of a size that `layer` determines at run time; `which` numbers several of them."""
    plain = re.sub(r"\W", "_", layer.name, flags=re.ASCII)
    name = f"size_of_{plain}" if plain == layer.name else f"size_of_{plain}_{zlib.crc32(layer.name.encode()):08x}"
    return make_symbol("_".join([name, *map(str, which)]))


def _find_same_layer(name: str, node, g) -> Layer | None:
    """A layer in `g` that computes the node's outputs already."""
    inputs = list(node.inputs)
    while inputs and inputs[-1] is None:
        inputs.pop()
    for layer in reversed(g.layers):
        if layer.op == name and list(layer.inputs) == inputs and all(layer.attrs.get(k) == v for k, v in node.attrs.items()):
            defaults = {k: v for k, v in OPS[name].attrs.items() if not isinstance(v, Kind) and k not in node.attrs}
            if all(layer.attrs.get(k) == v for k, v in defaults.items()):
                return layer
    return None


def register_data_sized_op(name: str, infer: Infer, reference: Reference, read: Callable | None = None, **op_options):
    """Registers an op with `make_size_symbol` in its output shapes. `read(node, g)` reads nodes with unknown inputs (default: as they are)."""

    def read_node(node, g):
        arrays = [None if t is None else t.array() if t.is_constant else find_known_array(t) for t in node.inputs]
        if any(t is not None and (a is None or a.dtype == object) for t, a in zip(node.inputs, arrays, strict=True)):
            same = _find_same_layer(name, node, g) if read is None else None
            if same is not None:  # boxes[keep] and scores[keep] have one size
                return same.outputs[0] if len(same.outputs) == 1 else same.outputs
            return read(node, g) if read is not None else node.add(g, name, *node.inputs, **node.attrs)
        layer = Layer(name, node.name, node.inputs, {k: v for k, v in registered.attrs.items() if not isinstance(v, Kind)} | dict(node.attrs))
        results = reference(layer, *arrays)
        return [g.constant(a, f"{node.name}.{i}") for i, a in enumerate(results if isinstance(results, Sequence) else [np.asarray(results)])]

    registered = op(name, infer, reference, onnx=read_node, data_sized=lambda layer: True, **op_options)
    return registered
