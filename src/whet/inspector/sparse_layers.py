"""2:4 sparsity per layer of an engine: eligible or the reason not, the best dense and the best sparse time, and which one runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from whet.engine import Candidate, EnginePlan
from whet.inspector.facts import LayerFacts, layer_facts
from whet.sparsity import find_reduction_axis
from whet.sparsity.report import is_sparse
from whet.sparsity.two_four import explain_ineligible


@dataclass(frozen=True)
class LayerSparsity:
    """A layer with weights. `eligible`: the weights are 2:4. `dense`, `sparse`: the fastest timed candidate of each kind (None: not timed).
    `reason` says why the layer is not eligible or runs dense; "" if it runs sparse."""

    name: str
    eligible: bool
    runs_sparse: bool
    reason: str
    dense: Candidate | None
    sparse: Candidate | None

    @property
    def saved_ms(self) -> float | None:
        """Milliseconds that the sparse tactic saves against the fastest dense one; None unless it runs and both were timed."""
        if not self.runs_sparse or self.dense is None or self.sparse is None or self.dense.ms is None or self.sparse.ms is None:
            return None
        return self.dense.ms - self.sparse.ms

    def to_json(self) -> dict[str, Any]:
        """The object of the key `Sparsity` in the layer JSON; times in milliseconds."""
        return {
            "Eligible": self.eligible,
            "RunsSparse": self.runs_sparse,
            "BestDenseMs": None if self.dense is None else self.dense.ms,
            "BestDenseTactic": None if self.dense is None else self.dense.tactic,
            "BestSparseMs": None if self.sparse is None else self.sparse.ms,
            "BestSparseTactic": None if self.sparse is None else self.sparse.tactic,
            "Reason": self.reason,
        }

    def sentence(self) -> str:
        """One line for a person."""
        if not self.eligible:
            return f"2:4: not eligible, {self.reason}"
        times = [f"best {kind} {c.ms:.4f} ms ({c.tactic})" for kind, c in (("dense", self.dense), ("sparse", self.sparse)) if c is not None]
        reasons = [self.reason] if self.reason else []
        return "2:4: " + "; ".join(["runs sparse" if self.runs_sparse else "runs dense", *times, *reasons])


def layer_sparsity(f: LayerFacts) -> LayerSparsity | None:
    """The sparsity of a layer; None for layers without constant weights of a Conv, Gemm or MatMul."""
    if find_reduction_axis(f.layer) is None:
        return None
    sparse, dense = (_find_fastest(c for c in f.candidates if is_sparse(c.tactic, c.config) == kind) for kind in (True, False))
    runs_sparse = is_sparse(f.choice.tactic, f.choice.config)
    why = explain_ineligible(f.layer)
    reason = why or ("" if runs_sparse else _explain_dense(f, dense, sparse))
    return LayerSparsity(f.name, why is None, runs_sparse, reason, dense, sparse)


def _find_fastest(candidates: Iterable[Candidate]) -> Candidate | None:
    return min((c for c in candidates if c.ms is not None), key=lambda c: c.ms or 0.0, default=None)


def _explain_dense(f: LayerFacts, dense: Candidate | None, sparse: Candidate | None) -> str:
    """Why a layer with 2:4 weights runs a dense tactic."""
    if not f.candidates:
        return "the engine keeps no candidates: it was locked, or built without timing"
    if sparse is not None and sparse.ms is not None:
        if dense is not None and dense.ms is not None and dense.ms <= sparse.ms:
            return f"the sparse tactic takes {sparse.ms / dense.ms:.2f}x of the dense time" if dense.ms else "the sparse tactic is not faster"
        return sparse.reason or "within the noise, or its formats would cost more in the adjacent layers"
    refused = [c for c in f.candidates if is_sparse(c.tactic, c.config) and c.reason and not c.reason.startswith("computes ")]
    return f"{refused[0].tactic} refuses: {refused[0].reason}" if refused else "no tactic of the backend computes this layer with 2:4 weights"


def sparsity_rows(plan: EnginePlan) -> list[LayerSparsity]:
    """The layers of an engine that have weights, in execution order; of the first profile if profiles were tuned separately."""
    found = [layer_sparsity(f) for f in layer_facts(plan.by_profile()[0])]
    return [x for x in found if x is not None]


def sparsity_lines(rows: list[LayerSparsity]) -> list[str]:
    """The table of eligible layers, the reasons of the other ones with their layers, and the milliseconds that sparse tactics save."""
    from whet.inspector.summary import format_table, shorten, shorten_name

    lines = []
    eligible = [x for x in rows if x.eligible]
    if eligible:
        cells = [
            [_format_ms(x.dense), _format_ms(x.sparse), "sparse" if x.runs_sparse else "dense", shorten_name(x.name), shorten(x.reason, 72)]
            for x in eligible
        ]  # fmt: skip
        lines += format_table((">dense ms", ">sparse ms", "runs", "layer", "why dense"), cells)
        saved = [x.saved_ms for x in eligible if x.saved_ms is not None]
        lines.append(
            f"{sum(x.runs_sparse for x in eligible)} of {len(eligible)} eligible layers run sparse and save {sum(saved):.4f} ms against the fastest "
            f"dense tactics, of {sum(x.dense.ms or 0.0 for x in rows if x.dense is not None):.4f} ms in all layers with weights"
        )
    by_reason: dict[str, list[str]] = {}
    for x in rows:
        if not x.eligible:
            by_reason.setdefault(x.reason, []).append(shorten_name(x.name))
    lines += [f"not eligible ({len(names)}), {why}: {', '.join(names)}" for why, names in by_reason.items()]
    return lines


def _format_ms(c: Candidate | None) -> str:
    return "-" if c is None or c.ms is None else f"{c.ms:.4f}"
