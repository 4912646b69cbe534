"""A body of If, Loop or Scan as launches in one block of memory: a kernel for each layer, planned without timing.

Own kernels come before libraries' ones except for products and convolutions; a layer that no kernel computes runs in NumPy. Kernels that lose
NaN or infinities are not used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from whet.backends import Backend, Call
from whet.errors import WhetError
from whet.network import Layer, Network, Tensor, to_stored
from whet.tactics import Args, Kernel, Operand, Packed, PlanRefused, Signature, Stream, Tactic, ViewKernel, count_operand_bytes, list_tactics
from whet.tactics._fused import get_root_layer

ALIGNMENT = 64  # bytes
_PRODUCTS = frozenset({"MatMul", "Gemm", "Conv", "ConvTranspose", "ConvInteger", "MatMulInteger"})
_FIRST = ("cpu/view", "cpu/part_view", "cpu/linear_row")  # no launch at all; memory bandwidth

Place = tuple[str, int]
"""The start of a value's memory outside of the program's own block: ("input" | "output", index of the layer's), or ("state", index)."""


@dataclass(eq=False)
class Slot:
    """The memory of one value in one format: `offset` bytes after `place`, or in the program's block if `place` is None. `first` and `last` are the
    steps that write and read it."""

    nbytes: int
    place: Place | None = None
    offset: int = 0
    first: int = -1
    last: int = -1
    whole: Slot | None = None  # a view: the slot whose bytes it has, from `offset` on

    @property
    def owner(self) -> tuple[Slot, int]:
        """The slot that is no view, and the offset in it."""
        if self.whole is None:
            return self, 0
        slot, shift = self.whole.owner
        return slot, shift + self.offset


@dataclass(frozen=True)
class _Step:
    kernel: Kernel
    inputs: tuple[Slot | int | None, ...]  # an int: the index of a packed constant
    outputs: tuple[Slot, ...]
    packed: range


@dataclass
class Recorded:
    """A recorded program. `uses` has the launches' operands in memory outside of it: (launch, kind, index, offset) by place."""

    uses: dict[Place, list[tuple[Call, str, int, int]]] = field(default_factory=dict)

    def set_address(self, place: Place, address: int) -> None:
        for call, kind, index, offset in self.uses.get(place, ()):
            call.set_address(kind, index, address + offset)


class RegionProgram:
    """The kernels of a body with static shapes. `inputs` are the places of its inputs; `outputs` the slots of its outputs, and `packed` the packed
    weights and constants that it reads."""

    def __init__(self, region: Network, inputs: Sequence[Place], backend: Backend):
        self.packed: list[Packed] = []
        self.rtol = 0.0
        self.implementations: list[str] = []
        self._backend, self._steps = backend, list[_Step]()
        self._slots: dict[tuple[Tensor, str], Slot] = {}
        self._constants: dict[str, int] = {}
        for t, place in zip(region.inputs, inputs, strict=True):
            self._slots[t, "linear"] = Slot(count_operand_bytes(t, Operand("linear", t.dtype)), place)
        for layer in region.layers:
            self._add(layer)
        self.outputs = [self._constant(t, Operand("linear", t.dtype)) if t.is_constant else self._convert(t, "linear") for t in region.outputs]
        for slot in self.outputs:
            if isinstance(slot, Slot):
                slot.owner[0].last = len(self._steps)
        own = [s for s in self._slots.values() if s.whole is None and s.place is None]
        self._kernel_scratch = max((s.kernel.scratch for s in self._steps), default=0)
        self.nbytes = _round_up(self._kernel_scratch) + assign_offsets(own, _round_up(self._kernel_scratch))

    def _add(self, layer: Layer) -> None:
        signature, kernel = plan_layer(layer, self._backend)
        self.rtol += kernel.rtol
        self.implementations.append(kernel.implementation)
        inputs: list[Slot | int | None] = []
        for t, o in zip(layer.inputs, signature.inputs, strict=True):
            if t is None or o is None:
                inputs.append(None)
            else:
                inputs.append(self._constant(t, o) if t.is_constant else self._convert(t, o.format))
        self._append(layer, signature, kernel, inputs)

    def _append(self, layer: Layer, signature: Signature, kernel: Kernel, inputs: Sequence[Slot | int | None]) -> None:
        step = len(self._steps)
        for s in inputs:
            if isinstance(s, Slot):
                s.owner[0].last = step
        outputs = []
        for t, o in zip(layer.outputs, signature.outputs, strict=True):
            outputs.append(Slot(count_operand_bytes(t, o), first=step, last=step))
            self._slots[t, o.format] = outputs[-1]
        if isinstance(kernel, ViewKernel):
            for (i, j), shift in zip(signature.inplace, kernel.shifts, strict=True):
                whole = inputs[i]
                assert isinstance(whole, Slot), "a view of a constant"
                outputs[j].whole, outputs[j].offset = whole, shift
        start = len(self.packed)
        self.packed += kernel.packed
        self._steps.append(_Step(kernel, tuple(inputs), tuple(outputs), range(start, len(self.packed))))

    def _constant(self, t: Tensor, o: Operand) -> int:
        """The index of a constant in format `o` among the packed weights."""
        key = f"{t.constant().digest}|{o}"
        if key not in self._constants:
            self._constants[key] = len(self.packed)
            nbytes = count_operand_bytes(t, o)
            self.packed.append(Packed(key, nbytes, lambda: to_stored(t.array().astype(o.dtype.numpy, copy=False), o.format).reshape(-1).view("u1")))
        return self._constants[key]

    def _convert(self, t: Tensor, form: str) -> Slot:
        """The slot of a computed value in a format; converts it if it is in other formats only."""
        if (t, form) not in self._slots:
            source = next((f for x, f in self._slots if x is t), None)
            if source is None:
                raise PlanRefused(f"%{t.name} is computed outside of the body")
            name = t.dtype.name
            layer = Layer("Reformat", f"{t.name}.{form}", [t], {"source_format": source, "source_dtype": name, "format": form, "dtype": name})
            layer.outputs = (Tensor(f"{t.name}.{form}", t.type, layer),)
            signature, kernel = plan_layer(layer, self._backend)
            self._append(layer, signature, kernel, [self._slots[t, source]])
            self._slots[t, form] = self._slots.pop((layer.outputs[0], form))
        return self._slots[t, form]

    def write_output(self, index: int) -> bool:
        """Makes the kernels write an output straight into the layer's output of that index. False if they cannot: it is a view, a constant, an input,
        or another output, too."""
        slot = self.outputs[index]
        if not isinstance(slot, Slot) or slot.whole is not None or slot.place is not None or self.outputs.count(slot) > 1:
            return False
        slot.place, slot.offset = ("output", index), 0
        return True

    def record(self, places: Mapping[Place, int], block: int, packed: Sequence[int], stream: Stream, calls: Sequence[Call]) -> Recorded:
        """Records the launches on `stream`, whose list is `calls`. `block` is the address of the program's `nbytes`."""
        recorded = Recorded()
        for step in self._steps:
            inputs = tuple(0 if s is None else packed[s] if isinstance(s, int) else self.locate(s, places, block) for s in step.inputs)
            outputs = tuple(self.locate(s, places, block) for s in step.outputs)
            before = len(calls)
            step.kernel.enqueue(Args(inputs, outputs, tuple(packed[k] for k in step.packed), block), stream)
            for kind, slots in (("input", step.inputs), ("output", step.outputs)):
                for index, slot in enumerate(slots):
                    if isinstance(slot, Slot) and (owner := slot.owner)[0].place is not None:
                        _note_uses(recorded, calls[before:], kind, index, owner)
        return recorded

    def locate(self, slot: Slot, places: Mapping[Place, int], block: int) -> int:
        """The address of a slot."""
        owner, shift = slot.owner
        return shift + (block + owner.offset if owner.place is None else places[owner.place])


def _note_uses(recorded: Recorded, calls: Sequence[Call], kind: str, index: int, owner: tuple[Slot, int]) -> None:
    slot, shift = owner
    assert slot.place is not None
    for call in calls:
        if call.operands is None or (kind, index) in call.operands:
            recorded.uses.setdefault(slot.place, []).append((call, kind, index, shift))


def _round_up(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def assign_offsets(slots: Sequence[Slot], start: int) -> int:
    """Gives slots whose lifetimes overlap different bytes from offset `start` on, the largest first; returns the bytes that they take."""
    placed: list[Slot] = []
    for slot in sorted(slots, key=lambda s: -s.nbytes):
        at = start
        for other in sorted((o for o in placed if o.first <= slot.last and slot.first <= o.last), key=lambda o: o.offset):
            if at + slot.nbytes <= other.offset:
                break
            at = max(at, other.offset + _round_up(other.nbytes))
        slot.offset = at
        placed.append(slot)
    return max((s.offset + _round_up(s.nbytes) for s in placed), default=start) - start


def plan_layer(layer: Layer, backend: Backend) -> tuple[Signature, Kernel]:
    """The first kernel that computes a layer in its own types. Raises PlanRefused if there is none."""
    for t in sorted(list_tactics(backend.name), key=_make_rank(layer)):
        if (not t.opt_in or t.instead_of) and (planned := _plan(t, layer, backend)) is not None:
            return planned
    raise PlanRefused(f"no kernel computes its layer '{layer.name}' ({layer.op})")


def _make_rank(layer: Layer) -> Callable[[Tactic], tuple]:
    libraries_first = get_root_layer(layer).op in _PRODUCTS
    return lambda t: (t.fallback, t.name not in _FIRST, t.opt_in, bool(t.library) != libraries_first, t.name)


def _plan(t: Tactic, layer: Layer, backend: Backend) -> tuple[Signature, Kernel] | None:
    try:
        if t.missing_library() or t.unavailable() or t.why_not(layer) is not None:
            return None
        for s in sorted(t.signatures(layer, backend), key=_count_conversions):
            operands = (*zip(layer.inputs, s.inputs, strict=True), *zip(layer.outputs, s.outputs, strict=True))
            if any(o is not None and (x is None or o.dtype != x.dtype) for x, o in operands) or t.refuses(layer, s, backend) is not None:
                continue
            kernel = t.plan(layer, s, t.configs(layer, s, backend)[0], backend)
            if _is_usable(t, layer, s, kernel):
                return s, kernel
    except WhetError:  # PlanRefused: the next tactic
        pass
    return None


def _is_usable(t: Tactic, layer: Layer, s: Signature, kernel: Kernel) -> bool:
    if s.inplace and not _is_view_of_inputs(layer, s, kernel):
        return False
    return kernel.deterministic and t.not_strict(layer, kernel.implementation) is None and not any(t.declares(layer, kernel.implementation))


def _is_view_of_inputs(layer: Layer, s: Signature, kernel: Kernel) -> bool:
    """True if all outputs are bytes of inputs, and no input is several inputs' bytes (a Concat)."""
    if not isinstance(kernel, ViewKernel) or {j for _, j in s.inplace} != set(range(len(layer.outputs))):
        return False
    return all(kernel.inputs[i] >= kernel.outputs[j] for i, j in s.inplace) and len({j for _, j in s.inplace}) == len(s.inplace)


def _count_conversions(s: Signature) -> tuple[int, int, bool]:
    """Operands in blocked formats, those with channels last, and False for views, which launch nothing."""
    formats = [o.format for o in (*s.inputs, *s.outputs) if o is not None]
    return sum(f not in ("linear", "nhwc") for f in formats), formats.count("nhwc"), not s.inplace
