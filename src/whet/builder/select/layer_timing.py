"""Timing the candidates of each kind of layer: selecting the options, timing them, reporting."""

from __future__ import annotations

from collections.abc import Iterable

from whet.backends import Backend
from whet.builder.candidates.compile_ahead import start_compiling, start_compiling_again
from whet.builder.candidates.enumerate import Candidates
from whet.builder.candidates.filter import SlowImplementations, is_float32_close, select_for_timing
from whet.builder.config import BuildConfig
from whet.builder.progress import ProgressLog
from whet.engine.report import GpuState, TimingRecord
from whet.measure.machine_state import read_machine_state
from whet.measure.option import Option
from whet.measure.policy import CONTRADICTION, REFORMAT_ROUNDS
from whet.measure.timing import Conditions, Timer
from whet.measure.timing_cache import TimingCache

#: options timed per kind of layer at each builderOptimizationLevel; None: all
_TIMED: dict[int, int | None] = {0: 0, 1: 4, 2: 8, 3: 32, 4: 128, 5: None}
_SKIP_SLOW = 3  # up to this level, implementations that were slow in every layer so far are not timed


class LayerTiming:
    """Times kinds of layers. `timer` is None at level 0, which times nothing. `footprint`: bytes touched by one run of the network."""

    def __init__(self, backend: Backend, config: BuildConfig, footprint: int, log: ProgressLog):
        self.backend, self.config, self.log = backend, config, log
        level = min(max(config.optimization_level, 0), 5)
        self.cap = config.max_tactics if config.max_tactics >= 0 else _TIMED[level]
        self.cache = TimingCache("" if self.cap == 0 else config.timing_cache, log.note, overwrite=config.retime)
        self.timer = None if self.cap == 0 else self._make_timer(Conditions.of(backend, footprint), config.avg_timing)
        self._slow = SlowImplementations()

    def _make_timer(self, conditions: Conditions, rounds: int) -> Timer:
        return Timer(self.backend, self.cache, conditions, rounds, self.config.error_on_cache_miss)

    def make_reformat_timer(self) -> Timer | None:
        """A timer for reformats, which takes fewer rounds."""
        return None if self.timer is None else self._make_timer(self.timer.conditions, min(REFORMAT_ROUNDS, self.config.avg_timing))

    def time_all(self, kinds: Iterable[Candidates]) -> None:
        """Times the kinds of layers that have several options. External load gets a note."""
        if self.timer is None:
            return
        todo = [found for found in kinds if len(found.options) > 1]
        self.log.stage("timing", len(todo))
        for found in todo:
            self.log.step(f"{found.layer.name}: {len(found.options)} tactics")
            self.time_kind(found)
        if load := self.timer.loads.describe("choices may be off. Build again with --retime when it is idle."):
            self.log.note(load)

    def time_kind(self, candidates: Candidates) -> None:
        """Times the selected options of one kind of layer."""
        assert self.timer is not None
        options = self.select_options(candidates)
        self.timer.time(candidates.layer, candidates.text, options, keep=True)
        if is_float32_close(options):
            options = self.select_options(candidates, all_float32=True)
            start_compiling_again(candidates.layer, [o for o in options if o.ms is None], self.backend)
            self.timer.time(candidates.layer, candidates.text, options, keep=True)
        with self.log.within("timing with cold weights"):
            self.timer.time_cold(candidates.layer, candidates.text, options)
        self._slow.record(options)

    def retime_contradictions(self, timed: Iterable[tuple[Candidates, Option]], engine_ms: float) -> list[str]:
        """Re-times kinds of layers if the recorded time of their selected option exceeds that of the whole engine; returns the layers' names.

        Such a time was recorded under external load, and later builds would read it from the timing cache.
        """
        if self.timer is None or self.timer.error_on_miss:
            return []
        kinds = {found.text: found for found, option in timed if (option.ms or 0.0) > CONTRADICTION * engine_ms}
        for found in kinds.values():
            self.log.note(f"'{found.layer.name}' has a recorded time above that of the whole engine, and is timed again")
            self.timer.time(found.layer, found.text, [o for o in found.options if o.ms is not None], remeasure=True)
        return [found.layer.name for found in kinds.values()]

    def select_options(self, candidates: Candidates, *, all_float32: bool = False) -> list[Option]:
        """The options to time; `all_float32`: however many of 32 bits there are."""
        ahead, level = self.backend.capabilities.compiles_ahead, self.config.optimization_level
        options = candidates.options if ahead or level > _SKIP_SLOW else self._slow.drop_slow(candidates.options)
        return select_for_timing(options, level, self.cap, ahead and not all_float32)

    def start_compiling(self, candidates: Candidates) -> None:
        """Compiles in the background the options that will be timed; if all times are cached, only options that may be selected."""
        if not self.backend.capabilities.compiles_ahead:
            return
        options = self.select_options(candidates) if candidates.options and self.timer is not None else candidates.options[:1]
        if self.timer is not None and len(options) > 1:
            self.timer.is_cached(options, candidates.text)
        start_compiling(options, self.backend)
        for o in candidates.options:
            o.texts = ()

    def report(self) -> TimingRecord:
        """Hits and misses of the cache, the state of the caches, external load, and the state of a GPU."""
        if self.timer is None:
            return TimingRecord(self.config.optimization_level, timed=0, why="level 0 times nothing: the first kernel that runs is taken")
        gpu = read_machine_state(self.backend, self.log.note).get("gpu")
        return TimingRecord(
            level=self.config.optimization_level,
            hits=self.cache.hits,
            misses=self.cache.misses,
            conditions=self.timer.conditions.state,
            disturbed_cpus=[round(load.others or 0.0, 2) for load in self.timer.loads.disturbed],
            gpu=None if gpu is None else GpuState(**gpu),
            **self.timer.cold_report(),
        )
