"""Training options of a recipe: `finetune` and `qat` override the search's defaults for whet.training."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from whet.errors import UsageError
from whet.registry import suggest_name
from whet.search.recipe import fields as f

FINETUNE: dict[str, Any] = {"epochs": 10.0, "distill": 0.5}
#: short training at a low rate: it starts from the fine-tuned weights; AdamW because folded weights differ widely in magnitude
QAT: dict[str, Any] = {
    "when": "auto", "epochs": 2.0, "lr": 1e-4, "optimizer": "adamw", "weight_decay": 0.0, "warmup": 0.0, "distill": 0.5,
}  # fmt: skip
WHEN = ("auto", "always", "never")
_OURS = ("checkpoint", "checkpoint_seconds", "masks")  # set by the search
_NOT_SETTINGS = ("when", "threshold")
#: settings determined by data and machine, which `qat` inherits from `finetune`
_SHARED = ("augment", "batch", "channels_last", "device", "graph", "label_smoothing", "loss", "precision", "seed", "temperature")


def read_finetuning(value: Any, where: str) -> dict[str, Any] | None:
    """`false`, or settings of `whet.training.FinetuneConfig` over FINETUNE: 10 epochs, half of the loss from the original."""
    if isinstance(value, bool) or value is None:
        return dict(FINETUNE) if value else None
    return _merge_settings(value, where, FINETUNE, "false, or settings")


def read_quantization_training(value: Any, where: str) -> dict[str, Any] | None:
    """`auto`, `always`, `never` (or false), or settings with `when` and `threshold` among them; None is never."""
    if isinstance(value, bool) or value is None:
        value = "auto" if value else "never"
    if not isinstance(value, Mapping):
        value = {"when": value}
    f.make_choice_reader(*WHEN)(value.get("when", "auto"), f"{where}.when" if "when" in value and len(value) > 1 else where)
    if value.get("threshold") is not None:
        f.make_number_reader(0)(value["threshold"], f"{where}.threshold")
    settings = _merge_settings(value, where, QAT, f"{', '.join(WHEN)}, or settings", _NOT_SETTINGS)
    return None if settings["when"] == "never" else settings


def make_qat_settings(qat: Mapping[str, Any], finetune: Mapping[str, Any] | None) -> dict[str, Any]:
    """FinetuneConfig settings of `qat`; loss, batch, augmentation and device default to those of `finetune`."""
    shared = {k: v for k, v in (finetune or {}).items() if k in _SHARED}
    return {**shared, **{k: v for k, v in qat.items() if k not in _NOT_SETTINGS}}


def make_finetune_config(settings: Mapping[str, Any], **more: Any) -> Any:
    """Settings as a FinetuneConfig; lists become tuples."""
    from whet.training.config import FinetuneConfig

    given: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}
    return FinetuneConfig(**given, **more)


def _merge_settings(value: Any, where: str, defaults: Mapping[str, Any], subject: str, more: tuple[str, ...] = ()) -> dict[str, Any]:
    """`value` merged over `defaults`; each key is a field of FinetuneConfig (or in `more`). Raises UsageError naming the key."""
    from whet.training.config import FinetuneConfig

    known = [*more, *(x.name for x in dataclasses.fields(FinetuneConfig) if x.name not in _OURS)]
    if not isinstance(value, Mapping):
        raise UsageError(f"'{where}' is {subject} ({', '.join(known)}), not {value!r}")
    for name in value:
        if name not in known:
            raise UsageError(f"unknown key '{where}.{name}'.{suggest_name(str(name), known)} Known keys: {', '.join(known)}.")
    settings = {**defaults, **value}
    try:
        make_finetune_config({k: v for k, v in settings.items() if k not in more})
    except (UsageError, TypeError) as e:
        raise UsageError(f"'{where}': {e}") from None
    return settings
