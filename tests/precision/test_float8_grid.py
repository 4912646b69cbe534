"""Rounding to e4m3 by the sum with a large number: the same values as the conversion of types."""

import numpy as np

from whet.network import F8E4M3, F32, Network, TensorType
from whet.ops.quantize_linear import LARGEST
from whet.precision.insert import compute_float8_weight_scales, round_to_e4m3, round_to_float8_grid


def test_every_power_of_two_rounds_as_the_conversion():
    rng = np.random.default_rng(0)
    values = [np.float32(m) * np.exp2(np.arange(-30, 12, dtype=np.float32)) for m in (*np.arange(1, 2, 1 / 64), *rng.uniform(1, 2, 200))]
    a = np.concatenate([*values, -values[3], [0.0, 448, 464, 480, 1e30, 2**-9, 2**-10, 3 * 2**-11, 2**-149]]).astype(np.float32)
    assert np.array_equal(round_to_float8_grid(a), round_to_e4m3(a))
    halves = (np.arange(256, dtype=np.uint8).view(F8E4M3.numpy)).astype(np.float32)
    halves = np.sort(halves[np.isfinite(halves)])
    ties = (halves[1:] + halves[:-1]) / 2
    for near in (ties, np.nextafter(ties, np.float32(500)), np.nextafter(ties, np.float32(-500))):
        assert np.array_equal(round_to_float8_grid(near), round_to_e4m3(near))


def test_scales_in_blocks_have_the_least_error():
    rng, net = np.random.default_rng(1), Network("one")
    w = (rng.standard_normal((300, 700)) * np.exp2(rng.integers(-6, 6, 700))).astype(np.float32)
    layer = net.add_layer("MatMul", [net.add_input("x", TensorType(F32, (1, 300))), net.constant(w, "w")], {})
    scales = compute_float8_weight_scales(layer, w)
    first = np.abs(w).max(axis=0) / LARGEST[F8E4M3]
    errors = np.stack([((round_to_e4m3(w / s) * s - w).astype(np.float64) ** 2).sum(axis=0) for s in (first * 2 ** (i / 8) for i in range(8))])
    found = ((round_to_e4m3(w / scales) * scales - w).astype(np.float64) ** 2).sum(axis=0)
    assert scales.shape == (700,)
    np.testing.assert_allclose(found, errors.min(axis=0), rtol=1e-4)
