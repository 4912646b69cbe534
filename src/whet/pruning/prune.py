"""prune(): score, select, cut and recover in one call; the implementation of `whet prune`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace

import numpy as np

from whet.builder.config import BuildConfig
from whet.errors import PruneError
from whet.network import Network
from whet.pruning.costs import COUNTED, Costs
from whet.pruning.counting import count_flops, count_params
from whet.pruning.coupling import Group, groups
from whet.pruning.cut import cut
from whet.pruning.depth import Branch, branches, list_removable, select_innermost
from whet.pruning.floor import Floor, find_uniform_choice, measure_held_out_errors, reweight_scores, split_samples
from whet.pruning.importance import COMPARABLE, NEED_DATA, Own, Samples, choose, importance, name_of
from whet.pruning.knapsack import Choice, choose_within, scale_by_weight_count
from whet.pruning.latency_cost import lower_to_static_layers, make_latency_costs, measure_latency_sum
from whet.pruning.latency_table import LatencyTable
from whet.pruning.meter import Meter
from whet.pruning.order import check_order, note
from whet.pruning.recipe import Recipe, make_pruning_recipe
from whet.pruning.recovery import Progress, RecoveryConfig, recover
from whet.pruning.skipping import resolve_skipped
from whet.pruning.stepwise import choose_stepwise
from whet.pruning.target import TIMED, Target
from whet.pruning.truth import measure_latencies

COMPARED = ("reconstruction", "weighted_reconstruction", "taylor2")  # importances whose selections `compared` compares; `auto` the first two
_CLEAR = 0.1  # of the error on held-out samples, by which a selection by the second must change the outputs less to be the default
_MULTIPLE = 8  # channels: kernels compute multiples of it without remainder
_TRIES = 3  # selections until the engine meets a latency target
_CLOSE, _SPARE = 1.02, 0.96  # of the target: tolerance above it; an engine below this part could have kept more
_AGAIN = 2  # repeated selections after timings were measured again
_TELLING = 0.5  # largest optimality gap that is reported: a larger one says nothing
_OFF = 0.1  # prediction error, relative to the original time, from which a remark is added


_QUIETER = "A latency table (--latencyTable) marks them, and a run without external load measures them again; --retime measures everything again."


@dataclass(frozen=True, kw_only=True)
class PruneConfig:
    """Options of pruning and recovery; the flags of `whet prune` are generated from these fields."""

    ratio: float = 0.4  # share of all channels to cut, without a target
    target: Target | None = None  # limit on latency, throughput, FLOPs, parameters or channels
    #: with a target and data reconstruction, or weighted_reconstruction if its selection changes the outputs on held-out samples clearly less;
    #: else l1. "compared": the best of COMPARED by these outputs (needs a target and data). Or importance.KINDS, python:MODULE:FUNCTION, a function
    importance: str | Own = "auto"
    hidden: bool = False  # also cut axes over which norms take statistics (groups(net, hidden=True)): needs recovery or fine-tuning
    scope: str = "global"  # global: least important units over all groups; group: the same share of every group
    #: kept channels of a group are a multiple of this. None: 8; with a target in FLOPs, parameters or channels eighths of narrow groups
    multiple: int | None = None
    depth: bool | None = None  # with a target: residual branches may be removed (None: if the importance is measured on data)
    widths: Mapping[str, int] = field(default_factory=dict)  # without a target: kept units by group; the ratio applies to the others
    skip: tuple[str, ...] = ()  # groups and branches to keep whole, by name or by the name of a layer in them
    seed: int = 0
    insist: bool = False  # ignore the order-of-steps check
    build: BuildConfig = field(default_factory=BuildConfig)  # build options of the timed engines
    table: str | None = None  # file of a latency table to use and extend
    retime: bool = False  # ignore existing entries of latency table and timing cache
    engines: bool = True  # with a latency target: build both engines and time them
    steps: int = 1  # selections, each on the recovered network of the one before; with a counted target and data
    trials: int = 0  # with a target and data: selections with reweighted importances, compared by the outputs on held-out samples
    #: with a target and data: compare with uniform cuts at the same cost (and the default with weighted_reconstruction) on held-out samples
    floor: bool = True
    recovery: RecoveryConfig | None = field(default_factory=RecoveryConfig)  # None: data are used for importance only


@dataclass(frozen=True)
class Report:
    """Predicted and actual costs before and after (None: not requested); predictions are layer sums, `engine_ms` is measured."""

    unit: str = ""
    predicted: tuple[float, float] | None = None
    summed: float | None = None  # sum of layer times of the cut network
    engine_ms: tuple[float, float] | None = None
    flops: tuple[int, int] | None = None
    params: tuple[int, int] = (0, 0)
    doubtful: tuple[int, int, float] = (0, 0, 0.0)  # layer times measured under external load, total number, largest load in CPUs
    gap: float | None = None  # relative optimality gap of the importance lost; inf if unknown
    floor: Floor | None = None  # output errors on held-out samples of the selection and of uniform cuts at the same cost

    @property
    def known_gap(self) -> float | None:
        """The optimality gap if it says something; None without a bound, or with one that is far from the importance lost."""
        return self.gap if self.gap is not None and self.gap <= _TELLING else None

    def lines(self) -> list[str]:
        """Summary lines: "FLOPs -61 %, parameters -55 %, latency -48 %, predicted -50 %", and the optimality gap."""
        words = [f"FLOPs {_change(*self.flops)}"] if self.flops else []
        words.append(f"parameters {_change(*self.params)}")
        if self.engine_ms is not None:
            before, after = self.engine_ms
            words.append(f"latency {_change(before, after)} ({before:.3f} -> {after:.3f} ms)")
        if self.predicted is not None and self.unit == "ms":
            words.append(f"predicted {_change(*self.predicted)}")
        more = [_describe_gap(self.known_gap, self.unit)] if self.known_gap is not None else []
        if self.floor is not None:
            kept = "; uniform cuts are kept" if self.floor.fails else ""
            errors = f"{100 * self.floor.chosen:.2g} %"
            if self.floor.uniform is not None:
                errors += f", with uniform cuts at the same cost {100 * self.floor.uniform:.2g} %"
            more.append(f"change of the outputs on held-out samples: {errors}{kept}")
            if self.floor.by_importance:
                more.append("of the selections by " + ", ".join(f"{k} {100 * e:.2g} %" for k, e in self.floor.by_importance.items()))
            if self.floor.first is not None:
                more.append(f"best of {self.floor.trials + 1} selections; the one by importance alone changes them by {100 * self.floor.first:.2g} %")
        if self.doubtful[0]:
            busy, times, others = self.doubtful
            who = f"other processes or virtual machines used up to {others:.1f} CPUs"
            more.append(f"{busy} of {times} layer times were measured while {who}. {_QUIETER}")
        if self.engine_ms is not None and self.predicted is not None and self.unit == "ms":
            more += _remark_on_prediction(self.predicted, self.engine_ms)
        return [", ".join(words), *more]


def _describe_gap(gap: float, unit: str) -> str:
    """The optimality gap as text."""
    of = "the layers' times as measured" if unit == "ms" else f"{unit} as counted"
    return f"importance lost: {f'at most {100 * gap:.2g} % above the optimum' if gap > 1e-5 else 'optimal'} for the target, by {of}"


def _remark_on_prediction(predicted: tuple[float, float], engine: tuple[float, float]) -> list[str]:
    """A remark on a prediction error above _OFF."""
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
    """The result: the network before recovery (`cut`), the recovered one, the recipe, channels before and after, and the report."""

    network: Network
    cut: Network
    recipe: Recipe
    channels: tuple[int, int]
    report: Report = field(default_factory=Report)

    @property
    def share(self) -> float:
        """Actual share of cut channels, after rounding to multiples."""
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
    """Cuts `net` and recovers it on `data` (inputs by name, samples along axis 0); without data there is no recovery.

    Data-driven importances use the same data, with `labels` (class indices) if given. With a latency target both engines are built and
    timed, and the selection is repeated with a tighter target while the engine misses it. Raises PruneError when nothing can be cut, the
    target is unreachable, the order of steps is wrong or options are invalid; ShapeError for data that do not fit; BuildError when an engine
    cannot be built.
    """
    config = config or PruneConfig()
    if config.widths and config.target is not None:
        raise PruneError("with a target widths are selected automatically: give widths or a target, or keep groups whole with skip")
    if not isinstance(net, Network):
        raise PruneError(f"prune() takes a Network, not {type(net).__name__}: whet.network_from_onnx reads one from a file")
    check_order(net, "prune", config.insist)
    alternatives, margin = _list_alternatives(config, data is not None)
    config = _resolve(config, data is not None)
    found, blocks = list_prunable_units(net, config)
    samples = Samples(data, labels) if data is not None else None
    if config.importance in NEED_DATA and samples is None:
        raise PruneError(f"--importance={config.importance} needs data: give --calibData (no labels needed)")
    if config.trials and (config.target is None or data is None or config.recovery is None):
        raise PruneError("trials need a target and data (--calibData): selections are compared by their outputs on held-out samples")
    if config.steps > 1 and (config.target is None or config.target.kind in TIMED or data is None or config.recovery is None):
        raise PruneError("several steps need a target in FLOPs, parameters or channels, and data (--calibData): they recover it")
    scores = importance(found, config.importance, config.seed, net=net, samples=samples, blocks=blocks, progress=progress)
    if config.target is None:
        kept = choose(found, scores, config.ratio, scope=config.scope, multiple=config.multiple or _MULTIPLE, widths=config.widths)
        choice, report = Choice(kept, (), 0.0, 0.0, 0.0), Report()
    else:
        more = _score_alternatives(net, config, alternatives, found, blocks, samples, progress) if samples is not None else {}
        choice, report, others = _select_for_target(net, config, found, blocks, scores, more, config.target, samples, progress)
        others = replace(others, margin=margin)
        if data is not None and config.recovery is not None and (others.trials or others.alternatives or others.uniform is not None):
            choice, report, by = select_by_outputs(net, config, found, choice, report, others, data, progress)
            config = replace(config, importance=by)
    small = cut(net, choice.kept, found, removed=choice.removed)
    note(small, "prune", **_summarize_config(config))
    made = small
    if data is not None and config.recovery is not None:
        made = recover(small, net, choice.kept, data, config.recovery, progress, insist=config.insist)
        note(made, "recover")
    gone = {g.name for g in found for b in blocks if b.name in choice.removed and set(g.layers) <= set(b.layers)}
    before = sum(g.size for g in found)
    after = sum(0 if g.name in gone else len(choice.kept[g.name]) if g.name in choice.kept else g.size for g in found)
    report = replace(report, flops=_count_flops_pair(net, small), params=(count_params(net), count_params(small)))
    known = {"gap": round(report.known_gap, 5)} if report.known_gap is not None else {}
    recipe = make_pruning_recipe(net, choice.kept, about={**_summarize_config(config), **known}, channel_groups=found, removed=choice.removed)
    return Pruned(made, small, recipe, (before, after), report)


def list_prunable_units(net: Network, config: PruneConfig) -> tuple[list[Group], list[Branch]]:
    """The prunable groups and branches. Raises PruneError for an unknown name in `skip`, or when none remain."""
    whole = resolve_skipped(net, config.skip, hidden=config.hidden)
    found = [g for g in groups(net, hidden=config.hidden) if g.name not in whole]
    if not found:
        through = [] if config.hidden else [g.name for g in groups(net, hidden=True) if g.name not in whole]
        way = f" {len(through)} groups can be cut through means and variances over channels: --hidden (PruneConfig.hidden), then recover."
        more = way if through else ""
        raise PruneError(f"'{net.name}' has no prunable channels: each is coupled to an input, an output or an op that needs its full size.{more}")
    blocks = select_innermost(branches(net)) if _with_branches(config) else []
    return found, [b for b in blocks if b.name not in whole]


def _resolve(config: PruneConfig, has_data: bool) -> PruneConfig:
    """`config` with the importance and the depth that its defaults mean."""
    if config.importance == "auto":
        config = replace(config, importance="reconstruction" if has_data and config.target is not None else "l1")
    elif config.importance == "compared":
        if not (has_data and config.target is not None and config.recovery is not None and config.floor):
            raise PruneError(
                "the importance 'compared' compares selections of one cost by the outputs after recovery: it needs a target (such as flops=0.6x), "
                "data, recovery and the comparison with uniform cuts"
            )
        config = replace(config, importance=COMPARED[0])
    return replace(config, depth=_with_branches(config)) if config.target is not None else config


def _list_alternatives(config: PruneConfig, has_data: bool) -> tuple[tuple[str, ...], float]:
    """Importances to compare with the first of COMPARED, and the share of its error by which another must be smaller to be taken."""
    if config.importance == "auto":
        possible = has_data and config.target is not None and config.recovery is not None and config.floor
        return (COMPARED[1:2] if possible else ()), _CLEAR
    return (COMPARED[1:] if config.importance == "compared" else ()), 0.0


def _with_branches(config: PruneConfig) -> bool:
    """True if branches may be removed: norms of weights do not say what a branch contributes, so by default only scores measured on data do."""
    wanted = config.importance in NEED_DATA if config.depth is None else config.depth
    return wanted and config.target is not None


def _summarize_config(config: PruneConfig) -> dict:
    about = {"importance": name_of(config.importance), "multiple": config.multiple or "auto", "seed": config.seed}
    about |= {"hidden": True} if config.hidden else {}
    about |= {"steps": config.steps} if config.steps > 1 else {}
    about |= {"trials": config.trials} if config.trials else {}
    if config.target is None:
        return {"ratio": config.ratio, "scope": config.scope, **({"widths": dict(config.widths)} if config.widths else {}), **about}
    return {"target": {k: v for k, v in asdict(config.target).items() if v is not None}, "depth": config.depth, **about}


def _count_flops_pair(net: Network, small: Network) -> tuple[int, int] | None:
    from whet.errors import NetworkError

    try:
        return count_flops(net), count_flops(small)
    except NetworkError:  # a symbol for which 1 is not a valid size
        return None


def _score_alternatives(
    net: Network, config: PruneConfig, kinds: Sequence[str], channel_groups: Sequence[Group], blocks: Sequence[Branch], samples: Samples,
    progress: Progress | None,
) -> dict[str, dict[str, np.ndarray]]:  # fmt: skip
    """The scores of other importances, if there are samples to hold out; without those that need gradients that an op lacks."""
    scored: dict[str, dict[str, np.ndarray]] = {}
    if not kinds or config.recovery is None or not split_samples(net, samples.data, config.recovery.seed):
        return scored
    for kind in kinds:
        with suppress(PruneError):
            scored[kind] = importance(channel_groups, kind, config.seed, net=net, samples=samples, blocks=blocks, progress=progress)
    return scored


@dataclass(frozen=True)
class OtherChoices:
    """Selections to compare with: uniform cuts (None: there are none that narrow), those with reweighted importances, and those by other
    importances, whose errors must be smaller by a share `margin`."""

    uniform: Choice | None
    trials: tuple[Choice, ...] = ()
    alternatives: Mapping[str, Choice] = field(default_factory=dict)
    margin: float = 0.0


def _select_for_target(
    net: Network,
    config: PruneConfig,
    channel_groups: Sequence[Group],
    blocks: Sequence[Branch],
    scores: Mapping[str, np.ndarray],
    alternatives: Mapping[str, Mapping[str, np.ndarray]],
    target: Target,
    samples: Samples | None,
    progress: Progress | None,
) -> tuple[Choice, Report, OtherChoices]:
    """The selection for a target by `scores`, its report, and other selections of the same cost, also by the scores of other importances."""
    if config.importance in COMPARABLE:
        blocks = list_removable(net, blocks, scores)
    weights = scale_by_weight_count(channel_groups, blocks, scores) if config.importance not in COMPARABLE else scores

    # a narrower width that kernels pad to the next multiple takes as long as that: it is not worth timing
    multiple = config.multiple or (_MULTIPLE if target.kind in TIMED else None)

    def choose_for_share(costs: Costs, share: float, trial: int = 0, by: Mapping[str, np.ndarray] = weights) -> Choice:
        scaled = reweight_scores(by, config.seed, trial)
        return choose_within(channel_groups, blocks, scaled, costs, share * costs.total({}), multiple=multiple, progress=progress)

    def choose_others(costs: Costs, share: float) -> OtherChoices:
        uniform = find_uniform_choice(channel_groups, weights, costs, share * costs.total({}), multiple) if config.floor else None
        trials = tuple(choose_for_share(costs, share, n) for n in range(1, config.trials + 1))
        return OtherChoices(uniform, trials, {kind: choose_for_share(costs, share, by=by) for kind, by in alternatives.items()})

    if target.kind not in TIMED:
        counted = COUNTED[target.kind]
        costs = counted(net, channel_groups, blocks)
        share = target.of(costs.total({}))
        if config.steps > 1:
            before = costs.total({})

            def choose_by_steps(kind: str | Own, first: Mapping[str, np.ndarray]) -> Choice:
                def select(present: Network, groups: Sequence[Group], progress_of_cut: float) -> Choice:
                    budget = before * share**progress_of_cut  # each step keeps the same share of the remaining cost
                    names = {b.name for b in blocks}
                    inside = blocks if present is net else [b for b in select_innermost(branches(present)) if b.name in names]
                    own = first if present is net else importance(groups, kind, config.seed, net=present, samples=samples, blocks=inside)
                    own = scale_by_weight_count(groups, inside, own) if kind not in COMPARABLE else own
                    return choose_within(groups, inside, own, counted(present, groups, inside), budget, multiple=multiple, progress=progress)

                assert samples is not None
                assert config.recovery is not None
                kept, removed = choose_stepwise(net, channel_groups, select, config.steps, samples.data, config.recovery, progress)
                return Choice(kept, removed, before, costs.total({name: len(at) for name, at in kept.items()}, removed), 0.0)

            choice = choose_by_steps(config.importance, scores)
            compared = replace(choose_others(costs, share), alternatives={kind: choose_by_steps(kind, by) for kind, by in alternatives.items()})
            return choice, Report(costs.unit, (before, choice.after)), compared
        choice = choose_for_share(costs, share)
        return choice, Report(costs.unit, (choice.before, choice.after), gap=choice.gap), choose_others(costs, share)
    with ExitStack() as stack:
        base = lower_to_static_layers(net, config.build)
        meter = stack.enter_context(Meter(config.build, LatencyTable(config.table), base, retime=config.retime))
        return select_by_engine_time(
            net,
            config,
            target,
            channel_groups,
            lambda: make_latency_costs(net, channel_groups, blocks, meter, base, progress),
            meter,
            choose_for_share,
            choose_others,
            progress,
        )


def select_by_engine_time(
    net: Network,
    config: PruneConfig,
    target: Target,
    channel_groups: Sequence[Group],
    priced: Callable[[], Costs],
    meter: Meter,
    within: Callable[[Costs, float], Choice],
    others: Callable[[Costs, float], OtherChoices],
    progress: Progress | None,
) -> tuple[Choice, Report, OtherChoices]:
    """A selection whose engine (without engines: sum of layer times) meets the target. Timings taken under external load are repeated when the
    load has ended."""
    costs = priced()
    batch = get_opt_batch(net, config.build)
    runs = config.engines and meter.backend.capabilities.executes
    if target.value is not None and not runs:
        share = target.of(costs.total({}), batch)
    else:
        (alone,) = measure_latencies([net], config.build, seconds=0.3, progress=progress) if target.value is not None else (0.0,)
        share = target.of(alone, batch)
    asked, met = share, False
    best: tuple[float, Choice, float, tuple[float, float] | None] | None = None
    for _ in range(_TRIES):
        try:
            for again in range(_AGAIN + 1):
                tried = within(costs, asked)
                small = cut(net, tried.kept, channel_groups, removed=tried.removed)
                sums = measure_latency_sum(small, meter)
                if again == _AGAIN or not meter.settle():
                    break
                costs = priced()
        except PruneError:
            if best is None:
                raise
            break  # a tighter target is unreachable: the report describes the last selection
        meter.table.save()
        times = None
        if runs:
            before, after = measure_latencies([net, small], config.build, progress=progress)
            times = before, after
        aimed, taken = (share * times[0], times[1]) if times is not None else (1.0, 1.0)
        fits = taken <= aimed * _CLOSE
        if best is None or not met or (fits and asked > best[0]):
            best = asked, tried, sums, times
        met = met or fits
        if fits and (taken >= aimed * _SPARE or asked >= 1):
            break
        # less if the engine takes too long, more if it has time left; between the two once both have been seen
        if fits or not met:
            asked = min(asked * aimed / taken, (1 + asked) / 2)
        elif best is not None:
            asked = (best[0] + asked) / 2
    assert best is not None
    asked, choice, summed, times = best
    report = Report("ms", (choice.before, choice.after), summed, times, doubtful=meter.doubtful(), gap=choice.gap)
    more = others(costs, asked)
    meter.table.save()
    return choice, report, more


def select_by_outputs(
    net: Network, config: PruneConfig, channel_groups: Sequence[Group], choice: Choice, report: Report, others: OtherChoices,
    data: Mapping[str, np.ndarray], progress: Progress | None,
) -> tuple[Choice, Report, str | Own]:  # fmt: skip
    """The best of all selections by the outputs on held-out samples, and its importance. With a latency target another selection replaces `choice`
    only if its engine is as fast."""
    assert config.recovery is not None
    ranked = [choice, *others.trials, *others.alternatives.values()]
    kinds = [config.importance] * (1 + len(others.trials)) + list(others.alternatives)
    uniform = [] if others.uniform is None else [others.uniform]
    errors = measure_held_out_errors(net, channel_groups, [*ranked, *uniform], data, config.recovery, progress)
    if errors is None:
        return choice, report, config.importance
    others_from = 1 + len(others.trials)
    best = int(np.argmin([*errors[:others_from], *(e / (1 - others.margin) for e in errors[others_from : len(ranked)])]))
    if uniform and errors[-1] < errors[best]:  # a margin protects the default from chance, not uniform cuts from a better selection
        best = int(np.argmin(errors[: len(ranked)]))
    by = {name_of(kinds[0]): errors[0], **dict(zip(others.alternatives, errors[others_from:], strict=False))}
    floor = Floor(
        errors[best], errors[-1] if uniform else None, errors[0] if others.trials else None, len(others.trials), by if len(by) > 1 else {}
    )
    for c in [*(uniform if floor.fails else []), ranked[best]]:
        if c is choice:
            return choice, replace(report, floor=None if floor.fails else floor), config.importance
        times = report.engine_ms
        if times is not None:
            before, after = measure_latencies([net, cut(net, c.kept, channel_groups, removed=c.removed)], config.build, progress=progress)
            if after / before > times[1] / times[0] * _CLOSE:
                continue
            times = (before, after)
        # a bound is known of selections in one step by importances as measured
        gap = c.gap if config.steps == 1 and any(c is a for a in others.alternatives.values()) else None
        lost = replace(report, predicted=(c.before, c.after), summed=None, engine_ms=times, gap=gap)
        kind = config.importance if c is others.uniform else kinds[best]
        return c, replace(lost, floor=floor if c is others.uniform or not floor.fails else None), kind
    return choice, report, config.importance


def get_opt_batch(net: Network, config: BuildConfig) -> int:
    """Batch size at the opt shapes: axis 0 of the first input."""
    from whet.builder.batching.profiles import OPT, resolve_profiles

    profiles, _ = resolve_profiles(net, config)
    shapes = next(iter(profiles[0].shapes.values()), None)
    return shapes[OPT][0] if shapes and shapes[OPT] else 1
