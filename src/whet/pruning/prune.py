"""prune(): score, choose, cut and recover in one call; what `whet prune` runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from math import isfinite

import numpy as np

from whet.builder.config import BuildConfig
from whet.errors import PruneError
from whet.network import Network
from whet.pruning.costs import Costs, channel_costs, flop_costs, parameter_costs
from whet.pruning.counting import count_flops, count_params
from whet.pruning.coupling import Group, groups
from whet.pruning.cut import cut
from whet.pruning.depth import Branch, branches
from whet.pruning.importance import NEED_DATA, Own, Samples, choose, importance, name_of
from whet.pruning.knapsack import Choice, choose_within, per_layer
from whet.pruning.latency_cost import latency_costs, measured_sum, static_layers
from whet.pruning.latency_table import LatencyTable
from whet.pruning.meter import Meter
from whet.pruning.order import check_order, note
from whet.pruning.recipe import Recipe, recipe_of
from whet.pruning.recovery import Progress, RecoveryConfig, recover
from whet.pruning.skipping import stay_whole
from whet.pruning.target import TIMED, Target
from whet.pruning.truth import measured_ms

_TRIES, _CLOSE = 3, 1.02  # choices until the engine meets a latency target, and what counts as meeting it
_AGAIN = 2  # times that a choice is made anew because times behind it were taken again
_OFF = 0.1  # share of the original's time by which a prediction may miss without a word


_QUIETER = "A latency table (--latencyTable) keeps them marked, and a run that finds the machine quiet takes them again; --retime takes all again."


@dataclass(frozen=True, kw_only=True)
class PruneConfig:
    """What goes, and how the rest recovers; `whet prune` reads its flags off these fields."""

    ratio: float = 0.4  # share of all channels to cut; a target takes its place
    target: Target | None = None  # latency, throughput, FLOPs, parameters or channels that may stay
    importance: str | Own = "l1"  # importance.KINDS, python:MODULE:FUNCTION, or a function(net, group) itself
    scope: str = "global"  # global: the least important of all groups together; group: the same share of every group
    multiple: int = 8  # kept channels of a group are a multiple of this
    depth: bool = True  # with a target: residual branches may go whole
    widths: Mapping[str, int] = field(default_factory=dict)  # without a target: units that stay of groups by name; the ratio is for the others
    skip: tuple[str, ...] = ()  # groups and branches that stay whole, by name or by that of a layer in them
    seed: int = 0
    insist: bool = False  # prune although the order of steps forbids it
    build: BuildConfig = field(default_factory=BuildConfig)  # how engines are built that a latency is of
    table: str | None = None  # file of a latency table to use and extend
    retime: bool = False  # times everything that the choice asks for again, whatever table and timing cache know
    engines: bool = True  # with a latency target: build both engines and time them
    recovery: RecoveryConfig | None = field(default_factory=RecoveryConfig)  # None: data serve the importance alone


@dataclass(frozen=True)
class Report:
    """What was predicted and what came: costs before and after in `unit` (None: not asked for), by layer sums; `engine_ms` is the truth."""

    unit: str = ""
    predicted: tuple[float, float] | None = None
    summed: float | None = None  # the sum of layer times of the network as it was really cut
    engine_ms: tuple[float, float] | None = None
    flops: tuple[int, int] | None = None
    params: tuple[int, int] = (0, 0)
    doubtful: tuple[int, int, float] = (0, 0, 0.0)  # layer times taken while others used the CPUs, of how many, and of how many CPUs
    gap: float | None = None  # how far the importance lost may be above the least that meets the target: a share of it, inf if unknown

    def lines(self) -> list[str]:
        """For people: "FLOPs -61 %, parameters -55 %, latency -48 %, predicted -50 %", and how good the choice is at least."""
        words = [f"FLOPs {_change(*self.flops)}"] if self.flops else []
        words.append(f"parameters {_change(*self.params)}")
        if self.engine_ms is not None:
            before, after = self.engine_ms
            words.append(f"latency {_change(before, after)} ({before:.3f} -> {after:.3f} ms)")
        if self.predicted is not None and self.unit == "ms":
            words.append(f"predicted {_change(*self.predicted)}")
        more = [_quality(self.gap, self.unit)] if self.gap is not None else []
        if self.doubtful[0]:
            busy, times, others = self.doubtful
            who = f"others (processes, or guests of the same host) used up to {others:.1f} CPUs"
            more.append(f"{busy} of {times} layer times behind this were taken while {who}. {_QUIETER}")
        if self.engine_ms is not None and self.predicted is not None and self.unit == "ms":
            more += _wide_of(self.predicted, self.engine_ms)
        return [", ".join(words), *more]


def _quality(gap: float, unit: str) -> str:
    """What is known of the best choice there is."""
    of = "the layers' times as measured" if unit == "ms" else f"{unit} as counted"
    if gap == float("inf"):
        return f"importance lost: how much less another choice might lose is not known (by {of})"
    return f"importance lost: {f'at most {100 * gap:.2g} % above' if gap > 1e-5 else 'no more than'} the least that meets the target, by {of}"


def _wide_of(predicted: tuple[float, float], engine: tuple[float, float]) -> list[str]:
    """What is wrong with a prediction that is off by more than a tenth of the original's time."""
    off = predicted[1] / predicted[0] - engine[1] / engine[0]
    if abs(off) <= _OFF:
        return []
    sums = f"the layers' times add up to {predicted[0]:.3f} and {predicted[1]:.3f} ms, the engines take {engine[0]:.3f} and {engine[1]:.3f}"
    return [f"The prediction is off by {100 * abs(off):.0f} % of the original's time: {sums}. Times taken on a busy machine "
            "do that: --retime takes all of them again when it is quiet (PruneConfig.retime). Or trust the engines."]  # fmt: skip


def _change(before: float, after: float) -> str:
    return f"{100 * (after / before - 1):+.0f} %" if before else "+0 %"


@dataclass(frozen=True)
class Pruned:
    """What came of it: the network before recovery (`cut`), the one to use, the recipe, channels before and after, and the report."""

    network: Network
    cut: Network
    recipe: Recipe
    channels: tuple[int, int]
    report: Report = field(default_factory=Report)

    @property
    def share(self) -> float:
        """Share of the channels that were cut; rounding to multiples moves it away from the ratio asked for."""
        before, after = self.channels
        return (before - after) / before if before else 0.0


def prune(
    net: Network,
    config: PruneConfig | None = None,
    data: Mapping[str, np.ndarray] | None = None,
    progress: Progress | None = None,
    *,
    labels: np.ndarray | None = None,
) -> Pruned:
    """Cuts `net` and recovers it on `data` (inputs by name, samples along axis 0); without data nothing is recovered.

    Data-driven importances look at the same data, with `labels` (classes) if given. With a latency target both engines are built and timed,
    and the choice is made again, tighter, while the engine misses what the table promised.
    Raises PruneError when nothing can be cut, the target is out of reach, the order of steps is wrong, or for options that make no
    sense; ShapeError for data that do not fit; BuildError where an engine is needed and none comes.
    """
    config = config or PruneConfig()
    if config.widths and config.target is not None:
        raise PruneError("with a target widths are chosen for it: give widths or a target, or keep groups whole with skip")
    if not isinstance(net, Network):
        raise PruneError(f"prune() takes a network, not {type(net).__name__}: whet.network_from_onnx reads one from a file")
    check_order(net, "prune", config.insist)
    found, blocks = candidates(net, config)
    samples = Samples(data, labels) if data is not None else None
    if config.importance in NEED_DATA and samples is None:
        raise PruneError(f"--importance={config.importance} is measured on data: give --calibData (no labels needed)")
    scores = importance(found, config.importance, config.seed, net=net, samples=samples, blocks=blocks, progress=progress)
    if config.target is None:
        kept = choose(found, scores, config.ratio, scope=config.scope, multiple=config.multiple, widths=config.widths)
        choice, report = Choice(kept, (), 0.0, 0.0, 0.0), Report()
    else:
        choice, report = _towards(net, config, found, blocks, scores, config.target, progress)
    small = cut(net, choice.kept, found, removed=choice.removed)
    note(small, "prune", **_about(config))
    made = small
    if data is not None and config.recovery is not None:
        made = recover(small, net, choice.kept, data, config.recovery, progress, insist=config.insist)
        note(made, "recover")
    gone = {g.name for g in found for b in blocks if b.name in choice.removed and set(g.layers) <= set(b.layers)}
    before = sum(g.size for g in found)
    after = sum(0 if g.name in gone else len(choice.kept[g.name]) if g.name in choice.kept else g.size for g in found)
    report = replace(report, flops=_flops(net, small), params=(count_params(net), count_params(small)))
    known = {"gap": round(report.gap, 5)} if report.gap is not None and isfinite(report.gap) else {}
    recipe = recipe_of(net, choice.kept, about={**_about(config), **known}, found=found, removed=choice.removed)
    return Pruned(made, small, recipe, (before, after), report)


def candidates(net: Network, config: PruneConfig) -> tuple[list[Group], list[Branch]]:
    """Groups and branches that may be cut. Raises PruneError for an unknown name to skip, or when nothing is left."""
    whole = stay_whole(net, config.skip)
    found = [g for g in groups(net) if g.name not in whole]
    if not found:
        raise PruneError(f"'{net.name}' has no channels that can be cut: each is tied to an input, an output or an op that needs it whole")
    blocks = branches(net) if config.depth and config.target is not None else []
    return found, [b for b in blocks if b.name not in whole]


def _about(config: PruneConfig) -> dict:
    about = {"importance": name_of(config.importance), "multiple": config.multiple, "seed": config.seed}
    if config.target is None:
        return {"ratio": config.ratio, "scope": config.scope, **({"widths": dict(config.widths)} if config.widths else {}), **about}
    return {"target": {k: v for k, v in asdict(config.target).items() if v is not None}, "depth": config.depth, **about}


def _flops(net: Network, small: Network) -> tuple[int, int] | None:
    from whet.errors import NetworkError

    try:
        return count_flops(net), count_flops(small)
    except NetworkError:  # a symbol stands where 1 makes no sense
        return None


def _towards(
    net: Network,
    config: PruneConfig,
    found: Sequence[Group],
    blocks: Sequence[Branch],
    scores: Mapping[str, np.ndarray],
    target: Target,
    progress: Progress | None,
) -> tuple[Choice, Report]:
    """The choice for a target, and what came of it."""
    weights = per_layer(found, blocks, scores) if not name_of(config.importance).startswith("taylor") else scores

    def within(costs: Costs, share: float) -> Choice:
        return choose_within(found, blocks, weights, costs, share * costs.total({}), multiple=config.multiple, progress=progress)

    if target.kind not in TIMED:
        costs = {"flops": flop_costs, "params": parameter_costs}.get(target.kind, lambda n, f, b: channel_costs(f, b))(net, found, blocks)
        choice = within(costs, target.of(costs.total({})))
        return choice, Report(costs.unit, (choice.before, choice.after), gap=choice.gap)
    with ExitStack() as stack:
        base = static_layers(net, config.build)
        meter = stack.enter_context(Meter(config.build, LatencyTable(config.table), base, retime=config.retime))
        return _timed(net, config, target, found, lambda: latency_costs(net, found, blocks, meter, base, progress), meter, within, progress)


def _timed(
    net: Network,
    config: PruneConfig,
    target: Target,
    found: Sequence[Group],
    priced: Callable[[], Costs],
    meter: Meter,
    within: Callable[[Costs, float], Choice],
    progress: Progress | None,
) -> tuple[Choice, Report]:
    """A choice whose engine meets the target; without engines, one whose layer times do. What was timed on a busy machine is timed again, and
    `priced` with it, if it has become quiet meanwhile."""
    costs = priced()
    batch = batch_of(net, config.build)
    runs = config.engines and meter.backend.capabilities.executes
    if target.value is not None and not runs:
        share = target.of(costs.total({}), batch)
    else:
        (alone,) = measured_ms([net], config.build, seconds=0.3, progress=progress) if target.value is not None else (0.0,)
        share = target.of(alone, batch)
    asked, times, summed, choice = share, None, 0.0, None
    for n in range(_TRIES):
        try:
            for again in range(_AGAIN + 1):
                tried = within(costs, asked)
                small = cut(net, tried.kept, found, removed=tried.removed)
                sums = measured_sum(small, meter)
                if again == _AGAIN or not meter.settle():
                    break
                costs = priced()
        except PruneError:
            if choice is None:
                raise
            break  # tighter is out of reach: the report says what the last one came to
        choice, summed = tried, sums
        meter.table.save()
        if not runs:
            break
        before, after = measured_ms([net, small], config.build, progress=progress)
        times = (before, after)
        if after <= share * before * _CLOSE or n == _TRIES - 1:
            break
        asked *= share * before / after
    assert choice is not None
    return choice, Report("ms", (choice.before, choice.after), summed, times, doubtful=meter.doubtful(), gap=choice.gap)


def batch_of(net: Network, config: BuildConfig) -> int:
    """Samples in one run at the opt shapes: axis 0 of the first input."""
    from whet.builder.batching.profiles import OPT, resolve_profiles

    profiles, _ = resolve_profiles(net, config)
    shapes = next(iter(profiles[0].shapes.values()), None)
    return shapes[OPT][0] if shapes and shapes[OPT] else 1
