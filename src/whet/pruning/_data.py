"""What pruning looks at and recovers on, checked before it is used: one number that is none would spread into every score and weight."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from whet.errors import PruneError


def check_data(data: Mapping[str, np.ndarray], labels: np.ndarray | None = None) -> None:
    """Raises PruneError for data (inputs by name, samples along axis 0) without samples or with NaN or infinities, naming the first such sample;
    for labels that are not one class number a sample."""
    if not isinstance(data, Mapping):
        raise PruneError(f"data are arrays by the names of the inputs, as {{'input': array}}, not {type(data).__name__}")
    for name, given in data.items():
        a = np.asarray(given)
        if not a.size:
            raise PruneError(f"'{name}' holds no samples: give at least one")
        if a.dtype.kind == "f" and not np.isfinite(a).all():
            at = int(np.flatnonzero(~np.isfinite(a.reshape(len(a), -1)).all(1))[0]) if a.ndim else 0
            raise PruneError(f"sample {at} of '{name}' holds NaN or infinite values: leave it out, or mend it")
    if labels is None:
        return
    count = len(next(iter(data.values())))
    if labels.dtype.kind not in "iu" or labels.ndim != 1:
        raise PruneError(f"labels are whole numbers in one row, a class a sample, not {labels.dtype} of shape {list(labels.shape)}")
    if len(labels) != count:
        raise PruneError(f"there are {len(labels)} labels for {count} samples")
