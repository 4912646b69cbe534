"""CIFAR-10 for the example: 50,000 JPEG images for fine-tuning, two test sets, and preprocessing.

The data are a public copy of all 60,000 images as JPEG (quality 75, which costs accuracy) and the first 1,000 test images without loss.
Fine-tuning uses the JPEG training images only; accuracy is measured on the 1,000 lossless and on the 10,000 JPEG test images separately.
"""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np

from whet.precision import Preprocessing
from whet.training.data import TrainingData

PREPROCESS = "scale:1/255,mean:0.485/0.456/0.406,std:0.229/0.224/0.225"


def preprocessing() -> Preprocessing:
    """Preprocessing of the published weights."""
    return Preprocessing.parse(PREPROCESS)


def normalized(images: np.ndarray) -> np.ndarray:
    """uint8 [N,32,32,3] -> float32 [N,3,32,32]."""
    p = preprocessing()
    numbers = (images * np.float32(p.scale) - np.asarray(p.mean, np.float32)) / np.asarray(p.std, np.float32)
    return np.ascontiguousarray(numbers.transpose(0, 3, 1, 2), np.float32)


def decoded(folder: Path, into: Path, limit: int | None = None) -> None:
    """Writes decoded images to into/*.npy, so that other processes need not decode them; `kept` reads them."""
    into.mkdir(parents=True, exist_ok=True)
    for name, data in (("train", train_set(folder, limit)), ("jpeg", jpeg_test(folder, limit)), ("exact", exact_test(folder))):
        np.save(into / f"{name}.x.npy", data.inputs["x"])
        np.save(into / f"{name}.y.npy", data.labels)


def read_decoded(into: Path, name: str) -> TrainingData:
    """`train`, `jpeg` or `exact` as `decoded` wrote it."""
    return TrainingData({"x": np.load(into / f"{name}.x.npy")}, np.load(into / f"{name}.y.npy"), preprocessing())


def train_set(folder: Path, limit: int | None = None) -> TrainingData:
    """The JPEG training images (or the first `limit` of them, shuffled with a fixed seed: the file is sorted by class)."""
    return _jpegs(folder, "train", limit)


def jpeg_test(folder: Path, limit: int | None = None) -> TrainingData:
    """The 10,000 JPEG test images."""
    return _jpegs(folder, "test", limit)


def exact_test(folder: Path) -> TrainingData:
    """The 1,000 lossless test images."""
    with np.load(folder / "cifar10" / "cifar10_lossless.npz") as f:
        return TrainingData({"x": f["x_test"]}, f["y_test"].astype(np.int64), preprocessing())


def _jpegs(folder: Path, part: str, limit: int | None) -> TrainingData:
    from PIL import Image

    with np.load(folder / "cifar10" / "cifar10_jpeg60k.npz") as f:
        raw, lengths, labels = f[f"{part}_jpeg"], f[f"{part}_len"].astype(np.int64), f[f"{part}_label"].astype(np.int64)
    ends = np.cumsum(lengths)
    order = np.random.RandomState(0).permutation(len(labels))[:limit]
    images = np.empty((len(order), 32, 32, 3), np.uint8)
    for place, i in enumerate(order):  # one thread: decoding such small images holds the GIL, and many threads were slower (19 s instead of 5)
        images[place] = np.asarray(Image.open(io.BytesIO(raw[ends[i] - lengths[i] : ends[i]].tobytes())).convert("RGB"))
    return TrainingData({"x": images}, labels[order], preprocessing())
