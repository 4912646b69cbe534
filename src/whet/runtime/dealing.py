"""A batch run sample by sample, several at once or in turns: what runs when a profile's samples are apart (engine/plan.py, ArenaPlan.lanes).

A lane is a thread with an arena and launches of its own, for kernels of one thread; lane k has samples k, k + lanes, ... of the batch. What
cannot fill the lanes (a single image, the rest of a division), and all where there is one lane, runs on all threads, one sample after the
other. Inputs and outputs of the whole batch lie in one piece, or in a user's arrays; launches point into them, and nothing is copied between.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from whet.backends import Backend, Buffer, Executable, get_backend
from whet.engine.plan import ArenaPlan, EnginePlan
from whet.errors import EngineError, ShapeError
from whet.network import Network, TensorType, evaluate, static_shape
from whet.ops import bind_symbols
from whet.runtime.memory import ALIGNMENT, WeightStore
from whet.runtime.shaped import Shaped, max_shapes, opt_shapes, shape_plan
from whet.runtime.steps import Again, Bound, run_caught


@dataclass
class Dealt(Shaped):
    """Shapes of a batch, of a profile whose samples are run apart. Its steps are those of a sample in a lane, and on all threads.

    `operands` and `types` are those of inputs and outputs, of the whole batch.
    """

    lane: Shaped
    alone: Backend  # that runs a lane: this machine with one thread
    team: Shaped
    batch: int
    lanes: int


def dealt_plan(plan: EnginePlan, backend: Backend, shapes: Mapping[str, tuple[int, ...]], profile: int, store: WeightStore) -> Dealt:
    """Kernels of one sample for these shapes of a batch: for one thread, and for all that the backend has. Raises as `shape_plan` does."""
    env = bind_symbols([(t.name, t.type) for t in plan.network.inputs], shapes)
    single, one = plan.of_one_sample(profile), {n: (1, *s[1:]) for n, s in shapes.items()}
    batch = next(iter(shapes.values()))[0]
    if batch < 1:
        raise ShapeError(f"the batch has {batch} samples; the engine runs them one by one, and takes at least one")
    team = lane = shape_plan(single, backend, one, 0, store)
    alone: Backend = backend
    lanes = min(plan.arenas[profile].lanes, backend.threads)
    if lanes > 1:
        alone = get_backend(backend.name, threads=1)
        lane = shape_plan(single, alone, one, 0, store)
        backend.activate()  # planning for one thread has set the calling thread's count
    ends = [*plan.network.inputs, *plan.network.outputs]
    types = {t.name: TensorType(t.dtype, tuple(evaluate(d, env) for d in t.shape)) for t in ends}
    operands = {t.name: lane.operands[t.name] for t in ends if t.name in lane.operands}
    steps, packed, constants = lane.steps + team.steps, lane.packed + team.packed, lane.constants + team.constants
    return Dealt(plan, profile, dict(shapes), env, steps, operands, types, packed, constants, lane, alone, team, batch, lanes)


def dealt_bytes(plan: EnginePlan, profile: int = 0) -> int:
    """Bytes that a run of a profile's largest batch has: an arena for each lane, inputs and outputs of the batch. For other profiles the arena."""
    arena = plan.arenas[profile]
    if not arena.lanes:
        return max(arena.total, 1)
    part, number = plan.part(profile)
    batch = next(iter(max_shapes(part, number).values()))[0]
    return _padded(arena.total) * arena.lanes + sum(_padded(arena.sizes[t.name]) * batch for t in _ends(part.network))


class Deal:
    """A recorded batch over an arena of `dealt_bytes`; to a context what Bound is. Not safe from several threads at once."""

    def __init__(self, shaped: Dealt, backend: Backend, arena: Buffer | None = None):
        self.shaped, self.backend = shaped, backend
        self.network: Network = shaped.plan.network
        self.arena = arena if arena is not None else backend.allocate(dealt_bytes(shaped.plan, shaped.profile), ALIGNMENT)
        own: ArenaPlan = shaped.lane.plan.arenas[0]
        self._staged, at = {}, _padded(own.total) * shaped.plan.arenas[shaped.profile].lanes
        for t in _ends(self.network):
            each = _padded(own.sizes.get(t.name, 0))
            self._staged[t.name] = (at, each)
            at += each * shaped.batch
        if at > self.arena.nbytes:
            raise EngineError(f"a batch of {shaped.batch} samples takes {at} bytes, the arena has {self.arena.nbytes}")
        self._lanes = [Bound(shaped.lane, shaped.alone, self._slice(k * _padded(own.total), own.total)) for k in range(shaped.lanes)]
        self._refuse_unfit()
        launches = [call for calls in self._lanes[0].step_calls for call in calls]
        self.why_no_lanes: str | None = backend.why_not_parallel(launches) if shaped.lanes > 1 else None
        if self.why_no_lanes is not None:
            steps = zip(shaped.lane.steps, self._lanes[0].step_calls, strict=True)
            named = next((f" (layer '{s.layer.name}')" for s, calls in steps if any(c.native is None for c in calls)), "")
            self.why_no_lanes += named
        self._of_sample: list[_Pointed] = []
        self.executable: Executable = self._recorded()

    def _refuse_unfit(self) -> None:
        """Inputs and outputs must be where they are told to be: the builder deals no others."""
        for t in _ends(self.network):
            o, why = self.shaped.operands.get(t.name), self._lanes[0].why_not_pointed(t.name)
            if o is None or o.format != "linear" or o.dtype != t.dtype:
                why = f"it is stored as {o}"
            elif t.dtype.bits < 8:
                why = "its elements are no whole bytes"
            if why is not None:
                raise EngineError(f"samples cannot be run apart: %{t.name} has to stay in the arena ({why})")

    def _recorded(self) -> Executable:
        """The launches of all samples: the lanes', then those on all threads."""
        batch, lanes = self.shaped.batch, self.shaped.lanes
        rest = batch % lanes
        dealt = 0 if self.why_no_lanes is not None or lanes == 1 else batch if 2 * rest > lanes else batch - rest
        stream = self.backend.stream()
        programs: list[list[Any]] = [[] for _ in range(min(lanes, dealt))]
        for i in range(dealt):
            programs[i % lanes] += self._added(self._lanes[i % lanes], first=i < lanes)
        if programs:
            stream.record(self.backend.parallel_launch(programs))
        team = self._team() if dealt < batch else []
        for i in range(dealt, batch):
            for call in self._added(team[0], first=i == dealt):
                stream.record(call)
        self._runs = [*self._lanes[: len(programs)], *team]
        for name in self._staged:
            self.point(name, None)
        executable: Executable = stream.finish()
        return executable

    def _team(self) -> list[Bound]:
        """What runs a sample on all threads, in the first lane's memory."""
        own = self._slice(0, self.shaped.lane.plan.arenas[0].total)
        return self._lanes if self.shaped.lanes == 1 else [Bound(self.shaped.team, self.backend, own)]

    def _added(self, bound: Bound, *, first: bool) -> list[Any]:
        """The launches of one more sample in a lane's memory: the lane's own, or others for what reads inputs or writes outputs."""
        again = bound.itself() if first else bound.again(self._staged)
        self._of_sample.append(_Pointed(bound, again))
        return again.calls

    # as Bound

    def feed(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Copies inputs of the whole batch. Raises ShapeError for a missing or unfit one."""
        for t in self.network.inputs:
            if t.name not in arrays:
                raise ShapeError(f"input '{t.name}' is missing; the engine takes {', '.join(i.name for i in self.network.inputs)}")
            self.write(t.name, np.asarray(arrays[t.name]))

    def write(self, name: str, array: np.ndarray) -> None:
        """Copies one input. Raises ShapeError when shape or type do not fit."""
        type_ = self.shaped.types[name]
        if array.shape != static_shape(type_.shape):
            raise ShapeError(f"'{name}' has shape {list(array.shape)}, this context is set to {type_}")
        if array.dtype != type_.dtype.numpy:
            raise ShapeError(f"'{name}' is {array.dtype}, the engine takes {type_.dtype.numpy.name}: convert it with .astype(...)")
        np.copyto(self._samples(name), np.ascontiguousarray(array).reshape(self.shaped.batch, -1).view(np.uint8))

    def fetch(self) -> dict[str, np.ndarray]:
        """Copies of the outputs of the whole batch."""
        return {t.name: self.output(t.name) for t in self.network.outputs}

    def output(self, name: str) -> np.ndarray:
        """A copy of one output of the whole batch."""
        type_ = self.shaped.types[name]
        return np.ascontiguousarray(self._samples(name)).view(type_.dtype.numpy).reshape(static_shape(type_.shape))

    def run(self) -> None:
        """Runs the batch; returns when the results are there. Raises BackendError when a kernel fails."""
        run_caught(self.executable)

    def seconds(self, repeats: int) -> list[float]:
        """`repeats` times of the whole, by the backend's clock."""
        return self.backend.seconds(self.executable, repeats)

    def seconds_in_row(self, repeats: int) -> list[float]:
        """The same, back to back: on a GPU without the host's launch time (see `Backend.seconds_in_row`)."""
        return self.backend.seconds_in_row([self.executable] * repeats)

    def run_timed(self) -> list[float]:
        """Runs the first sample layer by layer, on one lane (on all threads where there are none); seconds of each layer."""
        return self._runs[0].run_timed()

    def why_not_pointed(self, name: str) -> str | None:
        """Why kernels cannot use a user's memory for an input or output; None when they can."""
        nbytes = self._sample_bytes(name)
        if self.shaped.batch > 1 and nbytes % ALIGNMENT:
            return f"a sample of it has {nbytes} bytes, and the next would not be {ALIGNMENT}-byte aligned"
        return None

    def point(self, name: str, address: int | None) -> None:
        """Makes every sample's launches use a user's memory for an input or output (the caller keeps it alive); None: the arena again."""
        at, each = self._staged[name]
        base, stride = (self.arena.address + at, each) if address is None else (address, self._sample_bytes(name))
        for i, sample in enumerate(self._of_sample):
            sample.again.sites.point(sample.bound, name, base + i * stride)

    def nbytes(self) -> dict[str, int]:
        """Bytes this holds: arenas, scratch beyond theirs, and the packed weights (shared with others)."""
        scratch = sum(b.nbytes()["scratch"] for b in self._runs)
        return {"arena": self.arena.nbytes, "scratch": scratch, "packed": self.shaped.packed_bytes}

    # inside

    def _samples(self, name: str) -> np.ndarray:
        """The bytes of each sample of an input or output, where they lie when no user's array is bound."""
        (at, each), nbytes = self._staged[name], self._sample_bytes(name)
        assert self.arena.array is not None, "host memory"
        return self.arena.array[at : at + each * self.shaped.batch].reshape(self.shaped.batch, each)[:, :nbytes]

    def _sample_bytes(self, name: str) -> int:
        return int(evaluate(self.shaped.types[name].nbytes, {})) // self.shaped.batch

    def _slice(self, at: int, nbytes: int) -> Buffer:
        array = self.arena.array
        return Buffer(self.arena.address + at, nbytes, None if array is None else array[at : at + nbytes], self.arena)


@dataclass
class _Pointed:
    """A sample's launches, and in whose memory they run."""

    bound: Bound
    again: Again


def plan_shapes(plan: EnginePlan, backend: Backend, shapes: Mapping[str, tuple[int, ...]], profile: int, store: WeightStore) -> Shaped:
    """Kernels and weights for these input shapes, of the whole batch or of its samples, as the profile is run. Raises as `shape_plan` does."""
    if plan.arenas[profile].lanes:  # an engine of another backend is refused where it is read (engine/check.py)
        return dealt_plan(plan, backend, shapes, profile, store)
    return shape_plan(plan, backend, shapes, profile, store)


def launches(shaped: Shaped, backend: Backend, arena: Buffer | None = None) -> Any:
    """What was planned, recorded over an arena of `dealt_bytes` (its own where none is given): a Bound, or a Deal, which a context uses alike."""
    return Deal(shaped, backend, arena) if isinstance(shaped, Dealt) else Bound(shaped, backend, arena)


def bind(
    plan: EnginePlan,
    backend: Backend,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    *,
    profile: int = 0,
    store: WeightStore | None = None,
    arena: Buffer | None = None,
) -> Bound:
    """The engine at `shapes` (default: the profile's opt shapes), ready to run: a Bound, or a Deal where samples are run apart.

    `store` shares packed weights with other binds of the same backend (candidate engines in a build); `arena` is memory to use,
    at least `dealt_bytes(plan, profile)`. A choice that cannot run here falls back: see `bound.shaped.fell_back`.
    Raises ShapeError, EngineError, BackendError.
    """
    wanted = dict(shapes) if shapes is not None else opt_shapes(plan, profile)
    bound: Bound = launches(plan_shapes(plan, backend, wanted, profile, store or WeightStore(backend)), backend, arena)
    return bound


def _ends(net: Network) -> list[Any]:
    return [*net.inputs, *net.outputs]


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
