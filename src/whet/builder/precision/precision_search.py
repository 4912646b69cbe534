"""The search for the fastest engine of a network with a low precision permitted, within an accuracy budget.

INT8 and FP8 share its steps: build a baseline and engine candidates with Q/DQ inserted, leave out layers that do not get faster, keep layers
in floating point that the accuracy budget asks for, compare the engines interleaved, select the fastest that holds the budget, report.
A `Strategy` (int8.py, float8.py) implements the differences.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from whet.backends import get_backend
from whet.builder.config import BuildConfig
from whet.builder.precision.accuracy_budget import SAMPLES, Fit, Judge, make_accuracy_record
from whet.builder.precision.calibration import Calibration
from whet.builder.precision.comparison import compare_engines, compare_layer_times, find_slow_layers
from whet.builder.progress import ProgressLog
from whet.builder.verify.device_values import RunsOfNetworks
from whet.engine.plan import EnginePlan
from whet.engine.report import CalibrationStep, PrecisionCandidate
from whet.measure.compare import Ranking
from whet.network import Layer, Network
from whet.precision import Ranges, select_samples
from whet.precision.budget import Budget, Verdict

_FINALIST = 1.15  # times the fastest engine's time: the largest gain observed from selecting kernels in the network


@dataclass
class PrecisionEngine:
    """One engine of a search. `float_layers`: quantizable layers that it leaves in floating point."""

    what: str
    plan: EnginePlan
    float_layers: frozenset[str] = frozenset()
    verdict: Verdict | None = None  # None: not judged
    judged_on: str = ""  # "engine" or "emulation"

    @property
    def is_allowed(self) -> bool:
        """True if it meets the budget or was not judged."""
        return self.verdict is None or self.verdict.holds


class Strategy(ABC):
    """The precision-specific decisions of a `PrecisionSearch`."""

    name: str  # in names of candidates: "int8"
    title: str  # in messages: "INT8"
    pruning_rounds: int  # rounds of leaving out layers that do not get faster
    least_gain: float  # least predicted gain of leaving them out, as a share of the engine's time
    fitting_rounds: int  # rounds of dropping layers if an engine misses the budget that its emulation met
    refines_finalists: bool  # True: only finalists have their GPU kernels selected in the network, which takes seconds per engine
    reports_accuracy: bool  # True: the budget is reported, and fitted if nothing is timed
    demanded: frozenset[str] = frozenset()  # layers that the user demands in this precision

    @abstractmethod
    def build_first_candidates(self, search: PrecisionSearch) -> list[PrecisionEngine]:
        """The baseline, then the engines with every layer in the low precision; further ones are derived from the last."""

    @abstractmethod
    def build(self, search: PrecisionSearch, title: str, float_layers: frozenset[str]) -> PrecisionEngine:
        """The engine with every quantizable layer except `float_layers` in the low precision."""

    @abstractmethod
    def rebuild(self, search: PrecisionSearch, candidate: PrecisionEngine) -> PrecisionEngine:
        """The candidate rebuilt under the search's current config."""

    def build_fallback(self, search: PrecisionSearch) -> PrecisionEngine | None:
        """The engine for a budget that no candidate meets; None: the baseline."""
        return None

    @abstractmethod
    def rank_candidates(self, candidates: Sequence[PrecisionEngine], allowed: Sequence[int]) -> list[int]:
        """Indices of the allowed candidates; in a tie the first is kept."""

    @abstractmethod
    def describe(self, search: PrecisionSearch, candidates: Sequence[PrecisionEngine], index: int, shown: str) -> None:
        """Adds the decision to the search's notes and info; `shown` lists the candidates with their times."""


@dataclass
class PrecisionSearch:
    """The engines of one build. `prepared`: the source network `net` after the passes up to weight folding; Q/DQ is inserted into it."""

    strategy: Strategy
    net: Network
    prepared: Network
    ranges: Ranges
    config: BuildConfig
    layers: list[Layer]  # those that may be quantized
    progress: ProgressLog
    inputs: Mapping[str, np.ndarray] | None = None
    judge: Judge | None = None
    notes: list[str] = field(default_factory=list)
    info: list[str] = field(default_factory=list)
    calibration_steps: list[CalibrationStep] = field(default_factory=list)
    runs: RunsOfNetworks | None = None  # what computes values of networks for calibration and accuracy; None: chosen by the judge

    def set_budget(self, budget: Budget | None, calibration: Calibration) -> None:
        """Judges candidates on calibration samples from now on; without a budget none are judged."""
        if budget is not None:
            self.progress.stage("accuracy", 0)
            samples = [] if calibration.samples is None else select_samples(calibration.samples(), SAMPLES)
            self.judge = Judge(self.prepared, self.strategy.name, self.ranges, samples, budget, self.config, self.progress, engine_of=self.runs)

    def run(self) -> EnginePlan:
        """The engine that is kept, with its report."""
        backend = get_backend(self.config.backend, threads=max(self.config.threads, 0))
        if not backend.capabilities.executes or self.config.optimization_level == 0:
            return self._build_untimed()
        config = self.config
        refine = self.strategy.refines_finalists and backend.capabilities.overlapping_launches and config.in_network
        self.config = dataclasses.replace(config, in_network=config.in_network and not refine)
        candidates = self.strategy.build_first_candidates(self)
        self._leave_out_slow_layers(candidates)
        fit = Fit() if self.judge is None else self._fit_budget(candidates)
        ranking = self._compare(candidates)
        if refine:
            self.config = config
            candidates = self._refine_finalists(candidates, ranking)
            ranking = self._compare(candidates)
        return self._keep(candidates, ranking, fit)

    def list_low_precision_names(self, float_layers: frozenset[str]) -> list[str]:
        """The quantizable layers except `float_layers`."""
        return [x.name for x in self.layers if x.name not in float_layers]

    def set_verdict(self, candidate: PrecisionEngine) -> None:
        """Judges an engine, or its emulation if the samples do not fit its shapes. Needs a judge."""
        assert self.judge is not None
        candidate.verdict, candidate.judged_on = self.judge.engine(candidate.plan, self.config), "engine"
        if candidate.verdict is None:
            names = self.list_low_precision_names(candidate.float_layers)
            candidate.verdict, candidate.judged_on = self.judge.low(names), "emulation"

    def _leave_out_slow_layers(self, candidates: list[PrecisionEngine]) -> None:
        """Adds engines without the layers that are not faster in low precision than in the baseline."""
        baseline = candidates[0].plan
        for _ in range(self.strategy.pruning_rounds):
            last = candidates[-1]
            times = compare_layer_times(baseline, last.plan, self.layers)
            slow = find_slow_layers(baseline, last.plan, self.layers) - last.float_layers - self.strategy.demanded
            gain_ms = sum(times[n][1] - times[n][0] for n in slow)
            float_layers = last.float_layers | slow
            too_little = gain_ms < self.strategy.least_gain * (last.plan.report.latency_ms or 0.0)
            if not slow or too_little or len(float_layers) >= len(self.layers):
                return
            candidates.append(self.strategy.build(self, f"{self.strategy.name} without {len(float_layers)} layers that are not faster", float_layers))

    def _fit_budget(self, candidates: list[PrecisionEngine]) -> Fit:
        """Judges the candidates; adds one that holds the budget if the last does not."""
        judge, demanded = self.judge, self.strategy.demanded
        assert judge is not None
        self.progress.stage("accuracy", 0)
        times = compare_layer_times(candidates[0].plan, candidates[1].plan, self.layers) if self.strategy.reports_accuracy else {}
        saved = {n: before - after for n, (before, after) in times.items()}
        last = candidates[-1]
        fit = judge.fit(self.list_low_precision_names(last.float_layers), saved, demanded)
        float_layers = last.float_layers | frozenset(fit.dropped)
        if fit.dropped and len(float_layers) < len(self.layers):
            candidates.append(self._build_within_budget(float_layers))
        for c in candidates if demanded or candidates[0].plan.report.quantized is not None else candidates[1:]:
            self.set_verdict(c)
        for _ in range(self.strategy.fitting_rounds):
            if candidates[-1].is_allowed:
                break
            more = judge.list_most_sensitive(fit, candidates[-1].float_layers, demanded)
            float_layers = candidates[-1].float_layers | frozenset(more)
            if not more or len(float_layers) >= len(self.layers):
                break
            fit.dropped.update(dict.fromkeys(more, "the engine missed the budget that its emulation held; next in sensitivity"))
            candidates.append(self._build_within_budget(float_layers))
            self.set_verdict(candidates[-1])
        if not any(c.is_allowed for c in candidates) and (fallback := self.strategy.build_fallback(self)) is not None:
            candidates.append(fallback)
        if self.strategy.reports_accuracy:
            self.report_budget(judge.budget, fit)
        return fit

    def _build_within_budget(self, float_layers: frozenset[str]) -> PrecisionEngine:
        return self.strategy.build(self, f"{self.strategy.name} without {len(float_layers)} layers, within the budget", float_layers)

    def report_budget(self, budget: Budget, fit: Fit) -> None:
        """Adds a sentence about the budget: to the notes if it is missed or was not judged, else to the info."""
        text = f"Accuracy: {budget.text}; {fit.verdict.text if fit.verdict else 'not judged'}"
        if fit.dropped:
            named = "; ".join(f"'{n}': {why}" for n, why in list(fit.dropped.items())[:3])
            more = f"; and {len(fit.dropped) - 3} more" if len(fit.dropped) > 3 else ""
            text += f" with {len(fit.dropped)} of {len(self.layers)} layers kept out of {self.strategy.title} ({named}{more})."
        else:
            text += f": no layer has to leave {self.strategy.title} for it."
        (self.info if fit.holds else self.notes).append(text)

    def _compare(self, candidates: Sequence[PrecisionEngine]) -> Ranking:
        self.progress.stage("comparing engines", 1)
        backend = get_backend(self.config.backend, threads=max(self.config.threads, 0))
        ranking = compare_engines([c.plan for c in candidates], backend, self.config)
        self.progress.step("done")
        return ranking

    def _refine_finalists(self, candidates: list[PrecisionEngine], ranking: Ranking) -> list[PrecisionEngine]:
        """The candidates; the fastest allowed ones in floating point and in low precision are rebuilt if they are near the fastest."""
        allowed = _select_within_budget(candidates)
        is_low = [c.plan.report.quantized is not None for c in candidates]
        refined = list(candidates)
        for group in ([i for i in allowed if is_low[i] == low] for low in (False, True)):
            best = min(group, key=ranking.seconds, default=None)
            if best is not None and ranking.seconds(best) <= _FINALIST * min(map(ranking.seconds, allowed)):
                again = self.strategy.rebuild(self, candidates[best])
                if again.is_allowed or not candidates[best].is_allowed:
                    refined[best] = again
        return refined

    def _keep(self, candidates: Sequence[PrecisionEngine], ranking: Ranking, fit: Fit) -> EnginePlan:
        """The fastest allowed engine, with the comparison in its report."""
        index = ranking.select(self.strategy.rank_candidates(candidates, _select_within_budget(candidates)))
        times_ms = [1e3 * ranking.seconds(i) for i in range(len(candidates))]
        kept = candidates[index]
        report = kept.plan.report
        report.latency_ms = times_ms[index]
        rows = [
            PrecisionCandidate(
                c.what, times_ms[i], 1e3 * ranking.spread(i), c is kept, c.is_allowed, sorted(c.float_layers),
                None if c.verdict is None else c.verdict.value, c.plan.report.build_seconds,
            )
            for i, c in enumerate(candidates)
        ]  # fmt: skip
        report.precision_choice = [*report.precision_choice, *rows]
        outside = {False: " (outside the budget)", True: ""}
        shown = ", ".join(f"{c.what} {ms:.3f} ms{outside[c.is_allowed]}" for c, ms in zip(candidates, times_ms, strict=True))
        self.strategy.describe(self, candidates, index, shown)
        if self.judge is not None and self.strategy.reports_accuracy:
            report.accuracy = make_accuracy_record(self.judge.budget, fit, kept.judged_on, kept.verdict)
        return self._report(kept.plan)

    def _build_untimed(self) -> EnginePlan:
        """Low precision for all layers that permit it within the budget; used if nothing is timed."""
        fit = Fit()
        if self.judge is not None and self.strategy.reports_accuracy:
            fit = self.judge.fit([x.name for x in self.layers], {}, self.strategy.demanded)
        plan = self.strategy.build(self, self.strategy.name, frozenset(fit.dropped)).plan
        if self.judge is not None and self.strategy.reports_accuracy:
            plan.report.accuracy = make_accuracy_record(self.judge.budget, fit, "emulation", None)
            self.report_budget(self.judge.budget, fit)
        self.notes.append(f"{self.strategy.title} is used wherever possible: at this level nothing is timed, so it may not be faster")
        return self._report(plan)

    def _report(self, plan: EnginePlan) -> EnginePlan:
        plan.report.calibration_steps = self.calibration_steps or plan.report.calibration_steps
        plan.report.notes = [*plan.report.notes, *self.notes]
        plan.report.info = [*plan.report.info, *self.info]
        return plan


def _select_within_budget(candidates: Sequence[PrecisionEngine]) -> list[int]:
    """Indices of the candidates that meet the budget, or of the baseline if none does."""
    return [i for i, c in enumerate(candidates) if c.is_allowed] or [0]
