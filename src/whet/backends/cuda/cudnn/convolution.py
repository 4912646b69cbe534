"""A convolution with its epilogue as a cuDNN graph: its engines with their notes, the heuristics' proposals, and plans.

A graph identifies tensors by numbers (X, W, Y, Z, B); a plan is (engine, knobs), integers that are stored in the engine file, so loading needs
no heuristic. Precompiled engines accept a residual only before the bias, so it is added there if no activation is between them.
"""

from __future__ import annotations

import ctypes
import weakref
from dataclasses import dataclass
from typing import Any

from whet.backends.cuda.cudnn import numbers as n
from whet.backends.cuda.cudnn.descriptor import Descriptor, make_descriptor
from whet.backends.cuda.cudnn.library import CudnnError, handle
from whet.backends.cuda.driver import get_current_device
from whet.errors import BackendError
from whet.forks import cached_property, make_lock

X, W, Y, Z, B = 1, 2, 3, 4, 5
_MOST_PROPOSALS = 64
_FUSED = {"silu": n.SWISH, "sigmoid": n.SIGMOID, "tanh": n.TANH, "gelu": n.GELU, "gelu_tanh": n.GELU_TANH, "elu": n.ELU, "leaky_relu": n.RELU}

Four = tuple[int, int, int, int]
Knobs = tuple[tuple[int, int], ...]
"""(knob type, value) pairs, sorted."""


@dataclass(frozen=True)
class Convolution:
    """y = act(conv(x, w) + z + b), or its transpose. Dims are n, c, h, w; `w` is k, c/groups, r, s (transposed: c, k/groups, r, s)."""

    x: Four
    w: Four
    y: Four
    stride: tuple[int, int]
    pad: Four  # top, left, bottom, right
    dilation: tuple[int, int]
    dtype: str
    last: bool  # channels are the last axis in memory
    transposed: bool = False
    bias: bool = False
    residual: int = 0  # 0 none, 1 before the activation, 2 after it
    activation: tuple[str, float, float] | None = None
    align: int = 16

    @property
    def steps(self) -> tuple[str, ...]:
        """The epilogue's operations, in order."""
        first = (*("z",) * (self.residual == 1), *("b",) * self.bias)
        return (*first, *("act",) * (self.activation is not None), *("z",) * (self.residual == 2))


def is_fusible(activation: tuple[str, float, float]) -> bool:
    """True if the library has this activation as one operation: the lower bound of a clip must be 0."""
    kind, low, high = activation
    return kind in _FUSED or (kind == "clip" and low == 0.0 and high > 0)


@dataclass(frozen=True)
class Proposal:
    """An engine with its knobs and the library's notes on it."""

    engine: int
    knobs: Knobs
    notes: frozenset[str]
    source: str  # "a", "b", "fallback", "all"


class ConvolutionGraph:
    """The operation graph of one convolution on the current GPU, or on the one described by `device` (a DEVICE descriptor: nothing can run then)."""

    def __init__(self, work: Convolution, device: Descriptor | None = None) -> None:
        self.work, self.device = work, device
        self._graph = self._make()

    def _make(self) -> Descriptor:
        operations = list_operations(self.work)
        descriptor = Descriptor(n.GRAPH, "a convolution's graph").set(n.GRAPH_OPERATIONS, n.T_DESCRIPTOR, *operations)
        if self.device is not None:
            return descriptor.finalize()
        with handle() as h:
            return descriptor.set(n.GRAPH_HANDLE, n.T_HANDLE, h.value).finalize()

    @cached_property
    def engine_count(self) -> int:
        """Number of engines for this kind of graph; an engine that does not support this one fails when it is finalized."""
        return int(self._graph.get(n.GRAPH_ENGINES, n.T_INT64)[0])

    def _engine(self, index: int) -> Descriptor:
        descriptor = Descriptor(n.ENGINE, f"engine {index}").set(n.ENGINE_GRAPH, n.T_DESCRIPTOR, self._graph).set(n.ENGINE_INDEX, n.T_INT64, index)
        if self.device is not None:
            descriptor.set(n.ENGINE_DEVICE, n.T_DESCRIPTOR, self.device)
        return descriptor.finalize()

    def proposals(self) -> list[Proposal]:
        """Proposals of heuristics A, B and the fallback, then every other engine that supports the graph, with its default knobs."""
        proposals: dict[tuple[int, Knobs], Proposal] = {}
        for name, mode in n.HEURISTICS.items():
            try:
                for p in self._ask(name, mode):
                    proposals.setdefault((p.engine, p.knobs), p)
            except CudnnError as e:
                if not 3000 <= e.status < 4000:
                    raise
        known = {p.engine for p in proposals.values()}
        for index in range(self.engine_count):
            if index in known:
                continue
            try:
                notes = list_notes(self._engine(index))
            except CudnnError as e:
                if e.status >= 5000:
                    raise
                continue
            proposals[(index, ())] = Proposal(index, (), notes, "all")
        return list(proposals.values())

    def _ask(self, name: str, mode: int) -> list[Proposal]:
        heuristic = Descriptor(n.HEURISTIC, f"heuristic {name}").set(n.HEURISTIC_GRAPH, n.T_DESCRIPTOR, self._graph)
        heuristic.set(n.HEURISTIC_MODE, n.T_HEURISTIC, mode)
        if self.device is not None:
            heuristic.set(n.HEURISTIC_DEVICE, n.T_DESCRIPTOR, self.device)
        heuristic.finalize()
        proposals = []
        for config in heuristic.get_descriptors(n.HEURISTIC_RESULTS, n.CONFIG, "a proposal", _MOST_PROPOSALS):
            engine = config.get_descriptors(n.CONFIG_ENGINE, n.ENGINE, "a proposed engine")[0]
            knobs = []
            for choice in config.get_descriptors(n.CONFIG_KNOBS, n.KNOB_CHOICE, "a knob", 64):
                knobs.append((int(choice.get(n.KNOB_TYPE, n.T_KNOB)[0]), int(choice.get(n.KNOB_VALUE, n.T_INT64)[0])))
            proposals.append(Proposal(int(engine.get(n.ENGINE_INDEX, n.T_INT64)[0]), tuple(sorted(knobs)), list_notes(engine), name))
        return proposals

    def plan(self, engine: int, knobs: Knobs = ()) -> Plan:
        """The plan of an engine; run-time compilation of an engine takes up to seconds. Raises CudnnError with the reason if there is none."""
        configuration = Descriptor(n.CONFIG, f"a configuration of engine {engine}")
        descriptor = self._engine(engine)
        configuration.set(n.CONFIG_ENGINE, n.T_DESCRIPTOR, descriptor)
        if knobs:
            choices = [make_descriptor(n.KNOB_CHOICE, f"knob {k}", (n.KNOB_TYPE, n.T_KNOB, (k,)), (n.KNOB_VALUE, n.T_INT64, (v,))) for k, v in knobs]
            configuration.set(n.CONFIG_KNOBS, n.T_DESCRIPTOR, *choices)
        configuration.finalize()
        plan = Descriptor(n.PLAN, f"a plan of engine {engine}").set(n.PLAN_CONFIG, n.T_DESCRIPTOR, configuration)
        if self.device is not None:
            plan.set(n.PLAN_DEVICE, n.T_DESCRIPTOR, self.device).finalize()
        else:
            with handle() as h:
                plan.set(n.PLAN_HANDLE, n.T_HANDLE, h.value).finalize()
        return Plan(plan, int(plan.get(n.PLAN_WORKSPACE, n.T_INT64)[0]), list_notes(descriptor))


@dataclass(eq=False)
class Plan:
    """A finalized plan, its workspace in bytes, and its engine's notes. Several streams may run it at once."""

    descriptor: Descriptor
    workspace: int
    notes: frozenset[str]


live_plans: weakref.WeakValueDictionary[Any, Plan] = weakref.WeakValueDictionary()
_graphs: dict[Any, ConvolutionGraph] = {}
_lock = make_lock()
_MOST_GRAPHS = 64


def get_graph(work: Convolution) -> ConvolutionGraph:
    """The graph of a convolution on the current GPU; the most recent ones are cached."""
    key = (get_current_device(), work)
    with _lock:
        graph = _graphs.get(key)
        if graph is None:
            while len(_graphs) >= _MOST_GRAPHS:
                _graphs.pop(next(iter(_graphs)))
            graph = _graphs[key] = ConvolutionGraph(work)
    return graph


def plan_of(work: Convolution, engine: int, knobs: Knobs) -> Plan:
    """The plan of an engine for a convolution on the current GPU; shared by its users and released with the last of them."""
    key = (get_current_device(), work, engine, knobs)
    with _lock:
        plan = live_plans.get(key)
    if plan is None:
        plan = get_graph(work).plan(engine, knobs)
        with _lock:
            plan = live_plans.setdefault(key, plan)
    return plan


def list_notes(engine: Descriptor) -> frozenset[str]:
    """Names of an engine's numerical and behaviour notes."""
    notes = set()
    for attribute, kind, words in (
        (n.ENGINE_NUMERICAL, n.T_NUMERICAL_NOTE, n.NUMERICAL_NOTES),
        (n.ENGINE_BEHAVIOR, n.T_BEHAVIOR_NOTE, n.BEHAVIOR_NOTES),
    ):
        for number in engine.get(attribute, kind, len(words)):
            notes.add(words[number] if 0 <= number < len(words) else f"note {number}")
    return frozenset(notes)


def list_operations(work: Convolution) -> list[Descriptor]:
    """Descriptors of the convolution and its epilogue operations; intermediate values are virtual and in f32."""
    steps, kind = work.steps, n.DATA_TYPES[work.dtype]
    x, w = _make_tensor(X, work.x, work, kind), _make_tensor(W, work.w, work, kind)
    number = 10

    def make_result(i: int) -> Descriptor:
        nonlocal number
        number += 1
        return _make_tensor(Y, work.y, work, kind) if i == len(steps) else _make_tensor(number, work.y, work, n.DATA_TYPES["f32"], virtual=True)

    value = make_result(0)
    shape = make_descriptor(
        n.CONVOLUTION,
        "a convolution",
        (n.COMPUTE_TYPE, n.T_DATA_TYPE, (n.DATA_TYPES["f32"],)),
        (n.CONVOLUTION_MODE, n.T_CONVOLUTION_MODE, (n.CROSS_CORRELATION,)),
        (n.SPATIAL_DIMS, n.T_INT64, (2,)),
        (n.STRIDES, n.T_INT64, work.stride),
        (n.DILATIONS, n.T_INT64, work.dilation),
        (n.PRE_PADDINGS, n.T_INT64, work.pad[:2]),
        (n.POST_PADDINGS, n.T_INT64, work.pad[2:]),
    )
    if work.transposed:  # the gradient of a convolution's input is a transposed convolution
        base, source, target, operation = n.BACKWARD_ALPHA, n.BACKWARD_DY, n.BACKWARD_DX, n.BACKWARD_DATA
    else:
        base, source, target, operation = n.FORWARD_ALPHA, n.FORWARD_X, n.FORWARD_Y, n.FORWARD
    head = make_descriptor(
        operation,
        "the operation of a convolution",
        (base, n.T_FLOAT, (1.0,)),
        (base + 1, n.T_FLOAT, (0.0,)),
        (base + 2, n.T_DESCRIPTOR, (shape,)),
        (n.BACKWARD_W if work.transposed else n.FORWARD_W, n.T_DESCRIPTOR, (w,)),
        (source, n.T_DESCRIPTOR, (x,)),
        (target, n.T_DESCRIPTOR, (value,)),
    )
    operations = [head]
    for i, step in enumerate(steps, 1):
        after = make_result(i)
        inputs = [(n.OPERATION_X, n.T_DESCRIPTOR, (value,)), (n.OPERATION_Y, n.T_DESCRIPTOR, (after,))]
        if step == "z":
            inputs.append((n.OPERATION_B, n.T_DESCRIPTOR, (_make_tensor(Z, work.y, work, kind),)))
        elif step == "b":
            inputs.append((n.OPERATION_B, n.T_DESCRIPTOR, (_make_tensor(B, (1, work.y[1], 1, 1), work, kind),)))
        point = _make_activation(work.activation) if step == "act" else _step(n.ADD)
        operations.append(make_descriptor(n.OPERATION_POINTWISE, f"step {step}", (n.OPERATION_STEP, n.T_DESCRIPTOR, (point,)), *inputs))
        value = after
    return operations


def _make_tensor(number: int, dims: Four, work: Convolution, kind: int, virtual: bool = False) -> Descriptor:
    _, c, h, w = dims
    strides = (h * w * c, 1, w * c, c) if work.last else (c * h * w, h * w, w, 1)
    return make_descriptor(
        n.TENSOR,
        f"tensor {number}",
        (n.TENSOR_TYPE, n.T_DATA_TYPE, (kind,)),
        (n.TENSOR_DIMS, n.T_INT64, dims),
        (n.TENSOR_STRIDES, n.T_INT64, strides),
        (n.TENSOR_ID, n.T_INT64, (number,)),
        (n.TENSOR_ALIGNMENT, n.T_INT64, (work.align,)),
        (n.TENSOR_VIRTUAL, n.T_BOOL, (virtual,)),
    )


def _step(mode: int, *attributes: tuple[int, int, tuple[Any, ...]]) -> Descriptor:
    settings = ((n.POINTWISE_MODE, n.T_POINTWISE_MODE, (mode,)), (n.POINTWISE_PRECISION, n.T_DATA_TYPE, (n.DATA_TYPES["f32"],)), *attributes)
    return make_descriptor(n.POINTWISE, "a step", *settings)


def _make_activation(activation: tuple[str, float, float] | None) -> Descriptor:
    kind, low, high = activation or ("clip", 0.0, float("inf"))
    if kind == "clip":
        limits = () if high == float("inf") else ((n.RELU_HIGH, n.T_DOUBLE, (high,)),)
        return _step(n.RELU, *limits)
    if kind == "leaky_relu":
        return _step(n.RELU, (n.RELU_SLOPE, n.T_DOUBLE, (low,)))
    if kind == "elu":
        return _step(n.ELU, (n.ELU_ALPHA, n.T_DOUBLE, (low,)))
    return _step(_FUSED[kind])


def make_variant_pack(values: dict[int, int], workspace: int) -> Descriptor:
    """The addresses of a run: tensors by number, and the workspace."""
    if any(not v for v in values.values()):
        raise BackendError("an operand of a cuDNN plan has no address. This is a mistake in whet: please report it.")
    pack = Descriptor(n.PACK, "the addresses of a run")
    pack.set(n.PACK_IDS, n.T_INT64, *values).set(n.PACK_POINTERS, n.T_POINTER, *values.values())
    return pack.set(n.PACK_WORKSPACE, n.T_POINTER, ctypes.c_void_p(workspace).value).finalize()
