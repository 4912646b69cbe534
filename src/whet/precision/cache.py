"""Calibration caches: TensorRT's text format (one hexadecimal f32 scale per tensor) and a JSON format that names its model."""

from __future__ import annotations

import json
import os
import struct

import numpy as np

from whet.errors import CalibrationError, UsageError
from whet.files import read_json_text, replace_atomically
from whet.network import Network
from whet.precision.quantization_sites import find_quantization_sites, is_never_negative
from whet.precision.ranges import Range, Ranges

VERSION = 1
_HEADER = "TRT-100100-EntropyCalibration2"


def write_cache(path: str | os.PathLike[str], ranges: Ranges) -> None:
    """Writes JSON for a name that ends in .json, TensorRT's text otherwise. The write is atomic.

    TensorRT's text holds one symmetric scale per tensor (largest magnitude / 127) and neither scalings nor corrections, so ranges
    with scalings are refused. Raises UsageError when the file cannot be written.
    """
    if ranges.scalings and not str(path).endswith(".json"):
        raise UsageError(f"{path} is TensorRT's cache format, which cannot hold equalized scales: name a .json cache, or switch the steps off")
    text = _format_json(ranges) if str(path).endswith(".json") else _format_text(ranges)
    try:
        with replace_atomically(path) as part:
            part.write_text(text, encoding="utf-8")
    except OSError as e:
        raise UsageError(f"the calibration cache {path} cannot be written: {e.strerror}; choose another path") from e


def read_cache(path: str | os.PathLike[str], net: Network, model: str = "") -> Ranges:
    """Reads ranges for `net` from either format. `model` is the digest that a JSON cache must name.

    Raises CalibrationError for a damaged file, another model, or a missing tensor (which is named).
    """
    try:
        text = read_json_text(path)
    except (OSError, UnicodeDecodeError) as e:
        raise CalibrationError(f"the calibration cache {path} cannot be read: {e}. Calibrate again with --calibData.") from e
    found = _read_json(path, text, model) if text.lstrip().startswith("{") else _read_text(path, text, net)
    missing = [n for n in find_quantization_sites(net).names() if n not in found.tensors]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CalibrationError(f"{path} has no range for %{missing[0]}{more}: it is of another model. Calibrate again with --calibData.")
    return found


def _format_json(ranges: Ranges) -> str:
    tensors = {
        name: {"low": float(r.low).hex(), "high": float(r.high).hex(), "method": r.method, "error": r.error}
        for name, r in ranges.tensors.items()
    }
    data = {"whet_calibration": VERSION, "model": ranges.model, "samples": ranges.samples, "tensors": tensors}
    for kind, arrays in (("scalings", ranges.scalings), ("corrections", ranges.corrections)):
        if arrays:
            data[kind] = {n: np.ascontiguousarray(a, "<f4").tobytes().hex() for n, a in arrays.items()}
    if ranges.float_sums:
        data["float_sums"] = sorted(ranges.float_sums)
    return json.dumps(data, indent=1) + "\n"


def _format_text(ranges: Ranges) -> str:
    lines = [_HEADER]
    for name, r in ranges.tensors.items():
        lines.append(f"{name}: {struct.pack('>f', np.float32(max(-r.low, r.high) / 127)).hex()}")
    return "\n".join(lines) + "\n"


def _read_json(path: str | os.PathLike[str], text: str, model: str) -> Ranges:
    try:
        data = json.loads(text)
        version, own, samples = data["whet_calibration"], str(data["model"]), int(data["samples"])
        tensors = {
            str(n): Range(float.fromhex(r["low"]), float.fromhex(r["high"]), str(r["method"]), None if r["error"] is None else float(r["error"]))
            for n, r in data["tensors"].items()
        }
        scalings, corrections = ({str(n): _decode_floats(v) for n, v in data.get(k, {}).items()} for k in ("scalings", "corrections"))
        float_sums = frozenset(map(str, data.get("float_sums", ())))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as e:
        raise CalibrationError(f"{path} is not a whet calibration cache, or it is damaged ({e}). Delete it and calibrate again.") from e
    if version != VERSION:
        raise CalibrationError(f"{path} is a calibration cache of version {version}, this whet reads {VERSION}. Calibrate again.")
    if model and own != model:
        raise CalibrationError(f"{path} was calibrated for another model ({own[:12]}..., this is {model[:12]}...). Calibrate again.")
    for name, r in tensors.items():
        _check(path, name, r)
    return Ranges(tensors, own, samples, scalings, corrections, float_sums=float_sums)


def _decode_floats(text: str) -> np.ndarray:
    """Decodes f32 values from hexadecimal bytes. Raises ValueError for malformed or non-finite values."""
    a = np.frombuffer(bytes.fromhex(text), "<f4").astype(np.float32)
    if not a.size or not np.isfinite(a).all():
        raise ValueError("a scaling or correction is not a list of finite numbers")
    return a


def _read_text(path: str | os.PathLike[str], text: str, net: Network) -> Ranges:
    lines = text.splitlines()
    if not lines or not lines[0].startswith("TRT-"):
        raise CalibrationError(f"{path} is not a calibration cache: its first line is not TensorRT's (TRT-...), and it is not JSON")
    known = {t.name: t for t in net.tensors()}
    tensors: dict[str, Range] = {}
    for number, line in enumerate(lines[1:], 2):
        if not line.strip():
            continue
        name, colon, word = line.rpartition(":")
        try:
            (scale,) = struct.unpack(">f", bytes.fromhex(word.strip()))
        except (ValueError, struct.error):
            raise CalibrationError(f"{path}, line {number}: {line[:80]!r} is not 'tensor: 8 hexadecimal digits'") from None
        if not colon or name not in known:
            continue  # TensorRT also lists its internal tensors, such as (Unnamed Layer* 5)_output
        most = float(np.float32(scale)) * 127
        r = Range(0.0 if is_never_negative(known[name]) else -most, most, "cache")
        _check(path, name, r)
        tensors[name] = r
    return Ranges(tensors)


def _check(path: str | os.PathLike[str], name: str, r: Range) -> None:
    if not r.usable:
        raise CalibrationError(f"{path}: the range of %{name} is {r.low:g} to {r.high:g}, which is no usable range. Calibrate again.")
