"""Low precision within an accuracy budget: the layers that have to stay in floating point, by sensitivity per saved millisecond.

Layers are ranked by the output noise that each causes alone per millisecond saved. Sets of layers are judged as a whole, not by sums of single
sensitivities: bisection finds how many of the most sensitive layers must be dropped, then these are tried in low precision again. All of
this runs in emulation (precision.emulated), without timing; the resulting engine is judged once more.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from whet.builder.assemble import compute_model_digest
from whet.builder.batching.rebatch import match_batch
from whet.builder.config import BuildConfig
from whet.builder.progress import Progress, Silent
from whet.builder.verify.device_values import select_runs
from whet.builder.verify.segments import SegmentedRuns
from whet.engine.plan import EnginePlan
from whet.engine.report import AccuracyRecord
from whet.errors import ShapeError, UsageError
from whet.measure.timing_cache import get_default_path
from whet.network import Network
from whet.precision.budget import Budget, Verdict
from whet.precision.concurrent import count_workers
from whet.precision.ranges import Ranges
from whet.precision.sensitivity import Analysis, Feeds, LayerSensitivity, RunOf
from whet.runtime import Runtime

SAMPLES = 32  # number of samples on which outputs are compared
_RANKING_SAMPLES = 2  # on which layers are ranked; sets of layers are judged on all
_READMITTED = 16  # dropped layers that are tried in low precision again
_NOTHING_MS = 1e-5  # lower bound of a layer's saved time, a divisor


@dataclass
class Fit:
    """The layers that stay in floating point: `dropped` maps each to the reason."""

    dropped: dict[str, str] = field(default_factory=dict)
    verdict: Verdict | None = None
    rows: list[LayerSensitivity] = field(default_factory=list)
    judged: int = 0

    @property
    def holds(self) -> bool:
        return self.verdict is not None and self.verdict.holds


class Judge:
    """Judges sets of layers of one network against a budget."""

    def __init__(
        self, prepared: Network, precision: str, ranges: Ranges | None, samples: Sequence[Feeds], budget: Budget, config: BuildConfig,
        progress: Progress | None = None, run_of: RunOf | None = None, known: Judge | None = None, engine_of: RunOf | None = None,
    ):  # fmt: skip
        """`run_of` makes the runs of derived networks (default: in segments, by `engine_of`). `known` is a judge of the same network and samples for
        another precision: the exact outputs, and the segments that are not rounded, are computed once."""
        self.budget, self.log = budget, progress or Silent()
        exact: Analysis | None = None if known is None else known.analysis
        if exact is not None:
            prepared, samples, run_of = exact.net, exact.samples, exact.run_of
        else:
            prepared = match_batch(prepared, samples)
            if run_of is None:
                engine_of = engine_of or select_runs(prepared, config, next(iter(samples), None), self.log.note)
                run_of = SegmentedRuns(prepared, samples, engine_of=engine_of)
        cache = get_cache_file(prepared, precision, config)
        self.analysis: Analysis = Analysis(prepared, precision, samples, run_of, ranges, cache, count_workers(), exact)
        self.judged = 0

    @property
    def names(self) -> list[str]:
        return [x.name for x in self.analysis.layers]

    def low(self, names: Collection[str]) -> Verdict:
        """The verdict with exactly these layers in low precision."""
        self.judged += 1
        a = self.analysis
        if self.budget.kind == "snr":
            value = a.snr(names)
            return Verdict(value, None, value >= self.budget.limit, f"{value:.1f} dB")
        run = a.run(names) if names else a.exact
        return self.budget.judge(run, a.exact, a.samples, a.wants)

    def list_most_sensitive(self, fit: Fit, skip: Collection[str], required_low: Collection[str]) -> list[str]:
        """The most sensitive tenth of the layers still in low precision: dropped next if an engine misses the budget that its emulation met."""
        left = [r.layer for r in fit.rows if r.layer not in set(skip) and r.layer not in set(required_low)]
        if not fit.rows:
            free = [n for n in self.names if n not in set(skip) and n not in set(required_low)]
            fit.rows = self.analysis.rank_layers(free, count=_RANKING_SAMPLES)
            left = [r.layer for r in fit.rows]
        return left[: max(1, len(left) // 10)]

    def engine(self, plan: EnginePlan, config: BuildConfig) -> Verdict | None:
        """The verdict on an engine; None if the samples do not match its shapes."""
        run = PlanRun(plan, config)
        try:
            return self.budget.judge(run, self.analysis.exact, self.analysis.samples, self.analysis.wants)
        except ShapeError as e:
            if self.budget.kind == "metric":
                raise UsageError(f"--accuracy: {self.budget.name} runs shapes that the engine's profile does not take: {e}") from e
            return None

    def fit(self, low: Collection[str], saved_ms: Mapping[str, float], required_low: Collection[str] = ()) -> Fit:
        """The layers of `low` that must return to floating point. Those in `required_low` never do: the user demands them in low precision."""
        fit = Fit()
        start = [n for n in self.names if n in set(low)]
        fit.verdict = self.low(start)
        if fit.verdict.holds:
            fit.judged = self.judged
            return fit
        free = [n for n in start if n not in set(required_low)]
        self.log.stage("accuracy", len(free))
        fit.rows = self.analysis.rank_layers(free, tell=self.log.step, count=_RANKING_SAMPLES)
        by = {r.layer: r for r in fit.rows}
        order = sorted(free, key=lambda n: -by[n].noise / max(saved_ms.get(n, 0.0), _NOTHING_MS))
        fails, holds = 0, len(order)
        while holds - fails > 1:
            middle = (fails + holds) // 2
            if self.low([n for n in start if n not in set(order[:middle])]).holds:
                holds = middle
            else:
                fails = middle
        gone = order[:holds]
        fit.verdict = self.low([n for n in start if n not in set(gone)])
        if fit.verdict.holds:
            gone = self._readmit_layers(start, gone, by, fit)
        for n in gone:
            saved = f", saves {saved_ms[n]:.4f} ms" if n in saved_ms else ""
            fit.dropped[n] = f"alone it leaves {by[n].alone_db:.1f} dB of output SNR{saved}"
        fit.judged = self.judged
        return fit

    def _readmit_layers(self, start: list[str], gone: list[str], by: Mapping[str, LayerSensitivity], fit: Fit) -> list[str]:
        """The dropped layers, except the least sensitive ones that can return to low precision within the budget: together, or else one by one."""
        left, candidates = list(gone), sorted(gone, key=lambda n: by[n].noise)[:_READMITTED]
        if self.budget.kind == "snr" and fit.verdict is not None:  # noises of different layers add: those that fit together are tried together
            room, fitting = 10 ** (-self.budget.limit / 10) - 10 ** (-fit.verdict.value / 10), list[str]()
            for n in candidates:
                if by[n].noise <= room:
                    room -= by[n].noise
                    fitting.append(n)
            trial = [x for x in gone if x not in fitting]
            verdict = self.low([x for x in start if x not in set(trial)])
            if verdict.holds:
                fit.verdict = verdict
                return trial
        for n in candidates:
            trial = [x for x in left if x != n]
            verdict = self.low([x for x in start if x not in set(trial)])
            if verdict.holds:
                left, fit.verdict = trial, verdict
        return left


class PlanRun:
    """An engine plan as run(feeds) -> outputs by name.

    An engine with a fixed larger batch also accepts single samples: the sample is repeated, and the first output is returned.
    """

    def __init__(self, plan: EnginePlan, config: BuildConfig):
        self.context = Runtime(backend=config.backend, threads=max(config.threads, 0)).load(plan).create_context()
        batches = {shapes[0][0] if shapes[0] else 0 for p in plan.profiles for shapes in p.shapes.values()}
        self.batch = batches.pop() if len(batches) == 1 else 0  # the smallest batch that all inputs accept

    def __call__(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        if self.batch <= 1 or any(np.shape(a)[:1] != (1,) for a in feeds.values()):
            return self.context.run(feeds)
        got = self.context.run({n: np.repeat(a, self.batch, axis=0) for n, a in feeds.items()})
        if any(a.shape[:1] != (self.batch,) for a in got.values()):
            raise ShapeError(f"the engine takes {self.batch} samples at once, and its outputs do not say which is which")
        return {n: a[:1] for n, a in got.items()}


def get_cache_file(prepared: Network, precision: str, config: BuildConfig) -> Path | None:
    """The cache file of this network's analysis, in the folder of the timing cache; None without a timing cache."""
    if config.timing_cache == "":
        return None
    folder = (Path(config.timing_cache) if config.timing_cache else get_default_path()).parent
    return folder / f"precision-{precision}-{compute_model_digest(prepared)[:16]}.json"


def make_accuracy_record(budget: Budget, fit: Fit, judged_on: str, verdict: Verdict | None) -> AccuracyRecord:
    """The record of a budget and its verdict."""
    shown = verdict or fit.verdict
    return AccuracyRecord(
        budget=budget.text,
        judged_on=judged_on,
        judged_sets=fit.judged,
        value=shown.value if shown else None,
        fp32=shown.reference if shown else None,
        holds=shown.holds if shown else None,
        float_layers=dict(fit.dropped),
        alone_db={r.layer: r.alone_db for r in fit.rows},
    )
