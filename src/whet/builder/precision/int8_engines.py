"""What the engines of one INT8 build are made from, and the engines: floating point, all integers, or integers but for some layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from whet.builder.build import build
from whet.builder.config import BuildConfig
from whet.builder.lock.relock import make_recipe
from whet.builder.precision.accuracy_budget import Judge
from whet.builder.precision.comparison import known_as
from whet.builder.precision.float16 import build_floats_within
from whet.builder.precision.permissions import demanded_floats
from whet.builder.progress import Noting
from whet.engine.plan import EnginePlan
from whet.network import Layer, Network
from whet.precision import Ranges, quantize
from whet.precision.budget import Verdict
from whet.precision.tables import TABLE, insert_tables
from whet.tactics import tactics_of

_LOOKED_UP = ", activations looked up"


@dataclass
class Tried:
    """One engine: what it is, the layers that it leaves in floating point, the accuracy that was found (None: not judged)."""

    what: str
    plan: EnginePlan
    skip: frozenset[str]
    verdict: Verdict | None = None
    judged_on: str = ""
    tables: bool = False

    @property
    def allowed(self) -> bool:
        """Whether it is within the budget, as far as it was judged."""
        return self.verdict is None or self.verdict.holds


@dataclass
class Making:
    """What the engines of one build are made from."""

    net: Network
    made: Network
    ranges: Ranges
    config: BuildConfig
    layers: list[Layer]
    must: frozenset[str]  # demanded in INT8
    judge: Judge | None = None
    progress: Noting = field(default_factory=lambda: Noting(None))
    inputs: Mapping[str, np.ndarray] | None = None
    notes: list[str] = field(default_factory=list)
    info: list[str] = field(default_factory=list)
    tables: bool = False  # activations are looked up

    def floats(self, incumbent_ms: float | None = None) -> Tried:
        """The engine in floating point, within the budget where 16 bits are permitted; `incumbent_ms` as `build` has it."""
        plain, what = without_int8(self.config), "floating point"
        with self.progress.making(what):
            if self.judge is None or not plain.precisions:
                plan = build(self.net, plain, progress=self.progress, inputs=self.inputs, incumbent_ms=incumbent_ms)
                return Tried(what, plan, frozenset())
            plan, verdict = build_floats_within(
                self.net, self.made, plain, self.judge.budget, self.judge.analysis.samples, progress=self.progress, inputs=self.inputs
            )  # fmt: skip
        return Tried(what, plan, frozenset(), verdict, "engine")

    def integers(self, what: str, skip: frozenset[str]) -> Tried:
        """The engine with every quantizable layer in INT8 but those of `skip` and those that the user keeps in floating point."""
        chosen = quantized_network(self.made, self.ranges, skip, demanded_floats(self.config), tables=self.tables)
        name = f"{what}{_LOOKED_UP}" if self.tables else what
        with self.progress.making(name):
            plan = build(chosen, self.config, progress=self.progress, inputs=self.inputs)
        plan.report.quantized = make_recipe(self.ranges, skip, self.tables)
        return Tried(name, plan, skip, tables=self.tables)

    def tuned(self, t: Tried) -> Tried:
        """The same engine once more, with what `config` now says of choosing in the network; judged where there is a budget."""
        self.tables = t.tables
        if t.plan.report.quantized is None:
            return self.floats()
        found = self.integers(t.what.removesuffix(_LOOKED_UP), t.skip)
        if self.judge is not None:
            self.set_verdict(found)
        return found

    def looks_up(self) -> bool:
        """Whether the backend has a kernel for tables, and the network something for it to look up."""
        if not any(TABLE in t.composites for t in tactics_of(self.config.backend)):
            return False
        return insert_tables(quantize(self.made, self.ranges, skip=demanded_floats(self.config)), self.ranges) > 0

    def low(self, skip: frozenset[str]) -> list[str]:
        """Names of the layers that compute in integers when those of `skip` do not."""
        return [x.name for x in self.layers if x.name not in skip]

    def set_verdict(self, t: Tried) -> None:
        """Judges a candidate: the engine itself, or its emulation where the engine's shapes do not take the samples. Asked where there is a judge."""
        assert self.judge is not None
        verdict = self.judge.engine(t.plan, self.config)
        t.verdict, t.judged_on = (self.judge.low(self.low(t.skip)), "emulation") if verdict is None else (verdict, "engine")


def quantized_network(
    made: Network, ranges: Ranges, skip: frozenset[str], pinned: Callable[[Layer], bool] = lambda x: False, *, tables: bool = False
) -> Network:
    """`made` (prepared) with Q/DQ but for the layers that `skip` names or `pinned` keeps; `tables`: before its activations too."""
    chosen = quantize(made, ranges, skip=lambda x: pinned(x) or x.name in skip or bool(skip & known_as(x)))
    if tables:
        insert_tables(chosen, ranges)
    return chosen


def without_int8(config: BuildConfig) -> BuildConfig:
    """The same build without INT8, and without demands for it."""
    return dataclasses.replace(
        config, precisions=tuple(p for p in config.precisions if p != "int8"),
        layer_precisions=tuple((n, p) for n, p in config.layer_precisions if p != "int8"),
        layer_output_types=tuple((n, p) for n, p in config.layer_output_types if p != "int8"),
    )  # fmt: skip
