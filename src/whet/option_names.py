"""One text for both interfaces: messages are written with the flags of the command line, and Python callers read the names of Python.

`WhetError` and the warnings of builds translate their texts in Python, so that a message needs no second version.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


class _Name(NamedTuple):
    python: str
    kind: str  # value: name=repr(value); names: a tuple of values; true: name=True; text: the name as it is, and the value dropped


def _make_table(kind: str, **names: str) -> dict[str, _Name]:
    return {flag: _Name(python, kind) for flag, python in names.items()}


#: flag -> parameter or field. Flags of commands that have no Python counterpart (--list, --output) are not in it and stay as they are.
NAMES: dict[str, _Name] = {
    **_make_table(
        "value", accuracy="budget", backend="backend", batch="batch", builderOptimizationLevel="optimization_level", distill="distill",
        importance="importance", latencyTable="table", lock="lock", loss="loss", lr="lr", masks="masks", multiple="multiple", numThreads="threads",
        objective="objective",
        precisionConstraints="precision_constraints", profilingVerbosity="profiling_verbosity", pruneTo="prune_to", samples="samples",
        sparsity="sparsity",
        teacher="teacher", timingCacheFile="timing_cache", train="train", clip="clip", device="device", avgTiming="avg_timing",
        shapes="profiles",
        layerPrecisions="layer_precisions", layerOutputTypes="layer_output_types", memPoolSize="memory_limit",
    ),
    **_make_table("names", noFuse="no_fuse", passes="passes", tacticSources="tactic_sources"),
    **_make_table(
        "true", deterministic="deterministic", errorOnTimingCacheMiss="error_on_cache_miss", insist="insist", retime="retime", strict="strict",
        strictNumerics="strict_numerics", verifyAgain="verify_again",
    ),
    **_make_table(
        "text", best="precisions=('best',)", bf16="precisions=('bf16',)", fp16="precisions=('fp16',)", fp8="precisions=('fp8',)",
        int8="precisions=('int8',)", calib="Calibration(cache=...)", calibData="Calibration(samples=...)",
        calibPreprocess="the preprocessing of the samples", noBuilderCache="timing_cache=''", noTF32="tactic_sources=('-TF32',)",
        noVerify="verify=False", saveEngine="write_engine(plan, path)", saveLock="whet.builder.save_lock(plan, path)",
        loadEngine="Runtime().load(path)", minShapes="min shapes (profiles=)", optShapes="profiles=", maxShapes="max shapes (profiles=)",
        onnx="network_from_onnx(path)", profile="profile",
    ),
}  # fmt: skip

_FLAG = re.compile(r"(?<![\w-])--([a-zA-Z][A-Za-z0-9]*)(?:=(?:\.\.\.|([^\s,;)'\"`]*[^\s.,:;)'\"`])))?")
_COMMAND = re.compile(r"(`(?:whet|python|pip|make) [^`]*`)")
_flag_readers = 0


@contextmanager
def keep_flags() -> Iterator[None]:
    """Within it, messages keep the flags of the command line."""
    global _flag_readers
    _flag_readers += 1
    try:
        yield
    finally:
        _flag_readers -= 1


def reads_flags() -> bool:
    """True within `keep_flags`."""
    return _flag_readers > 0


def translate_flags(text: str) -> str:
    """`text` with flags replaced by the names of parameters and fields: "--backend=cpu" becomes "backend='cpu'". Commands in backticks stay."""
    return "".join(part if _COMMAND.fullmatch(part) else _FLAG.sub(_translate_flag, part) for part in _COMMAND.split(text))


def _translate_flag(match: re.Match[str]) -> str:
    name, value = NAMES.get(match[1]), match[2]
    if name is None:
        return match[0]
    if name.kind == "text":
        return name.python
    if name.kind == "true":
        return f"{name.python}=True"
    if value is None:
        return f"{name.python}="
    if name.python == "memory_limit":
        return f"memory_limit[{value!r}]"
    if name.python.startswith("layer_"):
        layer, _, precision = value.rpartition(":")
        return f"{name.python}=(({layer!r}, {precision!r}),)"
    if name.python == "profiles":
        return "profiles="
    shown = value if value.isdecimal() else repr(value)
    return f"{name.python}=({', '.join(map(repr, value.split(',')))},)" if name.kind == "names" else f"{name.python}={shown}"
