"""DeformConv by a compiled kernel: groups, strides, dilations, pads, masks, positions far outside and not finite, threads."""

import numpy as np
import pytest
from test_compiled_kernels import JIT
from test_onednn_tactics import compute

from whet.backends.cpu import CpuBackend
from whet.network import Network, parse_type
from whet.ops import run_layer
from whet.tactics import get_tactic, load_tactic

pytestmark = JIT
RNG = np.random.default_rng(13)


def make_input(net, i, a, constant):
    return net.constant(a) if constant else net.add_input(f"x{i}", parse_type(f"f32[{','.join(map(str, a.shape))}]"))


def check(shape, weights, threads, monkeypatch, *, bias=False, mask=False, spread=2.0, constant=True, change=None, **attrs):
    """Compares with the reference; `change(image, offsets)` may change values first."""
    (n, c, h, w), (k, _, kh, kw) = shape, weights
    strides, dilations, pads = attrs.get("strides", (1, 1)), attrs.get("dilations", (1, 1)), attrs.get("pads", (0, 0, 0, 0))
    out = [(d + pads[i] + pads[2 + i] - dilations[i] * (kernel - 1) - 1) // strides[i] + 1 for i, (d, kernel) in enumerate(((h, kh), (w, kw)))]
    taps = attrs.get("offset_group", 1) * kh * kw
    arrays = [
        RNG.standard_normal(shape), RNG.standard_normal(weights) / np.sqrt(c * kh * kw), RNG.uniform(-spread, spread, (n, 2 * taps, *out)),
        RNG.standard_normal(k) if bias else None, RNG.random((n, taps, *out)) if mask else None,
    ]  # fmt: skip
    arrays = [None if a is None else a.astype(np.float32) for a in arrays]
    if change is not None:
        change(arrays[0], arrays[2])
    net = Network("net", "lowered")
    inputs = [None if a is None else make_input(net, i, a, constant and i in (1, 3)) for i, a in enumerate(arrays)]
    layer = net.add_layer("DeformConv", inputs, attrs)
    load_tactic("cpu/deform_conv")
    machine, tactic = CpuBackend(threads=threads), get_tactic("cpu/deform_conv")
    monkeypatch.setattr("test_onednn_tactics.CPU", machine)
    (signature,) = tactic.signatures(layer, machine)
    monkeypatch.setattr(type(tactic.plan(layer, signature, (), machine)), "serial_work", 0)
    with np.errstate(all="ignore"):
        _, (got,), _ = compute(layer, arrays, tactic, signature, ())
        (want,) = run_layer(layer, arrays)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5, equal_nan=True)
    return want


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("mask", [False, True])
def test_results_are_the_references(mask, bias, threads, monkeypatch):
    """Several blocks of positions, a part of a vector, kernels with and without a rest of rows; computed weights."""
    check((1, 3, 13, 11), (6, 3, 3, 3), threads, monkeypatch, bias=bias, mask=mask, pads=(1, 1, 1, 1))
    check((2, 4, 9, 9), (8, 2, 3, 2), threads, monkeypatch, bias=bias, mask=mask, group=2, offset_group=2, strides=(2, 1), pads=(1, 0, 0, 1))
    check((1, 6, 8, 5), (3, 2, 1, 3), threads, monkeypatch, bias=bias, mask=mask, group=3, dilations=(1, 2), constant=False)


def test_positions_outside_of_the_image(monkeypatch):
    """They are zeros, also where the nearest pixel is infinite; offsets may be infinite or NaN."""

    def change(image, offsets):
        image[:, :, 0, 0], image[:, :, -1, -1], image[0, 1, 3, 3] = np.inf, -np.inf, np.nan
        offsets.reshape(-1)[:8] = [np.inf, -np.inf, np.nan, 1e30, -1e30, 2.0**33, -0.0, 0.5]

    want = check((1, 2, 7, 7), (4, 2, 3, 3), 1, monkeypatch, spread=9.0, change=change, pads=(1, 1, 1, 1))
    assert np.isnan(want).any()
    assert not np.isnan(want).all()
