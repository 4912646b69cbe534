"""Turns an op's samples into layers and arrays."""

from __future__ import annotations

import zlib

import numpy as np

from whet.network import Layer, Network, Tensor, parse_type, static_shape
from whet.ops._base import OPS, Sample

#: arrays by (id of the sample, seed), with the sample, so that its id stays its own; under 1 MB for the samples of all ops
_ARRAYS: dict[tuple[int, str], tuple[Sample, list[np.ndarray | None]]] = {}


def sample_arrays(sample: Sample, seed: str = "") -> list[np.ndarray | None]:
    """The sample's input arrays, deterministic; the caller may write to them."""
    if (id(sample), seed) not in _ARRAYS:
        rng = np.random.default_rng(zlib.crc32(f"{seed}{sample.inputs!s}{sample.attrs!s}".encode()))
        _ARRAYS[id(sample), seed] = sample, [_draw_array(spec, rng) for spec in sample.inputs]
    return [None if a is None else a.copy() for a in _ARRAYS[id(sample), seed][1]]


def sample_layer(op_name: str, sample: Sample, *, opaque: bool = False) -> tuple[Network, Layer, list[np.ndarray | None]]:
    """A network of one layer for the sample, the layer, and the arrays of all its inputs (constants included)."""
    arrays = sample_arrays(sample, op_name)
    net = Network(op_name.lower())
    inputs: list[Tensor | None] = []
    for i, (spec, a) in enumerate(zip(sample.inputs, arrays, strict=True)):
        if a is None:
            inputs.append(None)
        elif isinstance(spec, str) and not spec.startswith("const "):
            inputs.append(net.add_input(f"x{i}", parse_type(spec.split()[-1])))
        else:
            inputs.append(net.constant(a, f"c{i}"))
    regions = sample.regions() if sample.regions else None
    layer = net.add_layer(OPS[op_name].name, inputs, dict(sample.attrs), regions=regions)
    for t in layer.outputs:
        net.mark_output(t)
    return net, layer, arrays


def _draw_array(spec, rng: np.random.Generator) -> np.ndarray | None:
    if spec is None or isinstance(spec, np.ndarray):
        return spec
    kind, _, text = spec.rpartition(" ")
    type_ = parse_type(text)
    shape = static_shape(type_.shape)
    dtype = type_.dtype.numpy
    if type_.dtype.kind == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if type_.dtype.kind in ("int", "uint"):
        if kind == "extreme":
            top = 2 ** (type_.dtype.bits - (type_.dtype.kind == "int"))
            low = -top if type_.dtype.kind == "int" else 0
            return rng.choice(np.array([low, top - 1, 0, 1], dtype=object), shape).astype(dtype)
        if kind == "full":
            bits, signed = type_.dtype.bits, type_.dtype.kind == "int"
            return rng.integers(-(2 ** (bits - 1)) if signed else 0, 2 ** (bits - signed), shape).astype(dtype)
        low, top = (0, 4) if type_.dtype.kind == "uint" else (-min(3, 2 ** (type_.dtype.bits - 1)), min(4, 2 ** (type_.dtype.bits - 1)))
        return rng.integers(low, top, shape).astype(dtype)
    a = rng.standard_normal(shape)
    if kind.endswith("positive"):
        a = np.abs(a) + 0.1
    a = a.astype(dtype)
    if kind in ("extreme", "nonfinite") and a.size:
        special = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40, 3e38, -3e38, 88.8, -88.8, 1e4, -1e4], np.float64)
        if kind == "nonfinite":
            special = special[np.abs(special) != 3e38]
        places = rng.permutation(a.size)[: min(a.size, len(special))]
        with np.errstate(over="ignore"):
            a.reshape(-1)[places] = special[: len(places)].astype(dtype)
    return a
