"""Checkpoints: one safetensors file with weights, statistics and optimizer tensors; everything else as JSON in its header. No pickle.

Writes are atomic: training that is killed at any moment leaves the last complete checkpoint.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from whet.errors import TrainingError
from whet.files import replace_atomically
from whet.training.config import FinetuneConfig
from whet.training.module import NetworkModule

FORMAT, VERSION = "whet.training.checkpoint", 2


def save_checkpoint(
    path: str | os.PathLike[str],
    module: NetworkModule,
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any],
    copies: Mapping[str, Mapping[str, torch.Tensor]],
) -> None:
    """Writes the checkpoint. `state` is JSON data, `copies` are further states of the module by name ("best", "average").

    Raises TrainingError when the file cannot be written."""
    tensors = {f"{what}.{n}": t.detach().cpu().contiguous() for what, copy in copies.items() for n, t in copy.items()}
    tensors |= {f"module.{n}": t.detach().cpu().contiguous() for n, t in module.state_dict().items()}
    plain: dict[str, dict[str, Any]] = {}
    for i, values in optimizer.state_dict()["state"].items():
        for key, v in values.items():
            if isinstance(v, torch.Tensor):
                tensors[f"optimizer.{i}.{key}"] = v.detach().cpu().contiguous()
            else:
                plain.setdefault(str(i), {})[key] = v
    header = {"format": FORMAT, "version": VERSION, "optimizer": plain, "torch": torch.__version__, **state}
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with replace_atomically(target) as part:
            save_file({n: t.clone() for n, t in tensors.items()}, part, metadata={"whet": json.dumps(header)})
    except OSError as e:
        raise TrainingError(f"the checkpoint {path} cannot be written: {e}. Choose another path, or free some space.") from e


def read_state(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads the JSON state of a checkpoint. Raises TrainingError for any other file."""
    try:
        with safe_open(str(path), "pt") as f:
            state = json.loads((f.metadata() or {}).get("whet", "null"))
    except (OSError, SafetensorError, ValueError) as e:
        raise TrainingError(f"the checkpoint {path} cannot be read: {e}. Delete it to start over.") from e
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise TrainingError(f"{path} is not a whet checkpoint. Choose another file.")
    if state.get("version") != VERSION:
        raise TrainingError(f"the checkpoint {path} has version {state.get('version')!r}; this whet reads {VERSION}. Delete it to start over.")
    return state


def load_checkpoint(
    path: str | os.PathLike[str], module: NetworkModule, optimizer: torch.optim.Optimizer, copies: tuple[str, ...] = ()
) -> tuple[dict[str, Any], dict[str, dict[str, torch.Tensor]]]:
    """Restores the tensors; returns the state and the `copies`, further states of the module by name.

    Raises TrainingError for a damaged file or one of another network.
    """
    state = read_state(path)
    with safe_open(str(path), "pt") as f:
        tensors = {n: f.get_tensor(n) for n in f.keys()}
    try:
        module.load_state_dict({n[7:]: t for n, t in tensors.items() if n.startswith("module.")})
    except RuntimeError as e:
        raise TrainingError(f"the checkpoint {path} is of another network: {str(e)[:300]}. Delete it to start over.") from e
    found: dict[int, dict[str, Any]] = {int(i): dict(v) for i, v in state["optimizer"].items()}
    for name, t in tensors.items():
        if name.startswith("optimizer."):
            _, i, key = name.split(".", 2)
            found.setdefault(int(i), {})[key] = t
    optimizer.load_state_dict({"state": found, "param_groups": optimizer.state_dict()["param_groups"]})
    return state, {what: {n[len(what) + 1 :]: t for n, t in tensors.items() if n.startswith(f"{what}.")} for what in copies}


def must_match(path: str | os.PathLike[str], state: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises TrainingError when the checkpoint belongs to another model, other data or other settings, naming the difference."""
    for key, what in (("model", "another model"), ("data", "other data")):
        if state.get(key) != now[key]:
            raise TrainingError(f"the checkpoint {path} is of {what}. Delete it to start over, or give the one it was made with.")
    before, after = FinetuneConfig().settings() | state.get("settings", {}), now["settings"]
    for name in after:
        if before[name] != after[name]:
            was = before[name]
            raise TrainingError(f"the checkpoint {path} was made with {name}={was!r}, now it is {after[name]!r}. Delete it to start over.")
