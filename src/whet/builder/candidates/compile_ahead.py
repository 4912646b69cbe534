"""Compiling ahead: what will be timed is compiled in the background while the rest is still being listed, and nothing else is.

A tactic hands over the texts of all configurations that it lists; most are left out, because the timing cache knows them, because a
level times only so many, or because one is enough. So the texts wait with the options until it is known which of them are used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from whet.backends import Backend
from whet.builder.candidates.option import Option
from whet.tactics import Config, Signature, Tactic

_CLOSE = 1.1  # of the fastest: where all times are known, what the choice in the whole network may still take


class Listening:
    """A machine for `Tactic.configs`: it keeps the texts that it is asked to compile."""

    def __init__(self, backend: Backend):
        self._machine = backend
        self.asked: list[str] = []

    def compile_ahead(self, sources: Iterable[str]) -> None:
        self.asked += sources

    def __getattr__(self, name: str) -> Any:
        return getattr(self._machine, name)


def configs_with_texts(tactic: Tactic, layer: Any, signature: Signature, backend: Backend) -> list[tuple[Config, tuple[str, ...]]]:
    """The configurations of a tactic, each with the text that it compiles; all of them with the first where they cannot be told apart."""
    start = getattr(backend, "compile_ahead", None)
    if start is None:
        return [(c, ()) for c in tactic.configs(layer, signature, backend)]
    listening = Listening(backend)
    found = list(tactic.configs(layer, signature, listening))
    if len(listening.asked) == len(found):
        return [(c, (text,)) for c, text in zip(found, listening.asked, strict=True)]
    return [(c, () if i else tuple(listening.asked)) for i, c in enumerate(found)]


def start_compiling(options: Sequence[Option], backend: Backend) -> None:
    """Compiles the texts of options in the background; where times are known, those of the fastest."""
    start = getattr(backend, "compile_ahead", None)
    if start is None:
        return
    times = [o.ms for o in options if o.ms is not None]
    least = min(times) if len(times) == len(options) and times else None
    start([text for o in options if least is None or o.cost <= _CLOSE * least for text in o.texts])
