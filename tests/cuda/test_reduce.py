"""Reductions: the index walks reach exactly the elements of the op; kernels with shares of the elements run on the host, every op on a GPU.

Contract samples: test_tactics.py."""

from math import prod

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
from test_tactics import HOPPER, compute, judge, planned, reference

from support.host_cluster import plan_on_host, run_on_host
from support.host_cuda import host_compiler
from whet.network import Network, from_stored, parse_type, static_shape
from whet.ops import Sample, sample_layer
from whet.tactics import PlanRefused
from whet.tactics.cuda.norm import reduce
from whet.tactics.cuda.norm.reduce import OPS, Reduce, list_walks, vectorize_walks
from whet.tactics.cuda.pool import pool
from whet.tactics.cuda.pool.pool import Pool

# : shape, axes, vectorized walk: 1 the reduced elements, 2 the results, 0 neither
CASES = [
    ("[2,7,9,64]", (1, 2), 2), ("[1,96,48]", (1,), 2), ("[3,5,2048]", (2,), 1), ("[4,8,16,40]", (1, 3), 1), ("[4,6,5,24]", (0, 2), 2),
    ("[6,4096]", (0, 1), 1), ("[5,33]", (1,), 0), ("[7,12,3]", (1,), 0), ("[2,4,8,12,16]", (1, 3), 2),
]  # fmt: skip


def layer_of(shape, axes, op="ReduceSum"):
    return sample_layer(op, Sample([f"f32{shape}", np.array(axes)], {"keepdims": 0}))[1:]


def places(walk, eights):
    """Offsets of the elements of a walk, in order; a vectorized step covers eight elements."""
    sizes, steps = walk
    at = np.tensordot(np.indices(sizes), steps, (0, 0)).reshape(-1)
    return (at[:, None] + np.arange(8)).reshape(-1) if eights else at


@pytest.mark.parametrize(("shape", "axes", "wide"), CASES, ids=str)
def test_walks_reach_every_element_of_a_result_once(shape, axes, wide):
    layer, (x, _) = layer_of(shape, axes)
    kept, over, found = vectorize_walks(*list_walks(layer))
    assert found == wide
    results, elements = places(kept, wide == 2), places(over, wide == 1)
    got = x.reshape(-1)[results[:, None] + elements].sum(1, dtype=np.float64)
    np.testing.assert_allclose(got, reference(layer, [x, np.array(axes)])[0].reshape(-1), rtol=1e-4, atol=1e-4)
    assert len(np.unique(results[:, None] + elements)) == x.size
    tactic = Reduce()
    plan = tactic.plan(layer, tactic.signatures(layer, HOPPER)[0], (), HOPPER)
    assert ("eights" in plan.implementation) == (wide > 0)


def global_layer(op, image):
    """A global pooling layer, and its arrays."""
    return sample_layer(op, Sample([f"f32[{','.join(map(str, image))}]"]))[1:]


@pytest.mark.parametrize(
    ("shape", "axes", "least"),
    [("[1,64,300,300]", (2, 3), 2), ("[4000,1000]", (0,), 1), ("[3,1000000]", (1,), 40)],
)
def test_few_results_of_many_elements_are_shared_by_blocks(shape, axes, least):
    net, tactic = Network("sum"), Reduce()
    layer = net.add("ReduceSum", net.add_input("x", parse_type(f"f32{shape}")), net.constant(np.array(axes)), keepdims=0).maker
    signature = tactic.signatures(layer, HOPPER)[0]
    first, *shared = tactic.configs(layer, signature, HOPPER)
    assert first == ()
    assert tactic.plan(layer, signature, (), HOPPER).scratch == 0
    assert max(dict(c)["shares"] for c in shared) >= least
    for config in shared:
        kernel = tactic.plan(layer, signature, config, HOPPER)
        assert kernel.scratch == prod(static_shape(layer.outputs[0].shape)) * dict(config)["shares"] * 4


def test_wrong_shares_are_refused():
    layer, _ = layer_of("[3,40]", (1,))
    mean, _ = global_layer("GlobalAveragePool", (1, 8, 5, 5))
    for tactic, which, most in ((Reduce(), layer, 5), (Pool(), mean, 25)):
        signature = tactic.signatures(which, HOPPER)[0]
        tactic.plan(which, signature, (("shares", most),), HOPPER)
        for shares in (0, most + 1):
            with pytest.raises(PlanRefused):
                tactic.plan(which, signature, (("shares", shares),), HOPPER)


def on_host(monkeypatch, module, tactic, cases):
    """Runs (layer, arrays, shares) with every type on the host and judges the results."""
    launches, ran = [], []
    for layer, arrays, shares in cases:
        for signature in tactic.signatures(layer, HOPPER):
            config = (("shares", shares),) if shares > 1 else ()
            more, *case = plan_on_host(monkeypatch, module, tactic, layer, arrays, signature, config, HOPPER)
            assert len(more) == 1 + (shares > 1)
            launches += more
            ran.append((layer, arrays, signature, *case))
    run_on_host(launches)
    for layer, arrays, signature, kernel, ins, outs, _memory in ran:
        fed = [from_stored(ins[0], signature.inputs[0].format, arrays[0].shape).astype(arrays[0].dtype), *arrays[1:]]
        want = reference(layer, fed)[0]
        judge(from_stored(outs[0], signature.outputs[0].format, want.shape), want, kernel.rtol, signature.outputs[0].dtype, f"{layer.op} {signature}")


@pytest.mark.skipif(host_compiler() is None, reason="no C++ compiler")
def test_shares_of_every_op_match_the_reference_on_the_host(monkeypatch):
    cases = []
    for op in sorted(OPS):
        for shape, axes, shares in (("[2,33,16]", (1,), 3), ("[3,200]", (1,), 4), ("[2,45]", (1,), 1 if op == "ReduceMean" else 7)):
            if op.startswith("Global"):
                layer, arrays = global_layer(op, (2, 3, 9, 24))
            else:
                layer, arrays = layer_of(shape, axes, op)
            if op in ("ReduceLogSum", "ReduceProd"):
                arrays[0] = (1 + 0.01 * np.abs(arrays[0])).astype(np.float32)
            cases.append((layer, arrays, shares))
    on_host(monkeypatch, reduce, Reduce(), cases)


@pytest.mark.skipif(host_compiler() is None, reason="no C++ compiler")
def test_shares_of_a_mean_over_an_image_match_the_reference_on_the_host(monkeypatch):
    cases = [(*global_layer("GlobalAveragePool", image), shares) for image in ((2, 72, 19, 23), (1, 8, 40, 41)) for shares in (1, 3)]
    on_host(monkeypatch, pool, Pool(), cases)


@pytest.mark.gpu
@pytest.mark.parametrize("image", [(1, 48, 190, 190), (2, 144, 95, 95), (1, 24, 9, 1000)], ids=str)
def test_shares_of_a_mean_over_an_image(gpu, image):
    layer, arrays = global_layer("GlobalAveragePool", image)
    shared = 0
    for _, signature, config, kernel in planned(layer, gpu):
        got, fed = compute(gpu, layer, arrays, signature, kernel)
        judge(got[0], reference(layer, fed)[0], kernel.rtol, signature.outputs[0].dtype, f"{signature} {config}")
        shared += "shares" in dict(config)
    assert shared >= 9


@pytest.mark.gpu
@pytest.mark.parametrize("op", sorted(o for o in OPS if o.startswith("Reduce")))
@pytest.mark.parametrize(("shape", "axes"), [("[1,64,90,90]", (2, 3)), ("[20000,40]", (0,)), ("[3,100003]", (1,))], ids=str)
def test_shares_of_every_op(gpu, op, shape, axes):
    layer, arrays = layer_of(shape, axes, op)
    if op in ("ReduceLogSum", "ReduceProd"):
        arrays[0] = (1 + 1e-5 * np.abs(arrays[0])).astype(np.float32)
    shared = 0
    for t, signature, config, kernel in planned(layer, gpu):
        if t.name == "cuda/reduce":
            got, fed = compute(gpu, layer, arrays, signature, kernel)
            judge(got[0], reference(layer, fed)[0], kernel.rtol, signature.outputs[0].dtype, f"{signature} {config}")
            shared += "shares" in dict(config)
    assert shared >= (1 if op == "ReduceProd" else 3)


@pytest.mark.gpu
@pytest.mark.parametrize("op", sorted(o for o in OPS if o.startswith("Reduce")))
@pytest.mark.parametrize(("shape", "axes", "wide"), CASES, ids=str)
def test_every_op_along_every_axis(gpu, op, shape, axes, wide):
    layer, arrays = layer_of(shape, axes, op)
    if op in ("ReduceLogSum", "ReduceProd"):  # logarithms of positive sums; products that stay in range
        arrays[0] = (1 + 0.01 * np.abs(arrays[0])).astype(np.float32)
    ran = 0
    for t, signature, config, kernel in planned(layer, gpu):
        if t.name == "cuda/reduce":
            got, fed = compute(gpu, layer, arrays, signature, kernel)
            judge(got[0], reference(layer, fed)[0], kernel.rtol, signature.outputs[0].dtype, f"{signature} {config}")
            ran += 1
    assert ran == (1 if op == "ReduceProd" else 3)
