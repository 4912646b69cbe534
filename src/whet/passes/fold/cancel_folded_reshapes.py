"""Reshapes that become neighbours when a batch norm between them is folded become one, or none.

LeViT computes linear(x), flatten(0, 1), the norm of the rows, then a reshape back: without the two reshapes the product's epilogue takes the
activation or the residual behind them.
"""

from __future__ import annotations

from whet.network import Layer
from whet.ops._strided import RESHAPES
from whet.passes.clean.cancel_reshapes import cancel_reshapes
from whet.rewrite.graph import Graph
from whet.rewrite.rules import Phase, Replacement, Skip, rule


@rule(*RESHAPES, phase=Phase.FOLD, after=["fold_batch_norm", "fold_batch_norm_forward"])
def cancel_folded_reshapes(g: Graph, layer: Layer) -> Replacement | Skip | None:
    return cancel_reshapes(g, layer)
