"""The floor of a selection: uniform cuts at the same cost, compared on held-out samples; stages keep half of their branches."""

from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest

from whet import zoo
from whet.errors import PruneError
from whet.frontends import network_from_onnx
from whet.network import Network, parse_type
from whet.ops import run_network
from whet.pruning import PruneConfig, Target, count_flops, cut, groups, prune, recover
from whet.pruning import floor as floors
from whet.pruning.costs import make_flop_costs, make_parameter_costs
from whet.pruning.depth import branches, list_removable, select_innermost
from whet.pruning.floor import Floor, compute_rms_error, find_uniform_choice, measure_held_out_errors, split_samples
from whet.pruning.importance import importance
from whet.pruning.knapsack import Choice
from whet.pruning.recovery import RecoveryConfig

pruning = import_module("whet.pruning.prune")  # the package exports a function of this name

def residual(blocks=3, width=16, seed=0, batch="N", dead=False):
    """A stem, `blocks` residual blocks with inner convolutions, pooling."""
    rng = np.random.default_rng(seed)
    net = Network("residual")

    def conv(x, cout, cin, name):
        w = net.constant((rng.standard_normal((cout, cin, 3, 3)) * np.sqrt(2 / (9 * cin))).astype(np.float32), f"{name}.w")
        return net.add("Conv", x, w, net.constant(np.zeros(cout, np.float32), f"{name}.b"), pads=(1, 1, 1, 1), name=name)

    x = net.add_input("x", parse_type(f"f32[{batch},3,6,6]"))
    y = net.add("Relu", conv(x, width, 3, "stem"))
    for n in range(blocks):
        inner = net.add("Relu", conv(y, width, width, f"a{n}"))
        y = net.add("Add", y, conv(inner, width, width, f"b{n}"), name=f"sum{n}")
    if dead:
        net.add("Relu", conv(y, width, width, "unused"))
    net.mark_output(net.add("Flatten", net.add("GlobalAveragePool", y)), "out")
    return net


def samples(count=64, seed=1):
    return {"x": np.random.default_rng(seed).standard_normal((count, 3, 6, 6)).astype(np.float32)}


def test_uniform_cuts_keep_one_share_and_meet_the_target():
    net = residual()
    found = groups(net)
    scores, costs = importance(found), make_flop_costs(net, found, [])
    got = find_uniform_choice(found, scores, costs, 0.5 * costs.total({}), 1)
    assert got.after <= 0.5 * costs.total({})
    assert got.after > 0.4 * costs.total({})
    shares = {len(at) / 16 for at in got.kept.values()}
    assert len(shares) == 1
    for g in found:
        assert set(got.kept[g.name]) == set(np.argsort(-scores[g.name], kind="stable")[: len(got.kept[g.name])])
    assert find_uniform_choice(found, scores, costs, 1.0, 1) is None


def test_factors_of_a_product_axis_keep_the_root_of_the_share():
    net = network_from_onnx(zoo.build("resnext50_32x4d", image=32, width=32))
    found = groups(net)
    costs = make_parameter_costs(net, found, [])
    got = find_uniform_choice(found, importance(found), costs, 0.5 * costs.total({}), 1)
    assert 0.4 < got.after / got.before <= 0.5


@pytest.mark.parametrize("batch", ["N", 4])
def test_the_better_selection_wins_on_held_out_samples(batch):
    net = residual(batch=batch)
    found = groups(net)
    scores, costs = importance(found), make_flop_costs(net, found, [])
    uniform = find_uniform_choice(found, scores, costs, 0.6 * costs.total({}), 1)
    ruined = Choice({g.name: np.arange(1) for g in found}, (), 1.0, 0.1, 0.0)
    bad, good = measure_held_out_errors(net, found, [ruined, uniform], samples(), RecoveryConfig())
    assert bad > 1.2 * good
    assert Floor(bad, good).fails
    assert not Floor(good, bad).fails
    assert measure_held_out_errors(net, found, [uniform, ruined], samples(7), RecoveryConfig()) is None


def test_of_few_samples_each_half_is_held_out():
    net = residual()
    found = groups(net)
    choice = Choice({g.name: np.arange(12) for g in found}, (), 1.0, 0.7, 0.0)
    data, errors = samples(12), []
    for fitted, judged in split_samples(net, data, 0):
        made = recover(cut(net, choice.kept, found), net, choice.kept, fitted, RecoveryConfig())
        errors.append(compute_rms_error(*({k: v for k, v in run_network(n, judged).items()} for n in (net, made))))
    assert len(errors) == 2
    assert measure_held_out_errors(net, found, [choice], data, RecoveryConfig()) == pytest.approx([np.mean(errors)], rel=1e-4)


def test_prune_keeps_uniform_cuts_when_they_are_better(monkeypatch):
    net = residual()
    how = PruneConfig(target=Target("flops", ratio=0.5), multiple=1)
    plain = prune(net, how, samples())
    assert plain.report.floor is not None
    assert any("held-out samples" in line for line in plain.report.lines())
    monkeypatch.setattr(floors.Floor, "fails", property(lambda self: True))
    forced = prune(net, how, samples())
    assert any("uniform cuts are kept" in line for line in forced.report.lines())
    assert len({len(e.kept) for e in forced.recipe.groups.values()}) == 1
    assert count_flops(forced.network) <= 0.5 * count_flops(net)
    assert forced.recipe.removed == ()
    without = prune(net, PruneConfig(target=Target("flops", ratio=0.5), multiple=1, floor=False), samples())
    assert without.report.floor is None


def test_trials_keep_the_selection_that_changes_the_outputs_least():
    net = residual(blocks=4)
    how = PruneConfig(target=Target("flops", ratio=0.4), multiple=1)
    plain, tried = prune(net, how, samples()), prune(net, replace(how, trials=6), samples())
    floor = tried.report.floor
    assert floor.trials == 6
    assert floor.first == plain.report.floor.chosen
    assert floor.chosen < floor.first, "with these weights one of six is better"
    assert tried.recipe.kept().keys() != {} != plain.recipe.kept().keys()
    assert count_flops(tried.network) <= 0.4 * count_flops(net)
    assert any("best of 7 selections" in line for line in tried.report.lines())
    kept, found = tried.recipe.kept(), groups(net)
    again = Choice(kept, tried.recipe.removed, 1.0, 0.4, 0.0)
    assert measure_held_out_errors(net, found, [again], samples(), RecoveryConfig()) == [floor.chosen], "the report describes what was kept"
    assert prune(net, replace(how, trials=6), samples()).recipe == tried.recipe
    alone = prune(net, replace(how, trials=2, floor=False), samples()).report.floor
    assert alone.uniform is None
    with pytest.raises(PruneError, match=r"trials need a target and data"):
        prune(net, replace(how, trials=2))


def test_with_a_latency_target_a_selection_must_be_as_fast(monkeypatch):
    net, how = residual(), PruneConfig(target=Target("latency", ratio=0.7))
    found = groups(net)
    choice, other = (Choice({g.name: np.arange(n) for g in found}, (), 1.0, 0.7, 0.0) for n in (8, 9))
    report = pruning.Report("ms", (1.0, 0.7), engine_ms=(1.0, 0.7))
    monkeypatch.setattr(pruning, "measure_held_out_errors", lambda *a: [0.5, 0.4])
    for after, wanted, error in ((0.7, other, 0.4), (0.9, choice, None)):
        monkeypatch.setattr(pruning, "measure_latencies", lambda *a, after=after, **k: [1.0, after])
        got, told, _ = pruning.select_by_outputs(net, how, found, choice, report, pruning.OtherChoices(None, (other,)), samples(), None)
        assert got is wanted
        assert told.engine_ms == (1.0, 0.7)
        assert (told.floor and told.floor.chosen) == error


def test_output_errors_are_relative():
    y = np.random.default_rng(0).standard_normal((50, 4)).astype(np.float32)
    assert compute_rms_error({"y": y}, {"y": y}) == 0
    assert compute_rms_error({"y": y, "n": np.arange(3)}, {"y": y + 0.1 * y.std(), "n": np.zeros(3)}) == pytest.approx(0.1, rel=1e-3)
    assert not Floor(0.1, 0.1).fails


def test_half_of_a_stage_can_be_removed():
    net = residual(blocks=5)
    found = branches(net)
    scores = {b.name: np.array([value]) for b, value in zip(found, (5.0, 1.0, 4.0, 2.0, 3.0), strict=True)}
    assert [b.name for b in list_removable(net, found, scores)] == ["sum1", "sum3", "sum4"]
    got = prune(net, PruneConfig(target=Target("flops", ratio=0.15), multiple=1, floor=False), samples(32))
    assert len(got.recipe.removed) <= 3


def test_nested_branches_are_limited_to_the_inner_ones():
    net = Network("nested")
    x = net.add_input("x", parse_type("f32[N,4,2,2]"))
    starts, y = [x], x
    for n in range(12):
        starts.append(y)
        y = net.add("Relu", y, name=f"r{n}")
    for n, start in enumerate(reversed(starts)):
        y = net.add("Add", start, y, name=f"s{n}")
    net.mark_output(net.add("Tanh", y), "y")
    found = branches(net)
    few = select_innermost(found, 3)
    depth = {name: sum(name in b.layers for b in few) for b in found for name in b.layers}
    assert max(sum(name in b.layers for b in found) for name in depth) > 8
    assert max(depth.values()) == 3
    assert select_innermost(found, 99) == found


def test_unused_layers_do_not_depend_on_every_branch():
    """Layers that no output needs left the network with each branch: one table got an axis for each of the 30 branches, 2^30 entries."""
    net = residual(blocks=30, width=4, dead=True)
    found, blocks = groups(net), branches(net)
    assert len(blocks) == 30
    costs = make_flop_costs(net, found, blocks)
    assert not any("unused" in items for items in costs.gone.values())
    got = prune(net, PruneConfig(target=Target("flops", ratio=0.7), multiple=1, floor=False, depth=True, importance="l1"), None)
    assert count_flops(got.network) <= 0.7 * count_flops(net)
