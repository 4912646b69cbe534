"""An engine plan at actual shapes: planned kernels, packed weights and storage formats. Contexts of one engine share it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from whet.backends import Backend
from whet.engine.file import release_mapping
from whet.engine.plan import EnginePlan
from whet.errors import EngineError
from whet.network import TensorType, Weight, evaluate, static_shape
from whet.ops import bind_layer, bind_symbols
from whet.runtime.kernels import ConfigCheck, Planned, make_signature, plan_layer
from whet.runtime.memory import ReadAhead, Shared, WeightStore
from whet.runtime.shape_values import find_shape_values
from whet.tactics import Operand, iterate_shifted_pairs

_RELEASE_EACH = 1 << 25  # bytes of packed weights after which the pages of the engine file are released


@dataclass
class ShapedPlan:
    """Data shared by the contexts of one engine for one set of input shapes: static layers, kernels, weights in backend memory."""

    plan: EnginePlan
    profile: int
    shapes: dict[str, tuple[int, ...]]
    env: dict[str, int]
    steps: list[Planned]
    operands: dict[str, Operand]  # storage of each tensor
    types: dict[str, TensorType]  # static type of each tensor
    packed: list[list[Shared]]  # per step
    constants: list[dict[int, Shared]]  # per step: input index -> constant, or value of shapes only, that the kernel reads as an operand
    precomputed: list[bool]  # per step: its outputs are values of shapes only, and it is not launched

    @property
    def fell_back(self) -> list[tuple[str, str]]:
        """(layer, reason) of the steps that use a fallback instead of the stored choice."""
        return [(s.layer.name, s.fell_back) for s in self.steps if s.fell_back]

    @property
    def packed_bytes(self) -> int:
        """Bytes of packed weights and constants, each counted once."""
        held = {id(s): s.buffer.nbytes for group in (*self.packed, *(c.values() for c in self.constants)) for s in group}
        return sum(held.values())


def make_shaped_plan(
    plan: EnginePlan,
    backend: Backend,
    shapes: Mapping[str, tuple[int, ...]],
    profile: int,
    store: WeightStore,
    configs: ConfigCheck | None = None,
) -> ShapedPlan:
    """Kernels and weights for these input shapes. `configs` checks configs that come from an engine file (None: the builder's own are not
    checked). Raises ShapeError, EngineError, BackendError."""
    net = plan.network
    env = bind_symbols([(t.name, t.type) for t in net.inputs], shapes)
    steps = []
    weights = StepWeights(plan, store)
    with ReadAhead(weights.read) as ahead:  # in parallel with the planning of the next steps
        for layer in net.layers:
            if layer.name not in plan.choices:
                raise EngineError(f"layer '{layer.name}' has no choice: the engine is incomplete")
            refusal = configs.explain_refusal(plan, profile, layer, backend) if configs is not None else None
            step = plan_layer(bind_layer(layer, env) if env else layer, plan.choices[layer.name], backend, refusal)
            steps.append(step)
            for taken, _held in ahead.submit(step):
                weights.load(taken)
        _check_inplace(plan, profile, steps)
        for taken, _held in ahead.finish():
            weights.load(taken)
    types = {t.name: t.type.with_shape(evaluate(d, env) for d in t.shape) for t in net.tensors()}
    operands = map_storage(plan)
    precomputed = _hold_shape_values(steps, plan, operands, weights) if env else [False] * len(steps)
    return ShapedPlan(plan, profile, dict(shapes), env, steps, operands, types, weights.packed, weights.constants, precomputed)


def _hold_shape_values(steps: list[Planned], plan: EnginePlan, operands: Mapping[str, Operand], weights: StepWeights) -> list[bool]:
    """Puts values that depend only on shapes into memory outside of the arena; returns for each step whether it is not launched."""
    found = find_shape_values(steps, {t.name for t in plan.network.outputs})
    constants = {name: Weight(array) for name, array in found.values.items()}
    for step, held, is_precomputed in zip(steps, weights.constants, found.precomputed, strict=True):
        for i, (t, o) in enumerate(zip(step.layer.inputs, step.signature.inputs, strict=True)):
            if t is not None and o is not None and t.name in constants and not is_precomputed:
                held[i] = weights.store.constant(constants[t.name], operands[t.name])
    return found.precomputed


class StepWeights:
    """Puts the weights of an engine's steps into a store. `packed` and `constants` hold those of the steps loaded so far."""

    def __init__(self, plan: EnginePlan, store: WeightStore):
        self.plan, self.store = plan, store
        self.packed: list[list[Shared]] = []
        self.constants: list[dict[int, Shared]] = []
        self._unreleased = 0

    def read(self, step: Planned) -> list[Shared]:
        """Reads the weights of a step from the engine file, in any thread: puts packed ones into the store (the result holds them there), else reads
        the constants to pack."""
        if self.plan.data is None:
            return []
        stored = [self.store.read_prepacked(p) for p in step.kernel.packed]
        held = [self.store.packed(p) for p, is_stored in zip(step.kernel.packed, stored, strict=True) if is_stored]
        if len(held) < len(stored) or any(step.signature.inputs[i] for i in _list_constant_inputs(step)):
            for i in _list_constant_inputs(step):
                _ = step.layer.needs(i).array()
        return held

    def load(self, step: Planned) -> None:
        """Packs the other weights of a step, and releases the data read from the file. Steps are loaded in order."""
        self.packed.append([self.store.packed(p) for p in step.kernel.packed])
        held = {}
        for i, (t, o) in enumerate(zip(step.layer.inputs, step.signature.inputs, strict=True)):
            if t is not None and t.weight is not None and o is not None:
                held[i] = self.store.constant(t.weight, o)
        self.constants.append(held)
        for t in step.layer.inputs:
            if t is not None and t.weight is not None:
                t.weight.release()  # a copy in the kernel's layout is in use
        self._unreleased += sum(p.nbytes for p in step.kernel.packed)
        if self._unreleased >= _RELEASE_EACH:
            release_mapping(self.plan)
            self._unreleased = 0


def _list_constant_inputs(step: Planned) -> list[int]:
    return [i for i, t in enumerate(step.layer.inputs) if t is not None and t.is_constant]


def _check_inplace(plan: EnginePlan, profile: int, steps: list[Planned]) -> None:
    """Raises EngineError if operands that share memory are not at the offsets from each other that their kernel needs."""
    offsets = plan.arenas[profile].offsets
    for step in steps:
        for i, j, shift in iterate_shifted_pairs(step.kernel, step.signature):
            source, result = step.layer.needs(i), step.layer.outputs[j]
            apart = offsets[source.name] - offsets[result.name]
            if apart != (shift if step.kernel.inputs[i] <= step.kernel.outputs[j] else -shift):
                raise EngineError(
                    f"layer '{step.layer.name}' works in place, but %{source.name} and %{result.name} are not {shift} bytes apart in the arena"
                )


def map_storage(plan: EnginePlan) -> dict[str, Operand]:
    """Storage of each tensor in the arena: from its producer's choice, for inputs from their readers' choices.

    Raises EngineError if producer and reader, or two readers, disagree.
    """
    operands: dict[str, Operand] = {}
    for layer in plan.network.layers:
        signature = make_signature(plan.choices[layer.name], layer)
        for t, o in zip(layer.inputs, signature.inputs, strict=True):
            if t is None or o is None or t.is_constant:
                continue
            if operands.setdefault(t.name, o) != o:
                raise EngineError(f"layer '{layer.name}' reads %{t.name} as {o}, it is stored as {operands[t.name]}: a Reformat is missing")
        for t, o in zip(layer.outputs, signature.outputs, strict=True):
            operands[t.name] = o
    for t in plan.network.inputs:
        operands.setdefault(t.name, Operand("linear", t.dtype))
    return operands


def get_opt_shapes(plan: EnginePlan, profile: int = 0) -> dict[str, tuple[int, ...]]:
    """The opt shape of each input in a profile; its static shape without a profile entry. Raises EngineError for an unknown profile."""
    return _profile_shapes(plan, profile, 1)


def get_max_shapes(plan: EnginePlan, profile: int = 0) -> dict[str, tuple[int, ...]]:
    """The largest shape of each input in a profile."""
    return _profile_shapes(plan, profile, 2)


def _profile_shapes(plan: EnginePlan, profile: int, which: int) -> dict[str, tuple[int, ...]]:
    count = max(len(plan.profiles), 1)
    if not 0 <= profile < count:
        raise EngineError(f"there is no profile {profile}; the engine has {count} (0 to {count - 1})")
    given = plan.profiles[profile].shapes if plan.profiles else {}
    return {t.name: tuple(given[t.name][which]) if t.name in given else static_shape(t.shape) for t in plan.network.inputs}
