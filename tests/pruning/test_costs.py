"""Cost predictions without cutting: they equal the costs of the really cut network for any widths; shrunk layers equal its layers."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from support.attention import GROUPED_QUERIES
from support.selection import with_slow_names
from whet import zoo
from whet.builder.config import BuildConfig
from whet.errors import CacheError, NetworkError
from whet.frontends import network_from_onnx
from whet.measure.timing_key import format_layer_text
from whet.network import parse_network
from whet.pruning import branches, count_flops, count_params, cut, groups
from whet.pruning.costs import make_channel_costs, make_flop_costs, make_parameter_costs
from whet.pruning.knapsack import find_edges, list_widths
from whet.pruning.latency_cost import lower_to_static_layers, make_latency_costs, measure_latency_sum
from whet.pruning.latency_table import LatencyTable
from whet.pruning.meter import Meter
from whet.pruning.staircase import compute_staircases

SMALL = {
    "bert_base": {"layers": 2, "sequence": 9, "hidden": 96, "heads": 6},
    "vit_b_16": {"layers": 2, "image": 64, "hidden": 96, "heads": 6},
    "swin_t": {"image": 64, "window": 2, "blocks": (1, 2, 1, 1)},
    "resnext50_32x4d": {"image": 64, "width": 32},
    "resnet18": {"image": 64, "width": 32},
    "yolov5s": {"image": 64},
    "densenet121": {"image": 64, "blocks": (2, 1, 1, 1)},
    "unet": {"image": 64, "width": 16},
    "mobilenet_v3_large": {"image": 64},
    "convnext_tiny": {"image": 64, "blocks": (1, 1, 2, 1)},
}
NULL = BuildConfig(backend="null", timing_cache="")
INT8 = replace(NULL, precisions=("int8",))


def net_of(name, **more):
    return network_from_onnx(zoo.build(name, batch=2, **SMALL.get(name, {"image": 64}), **more))


def some_choice(net, seed=0):
    rng = np.random.default_rng(seed)
    found, blocks = groups(net), branches(net)
    return found, blocks, {g.name: int(rng.integers(1, g.size + 1)) for g in found}, [b.name for b in blocks][::3]


@pytest.mark.parametrize("name", with_slow_names(sorted(SMALL), {"swin_t", "yolov5s"}))
def test_counts_are_those_of_the_cut_network(name):
    net = net_of(name)
    found, blocks, widths, removed = some_choice(net)
    small = cut(net, {k: range(v) for k, v in widths.items()}, found, removed=removed)
    for costs, count in ((make_parameter_costs(net, found, blocks), count_params), (make_flop_costs(net, found, blocks), count_flops)):
        assert costs.total({}) == count(net)
        if name == "resnet18" and costs.unit == "FLOPs":  # removing a branch also removes a repeated Relu, which costs do not foresee
            assert costs.total(widths, removed) == pytest.approx(count(small), rel=0.01)
        else:
            assert costs.total(widths, removed) == count(small)


def test_channels_of_a_removed_branch_are_gone():
    net = net_of("resnet18")
    found, blocks = groups(net), branches(net)
    costs = make_channel_costs(found, blocks)
    assert costs.total({}) == sum(g.size for g in found)
    assert costs.total({"conv1.weight": 10}, ["/layer2/layer2.1/Add"]) == costs.total({}) - 22 - 64


@pytest.mark.parametrize(("name", "config"), [
    *(pytest.param(n, NULL, id=n) for n in ("resnet18", "mobilenet_v3_large", "vit_b_16", "bert_base", "densenet121")),
    *(pytest.param(n, NULL, id=n, marks=pytest.mark.slow) for n in ("yolov5s", "swin_t")),
    *(pytest.param(n, INT8, id=f"{n}-int8") for n in ("resnet18", "bert_base")),
    *(pytest.param(n, INT8, id=f"{n}-int8", marks=pytest.mark.slow) for n in ("densenet121", "mobilenet_v3_large", "yolov5s")),
])  # fmt: skip
def test_latency_of_widths_is_that_of_the_cut_network(name, config, tmp_path):
    """On the null machine times are a function of shapes: predictions from shrunk layers must equal the times of the cut network's layers."""
    net = net_of(name)
    found, blocks, widths, _ = some_choice(net, seed=5)
    widths = {g.name: max(widths[g.name], g.size // 2) for g in found}
    base = lower_to_static_layers(net, config)
    assert any(t.dtype.bits == 8 for x in base.values() for t in x.inputs if t is not None) == (config is INT8)
    with Meter(config, LatencyTable(), base) as meter:
        costs = make_latency_costs(net, found, [], meter, base)
        small = cut(net, {k: range(v) for k, v in widths.items()}, found)
        assert costs.total({}) == pytest.approx(measure_latency_sum(net, meter))
        assert costs.total(widths) == pytest.approx(measure_latency_sum(small, meter), rel=0.01)
        texts = {format_layer_text(x) for x in lower_to_static_layers(small, config).values()}
        known = {r.layer for r in meter.table.rows.values()}
        assert len(texts & known) == len(texts), "exactly the layers of the cut network were timed"
        assert blocks or name == "densenet121"


@pytest.mark.parametrize("name", ["resnet18", pytest.param("mobilenet_v3_large", marks=pytest.mark.slow), "vit_b_16", "bert_base"])
def test_latency_of_removed_branches(name):
    net = net_of(name)
    found, blocks = groups(net), branches(net)
    base = lower_to_static_layers(net, NULL)
    with Meter(NULL, LatencyTable(), base) as meter:
        seen = []
        costs = make_latency_costs(net, found, blocks, meter, base, lambda done, total, text: seen.append((done, total)))
        assert {total for _, total in seen} == {len(found) + len(blocks)}
        assert seen[-1][0] == len(found) + len(blocks)
        assert [d for d, _ in seen] == sorted({d for d, _ in seen})
        # without any attention (blocks[::2] of a transformer) all layers would compute only the class token: no sum of single removals knows that
        for gone in (*([b.name] for b in blocks), [b.name for b in blocks[1::2]]):
            truth = measure_latency_sum(cut(net, {}, found, removed=gone), meter)
            assert costs.total({}, gone) == pytest.approx(truth, rel=0.03)
            assert truth < costs.total({})


def test_a_table_is_stored_extended_and_shared(tmp_path):
    path = tmp_path / "t.json"
    net = network_from_onnx(zoo.build("lenet5"))
    first = LatencyTable(path)
    stairs, total = compute_staircases(net, NULL, first, most=3)
    assert first.added == len(first.rows) > 12
    assert [s.widths for s in stairs] == [(6,), (8, 16), (8, 112, 120), (8, 80, 84)]
    again = LatencyTable(path)
    assert again.rows == first.rows
    stairs2, total2 = compute_staircases(net, NULL, again, most=3)
    assert (again.added, stairs2, total2) == (0, stairs, total)
    mine, other = LatencyTable(path), LatencyTable(path)
    compute_staircases(network_from_onnx(zoo.build("lenet5", num_classes=7)), NULL, mine, most=2)
    compute_staircases(net, replace(NULL, threads=2), other, most=3)
    assert other.added == first.added, "another machine has its own rows"
    both = LatencyTable(path).rows
    assert set(mine.rows) | set(other.rows) == set(both)


def test_an_interrupted_measurement_is_resumed(tmp_path):
    path, net = tmp_path / "t.json", network_from_onnx(zoo.build("lenet5"))

    def stop(done, total, stage):
        if stage.startswith("fc1"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compute_staircases(net, NULL, LatencyTable(path, save_interval_s=0.0), most=3, progress=stop)
    kept = LatencyTable(path)
    assert 3 < len(kept.rows)
    whole, _ = compute_staircases(net, NULL, LatencyTable(), most=3)
    resumed, _ = compute_staircases(net, NULL, kept, most=3)
    assert resumed == whole


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "is not valid JSON"),
        ("[]", "is not a latency table"),
        ('{"format": "whet.pruning.latency_table", "version": 7}', "has version 7"),
        ('{"format": "whet.pruning.latency_table", "version": 1, "rows": {"a": {"ms": 1}}}', "damaged row"),
        ('{"format": "whet.pruning.latency_table", "version": 1, "rows": {"a": {"device": "", "precisions": "", "conditions": "", "layer": "",'
         ' "tactic": "", "ms": -1, "spread_ms": 0}}}', "not a finite number >= 0"),
    ],
)  # fmt: skip
def test_damaged_tables(tmp_path, text, why):
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(CacheError, match=why):
        LatencyTable(path)


def test_shrinking_a_layer_that_depends_on_its_size_is_refused():
    from whet.pruning.shrink import shrink_layer

    base = lower_to_static_layers(net_of("resnet18"), NULL)
    conv = next(x for x in base.values() if x.composite == "Conv" or x.op == "Conv")
    with pytest.raises(NetworkError):
        shrink_layer(conv, {("out", 0, 1): 7})


def test_step_edges():
    assert find_edges([8, 16, 24, 32], [1.0, 2.0, 2.0, 4.0]) == [8, 24, 32]
    assert find_edges([8, 16, 24], [3.0, 3.0, 3.0]) == [24]
    assert find_edges([8, 16, 24], [1.0, 5.0, 2.0]) == [8, 24], "a narrower width that is slower is no step"
    net = net_of("vit_b_16")
    heads, width, mlp = groups(net)[:3]
    assert list_widths(heads, 8) == [1, 2, 3, 4, 5, 6], "a head is a multiple by itself"
    assert list_widths(width, 8) == [8, 16]
    assert len(list_widths(mlp, 8)) == 12
    assert list_widths(mlp, 8)[-1] == mlp.size


def test_three_factors_of_one_axis_multiply():
    """Key heads, repetitions of keys and widths share the columns of a query projection."""
    net = parse_network(GROUPED_QUERIES.replace("f32[N,", "f32[2,"))
    found = groups(net)
    assert len(found) == 4
    for price, count in ((make_flop_costs, count_flops), (make_parameter_costs, count_params)):
        costs = price(net, found, [])
        for chosen in product(*((g.size, g.size // 2) for g in found)):
            widths = dict(zip((g.name for g in found), chosen, strict=True))
            assert costs.total(widths) == count(cut(net, {name: np.arange(n) for name, n in widths.items()}, found)), widths


def test_staircases_report_each_width_once():
    seen = []
    compute_staircases(network_from_onnx(zoo.build("lenet5")), NULL, LatencyTable(), most=3, progress=lambda *told: seen.append(told))
    widths = [(done, total) for done, total, text in seen if " at " in text and " of " in text]
    assert widths
    assert widths[-(total := widths[-1][1]) :] == [(k, total) for k in range(1, total + 1)]
