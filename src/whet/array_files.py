"""Reads .npy and .npz files from strangers: sizes are checked before memory is allocated, and nothing in them is executed."""

from __future__ import annotations

import io
import lzma
import os
import struct
import tokenize
import zlib
from pathlib import Path
from typing import IO
from zipfile import BadZipFile, ZipFile

import numpy as np

from whet.errors import WhetError

_EXPANSION = 100  # an archive may hold this many times its own size ...
ALWAYS_EXPANDED = 2**30  # ... or this many bytes
_LONGEST_HEADER = 2**16  # bytes
_NUMBERS = "biufc"  # kinds of dtypes
_DAMAGE = (
    OSError, ValueError, TypeError, LookupError, EOFError, RuntimeError, ArithmeticError, SyntaxError, MemoryError, BadZipFile, zlib.error,
    lzma.LZMAError, struct.error, tokenize.TokenError,
)  # fmt: skip


class _Unsuitable(Exception):
    """The reason why a file is refused."""


class _NoNumbers(_Unsuitable):
    """The reason why an array is of no use: an archive may have such arrays among others."""


def read_arrays(path: str | os.PathLike[str], error: type[WhetError], where: str = "") -> np.ndarray | dict[str, np.ndarray]:
    """The array of a .npy file, or those of an .npz file by name. The content decides, not the file's name.

    Arrays of other data than numbers and booleans are left out. Raises `error`, with `where` before the text, for a file that is missing,
    damaged, of another kind, or without numbers; for Python objects; and for an archive that expands to more than 1 GiB and more than 100
    times its size.
    """
    file = Path(path)
    try:
        if not file.is_file():
            raise _Unsuitable("it is a folder or a device" if file.exists() else "no such file")
        with file.open("rb") as f:
            start = f.read(4)
            f.seek(0)
            if start[:2] == b"PK":
                return _read_archive(f, file.stat().st_size)
            return _read_array(f, file.stat().st_size, "the array")
    except _Unsuitable as e:
        why = str(e)
    except OSError as e:
        why = e.strerror or str(e)
    except _DAMAGE as e:
        why = f"it is no array file, or damaged ({str(e)[:120] or type(e).__name__})"
    raise error(f"{where}{path} cannot be read as NumPy arrays: {why}. Give a file of np.save or np.savez with numbers.")


def _read_archive(f: IO[bytes], size: int) -> dict[str, np.ndarray]:
    with ZipFile(f) as archive:
        members = [m for m in archive.infolist() if m.filename.endswith(".npy")]
        expanded = sum(m.file_size for m in members)
        if expanded > max(ALWAYS_EXPANDED, _EXPANSION * size):
            raise _Unsuitable(
                f"its {size:,} bytes expand to {expanded:,}, over {_EXPANSION} times as many, as no data do. If they do, save them uncompressed"
            )
        arrays, skipped = {}, None
        for m in members:
            name = m.filename.removesuffix(".npy")
            try:
                with archive.open(m) as stored:
                    arrays[name] = _read_array(stored, m.file_size, f"the array '{name[:60]}'")
            except _NoNumbers as e:
                skipped = e
        if skipped is not None and not arrays:
            raise skipped
        return arrays


def _read_array(f: IO[bytes], size: int, name: str) -> np.ndarray:
    """Reads an array from a stream of `size` bytes, in the format of numpy.lib.format."""
    version = np.lib.format.read_magic(f)
    if version not in ((1, 0), (2, 0)):
        raise _NoNumbers(f"{name} has format {version[0]}.{version[1]}, which is for arrays of records")
    field = f.read(2 if version == (1, 0) else 4)
    header_size = int.from_bytes(field, "little")
    if header_size > _LONGEST_HEADER:
        raise _Unsuitable(f"{name} has a header of {header_size:,} bytes, more than any array of numbers needs")
    header = io.BytesIO(field + f.read(header_size))
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(header)
    if dtype.hasobject:
        raise _Unsuitable(f"{name} holds Python objects, which are never loaded")
    if dtype.kind not in _NUMBERS:
        raise _NoNumbers(f"{name} has the dtype {str(dtype)[:60]}, which is no type of numbers")
    count = 1
    for length in shape:
        if length < 0:
            raise _Unsuitable(f"{name} has the shape {str(list(shape))[:60]}, with a negative length")
        count *= length
    present = size - f.tell()
    if count * dtype.itemsize > present:
        raise _Unsuitable(f"{name} takes {count * dtype.itemsize:,} bytes by its header, and the file has {present:,} of them")
    values = np.frombuffer(f.read(count * dtype.itemsize), dtype)
    if fortran:
        return values.reshape(shape[::-1]).transpose().copy()
    return values.reshape(shape).copy()
