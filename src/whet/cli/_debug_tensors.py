"""Debug tensors of `whet exec`: --markDebug makes values outputs of the engine, --saveDebugTensors and --saveAllDebugTensors write them."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

from whet.cli import _exec_values as values
from whet.cli._summary import Log
from whet.errors import UsageError
from whet.files import replace_atomically
from whet.network import Network
from whet.registry import suggest_name

FORMATS = ("summary", "numpy", "string", "raw")


def mark_debug_tensors(net: Network, spec: str) -> list[str]:
    """Makes the values that `spec` names (comma separated, `*` matches any text) outputs of `net`; returns their names.

    A marked value is computed and stored as it is in the model: layers are not fused across it. Raises UsageError for an unknown name.
    """
    known = {t.name: t for layer in net.layers for t in layer.outputs}
    marked: list[str] = []
    for pattern in filter(None, spec.split(",")):
        found = [n for n in known if fnmatchcase(n, pattern)]
        if not found:
            raise UsageError(f"--markDebug: the model has no value {pattern!r}.{suggest_name(pattern, known)} `*` matches any text.")
        for name in found:
            if name not in marked:
                marked.append(name)
                if known[name] not in net.outputs:
                    net.mark_output(known[name])
    return marked


def check_debug_flags(o: Any) -> None:
    """Raises UsageError for formats that do not exist and for --saveAllDebugTensors without the marks."""
    if "saveAllDebugTensors" in o:
        for name in o.get("saveAllDebugTensors").split(","):
            values.parse_choice(name, "saveAllDebugTensors", FORMATS)
        if "markDebug" not in o:
            raise UsageError("--saveAllDebugTensors writes the tensors of --markDebug; name those of a loaded engine: --saveDebugTensors=NAME:FILE")


def save_debug_tensors(o: Any, log: Log, context: Any, feed: dict[str, np.ndarray], marked: list[str]) -> None:
    """Runs the engine once on `feed` and writes the requested tensors."""
    named = values.split_names(o.get("saveDebugTensors")) if "saveDebugTensors" in o else []
    formats = o.get("saveAllDebugTensors").split(",") if "saveAllDebugTensors" in o else []
    if not named and not formats:
        return
    outputs = context.run(feed)
    for name, file in named:
        if name not in outputs:
            near = suggest_name(name, outputs)
            raise UsageError(f"--saveDebugTensors: the engine has no output '{name}'.{near} --markDebug={name} adds it at build time.")
        _write(Path(file), outputs[name], "raw" if not file.endswith(".npy") else "numpy", log)
    for name in marked if formats else []:
        a = outputs[name]
        if "summary" in formats:
            x = a.astype(np.float64)
            log.requested(f"{name}: {'x'.join(map(str, a.shape))} {a.dtype}, min {x.min():.6g}, max {x.max():.6g}, mean {x.mean():.6g}")
        safe = "".join(c if c.isalnum() or c in "._-" else "_" for c in name)
        for kind, suffix in (("numpy", "npy"), ("string", "txt"), ("raw", "raw")):
            if kind in formats:
                _write(Path(f"{safe}.{suffix}"), a, kind, log)


def _write(path: Path, a: np.ndarray, kind: str, log: Log) -> None:
    try:
        with replace_atomically(path) as part:
            if kind == "numpy":
                with part.open("wb") as f:
                    np.save(f, a, allow_pickle=False)
            elif kind == "raw":
                part.write_bytes(np.ascontiguousarray(a).tobytes())
            else:
                part.write_text(" ".join(f"{v:g}" for v in a.reshape(-1).astype(np.float64)) + "\n", encoding="utf-8")
    except OSError as e:
        raise UsageError(f"cannot write {path}: {e.strerror}; choose another path") from e
    log.result(f"Wrote {path}")
