"""16-bit floats within an accuracy budget: the most sensitive layers are demanded in FP32, the others stay permitted in 16 bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from glob import escape

import numpy as np

from whet.builder.batching.per_sample import apply_sample_mode, without_sample_mode
from whet.builder.build import build
from whet.builder.config import BuildConfig
from whet.builder.lock.relock import build_locked, record_request
from whet.builder.precision.accuracy_budget import Fit, Judge, make_accuracy_record
from whet.builder.progress import Progress, ProgressLog
from whet.engine.plan import EnginePlan
from whet.network import BF16, F16, Network
from whet.precision.budget import Budget, Verdict
from whet.precision.sensitivity import Feeds

_PRECISION = {F16.name: "fp16", BF16.name: "bf16"}


def find_small_type(plan: EnginePlan) -> str | None:
    """"fp16" or "bf16", the type of more of the engine's outputs; None for an engine without either."""
    counts: dict[str, int] = {}
    for choice in plan.choices.values():
        for _, dtype in choice.outputs:
            if dtype in _PRECISION:
                counts[_PRECISION[dtype]] = counts.get(_PRECISION[dtype], 0) + 1
    return max(counts, key=lambda n: counts[n]) if counts else None


def build_floats_within(
    net: Network,
    prepared: Network,
    config: BuildConfig,
    budget: Budget,
    samples: Sequence[Feeds],
    *,
    progress: Progress | None = None,
    inputs: Mapping[str, np.ndarray] | None = None,
    known: Judge | None = None,
) -> tuple[EnginePlan, Verdict | None]:
    """An engine of `net` in floating point within `budget`; `prepared` (batch norms folded) is the network that accuracy is judged on. `known` as in
    Judge: a judge of `prepared` and `samples`.

    First as permitted; if that misses the budget, with the most sensitive layers in FP32; if that misses it too, in FP32 throughout.
    The result is in the plan's report under "accuracy". Raises the errors of `build` and Budget.judge.
    """
    if config.lock:
        return build_locked(config, lambda locked: build(net, locked, progress=progress, inputs=inputs)), None
    plan, verdict = _build_within_budget(net, prepared, without_sample_mode(config), budget, samples, progress, inputs, known)
    log = ProgressLog(progress)
    plan = apply_sample_mode(plan, net, config, lambda c: build(net, c, progress=log), log, inputs)
    return record_request(plan, config), verdict


def _build_within_budget(
    net: Network,
    prepared: Network,
    config: BuildConfig,
    budget: Budget,
    samples: Sequence[Feeds],
    progress: Progress | None,
    inputs: Mapping[str, np.ndarray] | None,
    known: Judge | None,
) -> tuple[EnginePlan, Verdict | None]:
    plan = build(net, config, progress=progress, inputs=inputs)
    small = find_small_type(plan)
    if small is None:
        plan.report.accuracy = make_accuracy_record(budget, Fit(), "nothing is rounded: the engine is FP32", None)
        return plan, None
    judge = Judge(prepared, small, None, samples, budget, config, progress, known=known)
    verdict, on = _judge(judge, plan, judge.names, config)
    fit = Fit(verdict=verdict)
    if not verdict.holds:
        fit = judge.fit(judge.names, {})
        mine = tuple((escape(n), "fp32") for n in fit.dropped)
        theirs = config.layer_precisions if config.precision_constraints != "none" else ()
        narrowed = dataclasses.replace(config, precision_constraints="prefer", layer_precisions=(*mine, *theirs))
        plan = build(net, narrowed, progress=progress, inputs=inputs)
        verdict, on = _judge(judge, plan, [n for n in judge.names if n not in fit.dropped], config)
    if not verdict.holds:
        plan = build(net, dataclasses.replace(config, precisions=()), progress=progress, inputs=inputs)
        plan.report.notes.append(f"Accuracy: {budget.text}; in {small} {verdict.text}: the engine computes in FP32")
        fit.dropped = {n: "every layer: no smaller set held the budget" for n in judge.names}
        verdict, on = _judge(judge, plan, [], config)
    elif fit.dropped:
        text = f"Accuracy: {budget.text}; {verdict.text} with {len(fit.dropped)} of {len(judge.names)} layers in FP32"
        plan.report.info = [*plan.report.info, text]
    plan.report.accuracy = make_accuracy_record(budget, fit, on, verdict)
    return plan, verdict


def _judge(judge: Judge, plan: EnginePlan, low: list[str], config: BuildConfig) -> tuple[Verdict, str]:
    verdict = judge.engine(plan, config)
    return (verdict, "engine") if verdict is not None else (judge.low(low), "emulation")
