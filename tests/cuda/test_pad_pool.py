"""Padding and pooling along any axes: the kernels' arithmetic in NumPy, machine code, refusals. Contract samples run on a GPU (test_tactics.py)."""

import re
from itertools import product
from math import prod

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
from test_compile import sass
from test_tactics import HOPPER, reference

from whet.backends.cuda.compile import compile_cubin
from whet.network import static_shape
from whet.ops import OPS, Sample, sample_layer
from whet.ops.pad import pad_amounts
from whet.tactics import Args
from whet.tactics.cuda._device.source import emit_kernel_source
from whet.tactics.cuda.move import pad as pad
from whet.tactics.cuda.move.pad import Pad
from whet.tactics.cuda.pool import pool_generic
from whet.tactics.cuda.pool.pool_generic import PoolGeneric

MODES = {"constant": 0, "edge": 1, "reflect": 2, "wrap": 3}


@pytest.mark.parametrize("sample", [s for s in OPS["Pad"].samples if not str(s.inputs[0]).startswith("extreme")], ids=str)
def test_index_arithmetic_of_padding(sample):
    _, layer, arrays = sample_layer("Pad", sample)
    x, y = arrays[0], reference(layer, arrays)[0]
    mode, value = MODES[layer.attrs["mode"]], 0 if len(arrays) < 3 or arrays[2] is None else arrays[2]
    axes = pad.list_pad_axes(x.shape, y.shape, pad_amounts(layer))
    assert prod(a[1] for a in axes) == y.size
    got = []
    for at in product(*(range(a[1]) for a in axes)):
        start, inside = 0, True
        for o, (stride, _, before, low, high) in zip(at, axes, strict=True):
            i = o - before
            if mode == 0:
                inside = inside and low <= i < high
            elif mode == 1:
                i = max(low, min(i, high - 1))
            elif mode == 2:
                i = 2 * low - i if i < low else 2 * (high - 1) - i if i >= high else i
            else:
                i = i + high - low if i < low else i - (high - low) if i >= high else i
            start += i * stride
        got.append(x.reshape(-1)[start] if inside else value)
    np.testing.assert_array_equal(np.reshape(got, y.shape), y)


@pytest.mark.parametrize(("last", "pads", "unit"), [(8, 0, 16), (12, 0, 8), (6, 0, 4), (5, 0, 2), (8, 1, 2)])
def test_adjacent_elements_move_as_one(last, pads, unit, monkeypatch):
    """The kernel's steps in NumPy, on units of several elements; single ones if the last axis is padded."""
    monkeypatch.setattr(pad, "launch", lambda entry, arguments, *_: arguments)
    x, value = np.arange(6 * last, dtype=np.float16).reshape(2, 3, last), np.array(1.5, np.float16)
    _, layer, _ = sample_layer("Pad", Sample([f"f16[2,3,{last}]", None, value], {"pads": (0, 1, 0, 0, -1, pads)}))
    kernel = Pad().plan(layer, Pad().signatures(layer, HOPPER)[0], (), HOPPER)
    assert kernel.implementation == f"pad x{unit}"
    (made,) = kernel.launches(Args((0, 0, 0), (0,), (), 0))
    units, filling = x.reshape(-1).view(f"V{unit}"), np.frombuffer((made.value.to_bytes(8, "little") * 2)[:unit], f"V{unit}")[0]
    got = []
    for at in product(*map(range, made.size)):
        places = [i - before for i, before in zip(at, made.before, strict=True)]
        inside = all(low <= i < high for i, low, high in zip(places, made.low, made.high, strict=True))
        got.append(units[sum(i * n for i, n in zip(places, made.stride, strict=True))] if inside else filling)
    assert len(got) == made.count
    want = np.pad(x[:, :-1], ((0, 0), (1, 0), (0, pads)), constant_values=1.5)
    np.testing.assert_array_equal(np.array(got, f"V{unit}").view(np.float16).reshape(want.shape), want)


@pytest.mark.parametrize("op", ["MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool"])
def test_index_arithmetic_of_pooling(op):
    for sample in OPS[op].samples:
        _, layer, arrays = sample_layer(op, sample)
        x = arrays[0]
        if len(layer.outputs) != 1 or x.dtype.kind != "f" or not np.isfinite(x).all() or not 3 <= x.ndim <= 5:
            continue
        y = reference(layer, arrays)[0]
        size, out, kernel, stride, before, after, dilation = pool_generic.list_pool_axes(layer, x.shape, static_shape(layer.outputs[0].shape))
        planes = x.reshape(-1, *size)
        got = np.empty((len(planes), *out))
        for at in product(*map(range, out)):
            found, counted = [], 0
            for tap in product(*map(range, kernel)):
                place = [o * s - b + t * d for o, s, b, t, d in zip(at, stride, before, tap, dilation, strict=True)]
                inside = all(0 <= p < n for p, n in zip(place, size, strict=True))
                padded = all(p < n + a for p, n, a in zip(place, size, after, strict=True))
                counted += padded if layer.attrs.get("count_include_pad") else inside
                if inside:
                    found.append(planes[(slice(None), *place)])
            got[(slice(None), *at)] = np.max(found, 0) if "Max" in op else np.sum(found, 0) / counted
        rough = 2e-3 if y.dtype == np.float16 else 1e-5
        np.testing.assert_allclose(got.reshape(y.shape), y, rtol=rough, atol=rough)


@pytest.mark.parametrize(
    ("name", "constants"),
    [
        ("pad.cu", {"UNIT": 2, "MODE": 0}),
        ("pad.cu", {"UNIT": 8, "MODE": 3}),
        ("pad.cu", {"UNIT": 16, "MODE": 0}),
        ("pool_generic.cu", {"TYPE": 1, "MAX": 1, "PADDED": 0, "LAST": 1}),
        ("pool_generic.cu", {"TYPE": 0, "MAX": 0, "PADDED": 1, "LAST": 0}),
    ],
)
def test_machine_code(name, constants, tmp_path):
    assert not re.search(r"\b(LDL|STL)\b", sass(compile_cubin(emit_kernel_source(name, constants)), tmp_path)), "no register spills"


def test_refusals_say_why():
    _, around, _ = sample_layer("Pad", Sample(["f32[3,4]", np.array([0, -2, 0, 3])], {"mode": "wrap"}))
    assert "at most one period" in Pad().refuses(around, Pad().signatures(around, HOPPER)[0], HOPPER)
    _, flat, _ = sample_layer("Pad", Sample(["f32[1,1,1,1,1,1,2]"], {"pads": (0,) * 13 + (1,)}))
    assert "six axes" in Pad().why_not(flat) or "6 axes" in Pad().why_not(flat)
    _, norm, _ = sample_layer("Softmax", OPS["Softmax"].samples[0])
    assert "Softmax" in PoolGeneric().why_not(norm)
