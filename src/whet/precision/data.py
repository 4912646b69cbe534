"""Calibration data from array files, an image folder or a user function, as an iterator over samples."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from whet.array_files import read_arrays
from whet.errors import CalibrationError, UsageError
from whet.network import Network, Tensor
from whet.precision.decoding import MOST_PIXELS, decode
from whet.registry import import_user_function

_LONGEST_TEXT = 2**16  # characters of a file of settings
_LONGEST_SIDE = 2**15  # pixels
IMAGES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm")


@dataclass(frozen=True)
class Preprocessing:
    """Image preprocessing: resize, then (pixel * scale - mean) / std per channel; `order` is rgb or bgr, `layout` nchw or nhwc.

    `resize` is the length of the shorter side in pixels before the centre crop (0: the image is stretched to the input size).
    """

    scale: float = 1.0
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    order: str = "rgb"
    layout: str = "nchw"
    resize: int = 0

    @staticmethod
    def parse(text: str) -> Preprocessing:
        """Parses `scale:1/255,mean:0.485/0.456/0.406,std:...,order:rgb,resize:256`, or a file with one `key: value` per line.

        Raises UsageError.
        """
        if os.path.isfile(text):
            try:
                with open(text, encoding="utf-8") as f:
                    written = f.read(_LONGEST_TEXT)
            except (OSError, UnicodeDecodeError) as e:
                raise UsageError(f"calibration preprocessing: {text} cannot be read as text: {e}. It has one `key: value` per line.") from e
            lines = [line.split("#")[0].strip() for line in written.splitlines()]
            pairs = [line for line in lines if line]
        else:
            pairs = [p for p in text.split(",") if p]
        found: dict[str, Any] = {}
        for pair in pairs:
            key, colon, value = (x.strip() for x in pair.partition(":"))
            if not colon or key not in ("scale", "mean", "std", "order", "layout", "resize"):
                raise UsageError(f"calibration preprocessing: {pair!r} is none of scale:, mean:, std:, order:, layout:, resize:")
            try:
                found[key] = _parse_setting(key, value)
            except (ValueError, ArithmeticError):
                raise UsageError(f"calibration preprocessing: {value!r} is not a value for {key}") from None
        return Preprocessing(**found)


def _parse_setting(key: str, value: str) -> Any:
    if key in ("order", "layout"):
        if value not in {"order": ("rgb", "bgr"), "layout": ("nchw", "nhwc")}[key]:
            raise ValueError(value)
        return value
    if key == "resize":
        if not 0 <= int(value) <= _LONGEST_SIDE:
            raise ValueError(value)
        return int(value)
    if key == "scale":
        top, slash, bottom = value.partition("/")
        values: tuple[float, ...] = (float(top) / float(bottom) if slash else float(value),)
    else:
        values = tuple(float(v) for v in value.strip("[]").replace(",", "/").split("/"))
    if not all(math.isfinite(v) for v in values) or (key == "std" and 0 in values):
        raise ValueError(value)
    return values[0] if key == "scale" else values


def calibration_data(source: str, net: Network, preprocessing: Preprocessing | None = None) -> Iterator[dict[str, np.ndarray]]:
    """Yields samples for `net` from a folder, an .npz or .npy file, or `python:module:function`.

    The first axis of an array enumerates samples. A folder holds array files or images. A function returns an iterable of samples: a dict
    by input name, or an array for a network with one input. Raises CalibrationError for data that do not fit the inputs, UsageError for a
    missing source.
    """
    if source.startswith("python:"):
        yield from _from_function(source, net)
        return
    path = Path(source)
    if os.path.isdir(path):
        files = sorted(p for p in path.iterdir() if p.suffix.lower() in (*IMAGES, ".npz", ".npy"))
        if not files:
            raise CalibrationError(f"{source} holds no .npz, .npy or image files ({', '.join(IMAGES)})")
        for p in files:
            if p.suffix.lower() in IMAGES:
                yield read_image(p, net, preprocessing or Preprocessing())
            else:
                yield from _read_file(p, net)
        return
    if not os.path.isfile(path):
        raise UsageError(f"{source}: no such file or folder; expected DIR, FILE.npz, FILE.npy or python:MODULE:FUNCTION")
    yield from _read_file(path, net)


def _read_file(path: Path, net: Network) -> Iterator[dict[str, np.ndarray]]:
    found = read_arrays(path, CalibrationError)
    wanted = [t.name for t in net.inputs]
    if isinstance(found, np.ndarray):
        arrays = {_get_only_input(net, str(path)).name: found}
    elif len(found) == 1 and len(wanted) == 1:
        arrays = {wanted[0]: next(iter(found.values()))}
    else:
        missing = [n for n in wanted if n not in found]
        if missing:
            raise CalibrationError(f"{path} has no array for the input '{missing[0]}'; it has {', '.join(found) or 'none'}")
        arrays = {n: found[n] for n in wanted}
    yield from split_samples(arrays, net, str(path))


def split_samples(arrays: Mapping[str, np.ndarray], net: Network, where: str) -> Iterator[dict[str, np.ndarray]]:
    """Splits arrays into samples of the network's fixed batch size, or of batch 1 if it is dynamic or larger than the arrays."""
    lengths = set()
    for t in net.inputs:
        if t.name not in arrays:
            raise CalibrationError(f"{where}: there is no array for the input '{t.name}'")
        a, batch = arrays[t.name], _get_batch_size(t)
        if a.ndim == t.type.rank - 1:
            arrays = {**arrays, t.name: a[None]}
            a = arrays[t.name]
        if a.ndim != t.type.rank:
            raise CalibrationError(f"{where}: the array for '{t.name}' has shape {list(a.shape)}, the input is {t.type}")
        lengths.add(len(a) // batch if a.ndim else 1)
    alone = lengths == {0} and all(t.type.rank > 1 for t in net.inputs)
    if alone:
        lengths = {len(arrays[t.name]) for t in net.inputs}
    if len(lengths) != 1:
        raise CalibrationError(f"{where}: the arrays hold different numbers of samples ({', '.join(map(str, sorted(lengths)))})")
    for i in range(lengths.pop()):
        yield {t.name: _sample(arrays[t.name], t, i, where, 1 if alone else _get_batch_size(t)) for t in net.inputs}


def _sample(a: np.ndarray, t: Tensor, i: int, where: str, batch: int) -> np.ndarray:
    part = a[i * batch : (i + 1) * batch] if a.ndim else a
    for axis, (have, want) in enumerate(zip(part.shape, (batch, *t.shape[1:]) if a.ndim else t.shape, strict=True)):
        if isinstance(want, int) and have != want:
            raise CalibrationError(f"{where}: '{t.name}' has {have} along axis {axis}, the input is {t.type}")
    if part.dtype.kind == "f" and t.dtype.numpy.kind in "iu" and not np.array_equal(part, np.floor(part)):
        raise CalibrationError(f"{where}: '{t.name}' has fractions or NaN, the input is {t.type}. Give whole numbers, such as token ids.")
    return np.ascontiguousarray(part.astype(t.dtype.numpy, copy=False))


def _get_batch_size(t: Tensor) -> int:
    """Batch size of one run: the first dimension where it is static, else 1."""
    return t.shape[0] if t.type.rank and isinstance(t.shape[0], int) else 1


def _get_only_input(net: Network, where: str) -> Tensor:
    if len(net.inputs) != 1:
        raise CalibrationError(f"{where} holds one array, the network takes {', '.join(t.name for t in net.inputs)}; give an .npz with all")
    return net.inputs[0]


def _from_function(source: str, net: Network) -> Iterator[dict[str, np.ndarray]]:
    yield from name_samples(import_user_function(source)(), net, source)


def name_samples(samples: Iterable[Any], net: Network, where: str) -> Iterator[dict[str, np.ndarray]]:
    """Yields samples for `net` from dicts by input name, or from arrays for a network with one input; an array may hold several samples.

    `where` begins the texts of errors. Raises CalibrationError for data that do not fit the inputs.
    """
    for k, sample in enumerate(samples):
        arrays = sample if isinstance(sample, Mapping) else {_get_only_input(net, where).name: sample}
        yield from split_samples({n: np.asarray(a) for n, a in arrays.items()}, net, f"{where}, sample {k}")


def read_image(path: Path, net: Network, p: Preprocessing) -> dict[str, np.ndarray]:
    """Decodes an image into the network's only input."""
    try:
        from PIL import Image
    except ImportError:
        raise CalibrationError("images are decoded with Pillow, which is not installed: pip install pillow, or give arrays (.npz)") from None
    t = _get_only_input(net, str(path))
    sizes = t.shape[2:4] if p.layout == "nchw" else t.shape[1:3]
    if t.type.rank != 4 or not all(isinstance(d, int) for d in sizes):
        raise CalibrationError(f"images need an input of rank 4 with fixed height and width; '{t.name}' is {t.type}")
    height, width = (int(d) for d in sizes)
    channels = t.shape[1] if p.layout == "nchw" else t.shape[3]
    try:
        image = decode(path, gray=channels == 1)
    except OSError as e:
        raise CalibrationError(f"{path} cannot be decoded: {e}") from e
    if p.resize:
        factor = p.resize / min(image.size)
        resized = max(width, round(image.width * factor)), max(height, round(image.height * factor))
        if resized[0] * resized[1] > MOST_PIXELS:
            raise CalibrationError(
                f"{path} has {image.width} x {image.height} pixels, and resize:{p.resize} makes {resized[0]} x {resized[1]} of them, more than "
                f"{MOST_PIXELS:,}. Remove the image, or lower resize:"
            )
        image = image.resize(resized, Image.Resampling.BILINEAR)
        left, top = (image.width - width) // 2, (image.height - height) // 2
        image = image.crop((left, top, left + width, top + height))
    else:
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    pixels = np.asarray(image, np.float32).reshape(height, width, -1)
    if p.order == "bgr":
        pixels = pixels[:, :, ::-1]
    for name, each in (("mean", p.mean), ("std", p.std)):
        if len(each) not in (1, pixels.shape[2]):
            counts = f"{len(each)} values, the images have {pixels.shape[2]} channels"
            raise CalibrationError(f"calibration preprocessing: {name}: has {counts}. Give one value, or one per channel")
    values = (pixels * np.float32(p.scale) - np.asarray(p.mean, np.float32)) / np.asarray(p.std, np.float32)
    if p.layout == "nchw":
        values = values.transpose(2, 0, 1)
    return {t.name: np.ascontiguousarray(values[None].astype(t.dtype.numpy))}
