"""Pruning of networks with each operation between two convolutions: groups, branches, scores, the cut, the fit and the pattern.

Rules that name an operation (an Add ends a branch, a BatchNormalization is reestimated) meet all others here too, and must treat them as recorded.
After an intended change: `WHET_UPDATE_GOLDEN=1 pytest tests/pruning/test_every_op.py`, and review the diff.
"""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from whet.errors import WhetError
from whet.network import Layer, parse_network
from whet.ops import OPS, infer_layer, run_network
from whet.pruning import Samples, apply_pattern, branches, count_flops, count_params, cut, groups, importance, recover
from whet.pruning.order import check_order
from whet.sparsity import parse_pattern

UPDATE = os.environ.get("WHET_UPDATE_GOLDEN") == "1"
GOLDEN = Path(__file__).parents[1] / "golden" / "groups" / "every_op.json"
DATA = {"x": np.random.default_rng(0).standard_normal((6, 3, 4, 4)).astype(np.float32)}
HEAD = """network n source
in %x: f32[N,3,4,4]
const %w: f32[4,3,1,1] = seed(1)
const %u: f32[4,4,1,1] = seed(2)
const %z: f32[2,4,1,1] = seed(3)
const %c: f32[4,1,1] = [0.5, 1.5, 2.0, 0.75]
const %v: f32[4] = [0.5, 1.25, 2.0, 0.75]
const %m: f32[4,4] = seed(4)
const %n: f32[1] = [0.25]
%a = Conv(%x, %w)
%r = Relu(%a)
%b = Conv(%r, %u)
out %b
"""
TENSORS = {t.name: t for t in parse_network(HEAD).tensors()}
OPERANDS = ("b", "b a", "b c", "c b", "b c c", "b v v", "b v v v v", "b m", "b u", "b u v", "b n n")
KINDS = ("bn_scale", "activation", "taylor1", "reconstruction", "weighted_reconstruction")


def network(op, operands, attrs):
    """Two convolutions, the operation on these tensors, and a third convolution of its result; None if the operation does not take them."""
    try:
        types, _ = infer_layer(Layer(op, "t", [TENSORS[name] for name in operands.split()], attrs))
        if [str(t) for t in types] != [str(TENSORS["b"].type)]:
            return None
        net = parse_network(HEAD)
        tensors = {t.name: t for t in net.tensors()}
        t = net.add_layer(op, [tensors[name] for name in operands.split()], attrs, name="t").output
        y = net.add_layer("Conv", [t, tensors["z"]], name="y").output
        net.outputs.clear()
        net.mark_output(y)
        run_network(net, DATA)
    except WhetError:
        return None
    return net


def describe(net):
    """Names and figures."""
    found, blocks = groups(net), branches(net)
    facts = {
        "groups": [[g.name, g.size, list(g.layers)] for g in found],
        "branches": [[b.name, list(b.layers)] for b in blocks],
        "counts": [count_flops(net, {"N": 1}), count_params(net)],
    }
    try:
        check_order(net, "prune")
    except WhetError as e:
        facts["order"] = str(e).split(",")[0]
    for kind in KINDS:
        try:
            scores = importance(found, kind, net=net, samples=Samples(DATA), blocks=blocks)
            facts[kind] = [float(s @ np.arange(1, len(s) + 1)) for s in scores.values()]
        except WhetError as e:
            facts[kind] = str(e).split(":")[0]
    try:
        kept = {g.name: np.arange(max(1, g.size // 2)) for g in found}
        small = cut(net, kept, found)
        facts["cut"] = [count_params(small), float(np.abs(run_network(small, DATA)["y"]).sum())]
        facts["fit"] = float(np.abs(run_network(recover(small, net, kept, DATA), DATA)["y"]).sum())
    except WhetError as e:
        facts["cut"] = str(e).split(":")[0]
    try:
        done = apply_pattern(net, parse_pattern("2:4", 0), DATA)
        facts["pattern"] = [list(done.removed), list(done.refitted)]
    except WhetError as e:
        facts["pattern"] = str(e).split(":")[0]
    return facts


def cases():
    for op in sorted(OPS):
        if any(word in op for word in ("Random", "Bernoulli", "Multinomial", "Dropout")):
            continue
        seen = set()
        for attrs in ({}, *(dict(s.attrs) for s in OPS[op].samples[:2] if s.attrs)):
            for operands in OPERANDS:
                if operands not in seen and (net := network(op, operands, attrs)) is not None:
                    seen.add(operands)
                    yield f"{op}({operands})", net


@pytest.fixture(scope="module")
def descriptions():
    with np.errstate(all="ignore"):
        return {title: describe(net) for title, net in cases()}


def agree(want, got):
    if isinstance(want, list) and isinstance(got, list):
        return len(want) == len(got) and all(agree(a, b) for a, b in zip(want, got, strict=True))
    if isinstance(want, float) and isinstance(got, float):
        return bool(np.isclose(want, got, rtol=2e-3, atol=1e-6, equal_nan=True))
    return want == got


def test_operations_are_treated_as_recorded(descriptions):
    if UPDATE:
        short = json.loads(json.dumps(descriptions), parse_float=lambda x: float(f"{float(x):.5g}"))
        lines = (f"{json.dumps(title)}: {json.dumps(facts)}" for title, facts in short.items())
        GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    recorded = json.loads(GOLDEN.read_text())
    assert list(recorded) == list(descriptions)
    off = [f"{title}, {k}: {want} is now {descriptions[title].get(k)}" for title, facts in recorded.items() for k, want in facts.items()
           if not agree(want, descriptions[title].get(k))]  # fmt: skip
    assert not off, "\n".join(off[:10])
    assert all(facts.keys() == descriptions[title].keys() for title, facts in recorded.items())
