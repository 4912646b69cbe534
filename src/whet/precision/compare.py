"""Comparison of two runs of one model: the error of every common tensor, and the first differences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from whet.network import Network
from whet.precision.measures import compute_powers, to_decibels


@dataclass
class Row:
    """One tensor over all samples. `max_error` is max|a-b| / max|b|, `mean_error` is mean|a-b| / mean|b|; both of the worst sample."""

    tensor: str
    layer: str
    op: str
    type: str
    max_error: float
    mean_error: float
    snr_db: float
    differs: bool
    output: bool = False
    enters: bool = False  # differs although no input of its layer does
    note: str = ""


@dataclass
class Comparison:
    """All rows in execution order, and the tensors that only one run has."""

    rows: list[Row] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    tolerance: float = 0.0

    @property
    def first(self) -> Row | None:
        """The first tensor that differs."""
        return next((r for r in self.rows if r.differs), None)

    @property
    def matches(self) -> bool:
        """True if all outputs are within the tolerance (all tensors, if the runs have no common output)."""
        outputs = [r for r in self.rows if r.output] or self.rows
        return bool(outputs) and not any(r.differs for r in outputs)


def compare(
    net: Network, ours: Sequence[Mapping[str, np.ndarray]], theirs: Sequence[Mapping[str, np.ndarray]], tolerance: float, only: Iterable[str] = ()
) -> Comparison:
    """Compares values by name, in the order of the layers of `net`, over samples. `only` restricts the tensors."""
    found = Comparison(tolerance=tolerance)
    wanted = set(only)
    outputs = {t.name for t in net.outputs}
    differing: set[str] = set()
    for layer in net.layers:
        for t in layer.outputs:
            if wanted and t.name not in wanted:
                continue
            if any(t.name not in s for s in (*ours, *theirs)):
                found.missing.append(t.name)
                continue
            row = _make_row(t.name, layer.name, layer.op, [o[t.name] for o in ours], [o[t.name] for o in theirs], tolerance)
            row.output = t.name in outputs
            if row.differs:
                differing.add(t.name)
                row.enters = not any(x is not None and x.name in differing for x in layer.inputs)
            found.rows.append(row)
    return found


def _make_row(name: str, layer: str, op: str, a: list[np.ndarray], b: list[np.ndarray], tolerance: float) -> Row:
    worst, mean, signal, noise, note = 0.0, 0.0, 0.0, 0.0, ""
    for x, y in zip(a, b, strict=True):
        if x.shape != y.shape:
            return Row(name, layer, op, str(x.dtype), np.inf, np.inf, -np.inf, True, note=f"shape {list(x.shape)} against {list(y.shape)}")
        if x.dtype.kind not in "fV" and y.dtype.kind not in "fV":
            off = float(np.mean(x != y)) if x.size else 0.0
            worst, mean = max(worst, off), max(mean, off)
            note = f"{100 * off:.3g} % of the values differ" if off else note
            continue
        p, q = np.asarray(x, np.float64), np.asarray(y, np.float64)
        finite = np.isfinite(q)
        if not np.array_equal(finite, np.isfinite(p)) or not np.array_equal(p[~finite], q[~finite], equal_nan=True):
            worst, mean, noise, note = np.inf, np.inf, np.inf, "NaN or infinities on one side"
            continue
        if not finite.all():
            note = f"NaN or infinities in {100 * (1 - finite.mean()):.3g} % of both"
        e = np.abs(p[finite] - q[finite])
        if e.size:
            worst = max(worst, _share(float(e.max()), float(np.abs(q[finite]).max())))
            mean = max(mean, _share(float(e.mean()), float(np.abs(q[finite]).mean())))
            s, n = compute_powers(q, p)
            signal, noise = signal + s, noise + n
    return Row(name, layer, op, str(a[0].dtype), worst, mean, to_decibels(signal, noise), worst > tolerance, note=note)


def _share(error: float, size: float) -> float:
    return 0.0 if error == 0 else error / size if size else np.inf
