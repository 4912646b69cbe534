"""A plugin's tactic on CPUs as an LLVM function, compiled on the user's machine by llvmlite and run on the threads of the pool."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from whet.backends import Backend
from whet.errors import UsageError
from whet.network import Layer
from whet.plugins.tactic import PluginTactic
from whet.tactics import Args, Config, PlanRefused, Signature, Stream
from whet.tactics._base import count_stored_bytes
from whet.tactics.cpu._llvm import jit
from whet.tactics.cpu._llvm.builder import FLOAT, INT32, INT64, LANES, Function, Module, Value
from whet.tactics.cpu._llvm.work_stealing import parallel_kernel, share_items

__all__ = ["FLOAT", "INT32", "INT64", "LANES", "Function", "LlvmTactic", "Value"]  # the builder's names that an `emit` needs

Emit = Callable[[Function, SimpleNamespace, Layer], None]


class LlvmTactic(PluginTactic):
    """One LLVM function computes items `begin` to `end` of a layer; whet shares the items among its threads.

    The function reads its context, an array of 64-bit words: the addresses of the layer's inputs (`input0`, ...; 0: absent), of its outputs
    (`output0`, ...), then the integers that `words(layer)` names. Give it in one of two forms:

    - `emit(f, w, layer)` writes it with whet's IR builder (its types are in this module): `w.input0`, `w.begin`, `w.end` and the words are values.
    - `ir(layer)` is text of a module that defines `void @NAME(ptr %context, i64 %begin, i64 %end)`, NAME being this tactic's name.

    `items` is the word with the number of items, which are taken in multiples of `step`; up to `serial_items` of them run on one thread.
    """

    backend = "cpu"

    def __init__(
        self,
        name: str,
        *,
        items: str,
        words: Callable[[Layer], Mapping[str, int]],
        emit: Emit | None = None,
        ir: Callable[[Layer], str] | None = None,
        step: int = 1,
        serial_items: int = 0,
        **options: Any,
    ) -> None:
        """`options` are those of PluginTactic. Raises UsageError unless one of `emit` and `ir` is given."""
        super().__init__(name, **options)
        if (emit is None) == (ir is None):
            raise UsageError(f"the tactic {name} needs its function as emit= (whet's IR builder) or as ir= (LLVM IR as text)")
        self.function_name, self.items, self.words, self.emit, self.ir = name, items, words, emit, ir
        self.step, self.serial_items = step, serial_items

    def functions(self) -> list[Any]:
        return [*super().functions(), self.words, *(f for f in (self.emit, self.ir) if f is not None)]

    def unavailable(self) -> str | None:
        return jit.why_unavailable()

    def why_not(self, layer: Layer) -> str | None:
        return super().why_not(layer) or jit.why_unavailable()

    def library_version(self) -> str:
        return ", ".join(filter(None, (super().library_version(), jit.get_version())))

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> LlvmKernel:
        if not all(t is None or t.type.static for t in (*layer.inputs, *layer.outputs)):
            raise PlanRefused("its words need the layer's sizes, which are known only from the data")
        return LlvmKernel(self, layer, signature, backend.threads)

    def module(self, layer: Layer, words: list[str]) -> str:
        """IR of the module with `void shared(context)`, which computes all items."""
        module = Module()
        if self.emit is not None:
            with parallel_kernel(module, "shared", words, self.items) as (f, values):
                self.emit(f, values, layer)
            return str(module)
        assert self.ir is not None
        share_items(module, "shared", self.function_name, words, self.items)
        return f"{self.ir(layer)}\n{module}"


class LlvmKernel:
    """A planned launch."""

    scratch, packed, deterministic = 0, (), True

    def __init__(self, tactic: LlvmTactic, layer: Layer, signature: Signature, threads: int) -> None:
        self.inputs, self.outputs = count_stored_bytes(layer, signature)
        self.rtol, self.implementation = tactic.rtol, tactic.function_name
        named = dict(tactic.words(layer))
        if tactic.items not in named:
            raise PlanRefused(f"{tactic.name}: words(layer) gives {', '.join(named) or 'nothing'}, but not its items {tactic.items!r}")
        names = [*(f"input{i}" for i in range(len(layer.inputs))), *(f"output{i}" for i in range(len(layer.outputs))), *named, "share"]
        self._ir = tactic.module(layer, names)
        self._values, self._items, self._step = list(named.values()), named[tactic.items], tactic.step
        self._threads = threads if self._items > tactic.serial_items else 1

    def enqueue(self, args: Args, stream: Stream) -> None:
        share = -(-self._items // (self._threads * self._step)) * self._step
        context = [*args.inputs, *args.outputs, *self._values, share]
        operands = {i: ("input", i) for i in range(len(args.inputs))}
        operands |= {len(args.inputs) + i: ("output", i) for i in range(len(args.outputs))}
        address = jit.load_function(self._ir, "shared")
        stream.record(jit.ParallelCall(address, context, operands, self._threads, self.implementation, step=self._step))
