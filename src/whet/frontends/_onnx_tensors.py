"""TensorProto -> NumPy array. External data files must be inside the model's folder and match the declared sizes."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from onnx import SparseTensorProto, TensorProto

from whet.errors import FrontendError, UnsupportedError
from whet.frontends._onnx_advice import DAMAGED
from whet.frontends._onnx_load import find_data_file
from whet.network import BF16, BOOL, DTYPES, F8E4M3, F8E5M2, F16, F32, F64, I4, I8, I16, I32, I64, MAX_ELEMENTS, STRING, U4, U8, U16, U32, U64, DType

DTYPE_OF_ONNX: dict[int, DType] = {
    TensorProto.FLOAT: F32, TensorProto.DOUBLE: F64, TensorProto.FLOAT16: F16, TensorProto.BFLOAT16: BF16,
    TensorProto.FLOAT8E4M3FN: F8E4M3, TensorProto.FLOAT8E5M2: F8E5M2,
    TensorProto.INT64: I64, TensorProto.INT32: I32, TensorProto.INT16: I16, TensorProto.INT8: I8, TensorProto.INT4: I4,
    TensorProto.UINT64: U64, TensorProto.UINT32: U32, TensorProto.UINT16: U16, TensorProto.UINT8: U8, TensorProto.UINT4: U4,
    TensorProto.BOOL: BOOL, TensorProto.STRING: STRING,
}  # fmt: skip
_NEWER = ("FLOAT8E4M3FNUZ", "f8e4m3fnuz"), ("FLOAT8E5M2FNUZ", "f8e5m2fnuz"), ("FLOAT4E2M1", "f4e2m1"), ("INT2", "i2"), ("UINT2", "u2")
DTYPE_OF_ONNX |= {getattr(TensorProto, name): DTYPES[dtype] for name, dtype in _NEWER if hasattr(TensorProto, name)}  # older packages lack some
ONNX_OF_DTYPE: dict[DType, int] = {d: code for code, d in DTYPE_OF_ONNX.items()}


def get_onnx_dtype(code: int, subject: str) -> DType:
    """whet's element type of an ONNX type code. Raises UnsupportedError naming `subject`."""
    if code in DTYPE_OF_ONNX:
        return DTYPE_OF_ONNX[code]
    name = TensorProto.DataType.Name(code) if code in TensorProto.DataType.values() else f"code {code}"
    raise UnsupportedError(
        f"{subject} has the element type {name}, which whet does not support; supported: {', '.join(map(str, ONNX_OF_DTYPE))}. Cast it before export."
    )


def read_onnx_array(t: TensorProto, folder: Path | None, subject: str) -> np.ndarray:
    """The tensor's values. Raises FrontendError (damaged, or data outside `folder`) or UnsupportedError (type)."""
    dtype = get_onnx_dtype(t.data_type, subject)
    if dtype is STRING:
        raise UnsupportedError(f"{subject} holds strings; whet supports numeric tensors. Do the text processing before the network.")
    if any(d < 0 for d in t.dims):
        raise FrontendError(f"{subject} has the shape {list(t.dims)}: a size cannot be negative. {DAMAGED}")
    if t.HasField("segment"):
        raise UnsupportedError(
            f"{subject} is stored in segments, which is obsolete. Load and save it with an onnx package of its time."
        )
    shape = tuple(t.dims)
    try:
        if t.data_location == TensorProto.EXTERNAL:
            return _decode_raw(_read_external_bytes(t, folder, subject, _count_bytes(t, dtype)), dtype, shape)
        if not t.HasField("raw_data"):
            return _decode_fields(t, dtype).reshape(shape)
        if len(t.raw_data) != _count_bytes(t, dtype):
            raise FrontendError(f"{subject} has {len(t.raw_data)} bytes, its type {dtype}{list(shape)} needs {_count_bytes(t, dtype)}. {DAMAGED}")
        return _decode_raw(t.raw_data, dtype, shape)
    except (ValueError, TypeError, OverflowError, MemoryError) as e:
        raise FrontendError(f"{subject} cannot be read as {dtype}{list(shape)}: {e}. {DAMAGED}") from e


def read_sparse_array(s: SparseTensorProto, folder: Path | None, subject: str) -> np.ndarray:
    """The dense array of a tensor in coordinate format: zero but at its indices, which are flat [n] or one row per value [n, rank].

    Raises FrontendError (damaged) or UnsupportedError (type).
    """
    values = read_onnx_array(s.values, folder, f"{subject} (its values)")
    indices = read_onnx_array(s.indices, folder, f"{subject} (its indices)")
    shape = tuple(s.dims)
    if any(d <= 0 for d in shape) or not shape or math.prod(shape) > MAX_ELEMENTS:
        raise FrontendError(f"{subject} is stored sparse with the shape {list(shape)}. {DAMAGED}")
    if values.ndim != 1 or indices.dtype != np.int64 or indices.shape not in ((values.size,), (values.size, len(shape))):
        found = f"values of shape {list(values.shape)} and {indices.dtype} indices of shape {list(indices.shape)}"
        raise FrontendError(f"{subject} is stored sparse with {found}. {DAMAGED}")
    limits = np.array(shape if indices.ndim == 2 else math.prod(shape))
    if ((indices < 0) | (indices >= limits)).any():
        raise FrontendError(f"{subject} is stored sparse with indices outside of its shape {list(shape)}. {DAMAGED}")
    try:
        dense = np.zeros(shape, values.dtype)
    except MemoryError as e:
        raise FrontendError(f"{subject} is stored sparse; its shape {list(shape)} needs more memory than this process may use.") from e
    dense[np.unravel_index(indices, shape) if indices.ndim == 1 else tuple(indices.T)] = values
    return dense


def _decode_raw(raw: bytes, dtype: DType, shape: tuple[int, ...]) -> np.ndarray:
    """Decodes little-endian bytes; values below 8 bits are packed, the first in the lowest bits."""
    if dtype.bits < 8:
        return _unpack(np.frombuffer(raw, np.uint8), dtype, math.prod(shape)).reshape(shape)
    return np.frombuffer(raw, dtype.numpy).reshape(shape)


def _decode_fields(t: TensorProto, dtype: DType) -> np.ndarray:
    """Decodes the typed fields; types below 32 bits share int32_data, floats as bit patterns."""
    match dtype.name:
        case "f32" | "f64" | "i64":
            return np.array({"f32": t.float_data, "f64": t.double_data, "i64": t.int64_data}[dtype.name], dtype.numpy)
        case "u64" | "u32":
            return np.array(t.uint64_data, np.uint64).astype(dtype.numpy)
    numbers = np.array(t.int32_data, np.int32)
    if dtype.bits < 8:
        return _unpack(numbers.astype(np.uint8), dtype, math.prod(t.dims))
    if dtype.is_float:
        return numbers.astype(np.uint16 if dtype.bits == 16 else np.uint8).view(dtype.numpy)
    return numbers.astype(dtype.numpy)


def _unpack(packed: np.ndarray, dtype: DType, count: int) -> np.ndarray:
    top = 1 << dtype.bits
    each = np.stack([packed >> shift & (top - 1) for shift in range(0, 8, dtype.bits)], -1).reshape(-1)[:count]
    if dtype.is_float:
        return each.view(dtype.numpy)
    values = each.astype(np.int8)
    return (values - top * (values >= top // 2) if dtype.kind == "int" else values).astype(dtype.numpy)


def _count_bytes(t: TensorProto, dtype: DType) -> int:
    return math.ceil(math.prod(t.dims) * dtype.bits / 8)


def _read_external_bytes(t: TensorProto, folder: Path | None, subject: str, nbytes: int) -> bytes:
    keys = {e.key: e.value for e in t.external_data}
    location = keys.get("location", "")
    if folder is None:
        raise FrontendError(
            f"{subject} has its values in the external file {location!r}, but the model came from memory. Give the model's path."
        )
    try:
        path = find_data_file(folder, location)
        offset, length = int(keys.get("offset") or 0), int(keys.get("length") or nbytes)
    except (ValueError, OSError, RuntimeError) as e:
        raise FrontendError(f"{subject}: its external data entry {str(keys)[:200]} is damaged: {str(e)[:200]}. Export the model again.") from e
    if path is None:
        raise FrontendError(
            f"{subject} refers to {location[:200]!r}, which is outside the model's folder {folder}; whet does not read it. If the file is yours, "
            "copy it into that folder and save the model with its name."
        )
    if offset >= 2**63:
        raise FrontendError(f"{subject}: the offset of its external data has {len(str(offset))} digits. Export the model again.")
    if length != nbytes or offset < 0:
        raise FrontendError(
            f"{subject}: {length} bytes at {offset} of {location!r} are named, its type and shape need {nbytes}. "
            f"The model and its data do not belong together."
        )
    try:
        if not path.is_file():
            why = "is not a file" if path.exists() else "does not exist"
            raise FrontendError(f"{subject} has its values in {path}, which {why}. Put the data file into the model's folder.")
        if offset + length > path.stat().st_size:
            raise FrontendError(
                f"{subject} needs bytes {offset} to {offset + length} of {path}, which has {path.stat().st_size}. Copy the data file again."
            )
        with path.open("rb") as f:
            f.seek(offset)
            return f.read(length)
    except OSError as e:
        raise FrontendError(f"cannot read {str(path)[:300]}, the values of {subject}: {e.strerror}. Check the file and its permissions.") from e
