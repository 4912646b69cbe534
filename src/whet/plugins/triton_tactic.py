"""A plugin's tactic on NVIDIA GPUs as a Triton kernel, compiled ahead of its first launch; running it needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np

from whet.backends import Backend
from whet.errors import BackendError
from whet.network import Layer
from whet.plugins.cuda_tactic import Grid, pack_parameters
from whet.plugins.tactic import PluginTactic
from whet.tactics import Args, Config, PlanRefused, Signature

_TYPES = {
    "f32": "*fp32", "f16": "*fp16", "bf16": "*bf16", "f64": "*fp64", "i64": "*i64", "i32": "*i32", "i16": "*i16", "i8": "*i8", "u8": "*u8",
    "bool": "*i1",
}  # fmt: skip


class TritonTactic(PluginTactic):
    """A `@triton.jit` kernel. Its first parameters are a pointer for each present input and one for each output; `parameters(layer, config)` gives
    the others by name: integers, floats, and values of its `tl.constexpr`. `grid(layer, config)` gives the programs.

    Pointers are multiples of 16. `num_warps` and `num_stages` are Triton's options; names of the same kind in a config replace them.
    """

    backend = "cuda"

    def __init__(
        self,
        name: str,
        kernel: Any,
        *,
        grid: Callable[[Layer, Mapping[str, int | str]], Grid],
        parameters: Callable[[Layer, Mapping[str, int | str]], Mapping[str, Any]],
        num_warps: int = 4,
        num_stages: int = 3,
        **options: Any,
    ) -> None:
        """`options` are those of PluginTactic."""
        super().__init__(name, **options)
        self.kernel, self.grid, self.parameters = kernel, grid, parameters
        self.compiler_options = {"num_warps": num_warps, "num_stages": num_stages}

    def functions(self) -> list[Any]:
        return [*super().functions(), self.kernel, self.grid, self.parameters]

    def missing_library(self) -> str | None:
        return None if find_spec("triton") else "Triton is not installed: pip install triton"

    def why_not(self, layer: Layer) -> str | None:
        return super().why_not(layer) or self.missing_library()

    def library_version(self) -> str:
        if self.missing_library():
            return super().library_version()
        import triton

        return f"{super().library_version()}, Triton {triton.__version__}"

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        odd = [o.dtype.name for o in (*signature.inputs, *signature.outputs) if o is not None and o.dtype.name not in _TYPES]
        return f"Triton has no elements of type {odd[0]}" if odd else super().refuses(layer, signature, backend)

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> Any:
        from whet.backends.cuda.launch import Launch
        from whet.tactics.cuda._device.kernel import GpuKernel

        if not all(t is None or t.type.static for t in (*layer.inputs, *layer.outputs)):
            raise PlanRefused("its launch needs the layer's sizes, which are known only from the data")
        settings = dict(config)
        options = self.compiler_options | {k: int(v) for k, v in settings.items() if k in self.compiler_options}
        values = dict(self.parameters(layer, settings))
        names = list(self.kernel.arg_names)
        stored = [_TYPES[o.dtype.name] for o in (*signature.inputs, *signature.outputs) if o is not None]
        if set(names[len(stored) :]) != set(values):
            given, wanted = ", ".join(values) or "nothing", ", ".join(names[len(stored) :]) or "nothing"
            raise PlanRefused(f"{self.name}: parameters(layer, config) gives {given}; after {len(stored)} pointers the kernel has {wanted}")
        constant = {names[i] for i in self.kernel.constexprs}
        types = dict(zip(names, stored, strict=False)) | {n: "constexpr" if n in constant else _get_scalar_type(v) for n, v in values.items()}
        scalars = [_convert_scalar(values[n]) for n in names[len(stored) :] if n not in constant]
        fixed = tuple((n, values[n]) for n in names if n in constant)
        grid = self.grid(layer, settings)
        x, y, z = (*((grid,) if isinstance(grid, int) else grid), 1, 1)[:3]

        def make(args: Args) -> list[Launch]:
            pointers = [*(a for a, o in zip(args.inputs, signature.inputs, strict=True) if o is not None), *args.outputs]
            kernel, block = compile_kernel(self.kernel, tuple((n, types[n]) for n in names), fixed, tuple(sorted(options.items())))
            # Triton's kernels end with pointers to scratch memory (one or two by version; 0: none); the driver reads as many as there are
            packed, offsets = pack_parameters([*map(np.uint64, pointers), *scalars, np.uint64(0), np.uint64(0)])
            return [Launch(kernel, (x, y, z), block, packed, overlap=False, label=layer.name, offsets=offsets)]

        return GpuKernel(layer, signature, make, implementation=self.kernel.__name__, rtol=self.rtol)


_Pairs = tuple[tuple[str, Any], ...]


def compile_kernel(kernel: Any, types: _Pairs, fixed: _Pairs, options: _Pairs) -> tuple[Any, int]:
    """The loaded kernel for the bound device (Hopper without one) and its threads per block."""
    from whet.backends.cuda.driver import get_current_device

    here = get_current_device()
    major, minor = (9, 0) if here is None else here.capability
    return _compile_kernel(kernel, types, fixed, options, 10 * major + minor, here)


@cache
def _compile_kernel(kernel: Any, types: Any, fixed: Any, options: Any, capability: int, device: Any) -> tuple[Any, int]:
    import triton
    from triton.backends.compiler import GPUTarget

    from whet.backends.cuda.launch import Module

    aligned = {(i,): [["tt.divisibility", 16]] for i, (_, t) in enumerate(types) if t.startswith("*")}
    source = triton.compiler.ASTSource(kernel, dict(types), constexprs=dict(fixed), attrs=aligned)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(options))
    if made.metadata.global_scratch_size:
        raise BackendError(f"the Triton kernel {kernel.__name__} needs scratch memory of Triton's runtime; whet cannot give it. Use smaller tiles.")
    return Module(made.asm["cubin"]).kernel(made.metadata.name, made.metadata.shared), 32 * made.metadata.num_warps


def _get_scalar_type(value: Any) -> str:
    if isinstance(value, float | np.floating):
        return "fp32"
    return "i32" if -(2**31) <= int(value) < 2**31 else "i64"


def _convert_scalar(value: Any) -> np.generic:
    kind = _get_scalar_type(value)
    return np.float32(value) if kind == "fp32" else np.int32(value) if kind == "i32" else np.int64(value)
