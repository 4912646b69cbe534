"""Base of the tactics that plugins give to `whet.register`: row-major operands, sources from modules outside whet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from whet.backends import Backend
from whet.errors import UsageError
from whet.network import DTYPES, F32, DType, Layer
from whet.plugin_packages import PluginPackage
from whet.tactics import Config, Operand, Signature, Tactic


class PluginTactic(Tactic):
    """A tactic on row-major operands. All f32 tensors are stored in one of `types` ("f32", "f16", "bf16"); others in their own type.

    `refuses` gives the reason why it does not compute a layer, or None; `configs` the points of its tuning space, each a dict of names to integers
    or texts. Constants are operands like other inputs, unless `packs_constants`. `rtol` bounds ||error|| / ||reference|| and
    max|error| / max|reference|: verification rejects a kernel beyond it.
    """

    packs_constants = False

    def __init__(
        self,
        name: str,
        *,
        types: Sequence[str] = ("f32",),
        rtol: float = 1e-5,
        refuses: Callable[[Layer], str | None] | None = None,
        configs: Callable[[Layer], Sequence[dict[str, int | str]]] | None = None,
    ) -> None:
        if unknown := [t for t in types if t not in ("f32", "f16", "bf16")]:
            raise UsageError(f"the tactic {name} cannot store f32 tensors as {', '.join(unknown)}; types are f32, f16 and bf16")
        self.name, self.types, self.rtol = name, [DTYPES[t] for t in types], rtol
        self._refuses, self._configs = refuses, configs
        self._package: PluginPackage | None = None

    def registered(self, package: PluginPackage) -> None:
        """Tells the tactic its package, whose version is part of timing keys."""
        self._package = package

    def library_version(self) -> str:
        return f"{self._package.name} {self._package.version}" if self._package else ""

    def source_modules(self) -> tuple[str, ...]:
        """Its class and the modules of the user's functions."""
        modules = {type(self).__module__, *(f.__module__ for f in self.functions() if getattr(f, "__module__", None))}
        return tuple(sorted(modules))

    def functions(self) -> list[Any]:
        """The user's functions and objects whose source its kernels depend on."""
        return [f for f in (self._refuses, self._configs) if f is not None]

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer):
            return []
        tensors = [t for t in (*layer.inputs, *layer.outputs) if t is not None]
        if not any(t.dtype == F32 for t in tensors):
            return [self._signature(layer, F32)]
        return [self._signature(layer, stored) for stored in self.types]

    def _signature(self, layer: Layer, stored: DType) -> Signature:
        def operand(dtype: DType) -> Operand:
            return Operand("linear", stored if dtype == F32 else dtype)

        absent = (None if t is None or (t.is_constant and self.packs_constants) else operand(t.dtype) for t in layer.inputs)
        return Signature(tuple(absent), tuple(operand(t.dtype) for t in layer.outputs))

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        return self._refuses(layer) if self._refuses is not None else None

    def configs(self, layer: Layer, signature: Signature, backend: Backend) -> Sequence[Config]:
        if self._configs is None:
            return [()]
        return [tuple(sorted(c.items())) for c in self._configs(layer)]
