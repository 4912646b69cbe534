"""Compiling ahead: what will be timed is compiled in the background while the rest is still being listed, and nothing else is.

A tactic hands over the texts of all configurations that it lists; most are left out, because the timing cache knows them, because a
level times only so many, or because one is enough. So the texts wait with the options until it is known which of them are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

from whet.backends import Backend
from whet.measure.option import Option
from whet.tactics import Config, Signature, Tactic

_CLOSE = 1.1  # of the fastest: where all times are known, what the choice in the whole network may still take


def _recording(backend: Backend, texts: list[str]) -> Backend:
    """A backend for `Tactic.configs` that appends the texts it is asked to compile to `texts`, and compiles none."""
    recorder = copy(backend)
    recorder.compile_ahead = texts.extend  # type: ignore[method-assign, assignment]
    return recorder


def configs_with_texts(tactic: Tactic, layer: Any, signature: Signature, backend: Backend) -> list[tuple[Config, tuple[str, ...]]]:
    """The configurations of a tactic, each with the text that it compiles; all of them with the first where they cannot be told apart."""
    if not backend.capabilities.compiles_ahead:
        return [(c, ()) for c in tactic.configs(layer, signature, backend)]
    texts: list[str] = []
    configs = list(tactic.configs(layer, signature, _recording(backend, texts)))
    if len(texts) == len(configs):
        return [(c, (text,)) for c, text in zip(configs, texts, strict=True)]
    return [(c, () if i else tuple(texts)) for i, c in enumerate(configs)]


def start_compiling(options: Sequence[Option], backend: Backend) -> None:
    """Compiles the texts of options in the background; where times are known, those of the fastest."""
    if not backend.capabilities.compiles_ahead:
        return
    times = [o.ms for o in options if o.ms is not None]
    least = min(times) if len(times) == len(options) and times else None
    backend.compile_ahead([text for o in options if least is None or o.cost <= _CLOSE * least for text in o.texts])
