"""Importance, selection, recipes, unstructured zeros, counts."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from support.zoo_structure import read_zoo_structure
from whet import zoo
from whet.errors import PruneError
from whet.frontends import network_from_onnx
from whet.network import parse_network
from whet.ops import run_network
from whet.pruning import (
    apply_recipe,
    choose,
    compute_zero_fraction,
    count_flops,
    count_params,
    cut,
    groups,
    importance,
    load_recipe,
    make_pruning_recipe,
    save_recipe,
    save_weights,
    zero_smallest,
)


def chain(wide=16):
    """x -> MatMul w -> Relu -> MatMul v: one group; channel k's weights are all k + 1 in w, and 1 in v."""
    net = parse_network(f"""network n source
in %x: f32[N,3]
const %w: f32[3,{wide}] = seed(1)
const %v: f32[{wide},3] = seed(2)
%a: f32[N,{wide}] = MatMul(%x, %w)
%r: f32[N,{wide}] = Relu(%a)
%y: f32[N,3] = MatMul(%r, %v)
out %y
""")
    from whet.network import Weight

    net.constants["w"].weight = Weight(np.tile(np.arange(1, wide + 1, dtype=np.float32), (3, 1)))
    net.constants["v"].weight = Weight(np.ones((wide, 3), np.float32))
    return net


@pytest.fixture(scope="module")
def resnet():
    return network_from_onnx(zoo.build("resnet18", image=64))


@pytest.mark.parametrize("kind", ["l1", "l2"])
def test_norms_rank_channels(kind):
    (g,) = groups(chain())
    scores = importance([g], kind)["w"]
    want = (np.arange(1, 17) / 8.5 + 1) / 2  # the mean of both weights, each normalized to a mean of one
    np.testing.assert_allclose(scores, want, rtol=1e-6)


def test_scale_of_a_layer_does_not_matter():
    net, (g,) = chain(), groups(chain())
    from whet.network import Weight

    net.constants["w"].weight = Weight(net.constants["w"].array() * 100)
    np.testing.assert_allclose(importance(groups(net))["w"], importance([g])["w"], rtol=1e-6)


def test_random_is_seeded(resnet):
    found = groups(resnet)
    a, b, c = (importance(found, "random", seed=s) for s in (1, 1, 2))
    assert all(np.array_equal(a[n], b[n]) for n in a)
    assert not all(np.array_equal(a[n], c[n]) for n in a)
    with pytest.raises(PruneError, match="one of l1, l2, fpgm"):
        importance(found, "l3")


@pytest.mark.parametrize("scope", ["group", "global"])
@pytest.mark.parametrize("multiple", [1, 8, 16])
def test_about_the_requested_share_is_removed(resnet, scope, multiple):
    found = groups(resnet)
    kept = choose(found, importance(found), 0.4, scope=scope, multiple=multiple)
    total = sum(g.size for g in found)
    left = sum(len(kept.get(g.name, range(g.size))) for g in found)
    assert abs(left / total - 0.6) < 0.03
    assert all(len(at) % multiple == 0 for at in kept.values())
    assert all(np.all(np.diff(at) > 0) for at in kept.values())


def test_the_most_important_units_stay_and_one_multiple_remains():
    found = groups(chain())
    assert choose(found, importance(found), 0.5, multiple=4)["w"].tolist() == list(range(8, 16))
    assert len(choose(found, importance(found), 0.99, multiple=4)["w"]) == 4
    assert choose(found, importance(found), 0.99, multiple=16) == {}, "a group of one multiple stays whole"
    assert choose(found, importance(found), 0) == {}


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"ratio": 1}, "must be in"),
        ({"ratio": -0.1}, "must be in"),
        ({"ratio": 0.5, "scope": "all"}, "scope is"),
        ({"ratio": 0.5, "multiple": 0}, "multiple of one"),
    ],
)
def test_invalid_selections(wrong, text):
    found = groups(chain())
    with pytest.raises(PruneError, match=text):
        choose(found, importance(found), **wrong)


def test_a_recipe_survives_its_file_and_cuts_the_same(tmp_path, resnet):
    found = groups(resnet)
    kept = choose(found, importance(found), 0.4)
    path = save_recipe(make_pruning_recipe(resnet, kept, about={"importance": "l1"}), tmp_path / "r.json")
    recipe = load_recipe(path)
    assert recipe.about == {"importance": "l1"}
    assert str(apply_recipe(resnet, recipe)) == str(cut(resnet, kept))
    entry = json.loads(path.read_text())["groups"][0]
    assert entry["name"] == "conv1.weight"
    assert entry["size"] == 64
    assert entry["layers"][0] == "/conv1/Conv"
    assert entry["kept"] == kept["conv1.weight"].tolist()


def test_a_recipe_for_other_weights_of_the_same_model(resnet):
    other = network_from_onnx(zoo.build("resnet18", image=64, seed=7))
    found = groups(resnet)
    recipe = make_pruning_recipe(resnet, choose(found, importance(found), 0.4), channel_groups=found)
    a, b = apply_recipe(resnet, recipe), apply_recipe(other, recipe)
    assert [str(layer.output.type) for layer in a.layers] == [str(layer.output.type) for layer in b.layers]
    at = recipe.kept()["conv1.weight"]
    assert np.array_equal(b.constants["conv1.weight"].array(), other.constants["conv1.weight"].array()[at])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "is not JSON"),
        ("[]", "not a pruning recipe"),
        ('{"format": "whet.pruning.recipe", "version": 9}', "version 9"),
        ('{"format": "whet.pruning.recipe", "version": 1, "groups": [{"name": "w"}]}', "needs 'name', 'size' and 'kept'"),
        ('{"format": "whet.pruning.recipe", "version": 1, "groups": [3]}', "needs 'name'"),
        (
            '{"format": "whet.pruning.recipe", "version": 2, "groups":'
            ' [{"name": "w", "size": 4, "kept": [1]}, {"name": "w", "size": 4, "kept": [2]}]}',
            "group 'w' twice",
        ),
        ('{"format": "whet.pruning.recipe", "version": 1, "groups": [{"name": "w", "size": 4, "kept": [4]}]}', "0 to below 'size'"),
        ('{"format": "whet.pruning.recipe", "version": 1, "groups": [{"name": "w", "size": 4, "kept": ["a"]}]}', "0 to below 'size'"),
    ],
)
def test_damaged_recipes(tmp_path, text, why):
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(PruneError, match=why):
        load_recipe(path)


def test_recipes_of_other_models():
    recipe = make_pruning_recipe(chain(16), {"w": range(8)})
    with pytest.raises(PruneError, match="has 24 channels here, 16 in the recipe"):
        apply_recipe(chain(24), recipe)
    with pytest.raises(PruneError, match=r"cannot read .*gone.json"):
        load_recipe("gone.json")


def test_unstructured_zeros(resnet):
    sparse = zero_smallest(resnet, 0.5)
    assert abs(compute_zero_fraction(sparse) - 0.5) < 1e-4
    assert compute_zero_fraction(resnet) < 1e-6
    w, s = resnet.constants["conv1.weight"].array(), sparse.constants["conv1.weight"].array()
    assert np.abs(w[s == 0]).max() <= np.abs(s[s != 0]).min()
    assert np.array_equal(w[s != 0], s[s != 0])
    assert (count_params(sparse), count_flops(sparse)) == (count_params(resnet), count_flops(resnet))
    x = {"input": np.random.default_rng(0).standard_normal((1, 3, 64, 64)).astype(np.float32)}
    assert not np.array_equal(*(next(iter(run_network(n, x).values())) for n in (resnet, sparse)))
    with pytest.raises(PruneError, match="from 0 to 1"):
        zero_smallest(resnet, 1.5)


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "mobilenet_v2", "squeezenet1_1"])
def test_counts_are_those_of_the_published_networks(name):
    info = zoo.info(name)
    net = read_zoo_structure(name)
    assert count_params(net) == info.parameters
    macs = 2 * info.macs
    assert macs <= count_flops(net) < 1.06 * macs, "pointwise ops and pools come on top of the products"


def test_a_full_disk_leaves_the_existing_recipe(tmp_path, monkeypatch):
    path = save_recipe(make_pruning_recipe(chain(16), {"w": range(8)}), tmp_path / "r.json")
    before = path.read_bytes()

    def full(self, data):
        with self.open("wb") as f:
            f.write(data[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(PruneError, match="No space left on device"):
        save_recipe(make_pruning_recipe(chain(16), {"w": range(4)}), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path], "no partial file is left"


def test_weights_and_masks_have_the_usual_permissions(tmp_path):
    """Permissions follow the user's umask; special files are written to, not replaced."""
    net = chain(16)
    (plain := tmp_path / "plain").touch()
    weights = save_weights(net, tmp_path / "w.safetensors")
    recipe = make_pruning_recipe(net, {}, masks={"w": np.ones((16, 3), bool)})
    masks = save_recipe(recipe, tmp_path / "r.json").with_suffix(".safetensors")
    assert {weights.stat().st_mode, masks.stat().st_mode} == {plain.stat().st_mode}
    os.mkfifo(pipe := tmp_path / "pipe")
    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(pipe.read_bytes)
        save_weights(net, pipe)
        assert got.result() == weights.read_bytes()
    assert pipe.is_fifo()
