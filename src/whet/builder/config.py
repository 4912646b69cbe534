"""Options of a build. The flags of `whet exec` and `whet build`, the engine's header and the docs are generated from these fields."""

from __future__ import annotations

from dataclasses import dataclass, field
from numbers import Integral

from whet.errors import UsageError
from whet.registry import suggest_name

AUTO_THREADS = -1
PRECISIONS = ("fp32", "fp16", "bf16", "int8", "fp8", "best")
Shapes = dict[str, tuple[int, ...]]

SAMPLE_MODES = ("auto", "together", "parallel", "sequential")
OLD_SAMPLE_MODES = {"apart": "parallel", "turns": "sequential"}  # values of `samples` in older scripts and engine files

_ONE_OF = {
    "precision_constraints": ("none", "prefer", "obey"),
    "sparsity": ("disable", "enable", "force", "force:positional"),
    "samples": SAMPLE_MODES,
    "profiling_verbosity": ("layer_names_only", "detailed", "none"),
    "objective": ("latency", "size"),
}
_LEAST = {"optimization_level": 0, "avg_timing": 1, "threads": AUTO_THREADS, "seed": 0}
_LARGEST = {"optimization_level": 5, "seed": 2**32 - 1}  # the seed of NumPy's RandomState
_KINDS: dict[str, tuple[type, str]] = {
    **dict.fromkeys(("threads", "optimization_level", "avg_timing", "max_tactics", "whole_engines", "seed"), (Integral, "an int")),
    **dict.fromkeys(("strict", "error_on_cache_miss", "retime", "verify", "verify_again", "deterministic"), (bool, "True or False")),
    **dict.fromkeys(("strict_numerics", "in_network"), (bool, "True or False")),
    "backend": (str, "the name of a backend, such as 'cpu' or 'cuda'"),
}


@dataclass(frozen=True, kw_only=True)
class BuildConfig:
    """Options of a build; the defaults suit most users. Raises UsageError for an invalid value."""

    backend: str = "cpu"  # cpu, cuda, null or another folder of whet.backends
    threads: int = 0  # CPU threads; 0: all usable ones (from level 4 on: fewer if whole engines are faster with fewer); -1: measured at any level
    precisions: tuple[str, ...] = ()  # storage types besides f32: "fp16", "bf16", "int8", "fp8", "best" (permissions, as in TensorRT 10)
    strict: bool = False  # refuse the build when a permission cannot be used at all
    precision_constraints: str = "none"  # none | prefer | obey
    objective: str = "latency"  # latency | size: the fastest engine, or the fastest one with weights stored as small as the precisions permit
    layer_precisions: tuple[tuple[str, str], ...] = ()  # (layer or source node name, precision); `*` as a wildcard
    layer_output_types: tuple[tuple[str, str], ...] = ()
    sparsity: str = "disable"  # disable | enable (kernels for weights that are 2:4 already) | force (weights are overwritten) | force:positional
    profiles: tuple[tuple[Shapes, Shapes, Shapes], ...] = ()  # (min, opt, max) shapes by input
    samples: str = "auto"  # auto | together | parallel | sequential: all threads run the batch, one sample each, or one sample after the other
    optimization_level: int = 3  # 0..5: how many tactics are timed, from 3 on kernels in the network, from 4 on threads (docs/design/choice.md)
    passes: tuple[str, ...] = ()  # switches: "none", "-name", "+name"
    no_fuse: tuple[str, ...] = ()  # source node names that are not fused
    avg_timing: int = 8  # timed rounds per tactic
    max_tactics: int = -1  # cap on tactics timed per layer; -1: by level
    timing_cache: str | None = None  # file; None: the user's cache folder; "": none
    error_on_cache_miss: bool = False
    retime: bool = False  # time again despite entries of the timing cache, and replace them
    tactic_sources: tuple[str, ...] = ()  # "-name", "+name": tactics, or families such as ONEDNN and NUMPY, in order
    memory_limit: dict[str, int] = field(default_factory=dict)  # bytes by pool: "workspace", "arena"
    verify: bool = True
    verify_again: bool = False  # verify also if this very engine passed verification on this machine before
    deterministic: bool = False
    strict_numerics: bool = False  # no Winograd, and no kernel that loses NaN or infinities
    lock: str | None = None  # a lock file to obey
    profiling_verbosity: str = "layer_names_only"  # layer_names_only | detailed | none
    whole_engines: int = 4  # the number of different whole engines that are timed
    in_network: bool = True  # from level 3 on: kernels of nearly equal speed are compared in the whole network
    seed: int = 0

    def __post_init__(self) -> None:
        if self.samples in OLD_SAMPLE_MODES:
            object.__setattr__(self, "samples", OLD_SAMPLE_MODES[self.samples])
        for name in ("precisions", "passes", "no_fuse", "tactic_sources"):
            if isinstance(text := getattr(self, name), str):
                raise UsageError(f"BuildConfig.{name} is a tuple of names: ({text!r},), not {text!r}")
        for name, (kind, text) in _KINDS.items():
            if not isinstance(value := getattr(self, name), kind):
                raise UsageError(f"BuildConfig.{name}: {value!r} is not {text}")
        for p in self.precisions:
            if p not in PRECISIONS:
                raise UsageError(f"BuildConfig.precisions: {p!r} is none of {', '.join(PRECISIONS)}.{suggest_name(p, PRECISIONS)}")
        for name, choices in _ONE_OF.items():
            if (value := getattr(self, name)) not in choices:
                raise UsageError(f"BuildConfig.{name}: {value!r} is none of {', '.join(choices)}.{suggest_name(str(value), choices)}")
        for name, least in _LEAST.items():
            if (value := getattr(self, name)) < least:
                raise UsageError(f"BuildConfig.{name}: {value} is too small; the least is {least}")
        if self.retime and self.error_on_cache_miss:
            raise UsageError("BuildConfig: retime times everything again, which error_on_cache_miss forbids; set one of them")
        for name, largest in _LARGEST.items():
            if (value := getattr(self, name)) > largest:
                raise UsageError(f"BuildConfig.{name}: {value} is too large; the largest is {largest}")
