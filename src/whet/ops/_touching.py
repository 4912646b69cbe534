"""Proves that the samples of a batch are independent, or returns the reason why not.

An independent batch may run sample-parallel: by an engine planned for one sample, with several workers
(runtime/sample_parallel.py). Ops without a proof count as dependent.
"""

from __future__ import annotations

from collections.abc import Mapping

from whet.errors import NetworkError
from whet.network import Dim, Expr, Layer, Network, Tensor, find_symbols
from whet.ops._base import get_op, infer_layer
from whet.ops._images import Axes, BatchAxis, NotPerImage, follow, list_fused_layers, list_fused_results
from whet.ops._interpret import bind_layer, bind_symbols

_MANY = 10_007  # batch size used in the proof: a prime unlikely to equal another size
_TARGETS = frozenset({("Reshape", 1), ("Expand", 1)})  # inputs that only give the output's shape, which is checked separately
_IN_BLOCKS = frozenset({"QuantizeLinear", "DequantizeLinear"})  # their scales may be per sample without a couple
_ALIKE = {"Expand": 0, "ConstantOfShape": None}  # ops that repeat a value per sample, with the index of the repeated input


def batch_symbol(net: Network) -> str | None:
    """The symbol that is the first axis of every input and output and appears in no other axis; else None."""
    outside = [*net.inputs, *net.outputs]
    if not net.inputs or not net.outputs or any(t.type.rank == 0 for t in outside):
        return None
    first = net.inputs[0].shape[0]
    name = str(first)
    if not isinstance(first, Expr) or not name.isidentifier():
        return None
    alone = all(t.shape[0] == first and not any(name in find_symbols(d) for d in t.shape[1:]) for t in outside)
    return name if alone else None


def why_samples_touch(net: Network, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """The reason why a sample's outputs may depend on other samples, its index or the batch size; None if they do not.

    `shapes` are input shapes that define the symbols of all axes but the batch.
    """
    name = batch_symbol(net)
    if name is None:
        return "its inputs and outputs do not all have one dynamic batch as first axis"
    env = bind_symbols([(t.name, t.type) for t in net.inputs], {t.name: (_MANY, *shapes[t.name][1:]) for t in net.inputs})
    known = _Known(name, env)
    known.axes = {t: BatchAxis(0) for t in net.inputs}
    try:
        for layer in net.layers:
            known.take(layer)
    except NotPerImage as e:
        return str(e)
    for t in net.outputs:
        if known.axes.get(t) != BatchAxis(0):
            return f"output %{t.name} does not have one entry per sample"
    return None


class _Known:
    """Facts about tensors: the batch axis, and values without batch axis that depend on the batch size."""

    def __init__(self, batch: str, env: Mapping[str, int]):
        self.batch, self.env = batch, env
        self.axes: Axes = {}
        self.counts: set[Tensor] = set()

    def take(self, layer: Layer) -> None:
        """Records a layer's outputs. Raises NotPerImage if it mixes samples."""
        if layer.op == "Fused":
            for x in list_fused_layers(layer):
                self.take(x)
            for t, e in zip(layer.outputs, list_fused_results(layer), strict=True):
                if e in self.axes:
                    self.axes[t] = self.axes[e]
                if e in self.counts:
                    self.counts.add(t)
            return
        reads = [t for t in layer.inputs if t is not None]
        caught = [t for r in layer.regions.values() for t in r.captures()]
        if layer.op != "Reformat" and not get_op(layer.op).pure:
            raise NotPerImage(f"{layer.op} '{layer.name}' draws new random numbers in each run")
        if layer.regions and any(t in self.axes or t in self.counts for t in (*reads, *caught)):
            raise NotPerImage(f"{layer.op} '{layer.name}' may use the batch arbitrarily")
        if any(t in self.axes for t in reads) and layer.op != "Shape":
            self._with_samples(layer)
        elif any(t in self.axes or t in self.counts for t in reads) or self._uses_batch_size(layer):
            self._without_samples(layer)

    def _with_samples(self, layer: Layer) -> None:
        for i, t in enumerate(layer.inputs):
            if t in self.counts and (layer.op, i) not in _TARGETS:
                raise NotPerImage(f"{layer.op} '{layer.name}' uses %{t.name}, which depends on the batch size")
        if self._uses_batch_size(layer) and layer.op not in ("Reshape", "Expand"):
            raise NotPerImage(f"{layer.op} '{layer.name}' depends on the batch size")
        bound = bind_layer(layer, self.env)
        twins = {b: t for t, b in zip((*layer.inputs, *layer.outputs), (*bound.inputs, *bound.outputs), strict=True) if b is not None}
        inputs = follow(bound, {b: self.axes[t] for b, t in twins.items() if t in self.axes}, _MANY)
        for b, axis in inputs.items():
            t = twins[b]
            if t is None or t in layer.inputs or not axis.is_batch or not self._has_one_entry_per_sample(t, axis.axis):
                raise NotPerImage(f"{layer.op} '{layer.name}' does not have one entry per sample")
            self.axes[t] = axis
        if self._fixed_parts(bound, twins) or not _fits(bound):
            raise NotPerImage(f"{layer.op} '{layer.name}' has a constant with one entry per sample")

    def _fixed_parts(self, bound: Layer, twins: Mapping[Tensor, Tensor | None]) -> bool:
        """True if an input without batch axis has several entries along an axis coupled to the batch."""
        if bound.op == "Reformat":
            return False
        inputs = {t for t in bound.inputs if t is not None and twins[t] not in self.axes}
        if bound.op in _IN_BLOCKS:
            return any(t.type.rank > 1 for t in inputs)
        couples = get_op(bound.op).couples
        assert couples is not None  # checked by follow()
        ties = [tie for c in couples(bound) for tie in ((c.a, c.a_axis, c.b, c.b_axis), (c.b, c.b_axis, c.a, c.a_axis))]
        axes = {y: self.axes[t].axis for y in bound.outputs if (t := twins[y]) is not None and t in self.axes}
        return any(t in inputs and t.shape[i] != 1 and y in axes and axes[y] == j for t, i, y, j in ties)

    def _without_samples(self, layer: Layer) -> None:
        """Handles outputs computed from sizes only: equal for all samples unless the batch size is used other than as a repeat count."""
        for t in layer.outputs:
            values = t.shape_value
            if values is not None and not any(self._has_batch_symbol(d) for d in (*values, *t.shape)):
                continue
            along = [i for i, d in enumerate(t.shape) if self._has_batch_symbol(d)]
            repeated = _ALIKE.get(layer.op, -1)
            alike = repeated is None or (repeated >= 0 and layer.inputs[repeated] not in self.counts)
            if alike and len(along) == 1 and self._has_one_entry_per_sample(t, along[0]):
                self.axes[t] = BatchAxis(along[0])
            else:
                self.counts.add(t)

    def _has_one_entry_per_sample(self, t: Tensor, axis: int) -> bool:
        return str(t.shape[axis]) == self.batch and not any(self._has_batch_symbol(d) for i, d in enumerate(t.shape) if i != axis)

    def _uses_batch_size(self, layer: Layer) -> bool:
        """True if an attribute or an output shape contains the batch symbol without being implied by the input shapes."""
        return any(self._contains_batch_symbol(v) for v in layer.attrs.values()) or (
            not any(t in self.axes for t in layer.inputs) and any(self._has_batch_symbol(d) for t in layer.outputs for d in t.shape)
        )

    def _contains_batch_symbol(self, value: object) -> bool:
        if isinstance(value, tuple):
            return any(self._contains_batch_symbol(v) for v in value)
        return isinstance(value, Expr) and self._has_batch_symbol(value)

    def _has_batch_symbol(self, d: Dim) -> bool:
        return self.batch in find_symbols(d)


def _fits(bound: Layer) -> bool:
    """True if the layer's types, inferred again with this batch size, equal the declared ones."""
    if bound.op == "Reformat":
        return True
    try:
        types, _ = infer_layer(bound)
    except NetworkError:
        return False
    return [t.shape for t in types] == [t.shape for t in bound.outputs]
