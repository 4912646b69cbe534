"""LLVM IR of MatMulInteger: exact sums of products of 16-bit integers.

vpmaddubsw on the 8-bit values would saturate. AVX2's vpmaddwd multiplies 16-bit values and adds pairs in 32 bits without loss; on other CPUs LLVM
selects multiplications that widen and additions of pairs (smull, addp).
"""

from __future__ import annotations

from functools import cache

from whet.tactics.cpu._llvm.builder import INT8, INT16, INT32, LANES, Function, Module, Pointer, Type, Value
from whet.tactics.cpu._llvm.work_stealing import parallel_kernel

COLUMNS, ROWS = 16, 4  # of one tile of the product
_HALF = COLUMNS // 2  # columns of one AVX2 register
WIDEN_WORDS = ("source", "target", "rows", "size", "padded_size", "share", "packed", "sums")
PRODUCT_WORDS = ("a", "zero", "out", "blocks", "rows", "columns", "padded_size", "share", "packed", "sums")
"""The context: A [rows, padded_size] of 16 bits, the address of its zero point (0: absent), the result, blocks of COLUMNS columns, rows and columns
of the result, elements of a row of A; packed B by blocks of columns, pairs of rows interleaved, less its zero point; the sums of B's columns."""


@cache
def emit_integer_matmul_ir(signed: bool, has_zero: bool, tail: int, size_tail: int, has_avx2: bool) -> str:
    """`widen(context)` converts A to 16 bits; `product(context)` computes the result. `tail`: columns after the last whole block; `size_tail`:
    elements of a row of A after its last whole vector."""
    module = Module()
    widening = "sext" if signed else "zext"
    with parallel_kernel(module, "widen", WIDEN_WORDS, "rows") as (f, w):
        with f.loop(w.begin, w.end) as rows:
            source = w.source.as_pointer(INT8).at(rows.index * w.size)
            target = w.target.as_pointer(INT16).at(rows.index * w.padded_size)
            whole = w.size - size_tail
            with f.loop(0, whole, step=LANES) as vectors:
                target.store(source.load(vectors.index, LANES).convert(widening, INT16), vectors.index)
            with f.loop(whole, w.size) as rest:
                target.store(source.load(rest.index).convert(widening, INT16), rest.index)
            with f.loop(w.size, w.padded_size) as padding:
                target.store(0, padding.index)
    with parallel_kernel(module, "product", PRODUCT_WORDS, "blocks") as (f, w):
        tile = _Tile(f, w, signed, has_zero, tail, has_avx2)
        with f.loop(w.begin, w.end) as blocks:
            block = w.packed.as_pointer(INT16).at(blocks.index * (w.padded_size * COLUMNS))
            with f.loop(0, w.rows - (ROWS - 1), step=ROWS) as groups:
                tile.compute(groups.index, ROWS, block, blocks.index)
            with f.loop(groups.index, w.rows) as rest:
                tile.compute(rest.index, 1, block, blocks.index)
    return str(module)


class _Tile:
    """Rows times one block of columns."""

    def __init__(self, f: Function, w, signed: bool, has_zero: bool, tail: int, has_avx2: bool) -> None:
        self._f, self._w, self._tail, self._has_avx2 = f, w, tail, has_avx2
        self._zero: Value | None = None
        if has_zero:
            self._zero = w.zero.as_pointer(INT8).load().convert("sext" if signed else "zext", INT32).broadcast(_HALF)

    def compute(self, row: Value, rows: int, block: Pointer, index: Value) -> None:
        f, w = self._f, self._w
        a = [w.a.as_pointer(INT16).at((row + r) * w.padded_size) for r in range(rows)]
        halves = range(2)
        start = [f.value(0, Type("i32", _HALF))] * (2 * rows)
        with f.loop(0, w.padded_size, step=2, carried=start) as loop:
            pairs = [block.load(loop.index * COLUMNS + 2 * _HALF * k, 2 * _HALF) for k in halves]
            sums = []
            for r in range(rows):
                pair = f.emit_pointer(INT32, f"bitcast {a[r].at(loop.index)} to i32*").load().broadcast(_HALF)
                factor = f.emit(Type("i16", 2 * _HALF), f"bitcast {pair} to <{2 * _HALF} x i16>", pair)
                for k in halves:
                    sums.append(loop.values[2 * r + k] + self._multiply(factor, pairs[k]))
            loop.carry(*sums)
        column = index * COLUMNS
        results = loop.results
        if self._zero is not None:
            sums_of_b = [w.sums.as_pointer(INT32).load(column + _HALF * k, _HALF) for k in halves]
            results = [x - self._zero * sums_of_b[i % 2] for i, x in enumerate(results)]
        for r in range(rows):
            self._store(w.out.as_pointer(INT32).at((row + r) * w.columns + column), results[2 * r : 2 * r + 2], column)

    def _multiply(self, a: Value, b: Value) -> Value:
        """The sums of two adjacent products of 16-bit values."""
        f = self._f
        if self._has_avx2:
            return f.call_external("llvm.x86.avx2.pmadd.wd", Type("i32", _HALF), a, b)
        products = a.convert("sext", INT32) * b.convert("sext", INT32)
        even, odd = (f.shuffle(products, products, range(k, 2 * _HALF, 2)) for k in range(2))
        return even + odd

    def _store(self, out: Pointer, values: list[Value], column: Value) -> None:
        """Stores a block's row, only the columns that exist."""
        f, w = self._f, self._w

        def store_all() -> None:
            for k, value in enumerate(values):
                out.store(value, _HALF * k)

        if not self._tail:
            store_all()
            return
        is_whole = w.columns - column >= COLUMNS
        with f.when(is_whole):
            store_all()
        with f.when(w.columns - column < COLUMNS):
            done = 0
            for lanes in (8, 4, 2, 1):
                if self._tail & lanes:
                    source = values[done // _HALF]
                    if lanes == 1:
                        part = f.emit(INT32, f"extractelement {source}, i32 {done % _HALF}", source)
                    else:
                        part = source if lanes == _HALF else f.shuffle(source, source, [done % _HALF + i for i in range(lanes)])
                    out.store(part, done)
                    done += lanes
