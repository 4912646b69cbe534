"""Vectorized reductions: the index walks reach exactly the elements of the op; on a GPU every op (contract samples: test_tactics.py)."""

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
from test_tactics import HOPPER, compute, judge, planned, reference

from whet.ops import Sample, sample_layer
from whet.tactics.cuda.norm.reduce import OPS, Reduce, list_walks, vectorize_walks

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


@pytest.mark.gpu
@pytest.mark.parametrize("op", sorted(OPS))
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
