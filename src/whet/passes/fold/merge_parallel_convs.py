"""Parallel convolutions of one value become one convolution if their results are added or subtracted; a batch norm of the value joins them.

RepVGG, MobileOne, FastViT and RepViT are trained with parallel branches, and exported as they were trained unless their authors' tool merges them
first. The smaller kernel is placed in the larger one; a batch norm is a kernel of one factor per channel. Computed in float64 and rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from whet.network import Layer, Tensor, Weight
from whet.ops._origin import express, make_literal
from whet.ops.conv import get_window_attributes
from whet.passes._scale import make_folded_name
from whet.passes.fold.fold_batch_norm import batch_norm_affine
from whet.rewrite.constants import reshape_along_axis, reshape_weight, round_to, to_float64
from whet.rewrite.graph import Graph
from whet.rewrite.rules import Phase, Skip, rule
from whet.sparsity import is_two_four


@dataclass(frozen=True)
class _Kernel:
    """A branch's weights in float64, at their positions in the merged kernel, and its bias."""

    weights: Weight
    bias: Weight | None

    def negated(self) -> _Kernel:
        """The kernel of the negative values."""
        return _Kernel(express("Neg", self.weights), None if self.bias is None else express("Neg", self.bias))


@rule("Add", "Sub", phase=Phase.FOLD, after=["fold_batch_norm", "fold_scale_shift"])
def merge_parallel_convs(g: Graph, layer: Layer) -> Tensor | Skip | None:
    branches = [g.maker(t) for t in layer.inputs]
    convs = [b for b in branches if b is not None and b.op == "Conv"]
    others = [b for b in branches if b is not None and b.op == "BatchNormalization"]
    if len(branches) != 2 or len(convs) + len(others) != 2 or not convs or (convs[0] is convs[-1] and len(convs) == 2):
        return None
    if len({b.inputs[0] for b in (*convs, *others)}) != 1 or any(b.output.type != layer.output.type for b in (*convs, *others)):
        return None
    convs.sort(key=lambda c: -int(np.prod([d for d in c.needs(1).shape[2:] if isinstance(d, int)])))
    main, other = convs[0], (*convs[1:], *others)[0]
    for b in (main, other):
        if any(t is not None and t.weight is None for t in b.inputs[1:]) or not main.needs(1).dtype.is_float:
            return Skip(f"the weights of '{b.name}' are computed at run time, or integers")
        if reason := g.escapes(b.output, layer):
            return Skip(reason)
    found = make_conv_kernel(main, other) if other.op == "Conv" else _make_identity_kernel(main, other)
    if isinstance(found, Skip):
        return found
    w, bias = main.needs(1), main.input(2)
    own = _Kernel(to_float64(w.constant()), None if bias is None else to_float64(bias.constant()))
    if layer.op == "Sub":
        own, found = (own, found.negated()) if layer.inputs[0] is main.output else (own.negated(), found)
    weights = express("Add", own.weights, found.weights)
    if is_two_four(w.array(), 1) and not is_two_four(weights.array, 1):
        return Skip(f"the sum would not keep the 2:4 pattern of '{main.name}'")
    biases = [x for x in (own.bias, found.bias) if x is not None]
    inputs = [main.inputs[0], g.constant(round_to(weights, w.dtype), make_folded_name(w))]
    if biases:
        total = biases[0] if len(biases) == 1 else express("Add", *biases)
        name = make_folded_name(bias) if bias is not None else f"{w.name.removesuffix('.folded').removesuffix('.weight')}.bias"
        inputs.append(g.constant(round_to(total, w.dtype), name))
    return g.add("Conv", *inputs, **main.attrs)


def make_conv_kernel(main: Layer, other: Layer) -> _Kernel | Skip:
    """The other convolution's weights within the kernel of `main`."""
    (strides, dilations, pads), (own_strides, own_dilations, own_pads) = get_window_attributes(main), get_window_attributes(other)
    large, small = (tuple(int(d) for d in x.needs(1).shape[2:]) for x in (main, other))
    r = len(large)
    before = [pads[i] - own_pads[i] for i in range(r)]
    if main.attrs["group"] != other.attrs["group"] or strides != own_strides:
        return Skip(f"'{main.name}' and '{other.name}' have other groups or strides")
    if (large != small and (set(dilations) | set(own_dilations)) != {1}) or (large == small and dilations != own_dilations):
        return Skip(f"'{main.name}' or '{other.name}' is dilated")
    if any(n < 0 or n + small[i] > large[i] for i, n in enumerate(before)):
        return Skip(f"the kernel of '{other.name}' is not within that of '{main.name}'")
    w, b = to_float64(other.needs(1).constant()), other.input(2)
    if large != small:
        after = [large[i] - small[i] - n for i, n in enumerate(before)]
        w = express("Pad", w, None, make_literal(np.array(0.0)), pads=(0, 0, *before, 0, 0, *after))
    return _Kernel(w, None if b is None else to_float64(b.constant()))


def _make_identity_kernel(main: Layer, norm: Layer) -> _Kernel | Skip:
    """A batch norm as a kernel as large as that of `main`: the channel's factor at the position of the output pixel, zeros elsewhere."""
    strides, dilations, pads = get_window_attributes(main)
    shape, group, r = tuple(int(d) for d in main.needs(1).shape), main.attrs["group"], len(strides)
    places = [pads[i] // dilations[i] for i in range(r)]
    if set(strides) != {1} or shape[0] != shape[1] * group or any(pads[i] % dilations[i] or places[i] >= shape[2 + i] for i in range(r)):
        return Skip(f"'{main.name}' has strides, other channels, or no weight for the value itself")
    scale = batch_norm_affine([t.constant() for t in norm.inputs[1:] if t is not None], norm.attrs.get("epsilon", 1e-5))
    assert scale.factor is not None
    assert scale.shift is not None
    weights = reshape_along_axis(scale.factor, 0, len(shape))
    if shape[1] > 1:  # written as a comparison: the values of a large matrix would be part of the engine file
        own, inputs = (make_literal(values) for values in (np.arange(shape[0])[:, None] % shape[1], np.arange(shape[1])[None]))
        reads = reshape_weight(to_float64(express("Equal", own, inputs)), (*shape[:2], *[1] * r))
        weights = express("Mul", weights, reads)
    after = [shape[2 + i] - 1 - places[i] for i in range(r)]
    weights = express("Pad", weights, None, make_literal(np.array(0.0)), pads=(0, 0, *places, 0, 0, *after))
    return _Kernel(weights, reshape_weight(scale.shift, (shape[0],)))
