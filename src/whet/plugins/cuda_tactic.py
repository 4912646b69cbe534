"""A plugin's tactic on NVIDIA GPUs in CUDA C++, compiled by NVRTC on the user's machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from whet.backends import Backend
from whet.network import Layer
from whet.plugins.tactic import PluginTactic
from whet.tactics import Args, Config, PlanRefused, Signature

Grid = int | tuple[int, ...]


class CudaTactic(PluginTactic):
    """A kernel `extern "C" __global__ void ENTRY(...)` whose parameters are a pointer for each present input, one for each output, one to the scratch
    (with `scratch`), then those that `parameters(layer, config)` gives: Python integers are `int`, floats `float`, NumPy scalars their own type.

    `source` is its text. whet's device headers can be included by name (`#include "common.cuh"`). `macros(layer, signature, config)` are defined
    before it, so that sizes can be constants. `grid(layer, config)` gives the blocks, along x or as (x, y, z); `block`, `shared` (bytes of dynamic
    shared memory) and `scratch` (bytes) are integers, or functions like `grid`. The next kernel starts when this one has ended.
    """

    backend = "cuda"

    def __init__(
        self,
        name: str,
        source: str,
        entry: str,
        *,
        grid: Callable[[Layer, Mapping[str, int | str]], Grid],
        block: int | Callable[[Layer, Mapping[str, int | str]], int] = 128,
        parameters: Callable[[Layer, Mapping[str, int | str]], Sequence[Any]] | None = None,
        macros: Callable[[Layer, Signature, Mapping[str, int | str]], Mapping[str, int]] | None = None,
        shared: int | Callable[[Layer, Mapping[str, int | str]], int] = 0,
        scratch: int | Callable[[Layer, Mapping[str, int | str]], int] = 0,
        **options: Any,
    ) -> None:
        """`options` are those of PluginTactic."""
        super().__init__(name, **options)
        self.source, self.entry, self.grid, self.block = source, entry, grid, block
        self.parameters, self.macros, self.shared, self.scratch = parameters, macros, shared, scratch

    def functions(self) -> list[Any]:
        more = (self.grid, self.block, self.parameters, self.macros, self.shared, self.scratch)
        return [*super().functions(), *(f for f in more if callable(f))]

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> Any:
        from whet.backends.cuda.launch import Launch
        from whet.tactics.cuda._device.arguments import KERNEL_TEXTS
        from whet.tactics.cuda._device.kernel import GpuKernel, load_kernel

        if not all(t is None or t.type.static for t in (*layer.inputs, *layer.outputs)):
            raise PlanRefused("its launch needs the layer's sizes, which are known only from the data")
        settings = dict(config)
        grid, block = self.grid(layer, settings), _evaluate_setting(self.block, layer, settings)
        shared, scratch = _evaluate_setting(self.shared, layer, settings), _evaluate_setting(self.scratch, layer, settings)
        blocks = (grid,) if isinstance(grid, int) else tuple(grid)
        numbers = list(self.parameters(layer, settings)) if self.parameters is not None else []
        macros = dict(self.macros(layer, signature, settings)) if self.macros is not None else {}
        text = f"{self.name.replace('/', '.')}.cu"
        KERNEL_TEXTS[text] = self.source

        def make(args: Args) -> list[Launch]:
            present = [a for a, t in zip(args.inputs, layer.inputs, strict=True) if t is not None]
            pointers = [*present, *args.outputs, *([args.scratch] if scratch else [])]
            packed, offsets = pack_parameters([*map(np.uint64, pointers), *numbers])
            kernel = load_kernel(text, self.entry, tuple(sorted(macros.items())), shared)
            x, y, z = (*blocks, 1, 1)[:3]
            return [Launch(kernel, (x, y, z), block, packed, overlap=False, label=layer.name, offsets=offsets)]

        return GpuKernel(layer, signature, make, implementation=self.entry, scratch=scratch, rtol=self.rtol)


def _evaluate_setting(setting: int | Callable[[Layer, Mapping[str, int | str]], int], layer: Layer, settings: Mapping[str, int | str]) -> int:
    return setting(layer, settings) if callable(setting) else setting


def pack_parameters(values: Sequence[Any]) -> tuple[bytes, tuple[int, ...]]:
    """Kernel parameters as bytes, each aligned to its size, and the offset of each."""
    packed, offsets = bytearray(), []
    for v in values:
        scalar = v if isinstance(v, np.generic) else np.bool_(v) if isinstance(v, bool) else np.int32(v) if isinstance(v, int) else np.float32(v)
        packed += bytes(-len(packed) % scalar.itemsize)
        offsets.append(len(packed))
        packed += scalar.tobytes()
    return bytes(packed), tuple(offsets)
