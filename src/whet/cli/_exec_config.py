"""The BuildConfig of the flags of `whet exec`: shapes, precisions, tactics, memory, thread counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from whet.backends import BACKENDS, get_capabilities
from whet.builder.config import OLD_SAMPLE_MODES, SAMPLE_MODES
from whet.cli import _exec_values as values
from whet.cli._exec_flags import NUMBERS
from whet.cli._summary import Log
from whet.errors import UsageError
from whet.registry import suggest_name

MOST_EFFORT = 5  # of --builderOptimizationLevel; higher levels are clamped, as in trtexec


@dataclass
class Options:
    """The parsed command line: values by name, order kept for the shape flags."""

    pairs: list[tuple[str, str]]
    unavailable: list[str]

    def __contains__(self, name: str) -> bool:
        return any(n == name for n, _ in self.pairs)

    def get(self, name: str, default: str = "") -> str:
        return next((v for n, v in self.pairs if n == name), default)

    def number(self, name: str) -> Any:
        """The value of a flag of `NUMBERS`, or its default. Raises UsageError for an invalid value."""
        default, kind, low = NUMBERS[name]
        return values.parse_number(self.get(name), name, kind, low) if name in self else default


def parse_threads(o: Options) -> int:
    """--numThreads: 0 for all usable CPUs, AUTO_THREADS for `auto`."""
    from whet.builder.config import AUTO_THREADS

    return AUTO_THREADS if o.get("numThreads") == "auto" else o.number("numThreads")


def build_config(o: Options, log: Log, net) -> Any:
    """The BuildConfig that the flags ask for. Raises UsageError."""
    from whet.builder.config import BuildConfig

    profiles, warnings = values.parse_profiles(o.pairs)
    for w in warnings:
        log.warn(w)
    profiles = _add_default_profile(o, log, net, profiles)
    precisions = tuple(p for p in ("fp16", "bf16", "int8", "fp8", "best") if p in o)
    if "stronglyTyped" in o and precisions:
        raise UsageError(f"--stronglyTyped keeps the model's own types; it excludes --{precisions[0]}")
    constraints = values.parse_choice(o.get("precisionConstraints", "none"), "precisionConstraints", ("none", "prefer", "obey"))
    pools = {"workspace": values.parse_size(o.get("workspace"), "workspace")} if "workspace" in o else {}
    for name, text in values.split_names(o.get("memPoolSize")) if "memPoolSize" in o else []:
        if name not in ("workspace", "arena"):
            log.warn(f"--memPoolSize: this backend has no pool '{name}' (it has workspace and arena). It is ignored.")
        else:
            pools[name] = values.parse_size(text, "memPoolSize")
    cache = "" if "noBuilderCache" in o else (o.get("timingCacheFile") or None)
    return BuildConfig(
        backend=values.parse_choice(o.get("backend", "cpu"), "backend", sorted(BACKENDS)),
        threads=parse_threads(o),
        precisions=precisions,
        strict="strict" in o,
        precision_constraints=constraints,
        objective=values.parse_choice(o.get("objective", "latency"), "objective", ("latency", "size")),
        layer_precisions=_parse_layer_types(o, log, net, "layerPrecisions"),
        layer_output_types=_parse_layer_types(o, log, net, "layerOutputTypes"),
        sparsity=values.parse_choice(o.get("sparsity", "disable"), "sparsity", ("disable", "enable", "force", "force:positional")),
        profiles=tuple(profiles),
        samples=values.parse_choice(OLD_SAMPLE_MODES.get(o.get("samples"), o.get("samples", "auto")), "samples", SAMPLE_MODES),
        optimization_level=min(o.number("builderOptimizationLevel"), MOST_EFFORT),
        passes=tuple(p for p in o.get("passes").split(",") if p),
        no_fuse=tuple(p for p in o.get("noFuse").split(",") if p),
        avg_timing=o.number("avgTiming"),
        max_tactics=o.number("maxTactics"),
        timing_cache=cache,
        error_on_cache_miss="errorOnTimingCacheMiss" in o,
        retime="retime" in o,
        memory_limit=pools,
        tactic_sources=list_tactic_sources(o),
        verify="noVerify" not in o,
        verify_again="verifyAgain" in o,
        deterministic="deterministic" in o,
        strict_numerics="strictNumerics" in o,
        lock=o.get("lock") or None,
        profiling_verbosity=values.parse_choice(
            o.get("profilingVerbosity", "layer_names_only"), "profilingVerbosity", ("layer_names_only", "detailed", "none")
        ),
    )


def _parse_layer_types(o: Options, log: Log, net, flag: str) -> tuple[tuple[str, str], ...]:
    """(name, precision) pairs of a flag; a name that matches no layer is an error under obey, else a warning."""
    from fnmatch import fnmatchcase

    pairs = values.split_names(o.get(flag)) if flag in o else []
    known = {n for layer in net.layers for n in (layer.name, *layer.sources)}
    for name, _ in pairs:
        if not any(fnmatchcase(k, name) for k in known):
            text = f"--{flag}: no layer or node of the model is called {name!r}.{suggest_name(name, known)} `*` matches any text."
            if o.get("precisionConstraints") == "obey":
                raise UsageError(text)
            log.warn(text)
    return tuple(pairs)


def list_tactic_sources(o: Options) -> tuple[str, ...]:
    """The switches of --tacticSources, and those that flags such as --pure and --noTF32 imply on this backend."""
    given = tuple(p for p in o.get("tacticSources").split(",") if p)
    flags = get_capabilities(o.get("backend", "cpu")).flag_sources
    return (*given, *(switch for flag, switches in flags.items() if flag in o for switch in switches))


def _add_default_profile(o: Options, log: Log, net, profiles):
    """The profiles; for a dynamic model without profile flags, one at --shapes, or with every symbol 1, as trtexec does."""
    unknown = {n for p in profiles for n in p[1]} - {t.name for t in net.inputs}
    if unknown:
        inputs = ", ".join(f"{t.name} {t.type}" for t in net.inputs)
        raise UsageError(f"the model has no input {sorted(unknown)[0]!r}; its inputs: {inputs}")
    dynamic = [t for t in net.inputs if not t.type.static]
    if not dynamic:
        if profiles:
            given = {t.name: tuple(t.shape) for t in net.inputs}
            if any(s != given.get(n, s) for p in profiles for shapes in p for n, s in shapes.items()):
                raise UsageError("the model has static shapes; --minShapes, --optShapes and --maxShapes cannot change them")
        return []
    if profiles:
        fill = {t.name: tuple(d if isinstance(d, int) else 1 for d in t.shape) for t in net.inputs}
        return [tuple({n: s.get(n, fill[n]) for n in fill} for s in p) for p in profiles]
    if "shapes" in o:
        got = values.parse_shapes(o.get("shapes"), "shapes")
        shapes = {t.name: got.get(t.name, tuple(d if isinstance(d, int) else 1 for d in t.shape)) for t in net.inputs}
    else:
        shapes = {t.name: tuple(d if isinstance(d, int) else 1 for d in t.shape) for t in net.inputs}
        for t in dynamic:
            text = "x".join(map(str, shapes[t.name]))
            log.warn(f"Dynamic dimensions required for input: {t.name}, but no shapes were provided.")
            log.warn(f"Automatically overriding shape to: {text}")
    return [(shapes, shapes, shapes)]
