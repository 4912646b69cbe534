"""Compiling ahead: the options that will be timed are compiled in the background while other layers are still being listed.

A tactic provides the sources of all configurations it lists. Most are not needed, because the timing cache has their times, or the level times
fewer options, or one is enough. So each option keeps its sources until it is selected for timing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from whet.backends import Backend
from whet.measure.option import Option
from whet.network import Layer
from whet.tactics import Config, Signature, Tactic

_CLOSE = 1.1  # times the fastest: if all times are known, only options up to here may be selected in the network


def list_configs_with_texts(tactic: Tactic, layer: Any, signature: Signature, backend: Backend) -> list[tuple[Config, tuple[str, ...]]]:
    """The configurations of a tactic with the sources each compiles; all sources go to the first one if they cannot be assigned."""
    if not backend.capabilities.compiles_ahead:
        return [(c, ()) for c in tactic.configs(layer, signature, backend)]
    texts: list[str] = []
    configs = list(tactic.configs(layer, signature, backend.with_sources_to(texts.extend)))
    if len(texts) == len(configs):
        return [(c, (text,)) for c, text in zip(configs, texts, strict=True)]
    return [(c, () if i else tuple(texts)) for i, c in enumerate(configs)]


def start_compiling(options: Sequence[Option], backend: Backend) -> None:
    """Compiles the sources of options in the background; if all times are known, only of those near the fastest."""
    if not backend.capabilities.compiles_ahead:
        return
    times = [o.ms for o in options if o.ms is not None]
    least = min(times) if len(times) == len(options) and times else None
    backend.compile_ahead([text for o in options if least is None or o.cost <= _CLOSE * least for text in o.texts])


def start_compiling_again(layer: Layer, options: Sequence[Option], backend: Backend) -> None:
    """Compiles options of a layer in the background whose sources were dropped, because they were not to be timed at first."""
    if not backend.capabilities.compiles_ahead:
        return
    groups: dict[tuple[str, Signature], list[Option]] = {}
    for o in options:
        groups.setdefault((o.tactic.name, o.signature), []).append(o)
    for same_kind in groups.values():
        wanted = {o.config for o in same_kind}
        for config, texts in list_configs_with_texts(same_kind[0].tactic, layer, same_kind[0].signature, backend):
            if config in wanted or len(texts) > 1:
                backend.compile_ahead(texts)
