"""Which engines an INT8 build tries, which of them are tuned and judged, and which is kept."""

from __future__ import annotations

from whet.builder.precision.accuracy_budget import Fit, report_of
from whet.builder.precision.comparison import layer_times, slow_layers
from whet.builder.precision.int8_engines import Making, Tried
from whet.engine.plan import EnginePlan
from whet.engine.report import PrecisionCandidate
from whet.measure.compare import Ranking

_ROUNDS_OF_DROPPING = 2
_OPEN = 1.15  # of the fastest engine: what choosing kernels in the network could still put in front
_LEAST_GAIN = 0.003  # of the engine's time, that leaving slow layers out has to promise: what is less cannot be told from the noise
_ROUNDS_OF_FITTING = 3  # an engine that misses what its emulation held loses a tenth of its integers, so often


def candidates(m: Making) -> list[Tried]:
    """Floating point (or INT8 only where it is demanded), all integers, and integers without what does not pay."""
    everything = frozenset(x.name for x in m.layers)
    demanded = [m.integers(f"int8 where it is demanded ({len(m.must)} layers)", everything - m.must)] if m.must else []
    tried = [m.integers("int8", frozenset())]
    if m.looks_up():
        m.tables = True
        tried.append(m.integers("int8", frozenset()))
        computed, looked_up = (t.plan.report.latency_ms or 0.0 for t in tried)
        m.tables = looked_up <= computed
        if not m.tables:
            tried.reverse()  # what comes is made from the faster one
    tried = [*(demanded or [m.floats(tried[-1].plan.report.latency_ms)]), *tried]  # floats come last: it is known whom they have to beat
    for _ in range(_ROUNDS_OF_DROPPING):
        last = tried[-1]
        times = layer_times(tried[0].plan, last.plan, m.layers)
        slow = slow_layers(tried[0].plan, last.plan, m.layers) - last.skip - m.must
        gain = sum(times[n][1] - times[n][0] for n in slow)
        if gain < _LEAST_GAIN * (last.plan.report.latency_ms or 0.0) or not slow or len(slow | last.skip) >= len(m.layers):
            break
        wider = last.skip | slow
        tried.append(m.integers(f"int8 without {len(wider)} layers that do not pay", wider))
    return tried


def tuned(m: Making, tried: list[Tried], ranking: Ranking) -> list[Tried]:
    """The engines with their kernels chosen in the network too: of floating point and of integers the fastest that may be kept."""
    middle = [ranking.seconds(i) for i in range(len(tried))]
    open_ = [i for i, t in enumerate(tried) if t.allowed] or [0]
    kinds = [[i for i in open_ if (tried[i].plan.report.quantized is not None) == quantized] for quantized in (False, True)]
    found = list(tried)
    for i in (min(kind, key=lambda i: middle[i]) for kind in kinds if kind):
        if middle[i] <= _OPEN * min(middle[k] for k in open_):
            again = m.tuned(tried[i])
            found[i] = again if again.allowed or not tried[i].allowed else tried[i]
    return found


def fitted(m: Making, tried: list[Tried]) -> Fit:
    """Judges the candidates; adds the engine that holds the budget where the best by time does not."""
    judge = m.judge
    assert judge is not None
    times = layer_times(tried[0].plan, tried[1].plan, m.layers)
    saved = {n: before - after for n, (before, after) in times.items()}
    last = tried[-1]
    fit = judge.fit(m.low(last.skip), saved, m.must)
    skip = last.skip | frozenset(fit.dropped)
    if fit.dropped and len(skip) < len(m.layers):
        tried.append(m.integers(f"int8 without {len(skip)} layers, within the budget", skip))
    for t in tried if m.must else tried[1:]:
        m.set_verdict(t)
    for _ in range(_ROUNDS_OF_FITTING):
        if tried[-1].allowed:
            break
        more = judge.harder(fit, tried[-1].skip, m.must)
        skip = tried[-1].skip | frozenset(more)
        if not more or len(skip) >= len(m.layers):
            break
        fit.dropped.update(dict.fromkeys(more, "the engine missed the budget that its emulation held; next in harm"))
        tried.append(m.integers(f"int8 without {len(skip)} layers, within the budget", skip))
        m.set_verdict(tried[-1])
    _say_budget(m, fit)
    return fit


def untimed(m: Making) -> EnginePlan:
    """Where nothing is timed: integers wherever they can be, and the budget allows it."""
    names = [x.name for x in m.layers]
    fit = Fit() if m.judge is None else m.judge.fit(names, {}, m.must)
    plan = m.integers("int8", frozenset(fit.dropped)).plan
    if m.judge is not None:
        plan.report.accuracy = report_of(m.judge.budget, fit, "emulation", None)
        _say_budget(m, fit)
    plan.report.notes += [*m.notes, "INT8 is used wherever it can be: at this level nothing is timed, so it may not pay"]
    plan.report.info = [*plan.report.info, *m.info]
    return plan


def _say_budget(m: Making, fit: Fit) -> None:
    """What became of the budget: a warning where it is missed, or was not judged."""
    assert m.judge is not None
    shown = fit.verdict.text if fit.verdict else "not judged"
    said = f"Accuracy: {m.judge.budget.text}; {shown}"
    if fit.dropped:
        named = "; ".join(f"'{n}': {why}" for n, why in list(fit.dropped.items())[:3])
        more = f"; and {len(fit.dropped) - 3} more" if len(fit.dropped) > 3 else ""
        said += f" with {len(fit.dropped)} of {len(m.layers)} layers kept out of INT8 ({named}{more})."
    else:
        said += ": nothing has to leave INT8 for it."
    (m.info if fit.verdict is not None and fit.verdict.holds else m.notes).append(said)


def keep(m: Making, tried: list[Tried], ranking: Ranking) -> EnginePlan:
    """The fastest that holds the budget; of those within the noise the one with the fewest integers (floating point, then the fewest layers)."""
    open_ = [i for i, t in enumerate(tried) if t.allowed] or [0]
    kept = ranking.select(sorted(open_, key=lambda i: (i > 0, -len(tried[i].skip))))
    middle, spread = ([1e3 * s(i) for i in range(len(tried))] for s in (ranking.seconds, ranking.spread))
    plan = tried[kept].plan
    plan.report.latency_ms = middle[kept]
    plan.report.precision_choice = [
        PrecisionCandidate(
            t.what, ms, s, i == kept, t.allowed, sorted(t.skip), None if t.verdict is None else t.verdict.value, t.plan.report.build_seconds
        )
        for i, (t, ms, s) in enumerate(zip(tried, middle, spread, strict=True))
    ]
    shown = ", ".join(f"{t.what} {ms:.3f} ms{'' if t.allowed else ' (outside the budget)'}" for t, ms in zip(tried, middle, strict=True))
    if not any(t.allowed for t in tried):
        m.notes.append(f"No engine holds the accuracy budget: {shown}. The first one is kept; the demands for INT8 or 16 bits leave no other.")
    elif tried[kept].plan.report.quantized is None:
        m.notes.append(f"--int8 is permitted but does not pay here: {shown}. The engine computes in floating point.")
    elif kept == 0:
        m.notes.append(f"INT8 pays nowhere but where it is demanded: {shown}.")
    else:
        left = len(tried[kept].skip)
        floats = f"; {left} of {len(m.layers)} quantizable layers stay in floating point" if left else ""
        m.info.append(f"INT8 pays: {shown}{floats}.")
    plan.report.notes = [*plan.report.notes, *m.notes]
    plan.report.info = [*plan.report.info, *m.info]
    return plan
