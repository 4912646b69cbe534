"""Sensitivity analysis: the SNR of the outputs with one layer in low precision, and with it and all less sensitive layers.

One pass over the samples with every layer rounded gives the SNR of each tensor; then each layer is rounded alone. Results are stored in an
optional file, keyed by everything that they depend on, so that an interrupted analysis resumes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from whet.errors import CacheError, CalibrationError, NetworkError
from whet.files import read_json_text, replace_atomically
from whet.network import Network, format_network
from whet.precision.calibrate import Feeds, Run, compute_content_digest
from whet.precision.concurrent import map_concurrently
from whet.precision.emulate import emulate_network, list_candidates
from whet.precision.measures import EXACT_DB, Values, compute_output_snr, compute_powers, to_decibels
from whet.precision.ranges import Ranges

RunOf = Callable[[Network, list[str]], Run]
"""(network, names of the requested tensors) -> run(sample)."""


@dataclass
class LayerSensitivity:
    """Sensitivity of one layer, SNR in dB: `alone_db` of the network outputs with only this layer rounded; `from_here_db` with this layer and
    all less sensitive ones (in the first row: the whole network); `tensor_db` of the layer's own output with everything rounded. Times in
    ms, if engines were timed: in FP32 and in low precision."""

    layer: str
    op: str
    alone_db: float
    from_here_db: float | None = None
    tensor_db: float | None = None
    float_ms: float | None = None
    low_ms: float | None = None

    @property
    def noise(self) -> float:
        """Noise-to-signal power ratio at the outputs with only this layer rounded."""
        return 0.0 if self.alone_db >= EXACT_DB else float(10 ** (-self.alone_db / 10))

    @property
    def saved_ms(self) -> float | None:
        """Time that low precision saves in ms; None if no engine was timed."""
        return None if self.float_ms is None or self.low_ms is None else self.float_ms - self.low_ms


class Analysis:
    """Sensitivity of the layers of `net` (source stage, batch norms folded) to `precision`, on `samples`; `file` stores results.

    Raises UsageError for an unknown precision. Methods that compare values raise CalibrationError without samples.
    """

    def __init__(
        self, net: Network, precision: str, samples: Sequence[Feeds], run_of: RunOf, ranges: Ranges | None = None, file: str | Path | None = None,
        workers: int = 1, known: Analysis | None = None,
    ):  # fmt: skip
        """`workers` threads run different samples at the same time; the runs that `run_of` makes must be safe for that. `known` is an analysis of the
        same network, samples and `run_of` for another precision: its exact outputs are used."""
        self.workers = workers
        self.net, self.precision, self.samples, self.run_of, self.ranges = net, precision, list(samples), run_of, ranges
        self.layers = list_candidates(net, precision)
        self.outputs = [t.name for t in net.outputs]
        self.exact: Run = run_of(net, self.outputs) if known is None else known.exact
        self.wants: list[Values] = self.run_samples(self.exact) if known is None else known.wants
        self._memory = _Memory(file, self._make_key())

    def run_samples(self, run: Run) -> list[Values]:
        """The values of each sample."""
        return list(map_concurrently(run, self.samples, self.workers))

    def run(self, only: Iterable[str] | None = None) -> Run:
        """A runner of the network with only these layers rounded (None: all)."""
        return self.run_of(emulate_network(self.net, self.precision, self.ranges, None if only is None else set(only)), self.outputs)

    def snr(self, only: Iterable[str] | None = None, count: int = 0) -> float:
        """SNR of the outputs in dB with only these layers rounded (None: all), on the first `count` samples, in this thread (0: on all of them)."""
        names = sorted({x.name for x in self.layers} if only is None else set(only))
        if not names:
            return EXACT_DB
        key = [*names, f"on {count} samples"] if 0 < count < len(self.samples) else names
        known = self._memory.get(key)
        if known is None:
            self._need_samples()
            run = self.run(names)
            gots = self.run_samples(run) if key is names else [run(f) for f in self.samples[:count]]
            known = compute_output_snr(self.wants[: len(gots)], gots)
            self._memory.put(key, known)
        return known

    def rank_layers(
        self, names: Iterable[str] | None = None, tell: Callable[[str], None] | None = None, count: int = 0
    ) -> list[LayerSensitivity]:  # fmt: skip
        """Rounds each layer (default: all) alone; most sensitive first, ties in network order. With `count`, on the first samples only: then several
        threads round different layers."""
        wanted = None if names is None else set(names)
        layers = [x for x in self.layers if wanted is None or x.name in wanted]
        found = []
        snrs = map_concurrently(lambda layer: self.snr([layer.name], count), layers, self.workers if 0 < count < len(self.samples) else 1)
        for layer, alone_db in zip(layers, snrs, strict=True):
            found.append(LayerSensitivity(layer.name, layer.op, alone_db))
            if tell is not None:
                tell(layer.name)
        return sorted(found, key=lambda h: h.alone_db)

    def set_cumulative_snr(self, rows: Sequence[LayerSensitivity], tell: Callable[[str], None] | None = None) -> None:
        """Sets `from_here_db` of rows sorted from the most sensitive."""
        for i, row in enumerate(rows):
            row.from_here_db = self.snr([r.layer for r in rows[i:]])
            if tell is not None:
                tell(row.layer)

    def tensors(self) -> dict[str, float]:
        """SNR in dB of every float layer output with everything rounded, in one pass."""
        self._need_samples()
        low = emulate_network(self.net, self.precision, self.ranges)
        names = [t.name for layer in self.net.layers for t in layer.outputs if t.dtype.is_float and _has(low, t.name)]
        exact, rounded = self.run_of(self.net, names), self.run_of(low, names)
        sums = {n: [0.0, 0.0] for n in names}
        for f in self.samples:
            want, got = exact(f), rounded(f)
            for n in names:
                s, e = compute_powers(want[n], got[n])
                sums[n][0] += s
                sums[n][1] += e
        return {n: to_decibels(s, e) for n, (s, e) in sums.items()}

    def _need_samples(self) -> None:
        if not self.samples:
            raise CalibrationError("no samples to evaluate low precision on: give --calibData")

    def _make_key(self) -> str:
        h = hashlib.sha256(f"{self.precision}\n{format_network(self.net)}\n".encode())
        if self.ranges is not None and self.precision in ("int8", "fp8"):
            for name, r in sorted(self.ranges.tensors.items()):
                h.update(f"{name} {float(r.low).hex()} {float(r.high).hex()}\n".encode())
            for kind in (self.ranges.scalings, self.ranges.corrections, self.ranges.rounded):
                for name, a in sorted(kind.items()):
                    h.update(f"{name} {a.shape}\n".encode() + np.ascontiguousarray(a, "<f4").tobytes())
            h.update("\n".join(sorted(self.ranges.float_sums)).encode())
        for f in self.samples:
            h.update(compute_content_digest(f).encode())
        return h.hexdigest()


def _has(net: Network, name: str) -> bool:
    try:
        return net.tensor(name).weight is None
    except NetworkError:
        return False


class _Memory:
    """SNRs by the set of rounded layers, stored in a JSON file."""

    def __init__(self, path: str | Path | None, key: str):
        self.path, self.key = Path(path) if path else None, key
        self.known: dict[str, float] = {}
        if self.path is not None and self.path.is_file():
            try:
                data = json.loads(read_json_text(self.path))
                if data["key"] == key:
                    self.known = {str(k): float(v) for k, v in data["snr_db"].items()}
            except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
                self.known = {}  # damaged or of another analysis: measured again and replaced

    @staticmethod
    def _name(names: Sequence[str]) -> str:
        return hashlib.sha256("\n".join(names).encode()).hexdigest()[:24]

    def get(self, names: Sequence[str]) -> float | None:
        return self.known.get(self._name(names))

    def put(self, names: Sequence[str], value: float) -> None:
        self.known[self._name(names)] = value
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with replace_atomically(self.path) as part:
                part.write_text(json.dumps({"key": self.key, "snr_db": self.known}), encoding="utf-8")
        except OSError as e:
            raise CacheError(f"the sensitivity results cannot be written to {self.path}: {e.strerror}; choose another file") from e


def select_samples(samples: Iterable[Feeds], count: int) -> list[dict[str, np.ndarray]]:
    """The `count` samples with the smallest digests, independent of their order."""
    kept: list[tuple[str, Mapping[str, np.ndarray]]] = []
    for feeds in samples:
        kept = sorted([*kept, (compute_content_digest(feeds), feeds)], key=lambda e: e[0])[:count]
    return [dict(f) for _, f in kept]
