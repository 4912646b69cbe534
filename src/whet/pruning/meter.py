"""Times a lowered layer at its shapes with the tactics a build would try: the builder's candidates, timer and timing cache.

Rows timed under external load (other processes, steal time) are marked and re-timed once the load is gone. GPU kernels are compiled on all
CPUs: the kernels of one layer in parallel, and those of announced layers while other layers are timed.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial

from whet.backends import get_backend
from whet.builder.candidates.compile_ahead import start_compiling
from whet.builder.candidates.enumerate import Candidates, list_candidates
from whet.builder.candidates.tactic_sources import list_enabled_tactics
from whet.builder.candidates.unfuse import unfuse
from whet.builder.config import BuildConfig
from whet.builder.precision.permissions import Permissions
from whet.errors import PruneError
from whet.measure.compare import LoadLog
from whet.measure.option import Option
from whet.measure.timing import Conditions, Timer
from whet.measure.timing_cache import TimingCache
from whet.measure.timing_key import compute_source_digest, format_layer_text
from whet.network import Layer, Network, Tensor, evaluate
from whet.pruning.anew import RemeasuringCache
from whet.pruning.busy import ExternalLoadMonitor, Window
from whet.pruning.latency_table import LatencyTable, Row, compute_row_key

_FEW = 4  # configs timed per tactic and signature


class Meter:
    """`ms(layer)` for layers with static shapes. A context manager: it holds the timing cache open and saves the table."""

    def __init__(self, config: BuildConfig, table: LatencyTable, layers: Mapping[str, Layer], *, retime: bool = False):
        """`layers` are those of the whole network: its memory footprint decides how cold caches are between kernels. `retime` times each
        requested layer once, even if the table or the timing cache has it."""
        self.config, self.table, self.retime = config, table, retime
        self.backend = get_backend(config.backend, threads=config.threads)
        self.tactics = list_enabled_tactics(self.backend.name, config.tactic_sources)
        # Channel counts are multiples of this step, or are padded to one by pad_channels.
        self.step = max(max(t.channel_alignment for t in self.tactics) // 2, 1)
        self.permissions = Permissions.of(config)
        tensors = {t for x in layers.values() for t in (*x.inputs, *x.outputs) if t is not None}
        footprint = sum(evaluate(t.type.nbytes, {}) for t in tensors if t.type.static)
        self.cache = TimingCache(config.timing_cache, partial(warnings.warn, stacklevel=2))
        self.timer = Timer(self.backend, self.cache, Conditions.of(self.backend, footprint), config.avg_timing, config.error_on_cache_miss)
        versions = sorted(f"{t.name} {t.version} {compute_source_digest(t)} {t.library_version()}" for t in self.tactics)
        self._tactics = hashlib.sha256("\n".join(versions).encode()).hexdigest()
        self.device = str(self.backend.key())
        self.announced: dict[str, Candidates] = {}  # by layer text; listed and being compiled
        self._neighbours = ExternalLoadMonitor(self.backend)
        self._anew = replace(self.timer, cache=RemeasuringCache(self.cache), loads=LoadLog())
        self._asked: set[str] = set()  # keys
        self.retimable: dict[str, Layer] = {}  # by key: layers that may be re-timed (keeping all would hold a copy of the weights for every width)
        self._now: set[str] = set()  # keys timed by this meter
        self._sums: dict[str, set[str]] = {}  # key of an unfused layer -> keys of its parts

    def __enter__(self) -> Meter:
        return self

    def __exit__(self, *_: object) -> None:
        self._note(self._neighbours.end())
        self.cache.close()
        self.table.save()

    def key(self, text: str) -> str:
        """The table's key of a layer's text."""
        return compute_row_key(self.device, self._tactics, self._precisions, self.timer.conditions.state, text)

    @property
    def _precisions(self) -> str:
        return ",".join(sorted(self.config.precisions)) or "fp32"

    def known(self, layer: Layer) -> bool:
        """True if the table has this layer, so that nothing has to be measured."""
        return self.table.get(self.key(format_layer_text(layer))) is not None

    def announce(self, layers: Iterable[Layer]) -> None:
        """Announces layers that will be timed, so that their kernels are compiled in the background. No effect if the backend does not compile."""
        if not self.backend.capabilities.compiles_ahead:
            return
        for layer in layers:
            text = format_layer_text(layer)
            if text not in self.announced and self.table.get(self.key(text)) is None:
                self.announced[text] = candidates = self._list(layer)
                if not candidates.options and layer.op == "Fused":
                    self.announce(_list_parts(layer))

    def _list(self, layer: Layer) -> Candidates:
        """The candidates to time for a layer (fallback tactics if there is nothing else); starts compiling those without a cached time."""
        candidates = list_candidates(layer, self.tactics, self.backend, self.permissions)
        kernels = [o for o in candidates.options if not o.tactic.fallback]
        candidates.options = [] if not kernels and layer.op == "Fused" else _limit_configs(kernels or candidates.options)
        if self.backend.capabilities.compiles_ahead and not self.timer.is_cached(candidates.options, candidates.text):
            start_compiling(candidates.options, self.backend)
        return candidates

    def ms(self, layer: Layer) -> float:
        """Latency of the layer's fastest tactic in milliseconds; a fused layer without a fused kernel counts as the sum of its parts.

        Raises PruneError if no tactic computes it.
        """
        text = format_layer_text(layer)
        key = self.key(text)
        self._asked.add(key)
        row = self.table.get(key)
        if row is None or (key not in self._now and (self.retime or (row.others and self._neighbours.quiet()))):
            row = self._time(key, layer, text, self.timer if row is None and not self.retime else self._anew)
        elif row.others:
            self.retimable[key] = layer
        return row.ms

    def settle(self) -> int:
        """Re-times requested rows that were timed under external load, if that load is gone; returns their number."""
        self._note(self._neighbours.end())
        busy = {k: x for k, x in self.retimable.items() if self.table.rows[k].others}
        if not busy or not self._neighbours.quiet():
            return 0
        self._now -= busy.keys()
        for key, layer in busy.items():
            if key not in self._now:  # already re-timed as a part of another layer
                self._time(key, layer, format_layer_text(layer), self._anew)
        self._note(self._neighbours.end())
        return len(busy)

    def doubtful(self) -> tuple[int, int, float]:
        """(requested rows timed under external load, requested rows, largest external load in CPUs)."""
        self._note(self._neighbours.end())
        others = [self.table.rows[k].others for k in self._asked]
        return sum(o > 0 for o in others), len(others), max(others, default=0.0)

    def _time(self, key: str, layer: Layer, text: str, timer: Timer) -> Row:
        """Times a layer and adds its row to the table."""
        self._neighbours.begin()
        best = self._best(key, layer, text, timer)
        ms, name, spread = (best.cost, best.tactic.name, best.spread_ms) if isinstance(best, Option) else (best, "its parts", 0.0)
        others = max((self.table.rows[k].others for k in self._sums.get(key, ())), default=0.0)
        row = Row(self.device, self._precisions, self.timer.conditions.state, text, name, ms, spread, others)
        self.table.put(key, row)
        self._now.add(key)
        self.retimable[key] = layer
        self._note(self._neighbours.record(key))
        return row

    def _note(self, window: Window) -> None:
        """Marks the rows timed in a window with external load, and the sums they are parts of; drops layers whose times are final."""
        if window.others:
            for key in {*window.keys, *(k for k, parts in self._sums.items() if parts & set(window.keys) and k in self.table.rows)}:
                self.table.mark(key, window.others)
        for key in window.keys:
            if not self.table.rows[key].others:
                self.retimable.pop(key, None)

    def _best(self, key: str, layer: Layer, text: str, timer: Timer) -> Option | float:
        candidates = self.announced.pop(text, None) or self._list(layer)
        options = candidates.options
        if not options and layer.op == "Fused":
            parts = _list_parts(layer)
            self._sums[key] = {self.key(format_layer_text(part)) for part in parts}
            return sum(self.ms(part) for part in parts)
        if not options:
            raise PruneError(f"no tactic of '{self.backend.name}' computes {layer.op} '{layer.name}', so it has no latency: {candidates.refused[:1]}")
        timer.time(layer, text, options)
        timed = [o for o in options if o.ms is not None]
        return min(timed or options, key=lambda o: o.cost)


def _limit_configs(options: list[Option]) -> list[Option]:
    """The first `_FEW` configs of each tactic and signature."""
    seen: dict[object, int] = {}
    kept = []
    for o in options:
        k = (o.tactic.name, o.signature)
        seen[k] = seen.get(k, 0) + 1
        if seen[k] <= _FEW:
            kept.append(o)
    return kept


def _list_parts(layer: Layer) -> list[Layer]:
    """The layers of a fused layer, in a network of their own."""
    net = Network("unfused", "lowered")
    seen: dict[Tensor, Tensor] = {}
    for t in layer.inputs:
        if t is not None and t not in seen:
            seen[t] = net.constant(t.weight, t.name) if t.weight is not None else net.add_input(t.name, t.type)
    inputs = [None if t is None else seen[t] for t in layer.inputs]
    fused = net.add_layer("Fused", inputs, layer.attrs, name="fused", regions=layer.regions)
    for t in fused.outputs:
        net.mark_output(t)
    return unfuse(net, fused)
