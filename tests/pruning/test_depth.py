"""Residual branches: removable ones, exactness of the rest, and branches that must stay."""

import numpy as np
import pytest

from support.zoo_structure import read_zoo_structure
from whet.errors import PruneError
from whet.network import parse_network
from whet.ops import run_network
from whet.pruning import branches, remove_branches, silence_branches

BLOCK = """network n source
in %x: f32[N,4,6,6]
const %w1: f32[4,4,1,1] = seed(1)
const %w2: f32[4,4,1,1] = seed(2)
const %w3: f32[2,4,1,1] = seed(3)
%a: f32[N,4,6,6] = Conv(%x, %w1)
%r: f32[N,4,6,6] = Relu(%a)
%b: f32[N,4,6,6] = Conv(%r, %w2)
%s: f32[N,4,6,6] = Add(%x, %b)
%y: f32[N,2,6,6] = Conv(%s, %w3)
out %y
"""


def test_a_removed_branch_leaves_its_shortcut():
    net = parse_network(BLOCK)
    (branch,) = branches(net)
    assert (branch.name, branch.place, branch.layers) == ("s", 1, ("a", "r", "b"))
    small = remove_branches(net, ["s"])
    assert [x.name for x in small.layers] == ["y"]
    assert set(small.constants) == {"w3"}
    x = {"x": np.random.default_rng(0).standard_normal((3, 4, 6, 6)).astype(np.float32)}
    np.testing.assert_array_equal(run_network(small, x)["y"], run_network(silence_branches(net, ["s"]), x)["y"])
    assert [x.name for x in net.layers] == ["a", "r", "b", "s", "y"], "the source network is unchanged"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (("out %y", "out %y\nout %r"), "an output of the network is made inside"),
        (("Add(%x, %b)", "Add(%a, %b)"), "nothing of it reads the shortcut outside"),
        (("%y: f32[N,2,6,6] = Conv(%s, %w3)", "%q = Add(%s, %r)\n%y: f32[N,2,6,6] = Conv(%q, %w3)"), "its inside is read outside"),
        (("= Add(%x, %b)", "= Mul(%x, %b)"), "without a factor nothing is left"),
        (("const %w1: f32[4,4,1,1]", "const %c: f32[4,1,1] = seed(9)\nconst %w1: f32[4,4,1,1]"), None),
    ],
)
def test_branches_that_must_stay(change, why):
    found = branches(parse_network(BLOCK.replace(*change)))
    inner = [b for b in found if b.name == "s" and "a" in b.layers]
    assert bool(inner) == (why is None), why


def test_nested_branches():
    text = BLOCK.replace("%b: f32[N,4,6,6] = Conv(%r, %w2)", "%t: f32[N,4,6,6] = Conv(%r, %w2)\n%b: f32[N,4,6,6] = Add(%r, %t)")
    net = parse_network(text)
    assert [(b.name, len(b.layers)) for b in branches(net)] == [("b", 1), ("s", 4)]
    assert [x.name for x in remove_branches(net, ["b"]).layers] == ["a", "r", "s", "y"]
    assert [x.name for x in remove_branches(net, ["s", "b"]).layers] == ["y"]


@pytest.mark.parametrize(
    ("name", "options", "count"),
    [
        ("resnet50", {"image": 64}, 12),  # 16 blocks, of which 4 change the shape
        ("mobilenet_v2", {"image": 64}, 10),
        ("convnext_tiny", {"image": 64}, 18),
        ("swin_t", {"image": 64, "window": 2}, 24),  # attention and MLP of 12 layers
        ("bert_base", {"layers": 3, "hidden": 48, "heads": 4}, 6),
        ("vit_b_16", {"layers": 3, "image": 32, "hidden": 48, "heads": 4}, 6),
        ("densenet121", {"image": 64}, 0),
        ("unet", {"image": 32, "width": 8}, 0),
    ],
)
def test_number_of_branches_of_published_networks(name, options, count):
    assert len(branches(read_zoo_structure(name, **options))) == count


def test_a_wrong_name_is_reported():
    with pytest.raises(PruneError, match="unknown residual branch 'ss'"):
        remove_branches(parse_network(BLOCK), ["ss"])
