"""Data of a search: samples without labels as calibration reads them, and labelled ones from .npz files, images or functions."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from whet.errors import CalibrationError
from whet.network import Network
from whet.precision import Preprocessing, calibration_data
from whet.precision.data import split
from whet.registry import own_function
from whet.search.recipe.image_data import arrays, listed, spread

LABELS = ("labels", "label", "y")  # names of the array of labels in an .npz


@dataclass(frozen=True)
class Labelled:
    """Inputs by name, stacked along the batch, and integer labels [n]."""

    inputs: dict[str, np.ndarray]
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)


def unlabelled(source: str, net: Network, samples: int, preprocess: str | None = None) -> dict[str, np.ndarray]:
    """`samples` samples, stacked along the batch by input name: of images and of an .npz or .npy file evenly spread ones, else the first.

    Sources are those of `calibration_data`, folders with a subfolder of images a class, and CSV files of image paths. Raises CalibrationError,
    UsageError.
    """
    images = listed(source)
    if images:
        return arrays([p for p, _ in spread(images, samples)], net, preprocess)
    made = calibration_data(source, net, Preprocessing.parse(preprocess) if preprocess else None)
    found = list(islice(made, samples)) if in_order(source) else spread(list(made), samples)
    if not found:
        raise CalibrationError(f"{source} holds no samples")
    return _finite({name: np.concatenate([s[name] for s in found]) for name in found[0]}, source)


def in_order(source: str) -> bool:
    """Whether samples are taken as they come, and not evenly spread ones: of functions and of folders of arrays."""
    return not Path(source).is_file() and not listed(source)


def labelled(source: str, net: Network, what: str, preprocess: str | None = None) -> Labelled:
    """Labelled data for `net`: FILE.npz or a folder of such with an array `labels`, a folder with a subfolder of images a class, a CSV file of
    image paths and labels (both prepared by `preprocess`), or python:MODULE:FUNCTION.

    The function gives (inputs, labels), stacked: inputs an array, or a dict by input name; or an iterable of single such pairs.
    Raises CalibrationError for data that do not fit, UsageError for a source that is not there. `what` names it in errors.
    """
    if images := listed(source):
        if any(k is None for _, k in images):
            raise CalibrationError(f"{what}: {source} has images without labels: give a subfolder for each class, or a CSV file of path,label")
        return Labelled(arrays([p for p, _ in images], net, preprocess), np.array([k for _, k in images], np.int64))
    if source.startswith("python:"):
        given, labels = _pairs(own_function(source, what)(), net, source)
    else:
        path = Path(source)
        files = sorted(path.glob("*.npz")) if path.is_dir() else [path]
        if not files:
            raise CalibrationError(f"{what}: {source} holds no .npz files; labelled data are .npz files with the inputs and `labels`, "
                                   "or images in a subfolder for each class")  # fmt: skip
        parts = [_file(p, net, what) for p in files]
        given = {n: np.concatenate([a[n] for a, _ in parts]) for n in parts[0][0]}
        labels = np.concatenate([y for _, y in parts])
    samples = list(split(given, net, source))
    inputs = {n: np.concatenate([s[n] for s in samples]) for n in samples[0]} if samples else {}
    if not samples or len(labels) != len(next(iter(inputs.values()))):
        raise CalibrationError(f"{what}: {source} has {len(labels)} labels for {len(next(iter(inputs.values()), ()))} samples")
    return Labelled(_finite(inputs, f"{what}: {source}"), labels)


@contextmanager
def modules_of(folder: str) -> Iterator[None]:
    """Python modules of a folder (the recipe's) are found inside the block."""
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def _file(path: Path, net: Network, what: str) -> tuple[dict[str, np.ndarray], np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as f:
            found = {n: f[n] for n in f.files} if hasattr(f, "files") else {}
    except (OSError, ValueError, EOFError, BadZipFile) as e:
        why = str(e) if isinstance(e, OSError) else "it is none, is damaged, or holds Python objects, which are never loaded"
        raise CalibrationError(f"{what}: {path} cannot be read as an .npz of arrays: {why}") from e
    name = next((n for n in LABELS if n in found), None)
    if name is None:
        raise CalibrationError(f"{what}: {path} has no array `labels`; it has {', '.join(found) or 'none'}")
    return _named({n: a for n, a in found.items() if n != name}, net, f"{what}: {path}"), _integers(found[name], f"{what}: {path}")


def _pairs(given: Any, net: Network, where: str) -> tuple[dict[str, np.ndarray], np.ndarray]:
    if not (isinstance(given, tuple) and len(given) == 2):
        pairs = list(given)
        if not pairs:
            raise CalibrationError(f"{where} gave no samples")
        named = [_named(x if isinstance(x, Mapping) else {"": x}, net, where) for x, _ in pairs]
        rank = {t.name: t.type.rank for t in net.inputs}
        stacked = {n: np.concatenate([a[n] if a[n].ndim == rank[n] else a[n][None] for a in named]) for n in named[0]}
        return stacked, _integers(np.array([y for _, y in pairs]).reshape(-1), where)
    x, y = given
    return _named(x if isinstance(x, Mapping) else {"": x}, net, where), _integers(np.asarray(y), where)


def _named(arrays: Mapping[str, Any], net: Network, where: str) -> dict[str, np.ndarray]:
    """Arrays under the network's input names; a single one needs no name."""
    wanted = [t.name for t in net.inputs]
    if len(arrays) == 1 and len(wanted) == 1:
        return {wanted[0]: np.asarray(next(iter(arrays.values())))}
    missing = [n for n in wanted if n not in arrays]
    if missing:
        raise CalibrationError(f"{where} has no array for the input '{missing[0]}'; it has {', '.join(arrays)}")
    return {n: np.asarray(arrays[n]) for n in wanted}


def _finite(inputs: dict[str, np.ndarray], where: str) -> dict[str, np.ndarray]:
    """The inputs; ranges, recovery and scores of numbers that are none would mean nothing."""
    for name, a in inputs.items():
        if a.dtype.kind == "f" and not np.isfinite(a).all():
            bad = int(np.flatnonzero(~np.isfinite(a.reshape(len(a), -1)).all(1))[0])
            raise CalibrationError(f"{where}: sample {bad} of '{name}' holds NaN or infinite values; leave it out or mend it")
    return inputs


def _integers(labels: np.ndarray, where: str) -> np.ndarray:
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise CalibrationError(f"{where}: labels are whole numbers in one row, not {labels.dtype} of shape {list(labels.shape)}")
    return labels.astype(np.int64)
