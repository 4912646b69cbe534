"""2:4 as a move of the search: only in the layers that gain, recorded for a rebuild, with masks of exactly these zeros."""

import json
import shutil

import numpy as np
import pytest

from support.search_case import recipe_with
from whet import BuildConfig
from whet.frontends import network_from_onnx
from whet.network import Network, parse_type
from whet.pruning import LayerAdvice, SparsityAdvice
from whet.pruning.recipe import parse_recipe
from whet.search import rebuild, search
from whet.search.stages import prepare
from whet.search.stages.prepare import TWO_FOUR, Prepared, has_zeros, list_two_four_gains, write_two_four
from whet.sparsity import list_eligible_layers


@pytest.fixture
def net():
    """Two consecutive products."""
    rng = np.random.default_rng(0)
    made = Network("n", "source")
    x = made.add_input("x", parse_type("f16[128,64]"))
    wide = made.add("MatMul", x, made.constant(rng.standard_normal((64, 64)).astype("f2"), "w"), name="wide")
    made.mark_output(made.add("MatMul", wide, made.constant(rng.standard_normal((64, 16)).astype("f2"), "v"), name="narrow"), "y")
    return made


@pytest.fixture
def data():
    return {"x": np.random.default_rng(1).standard_normal((128, 64)).astype("f2")}


def test_only_the_layers_that_gain_are_2_4(net, data):
    prepared, rated = Prepared(net), []
    write_two_four(prepared, data, ["wide"], say=lambda _: None, rate=lambda n: rated.append(n) or {"value": 1.0})
    assert list_eligible_layers(prepared.network)[0] == ["wide"]
    assert list_eligible_layers(net)[0] == []
    assert has_zeros(prepared.network)
    assert prepared.notes == ["2:4 in 1 of 2 layers with weights: those that a sparse kernel makes faster here"]
    assert [s["step"] for s in prepared.steps] == ["2:4"]
    assert rated == [prepared.network]
    again = parse_recipe(prepared.recipe.to_json())
    assert again.about[TWO_FOUR] == ["wide"]
    repeated = Prepared(net)
    write_two_four(repeated, data, again.about[TWO_FOUR], say=lambda _: None)
    np.testing.assert_array_equal(repeated.network.constants["w"].array(), prepared.network.constants["w"].array())


def test_nothing_changes_if_no_layer_gains(net, data):
    prepared = Prepared(net)
    write_two_four(prepared, data, [], say=lambda _: None)
    assert prepared.network is net
    assert not has_zeros(prepared.network)
    assert prepared.recipe.about[TWO_FOUR] == []


def test_gains_are_those_of_the_advisor(net, monkeypatch):
    def layer(node, dense, sparse, reason=""):
        return LayerAdvice(f"fused {node}", node, "linear", 64, 64, dense, sparse, "dense", "sparse", 0.26, reason)

    layers = (layer("wide", 2.0, 1.0), layer("narrow", 1.0, 0.99, "slower or equal: memory bound"))
    asked = []
    advice = SparsityAdvice("cuda", "fp16", 1, "", 0.0, layers)
    monkeypatch.setattr(prepare, "advise_sparsity", lambda *arguments: asked.append(arguments[:2]) or arguments[2](1, 2, "wide") or advice)
    config, told = BuildConfig(), []
    assert list_two_four_gains(net, config, told.append) == ["wide"]
    assert asked == [(net, config)]
    assert told == ["2:4 1/2"]


@pytest.mark.slow
def test_a_search_writes_2_4_where_it_gains_and_repeats_it(case, tmp_path):
    """The whole path on a CPU: measured gains, the deployed model, and a rebuild with the same layers."""
    project = tmp_path / "project"
    project.mkdir()
    for name in ("model.onnx", "calibrate.npz", "score.npz", "judge.npz"):
        shutil.copy(case / name, project / name)
    few = {"search__trials": 1, "survivor__count": 1, "scout__level": 0, "survivor__level": 0, "prefer": "latency", "target": {"latency": "2x"}}
    space = {"width": {"step": 0.5, "most": 0.5}, "precision": ["fp32"], "two_four": [True]}
    deploy = search(recipe_with(project, project / "work", space=space, **few)).folder.deploy
    stored = json.loads((deploy / "recipe.json").read_text())
    if not stored["candidate"]["two_four"]:
        pytest.skip("the original was the fastest here")
    layers = stored["pruning"]["about"][TWO_FOUR]
    assert set(layers) <= set(list_eligible_layers(network_from_onnx(deploy / "model.onnx"))[0])
    rebuild(deploy, tmp_path / "again")
    assert (tmp_path / "again" / "model.onnx").read_bytes() == (deploy / "model.onnx").read_bytes()
