"""Copies of the rows of k and v in the order in which products read them, as LLVM IR.

A panel has `width` columns of a matrix with the columns after one another for each row: [panel][row][width]. Columns after the matrix are zeros,
or, of transposed panels, any values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from whet.tactics.cpu._llvm.builder import Function, Module, Pointer, Type, Value

_PAIRS = 16  # of a tile of bf16: columns, each with the values of two rows


@dataclass(frozen=True)
class Panels:
    """The sizes of a matrix of f32 values and of its panels. `rows` and `padded_rows`: a panel's rows, and those with zeros after them."""

    rows: int
    columns: int
    width: int
    lanes: int
    padded_rows: int

    @property
    def count(self) -> int:
        return -(-self.columns // self.width)

    @property
    def floats(self) -> int:
        """Of one panel."""
        return self.padded_rows * self.width


def emit_copied_panels(module: Module, name: str, p: Panels) -> Function:
    """`name(source, target, stride)`: panels of a matrix with `stride` floats from row to row."""
    with module.function(name, ["float*", "float*", "i64"]) as f:
        source, target, stride = _get_arguments(f)
        whole = p.columns // p.width

        def copy(panel: Value | int, columns: int) -> None:
            x, y = source.at(f.value(panel) * p.width), target.at(f.value(panel) * p.floats)
            with f.loop(0, p.rows) as rows:
                for column in range(0, p.width, p.lanes):
                    line = x.at(rows.index * stride + column)
                    y.store(load_part(f, line, columns - column, p.lanes), rows.index * p.width + column)
            with f.loop(p.rows * p.width, p.floats, step=p.lanes) as rest:
                y.store(f.value(0.0, Type("float", p.lanes)), rest.index)

        with f.loop(0, whole) as panels:
            copy(panels.index, p.width)
        if p.columns % p.width:
            copy(whole, p.columns % p.width)
    return f


def emit_transposed_panels(module: Module, name: str, p: Panels) -> Function:
    """`name(source, target, stride)`: panels of the transpose of a matrix of `p.columns` rows, each of `p.rows` floats, `stride` floats apart.

    Blocks of `lanes` rows and columns are transposed in registers. The last row stands in for rows after it.
    """
    with module.function(name, ["float*", "float*", "i64"]) as f:
        source, target, stride = _get_arguments(f)
        vectors = p.width // p.lanes
        zero = f.value(0.0, Type("float", p.lanes))
        with f.loop(0, p.count * vectors) as blocks:
            first = blocks.index * p.lanes
            lines = [source.at(f.minimum(first + i, p.columns - 1) * stride) for i in range(p.lanes)]
            y = target.at(blocks.index // vectors * p.floats + blocks.index % vectors * p.lanes)

            def transpose(row: Value, count: int, lines: Sequence[Pointer] = lines, y: Pointer = y) -> None:
                turned = transpose_vectors(f, [load_part(f, line.at(row), count, p.lanes) for line in lines])
                for k in range(min(count, p.lanes)):
                    y.store(turned[k], (row + k) * p.width)

            whole = p.rows - p.rows % p.lanes
            with f.loop(0, whole, step=p.lanes) as rows:
                transpose(rows.index, p.lanes)
            if p.rows > whole:
                transpose(f.value(whole), p.rows - whole)
            with f.loop(p.rows, p.padded_rows) as rest:
                y.store(zero, rest.index * p.width)
    return f


def emit_paired_tiles(module: Module, name: str, rows: int, columns: int, pairs: int, tiles: int) -> Function:
    """`name(source, target, stride)`: [tile][pair of rows][16 columns][row of the pair] of a matrix of 16-bit values, as AMX multiplies them; all
    `pairs` and `tiles`, with zeros after the matrix. `stride`: values from row to row."""
    with module.function(name, ["i16*", "i16*", "i64"]) as f:
        source, target, stride = _get_arguments(f)
        zero = f.value(0, Type("i16", _PAIRS))

        def copy(pair: Value | int, count: int) -> None:
            """Two rows, or one and zeros."""
            line = source.at(f.value(pair) * 2 * stride)
            for tile in range(tiles):
                first = load_part(f, line.at(tile * _PAIRS), columns - tile * _PAIRS, _PAIRS)
                second = load_part(f, line.at(stride + tile * _PAIRS), columns - tile * _PAIRS, _PAIRS) if count == 2 else zero
                joined = f.shuffle(first, second, [k // 2 + k % 2 * _PAIRS for k in range(2 * _PAIRS)])
                target.store(joined, f.value(pair) * (2 * _PAIRS) + tile * pairs * 2 * _PAIRS)

        with f.loop(0, rows // 2) as loop:
            copy(loop.index, 2)
        if rows % 2:
            copy(rows // 2, 1)
        with f.loop(-(-rows // 2), pairs) as rest:
            for tile in range(tiles):
                target.store(f.value(0, Type("i16", 2 * _PAIRS)), rest.index * (2 * _PAIRS) + tile * pairs * 2 * _PAIRS)
    return f


def emit_copied_rows(module: Module, name: str, rows: int, columns: int, padded: int) -> Function:
    """`name(source, target, stride)`: rows of 16-bit values, `padded` of each, with zeros after the `columns`."""
    with module.function(name, ["i16*", "i16*", "i64"]) as f:
        source, target, stride = _get_arguments(f)
        with f.loop(0, rows) as loop:
            for column in range(0, padded, _PAIRS):
                part = load_part(f, source.at(loop.index * stride + column), columns - column, _PAIRS)
                target.store(part, loop.index * padded + column)
    return f


def transpose_vectors(f: Function, rows: Sequence[Value]) -> list[Value]:
    """The transpose of as many vectors as each has elements, a power of two: exchanges blocks of 1, 2, 4, ... (Eklundh, 1972)."""
    turned, lanes = list(rows), len(rows)
    distance = 1
    while distance < lanes:
        for i in (i for i in range(lanes) if not i & distance):
            a, b = turned[i], turned[i + distance]
            turned[i] = f.shuffle(a, b, [j if not j & distance else j - distance + lanes for j in range(lanes)])
            turned[i + distance] = f.shuffle(a, b, [j + distance if not j & distance else j + lanes for j in range(lanes)])
        distance *= 2
    return turned


def load_part(f: Function, at: Pointer, count: int, lanes: int) -> Value:
    """`count` values, at most a vector; the other lanes are 0."""
    if count >= lanes:
        return at.load(0, lanes)
    zero = f.value(0, Type(at.type.element, lanes))
    return zero if count <= 0 else at.load_masked([k < count for k in range(lanes)], zero)


def _get_arguments(f: Function) -> tuple[Pointer, Pointer, Value]:
    source, target, stride = f.arguments
    assert isinstance(source, Pointer)
    assert isinstance(target, Pointer)
    return source, target, stride
