"""INT8 calibrators: batches that users give by address, as whet's calibration reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from whet.errors import CalibrationError
from whet.network import Network
from whet.trt.enums import CalibrationAlgoType

Shapes = dict[str, tuple[int, ...]]
Reader = Callable[[int, tuple[int, ...], np.dtype], np.ndarray]
"""Copies an array from an address of the backend's memory."""

METHODS = {
    CalibrationAlgoType.LEGACY_CALIBRATION: "percentile", CalibrationAlgoType.ENTROPY_CALIBRATION: "entropy",
    CalibrationAlgoType.ENTROPY_CALIBRATION_2: "entropy", CalibrationAlgoType.MINMAX_CALIBRATION: "minmax",
}  # fmt: skip


class IInt8Calibrator:
    """Base class of calibrators: subclasses define `get_batch_size`, `get_batch` and, for a cache, `read_calibration_cache` and
    `write_calibration_cache`."""

    algorithm: ClassVar[CalibrationAlgoType] = CalibrationAlgoType.ENTROPY_CALIBRATION_2

    def __init__(self) -> None:
        pass

    def get_algorithm(self) -> CalibrationAlgoType:
        """The method that finds ranges."""
        return self.algorithm

    def get_batch_size(self) -> int:
        """The number of samples of a batch."""
        raise NotImplementedError("a subclass of IInt8Calibrator defines get_batch_size()")

    def get_batch(self, names: list[str]) -> Sequence[int] | None:
        """The addresses of the next batch of the inputs `names`; None or an empty list after the last one."""
        raise NotImplementedError("a subclass of IInt8Calibrator defines get_batch(names)")

    def read_calibration_cache(self) -> Any:
        """The bytes of a cache, or None."""
        return None

    def write_calibration_cache(self, cache: Any) -> None:
        """Receives the bytes of the cache (a memoryview)."""


class IInt8EntropyCalibrator2(IInt8Calibrator):
    """Ranges with the least information loss (KL divergence)."""


class IInt8EntropyCalibrator(IInt8Calibrator):
    """The older entropy calibrator; whet calibrates before fusion for both."""

    algorithm = CalibrationAlgoType.ENTROPY_CALIBRATION


class IInt8MinMaxCalibrator(IInt8Calibrator):
    """Ranges from the smallest to the largest value."""

    algorithm = CalibrationAlgoType.MINMAX_CALIBRATION


class IInt8LegacyCalibrator(IInt8Calibrator):
    """Ranges that cut off outliers: whet's percentile method. `get_quantile` and `get_regression_cutoff` are not called."""

    algorithm = CalibrationAlgoType.LEGACY_CALIBRATION


def get_calibration_method(calibrator: Any) -> str:
    """whet's calibration method."""
    return METHODS[CalibrationAlgoType(calibrator.get_algorithm())]


def read_calibrator_samples(calibrator: Any, net: Network, shapes: Shapes, read: Reader) -> list[dict[str, np.ndarray]]:
    """All samples of a calibrator: its batches, one by one along a dynamic batch axis.

    Inputs of `shapes` are read in FP32 if they are floating-point. Raises CalibrationError for a batch without an address per input.
    """
    names = [t.name for t in net.inputs]
    batched = all(t.shape and t.shape[0] == net.inputs[0].shape[0] and not isinstance(t.shape[0], int) for t in net.inputs)
    samples: list[dict[str, np.ndarray]] = []
    while addresses := calibrator.get_batch(list(names)):
        if len(addresses) != len(names):
            raise CalibrationError(f"the calibrator gives {len(addresses)} addresses for the inputs {', '.join(names)}")
        batch = {}
        for t, address in zip(net.inputs, addresses, strict=True):
            given = np.dtype(np.float32) if t.dtype.kind in ("float", "bfloat") else t.dtype.numpy
            batch[t.name] = read(int(address), shapes[t.name], given).astype(t.dtype.numpy)
        count = shapes[names[0]][0] if batched else 0
        samples += [{n: a[i : i + 1] for n, a in batch.items()} for i in range(count)] if batched else [batch]
    return samples
