"""Images from planes to interleaved channels: all channel counts, tails, several threads and items, rounding to bf16 and f16, NaN and infinities."""

import numpy as np
import pytest
from test_onednn_tactics import CPU, compute

from whet.network import DTYPES, Network, parse_type
from whet.tactics import get_tactic
from whet.tactics.cpu._llvm import jit

pytestmark = pytest.mark.skipif(jit.why_unavailable() is not None, reason=str(jit.why_unavailable()))


def reformat_layer(shape, dtype="bf16", **changed):
    net = Network("images")
    x = net.add_input("x", parse_type(f"f32[{','.join(map(str, shape))}]"))
    attrs = {"source_format": "linear", "format": "nhwc", "source_dtype": "f32", "dtype": dtype} | changed
    net.mark_output(net.add("Reformat", x, **attrs), "y")
    return net.layers[0]


@pytest.mark.parametrize("shape", [(1, 3, 5, 7), (2, 3, 64, 65), (1, 2, 1, 16), (3, 4, 9, 31), (1, 3, 130, 131), (2, 3, 17), (1, 4, 3, 5, 7)])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_every_pixel_is_moved(shape, dtype):
    layer, tactic = reformat_layer(shape, dtype), get_tactic("cpu/interleave_image")
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    special = [np.nan, np.inf, -np.inf, 0.0, -0.0, 3.4e38, 1e-40, 1 + 2**-8, 1 + 3 * 2**-8]
    x.reshape(-1)[: len(special)] = special[: x.size]
    (signature,) = tactic.signatures(layer, CPU)
    assert signature.outputs[0].dtype.name == dtype
    _, (got,), _ = compute(layer, [x], tactic, signature, ())
    with np.errstate(over="ignore"):
        want = x.astype(DTYPES[dtype].numpy).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(got, np.float32), want)


@pytest.mark.parametrize("other", [{"format": "nChw16c"}, {"source_format": "nhwc", "format": "linear"}, {"source_dtype": "bf16"}, {"dtype": "i32"}])
def test_other_reformats_are_refused(other):
    tactic = get_tactic("cpu/interleave_image")
    assert "from row-major to channels last" in tactic.why_not(reformat_layer((1, 3, 5, 7), **other))
    assert "channels" in tactic.why_not(reformat_layer((1, 5, 5, 7)))
    assert tactic.signatures(reformat_layer((1, 5, 5, 7)), CPU) == []
