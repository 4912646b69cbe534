"""Moves and the arithmetic between them in one launch of generated code: layers of the pass fuse_moves, such as detectors' heads."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from whet.backends import Backend
from whet.network import Layer, compute_stored_shape, static_shape
from whet.network.types import F32
from whet.tactics._base import Args, Config, Operand, PlanRefused, Signature, Tactic, tactic
from whet.tactics.cuda._device.arguments import Arguments, ConstFloatPointer, Pointer, UInt32, make_array_type
from whet.tactics.cuda._device.kernel import (
    FLOAT16_TYPES,
    GpuKernel,
    all_static,
    compile_ahead,
    count_blocks,
    launch,
    list_float_types,
    machine_has,
    make_packed_array,
    make_stored_signature,
)
from whet.tactics.cuda._device.source import emit_kernel_source
from whet.tactics.cuda.conv._conv import TYPES
from whet.tactics.cuda.move._moves import MovesCode, describe_moves

_BLOCK = 1024  # elements of a block
_WARPS = 8  # of a block
_EACH = 4  # elements of a thread
_LEAST = 32  # elements of a row that a warp takes
_ROWS = (1, 2, 4)  # that it takes
_TOGETHER = (4, 8)  # that it takes at once, all loads in front of all arithmetic
_SOURCES = 4


@dataclass(frozen=True)
class MovesArguments(Arguments, kernel="moves.cu"):
    out: Pointer
    input: Annotated[Sequence[int], make_array_type("const u8*", 4)]
    constants: ConstFloatPointer
    count: UInt32


@tactic
class Moves(Tactic):
    """Sources of one type in any format each, results in that type or f32."""

    ops = ("*",)
    composites = ("Moves",)
    what = "moves with arithmetic between them"

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        places = _list_sources(layer)
        if not all_static(layer) or len(layer.outputs) != 1 or not 0 < len(places) <= _SOURCES:
            return []
        out, signatures = layer.outputs[0], []
        for dtype in list_float_types([*(layer.inputs[i] for i in places), out], (*FLOAT16_TYPES, F32)):
            for form in ("nhwc", "linear"):
                ins = {i: Operand(form if layer.needs(i).type.rank == 4 else "linear", dtype) for i in places}
                if form == "nhwc" and all(o.format == "linear" for o in ins.values()):
                    continue
                for to in dict.fromkeys((dtype, F32) if out.dtype == F32 else (dtype,)):
                    signatures += [
                        make_stored_signature(layer, ins, Operand(f, to)) for f in (("nhwc", "linear") if out.type.rank == 4 else ("linear",))
                    ]
        return signatures

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        sizes = [static_shape(t.shape) for t in (*(layer.needs(i) for i in _list_sources(layer)), layer.outputs[0])]
        if any(functools.reduce(int.__mul__, s, 1) >= 2**31 for s in sizes):
            return "more than 2**31 elements"
        moves = match_moves(layer, signature)
        return moves if isinstance(moves, str) else None

    def configs(self, layer: Layer, signature: Signature, backend: Backend) -> list[Config]:
        row = static_shape(compute_stored_shape(signature.outputs[0].format, layer.outputs[0].shape))[-1]
        configs: list[Config] = [*((("rows", n),) for n in reversed(_ROWS) if row >= _LEAST), ()]
        if _LEAST <= row <= 32 * _EACH:
            bulk = [((), (("bulk", 1),))[b] for b in reversed(range(1 + machine_has(backend, "tma")))]
            wide = [(("together", n), *b) for n in _TOGETHER if n * row * signature.outputs[0].dtype.bits % 128 == 0 for b in bulk]
            configs = [*(c for c in wide if not isinstance(match_moves(layer, signature, c), str)), *configs]  # promising ones first
        made = [(m, c) for c in configs for m in [match_moves(layer, signature, c)] if not isinstance(m, str)]
        compile_ahead(backend, [emit_kernel_source("moves.cu", make_macros(m, signature, c)) for m, c in made])
        return configs

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        moves = match_moves(layer, signature, config)
        if isinstance(moves, str):
            raise PlanRefused(moves)
        many = _count_rows_per_warp(config)
        numbers, constants = moves.numbers, make_macros(moves, signature, config)
        key = "+".join(t.weight.digest for t in layer.inputs if t is not None and t.weight is not None)
        packed = (make_packed_array(f"{key}|moves", numbers.nbytes, lambda: numbers),)
        count = functools.reduce(int.__mul__, static_shape(layer.outputs[0].shape), 1)
        blocks = count_blocks(-(-count // moves.row // many) * _count_warps(moves.row), _WARPS) if moves.row else count_blocks(count, _BLOCK)

        def make(args: Args) -> list:
            given = [args.inputs[i] for i in moves.sources]
            sources = (*given, *(0,) * (_SOURCES - len(given)))
            arguments = MovesArguments(out=args.outputs[0], input=sources, constants=args.packed[0], count=count)
            return [launch("moves", arguments, constants, (blocks, 1, 1), 256)]

        given = dict(config)
        name = "moves" + f" by {many} rows" * bool(moves.row) + " together" * ("together" in given) + " in bulk" * ("bulk" in given)
        return GpuKernel(layer, signature, make, implementation=name, packed=packed)


def _list_sources(layer: Layer) -> list[int]:
    """Places of the inputs that are computed at run time."""
    return [i for i, t in enumerate(layer.inputs) if t is not None and not t.is_constant]


def match_moves(layer: Layer, signature: Signature, config: Config = ()) -> MovesCode | str:
    """The code of the moves, or why there is none."""
    formats = {i: signature.needs(i).format for i in _list_sources(layer)}
    return describe_moves(lambda: MovesCode(layer, formats, signature.outputs[0].format, bool(config), int(dict(config).get("together", 1))))


def _count_rows_per_warp(config: Config) -> int:
    """Rows of a warp."""
    given = dict(config)
    return int(given.get("together", given.get("rows", 1)))


def _count_warps(row: int) -> int:
    """Warps that a row takes."""
    return -(-row // (32 * _EACH))


def make_macros(code: MovesCode, signature: Signature, config: Config) -> dict[str, Any]:
    """The macros of an instance."""
    stored, many, joint = signature.needs(code.sources[0]), _count_rows_per_warp(config), dict(config).get("together", 0)
    each = -(-code.row // (32 * _count_warps(code.row))) if code.row else _EACH
    types: dict[str, Any] = {"FROM": TYPES[stored.dtype.name], "TO": TYPES[signature.outputs[0].dtype.name]}
    if joint:
        types |= {"BULK": dict(config).get("bulk", 0)}
    return {**types, "SPAN": code.row, "MANY": many, "JOINT": int(bool(joint)), "EACH": each * many if joint else each, "STEPS": code.text}
