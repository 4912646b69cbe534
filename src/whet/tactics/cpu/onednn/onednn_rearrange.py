"""Splits channels in two and transposes the inner part after the pixels by one oneDNN reorder; from nhwc it copies contiguous runs of channels.

For coverage: otherwise NumPy computes it.
"""

from __future__ import annotations

from whet.backends import Backend
from whet.network import Layer, format_fits, static_shape
from whet.tactics._base import Operand, Signature, tactic
from whet.tactics.cpu.onednn import _api as dnn
from whet.tactics.cpu.onednn._kernel import OneDnnTactic, Recipe, is_static, list_storage_types
from whet.tactics.cpu.onednn._nonfinite import Reference

_INTEGERS = ("i8", "u8")


@tactic
class OneDnnRearrange(OneDnnTactic):
    composites = ("Rearrange",)

    def why_not(self, layer: Layer) -> str | None:
        return None if layer.composite in self.composites else "cuts channels in two and moves the inner part behind the pixels"

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not is_static(layer):
            return []
        x, y = layer.needs(0), layer.outputs[0]
        types = list_storage_types([x, y], backend) or ([y.dtype] if y.dtype.name in _INTEGERS else [])
        rest = (None,) * (len(layer.inputs) - 1)
        formats = [f for f in ("nhwc", "linear") if format_fits(f, x.type.rank)]
        return [Signature((Operand(f, d), *rest), (Operand("linear", d),)) for d in types for f in formats]

    def recipe(self, layer: Layer, signature: Signature, backend: Backend) -> Recipe | str:
        stored = signature.needs(0)
        axes = list_copy_axes(layer, stored.format)
        shape = tuple(n for n, _, _ in axes)
        source = dnn.describe(shape, stored.dtype.name, strides=tuple(a for _, a, _ in axes))
        target = dnn.describe(shape, stored.dtype.name, strides=tuple(b for _, _, b in axes))
        return Recipe(dnn.reorder(source, target), {"src": ("input", 0), "dst": ("output", 0)}, rtol=0.0)

    def declares(self, layer: Layer, implementation: str) -> list[dict[str, Reference]]:
        """Nothing: values are only copied."""
        return [{}]


def list_copy_axes(layer: Layer, fmt: str) -> list[tuple[int, int, int]]:
    """The layer as a copy: (length, stride in the input, stride in the output) of each axis, outermost of the output first, with adjacent axes
    merged if they are contiguous in both."""
    x, (reshape, transpose) = layer.inputs[0], layer.regions["body"].layers
    assert x is not None
    shape, cut = static_shape(x.shape), static_shape(reshape.output.shape)
    pixels = 1
    for d in shape[2:]:
        pixels *= d
    channel = 1 if fmt == "nhwc" else pixels
    pixel = shape[1] if fmt == "nhwc" else 1
    steps = [shape[1] * pixels, cut[2] * channel, channel]
    for i in range(2, len(shape)):
        inner = 1
        for d in shape[i + 1 :]:
            inner *= d
        steps.append(inner * pixel)
    axes: list[tuple[int, int, int]] = []
    place = 1
    for axis in reversed(transpose.attrs["perm"]):
        n, step = cut[axis], steps[axis]
        if axes and axes[0][1] * axes[0][0] == step and axes[0][2] * axes[0][0] == place:
            axes[0] = (axes[0][0] * n, axes[0][1], axes[0][2])
        else:
            axes.insert(0, (n, step, place))
        place *= n
    return axes
