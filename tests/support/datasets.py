"""Reads the shared real data: images and truths as NumPy arrays, with each model's own preprocessing.

The folder is ../shared/data next to the repository, or $WHET_DATA. It is not part of the project; root() is None without it.
"""

import io
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np

IMAGENET_MEAN, IMAGENET_STD = np.float32([0.485, 0.456, 0.406]), np.float32([0.229, 0.224, 0.225])


def root() -> Path | None:
    """The data folder, if it is there."""
    path = Path(os.environ.get("WHET_DATA") or Path(__file__).parents[3] / "shared" / "data")
    return path if (path / "SHA256SUMS").is_file() else None


def path_of(name: str) -> Path:
    """A file of the data folder. FileNotFoundError without the folder."""
    base = root()
    if base is None:
        raise FileNotFoundError("no shared data folder: set WHET_DATA to it, or run what needs no data")
    return base / name


def spread(total: int, limit: int | None) -> np.ndarray:
    """Indices of `limit` samples evenly spread over `total`; all of them if limit is None or larger."""
    return np.arange(total) if limit is None or limit >= total else np.linspace(0, total - 1, limit).astype(int)


def imagenet_norm(images: np.ndarray) -> np.ndarray:
    """uint8 RGB [...,H,W,3] -> float32 [...,3,H,W], normalized for torchvision's models."""
    return np.moveaxis((images.astype(np.float32) / 255 - IMAGENET_MEAN) / IMAGENET_STD, -1, -3)


# --- classification sets ---


def cifar10_lossless() -> tuple[np.ndarray, np.ndarray]:
    """First 1000 images of CIFAR-10's test set, pixel-exact: uint8 [1000,32,32,3], labels."""
    with np.load(path_of("cifar10/cifar10_lossless.npz")) as f:
        return f["x_test"], f["y_test"].astype(np.int64)


def cifar10_train_lossless() -> tuple[np.ndarray, np.ndarray]:
    """First 4000 images of CIFAR-10's training set, pixel-exact: for calibration and fine-tuning."""
    with np.load(path_of("cifar10/cifar10_lossless.npz")) as f:
        return f["x_train"], f["y_train"].astype(np.int64)


def mnist_test() -> tuple[np.ndarray, np.ndarray]:
    """MNIST's test set: float32 [10000,1,28,28] in 0..1, labels."""
    with np.load(path_of("mnist/mnist_20k_10k.npz")) as f:
        return f["x_test"].astype(np.float32)[:, None] / 255, f["y_test"].astype(np.int64)


def imagenet_sample(limit: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """One image of each ImageNet class: uint8 [n,224,224,3], labels."""
    from PIL import Image

    with np.load(path_of("imagenet_sample/imagenet1000_224.npz")) as f:
        raw, lengths, labels = f["jpeg"], f["len"].astype(np.int64), f["label"].astype(np.int64)
    start = np.concatenate([[0], np.cumsum(lengths)])
    chosen = spread(len(labels), limit)
    images = [np.asarray(Image.open(io.BytesIO(raw[start[i] : start[i + 1]].tobytes())).convert("RGB")) for i in chosen]
    return np.stack(images), labels[chosen]


# --- COCO ---


@cache
def coco_names() -> tuple[str, ...]:
    """Stems of the 128 images, sorted."""
    return tuple(sorted(p.stem for p in path_of("coco_val128/images").glob("*.jpg")))


@cache
def coco_masked_names() -> tuple[str, ...]:
    """Stems of the 100 images that have a panoptic mask, sorted."""
    return tuple(sorted(p.stem for p in path_of("coco_val128/masks").glob("*.png")))


def coco_image(name: str, size: tuple[int, int] | None = None) -> np.ndarray:
    """uint8 RGB [H,W,3], resized bilinearly to size (width, height) if given."""
    from PIL import Image

    image = Image.open(path_of(f"coco_val128/images/{name}.jpg")).convert("RGB")
    return np.asarray(image if size is None else image.resize(size, Image.Resampling.BILINEAR))


def coco_boxes(name: str) -> np.ndarray:
    """Annotated objects as float64 [n,5]: class 0..79, centre x, centre y, width, height, relative to the image size."""
    text = path_of(f"coco_val128/labels/{name}.txt").read_text().split()
    return np.array(text, np.float64).reshape(-1, 5)


def coco_mask(name: str, size: tuple[int, int]) -> np.ndarray:
    """COCO panoptic category of each pixel, uint8 [H,W], nearest-resized to size (width, height)."""
    from PIL import Image

    return np.asarray(Image.open(path_of(f"coco_val128/masks/{name}.png")).resize(size, Image.Resampling.NEAREST))


# --- faces ---


@cache
def face_names() -> tuple[str, ...]:
    """File names of the 24 photos, sorted."""
    return tuple(sorted(p.name for p in path_of("face/imgs").glob("*.jpg")))


def face_images(width: int, height: int, limit: int | None = None) -> Iterator[np.ndarray]:
    """The photos as float32 [1,3,height,width], (x - 127) / 128."""
    from PIL import Image

    for i in spread(len(face_names()), limit):
        image = Image.open(path_of(f"face/imgs/{face_names()[i]}")).convert("RGB")
        pixels = np.asarray(image.resize((width, height), Image.Resampling.BILINEAR), np.float32)
        yield np.ascontiguousarray(((pixels - 127) / 128).transpose(2, 0, 1)[None])
