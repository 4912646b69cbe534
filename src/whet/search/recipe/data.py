"""Data of a search: unlabelled samples read as for calibration, and labelled samples from .npz files, images or functions."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from whet.array_files import read_arrays
from whet.errors import CalibrationError
from whet.network import Network
from whet.precision import Preprocessing, calibration_data
from whet.precision.data import split_samples
from whet.registry import import_user_function
from whet.search.recipe.image_data import list_images, pick_evenly, read_images

LABELS = ("labels", "label", "y")  # names of the label array in an .npz file


@dataclass(frozen=True)
class Labelled:
    """Inputs by name, stacked along the batch, and integer labels [n]."""

    inputs: dict[str, np.ndarray]
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)


def load_unlabelled(source: str, net: Network, samples: int, preprocess: str | None = None) -> dict[str, np.ndarray]:
    """`samples` samples by input name, stacked along the batch: evenly spaced ones of images and .npz or .npy files, else the first.

    Sources are those of `calibration_data`, folders with one subfolder of images per class, and CSV files of image paths. Raises
    CalibrationError, UsageError.
    """
    images = list_images(source)
    if images:
        return read_images([p for p, _ in pick_evenly(images, samples)], net, preprocess)
    stacked = calibration_data(source, net, Preprocessing.parse(preprocess) if preprocess else None)
    samples_ = list(islice(stacked, samples)) if takes_first_samples(source) else pick_evenly(list(stacked), samples)
    if not samples_:
        raise CalibrationError(f"{source} has no samples")
    return _check_finite({name: np.concatenate([s[name] for s in samples_]) for name in samples_[0]}, source)


def takes_first_samples(source: str) -> bool:
    """True if the first samples are taken (functions, folders of arrays), False if evenly spaced ones."""
    return not os.path.isfile(source) and not list_images(source)


def load_labelled(source: str, net: Network, subject: str, preprocess: str | None = None) -> Labelled:
    """Labelled data for `net` from FILE.npz or a folder of such files with an array `labels`, a folder with one subfolder of images per class,
    a CSV file of image paths and labels (images are prepared by `preprocess`), or python:MODULE:FUNCTION.

    The function returns stacked (inputs, labels), inputs being an array or a dict by input name; or an iterable of single such pairs.
    Raises CalibrationError for data that do not match the network, UsageError for a missing source. `subject` names the source in errors.
    """
    if images := list_images(source):
        if any(k is None for _, k in images):
            raise CalibrationError(f"{subject}: {source} has images without labels: use one subfolder per class, or a CSV file of path,label")
        return Labelled(read_images([p for p, _ in images], net, preprocess), np.array([k for _, k in images], np.int64))
    if source.startswith("python:"):
        returned, labels = _read_pairs(import_user_function(source, subject)(), net, source)
    else:
        path = Path(source)
        files = sorted(path.glob("*.npz")) if os.path.isdir(path) else [path]
        if not files:
            raise CalibrationError(f"{subject}: {source} has no .npz files; labelled data are .npz files with the inputs and `labels`, "
                                   "or images in one subfolder per class")  # fmt: skip
        parts = [_read_file(p, net, subject) for p in files]
        returned = {n: np.concatenate([a[n] for a, _ in parts]) for n in parts[0][0]}
        labels = np.concatenate([y for _, y in parts])
    samples = list(split_samples(returned, net, source))
    inputs = {n: np.concatenate([s[n] for s in samples]) for n in samples[0]} if samples else {}
    if not samples or len(labels) != len(next(iter(inputs.values()))):
        raise CalibrationError(f"{subject}: {source} has {len(labels)} labels for {len(next(iter(inputs.values()), ()))} samples")
    return Labelled(_check_finite(inputs, f"{subject}: {source}"), labels)


@contextmanager
def allow_imports_from(folder: str) -> Iterator[None]:
    """Makes the Python modules of a folder (the recipe's) importable inside the block."""
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def _read_file(path: Path, net: Network, subject: str) -> tuple[dict[str, np.ndarray], np.ndarray]:
    arrays = read_arrays(path, CalibrationError, f"{subject}: ")
    if isinstance(arrays, np.ndarray):
        arrays = {}
    name = next((n for n in LABELS if n in arrays), None)
    if name is None:
        raise CalibrationError(f"{subject}: {path} has no array `labels`; it has {', '.join(arrays) or 'none'}")
    source = f"{subject}: {path}"
    return _name_arrays({n: a for n, a in arrays.items() if n != name}, net, source), _check_integers(arrays[name], source)


def _read_pairs(returned: Any, net: Network, where: str) -> tuple[dict[str, np.ndarray], np.ndarray]:
    if not (isinstance(returned, tuple) and len(returned) == 2):
        pairs = list(returned)
        if not pairs:
            raise CalibrationError(f"{where} returned no samples")
        named = [_name_arrays(x if isinstance(x, Mapping) else {"": x}, net, where) for x, _ in pairs]
        rank = {t.name: t.type.rank for t in net.inputs}
        stacked = {n: np.concatenate([a[n] if a[n].ndim == rank[n] else a[n][None] for a in named]) for n in named[0]}
        return stacked, _check_integers(np.array([y for _, y in pairs]).reshape(-1), where)
    x, y = returned
    return _name_arrays(x if isinstance(x, Mapping) else {"": x}, net, where), _check_integers(np.asarray(y), where)


def _name_arrays(arrays: Mapping[str, Any], net: Network, where: str) -> dict[str, np.ndarray]:
    """Arrays by the network's input names; a single array needs no name."""
    wanted = [t.name for t in net.inputs]
    if len(arrays) == 1 and len(wanted) == 1:
        return {wanted[0]: np.asarray(next(iter(arrays.values())))}
    missing = [n for n in wanted if n not in arrays]
    if missing:
        raise CalibrationError(f"{where} has no array for the input '{missing[0]}'; it has {', '.join(arrays)}")
    return {n: np.asarray(arrays[n]) for n in wanted}


def _check_finite(inputs: dict[str, np.ndarray], where: str) -> dict[str, np.ndarray]:
    """Returns the inputs. Raises CalibrationError for NaN or infinite values."""
    for name, a in inputs.items():
        if a.dtype.kind == "f" and not np.isfinite(a).all():
            bad = int(np.flatnonzero(~np.isfinite(a.reshape(len(a), -1)).all(1))[0])
            raise CalibrationError(f"{where}: sample {bad} of '{name}' has NaN or infinite values; remove or repair it")
    return inputs


def _check_integers(labels: np.ndarray, where: str) -> np.ndarray:
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise CalibrationError(f"{where}: labels are a 1-D array of integers, not {labels.dtype} of shape {list(labels.shape)}")
    return labels.astype(np.int64)
