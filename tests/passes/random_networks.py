"""Random networks and inputs for them, from a seed; and the comparison of answers. For tests of passes, builder and runtime."""

from __future__ import annotations

import zlib

import numpy as np

from whet.network import Network, TensorType, evaluate

#: values of symbols in tests
SIZES = {"N": 2, "H": 8, "W": 6, "S": 5}


def feeds(net: Network, seed: int = 0, *, extreme: bool = False, sizes: dict[str, int] | None = None) -> dict[str, np.ndarray]:
    """Arrays for the inputs of `net`: normal numbers, small integers; `extreme` puts NaN, infinities and signed zeros among them."""
    env = {**SIZES, **(sizes or {})}
    return {t.name: _array(t.name, t.type, env, seed, extreme) for t in net.inputs}


def _array(name: str, type_: TensorType, env: dict[str, int], seed: int, extreme: bool) -> np.ndarray:
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    shape = tuple(evaluate(d, env) for d in type_.shape)
    if type_.dtype.kind == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if not type_.dtype.is_float:
        return rng.integers(0, 2, shape).astype(type_.dtype.numpy)
    a = rng.standard_normal(shape).astype(type_.dtype.numpy)
    if extreme:
        special = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40, 3e38, -3e38], np.float64)
        places = rng.permutation(a.size)[: max(1, a.size // 20)]
        with np.errstate(over="ignore"):
            a.reshape(-1)[places] = rng.choice(special, len(places)).astype(a.dtype)
    return a


def same(want: np.ndarray, got: np.ndarray, rtol: float) -> None:
    """Asserts equal type and shape, and values equal to `rtol` of the largest (0: to the last bit). NaN equals NaN."""
    assert want.dtype == got.dtype
    assert want.shape == got.shape
    if rtol == 0 or want.dtype.kind not in "fV":
        np.testing.assert_array_equal(got, want)
        return
    w, g = want.astype(np.float64), got.astype(np.float64)
    rest = np.isfinite(w)
    np.testing.assert_array_equal(g[~rest], w[~rest])
    if rest.any():
        scale, off = float(np.abs(w[rest]).max()), float(np.abs(g[rest] - w[rest]).max())
        assert off <= rtol * max(scale, 1e-30), f"differs by {off} of {scale}"
