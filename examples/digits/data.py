"""scikit-learn's handwritten digits at 32x32, with the fixed split that training, the demo and the tests share.

1797 real images of 8x8 pixels (0..16) come with scikit-learn, so nothing is downloaded. A seeded permutation selects
597 test images, which are never used for training, calibration or tuning.

    from data import load_heldback, load_train
    x, y = load_heldback()            # float32 [597,1,32,32], int64 [597]
"""

import numpy as np

SEED, HELD_BACK, SIDE = 2026, 597, 32
MEAN, STD = 0.305, 0.324              # mean and standard deviation of the upscaled training images, divided by 16


def load_train() -> tuple[np.ndarray, np.ndarray]:
    """Images float32 [1200,1,32,32], normalised, and their digits int64 [1200]."""
    images, digits = _all()
    chosen = order()[HELD_BACK:]
    return images[chosen], digits[chosen]


def load_heldback() -> tuple[np.ndarray, np.ndarray]:
    """The same for the 597 test images."""
    images, digits = _all()
    chosen = order()[:HELD_BACK]
    return images[chosen], digits[chosen]


def order() -> np.ndarray:
    """A permutation of all 1797 images; the first 597 are for testing. NumPy guarantees that RandomState's numbers never change."""
    return np.random.RandomState(SEED).permutation(1797)


def upscale(images: np.ndarray, side: int = SIDE) -> np.ndarray:
    """Bilinear upscaling of [N,h,w] to float32 [N,side,side]; pixel centres at half-integers, edges repeated."""
    rows, columns = (_weights(size, side) for size in images.shape[1:])
    return np.einsum("ih,nhw,jw->nij", rows, images, columns, optimize=True).astype(np.float32)


def _weights(size: int, side: int) -> np.ndarray:
    """[side,size]: weight of each source pixel in each new pixel along one axis."""
    at = np.clip((np.arange(side) + 0.5) * size / side - 0.5, 0, size - 1)
    low = np.minimum(at.astype(int), size - 2)
    weights = np.zeros((side, size))
    weights[np.arange(side), low] = 1 - (at - low)
    weights[np.arange(side), low + 1] = at - low
    return weights


def _all() -> tuple[np.ndarray, np.ndarray]:
    from sklearn.datasets import load_digits

    found = load_digits()
    images = (upscale(found.images) / 16 - MEAN) / STD
    return images.astype(np.float32)[:, None], found.target.astype(np.int64)
