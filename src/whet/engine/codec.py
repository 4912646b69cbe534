"""The parts of a plan as JSON data and back. Reading checks every key, type and range, and names the error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from whet.engine.json_data import Reader
from whet.engine.plan import ArenaPlan, Choice, Profile

LARGEST_DIM = 1 << 40

# choices


def encode_choices(choices: Mapping[str, Choice]) -> dict[str, Any]:
    return {name: asdict(c) for name, c in choices.items()}


def decode_choices(data: Reader) -> dict[str, Choice]:
    return {name: decode_choice(r) for name, r in data.items()}


def decode_choice(r: Reader) -> Choice:
    """A layer's choice from its record. EngineError for a damaged one."""
    r.object("tactic", "config", "inputs", "outputs", "inplace", "implementation", "rtol", "deterministic")
    return Choice(
        tactic=r["tactic"].text(200),
        config=decode_config(r["config"]),
        inputs=tuple(o.optional(_decode_operand) for o in r["inputs"].rows()),
        outputs=tuple(_decode_operand(o) for o in r["outputs"].rows()),
        inplace=tuple((a.integer(0, 10**6), b.integer(0, 10**6)) for a, b in (p.rows(2) for p in r["inplace"].rows())),
        implementation=r["implementation"].text(2000),
        rtol=r["rtol"].number(),
        deterministic=r["deterministic"].flag(),
    )


def decode_config(r: Reader) -> tuple[tuple[str, int | str], ...]:
    """A tactic's configuration from its record."""
    made: list[tuple[str, int | str]] = []
    for name, value in (pair.rows(2) for pair in r.rows()):
        made.append((name.text(200), value.text(1000) if isinstance(value.value, str) else value.integer(-(1 << 62), 1 << 62)))
    return tuple(made)


def _decode_operand(r: Reader) -> tuple[str, str]:
    fmt, dtype = r.rows(2)
    return fmt.text(60), dtype.text(60)


# profiles and arenas

MOST_CONCURRENT_SAMPLES = 4096  # concurrent samples: more than any machine has threads

def encode_profiles(profiles: list[Profile]) -> list[Any]:
    return [{name: [list(s) for s in shapes] for name, shapes in p.shapes.items()} for p in profiles]


def decode_profiles(r: Reader) -> list[Profile]:
    if len(r.rows()) > 256:
        raise r.fail("a list of at most 256 profiles")
    return [Profile({name: _decode_three_shapes(s) for name, s in p.items()}) for p in r.rows()]


def _decode_three_shapes(r: Reader) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    low, opt, high = (tuple(d.integer(0, LARGEST_DIM) for d in s.rows()) for s in r.rows(3))
    return low, opt, high


def encode_arenas(arenas: list[ArenaPlan]) -> list[Any]:
    return [a.data() for a in arenas]


def decode_arenas(r: Reader) -> list[ArenaPlan]:
    return [_decode_arena(a) for a in r.rows()]


def _decode_arena(r: Reader) -> ArenaPlan:
    is_sample_parallel = "lanes" in r.object().value
    r.object("total", "offsets", "sizes", "scratch_offset", "scratch_bytes", *(["lanes"] if is_sample_parallel else []))
    return ArenaPlan(
        r["total"].integer(),
        {n: v.integer() for n, v in r["offsets"].items()},
        {n: v.integer() for n, v in r["sizes"].items()},
        r["scratch_offset"].integer(),
        r["scratch_bytes"].integer(),
        r["lanes"].integer(1, MOST_CONCURRENT_SAMPLES) if is_sample_parallel else 0,
    )


def decode_machine(r: Reader) -> dict[str, Any]:
    """The machine's description: unstructured data, except that `libraries` has names with versions and rates are numbers."""
    data = r.free()
    if "libraries" in data:
        for _, version in r["libraries"].items():
            version.text(1000)
    for rate in ("peak_flops_per_s", "bytes_per_s"):
        if rate in data:
            r[rate].number()
    return data


def decode_probe(r: Reader) -> dict[str, Any]:
    """The validated probe; {} if there is none."""
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
