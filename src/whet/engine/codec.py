"""The parts of a plan as JSON and back. Reading believes nothing: every key, type and range is checked, and named when wrong."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, is_dataclass
from typing import Any

from whet.engine.plan import ArenaPlan, Candidate, Choice, Profile
from whet.errors import EngineError

LARGEST = 1 << 62  # bytes, offsets
LARGEST_DIM = 1 << 40
_DEEPEST = 24  # levels of free data


def to_json(value: Any) -> bytes:
    """Canonical JSON: sorted keys, no spaces, no NaN."""
    return _dumped(plain(value))


def _dumped(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def plain(value: Any) -> Any:
    """Dataclasses, tuples and NumPy scalars as JSON data; a number that is not finite becomes None."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain({f.name: getattr(value, f.name) for f in fields(value)})
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        items = sorted(value, key=str) if isinstance(value, set | frozenset) else value
        return [plain(v) for v in items]
    if isinstance(value, bool | str | None):
        return value
    if isinstance(value, int):
        return int(value)
    if hasattr(value, "item") and not isinstance(value, float):  # NumPy scalars
        return plain(value.item())
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return str(value)


def from_json(data: memoryview, what: str) -> Any:
    """JSON data: no key twice, no NaN. Raises EngineError."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(items)
        if len(made) != len(items):
            raise EngineError(f"{what}: a key stands there twice")
        return made

    def constant(name: str) -> float:
        raise EngineError(f"{what}: {name} is no number here")

    text = bytes(data)
    try:
        found = json.loads(text, object_pairs_hook=pairs, parse_constant=constant)
        again = _dumped(found)
    except (ValueError, RecursionError, MemoryError) as e:
        raise EngineError(f"{what} cannot be read: {str(e)[:200]}") from e
    if again != text:
        raise EngineError(f"{what} is not as whet writes it: sorted keys, no spaces, numbers in their shortest form")
    return found


class Reader:
    """A value of parsed JSON with the path to it, for errors that say where."""

    __slots__ = ("key", "parent", "value")

    def __init__(self, value: Any, key: Any, parent: Reader | None = None):
        self.value, self.key, self.parent = value, key, parent

    @property
    def path(self) -> str:
        """`info.report.candidates['conv1'][3]`: made only when something is wrong."""
        if self.parent is None:
            return str(self.key)
        if isinstance(self.key, str) and self.key.isidentifier():
            return f"{self.parent.path}.{self.key}"
        return f"{self.parent.path}[{self.key if isinstance(self.key, int) else repr(self.key[:60])}]"

    def fail(self, expected: str) -> EngineError:
        return EngineError(f"{self.path} should be {expected}, it is {str(self.value)[:60]!r}: the engine is damaged or contradicts itself")

    def object(self, *keys: str) -> Reader:
        """Checks that this is an object with exactly these keys."""
        if not isinstance(self.value, dict) or (keys and set(self.value) != set(keys)):
            raise self.fail(f"an object with {', '.join(keys)}" if keys else "an object")
        return self

    def __getitem__(self, key: str) -> Reader:
        return Reader(self.value[key], key, self)

    def items(self) -> list[tuple[str, Reader]]:
        self.object()
        return [(k, Reader(v, k, self)) for k, v in self.value.items()]

    def rows(self, length: int | None = None) -> list[Reader]:
        if not isinstance(self.value, list) or (length is not None and len(self.value) != length):
            raise self.fail("a list" if length is None else f"a list of {length}")
        return [Reader(v, i, self) for i, v in enumerate(self.value)]

    def integer(self, low: int = 0, high: int = LARGEST) -> int:
        if type(self.value) is not int or not low <= self.value <= high:
            raise self.fail(f"an integer from {low} to {high}")
        return self.value

    def text(self, longest: int = 1 << 16) -> str:
        if not isinstance(self.value, str) or len(self.value) > longest:
            raise self.fail(f"text of at most {longest} characters")
        return self.value

    def flag(self) -> bool:
        if not isinstance(self.value, bool):
            raise self.fail("true or false")
        return self.value

    def number(self) -> float:
        if isinstance(self.value, bool) or not isinstance(self.value, int | float) or not abs(self.value) < 1e300:
            raise self.fail("a number")
        return float(self.value)

    def free(self) -> dict[str, Any]:
        """An object of any content, at most 24 levels deep."""
        level = [self.object().value]
        for _ in range(_DEEPEST):
            level = [v for x in level for v in (x.values() if isinstance(x, dict) else x) if isinstance(v, dict | list)]
        if level:
            raise self.fail(f"data of at most {_DEEPEST} levels")
        return self.value

    def optional(self, read: Callable[[Reader], Any]) -> Any:
        return None if self.value is None else read(self)


# choices


def choices_to_data(choices: Mapping[str, Choice]) -> dict[str, Any]:
    return {name: asdict(c) for name, c in choices.items()}


def choices_from(data: Reader) -> dict[str, Choice]:
    return {name: _choice(r) for name, r in data.items()}


def _choice(r: Reader) -> Choice:
    r.object("tactic", "config", "inputs", "outputs", "inplace", "implementation", "rtol", "deterministic")
    return Choice(
        tactic=r["tactic"].text(200),
        config=_config(r["config"]),
        inputs=tuple(o.optional(_operand) for o in r["inputs"].rows()),
        outputs=tuple(_operand(o) for o in r["outputs"].rows()),
        inplace=tuple((a.integer(0, 10**6), b.integer(0, 10**6)) for a, b in (p.rows(2) for p in r["inplace"].rows())),
        implementation=r["implementation"].text(2000),
        rtol=r["rtol"].number(),
        deterministic=r["deterministic"].flag(),
    )


def _config(r: Reader) -> tuple[tuple[str, int | str], ...]:
    made: list[tuple[str, int | str]] = []
    for name, value in (pair.rows(2) for pair in r.rows()):
        made.append((name.text(200), value.text(1000) if isinstance(value.value, str) else value.integer(-(1 << 62), 1 << 62)))
    return tuple(made)


def _operand(r: Reader) -> tuple[str, str]:
    fmt, dtype = r.rows(2)
    return fmt.text(60), dtype.text(60)


# profiles and arenas

MOST_LANES = 4096  # samples at once: more than any machine has threads

def profiles_to_data(profiles: list[Profile]) -> list[Any]:
    return [{name: [list(s) for s in shapes] for name, shapes in p.shapes.items()} for p in profiles]


def profiles_from(r: Reader) -> list[Profile]:
    if len(r.rows()) > 256:
        raise r.fail("a list of at most 256 profiles")
    return [Profile({name: _three_shapes(s) for name, s in p.items()}) for p in r.rows()]


def _three_shapes(r: Reader) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    low, opt, high = (tuple(d.integer(0, LARGEST_DIM) for d in s.rows()) for s in r.rows(3))
    return low, opt, high


def arenas_to_data(arenas: list[ArenaPlan]) -> list[Any]:
    return [a.data() for a in arenas]


def arenas_from(r: Reader) -> list[ArenaPlan]:
    return [_arena(a) for a in r.rows()]


def _arena(r: Reader) -> ArenaPlan:
    apart = "lanes" in r.object().value
    r.object("total", "offsets", "sizes", "scratch_offset", "scratch_bytes", *(["lanes"] if apart else []))
    return ArenaPlan(
        r["total"].integer(),
        {n: v.integer() for n, v in r["offsets"].items()},
        {n: v.integer() for n, v in r["sizes"].items()},
        r["scratch_offset"].integer(),
        r["scratch_bytes"].integer(),
        r["lanes"].integer(1, MOST_LANES) if apart else 0,
    )


# the report


def report_to_data(report: Mapping[str, Any]) -> dict[str, Any]:
    """The report as JSON data. Layers of one kind have the same candidates: each stands there once, layers name them by number."""
    data = plain({k: v for k, v in report.items() if k != "candidates"})
    if "candidates" in report:
        rows: dict[Candidate, int] = {}
        layers = {name: [rows.setdefault(c, len(rows)) for c in found] for name, found in sorted(report["candidates"].items())}
        data["candidates"] = {"layers": layers, "rows": [plain(c) for c in rows]}
    return data


def report_from(r: Reader) -> dict[str, Any]:
    """The report: free data, but what the inspector reads is checked, and candidates become Candidates again."""
    data = dict(r.free())
    for name, check in _REPORTED.items():
        if name in data:
            check(r[name])
    if "candidates" in data:
        table = r["candidates"].object("layers", "rows")
        rows = [_candidate(c) for c in table["rows"].rows()]
        layers = table["layers"].items()
        data["candidates"] = {name: [rows[k.integer(0, len(rows) - 1)] for k in numbers.rows()] for name, numbers in layers}
    return data


def _times(r: Reader) -> None:
    for _, ms in r.items():
        ms.optional(Reader.number)


def _rows_of_times(r: Reader) -> None:
    for _, row in r.items():
        for ms in row.rows():
            ms.optional(Reader.number)


def _passes(r: Reader) -> None:
    r.object("order", "fired", "skipped")
    for name in r["order"].rows():
        name.text()
    for row in (*r["fired"].rows(), *r["skipped"].rows()):
        for text in row.rows(3):
            text.text()


def _notes(r: Reader) -> None:
    for note in r.rows():
        note.text()


def _engines(r: Reader) -> None:
    for e in r.rows():
        e.free()


_REPORTED: dict[str, Callable[[Reader], Any]] = {
    "layer_ms": _times,
    "cold_ms": _rows_of_times,
    "passes": _passes,
    "notes": _notes,
    "info": _notes,
    "engines": _engines,
    "choice": Reader.free,
    "precisions": Reader.free,
    "latency_ms": lambda r: r.optional(Reader.number),
}


def machine_from(r: Reader) -> dict[str, Any]:
    """What the machine was: free data, but `libraries` are names with versions and rates are numbers."""
    data = r.free()
    if "libraries" in data:
        for _, version in r["libraries"].items():
            version.text(1000)
    for rate in ("peak_flops_per_s", "bytes_per_s"):
        if rate in data:
            r[rate].number()
    return data


def _candidate(r: Reader) -> Candidate:
    r.object("tactic", "signature", "config", "implementation", "ms", "spread_ms", "reason")
    return Candidate(
        r["tactic"].text(200),
        r["signature"].text(4000),
        _config(r["config"]),
        r["implementation"].text(2000),
        r["ms"].optional(Reader.number),
        r["spread_ms"].optional(Reader.number),
        r["reason"].text(10000),
    )


def probe_from(r: Reader) -> dict[str, Any]:
    """The probe, checked; {} when there is none."""
    if not r.object().value:
        return {}
    r.object("seed", "rtol", "shapes", "outputs")
    outputs = {}
    for name, o in r["outputs"].items():
        o.object("shape", "values")
        values = [v.optional(Reader.number) for v in o["values"].rows()]
        outputs[name] = {"shape": [d.integer(0, LARGEST_DIM) for d in o["shape"].rows()], "values": values}
    return {
        "seed": r["seed"].integer(0, (1 << 32) - 1),
        "rtol": r["rtol"].number(),
        "shapes": {n: [d.integer(0, LARGEST_DIM) for d in s.rows()] for n, s in r["shapes"].items()},
        "outputs": outputs,
    }
