"""Exponential moving average of weights and statistics during a training (Polyak averaging with decay; as timm's ModelEmaV3)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


class Average:
    """`state` averages the module's floating-point state: state = d * state + (1 - d) * module with d = min(decay, (1 + t) / (10 + t)) at step t."""

    def __init__(self, module: nn.Module, decay: float):
        self.module, self.decay = module, decay
        self.state = {n: t.detach().clone() for n, t in module.state_dict().items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Adds the module's state after step `step`."""
        d = min(self.decay, (1 + step) / (10 + step))
        now = self.module.state_dict()
        averaged = [n for n, t in self.state.items() if t.is_floating_point()]
        torch._foreach_lerp_([self.state[n] for n in averaged], [now[n] for n in averaged], 1 - d)

    def read(self, state: dict[str, torch.Tensor]) -> None:
        """Restores a stored average. Raises ValueError for one of another module."""
        if state.keys() != self.state.keys():
            raise ValueError("the averaged weights are missing or of another network")
        for n, t in state.items():
            self.state[n].copy_(t)

    @contextmanager
    def apply_average(self) -> Iterator[None]:
        """The module has the averaged state inside the block and its own after it."""
        own = {n: t.detach().clone() for n, t in self.module.state_dict().items()}
        self.module.load_state_dict(self.state)
        try:
            yield
        finally:
            self.module.load_state_dict(own)
