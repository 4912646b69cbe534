"""Error bounds of verification: layer by layer, and for the whole network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from whet.builder.batching.batch_items import NO_BATCH_AXES, BatchAxes, BatchItems, run_network_on_items
from whet.builder.verify.differences import compare_output, compute_output_error, find_worst_error
from whet.builder.verify.emulation import compute_reference_outputs, computes_tf32, emulate
from whet.builder.verify.host_overlap import OverlappedWork
from whet.builder.verify.overflows import Overflow, count_lost_values, describe_overflows
from whet.builder.verify.rounding_ties import has_ties, run_with_nudged_scales
from whet.builder.verify.sum_errors import bound_sum_effect
from whet.engine.plan import Choice, EnginePlan
from whet.engine.report import VerificationRecord, WorstLayer
from whet.network import BF16, F16, Layer, Network
from whet.ops import run_network
from whet.ops._products import native_accumulators

FLOOR = 1e-5  # network error that is always allowed
_SUMS = ("ReduceMean", "ReduceSum")
_CANCELLED = 1 / 32
FACTOR = 4.0  # times the emulation's error
_UNIT = {F16.name: 2.0**-11, BF16.name: 2.0**-8}  # relative error of one rounding
_SMALLEST_NORMAL = {F16.name: 2.0**-14}  # smaller values have the same spacing, so their roundings are relative to this one


@dataclass(frozen=True)
class Evidence:
    """A layer's inputs as stored, its wrong outputs and the reference's, for the batch items `images` (None: all)."""

    inputs: tuple[np.ndarray | None, ...]
    outputs: tuple[np.ndarray, ...]
    expected: tuple[np.ndarray, ...]
    images: BatchItems | None = None
    axes: BatchAxes = NO_BATCH_AXES


@dataclass(frozen=True)
class Failure:
    """A layer, or the network (layer ""), with an error above its bound."""

    layer: str
    tactic: str
    error: float
    bound: float
    what: str
    evidence: Evidence | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        return self.what


@dataclass
class Checked:
    """The result of verification: failures in order, the worst layer, errors of the network, outputs for the probe."""

    failures: list[Failure] = field(default_factory=list)
    layers: int = 0
    worst: tuple[str, float, float] = ("", 0.0, 0.0)  # layer, error, bound
    network_error: float = 0.0
    network_bound: float = FLOOR
    emulation_error: float | None = None
    images: tuple[int, ...] | None = None  # batch items of each layer compared with the reference; None: all
    network_items: tuple[int, ...] | None = None  # batch items of the network compared with the reference; None: all
    input_kinds: int = 0  # comparisons with inputs of other kinds
    shapes: tuple[dict[str, tuple[int, ...]], ...] = ()  # further input shapes, such as the minimum and maximum of the profile
    turned: float = 0.0  # largest difference between a batch item's results at two batch indices
    probe_outputs: dict[str, np.ndarray] = field(default_factory=dict)
    overflows: tuple[Overflow, ...] = ()  # of a network whose error is too large

    def take(self, c: Compared) -> None:
        """Adds the result of one layer's comparison."""
        for error, bound in c.errors:
            if bound and (self.worst[2] == 0 or error / bound > self.worst[1] / self.worst[2]):
                self.worst = (c.layer, error, bound)
        if c.failure is not None:
            self.failures.append(c.failure)

    @property
    def probe_rtol(self) -> float:
        """The probe's tolerance on other machines, from the network's bound."""
        return max(2 * self.network_bound, 1e-4)

    def report(self) -> VerificationRecord:
        return VerificationRecord(
            layers=self.layers,
            worst_layer=WorstLayer(*self.worst),
            network_error=self.network_error,
            network_bound=self.network_bound,
            emulation_error=self.emulation_error,
            failures=[str(f) for f in self.failures],
            images=None if self.images is None else list(self.images),
            turned_error=self.turned,
        )


@dataclass(frozen=True)
class Compared:
    """One layer's comparison: (error, bound) per output; with a failure, the last pair is the one that failed."""

    layer: str
    errors: tuple[tuple[float, float], ...] = ()
    failure: Failure | None = None


def compare_layer(
    layer: Layer,
    choice: Choice,
    ins: list,
    outs: list[np.ndarray],
    images: BatchItems | None = None,
    axes: BatchAxes = NO_BATCH_AXES,
    context: str = "",
    largest: Sequence[float] | None = None,
) -> Compared:
    """Compares one layer's outputs with the reference on its inputs (`ins` as stored; only for `images` if given).

    `context` says in a failure's text which inputs these are; see `compute_relative_error` for `largest`, one value per output.
    """
    if choice.tactic.rpartition("/")[2] == "numpy_reference":
        return Compared(layer.name)  # the tactic is the reference itself
    errors = []
    with np.errstate(all="ignore"):
        want = compute_reference_outputs(layer, choice, ins, images, axes)
        floors = largest or [0.0] * len(outs)
        for t, (_, dtype), got, ref, least in zip(layer.outputs, choice.outputs, outs, want, floors, strict=True):
            least = max(least, _SMALLEST_NORMAL.get(dtype, 0.0))
            error, why = compare_output(got, ref, t.dtype, choice.rtol, least)
            bound = 0.0 if not t.dtype.is_float else compute_layer_bound(layer, choice, dtype)
            if error > bound and not why and layer.op in _SUMS:
                error, why = compare_output(got, ref, t.dtype, choice.rtol, max(least, find_cancelled_size(layer, choice, ins, images, axes)))
            if error > bound and not why:
                bound += bound_sum_effect(layer, choice, ins, images, axes)
            errors.append((error, bound))
            if error > bound:
                nodes = f" (from {', '.join(layer.sources[:4])})" if layer.sources else ""
                said = f"{why or f'error {error:.2g}'}, allowed is {bound:.2g}"
                what = f"{layer.op} '{layer.name}'{nodes} by {choice.tactic} {choice.implementation}: {said}{context}"
                evidence = Evidence(tuple(ins), tuple(outs), tuple(want), images, axes)
                return Compared(layer.name, tuple(errors), Failure(layer.name, choice.tactic, error, bound, what, evidence))
    return Compared(layer.name, tuple(errors))


def find_cancelled_size(layer: Layer, choice: Choice, ins: list, images: BatchItems | None, axes: BatchAxes) -> float:
    """The smallest size of a sum's results that errors are relative to: 1/32 of the same sum of the terms' magnitudes.

    The mean of normalized values is 0 but for rounding errors, which differ from kernel to kernel.
    """
    sizes = [None if a is None else np.abs(a) if t is not None and t.dtype.is_float else a for t, a in zip(layer.inputs, ins, strict=True)]
    (total, *_) = compute_reference_outputs(layer, choice, sizes, images, axes)
    return float(np.max(total, initial=0.0, where=np.isfinite(total))) * _CANCELLED


def compute_layer_bound(layer: Layer, choice: Choice, dtype: str) -> float:
    """The kernel's bound, and one rounding to a smaller storage type."""
    if layer.op == "Reformat":
        return 2 * _UNIT.get(dtype, 0.0)
    return max(choice.rtol, 2 * _UNIT.get(dtype, 0.0))


class NetworkJudge:
    """Judges the outputs against the source network in float64.

    The bound for FP32 is the source network's own error in FP32, which no pass can change. If the engine stores smaller types, the lowered
    network must first pass that test in float64; then the error of the emulation's roundings is allowed in addition. An output that is infinite
    or NaN where FP32 and float64 are finite is a failure whatever the bound.
    """

    def __init__(self, plan: EnginePlan, source: Network, inputs: Mapping[str, np.ndarray], images: BatchItems | None, beside: OverlappedWork):
        self.plan, self.source, self.inputs, self.images = plan, source, inputs, images
        self.narrow = any(computes_tf32(c) or any(d in _UNIT for _, d in c.outputs) for c in plan.choices.values())
        self.truth = beside.early(partial(self._outputs, source, widen=True))
        self.plain = beside.early(partial(self._outputs, source))
        self.overflows: list[Overflow] = []  # filled by the emulation
        if self.narrow:
            self.lowered = beside.early(partial(self._outputs, plan.network, widen=True))
            self.emulated = beside.early(self._emulate_outputs)

    def _outputs(self, net: Network, *, widen: bool = False) -> list[np.ndarray]:
        with np.errstate(all="ignore"), native_accumulators():  # the bound is the error of arithmetic in the tensors' own types
            return list(_run_reference(net, self.inputs, self.images, widen=widen).values())

    def _emulate_outputs(self) -> list[np.ndarray]:
        with np.errstate(all="ignore"), native_accumulators():
            self.overflows.clear()
            return list(emulate(self.plan, self.inputs, self.images, self.overflows).values())

    def judge(self, got: Mapping[str, np.ndarray], checked: Checked) -> None:
        """Records the network's error and its bound, and a failure if the bound is exceeded."""
        truth = self.truth()
        # By index: an output that is also an input has another name in the engine.
        names = [t.name for t in self.plan.network.outputs]
        errors = dict(zip(names, (compute_output_error(got[n], t) for n, t in zip(names, truth, strict=True)), strict=True))
        checked.network_error = max(errors.values(), default=0.0)
        if checked.network_error <= FLOOR:
            return
        plain = self.plain()
        checked.emulation_error = find_worst_error(plain, truth)
        checked.network_bound = max(FLOOR, FACTOR * checked.emulation_error)
        lost = {n: count_lost_values(got[n], a, b) for n, a, b in zip(names, plain, truth, strict=True)}
        if checked.network_error <= checked.network_bound and not any(lost.values()):
            return
        if self.narrow:
            lowered = self.lowered()
            if find_worst_error(lowered, truth) <= checked.network_bound:
                checked.emulation_error = find_worst_error(self.emulated(), lowered)
                checked.network_bound = max(checked.network_bound, FACTOR * checked.emulation_error)
        if checked.network_error > checked.network_bound and has_ties(self.source):

            def run(net: Network) -> dict[str, np.ndarray]:
                return _run_reference(net, self.inputs, self.images, widen=True)

            ties = max(find_worst_error(outputs, truth) for outputs in run_with_nudged_scales(self.source, self.inputs, run))
            checked.emulation_error = max(checked.emulation_error, ties)
            checked.network_bound = max(checked.network_bound, FACTOR * checked.emulation_error)
        if self.narrow and (any(lost.values()) or checked.network_error > checked.network_bound):
            self.emulated()
            checked.overflows = tuple(self.overflows)
        cause = describe_overflows(checked.overflows)
        if any(lost.values()):
            name = max(lost, key=lambda n: lost[n])
            what = f"{lost[name]} of {got[name].size} values of the network's output '{name}' are infinite or NaN where FP32 has finite ones"
            checked.failures.append(Failure("", "", np.inf, checked.network_bound, what + (f": {cause}" if cause else "")))
        elif checked.network_error > checked.network_bound:
            worst = max(errors, key=lambda n: errors[n])
            what = (
                f"the network's output '{worst}' is off by {errors[worst]:.2g} against float64, allowed is {checked.network_bound:.2g} "
                f"(4 times an emulation's {checked.emulation_error:.2g}), though every layer is within its own bound. Nearest to its bound: "
                f"'{checked.worst[0]}' with {checked.worst[1]:.2g} of {checked.worst[2]:.2g}.{f' {cause}.' if cause else ''}"
            )
            checked.failures.append(Failure("", "", checked.network_error, checked.network_bound, what))


def _run_reference(net: Network, inputs: Mapping[str, np.ndarray], images: BatchItems | None, *, widen: bool = False) -> dict[str, np.ndarray]:
    """Outputs of a network by the reference, for the verified batch items."""
    return run_network(net, inputs, widen=widen) if images is None else run_network_on_items(net, inputs, images, widen=widen)
