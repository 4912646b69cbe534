"""Images as data of a search: a folder of them, one with a subfolder for each class, or a CSV file of paths and labels."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from whet.errors import CalibrationError
from whet.network import Network
from whet.precision import Preprocessing
from whet.precision.data import IMAGES, image_sample

T = TypeVar("T")
Listed = list[tuple[Path, int | None]]  # files, and the number of the class where it is known


def listed(source: str) -> Listed | None:
    """Images in a folder (no labels), in its subfolders (classes, numbered in the order of their names), or in a CSV file of `path,label`.

    None for sources of another kind. Raises CalibrationError for a CSV file that is none, or names no files.
    """
    path = Path(source)
    if path.suffix.lower() == ".csv" and path.is_file():
        return _rows(path)
    if not path.is_dir():
        return None
    here: Listed = [(p, None) for p in _images(path)]
    if here:
        return here
    return [(p, k) for k, folder in enumerate(sorted(p for p in path.iterdir() if p.is_dir())) for p in _images(folder)] or None


def arrays(files: Sequence[Path], net: Network, preprocess: str | None) -> dict[str, np.ndarray]:
    """The images as the network's only input, stacked. Raises CalibrationError for what is no image, or a network that takes none."""
    settings = Preprocessing.parse(preprocess) if preprocess else Preprocessing()
    samples = [image_sample(p, net, settings) for p in files]
    return {n: np.concatenate([s[n] for s in samples]) for n in samples[0]}


def spread(items: Sequence[T], count: int) -> list[T]:
    """`count` of them, evenly spread: the first ones of a list in the order of classes would all be of one."""
    if len(items) <= count:
        return list(items)
    return [items[round(i)] for i in np.linspace(0, len(items) - 1, count)]


def _images(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.suffix.lower() in IMAGES)


def _rows(path: Path) -> Listed:
    """`path,label` in each line, paths relative to the file; a first line that names no file is a heading."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as f:
            rows = [[cell.strip() for cell in row] for row in csv.reader(f) if any(cell.strip() for cell in row)]
    except (OSError, UnicodeDecodeError, csv.Error) as e:
        raise CalibrationError(f"{path} cannot be read as a CSV file of paths and labels: {e}") from e
    if rows and not (path.parent / rows[0][0]).is_file():
        rows = rows[1:]
    found: Listed = []
    for k, row in enumerate(rows):
        file = path.parent / row[0]
        if not file.is_file():
            raise CalibrationError(f"{path}: there is no file {file} (row {k + 1} of {len(rows)}); paths are relative to the CSV file")
        if len(row) > 1 and not row[1].isdigit():
            raise CalibrationError(f"{path}: the label of {row[0]} is {row[1]!r}; labels are the numbers of classes, from 0")
        found.append((file, int(row[1]) if len(row) > 1 else None))
    if not found:
        raise CalibrationError(f"{path} names no files: each row is path,label")
    return found
