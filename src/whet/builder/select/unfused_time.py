"""Timing a fused layer against its parts, run one after the other.

The chain of parts is timed as one kernel with the same operands, interleaved with the fastest fused kernel, so that both see the same caches
and the same external load. For the root operation (the convolution or matrix product) the chain uses the fused kernel's own implementation
without its epilogue, and tactics that do not accept the fused layer. Only if a chain wins are the parts' candidates timed in full, and the
network is also selected with the layer unfused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from whet.backends import Backend
from whet.builder.candidates.compile_ahead import list_configs_with_texts
from whet.builder.candidates.unfuse import list_parts
from whet.engine.report import Candidate
from whet.errors import BackendError, NetworkError
from whet.measure.option import Option
from whet.measure.policy import UNFUSED
from whet.measure.timing import Timer
from whet.measure.timing_key import compute_source_digest
from whet.network import Layer
from whet.ops import bind_layer
from whet.runtime.memory import align_size
from whet.tactics import Args, Config, Kernel, Operand, Packed, PlanRefused, Signature, Stream, Tactic, get_root_layer, is_quantized

LONGEST_CHAIN = 4  # parts; longer chains read and write too much memory to win


@dataclass(frozen=True)
class UnfusedTime:
    """Interleaved times in ms of the fastest chain of a fused layer's parts and of its fastest kernel; or the reason why there are none."""

    fused_ms: float | None = None
    ms: float | None = None
    spread_ms: float = 0.0
    signature: str = ""
    parts: str = ""  # tactic and implementation of each
    reason: str = ""

    @property
    def wins(self) -> bool:
        """True if the chain is faster by more than the noise."""
        if self.ms is None or self.fused_ms is None:
            return False
        return self.fused_ms - self.ms > UNFUSED.tolerance(self.ms, self.spread_ms)

    def __str__(self) -> str:
        return self.reason or f"fused {self.fused_ms:.4f} ms, unfused {self.ms:.4f} ms (interleaved)"

    def candidate(self) -> Candidate:
        """The row of the report, under the tactic name "unfused"."""
        return Candidate("unfused", self.signature, (), self.parts, self.ms, self.spread_ms if self.ms is not None else None, str(self))


class _ChainTactic(Tactic):
    """Identifies a planned chain in timing keys, by the name "unfused"."""

    name, version = "unfused", 1

    def __init__(self, steps: Sequence[_Step], signature: Signature, kernel: Kernel):
        self._signature, self._kernel = signature, kernel
        tactics = [s.option.tactic for s in steps]
        self._library = "; ".join(f"{t.name} {compute_source_digest(t)} {t.library_version()}" for t in tactics)

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        return [self._signature]

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> Kernel:
        return self._kernel

    def library_version(self) -> str:
        return self._library


@dataclass(frozen=True)
class _Step:
    """One part: its option and the buffer of each operand, ("input" | "output" | "between", index); None if absent."""

    option: Option
    reads: tuple[tuple[str, int] | None, ...]
    writes: tuple[str, int]


class _ChainKernel:
    """The parts' launches one after the other; intermediate tensors are in scratch memory."""

    rtol, deterministic = 0.0, True

    def __init__(self, like: Kernel, steps: Sequence[_Step], between: Sequence[int]):
        self.inputs, self.outputs, self.steps = like.inputs, like.outputs, steps
        self.packed: tuple[Packed, ...] = tuple(p for s in steps for p in s.option.kernel.packed)
        self._at = [sum(align_size(n) for n in between[:k]) for k in range(len(between) + 1)]
        self.scratch = self._at[-1] + max(s.option.kernel.scratch for s in steps)
        self.implementation = " + ".join(f"{s.option.tactic.name} {s.option.kernel.implementation}" for s in steps)

    def enqueue(self, args: Args, stream: Stream) -> None:
        def address(place: tuple[str, int] | None) -> int:
            if place is None:
                return 0
            kind, i = place
            return args.scratch + self._at[i] if kind == "between" else (args.inputs if kind == "input" else args.outputs)[i]

        taken = 0
        for s in self.steps:
            k = s.option.kernel
            packed = args.packed[taken : taken + len(k.packed)]
            taken += len(k.packed)
            scratch = args.scratch + self._at[-1] if k.scratch else 0
            k.enqueue(Args(tuple(address(p) for p in s.reads), (address(s.writes),), packed, scratch), stream)


def list_chains(layer: Layer, best: Option, fused: set[str], tactics: list[Tactic], permissions: Any, backend: Backend) -> list[Option] | UnfusedTime:
    """Chains of the parts of `layer` (static shapes) in the formats of `best`, its fastest fused kernel; or the reason why there are none.

    `fused` are the tactics that have a kernel for the fused layer.
    """
    if is_quantized(layer):
        return UnfusedTime(reason="not unfused: tensors between its parts would be floating point")
    if not 2 <= len(layer.regions["body"].layers) <= LONGEST_CHAIN or len(layer.outputs) != 1:
        return UnfusedTime(reason=f"not unfused: only layers of 2 to {LONGEST_CHAIN} parts with one output are")
    chains = _list_chains(layer, best, fused, tactics, permissions, backend)
    return UnfusedTime(reason=f"not unfused: {chains}") if isinstance(chains, str) else chains


def time_chains(layer: Layer, text: str, best: Option, chains: list[Option], timer: Timer) -> UnfusedTime:
    """Times the chains of `layer` (`text` is its format_layer) against `best`."""
    whole = dataclasses.replace(best, rank=0, ms=None)
    timer.time(layer, f"{text}\nin turns with its parts", [whole, *chains])
    timed = [c for c in chains if c.ms is not None]
    if whole.ms is None or not timed:
        return UnfusedTime(reason="its parts could not be timed")
    fastest = min(timed, key=lambda o: o.cost)
    return UnfusedTime(whole.ms, fastest.ms, max(fastest.spread_ms, whole.spread_ms), str(best.signature), fastest.kernel.implementation)


def _list_chains(layer: Layer, best: Option, fused: set[str], tactics: list[Tactic], permissions: Any, backend: Backend) -> list[Option] | str:
    """One option per kernel of the root operation, followed by the first kernel of every other part; or the reason why a part has none."""
    parts, root_op = list_parts(layer), get_root_layer(layer).op
    stored: dict[str, Operand] = {}
    buffers: dict[str, tuple[str, int]] = {}
    for t, i in parts.inputs.items():
        buffers[t.name] = ("input", i)
        if (o := best.signature.inputs[i]) is not None:
            stored[t.name] = o
    target = best.signature.outputs[0]
    listed: list[list[_Step]] = []
    between: list[int] = []
    for k, part in enumerate(parts.layers):
        static = bind_layer(part, {})
        output = part.outputs[0].name
        is_root = k == 0 and part.op == root_op
        usable = [t for t in tactics if not t.fallback and not (is_root and t.name in fused and t.name != best.tactic.name)]
        last = k == len(parts.layers) - 1
        writes = target if last else _make_intermediate_operand(part, layer, stored, target)
        options = _list_options(static, stored, writes, usable, permissions, backend, first=not is_root)
        if is_root and len(options) > 1:
            options = [o for o in options if o.tactic is not best.tactic or o.config == best.config] or options
        if not options:
            return f"its part {part.op} has no kernel that reads and writes {writes}"
        buffers[output], stored[output] = ("output", 0) if last else ("between", len(between)), writes
        if not last:
            between.append(options[0].kernel.outputs[0])
        reads = tuple(None if t is None or t.is_constant else buffers[t.name] for t in part.inputs)
        by_tactic = {o.tactic.name: o for o in reversed(options)}
        listed.append([_Step(o, reads, buffers[output]) for o in (by_tactic.values() if is_root else options[:1])])
    return [_make_chain(best, [first, *(steps[0] for steps in listed[1:])], between, rank) for rank, first in enumerate(listed[0], start=1)]


def _make_intermediate_operand(part: Layer, fused: Layer, stored: Mapping[str, Operand], target: Operand) -> Operand:
    """The format of an intermediate tensor: that of the fused layer's output, or of an input of the part if the rank differs."""
    tensor = part.outputs[0].type
    if tensor.rank == fused.outputs[0].type.rank:
        return target
    return next((stored[t.name] for t in part.inputs if t is not None and t.name in stored and t.type.rank == tensor.rank), target)


def _make_chain(best: Option, steps: list[_Step], between: Sequence[int], rank: int) -> Option:
    config = tuple((f"part{k}", f"{s.option.tactic.name} {s.option.signature} {s.option.config}") for k, s in enumerate(steps))
    texts = tuple(text for s in steps for text in s.option.texts)
    kernel = _ChainKernel(best.kernel, steps, between)
    return Option(_ChainTactic(steps, best.signature, kernel), best.signature, config, kernel, rank, texts=texts)


def _list_options(
    part: Layer, stored: Mapping[str, Operand], target: Operand, tactics: list[Tactic], permissions: Any, backend: Backend, *, first: bool
) -> list[Option]:
    """Kernels of a part that read its operands as stored and write `target`, not in place. `first`: of the first tactic that has any."""

    def fits(s: Signature) -> bool:
        if s.inplace or s.outputs != (target,):
            return False
        return all(o == (None if t is None or t.is_constant else stored.get(t.name)) for t, o in zip(part.inputs, s.inputs, strict=True))

    found: list[Option] = []
    for t in sorted(tactics, key=lambda t: t.name):
        if first and found:
            break
        try:
            if t.why_not(part) is not None:
                continue
            for s in (s for s in t.signatures(part, backend) if fits(s)):
                if permissions.refuses(part, s) is None and t.refuses(part, s, backend) is None:
                    for c, texts in list_configs_with_texts(t, part, s, backend):
                        found.append(Option(t, s, c, t.plan(part, s, c, backend), len(found), texts=texts))
        except (PlanRefused, BackendError, NetworkError):
            continue
    return found
