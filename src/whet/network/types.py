"""Element types and tensor types. Sizes are in bits, so int4 and float8 are ordinary types."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import ml_dtypes
import numpy as np

from whet.errors import NetworkError, UnsupportedError
from whet.forks import cached_property
from whet.network.dims import Dim, Expr, Shape, ceildiv, find_symbols, parse_dim, product


@dataclass(frozen=True)
class DType:
    """An element type: its name in the text form, its size in bits, and its kind (float, int, uint, bool, string)."""

    name: str
    bits: int
    kind: str

    @cached_property
    def numpy(self) -> np.dtype:
        """The NumPy type of one element (sub-byte types use one byte per element)."""
        return np.dtype(_NUMPY[self.name])

    @property
    def is_float(self) -> bool:
        return self.kind == "float"

    def __str__(self) -> str:
        return self.name

    __repr__ = __str__


_NUMPY = {
    "f64": np.float64, "f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16,
    "f8e4m3": ml_dtypes.float8_e4m3fn, "f8e5m2": ml_dtypes.float8_e5m2,
    "f8e4m3fnuz": ml_dtypes.float8_e4m3fnuz, "f8e5m2fnuz": ml_dtypes.float8_e5m2fnuz, "f4e2m1": ml_dtypes.float4_e2m1fn,
    "i64": np.int64, "i32": np.int32, "i16": np.int16, "i8": np.int8, "i4": ml_dtypes.int4, "i2": ml_dtypes.int2,
    "u64": np.uint64, "u32": np.uint32, "u16": np.uint16, "u8": np.uint8, "u4": ml_dtypes.uint4, "u2": ml_dtypes.uint2,
    "bool": np.bool_, "string": np.object_,
}  # fmt: skip

F64, F32, F16, BF16 = DType("f64", 64, "float"), DType("f32", 32, "float"), DType("f16", 16, "float"), DType("bf16", 16, "float")
F8E4M3, F8E5M2 = DType("f8e4m3", 8, "float"), DType("f8e5m2", 8, "float")
F8E4M3FNUZ, F8E5M2FNUZ = DType("f8e4m3fnuz", 8, "float"), DType("f8e5m2fnuz", 8, "float")  # without infinities and negative zero
F4E2M1 = DType("f4e2m1", 4, "float")
I64, I32, I16, I8, I4, I2 = (DType(f"i{b}", b, "int") for b in (64, 32, 16, 8, 4, 2))
U64, U32, U16, U8, U4, U2 = (DType(f"u{b}", b, "uint") for b in (64, 32, 16, 8, 4, 2))
BOOL, STRING = DType("bool", 8, "bool"), DType("string", 64, "string")

_FLOATS = (F64, F32, F16, BF16, F8E4M3, F8E5M2, F8E4M3FNUZ, F8E5M2FNUZ, F4E2M1)
SMALL_FLOATS = frozenset(t for t in _FLOATS if t.bits <= 8)
DTYPES = {t.name: t for t in (*_FLOATS, I64, I32, I16, I8, I4, I2, U64, U32, U16, U8, U4, U2, BOOL, STRING)}
_FROM_NUMPY = {t.numpy: t for t in DTYPES.values() if t is not STRING}


def get_dtype(array: np.ndarray) -> DType:
    """The element type of a NumPy array. Raises NetworkError for an unsupported one (complex, strings)."""
    try:
        return _FROM_NUMPY[array.dtype]
    except KeyError:
        raise NetworkError(f"arrays of type {array.dtype} are not supported; supported: {', '.join(DTYPES)}") from None


@dataclass(frozen=True)
class TensorType:
    """Element type and shape of a tensor; dims are ints or expressions over symbols."""

    dtype: DType
    shape: Shape

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def elements(self) -> Dim:
        """Number of elements; an expression if sizes are symbolic."""
        return product(self.shape)

    @property
    def nbytes(self) -> Dim:
        """Bytes of the dense row-major form; sub-byte elements are packed."""
        bits = self.elements * self.dtype.bits
        return ceildiv(bits, 8) if self.dtype.bits < 8 else self.elements * (self.dtype.bits // 8)

    @property
    def static(self) -> bool:
        """True if all sizes are numbers."""
        return all(isinstance(d, int) for d in self.shape)

    def is_static_up_to(self, elements: int) -> bool:
        """True if all sizes are numbers and their product is at most `elements`."""
        return self.static and prod(d for d in self.shape if isinstance(d, int)) <= elements

    def symbols(self) -> set[str]:
        """Names of the symbols in the shape."""
        return set().union(*(find_symbols(d) for d in self.shape)) if self.shape else set()

    def with_dtype(self, dtype: DType) -> TensorType:
        return TensorType(dtype, self.shape)

    def with_shape(self, shape) -> TensorType:
        return TensorType(self.dtype, tuple(shape))

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"

    __repr__ = __str__


MAX_ELEMENTS = 2**40  # of one tensor: beyond any machine's memory, and far enough from 2^63 for sums and products of offsets


def check_size(t: TensorType, where: str) -> None:
    """Raises UnsupportedError if the static sizes of `t` alone give more than MAX_ELEMENTS elements; the message starts with `where`."""
    if prod(d for d in t.shape if isinstance(d, int)) > MAX_ELEMENTS:
        raise UnsupportedError(f"{where} {t}, which has more than 2^40 elements, too large for any machine")


_TYPE = re.compile(r"(\w+)\[([^\]]*)\]")


@lru_cache(4096)
def parse_type(text: str) -> TensorType:
    """`f32[N,3,224,224]` as a TensorType. Raises NetworkError."""
    m = _TYPE.fullmatch(text.strip())
    if not m or m[1] not in DTYPES:
        raise NetworkError(f"{text[:80]!r} is no tensor type; an example: f32[N,3,224,224]; element types: {', '.join(DTYPES)}")
    return TensorType(DTYPES[m[1]], tuple(parse_dim(d) for d in _split(m[2])))


def _split(text: str) -> list[str]:
    """Splits at commas outside parentheses (min(a,b) has one inside)."""
    out, depth, start = [], 0, 0
    for i, ch in enumerate(text):
        depth += (ch == "(") - (ch == ")")
        if ch == "," and depth == 0:
            out.append(text[start:i])
            start = i + 1
    if text[start:].strip():
        out.append(text[start:])
    return out


def static_shape(shape: Shape) -> tuple[int, ...]:
    """`shape` as ints. Raises NetworkError if a dimension is symbolic."""
    sizes = []
    for d in shape:
        if isinstance(d, Expr):
            raise NetworkError(f"shape {list(map(str, shape))} is not static: {d} has no value yet")
        sizes.append(int(d))
    return tuple(sizes)
