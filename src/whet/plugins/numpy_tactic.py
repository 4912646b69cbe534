"""A plugin's tactic on CPUs in NumPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from whet.backends import Backend
from whet.network import Layer
from whet.plugins.tactic import PluginTactic
from whet.tactics import Config, PlanRefused, Signature
from whet.tactics.cpu.reference.numpy_reference import Compute, NumpyKernel


class NumpyTactic(PluginTactic):
    """`function(layer, *arrays) -> array(s)` over the layer's memory: a faster way than the reference. The input arrays are read-only."""

    backend = "cpu"
    packs_constants = True  # the function gets their arrays

    def __init__(self, name: str, function: Callable[..., Any], **options: Any) -> None:
        """`options` are those of PluginTactic."""
        super().__init__(name, **options)
        self.function = function

    def functions(self) -> list[Any]:
        return [*super().functions(), self.function]

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> NumpyKernel:
        if not all(t.type.static for t in layer.outputs):
            raise PlanRefused(f"the shape of {layer.outputs} is known only from the data")
        return NumpyKernel(layer, signature, self._compute(dict(config)), self.rtol)

    def _compute(self, config: dict[str, int | str]) -> Compute:
        def compute(layer: Layer, arrays: list[np.ndarray | None]) -> Sequence[np.ndarray]:
            with np.errstate(all="ignore"):
                results = self.function(layer, *arrays, **config)
            return [np.asarray(a) for a in (results if isinstance(results, list | tuple) else [results])]

        return compute
