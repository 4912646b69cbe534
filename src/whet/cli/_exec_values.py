"""Parses the values of trtexec's flags: shapes, sizes, name lists, profiles."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from whet.errors import ShapeError, UsageError
from whet.registry import suggest_name

Shapes = dict[str, tuple[int, ...]]
_LARGEST = 2**31 - 1
_UNITS = {"B": 1, "K": 2**10, "M": 2**20, "G": 2**30}


def split_names(text: str) -> list[tuple[str, str]]:
    """Parses `a:1x3,'b:0':2` to [("a", "1x3"), ("b:0", "2")]: splits at commas, then at the last colon; quotes protect both."""
    parts = re.findall(r"(?:'[^']*'|[^,'])+", text)
    pairs = []
    for part in parts:
        name, colon, value = part.rpartition(":")
        if not colon or not name:
            raise UsageError(f"{part!r}: expected name:value; a name with ':' goes in single quotes ('Input:0':1x3)")
        pairs.append((name.strip().strip("'"), value.strip()))
    return pairs


def parse_shapes(text: str, flag: str) -> Shapes:
    """Parses `input:1x3x224x224,ids:8x128` to name -> shape; `scalar` or nothing after the colon is rank 0. Raises UsageError."""
    got: Shapes = {}
    if re.fullmatch(r"\d+(x\d+)+", text):
        raise UsageError(f"--{flag}={text} lacks the input's name: --{flag}=NAME:{text}")
    for name, dims in split_names(text):
        if dims in ("", "scalar"):
            got[name] = ()
            continue
        if not re.fullmatch(r"\d+(x\d+)*", dims):
            raise UsageError(f"--{flag}: {dims!r} is not a shape for '{name}'; write it as 1x3x224x224")
        got[name] = tuple(int(d) for d in dims.split("x"))
        if 0 in got[name]:
            raise UsageError(f"--{flag}: '{name}' has a dimension of 0 in {dims}: nothing would be computed. Give sizes of at least 1")
        if max(got[name]) > _LARGEST:
            raise UsageError(f"--{flag}: '{name}' has a dimension of {max(got[name])}; the largest is {_LARGEST}")
    return got


def parse_model_shapes(text: str, flag: str, inputs: Mapping[str, tuple[Any, ...]]) -> Shapes:
    """Parses shapes and compares them with the model's `inputs` (name -> shape; dynamic dimensions are symbols): names, ranks, fixed dimensions.

    Raises UsageError for an unknown name, ShapeError for a shape that does not fit its input.
    """
    got = parse_shapes(text, flag)
    for name, shape in got.items():
        want = get_input_shape(name, flag, inputs)
        if len(shape) != len(want):
            given = f"--{flag}={name}:{format_shape(shape)}"
            raise ShapeError(f"{given} has {len(shape)} dimensions, input '{name}' has {len(want)}: {format_shape(want)}")
        for axis, (d, w) in enumerate(zip(shape, want, strict=True)):
            if isinstance(w, int) and d != w:
                raise ShapeError(f"--{flag}={name}:{format_shape(shape)}: axis {axis} is {d}, and the model fixes it to {w}: {format_shape(want)}")
    return got


def get_input_shape(name: str, flag: str, inputs: Mapping[str, tuple[Any, ...]]) -> tuple[Any, ...]:
    """The shape of an input. Raises UsageError with the nearest name if there is no such input."""
    if name not in inputs:
        known = ", ".join(f"{n}:{format_shape(s)}" for n, s in inputs.items())
        raise UsageError(f"--{flag}: the model has no input {name!r}.{suggest_name(name, inputs)} It has {known}.")
    return inputs[name]


def format_shape(shape: tuple[Any, ...]) -> str:
    """A shape in the syntax of the flags: 1x3x224x224, or `scalar`."""
    return "x".join(map(str, shape)) or "scalar"


def parse_size(text: str, flag: str, default_unit: str = "M") -> int:
    """Parses `64M` to bytes. Raises UsageError."""
    m = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([BKMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if not m:
        raise UsageError(f"--{flag}: {text!r} is not a size; write it as 512K, 64M or 1G")
    return int(float(m[1]) * _UNITS[(m[2] or default_unit).upper()])


def parse_number(text: str, flag: str, kind=int, low: float | None = None):
    """Parses an int or float of at least `low`. Raises UsageError."""
    try:
        value = kind(text)
    except ValueError:
        raise UsageError(f"--{flag}: {text!r} is not {'an integer' if kind is int else 'a number'}") from None
    if low is not None and value < low:
        raise UsageError(f"--{flag}: {text} is too small; the minimum is {low}")
    return value


def parse_choice(text: str, flag: str, choices: Sequence[str]) -> str:
    """Returns `text` if it is one of `choices`. Raises UsageError with the nearest choice."""
    if text not in choices:
        raise UsageError(f"--{flag}: {text!r} is none of {', '.join(choices)}.{suggest_name(text, choices)}")
    return text


def parse_percentiles(text: str) -> list[float]:
    """Parses `90,95,99` to numbers from 0 to 100. Raises UsageError."""
    got = [parse_number(p, "percentile", float, 0) for p in text.split(",") if p]
    if any(p > 100 for p in got):
        raise UsageError(f"--percentile: {text!r} has a value above 100")
    return got


def parse_profiles(pairs: list[tuple[str, str]]) -> tuple[list[tuple[Shapes, Shapes, Shapes]], list[str]]:
    """Optimization profiles (min, opt, max) of the flags in order, and warnings about shapes that were filled in.

    A missing one of min, opt, max is taken from the others, as trtexec does. Raises UsageError.
    """
    groups: list[dict[str, Shapes]] = [{}]
    current, seen_profile = 0, False
    for name, value in pairs:
        if name == "profile":
            n = parse_number(value, "profile", int, 0)
            if n > len(groups) - 1 + seen_profile:
                raise UsageError(f"--profile={n}: profiles are numbered 0, 1, 2, ... without gaps")
            if n == len(groups):
                groups.append({})
            current, seen_profile = n, True
        elif name in ("minShapes", "optShapes", "maxShapes"):
            if name in groups[current]:
                raise UsageError(f"--{name} is given twice; put --profile=N before the second one to describe another profile")
            groups[current][name] = parse_shapes(value, name)
    triples: list[tuple[Shapes, Shapes, Shapes]] = []
    warnings: list[str] = []
    for g in filter(None, groups):
        filled = {n: _fill_shapes(n, g, warnings) for n in dict.fromkeys(n for s in g.values() for n in s)}
        lo, opt, hi = ({n: triple[k] for n, triple in filled.items()} for k in range(3))
        triples.append((lo, opt, hi))
    return triples, warnings


def _fill_shapes(name: str, shapes: Mapping[str, Shapes], warnings: list[str]) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """The min, opt and max shape of one input. A missing one is copied from another, with a warning. Raises UsageError."""
    by_kind = {kind: s[name] for kind, s in shapes.items() if name in s}
    for kind, others in (("minShapes", ("optShapes", "maxShapes")), ("maxShapes", ("optShapes", "minShapes")), ("optShapes", ("maxShapes",))):
        if kind not in by_kind:
            source = next(o for o in others if o in by_kind)
            by_kind[kind] = by_kind[source]
            warnings.append(f"{source} is being broadcasted to {kind} for tensor {name}")
    a, b, c = by_kind["minShapes"], by_kind["optShapes"], by_kind["maxShapes"]
    if len({len(a), len(b), len(c)}) != 1 or any(not x <= y <= z for x, y, z in zip(a, b, c, strict=True)):
        text = ", ".join(f"{k} {format_shape(s)}" for k, s in (("min", a), ("opt", b), ("max", c)))
        raise UsageError(f"tensor {name}: {text} are not in ascending order in every dimension")
    return a, b, c
