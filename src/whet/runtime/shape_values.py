"""Values that depend only on the shapes of a dynamic network's inputs, such as position indices and masks: computed once for each set of shapes.

Their layers are not launched. Layers that need a value read it from memory outside of the arena, which no layer overwrites.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from whet.errors import WhetError
from whet.network import Layer, Tensor, static_shape
from whet.ops import run_layer, run_regions
from whet.runtime.kernels import Planned

MOST_BYTES = 1 << 20  # of one value; larger ones are computed at every run
MOST_BYTES_OF_ALL = 1 << 24


@dataclass(frozen=True)
class ShapeValues:
    """`precomputed`: for each step, whether its outputs are values of shapes only and no launch has to write them. `values`: these by tensor name."""

    precomputed: list[bool]
    values: dict[str, np.ndarray]


def find_shape_values(steps: Sequence[Planned], outputs: Collection[str]) -> ShapeValues:
    """The values of steps with static layers. `outputs` are the network's: a launch writes them."""
    known: dict[str, np.ndarray] = {}
    left = MOST_BYTES_OF_ALL
    for step in steps:
        results = _compute_values(step.layer, known)
        if results is not None and (needed := sum(a.nbytes for a in results)) <= left:
            left -= needed
            known.update((t.name, a) for t, a in zip(step.layer.outputs, results, strict=True))
    precomputed = _list_precomputed(steps, known, outputs)
    written = {t.name for step, is_known in zip(steps, precomputed, strict=True) if not is_known for t in step.layer.outputs}
    return ShapeValues(precomputed, {n: a for n, a in known.items() if n not in written})


def _compute_values(layer: Layer, known: dict[str, np.ndarray]) -> list[np.ndarray] | None:
    """The layer's outputs, or None if they depend on data or are large. A layer of constants alone counts only if it takes no constant: others are
    left unfolded on purpose."""
    if any(prod(static_shape(t.shape)) * max(t.dtype.bits // 8, 1) > MOST_BYTES for t in layer.outputs):
        return None
    given = [_get_shape_value(t) for t in layer.outputs]
    if all(a is not None for a in given):
        return [a for a in given if a is not None]
    inputs = [t for t in layer.inputs if t is not None]
    computed = [t for t in inputs if not t.is_constant]
    if any(t.name not in known for t in computed) or (inputs and not computed and layer.op != "Expand"):
        return None
    if layer.regions and layer.op != "Fused":
        return None
    arrays = [None if t is None else known.get(t.name) if not t.is_constant else t.array() for t in layer.inputs]
    try:
        results = run_regions(layer, arrays) if layer.regions else run_layer(layer, arrays)
    except WhetError:  # the layer's own kernel reports wrong values when it runs
        return None
    return [np.asarray(a, t.dtype.numpy) for a, t in zip(results, layer.outputs, strict=True)]


def _get_shape_value(t: Tensor) -> np.ndarray | None:
    """The tensor's values if shape inference has them."""
    values = t.shape_value
    if values is None or not all(isinstance(v, int) for v in values):
        return None
    return np.array(values, t.dtype.numpy).reshape(static_shape(t.shape))


def _list_precomputed(steps: Sequence[Planned], known: dict[str, np.ndarray], outputs: Collection[str]) -> list[bool]:
    """For each step, whether nobody needs its outputs in the arena: outputs of the network, and operands of layers that work in place, are there."""
    needed, precomputed = set(outputs), [False] * len(steps)
    for k in reversed(range(len(steps))):
        layer = steps[k].layer
        precomputed[k] = all(t.name in known and t.name not in needed for t in layer.outputs)
        if not precomputed[k]:
            needed |= {layer.needs(i).name for i, _ in steps[k].signature.inplace}
    return precomputed
