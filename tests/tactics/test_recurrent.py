"""The kernel of LSTM, GRU and RNN: lengths of sequences that are known only at run time, and both variants of GRU."""

import numpy as np
import pytest
from test_onednn_tactics import CPU, compute

from whet.network import Network, parse_type
from whet.ops import run_layer
from whet.tactics import get_tactic, load_tactic
from whet.tactics.cpu._llvm import jit

if jit.why_unavailable():
    pytest.skip(jit.why_unavailable() or "", allow_module_level=True)
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("layout", [0, 1])
@pytest.mark.parametrize(("op", "attrs"), [("LSTM", {}), ("GRU", {"linear_before_reset": 0}), ("GRU", {"linear_before_reset": 1}), ("RNN", {})])
def test_lengths_are_read_at_run_time(op, attrs, layout, direction):
    """Also lengths that no step or all steps have, and those out of range."""
    rng, net = np.random.default_rng(5), Network("net", "lowered")
    steps, batch, size, units, directions = 7, 6, 5, 18, 2 if direction == "bidirectional" else 1
    shapes = [(directions, GATES[op] * units, size), (directions, GATES[op] * units, units), (directions, 2 * GATES[op] * units)]
    weights = [rng.standard_normal(s).astype(np.float32) / 2 for s in shapes]
    x = rng.standard_normal((batch, steps, size) if layout else (steps, batch, size)).astype(np.float32)
    lengths = np.array([7, 0, 3, 1, 9, -2], np.int32)
    inputs = [
        net.add_input("x", parse_type(f"f32[{','.join(map(str, x.shape))}]")), *(net.constant(w) for w in weights),
        net.add_input("lengths", parse_type(f"i32[{batch}]")),
    ]  # fmt: skip
    layer = net.add_layer(op, inputs, {"direction": direction, "layout": layout, **attrs})
    load_tactic("cpu/recurrent")
    tactic = get_tactic("cpu/recurrent")
    (signature,) = tactic.signatures(layer, CPU)
    arrays = [x, *weights, lengths]
    _, got, _ = compute(layer, arrays, tactic, signature, tactic.configs(layer, signature, CPU)[0])
    for a, b in zip(got, run_layer(layer, arrays), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
        assert not a[b == 0].any()  # what memory held before is small
