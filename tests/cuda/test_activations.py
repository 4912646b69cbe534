"""GELU of kernels with 16-bit results: the polynomial in common.cuh against the error function, for every float16."""

import re
from math import erf, isnan

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
from whet.tactics.cuda._device.source import list_kernel_paths

TEXT = list_kernel_paths()["common.cuh"].read_text()
HALVES = np.arange(1 << 16, dtype=np.uint16).view(np.float16)


def device(name, x):
    """The body of a device function of one value as NumPy evaluates it in float32, its tanh exact."""
    body = re.search(rf"DEV float {name}\(float x\) \{{(.*?)\n?\}}", TEXT, re.S)[1]
    names = {"x": x, "fmaf": lambda a, b, c: np.float32(a) * np.float32(b) + np.float32(c), "fminf": np.fmin, "np": np}
    names["gelu_of"] = lambda value, t: np.float32(0.5) * value * (1 + np.tanh(t))
    for line in filter(None, (s.strip() for s in body.split(";"))):
        line = re.sub(r"(?<=[\d.])f\b", "", line)
        if line.startswith("const float "):
            target, _, value = line.removeprefix("const float ").partition(" = ")
            names[target] = eval(value, names)
        else:
            return eval(line.removeprefix("return "), names)
    raise AssertionError(f"{name} returns nothing")


@pytest.mark.parametrize(("name", "exact"), [
    ("gelu_16bit", lambda v: 0.5 * v * (1 + erf(v / 2**0.5))),
    ("gelu_tanh_16bit", lambda v: 0.5 * v * (1 + np.tanh((2 / np.pi) ** 0.5 * (v + 0.044715 * v**3)))),
])  # fmt: skip
def test_gelu_is_within_a_fraction_of_rounding(name, exact):
    x = HALVES[np.isfinite(HALVES)].astype(np.float32)
    got = device(name, x)
    want = np.array([exact(float(v)) for v in x])
    assert np.abs(got - want).max() < 2.7e-5
    assert device(name, np.float32(np.inf)) == np.inf
    assert isnan(device(name, np.float32(np.nan)))
