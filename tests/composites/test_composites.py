"""Every registered composite has a description, is known to the tactics that name it, and decomposes into equivalent layers."""

import numpy as np
import pytest

from whet.builder.candidates.unfuse import unfuse
from whet.composites import COMPOSITES, find_composite, register_composite, why_unfused
from whet.errors import BuildError
from whet.network import Layer, parse_network
from whet.ops import OPS, run_network, sample_layer
from whet.passes import PASSES
from whet.tactics import list_tactics

DESCRIBED = list(dict.fromkeys(COMPOSITES.values()))
SAMPLES = [(c.kind, i) for c in DESCRIBED for i in range(len(c.samples))]


def test_tactics_name_registered_kinds():
    named = {kind for backend in ("cpu", "cuda") for t in list_tactics(backend) for kind in t.composites}
    assert named <= set(COMPOSITES)


@pytest.mark.parametrize("described", DESCRIBED, ids=lambda c: c.kind)
def test_a_composite_has_a_title_and_passes_that_create_it(described):
    assert described.title
    assert described.matchers
    assert all(PASSES[name].composite == described.kind for name in described.matchers)


@pytest.mark.parametrize(("kind", "i"), SAMPLES)
def test_contract_tests_run_its_samples_and_their_decomposition_computes_the_same(kind, i):
    sample = COMPOSITES[kind].samples[i]
    assert any(s is sample for s in OPS["Fused"].samples)
    assert sample.attrs["composite"] in COMPOSITES
    net, layer, arrays = sample_layer("Fused", sample)
    inputs = {t.name: a for t, a in zip(layer.inputs, arrays, strict=True) if t is not None and not t.is_constant}
    with np.errstate(all="ignore"):
        want = run_network(net, inputs)
        unfuse(net, layer)
        got = run_network(net, inputs)
    for name, a in want.items():
        np.testing.assert_array_equal(got[name], a)


def test_a_second_description_of_a_kind_is_refused():
    with pytest.raises(BuildError, match="two composites describe the kind ConvPool"):
        register_composite("ConvPool", title="another one")


def test_a_new_layer_stays_unfused_unless_a_tactic_computes_its_kind():
    layer = sample_layer("Fused", COMPOSITES["ConvPool"].samples[0])[1]
    assert why_unfused(layer, {"ConvPool"}) is None
    assert why_unfused(layer, {"ConvSum"}) == "no tactic here computes a convolution and its pooling in one kernel"
    epilogue = sample_layer("Fused", COMPOSITES["Conv"].samples[0])[1]
    assert why_unfused(epilogue) is None, "every backend computes epilogues"


def test_a_root_operation_without_description_is_named_by_its_operation():
    assert find_composite(Layer("Fused", "f", [], {"composite": "Softmax"})).title == "Softmax with its epilogue"
    assert find_composite(parse_network("network n source\nin %x: f32[2]\n%y = Relu(%x)\nout %y\n").layers[0]) is None
