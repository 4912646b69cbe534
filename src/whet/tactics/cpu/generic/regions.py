"""If, Loop and Scan whose bodies have static shapes: the kernels of a body's layers run as one launch list, without Python between them.

For coverage: their only compiled form.
"""

from __future__ import annotations

from whet.backends import Backend
from whet.network import Layer, Network, Tensor
from whet.ops import is_data_sized
from whet.ops.loop import count_carried
from whet.ops.scan import ScanForm
from whet.tactics import Args, Config, Operand, PlanRefused, Signature, Stream, Tactic, count_operand_bytes, count_stored_bytes, list_tactics, tactic
from whet.tactics.cpu.generic._region_calls import IfCall, LoopCall, RegionCall, ScanCall
from whet.tactics.cpu.generic._region_program import ALIGNMENT, Place, RegionProgram

_BRANCHES = ("then_branch", "else_branch")


class RegionKernel:
    """The planned bodies of a layer, one after the other in the scratch memory, then the states."""

    deterministic = True

    def __init__(self, layer: Layer, signature: Signature, backend: Backend) -> None:
        self.layer, self._backend = layer, backend
        self.inputs, self.outputs = count_stored_bytes(layer, signature)
        self.carried = 0
        self.states: list[tuple[Tensor, int]] = []
        self.scratch = 0
        if layer.op == "If":
            regions = [(layer.regions[k], [("input", i) for i in range(1, len(layer.inputs))]) for k in _BRANCHES]
        else:
            regions = [self._plan_body()]
        self.programs: list[tuple[Network, RegionProgram, int]] = []
        for region, places in regions:
            program = RegionProgram(region, places, backend)
            self.programs.append((region, program, self.scratch))
            self.scratch += program.nbytes
        self.copied = [[i for i in range(len(p.outputs)) if layer.op != "If" or not p.write_output(i)] for _, p, _ in self.programs]
        self.packed = tuple(w for _, p, _ in self.programs for w in p.packed)
        self.rtol = max(p.rtol for _, p, _ in self.programs)  # of one iteration: later ones forget or keep its relative error
        names = dict.fromkeys(n for _, p, _ in self.programs for n in p.implementations)
        self.implementation = f"{layer.op.lower()}({', '.join(names)})"

    def _plan_body(self) -> tuple[Network, list[Place]]:
        """The body, and the places of its inputs: states have their own memory, captured values are read where they are."""
        layer, body = self.layer, self.layer.regions["body"]
        if layer.op == "Loop":
            self.carried = count_carried(layer)
            states = [*body.inputs[2 : 2 + self.carried], *body.inputs[:2]]
            places: list[Place] = [("state", self.carried), ("state", self.carried + 1), *(("state", i) for i in range(self.carried))]
            captured = range(2 + self.carried, len(layer.inputs))
        else:
            form = ScanForm.of(layer)
            self.carried, count = form.carried, form.carried + form.sequences
            states = body.inputs[:count]
            places, captured = [("state", i) for i in range(count)], range(count, len(layer.inputs))
        for t in states:
            self.states.append((t, self.scratch))
            nbytes = count_operand_bytes(t, Operand("linear", t.dtype))
            self.scratch += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return body, [*places, *(("input", i) for i in captured)]

    def enqueue(self, args: Args, stream: Stream) -> None:
        call: RegionCall
        if self.layer.op == "If":
            call = IfCall(self.layer, self.programs, self.states, args, self._backend)
            call.copied = self.copied
        else:
            kind = LoopCall if self.layer.op == "Loop" else ScanCall
            call = kind(self.layer, self.programs, self.states, args, self._backend, self.carried)
        stream.record(call)


@tactic
class Regions(Tactic):
    ops = ("If", "Loop", "Scan")

    def why_not(self, layer: Layer) -> str | None:
        if reason := super().why_not(layer):
            return reason
        if any(t.dtype.name == "string" or t.dtype.bits < 8 for t in _list_tensors(layer)):
            return "strings and values of less than 8 bits have no place in an arena"
        return None

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer):
            return []
        ins = tuple(None if t is None or t.is_constant else Operand("linear", t.dtype) for t in layer.inputs)
        return [Signature(ins, tuple(Operand("linear", t.dtype) for t in layer.outputs))]

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        if any(is_data_sized(x) for x in (layer, *_list_inner(layer))):
            return "a size depends on the data"
        if not all(t.type.static for t in _list_tensors(layer)):
            return "a size is a symbol"
        if any(t is not None and t.is_constant for t in layer.inputs[_count_copied_inputs(layer) :]):
            return "a body captures a constant as an input"
        return None

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> RegionKernel:
        if reason := self.refuses(layer, signature, backend):
            raise PlanRefused(reason)
        return RegionKernel(layer, signature, backend)

    def source_modules(self) -> tuple[str, ...]:
        return (type(self).__module__, *(type(t).__module__ for t in list_tactics("cpu") if t is not self))

    def library_version(self) -> str:
        return ", ".join(sorted({t.library_version() for t in list_tactics("cpu") if t is not self}))


def _count_copied_inputs(layer: Layer) -> int:
    """The number of the first inputs, which are control values or copied into states; bodies read the others where they are."""
    if layer.op == "Scan":
        form = ScanForm.of(layer)
        return form.carried + form.sequences
    return 2 + count_carried(layer) if layer.op == "Loop" else 1


def _list_inner(layer: Layer) -> list[Layer]:
    """The layers of the regions, and of theirs."""
    return [y for r in layer.regions.values() for x in r.layers for y in (x, *_list_inner(x))]


def _list_tensors(layer: Layer) -> list[Tensor]:
    inner = [t for r in layer.regions.values() for t in (*r.inputs, *r.outputs)]
    return [t for t in (*layer.inputs, *layer.outputs, *inner, *(t for x in _list_inner(layer) for t in x.outputs)) if t is not None]
