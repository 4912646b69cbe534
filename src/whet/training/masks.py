"""Masks that keep weights at zero during training: 2:4 patterns, or the existing zeros."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from whet.errors import TrainingError
from whet.network import Network
from whet.sparsity import find_reduction_axis, is_two_four, two_four
from whet.training.module import NetworkModule


def make_masks(net: Network, kind: str) -> dict[str, np.ndarray]:
    """Masks (bool, True: trained) by weight name. "2:4": for each weight of a Conv, Gemm or MatMul whose reduction axis is a multiple of 4, its
    existing pattern, or the two largest magnitudes of each group of four. "zeros": the zeros of weights with two or more axes.

    Raises TrainingError when no weight qualifies.
    """
    found: dict[str, np.ndarray] = {}
    if kind == "2:4":
        for layer in net.layers:
            place = find_reduction_axis(layer)
            if place is None:
                continue
            w, axis = place
            if w.shape[axis] % 4 == 0 and w.dtype.is_float:
                array = w.array()
                found[w.name] = (array if is_two_four(array, axis) else two_four(array, axis)) != 0
        if not found:
            raise TrainingError(f"'{net.name}' has no weight that 2:4 fits: no reduction axis is a multiple of 4. Train it without masks.")
    elif kind == "zeros":
        for t in net.constants.values():
            if t.dtype.is_float and t.type.rank >= 2 and bool((t.array() == 0).any()):
                found[t.name] = t.array() != 0
        if not found:
            raise TrainingError(f"'{net.name}' has no zeros to keep: prune its weights first, or train it without masks.")
    return found


def hold(module: NetworkModule, masks: Mapping[str, np.ndarray]) -> None:
    """Zeroes masked weights and their gradients, so that no optimizer (momentum, weight decay) changes them.

    Raises TrainingError for a mask whose weight is not trained."""
    weights = module.weights()
    for name, keep in masks.items():
        w = weights.get(name)
        if not isinstance(w, torch.nn.Parameter):
            continue  # a frozen weight does not change
        if tuple(w.shape) != keep.shape:
            raise TrainingError(f"the mask of {name!r} is {list(keep.shape)}, the weight {list(w.shape)}")
        mask = torch.from_numpy(keep).to(w.device, w.dtype)
        with torch.no_grad():
            w.mul_(mask)
        w.register_hook(lambda grad, mask=mask: grad * mask.to(grad.device))


def reapply(module: NetworkModule, masks: Mapping[str, np.ndarray]) -> int:
    """Zeroes masked weights again; returns how many were non-zero (a user's optimizer may change them)."""
    moved = 0
    weights = module.weights()
    for name, keep in masks.items():
        w = weights.get(name)
        if isinstance(w, torch.nn.Parameter):
            mask = torch.from_numpy(keep).to(w.device)
            with torch.no_grad():
                moved += int(((w != 0) & ~mask).sum())
                w.mul_(mask.to(w.dtype))
    return moved
