"""The probe: seeded inputs with the outputs of the verified engine. It runs at first load on other hardware or with other libraries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from whet.engine.plan import EnginePlan
from whet.network import Network, static_shape

_VALUES = 256  # values stored per output


def probe_inputs(network: Network, seed: int, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Inputs of these shapes from `seed`, equal on every machine: normally distributed floats, 0 or 1 for integers and bool."""
    rng = np.random.RandomState(seed)  # its sequence is frozen; Generator's may change between NumPy versions
    inputs = {}
    for t in network.inputs:
        shape = tuple(shapes[t.name])
        a = rng.randn(*shape) if t.dtype.is_float else rng.randint(0, 2, shape)
        inputs[t.name] = np.asarray(a).astype(t.dtype.numpy)
    return inputs


def probe_shapes(plan: EnginePlan) -> dict[str, tuple[int, ...]]:
    """The opt shapes of profile 0, or the static ones."""
    given = plan.profiles[0].shapes if plan.profiles else {}
    return {t.name: tuple(given[t.name][1]) if t.name in given else static_shape(t.shape) for t in plan.network.inputs}


def make_probe(plan: EnginePlan, outputs: Mapping[str, np.ndarray], *, seed: int = 0, rtol: float = 1e-3) -> dict[str, Any]:
    """The contents of `plan.probe`: the outputs of `probe_inputs(plan.network, seed, probe_shapes(plan))`, as shape, norm and up to 256 values.

    `rtol` bounds ||error|| / ||expected|| over the stored values: set it to the verification bound of the network.
    """
    kept = {}
    for name, a in outputs.items():
        flat = np.asarray(a).reshape(-1)
        values = [float(v) if np.isfinite(v) else None for v in flat[_sample_indices(flat.size)].astype(np.float64)]
        kept[name] = {"shape": list(np.shape(a)), "values": values}
    return {
        "seed": int(seed),
        "rtol": float(rtol),
        "shapes": {k: list(v) for k, v in probe_shapes(plan).items()},
        "outputs": kept,
    }


def probe_differs(probe: Mapping[str, Any], outputs: Mapping[str, np.ndarray]) -> str | None:
    """A description of the first output that differs from the expected one by more than the probe's bound; None without a difference."""
    for name, want in probe["outputs"].items():
        got = outputs.get(name)
        if got is None or list(got.shape) != list(want["shape"]):
            return f"output '{name}' has shape {None if got is None else list(got.shape)}, expected {want['shape']}"
        flat = np.asarray(got).reshape(-1)
        a, b = flat[_sample_indices(flat.size)].astype(np.float64), np.array([np.nan if v is None else v for v in want["values"]], np.float64)
        finite = np.isfinite(b)
        if not np.array_equal(finite, np.isfinite(a)):
            return f"output '{name}' has NaN or infinite values at other indices"
        norm = float(np.linalg.norm(b[finite])) or 1.0
        error = float(np.linalg.norm(a[finite] - b[finite])) / norm
        if error > probe["rtol"]:
            return f"output '{name}' differs by {error:.2g} (relative), allowed is {probe['rtol']:.2g}"
    return None


def _sample_indices(size: int) -> np.ndarray:
    return np.unique(np.linspace(0, max(size - 1, 0), min(size, _VALUES)).astype(np.int64)) if size else np.empty(0, np.int64)
