"""Validation of the data for importance and recovery: one NaN would spread into every score and weight."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from whet.errors import PruneError


def check_data(data: Mapping[str, np.ndarray], labels: np.ndarray | None = None) -> None:
    """Raises PruneError for data (inputs by name, samples along axis 0) without samples or with NaN or infinities, naming the first such
    sample, and for labels that are not one class index per sample."""
    if not isinstance(data, Mapping):
        raise PruneError(f"data must be arrays by input name, as {{'input': array}}, not {type(data).__name__}")
    for name, given in data.items():
        a = np.asarray(given)
        if not a.size:
            raise PruneError(f"'{name}' holds no samples: give at least one")
        if a.dtype.kind == "f" and not np.isfinite(a).all():
            at = int(np.flatnonzero(~np.isfinite(a.reshape(len(a), -1)).all(1))[0]) if a.ndim else 0
            raise PruneError(f"sample {at} of '{name}' holds NaN or infinite values: remove or correct it")
    if labels is None:
        return
    count = len(next(iter(data.values())))
    if labels.dtype.kind not in "iu" or labels.ndim != 1:
        raise PruneError(f"labels must be a vector of class indices, one per sample, not {labels.dtype} of shape {list(labels.shape)}")
    if len(labels) != count:
        raise PruneError(f"there are {len(labels)} labels for {count} samples")
