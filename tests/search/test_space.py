"""The search space: kept channels, heads, budgets, the residual width, names left out."""

from __future__ import annotations

import numpy as np
import pytest

from support.search_case import read_network, recipe_with
from whet.errors import UsageError
from whet.search.recipe.recipe import Space
from whet.search.recipe.space import Candidate, count_kept_channels, search_space


@pytest.mark.parametrize(
    ("size", "share", "multiple", "expected"), [(64, 0, 8, 64), (64, 0.5, 8, 32), (64, 0.3, 8, 48), (64, 0.95, 8, 8), (12, 0.5, 1, 6)]
)
def test_kept_channels(size, share, multiple, expected):
    assert count_kept_channels(size, share, multiple) == expected


def test_the_space_reports_omissions_and_recognizes_equal_points(case, tmp_path):
    import whet

    net = whet.network_from_onnx(case / "model.onnx")
    space = search_space(net, recipe_with(case, tmp_path, space={"precision": ["fp32"], "width": {"step": 0.01}}))
    left = dict(space.left_out)
    assert "not searched by default" in left["2:4"]
    a, b = (space.candidate({"96 inner": share, "64 inner": 0.0}) for share in (0.5, 0.51))
    assert a != b
    assert space.kept(a) == {"w0": 48}
    assert space.key(a) == space.key(b)
    assert space.key(a) != space.key(space.candidate({"96 inner": 0.5, "64 inner": 0.5}))
    assert Candidate.from_plain(a.to_plain()) == a
    for point in space.seeds():
        assert point.keys() == {d.name for d in space.dimensions}


@pytest.mark.parametrize("name", ["bert_base", "vit_b_16"])
def test_heads_are_a_separate_dimension_with_steps_of_one(name, case, tmp_path):
    """Of separate projections (BERT) and of a fused projection (ViT)."""
    from whet import zoo
    from whet.frontends import network_from_onnx

    small = {"bert_base": {"sequence": 8}, "vit_b_16": {"image": 64}}[name]
    net = network_from_onnx(zoo.build(name, layers=2, hidden=192, heads=6, **small))
    space = search_space(net, recipe_with(case, tmp_path, space={"width": {"multiple": 8}, "precision": ["fp32"]}))
    members = space.classes["6 heads"]
    assert len(members) == 2, "one per layer"
    assert {space.steps[m] for m in members} == {1}
    cut = space.candidate({n: 0.3 if n == "6 heads" else 0.0 for n in space.classes})
    assert set(space.kept(cut).values()) == {4}  # 6 x 0.7, to the nearest whole head
    assert any(space.steps[m] == 8 for n, ms in space.classes.items() if "heads" not in n for m in ms)


def test_a_budget_is_a_separate_branch_of_the_space(case, tmp_path):
    import whet

    net = whet.network_from_onnx(case / "model.onnx")
    space = search_space(net, recipe_with(case, tmp_path, space={"precision": ["fp32"], "budget": True}))
    by_class, by_budget = (space.candidate({"96 inner": 0.5, "64 inner": 0.5, "width by": way, "budget": 0.4}) for way in ("class", "budget"))
    assert by_class.budget is None
    assert by_budget.budget == 0.4
    assert by_budget.widths == {}
    assert by_budget.pruned
    assert space.key(by_budget) == space.key(space.candidate({"96 inner": 0.1, "64 inner": 0.2, "width by": "budget", "budget": 0.4}))
    assert {p["width by"] for p in space.seeds()} == {"class", "budget"}
    assert "latency budget 40 %" in by_budget.words()


@pytest.mark.parametrize("limit", [8, 1])
def test_every_class_is_described(case, tmp_path, limit):
    """By size and role; with fewer classes than roles by position."""
    space = search_space(read_network(case), recipe_with(case, tmp_path, space={"width": {"classes": limit}}))
    texts = [space.describe_class(name) for name in space.classes]
    assert texts == [
        ["96 channels inside a block, between two layers, in one group (w0); -50 % leaves 48 of 96",
         "64 channels inside a block, between two layers, in one group (w1); -50 % leaves 32 of 64"],
        ["channels of groups with 64, 96 of them, in network order, in each of 2 groups (w0, w1); -50 % leaves 48 of 96"],
    ][limit == 1]  # fmt: skip


def test_the_residual_width_is_a_dimension_on_request(case, tmp_path):
    """`space.hidden` adds the class of the stream through norms, and a trial cuts and recovers it."""
    from whet.network import parse_network
    from whet.pruning import count_params
    from whet.search.recipe.recipe import Effort
    from whet.search.stages.prepare import prepare_candidate

    net = parse_network("""network n source
in %x: f32[N,6]
const %w1: f32[6,16] = seed(1)
const %g: f32[16] = seed(2)
const %w2: f32[16,3] = seed(3)
%h: f32[N,16] = MatMul(%x, %w1)
%n: f32[N,16] = LayerNormalization(%h, %g)
%y: f32[N,3] = MatMul(%n, %w2)
out %y
""")
    without, space = (search_space(net, recipe_with(case, tmp_path, space={"precision": ["fp32"], "hidden": h})) for h in (False, True))
    assert without.classes == {}
    assert space.classes == {"16 residual": ("w1@hidden",)}
    c = space.candidate({"16 residual": 0.5})
    data = {"x": np.random.default_rng(0).standard_normal((64, 6)).astype(np.float32)}
    made = prepare_candidate(net, c, space.kept(c), data, Effort(), say=lambda stage: None)
    assert count_params(made.network) == 0.5 * count_params(net)
    assert len(made.recipe.groups["w1@hidden"].kept) == 8
    with pytest.raises(UsageError, match=r"'space.skip': .*w1@hidden"):
        search_space(net, recipe_with(case, tmp_path, space={"skip": ["w1@hidden"], "hidden": False}))
    assert search_space(net, recipe_with(case, tmp_path, space={"skip": ["w1@hidden"], "hidden": True})).classes == {}


def test_excluded_names_are_not_cut(case, tmp_path):
    """Groups by their names or a layer's, branches by theirs or a layer inside; unknown names are refused with the nearest one."""
    from whet import zoo
    from whet.frontends import network_from_onnx
    from whet.pruning import groups
    from whet.pruning.depth import branches
    from whet.search.recipe.space import list_groups_to_keep

    net = network_from_onnx(zoo.build("resnet18"))
    group, branch = groups(net)[3], branches(net)[2]
    layer = group.layers[0]
    assert group.name in list_groups_to_keep(net, Space(skip=(group.name,)))
    assert group.name in list_groups_to_keep(net, Space(skip=(layer,)))
    assert branch.name in list_groups_to_keep(net, Space(skip=(branch.layers[0],)))
    recipe = recipe_with(case, tmp_path, space={"precision": ["fp32"], "skip": [group.name, branch.name]})
    space = search_space(net, recipe, [b.name for b in branches(net)])
    assert group.name not in {g for members in space.classes.values() for g in members}
    assert branch.name not in space.branches
    assert len(space.branches) == len(branches(net)) - 1
    assert any("are not pruned" in why for _, why in space.left_out)
    with pytest.raises(UsageError, match=r"'space\.skip': no prunable group, branch or layer is called .*Did you mean"):
        search_space(net, recipe_with(case, tmp_path, space={"skip": layer + "x"}))
