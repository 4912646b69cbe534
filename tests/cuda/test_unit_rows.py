"""Rows divided by their norms: the kernel runs on the host. Contract samples on a GPU: test_tactics.py."""

import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
from test_tactics import HOPPER, judge_stored

from support.host_cluster import plan_on_host, run_on_host
from support.host_cuda import host_compiler
from whet.composites.unit_rows import make_unit_rows_sample
from whet.ops import sample_layer
from whet.tactics import get_tactic
from whet.tactics.cuda.norm import unit_rows

CASES = [
    make_unit_rows_sample("f32[2,3,17,32]", 1e-12, factor=(3, 1, 1)),
    make_unit_rows_sample("f32[2,5,49]", 1e-3),
    make_unit_rows_sample("f32[3,300]", 20.0, "Max"),
    make_unit_rows_sample("f32[2,1200]"),
    make_unit_rows_sample("f32[3,17000]", 1e-6, factor=(3, 1)),
]


@pytest.mark.skipif(host_compiler() is None, reason="no C++ compiler")
def test_every_type_matches_the_reference_on_the_host(monkeypatch):
    tactic, launches, ran = get_tactic("cuda/unit_rows"), [], []
    for sample in CASES:
        _, layer, arrays = sample_layer("Fused", sample)
        arrays[0].reshape(-1)[: arrays[0].shape[-1]] *= 1e-3  # a row whose norm is below the limit, or nearly
        for signature in tactic.signatures(layer, HOPPER):
            more, *case = plan_on_host(monkeypatch, unit_rows, tactic, layer, arrays, signature, (), HOPPER)
            launches += more
            ran.append((layer, arrays, signature, *case))
    run_on_host(launches)
    assert len(ran) == 3 * len(CASES)
    for layer, arrays, signature, kernel, ins, outs, _memory in ran:
        judge_stored(layer, arrays, signature, kernel, ins, outs)
