"""Configurations for tests on a GPU: kernels that the test runs are compiled in the background, the other listed ones are not."""

from __future__ import annotations

from typing import Any

from whet.builder.candidates.compile_ahead import list_configs_with_texts
from whet.tactics import Config, Signature, Tactic


def first_configs(tactic: Tactic, layer: Any, signature: Signature, machine: Any, most: int | None = None) -> list[Config]:
    """The first `most` configurations (all by default), submitted to the compiler if `machine` has one."""
    found = list_configs_with_texts(tactic, layer, signature, machine)[:most]
    if machine.capabilities.compiles_ahead:
        machine.compile_ahead([text for _, texts in found for text in texts])
    return [config for config, _ in found]
