"""Measurements and decisions of a build as typed records: `EnginePlan.report`.

The builder fills the report, the engine file stores it in the section `info` (outside the digest), and the inspector, `whet explain`,
`whet auto` and the JSON outputs read it. Times are in milliseconds (`*_ms`) or seconds (`*_seconds`). Fields that were not recorded have
their default values. `whet.engine.schema` defines the JSON form.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from whet.engine.json_data import Reader
from whet.engine.schema import decode, encode


@dataclass(frozen=True)
class Candidate:
    """A candidate implementation of a layer: its time, or the reason why it was not timed."""

    tactic: str
    signature: str  # storage types and formats of inputs and outputs
    config: tuple[tuple[str, int | str], ...]
    implementation: str = ""  # the kernel's name in its library
    ms: float | None = None  # median; None: not timed
    spread_ms: float | None = None  # half the distance between the quartiles
    reason: str = ""  # reason why it was refused or not selected


class PassFired(NamedTuple):
    """A change by a pass: the layer and a description."""

    name: str
    layer: str
    change: str


class PassSkipped(NamedTuple):
    """A pass matched its pattern at a layer and did not apply, with the reason."""

    name: str
    layer: str
    reason: str


class Unfused(NamedTuple):
    """A fused layer that the engine runs as separate layers, with the reason."""

    layer: str
    reason: str


class Banned(NamedTuple):
    """A kernel that failed and was excluded: the layer, the tactic with its kernel and config, the reason."""

    layer: str
    kernel: str
    reason: str


@dataclass
class PassRecord:
    """The graph passes: names in execution order, their changes, and the layers that they skipped."""

    order: list[str] = field(default_factory=list)
    fired: list[PassFired] = field(default_factory=list)
    skipped: list[PassSkipped] = field(default_factory=list)


@dataclass
class SelectionRecord:
    """How formats and tactics were selected for the whole graph."""

    method: str  # "exact", "lock", or the search over the irreducible core ("beam", ...)
    sum_of_layers_ms: float | None = None  # predicted: layers and reformats, each timed alone
    kept: str = ""  # the selected engine candidate
    engines_timed: str = ""  # set if the times of whole engines came from the timing cache
    core_layers: int = 0  # layers in the core that exact reduction left
    tried_ms: dict[str, float] = field(default_factory=dict)  # search method -> its sum of times


@dataclass
class EngineTime:
    """The time of a whole engine."""

    what: str
    ms: float
    spread_ms: float


@dataclass
class ThreadCountTime:
    """The time of the engine built for a number of threads."""

    threads: int
    ms: float
    spread_ms: float


@dataclass
class GpuState:
    """The GPU after timing, as NVML reports it; None for unavailable readings."""

    sm_clock: int | None = None  # MHz
    memory_clock: int | None = None  # MHz
    power: float | None = None  # W
    temperature: int | None = None  # degrees Celsius
    used_memory: int | None = None  # bytes
    other_processes: list[int] = field(default_factory=list)  # process ids
    unknown: str = ""  # reason for missing readings


@dataclass
class TimingRecord:
    """How layers were timed."""

    level: int  # builder optimization level
    hits: int = 0  # measurements found in the timing cache
    misses: int = 0  # measurements taken in this build
    timed: int | None = None  # number of timed candidates; 0: timing is off
    why: str = ""  # reason why timing is off
    conditions: str = ""  # cache state during timing
    cold_timed: int | None = None  # candidates timed with weights outside the L2 cache; None: not possible on this backend
    cold_seconds: float | None = None
    disturbed_cpus: list[float] = field(default_factory=list)  # CPUs that other processes used, per disturbed measurement
    gpu: GpuState | None = None


@dataclass
class SampleModes:
    """Whether a batch runs as one ("together"), one sample per thread ("parallel") or one sample after the other on all threads ("sequential")."""

    kept: str
    why: str
    batch: int | None = None  # the batch size that was timed
    lanes: int | None = None  # samples that run at once
    spread_ms: float | None = None  # of the selected mode
    together_ms: float | None = None
    together_spread_ms: float | None = None
    apart_ms: float | None = None  # of "parallel"
    apart_spread_ms: float | None = None
    turns_ms: float | None = None  # of "sequential"
    turns_spread_ms: float | None = None


@dataclass
class WorstLayer:
    """The layer with the largest ratio of error to bound (relative errors)."""

    layer: str
    error: float | None
    bound: float | None


@dataclass
class VerificationRecord:
    """The engine against references: relative errors, max over outputs of ||e||/||ref|| and max|e|/max|ref|."""

    layers: int  # layers compared
    worst_layer: WorstLayer
    network_error: float | None
    network_bound: float | None
    emulation_error: float | None  # error of an emulation with the engine's rounding
    failures: list[str]
    images: list[int] | None  # compared batch items; None: all
    turned_error: float | None  # between a batch and the same batch rotated


@dataclass
class PermissionUse:
    """Number of layers that used a permitted precision, or the reason why none did."""

    layers: int
    of: int
    reason: str = ""


@dataclass
class PrecisionCandidate:
    """One engine in the comparison of precisions."""

    what: str
    ms: float
    spread_ms: float
    kept: bool
    holds: bool  # within the accuracy budget, as far as it was evaluated
    float_layers: list[str] = field(default_factory=list)  # quantizable layers that stay in floating point
    accuracy: float | None = None  # the budget's value; None: not evaluated, or infinite
    build_seconds: float | None = None


@dataclass
class CalibrationStep:
    """A tried scaling or bias correction. Errors are noise-to-signal ratios."""

    step: str
    at: str  # tensor or layer; "outputs": the network's outputs
    kept: bool
    error_before: float | None = None
    error_after: float | None = None
    snr_db: float | None = None  # at the network's outputs


@dataclass
class AccuracyRecord:
    """The accuracy budget and its evaluation."""

    budget: str
    judged_on: str  # "engine", "emulation", or the reason why nothing was evaluated
    judged_sets: int  # evaluated sets of layers
    value: float | None = None
    fp32: float | None = None  # the metric of the FP32 network
    holds: bool | None = None
    float_layers: dict[str, str] = field(default_factory=dict)  # layer -> reason why it stays in floating point
    alone_db: dict[str, float | None] = field(default_factory=dict)  # layer -> output SNR with only this layer in low precision


@dataclass
class QuantizationRecipe:
    """Results of calibration and selection, from which the same Q/DQ nodes can be inserted again without data."""

    tables: bool  # activations are computed by lookup tables
    float_layers: list[str]  # quantizable layers that stay in floating point
    ranges: dict[str, tuple[float, float]]  # tensor -> (low, high)
    scalings: dict[str, list[float]]  # tensor -> factor per channel
    corrections: dict[str, list[float]]  # layer -> bias correction per output channel
    float_sums: list[str] = field(default_factory=list)  # residual additions that stay in floating point
    kind: str = "int8"  # or "fp8"
    rounded: dict[str, str] = field(default_factory=dict)  # layer -> adapted weights (whet.precision.float8.pack_rounding)
    small_weights: bool = False  # weights of layers in floating point are stored in 8 bits


@dataclass
class Float8Record:
    """Layers without FP8 (layer -> reason), and the residual additions computed in 16 bits."""

    left_out: dict[str, str] = field(default_factory=dict)
    sums_in_16_bits: list[str] = field(default_factory=list)


@dataclass
class RequestedPrecisions:
    """The user's precision options, before calibration or an accuracy budget resolved them."""

    precisions: list[str]
    precision_constraints: str
    layer_precisions: list[tuple[str, str]]
    layer_output_types: list[tuple[str, str]]


@dataclass
class BuildReport:
    """All records of one build."""

    built: str = ""  # ISO 8601, UTC
    build_seconds: float = 0.0
    phase_seconds: dict[str, float] = field(default_factory=dict)
    latency_ms: float | None = None  # median of the whole engine
    layer_ms: dict[str, float] = field(default_factory=dict)  # layer -> median in the whole engine
    candidates: dict[str, list[Candidate]] = field(default_factory=dict)  # layer -> chosen, timed and refused candidates
    cold_ms: dict[str, list[float | None]] = field(default_factory=dict)  # layer -> times of its first candidates with weights outside the L2 cache
    choice: SelectionRecord | None = None
    choice_core: list[str] = field(default_factory=list)  # layers in the core that exact reduction left
    engines: list[EngineTime] = field(default_factory=list)  # the selected one first
    timing: TimingRecord | None = None
    threads: list[ThreadCountTime] = field(default_factory=list)
    samples: SampleModes | None = None
    passes: PassRecord = field(default_factory=PassRecord)
    unfused: list[Unfused] = field(default_factory=list)
    banned: list[Banned] = field(default_factory=list)
    verification: VerificationRecord | None = None
    precisions: dict[str, PermissionUse] = field(default_factory=dict)  # permitted precision -> its use
    precision_choice: list[PrecisionCandidate] = field(default_factory=list)
    calibration_steps: list[CalibrationStep] = field(default_factory=list)
    accuracy: AccuracyRecord | None = None
    quantized: QuantizationRecipe | None = None
    fp8: Float8Record | None = None
    asked: RequestedPrecisions | None = None
    retuned_from: str = ""  # key of the machine of the previous tuning
    notes: list[str] = field(default_factory=list)  # warnings
    info: list[str] = field(default_factory=list)  # findings that need no action


@dataclass
class _CandidateTable:
    """The JSON form of `BuildReport.candidates`: layers with equal text have equal candidates, so each row is stored once."""

    layers: dict[str, list[int]]  # layer -> indices of rows
    rows: list[Candidate]


def report_to_data(report: BuildReport) -> dict[str, Any]:
    """The report as JSON data without fields that were not recorded."""
    rows: dict[Candidate, int] = {}
    layers = {name: [rows.setdefault(c, len(rows)) for c in found] for name, found in sorted(report.candidates.items())}
    data = encode(replace(report, candidates={}))
    return data | ({"candidates": encode(_CandidateTable(layers, list(rows)))} if layers else {})


def report_from_data(r: Reader) -> BuildReport:
    """The report of an engine file. Raises EngineError for data that `report_to_data` cannot have written."""
    data = r.object().value
    report = decode(BuildReport, Reader({k: v for k, v in data.items() if k != "candidates"}, r.key, r.parent))
    if "candidates" in data:
        table = decode(_CandidateTable, r["candidates"])
        for layer, indices in table.layers.items():
            if not all(0 <= i < len(table.rows) for i in indices):
                raise r["candidates"]["layers"][layer].fail(f"indices of the {len(table.rows)} candidates")
        report.candidates = {layer: [table.rows[i] for i in indices] for layer, indices in table.layers.items()}
    return report


def decode_recipe(data: Any, name: str) -> QuantizationRecipe:
    """A recipe from the JSON data of a file (a lock or other), whose `name` is used in errors. Raises EngineError."""
    return decode(QuantizationRecipe, Reader(data, name))


class _Unread(BuildReport):
    """A report that is read by the first access of an attribute, and is an ordinary one from then on. Opening an engine needs none of it."""

    def __init__(self, read: Callable[[], BuildReport]) -> None:
        object.__setattr__(self, "__dict__", {"_read": read})

    def __getattribute__(self, name: str) -> Any:
        if name == "__class__" or (name.startswith("__") and name != "__dict__"):
            return object.__getattribute__(self, name)
        fields = vars(object.__getattribute__(self, "__dict__")["_read"]())
        object.__setattr__(self, "__dict__", dict(fields))
        object.__setattr__(self, "__class__", BuildReport)
        return getattr(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        _ = self.__dict__  # reads the report
        setattr(self, name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _ = self.__dict__
        return self.__reduce_ex__(protocol)

    def __eq__(self, other: object) -> bool:
        _ = self.__dict__
        return self == other

    __hash__ = None  # type: ignore[assignment]  # as of BuildReport


def defer_report(read: Callable[[], BuildReport]) -> BuildReport:
    """The report that `read` gives; it is called by the first access, which raises its EngineError."""
    return _Unread(read)
