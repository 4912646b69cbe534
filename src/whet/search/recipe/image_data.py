"""Image data of a search: a folder of images, a folder with one subfolder per class, or a CSV file of paths and labels."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from whet.errors import CalibrationError
from whet.network import Network
from whet.precision import Preprocessing
from whet.precision.data import IMAGES, read_image

_DIGITS = 9  # of a class index
T = TypeVar("T")
Listed = list[tuple[Path, int | None]]  # (file, class index or None)


def list_images(source: str) -> Listed | None:
    """Images of a folder (no labels), of its subfolders (classes, numbered by sorted name), or of a CSV file of `path,label`.

    None for sources of another kind. Raises CalibrationError for a malformed or empty CSV file.
    """
    path = Path(source)
    if path.suffix.lower() == ".csv" and os.path.isfile(path):
        return _read_rows(path)
    if not os.path.isdir(path):
        return None
    here: Listed = [(p, None) for p in _list_images(path)]
    if here:
        return here
    return [(p, k) for k, folder in enumerate(sorted(p for p in path.iterdir() if p.is_dir())) for p in _list_images(folder)] or None


def read_images(files: Sequence[Path], net: Network, preprocess: str | None) -> dict[str, np.ndarray]:
    """The images stacked as the network's only input. Raises CalibrationError for a file or network that is not for images."""
    settings = Preprocessing.parse(preprocess) if preprocess else Preprocessing()
    samples = [read_image(p, net, settings) for p in files]
    return {n: np.concatenate([s[n] for s in samples]) for n in samples[0]}


def pick_evenly(items: Sequence[T], count: int) -> list[T]:
    """`count` evenly spaced items: the first ones of a list sorted by class would all be of one class."""
    if len(items) <= count:
        return list(items)
    return [items[round(i)] for i in np.linspace(0, len(items) - 1, count)]


def _list_images(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.suffix.lower() in IMAGES)


def _read_rows(path: Path) -> Listed:
    """Reads lines of `path,label`, paths relative to the CSV file; a first line whose path does not exist is a header."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as f:
            rows = [[cell.strip() for cell in row] for row in csv.reader(f) if any(cell.strip() for cell in row)]
    except (OSError, UnicodeDecodeError, csv.Error) as e:
        raise CalibrationError(f"{path} cannot be read as a CSV file of paths and labels: {e}") from e
    if rows and not os.path.isfile(path.parent / rows[0][0]):
        rows = rows[1:]
    rows_: Listed = []
    for k, row in enumerate(rows):
        file = path.parent / row[0]
        if not os.path.isfile(file):
            raise CalibrationError(f"{path}: no such file: {file} (row {k + 1} of {len(rows)}); paths are relative to the CSV file")
        if len(row) > 1 and not (row[1].isascii() and row[1].isdigit() and len(row[1]) <= _DIGITS):
            raise CalibrationError(f"{path}: the label of {row[0]} is {row[1][:20]!r}; labels are class indices from 0")
        rows_.append((file, int(row[1]) if len(row) > 1 else None))
    if not rows_:
        raise CalibrationError(f"{path} lists no files: each row is path,label")
    return rows_
