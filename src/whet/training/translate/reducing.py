"""Reductions in PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import torch

from whet.network import Layer
from whet.ops._reduce import list_reduced_axes
from whet.training.translate._base import Compute, torch_op

Reduce = Callable[[torch.Tensor, tuple[int, ...], bool], torch.Tensor]


def _prod(x: torch.Tensor, axes: tuple[int, ...], keep: bool) -> torch.Tensor:
    for a in sorted(axes, reverse=True):
        x = x.prod(a, keepdim=keep)
    return x


_FUNCTIONS: dict[str, Reduce] = {
    "ReduceL1": lambda x, axes, keep: x.abs().sum(axes, keepdim=keep),
    "ReduceL2": lambda x, axes, keep: x.square().sum(axes, keepdim=keep).sqrt(),
    "ReduceLogSum": lambda x, axes, keep: x.sum(axes, keepdim=keep).log(),
    "ReduceLogSumExp": lambda x, axes, keep: torch.logsumexp(x, axes, keepdim=keep),
    "ReduceMax": lambda x, axes, keep: x.amax(axes, keepdim=keep),
    "ReduceMean": lambda x, axes, keep: x.mean(axes, keepdim=keep),
    "ReduceMin": lambda x, axes, keep: x.amin(axes, keepdim=keep),
    "ReduceProd": _prod,
    "ReduceSum": lambda x, axes, keep: x.sum(axes, keepdim=keep),
    "ReduceSumSquare": lambda x, axes, keep: x.square().sum(axes, keepdim=keep),
}
#: A reduction over no axes computes this of each element.
_ALONE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "ReduceL1": torch.abs, "ReduceL2": torch.abs, "ReduceLogSum": torch.log, "ReduceSumSquare": torch.square,
}  # fmt: skip


@torch_op(*_FUNCTIONS)
def _translate_reduction(layer: Layer) -> Compute:
    axes, keep, f = list_reduced_axes(layer), bool(layer.attrs["keepdims"]), _FUNCTIONS[layer.op]
    if not axes:
        alone = _ALONE.get(layer.op, lambda x: x)
        return lambda x, *_: alone(x)
    return lambda x, *_: f(x, axes, keep)


@torch_op("ArgMax", "ArgMin")
def _translate_arg_extremum(layer: Layer) -> Compute:
    f = torch.argmax if layer.op == "ArgMax" else torch.argmin
    axis, keep, last = layer.attrs["axis"], bool(layer.attrs["keepdims"]), layer.attrs["select_last_index"]
    if last:
        return lambda x: x.shape[axis] - 1 - f(x.flip(axis), dim=axis, keepdim=keep)
    return lambda x: f(x, dim=axis, keepdim=keep)
