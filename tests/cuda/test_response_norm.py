"""Norms of channels relative to their mean: the kernels run on the host. Contract samples on a GPU: test_tactics.py."""

import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
from test_tactics import HOPPER, judge_stored

from support.host_cluster import plan_on_host, run_on_host
from support.host_cuda import host_compiler
from whet.composites.response_norm import make_response_norm_sample
from whet.ops import sample_layer
from whet.tactics import PlanRefused, get_tactic
from whet.tactics.cuda.norm import reduce, response_norm

# : images, axis of the channels, shares of the pixels; the last one has channels for several rounds of the threads
CASES = [("f32[2,9,7,48]", 3, 5), ("f32[2,72,5,6]", 1, 1), ("f32[1,40,24]", 2, 3), ("f32[1,2,3,1032]", 3, 2)]


def layer_of(shape, channel):
    return sample_layer("Fused", make_response_norm_sample(shape, channel))[1:]


@pytest.mark.skipif(host_compiler() is None, reason="no C++ compiler")
def test_every_type_matches_the_reference_on_the_host(monkeypatch):
    tactic, launches, ran = get_tactic("cuda/response_norm"), [], []
    monkeypatch.setattr(reduce, "launch", lambda *operands, **options: response_norm.launch(*operands, **options))  # of the sums
    for shape, channel, shares in CASES:
        layer, arrays = layer_of(shape, channel)
        for signature in tactic.signatures(layer, HOPPER):
            more, *case = plan_on_host(monkeypatch, response_norm, tactic, layer, arrays, signature, (("shares", shares),), HOPPER)
            launches += more
            ran.append((layer, arrays, signature, *case))
    run_on_host(launches)
    assert len(ran) == 3 * len(CASES)
    for layer, arrays, signature, kernel, ins, outs, _memory in ran:
        judge_stored(layer, arrays, signature, kernel, ins, outs)


def test_shares_that_do_not_fit_are_refused():
    layer, _ = layer_of("f32[1,4,5,16]", 3)
    tactic = get_tactic("cuda/response_norm")
    signature = tactic.signatures(layer, HOPPER)[0]
    assert all(tactic.plan(layer, signature, c, HOPPER).scratch == 64 * dict(c)["shares"] for c in tactic.configs(layer, signature, HOPPER))
    for shares in (0, 21):
        with pytest.raises(PlanRefused):
            tactic.plan(layer, signature, (("shares", shares),), HOPPER)
