"""Separately tuned profiles in an engine file: a network and choices for each profile after the first; weights and machine are shared."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from whet.engine import codec
from whet.engine.json_data import Reader
from whet.engine.plan import EnginePlan
from whet.engine.report import report_from_data
from whet.engine.text import read_text
from whet.engine.weights import iterate_constants
from whet.errors import EngineError
from whet.network import Weight, format_network


def to_data(plan: EnginePlan) -> list[dict[str, Any]]:
    """The section's JSON: one entry per profile after the first."""
    return [
        {
            "network": format_network(p.network),
            "constants": sum(1 for _ in iterate_constants(p.network)),
            "choices": codec.encode_choices(p.choices),
            "probe": p.probe,
        }
        for p in plan.others
    ]


def from_data(r: Reader, plan: EnginePlan, weights: Sequence[Weight], reports: Sequence[Reader]) -> list[EnginePlan]:
    """The plans of the profiles after the first. `weights` has the weights of all their networks, concatenated. Raises EngineError."""
    rows = r.rows(len(plan.profiles) - 1)
    if not rows or len(reports) != len(rows) or len(plan.arenas) != len(plan.profiles):
        raise EngineError(f"the engine has {len(plan.profiles)} profiles, {len(plan.arenas)} arenas and {len(reports)} further reports")
    plans, at = [], 0
    for k, (row, report) in enumerate(zip(rows, reports, strict=True), 1):
        row.object("network", "constants", "choices", "probe")
        end = at + row["constants"].integer(0, len(weights) - at)
        text = memoryview(row["network"].text(1 << 26).encode())
        try:
            net = read_text(text, weights[at:end], plan.network.name, plan.network.metadata)
        except EngineError as e:
            raise EngineError(f"profile {k}: {e}") from e
        plans.append(
            dataclasses.replace(
                plan,
                network=net,
                choices=codec.decode_choices(row["choices"]),
                profiles=[plan.profiles[k]],
                arenas=[plan.arenas[k]],
                probe=codec.decode_probe(row["probe"]),
                report=report_from_data(report),
                others=[],
            )
        )
        at = end
    if at != len(weights):
        raise EngineError(f"the networks of all profiles have {at} further constants, the index {len(weights)}")
    return plans
