"""The recorded launches that use each tensor, and the conditions under which they can use a user's memory instead of the arena."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from whet.runtime.kernels import Planned
from whet.runtime.shaped import ShapedPlan
from whet.runtime.values import Values


class OperandSites:
    """Positions of tensors' addresses in recorded launches; `note` adds the launches of a layer.

    It has no reference to the tensors' memory, because the owner of that memory refers to it: weights are freed with the last engine that uses them.
    """

    def __init__(self, shaped: ShapedPlan, like: OperandSites | None = None):
        """For the tensors of an engine; `like` is the object of another recording of the same launches."""
        self._calls: dict[str, list[tuple[Any, str, int]]] = {}  # tensor -> (launch, "input" or "output", index)
        self._groups: dict[str, set[str]] = like._groups if like is not None else _find_in_place_groups(shaped)
        self._bound: tuple[set[str], set[str]] | None = None  # names of the network's inputs and outputs
        self._worked: set[str] = set() if like is None else like._worked
        # tensor -> its address in the arena, (launch, "input" or "output", index, offset from the tensor), and the launches
        self._moves: dict[str, tuple[int, list[tuple[Any, str, int, int]], list[Any]]] = {}

    def note(self, step: Planned, calls: list[Any]) -> None:
        """Adds the recorded launches of a layer and labels them with its source nodes."""
        for call in calls:
            call.label = ", ".join(step.layer.sources) or step.layer.name
        unrestricted = [call for call in calls if call.operands is None]
        for kind, tensors, operands in (
            ("input", step.layer.inputs, step.signature.inputs),
            ("output", step.layer.outputs, step.signature.outputs),
        ):
            for index, (t, o) in enumerate(zip(tensors, operands, strict=True)):
                if t is not None and o is not None and not t.is_constant:
                    self._calls.setdefault(t.name, []).extend((call, kind, index) for call in unrestricted)
            for call in calls:
                for used_kind, index in call.operands or ():
                    t = tensors[index] if used_kind == kind and index < len(tensors) else None
                    if t is not None and operands[index] is not None and not t.is_constant:
                        self._calls[t.name].append((call, kind, index))
        if calls:  # outputs written over an input; views record and write nothing
            self._worked |= {step.layer.outputs[j].name for _, j in step.signature.inplace}

    def touches(self, step: Planned, names: Collection[str]) -> bool:
        """True if a layer reads or writes bytes of one of these tensors."""
        own = {t.name for t in (*step.layer.inputs, *step.layer.outputs) if t is not None}
        return any(own & self._groups.get(n, {n}) for n in names)

    def why_not(self, values: Values, name: str) -> str | None:
        """Reason why an input or output must stay in the arena; None if its launches can use a user's memory."""
        group, net = self._groups.get(name, {name}), values.network
        if self._bound is None:
            self._bound = ({t.name for t in net.inputs}, {t.name for t in net.outputs})
        inputs, outputs = self._bound
        if not any(self._calls.get(n) for n in group):
            return "no kernel reads or writes it"
        if len((group & inputs) | (group & outputs)) > 1:
            return "it shares its bytes with another input or output of the engine"
        if name in inputs and group & self._worked:
            return "a layer works on it in place"
        if any(n not in self._calls for n in group):
            return "it shares its bytes with a constant"
        at, size = values.place(name)
        ranges = [values.place(n) for n in group]
        if any(first < at or first + nbytes > at + size for first, nbytes in ranges):
            return "it is part of a larger tensor"
        return None

    def set_address(self, values: Values, name: str, address: int | None) -> list[Any]:
        """Makes every launch that uses the tensor use the memory at `address`; None: the arena again. Returns these launches."""
        base, moves, calls = self._find_moves(values, name)
        if address is None:
            address = base
        for call, kind, index, shift in moves:
            call.set_address(kind, index, address + shift)
        return calls

    def make_address_setter(self, values: Values, name: str) -> Callable[[int], None]:
        """`set_address` of one tensor as a function of the address."""
        _, moves, _ = self._find_moves(values, name)
        setters = [(call.make_address_setter(kind, index), shift) for call, kind, index, shift in moves]
        if len(setters) == 1 and setters[0][1] == 0:
            return setters[0][0]

        def set_all(address: int) -> None:
            for set_one, shift in setters:
                set_one(address + shift)

        return set_all

    def _find_moves(self, values: Values, name: str) -> tuple[int, list[tuple[Any, str, int, int]], list[Any]]:
        found = self._moves.get(name)
        if found is None:
            base, group = values.address(name), self._groups.get(name, {name})
            moves = [(*site, values.address(n) - base) for n in group for site in self._calls.get(n, ())]
            found = self._moves[name] = (base, moves, [call for call, *_ in moves])
        return found


def _find_in_place_groups(shaped: ShapedPlan) -> dict[str, set[str]]:
    """Tensor -> the set of tensors that share its bytes because layers work in place."""
    groups: dict[str, set[str]] = {}
    for step in shaped.steps:
        for i, j in step.signature.inplace:
            a, b = step.layer.needs(i).name, step.layer.outputs[j].name
            small, large = sorted((groups.setdefault(a, {a}), groups.setdefault(b, {b})), key=len)
            if small is not large:
                large |= small
                for n in small:
                    groups[n] = large
    return groups
