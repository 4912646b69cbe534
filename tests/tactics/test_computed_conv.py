"""Convolutions with weights and a bias that are computed at run time: groups, transposed ones, activations, a constant image."""

import numpy as np
import pytest

import whet
from whet.network import parse_network
from whet.ops import run_network
from whet.tactics.cpu.onednn import _api as dnn

pytestmark = pytest.mark.skipif(dnn.load_error() is not None, reason=str(dnn.load_error()))

NETWORKS = {
    "modulated": "in %s: f32[1,16,1,1]\nconst %w: f32[32,16,3,3] = seed(1)\nconst %x: f32[1,16,8,8] = seed(2)\n%m = Mul(%w, %s)\n"
                 "%c = Conv(%x, %m, pads=(1, 1, 1, 1))\n%y = LeakyRelu(%c, alpha=0.2)\nout %y\n",
    "grouped": "in %x: f32[2,12,9,7]\nin %w: f32[24,3,3,3]\nin %b: f32[24]\n%y = Conv(%x, %w, %b, group=4, strides=(2, 1))\nout %y\n",
    "depthwise": "in %x: f32[1,16,9,7]\nin %w: f32[16,1,3,3]\n%y = Conv(%x, %w, group=16, dilations=(2, 1))\nout %y\n",
    "samples as groups": "in %x: f32[1,48,8,8]\nin %w: f32[3,20,16,3,3]\n%k = Reshape(%w, shape=(60, 16, 3, 3))\n"
                         "%y = Conv(%x, %k, group=3, pads=(1, 1, 1, 1))\nout %y\n",
    "transposed": "in %x: f32[2,12,5,6]\nin %w: f32[12,4,4,4]\n%y = ConvTranspose(%x, %w, group=3, strides=(2, 2), pads=(1, 1, 1, 1))\nout %y\n",
    "one axis": "in %x: f32[1,8,30]\nin %w: f32[6,8,3]\n%y = Conv(%x, %w)\nout %y\n",
}  # fmt: skip


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", NETWORKS)
def test_no_part_is_left_to_numpy(name, threads):
    net = parse_network(NETWORKS[name])
    rng = np.random.default_rng(0)
    inputs = {t.name: rng.standard_normal(t.shape).astype(np.float32) for t in net.inputs}
    engine = whet.build(net, optimization_level=0, timing_cache="", threads=threads)
    assert {c.tactic for c in engine.plan.choices.values() if "numpy" in c.tactic} == set()
    for _ in range(2):  # the weights are packed at every run
        (got,), (want,) = engine.run(inputs).values(), run_network(net, inputs).values()
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
        inputs = {n: 2 * a for n, a in inputs.items()}
