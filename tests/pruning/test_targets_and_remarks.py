"""Refusals and remarks of pruning: targets that are not positive, multiples of channels, predictions that are off, progress of timing."""

import numpy as np
import pytest

from whet.errors import PruneError
from whet.network import parse_network
from whet.pruning import PruneConfig, groups, importance, prune
from whet.pruning.costs import make_flop_costs
from whet.pruning.knapsack import choose_within
from whet.pruning.prune import Report
from whet.pruning.target import Target

TEXT = """network n source
in %x: f32[N,3,8,8]
const %w: f32[64,3,3,3] = seed(1)
const %v: f32[40,64,1,1] = seed(2)
const %u: f32[8,40,1,1] = seed(3)
%a = Conv(%x, %w, pads=(1,1,1,1))
%b = Relu(%a)
%c = Conv(%b, %v)
%d = Relu(%c)
%e = Conv(%d, %u)
out %e
"""


@pytest.mark.parametrize(
    ("kind", "value", "at"),
    [("latency", 3.0, "2 ms"), ("throughput", 1.0, "500/s"), ("flops", 3.0, "2"), ("params", 3.0, "2"), ("channels", 3.0, "2")],
)
def test_a_target_that_is_met_names_the_cost_in_its_unit(kind, value, at):
    with pytest.raises(PruneError, match=rf"is already met: the network is at {at}$"):
        Target(kind, value=value).of(2.0)


@pytest.mark.parametrize("target", [0.0, -1.0, -1e9, float("nan")])
def test_a_target_is_positive(target):
    net = parse_network(TEXT)
    found = groups(net)
    with pytest.raises(PruneError, match="the target must be positive"):
        choose_within(found, [], importance(found), make_flop_costs(net, found, []), target)


@pytest.mark.parametrize("ratio", [0.2, 0.3, 0.5, 0.7])
@pytest.mark.parametrize("multiple", [None, 4, 16])
def test_kept_channels_are_a_multiple(ratio, multiple):
    made = prune(parse_network(TEXT), PruneConfig(ratio=ratio, scope="group", multiple=multiple))
    kept = {name: made.cut.constants[name].shape[0] for name in ("w", "v")}
    assert kept["w"] < 64
    assert all(n % (multiple or 8) == 0 or n == whole for n, whole in zip(kept.values(), (64, 40), strict=True))


@pytest.mark.parametrize(
    ("engine", "remark"), [((10.0, 8.0), "off by 30 %"), ((10.0, 2.0), "off by 30 %"), ((20.0, 16.0), "off by 30 %"), ((10.0, 5.1), None)]
)
def test_a_prediction_that_is_off_is_remarked(engine, remark):
    lines = Report("ms", predicted=(10.0, 5.0), engine_ms=engine, params=(10, 5)).lines()
    remarks = [line for line in lines if "The prediction" in line]
    assert len(remarks) == (remark is not None)
    assert remark is None or remark in remarks[0]


@pytest.mark.parametrize("kernel", ["1x1", "3x3"])
def test_advice_names_the_filters_and_both_numbers_of_channels(kernel):
    from whet.builder import BuildConfig
    from whet.pruning import advise_sparsity

    k = int(kernel[0])
    text = f"network n source\nin %x: f32[1,16,8,8]\nconst %w: f32[32,16,{k},{k}] = seed(1)\nconst %v: f32[2048,24] = seed(2)\n"
    text += f"%a = Conv(%x, %w, pads=({k // 2},{k // 2},{k // 2},{k // 2}))\n%f = Flatten(%a)\n%y = MatMul(%f, %v)\nout %y\n"
    advice = advise_sparsity(parse_network(text), BuildConfig(backend="null", timing_cache=""))
    rows = {x.node: (x.kind, x.in_channels, x.out_channels) for x in advice.layers}
    assert rows == {"a": (kernel, 16, 32), "y": ("linear", 2048, 24)}
    assert np.isfinite([x.dense_ms or 0.0 for x in advice.layers]).all()
