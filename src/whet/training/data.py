"""Training data: array files, image folders (labelled by one subfolder per class, or without labels), or a user function."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from whet.array_files import read_arrays
from whet.errors import TrainingError, UsageError
from whet.network import Network
from whet.precision import Preprocessing
from whet.precision.decoding import decode
from whet.registry import import_user_function

_LABELS = ("labels", "label", "y", "targets", "y_train")
_CHECKED = 4096  # samples per block of the NaN check
_IMAGES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")


@dataclass(frozen=True)
class TrainingData:
    """Arrays with samples along the first axis: inputs by name, and labels (class indices or regression targets).

    Images may be uint8 [N, H, W, C]; `preprocessing` converts them on the device, batch by batch.
    """

    inputs: Mapping[str, np.ndarray]
    labels: np.ndarray | None = None
    preprocessing: Preprocessing | None = None
    classes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if single := [n for n, a in {**self.inputs, "labels": self.labels}.items() if a is not None and not np.ndim(a)]:
            raise TrainingError(f"'{single[0]}' of the training data is a single number: its first axis enumerates the samples")
        lengths = {name: len(a) for name, a in self.inputs.items()} | ({} if self.labels is None else {"labels": len(self.labels)})
        if not self.inputs or len(set(lengths.values())) != 1 or not next(iter(lengths.values())):
            raise TrainingError(f"training data need inputs and labels of one length above 0, not {lengths}")
        for name, a in self.inputs.items():
            for start in range(0, len(a) if a.dtype.kind == "f" else 0, _CHECKED):
                part = a[start : start + _CHECKED]
                if not np.isfinite(part).all():
                    at = start + int(np.flatnonzero(~np.isfinite(part.reshape(len(part), -1)).all(1))[0])
                    raise TrainingError(f"sample {at} of '{name}' holds NaN or infinite values: remove or correct it")

    def __len__(self) -> int:
        return len(next(iter(self.inputs.values())))

    def part(self, samples: np.ndarray) -> TrainingData:
        """The samples at these indices."""
        inputs = {name: a[samples] for name, a in self.inputs.items()}
        return replace(self, inputs=inputs, labels=None if self.labels is None else self.labels[samples])

    def must_be_classes_of(self, outputs: Any) -> None:
        """Raises TrainingError when labels are not class indices of the first output, whose type is given."""
        if self.labels is None or outputs.rank != 2 or not isinstance(outputs.shape[1], int):
            return
        known, labels = outputs.shape[1], self.labels
        if labels.ndim == 1 and labels.dtype.kind == "f" and known > 1:
            raise TrainingError(f"class labels must be integers, these are {labels.dtype}: give labels.astype(int)")
        if labels.ndim == 1 and labels.dtype.kind in "iu" and not 0 <= labels.min() <= labels.max() < known:
            what = f"labels go from {labels.min()} to {labels.max()}"
            raise TrainingError(f"{what}, but the first output has {known} classes, 0 to {known - 1}: are these the labels of this model?")

    def describe(self) -> list[Any]:
        """The identity of the data that a checkpoint stores."""
        return [[n, str(a.dtype), list(a.shape)] for n, a in sorted(self.inputs.items())] + [self.labels is not None]


@dataclass(frozen=True)
class Batches:
    """A user's sized iterable of batches: dicts by input name (with "labels"), or (x, labels). It is iterated once per epoch."""

    source: Any
    names: tuple[str, ...]
    preprocessing: Preprocessing | None = None
    classes: tuple[str, ...] = field(default=())

    def __len__(self) -> int:
        return len(self.source)

    def __iter__(self) -> Iterator[tuple[dict[str, np.ndarray], np.ndarray | None]]:
        for item in self.source:
            yield _split_sample(item, self.names, "a batch of the data function")

    def describe(self) -> list[Any]:
        """The identity of the data that a checkpoint stores."""
        return ["batches", len(self)]


def read_training_data(source: str, net: Network, preprocessing: Preprocessing | None = None) -> TrainingData | Batches:
    """Data for `net` from FILE.npz (arrays by input name, or a single one, and labels, label, y, targets or y_train), from a folder with
    one subfolder of images per class (sorted by name) or with images alone (no labels), or from python:MODULE:FUNCTION, which returns (x, y), a
    dict, or a sized iterable of batches.

    Raises UsageError for a missing source, TrainingError for data that do not fit the network.
    """
    names = tuple(t.name for t in net.inputs)
    if source.startswith("python:"):
        return _from_function(source, names, preprocessing)
    path = Path(source)
    if os.path.isdir(path):
        return _from_folder(path, net, preprocessing)
    if not os.path.isfile(path):
        raise UsageError(f"{source} does not exist: expected FILE.npz, a folder of images, or python:MODULE:FUNCTION")
    found = read_arrays(path, TrainingError)
    inputs, labels = _split_sample({} if isinstance(found, np.ndarray) else found, names, str(path))
    return TrainingData(inputs, labels, preprocessing)


def call(source: str, *args: Any) -> Any:
    """Calls the function `python:module:function`. Raises UsageError when it cannot be loaded."""
    return import_user_function(source)(*args)


def _from_function(source: str, names: tuple[str, ...], preprocessing: Preprocessing | None) -> TrainingData | Batches:
    made = call(source)
    if isinstance(made, TrainingData | Batches):
        return made
    if isinstance(made, Mapping) or (isinstance(made, tuple) and len(made) == 2 and all(isinstance(a, np.ndarray) for a in made)):
        inputs, labels = _split_sample(made, names, source)
        return TrainingData(inputs, labels, preprocessing)
    if not isinstance(made, Iterable) or not hasattr(made, "__len__"):
        raise TrainingError(f"{source} returned {type(made).__name__}; it returns (x, y), a dict of arrays, or an iterable of batches with a length")
    return Batches(made, names, preprocessing)


def _split_sample(sample: Any, names: tuple[str, ...], where: str) -> tuple[dict[str, np.ndarray], np.ndarray | None]:
    """Inputs by name and labels from a dict or an (x, y) pair."""
    if not isinstance(sample, Mapping):
        if not isinstance(sample, tuple | list) or len(sample) != 2 or len(names) != 1:
            raise TrainingError(f"{where}: give (x, labels) for one input, or a dict with {', '.join(names)} and labels")
        return {names[0]: np.asarray(sample[0])}, None if sample[1] is None else np.asarray(sample[1])
    label = next((k for k in _LABELS if k in sample and k not in names), None)
    labels = None if label is None else np.asarray(sample[label])
    rest = {k: v for k, v in sample.items() if k != label}
    if len(names) == 1 and names[0] not in rest and len(rest) == 1:
        rest = {names[0]: next(iter(rest.values()))}
    missing = [n for n in names if n not in rest]
    if missing:
        raise TrainingError(f"{where} has no array for the input '{missing[0]}'; it has {', '.join(sample) or 'none'}")
    return {n: np.asarray(rest[n]) for n in names}, labels


def _from_folder(path: Path, net: Network, preprocessing: Preprocessing | None) -> TrainingData:
    """Images uint8 [N, H, W, C] resized to the input; the class is the index of the subfolder. Images outside subfolders have no labels."""
    classes = sorted(p for p in path.iterdir() if p.is_dir())
    files = [(f, k) for k, c in enumerate(classes) for f in sorted(c.iterdir()) if f.suffix.lower() in _IMAGES]
    loose = [(f, -1) for f in sorted(path.iterdir()) if f.suffix.lower() in _IMAGES]
    if not files and not loose:
        raise TrainingError(f"{path} holds no images ({', '.join(_IMAGES)}): give one subfolder per class, or images without labels")
    if files and loose:
        raise TrainingError(f"{path} holds images both in subfolders (one per class) and outside ('{loose[0][0].name}'): which ones have labels?")
    files, classes = (files, classes) if files else (loose, [])
    try:
        from PIL import Image
    except ImportError:
        raise TrainingError("images are decoded with Pillow, which is not installed: pip install pillow, or give arrays (.npz)") from None
    t = net.inputs[0]
    p = preprocessing or Preprocessing()
    nchw = p.layout == "nchw"
    if len(net.inputs) != 1 or t.type.rank != 4:
        raise TrainingError("a folder of images is for networks with one input of rank 4; give arrays (.npz) or a function")
    sizes, channels = (t.shape[2:4], t.shape[1]) if nchw else (t.shape[1:3], t.shape[3])
    if not all(isinstance(d, int) for d in sizes):
        raise TrainingError(f"images need an input of fixed height and width; '{t.name}' is {t.type}")
    pixels = np.empty((len(files), int(sizes[0]), int(sizes[1]), 1 if channels == 1 else 3), np.uint8)
    for i, (f, _) in enumerate(files):
        try:
            image = decode(f, gray=channels == 1).resize((int(sizes[1]), int(sizes[0])), Image.Resampling.BILINEAR)
        except OSError as e:
            raise TrainingError(f"{f} cannot be decoded: {e}") from e
        pixels[i] = np.asarray(image, np.uint8).reshape(pixels.shape[1:])
    labels = np.array([k for _, k in files], np.int64) if classes else None
    return TrainingData({t.name: pixels}, labels, p, tuple(c.name for c in classes))
