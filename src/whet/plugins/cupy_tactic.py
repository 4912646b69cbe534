"""A plugin's tactic on NVIDIA GPUs in CuPy."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from math import prod
from typing import Any

from whet.backends import Backend
from whet.network import Layer, static_shape
from whet.plugins.tactic import PluginTactic
from whet.tactics import Args, Config, PlanRefused, Signature


class CupyTactic(PluginTactic):
    """`function(layer, inputs, outputs, **config)` gets CuPy arrays over the layer's memory (None: an absent input) and writes `outputs`, on the
    current CuPy stream.

    `capturable` says that it only launches kernels: it allocates nothing (no temporaries), copies nothing to the host and waits for nothing. The
    engine then stays one CUDA graph; otherwise its layers are launched one by one.
    """

    backend = "cuda"

    def __init__(self, name: str, function: Callable[..., None], *, capturable: bool = False, **options: Any) -> None:
        """`options` are those of PluginTactic."""
        super().__init__(name, **options)
        self.function, self.capturable = function, capturable

    def functions(self) -> list[Any]:
        return [*super().functions(), self.function]

    def missing_library(self) -> str | None:
        return None if find_spec("cupy") else "CuPy is not installed: pip install cupy-cuda13x"

    def why_not(self, layer: Layer) -> str | None:
        return super().why_not(layer) or self.missing_library()

    def library_version(self) -> str:
        if self.missing_library():
            return super().library_version()
        import cupy

        return f"{super().library_version()}, CuPy {cupy.__version__}"

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> Any:
        from whet.tactics.cuda._device.kernel import GpuKernel

        if not all(t is None or t.type.static for t in (*layer.inputs, *layer.outputs)):
            raise PlanRefused("CuPy arrays need the layer's sizes, which are known only from the data")

        def make(args: Args) -> list[Any]:
            return [make_cupy_work(self, layer, signature, dict(config), args)]

        return GpuKernel(layer, signature, make, implementation="CuPy", rtol=self.rtol)


def make_cupy_work(tactic: CupyTactic, layer: Layer, signature: Signature, config: dict[str, Any], args: Args) -> Any:
    """The work of one layer for a stream. The class is made here, since whet.backends.cuda needs the extra `cuda`."""
    import cupy

    from whet.backends.cuda.launch import GpuWork
    from whet.backends.cuda.stream import Stream

    def make_array(address: int, shape: tuple[int, ...], dtype: Any) -> Any:
        memory = cupy.cuda.UnownedMemory(address, max(prod(shape) * dtype.itemsize, 1), None)
        return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0))

    ins = [
        None if t is None or o is None else make_array(p, static_shape(t.shape), o.dtype.numpy)
        for t, o, p in zip(layer.inputs, signature.inputs, args.inputs, strict=True)
    ]
    outs = [make_array(p, static_shape(t.shape), o.dtype.numpy) for t, o, p in zip(layer.outputs, signature.outputs, args.outputs, strict=True)]

    class CupyWork(GpuWork):
        """Calls the user's function on the stream."""

        on_host = not tactic.capturable

        def run(self, stream: Stream) -> None:
            with cupy.cuda.ExternalStream(int(stream.handle)):
                tactic.function(layer, ins, outs, **config)

    return CupyWork()
