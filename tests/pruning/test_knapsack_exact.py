"""The selection against exhaustive search, on small random networks with nested branches, heads, widths and Concats; its bound against both."""

from itertools import product
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whet import zoo
from whet.errors import PruneError
from whet.frontends import network_from_onnx
from whet.network import parse_network
from whet.pruning import branches, groups, importance
from whet.pruning.costs import Costs, make_flop_costs, make_parameter_costs
from whet.pruning.dual import Search
from whet.pruning.knapsack import choose_within, list_widths, scale_by_weight_count
from whet.pruning.tables import Tables


def best_of_all(channel_groups, blocks, scores, costs, target, multiple):
    """The least loss over all combinations of widths and branches that meet the target; inf if none does."""
    least = inf
    for mask in product((False, True), repeat=len(blocks)):
        gone = [b for b, goes in zip(blocks, mask, strict=True) if goes]
        outer = [b for b in gone if not any(set(b.layers) < set(c.layers) for c in gone)]
        alive = [g for g in channel_groups if not any(set(g.layers) <= set(b.layers) for b in gone)]
        of_branches = sum(float(scores[b.name].sum()) for b in outer)
        for some in product(*(list_widths(g, multiple) for g in alive)):
            lost = of_branches + sum(float(np.sort(scores[g.name])[: g.size - w].sum()) for g, w in zip(alive, some, strict=True))
            if lost < least and costs.total({g.name: w for g, w in zip(alive, some, strict=True)}, [b.name for b in gone]) <= target:
                least = lost
    return least


def check(net, seed, share, kind, multiple):
    """One selection with random importances: optimal, and proven to be."""
    found, blocks = groups(net), branches(net)
    scores = scale_by_weight_count(found, blocks, importance(found, "random", seed, net=net, blocks=blocks))
    costs = kind(net, found, blocks)
    target = share * costs.total({})
    least = best_of_all(found, blocks, scores, costs, target, multiple)
    if least == inf:
        with pytest.raises(PruneError, match="is unreachable"):
            choose_within(found, blocks, scores, costs, target, multiple=multiple)
        return
    choice = choose_within(found, blocks, scores, costs, target, multiple=multiple)
    assert choice.after <= target
    assert choice.after == costs.total({g: len(k) for g, k in choice.kept.items()}, choice.removed)
    assert choice.lost == pytest.approx(least, abs=1e-9)
    assert choice.bound <= least * (1 + 1e-9) + 1e-9
    assert choice.gap < 1e-5


@st.composite
def nested(draw):
    """A convolution followed by residual branches, nested and consecutive; some end in a Concat of two widths."""
    widths = st.sampled_from([4, 6, 8])
    channels, lines, count = draw(widths), [], [0]

    def new(line):
        count[0] += 1
        lines.append(f"%t{count[0]}: {line}")
        return f"t{count[0]}"

    def conv(x, many, few):
        lines.append(f"const %w{len(lines)}: f32[{many},{few},1,1] = seed({len(lines) + 1})")
        return new(f"f32[N,{many},4,4] = Conv(%{x}, %w{len(lines) - 1})")

    def branch(x, deep):
        wide = draw(widths)
        y = conv(x, wide, channels)
        if deep:
            y = conv(branch(conv(y, channels, wide), deep - 1), wide, channels)
        elif draw(st.booleans()):
            z = conv(x, draw(st.just(4)), channels)
            y, wide = new(f"f32[N,{wide + 4},4,4] = Concat(%{y}, %{z}, axis=1)"), wide + 4
        y = conv(new(f"f32[N,{wide},4,4] = Relu(%{y})"), channels, wide)
        return new(f"f32[N,{channels},4,4] = Add(%{x}, %{y})")

    x = conv("x", channels, 3)
    for deep in draw(st.sampled_from([(0,), (1,), (0, 0)])):
        x = branch(x, deep)
    y = conv(x, 2, channels)
    return parse_network("\n".join(["network n source", "in %x: f32[N,3,4,4]", *lines, f"out %{y}", ""]))


@given(nested(), st.integers(0, 3), st.sampled_from([0.9, 0.7, 0.5, 0.35, 0.2, 0.1]), st.sampled_from([make_flop_costs, make_parameter_costs]))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_the_selection_is_optimal_and_proven(net, seed, share, kind):
    check(net, seed, share, kind, multiple=2)


@pytest.mark.parametrize("share", [0.8, 0.6, 0.35])
def test_heads_widths_and_depth_of_a_transformer(share):
    """One layer: heads, their widths for keys and for values, the inner width, and both halves of the layer."""
    net = network_from_onnx(zoo.build("bert_base", layers=1, sequence=5, hidden=16, heads=2))
    assert len(branches(net)) == 2
    assert len(groups(net)) >= 4
    check(net, 0, share, make_flop_costs, multiple=4)


def chain(widths=(8, 8, 8)):
    """Consecutive convolutions."""
    lines, few = ["network n source", "in %x0: f32[N,3,4,4]"], 3
    for i, many in enumerate((*widths, 2)):
        lines += [f"const %w{i}: f32[{many},{few},1,1] = seed({i + 1})", f"%x{i + 1}: f32[N,{many},4,4] = Conv(%x{i}, %w{i})"]
        few = many
    return parse_network("\n".join([*lines, f"out %x{len(widths) + 1}", ""]))


@pytest.mark.parametrize("seed", range(6))
def test_costs_are_measured_near_the_selection_and_the_bound_still_holds(seed):
    """Costs as on a device: not every width of every layer is timed, and no selection is below the stated bound."""
    net = chain((12, 12, 12, 12))
    found = groups(net)
    scores = importance(found, "random", seed)
    counted = make_flop_costs(net, found, [])
    asked = set()

    def timed(item, widths):
        asked.add((item, tuple(widths.get(g, -1) for g in counted.groups_of[item])))
        return 1e-6 * (counted.item(item, widths) + 300)  # launch overhead plus work

    costs = Costs("ms", timed, counted.groups_of, {}, measured=True)
    target = 0.6 * costs.total({})
    choice = choose_within(found, [], scores, costs, target, multiple=1)
    many = len(asked)
    least = best_of_all(found, [], scores, costs, target, 1)
    assert choice.after <= target
    assert choice.bound <= least * (1 + 1e-9)
    assert least <= choice.lost <= 1.15 * least
    assert choice.gap < 0.5
    assert many < len(asked), "only part of the widths was timed"


def test_many_widths_in_one_layer_give_a_weaker_valid_bound():
    """Six groups of twelve widths in one Concat are too many for a table."""
    lines = ["network n source", "in %x: f32[N,3,4,4]"]
    for i in range(6):
        lines += [f"const %w{i}: f32[12,3,1,1] = seed({i + 1})", f"%a{i}: f32[N,12,4,4] = Conv(%x, %w{i})"]
    lines += ["%c: f32[N,72,4,4] = Concat(" + ", ".join(f"%a{i}" for i in range(6)) + ", axis=1)", "const %v: f32[8,72,1,1] = seed(9)",
              "%b: f32[N,8,4,4] = Conv(%c, %v)", "const %u: f32[2,8,1,1] = seed(10)", "%y: f32[N,2,4,4] = Conv(%b, %u)", "out %y", ""]  # fmt: skip
    net = parse_network("\n".join(lines))
    found = groups(net)
    scores = importance(found, "random", 0)
    costs = make_flop_costs(net, found, [])
    tables = Tables(found, [], scores, costs, {g.name: list_widths(g, 1) for g in found})
    assert tables.wide
    assert Search(tables, 0.5 * costs.total({})).run().x is not None
    for share in (0.7, 0.4):
        wide = choose_within(found, [], scores, costs, share * costs.total({}), multiple=1)
        coarse = choose_within(found, [], scores, costs, share * costs.total({}), multiple=4)  # three widths each: every table fits
        assert wide.after <= share * costs.total({})
        assert coarse.gap < 0.05
        assert wide.bound <= coarse.lost, "the finer selection has all widths of the coarser one"
        assert wide.lost <= 1.02 * coarse.lost
