"""Selection under a budget: the budget is respected, unreachable targets are reported, on real networks and with the user's options."""

import numpy as np
import pytest

from support.selection import with_long_variants
from whet import zoo
from whet.builder.config import BuildConfig
from whet.errors import PruneError, UsageError
from whet.frontends import network_from_onnx, save_onnx
from whet.network import parse_network
from whet.ops import run_network
from whet.pruning import (
    PruneConfig,
    Target,
    apply_recipe,
    branches,
    count_flops,
    count_params,
    cut,
    groups,
    importance,
    load_recipe,
    make_pruning_recipe,
    prune,
    save_recipe,
)
from whet.pruning.costs import make_flop_costs, make_parameter_costs
from whet.pruning.knapsack import choose_within, list_widths, scale_by_weight_count
from whet.pruning.order import read_history
from whet.pruning.prune import Report
from whet.pruning.tables import Tables

NULL = BuildConfig(backend="null", timing_cache="")
TINY = """network n source
in %x: f32[N,3,8,8]
const %w1: f32[16,3,3,3] = seed(1)
const %w2: f32[16,16,3,3] = seed(2)
const %w3: f32[16,16,3,3] = seed(3)
const %w4: f32[2,16,3,3] = seed(4)
%a: f32[N,16,6,6] = Conv(%x, %w1)
%b: f32[N,16,6,6] = Conv(%a, %w2, pads=(1, 1, 1, 1))
%r: f32[N,16,6,6] = Relu(%b)
%c: f32[N,16,6,6] = Conv(%r, %w3, pads=(1, 1, 1, 1))
%s: f32[N,16,6,6] = Add(%a, %c)
%y: f32[N,2,4,4] = Conv(%s, %w4)
out %y
"""

NESTED = """network n source
in %x: f32[N,3,8,8]
const %w0: f32[8,3,1,1] = seed(1)
const %w1: f32[8,8,3,3] = seed(2)
const %w2: f32[8,8,3,3] = seed(3)
const %w3: f32[8,8,3,3] = seed(4)
const %w4: f32[2,8,1,1] = seed(5)
%a: f32[N,8,8,8] = Conv(%x, %w0)
%b: f32[N,8,8,8] = Conv(%a, %w1, pads=(1, 1, 1, 1))
%c: f32[N,8,8,8] = Conv(%b, %w2, pads=(1, 1, 1, 1))
%d: f32[N,8,8,8] = Conv(%c, %w3, pads=(1, 1, 1, 1))
%inner: f32[N,8,8,8] = Add(%b, %d)
%e: f32[N,8,8,8] = Relu(%inner)
%outer: f32[N,8,8,8] = Add(%a, %e)
%y: f32[N,2,8,8] = Conv(%outer, %w4)
out %y
"""


def network(name="resnet18", **options):
    return network_from_onnx(zoo.build(name, **{"image": 32, **options}))


def test_importance_inside_a_removed_branch_counts_once():
    net = parse_network(NESTED)
    found, blocks = groups(net), branches(net)
    assert [(b.name, len(b.layers)) for b in blocks] == [("inner", 2), ("outer", 5)]
    scores = scale_by_weight_count(found, blocks, importance(found, "random", 0, net=net, blocks=blocks))
    tables = Tables(found, blocks, scores, make_flop_costs(net, found, blocks), {g.name: list_widths(g, 2) for g in found})

    def loss(widths, removed):
        at = [tables.widths[v].index(widths.get(g.name, g.size)) for v, g in enumerate(tables.groups)]
        return tables.loss([*at, *(int(b.name in removed) for b in blocks)])

    assert loss({}, {"inner", "outer"}) == loss({}, {"outer"}) == scores["outer"].sum()
    assert loss({"w2": 4}, {"inner"}) == loss({}, {"inner"}) == scores["inner"].sum()
    assert loss({"w2": 4}, {}) == pytest.approx(np.sort(scores["w2"])[:4].sum())


def test_a_branch_stays_if_removing_it_costs_more_than_it_saves():
    """Operations fused with a branch (its Add, an activation) cost time of their own if the branch is removed."""
    net = parse_network(TINY)
    found, blocks = groups(net), branches(net)
    scores = scale_by_weight_count(found, blocks, importance(found, "random", 0, net=net, blocks=blocks))
    scores["s"] = np.zeros(1)  # removing it loses nothing
    costs = make_flop_costs(net, found, blocks)
    target = 0.6 * costs.total({})
    assert choose_within(found, blocks, scores, costs, target, multiple=2).removed == ("s",)
    costs.added["s"] = costs.total({})
    choice = choose_within(found, blocks, scores, costs, target, multiple=2)
    assert choice.removed == ()
    assert choice.after <= target


@pytest.mark.parametrize(("kind", "share"), with_long_variants([("flops", 0.7), ("flops", 0.3), ("params", 0.3), ("params", 0.7)], every=2))
def test_targets_are_met_on_a_real_network(kind, share):
    net = network("mobilenet_v2")
    count = {"flops": count_flops, "params": count_params}[kind]
    made = prune(net, PruneConfig(target=Target(kind, ratio=share), multiple=4))
    ratio = count(made.cut) / count(net)
    assert share - 0.08 <= ratio <= share
    absolute = prune(net, PruneConfig(target=Target(kind, value=count(net) * share), multiple=4))
    assert str(absolute.cut) == str(made.cut)
    assert 0 <= made.report.gap < 0.02
    assert "for the target, by" in made.report.lines()[1]
    assert made.recipe.about["gap"] == round(made.report.gap, 5)


def test_a_latency_target_on_the_null_machine():
    net = network("resnet18", width=16)
    made = prune(net, PruneConfig(target=Target("latency", ratio=0.5), build=NULL))
    before, after = made.report.predicted
    assert after <= 0.5 * before
    assert after == pytest.approx(made.report.summed, rel=0.03), "the prediction equals the times of the cut network's layers"
    assert made.report.engine_ms is None, "the null machine runs nothing"
    assert "FLOPs -" in made.report.lines()[0]
    assert "predicted -5" in made.report.lines()[0]
    assert "by the layers' times as measured" in made.report.lines()[1]


@pytest.mark.parametrize(("predicted", "is_reported"), [((1.0, 0.55), False), ((2.0, 0.8), True), ((1.0, 0.75), True)])
def test_a_wrong_prediction_is_reported_with_its_sums(predicted, is_reported):
    lines = Report("ms", predicted, engine_ms=(1.0, 0.6)).lines()
    assert any("The prediction is off by" in line for line in lines) == is_reported
    if is_reported:
        assert f"add up to {predicted[0]:.3f} and {predicted[1]:.3f} ms, the engines take 1.000 and 0.600" in lines[-1]


@pytest.mark.parametrize(("name", "options"), [("resnet18", {"width": 16}), pytest.param("mobilenet_v2", {}, marks=pytest.mark.slow)])
def test_slow_layers_are_cut_before_layers_with_many_flops(name, options):
    """At equal latency the selection by latency keeps more importance than the selection by FLOPs."""
    net = network(name, **options)
    from whet.pruning.latency_cost import lower_to_static_layers, make_latency_costs
    from whet.pruning.latency_table import LatencyTable
    from whet.pruning.meter import Meter

    found, base = groups(net), lower_to_static_layers(net, NULL)
    scores = scale_by_weight_count(found, [], importance(found))
    with Meter(NULL, LatencyTable(), base) as meter:
        ms, flops = make_latency_costs(net, found, [], meter, base), make_flop_costs(net, found, [])
        by_ms = choose_within(found, [], scores, ms, 0.6 * ms.total({}))
        share = 0.7
        while True:
            by_flops = choose_within(found, [], scores, flops, share * flops.total({}))
            if ms.total({g: len(k) for g, k in by_flops.kept.items()}) <= 0.6 * ms.total({}):
                break
            share *= 0.9
    assert by_ms.lost < by_flops.lost


def test_unreachable_targets_and_targets_already_met():
    net = parse_network(TINY)
    found = groups(net)
    costs = make_parameter_costs(net, found, [])
    with pytest.raises(PruneError, match="is unreachable"):
        choose_within(found, [], importance(found), costs, 10)
    with pytest.raises(PruneError, match="must be positive"):
        choose_within(found, [], importance(found), costs, 0)
    assert choose_within(found, [], importance(found), costs, 1e9).kept == {}
    with pytest.raises(PruneError, match="is already met"):
        prune(net, PruneConfig(target=Target.parse("params", "1e9")))


@pytest.mark.parametrize(
    ("kind", "text", "want"),
    [
        ("latency", "0.5x", Target("latency", ratio=0.5)),
        ("latency", "3.2ms", Target("latency", value=3.2)),
        ("latency", "250us", Target("latency", value=0.25)),
        ("throughput", "2x", Target("throughput", ratio=0.5)),
        ("throughput", "400", Target("throughput", value=400.0)),
        ("flops", "40%", Target("flops", ratio=0.4)),
        ("params", "1e6", Target("params", value=1e6)),
    ],
)
def test_targets_as_users_write_them(kind, text, want):
    got = Target.parse(kind, text)
    assert got.kind == want.kind
    assert got.ratio == pytest.approx(want.ratio) if want.ratio else got.value == pytest.approx(want.value)


@pytest.mark.parametrize(
    ("kind", "text", "why"),
    [("latency", "fast", "is not a target"), ("latency", "1.5x", "has no effect"), ("flops", "3ms", "only a latency has a unit of time"),
     ("channels", "100", "as 0.6x"), ("latency", "0x", "is not a target"), ("throughput", "0.5x", "has no effect"),
     ("flops", "0.6", r"write --flops=0.6x"), ("params", "0.5", r"write --params=0.5x")],
)  # fmt: skip
def test_invalid_targets(kind, text, why):
    with pytest.raises((PruneError, UsageError), match=why):
        Target.parse(kind, text)


def test_throughput_counts_the_batch():
    assert Target("throughput", value=500).of(32.0, batch=8) == pytest.approx(0.5), "8 in 32 ms are 250 a second"
    with pytest.raises(PruneError, match="is already met: the network is at 250/s"):
        Target("throughput", value=100).of(32.0, batch=8)


def test_recipes_with_branches_and_masks(tmp_path):
    net, kept, removed = parse_network(TINY), {"w1": [0, 2, 3, 7]}, ("s",)
    path = save_recipe(make_pruning_recipe(net, kept, removed=removed), tmp_path / "r.json")
    assert load_recipe(path).removed == removed
    assert str(apply_recipe(net, load_recipe(path))) == str(cut(net, kept, removed=removed))
    pytest.importorskip("safetensors")
    masks = {"w4": np.random.default_rng(0).random((2, 4, 3, 3)) < 0.5}
    path = save_recipe(make_pruning_recipe(net, kept, removed=removed, masks=masks), tmp_path / "m.json")
    assert (tmp_path / "m.safetensors").exists()
    again = apply_recipe(net, load_recipe(path))
    np.testing.assert_array_equal(again.constants["w4"].array() != 0, masks["w4"])
    (tmp_path / "m.safetensors").unlink()
    with pytest.raises(PruneError, match="both files together"):
        load_recipe(path)


def test_version_1_of_recipes_is_read():
    from whet.pruning.recipe import parse_recipe

    old = {"format": "whet.pruning.recipe", "version": 1, "groups": [{"name": "w2", "size": 16, "kept": [0, 1]}]}
    assert apply_recipe(parse_network(TINY), parse_recipe(old)).constants["w2"].shape[0] == 2


def test_dynamic_batch_is_kept_and_the_model_records_the_steps(tmp_path):
    net = parse_network(TINY)
    x = {"x": np.random.default_rng(0).standard_normal((6, 3, 8, 8)).astype(np.float32)}
    made = prune(net, PruneConfig(target=Target("flops", ratio=0.5), multiple=2), x)
    again = network_from_onnx(save_onnx(made.network, tmp_path / "s.onnx"))
    assert [s["step"] for s in read_history(again)] == ["prune", "recover"]
    assert read_history(again)[0]["target"] == {"kind": "flops", "ratio": 0.5}
    for n in (1, 6):
        some = {"x": x["x"][:n]}
        np.testing.assert_allclose(run_network(again, some)["y"], run_network(made.network, some)["y"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("amounts", [{}, {"ratio": 0.5, "value": 3.0}, {"ratio": 0.0}, {"value": float("inf")}])
def test_a_target_has_one_amount_above_zero(amounts):
    with pytest.raises(PruneError, match="either ratio= or value=, above 0"):
        Target("latency", **amounts)
