"""Configurations for a test on a GPU: what it runs is compiled in the background, what else the tactic lists is not."""

from __future__ import annotations

from typing import Any

from whet.builder.candidates.compile_ahead import configs_with_texts
from whet.tactics import Config, Signature, Tactic


def first_configs(tactic: Tactic, layer: Any, signature: Signature, machine: Any, most: int | None = None) -> list[Config]:
    """The first `most` configurations (all of them by default), on their way to the compiler where `machine` has one."""
    found = configs_with_texts(tactic, layer, signature, machine)[:most]
    if machine.capabilities.compiles_ahead:
        machine.compile_ahead([text for _, texts in found for text in texts])
    return [config for config, _ in found]
