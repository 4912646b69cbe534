"""What an engine made of 2:4 weights: which layers run a sparse kernel, and why the others run dense."""

from __future__ import annotations

from typing import Any

from whet.sparsity.two_four import eligible_layers


def picked_layers(plan: Any) -> list[str]:
    """Names of the layers of an engine plan whose tactic computes with 2:4 weights."""
    return [n for n, c in plan.choices.items() if "sparse" in c.tactic or any(k == "sparse" and v for k, v in c.config)]


def why_dense(plan: Any) -> str:
    """Why eligible layers run dense, in words, with the count of sparse tactics that were timed."""
    eligible, _ = eligible_layers(plan.network)
    seen = [c for name in eligible for c in plan.report.get("candidates", {}).get(name, [])]
    sparse = [c for c in seen if "sparse" in c.tactic or dict(c.config).get("sparse")]
    timed = [c for c in sparse if c.ms is not None]
    if not sparse:
        return f"no tactic of backend '{plan.backend}' computes with 2:4 weights, so zeros are multiplied like any number"
    if not timed:
        return f"the sparse tactics refused: {sparse[0].reason}"
    return f"{len(timed)} sparse tactics were timed and lost to dense ones (whet explain shows both times)"
