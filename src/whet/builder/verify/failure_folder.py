"""Saves the data needed to repeat a failed verification: engine, inputs, and the failing layers' values. Messages name the folder."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np

from whet.builder.verify.error_bounds import Failure
from whet.engine.file import write_engine
from whet.engine.plan import EnginePlan
from whet.errors import WhetError
from whet.files import replace_atomically
from whet.network import format_network

VARIABLE = "WHET_FAILED_VERIFICATIONS"  # environment variable: the folder; empty: nothing is saved
KEPT = 8  # folders; older ones are removed
_MOST_BYTES = 512 << 20  # of source weights in a saved engine, and of inputs; larger ones are left out


def get_failures_folder() -> Path | None:
    """The folder of failed verifications: $WHET_FAILED_VERIFICATIONS, else in the user's cache folder; None if nothing is saved."""
    if (given := os.environ.get(VARIABLE)) is not None:
        return Path(given) if given else None
    import platformdirs

    return Path(platformdirs.user_cache_dir("whet")) / "failed_verifications"


def save_failures(plan: EnginePlan, inputs: Mapping[str, np.ndarray], failures: list[Failure]) -> str:
    """Saves a failed verification; returns a sentence with the folder, or the reason why nothing could be saved. Never raises."""
    root = get_failures_folder()
    if root is None:
        return ""
    folder = root / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{time.monotonic_ns() % 10**9:09d}"
    try:
        folder.mkdir(parents=True)
        (folder / "failures.txt").write_text("\n".join(str(f) for f in failures) + "\n", encoding="utf-8")
        (folder / "network.txt").write_text(format_network(plan.network), encoding="utf-8")
        if sum(a.nbytes for a in inputs.values()) <= _MOST_BYTES:
            _save(folder / "inputs.npz", inputs)
        for n, failure in enumerate(failures[:4]):
            if (e := failure.evidence) is not None:
                groups = {"input": e.inputs, "output": e.outputs, "expected": e.expected}
                arrays = {f"{k}{i}": a for k, group in groups.items() for i, a in enumerate(group) if a is not None}
                if sum(a.nbytes for a in arrays.values()) <= _MOST_BYTES:
                    _save(folder / f"layer{n}.npz", arrays)
        if sum(w.array.nbytes for t in plan.network.constants.values() if (w := t.weight) is not None) <= _MOST_BYTES:
            write_engine(plan, folder / "engine")
        _remove_old(root)
    except (OSError, WhetError) as e:
        shutil.rmtree(folder, ignore_errors=True)
        return f" The engine and its inputs could not be saved in {root}: {e}"
    return f" The engine and its inputs are saved in {folder}."


def _save(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes arrays under their names; types that NumPy's files do not have (bfloat16, float8) as float32."""
    plain = {k: a if a.dtype.kind in "biufc" else np.asarray(a, np.float32) for k, a in arrays.items()}
    with replace_atomically(path) as part, part.open("wb") as file:
        np.savez(file, allow_pickle=False, **{k.replace("/", "_"): a for k, a in plain.items()})


def _remove_old(root: Path) -> None:
    with suppress(OSError):
        folders = sorted((p for p in root.iterdir() if p.is_dir()), key=lambda p: p.name)
        for old in folders[:-KEPT]:
            shutil.rmtree(old, ignore_errors=True)
