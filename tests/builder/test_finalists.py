"""The search for a low precision on a backend with overlapping launches: which candidates are built again with kernels selected in the network."""

from types import SimpleNamespace

import pytest

from whet.builder import BuildConfig
from whet.builder.precision import precision_search
from whet.builder.precision.precision_search import PrecisionEngine, PrecisionSearch, Strategy
from whet.builder.progress import ProgressLog
from whet.measure.compare import Ranking
from whet.measure.policy import PRECISIONS
from whet.network import parse_network
from whet.precision import Ranges
from whet.precision.budget import Verdict

NET = parse_network("network n source\nin %x: f32[4]\n%y = Relu(%x)\nout %y\n")


def candidate(name, low, holds=True):
    report = SimpleNamespace(quantized=object() if low else None, build_seconds=1.0, precision_choice=[], notes=[], info=[], calibration_steps=[])
    return PrecisionEngine(name, SimpleNamespace(report=report, network=NET), verdict=Verdict(0.0, None, holds, "judged"))


class Given(Strategy):
    """Candidates of given names; those built again are called NAME, again."""

    name, title, pruning_rounds, least_gain, fitting_rounds, refines_finalists, reports_accuracy = "int8", "INT8", 0, 0.0, 0, True, False

    def __init__(self, candidates, fails=()):
        self.candidates, self.again, self.fails, self.configs = candidates, [], fails, []

    def build_first_candidates(self, search):
        self.configs.append(search.config)
        return self.candidates

    def build(self, search, title, float_layers):
        raise AssertionError("no further candidate is asked for")

    def rebuild(self, search, candidate_):
        self.configs.append(search.config)
        self.again.append(candidate_.what)
        return candidate(f"{candidate_.what}, again", candidate_.plan.report.quantized is not None, candidate_.what not in self.fails)

    def rank_candidates(self, candidates, allowed):
        return list(allowed)

    def describe(self, search, candidates, index, shown):
        search.info.append(candidates[index].what)


def run(monkeypatch, times_ms, fails=(), disallowed=(), **options):
    """The names that are built again, and the kept one. `times_ms`: name -> time, those with "int8" are low precision."""
    strategy = Given([candidate(n, "int8" in n, n not in disallowed) for n in times_ms], fails)
    machine = SimpleNamespace(capabilities=SimpleNamespace(executes=True, overlapping_launches=options.pop("overlapping", True)))
    monkeypatch.setattr(precision_search, "get_backend", lambda name, threads: machine)

    def compare(plans, machine, config):
        samples = [[1e-3 * t] * 9 for t in times_ms.values()]
        return Ranking(PRECISIONS, samples, samples, list(range(len(plans))))

    monkeypatch.setattr(precision_search, "compare_engines", compare)
    search = PrecisionSearch(strategy, NET, NET, Ranges({}), BuildConfig(**options), [], ProgressLog(None))
    search.run()
    return strategy, search.info[0]


@pytest.mark.parametrize(
    ("times_ms", "again"),
    [
        ({"float": 2.0, "int8": 1.8}, ["float", "int8"]),
        ({"float": 2.0, "int8": 1.0}, ["int8"]),  # twice the time: selection in the network gains 15 % at most
        ({"float": 1.15, "int8": 1.0}, ["float", "int8"]),
        ({"float": 1.151, "int8": 1.0}, ["int8"]),
        ({"float": 10.0, "int8": 12.0}, ["float"]),
        ({"float": 10.0, "int8": 11.4}, ["float", "int8"]),
        ({"float": 2.0, "int8": 2.2, "int8 without one layer": 2.1}, ["float", "int8 without one layer"]),
        ({"float": 2.0}, ["float"]),
    ],
)
def test_the_fastest_of_each_precision_is_built_again_if_it_is_near_the_fastest(times_ms, again, monkeypatch):
    strategy, _ = run(monkeypatch, times_ms)
    assert strategy.again == again
    assert [c.in_network for c in strategy.configs] == [False] + [True] * len(again)


def test_an_engine_that_misses_the_budget_when_built_again_is_not_used(monkeypatch):
    assert run(monkeypatch, {"float": 2.0, "int8": 1.8})[1] == "int8, again"
    assert run(monkeypatch, {"float": 2.0, "int8": 1.8}, fails=["int8"])[1] == "int8"
    strategy, kept = run(monkeypatch, {"float": 2.0, "int8": 1.8}, disallowed=["int8"])
    assert (strategy.again, kept) == (["float"], "float, again")


@pytest.mark.parametrize("options", [{"overlapping": False}, {"in_network": False}])
def test_elsewhere_nothing_is_built_again(options, monkeypatch):
    strategy, kept = run(monkeypatch, {"float": 2.0, "int8": 1.8}, **options)
    assert (strategy.again, kept) == ([], "int8")
    assert strategy.configs[0].in_network == options.get("in_network", True)
