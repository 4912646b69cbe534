"""Logs of a training: a CSV file, or a folder for TensorBoard, with one row per epoch."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from pathlib import Path

from whet.errors import BackendError, TrainingError
from whet.files import replace_atomically

Row = dict[str, float]
Log = Callable[[Sequence[Row]], None]
"""log(history so far), called after each epoch"""

COLUMNS = ("epoch", "step", "loss", "lr", "seconds", "held_out", "accuracy")


def open_log(path: str) -> Log | None:
    """The log for FILE.csv (written again after each epoch, so that a resumed training continues it) or for a folder of TensorBoard events; None
    for an empty path. Raises BackendError when TensorBoard is not installed."""
    if not path:
        return None
    return _open_csv(Path(path)) if path.lower().endswith(".csv") else _open_tensorboard(path)


def _open_csv(path: Path) -> Log:
    def write(history: Sequence[Row]) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replace_atomically(path) as part, open(part, "w", newline="", encoding="utf-8") as f:
                rows = csv.DictWriter(f, [c for c in COLUMNS if any(c in row for row in history)], extrasaction="ignore")
                rows.writeheader()
                rows.writerows(history)
        except OSError as e:
            raise TrainingError(f"the log {path} cannot be written: {e}. Choose another path, or free some space.") from e

    return write


def _open_tensorboard(folder: str) -> Log:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise BackendError(
            f"a log that is no .csv file is for TensorBoard, which is not installed: pip install tensorboard, or log={folder}.csv"
        ) from None
    writer = SummaryWriter(folder)

    def write(history: Sequence[Row]) -> None:
        row = history[-1]
        for name in COLUMNS[2:]:
            if name in row:
                writer.add_scalar(name, row[name], int(row["step"]))
        writer.flush()

    return write
