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

    def __init__(self, value: Any, path: str):
        self.value, self.path = value, path

    def fail(self, expected: str) -> EngineError:
        return EngineError(f"{self.path} should be {expected}, it is {str(self.value)[:60]!r}: the engine is damaged or contradicts itself")

    def object(self, *keys: str) -> Reader:
        """Checks that this is an object with exactly these keys."""
        if not isinstance(self.value, dict) or (keys and set(self.value) != set(keys)):
            raise self.fail(f"an object with {', '.join(keys)}" if keys else "an object")
        return self

    def __getitem__(self, key: str) -> Reader:
        return Reader(self.value[key], f"{self.path}.{key}")

    def items(self) -> list[tuple[str, Reader]]:
        self.object()
        return [(k, Reader(v, f"{self.path}[{k[:60]!r}]")) for k, v in self.value.items()]

    def list(self, length: int | None = None) -> list[Reader]:
        if not isinstance(self.value, list) or (length is not None and len(self.value) != length):
            raise self.fail("a list" if length is None else f"a list of {length}")
        return [Reader(v, f"{self.path}[{i}]") for i, v in enumerate(self.value)]

    def int(self, low: int = 0, high: int = LARGEST) -> int:
        if type(self.value) is not int or not low <= self.value <= high:
            raise self.fail(f"an integer from {low} to {high}")
        return self.value

    def str(self, longest: int = 1 << 16) -> str:
        if not isinstance(self.value, str) or len(self.value) > longest:
            raise self.fail(f"text of at most {longest} characters")
        return self.value

    def bool(self) -> bool:
        if not isinstance(self.value, bool):
            raise self.fail("true or false")
        return self.value

    def float(self) -> float:
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
        tactic=r["tactic"].str(200),
        config=_config(r["config"]),
        inputs=tuple(o.optional(_operand) for o in r["inputs"].list()),
        outputs=tuple(_operand(o) for o in r["outputs"].list()),
        inplace=tuple((a.int(0, 10**6), b.int(0, 10**6)) for a, b in (p.list(2) for p in r["inplace"].list())),
        implementation=r["implementation"].str(2000),
        rtol=r["rtol"].float(),
        deterministic=r["deterministic"].bool(),
    )


def _config(r: Reader) -> tuple[tuple[str, int | str], ...]:
    made: list[tuple[str, int | str]] = []
    for name, value in (pair.list(2) for pair in r.list()):
        made.append((name.str(200), value.str(1000) if isinstance(value.value, str) else value.int(-(1 << 62), 1 << 62)))
    return tuple(made)


def _operand(r: Reader) -> tuple[str, str]:
    fmt, dtype = r.list(2)
    return fmt.str(60), dtype.str(60)


# profiles and arenas


def profiles_to_data(profiles: list[Profile]) -> list[Any]:
    return [{name: [list(s) for s in shapes] for name, shapes in p.shapes.items()} for p in profiles]


def profiles_from(r: Reader) -> list[Profile]:
    if len(r.list()) > 256:
        raise r.fail("a list of at most 256 profiles")
    return [Profile({name: _three_shapes(s) for name, s in p.items()}) for p in r.list()]


def _three_shapes(r: Reader) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    low, opt, high = (tuple(d.int(0, LARGEST_DIM) for d in s.list()) for s in r.list(3))
    return low, opt, high


def arenas_from(r: Reader) -> list[ArenaPlan]:
    return [_arena(a) for a in r.list()]


def _arena(r: Reader) -> ArenaPlan:
    r.object("total", "offsets", "sizes", "scratch_offset", "scratch_bytes")
    return ArenaPlan(
        r["total"].int(),
        {n: v.int() for n, v in r["offsets"].items()},
        {n: v.int() for n, v in r["sizes"].items()},
        r["scratch_offset"].int(),
        r["scratch_bytes"].int(),
    )


# the report


def report_from(r: Reader) -> dict[str, Any]:
    """The report: free data, but its candidates become Candidates again."""
    data = dict(r.free())
    if "candidates" in data:
        data["candidates"] = {name: [_candidate(c) for c in found.list()] for name, found in r["candidates"].items()}
    return data


def _candidate(r: Reader) -> Candidate:
    r.object("tactic", "signature", "config", "implementation", "ms", "spread_ms", "reason")
    return Candidate(
        r["tactic"].str(200),
        r["signature"].str(4000),
        _config(r["config"]),
        r["implementation"].str(2000),
        r["ms"].optional(Reader.float),
        r["spread_ms"].optional(Reader.float),
        r["reason"].str(10000),
    )


def probe_from(r: Reader) -> dict[str, Any]:
    """The probe, checked; {} when there is none."""
    if not r.object().value:
        return {}
    r.object("seed", "rtol", "shapes", "outputs")
    outputs = {}
    for name, o in r["outputs"].items():
        o.object("shape", "values")
        values = [v.optional(Reader.float) for v in o["values"].list()]
        outputs[name] = {"shape": [d.int(0, LARGEST_DIM) for d in o["shape"].list()], "values": values}
    return {
        "seed": r["seed"].int(0, (1 << 32) - 1),
        "rtol": r["rtol"].float(),
        "shapes": {n: [d.int(0, LARGEST_DIM) for d in s.list()] for n, s in r["shapes"].items()},
        "outputs": outputs,
    }
