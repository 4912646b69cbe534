"""The registry of passes. A pass is a named rule for one layer, or a function over the whole network; phase, `after` and name give its position.

A rule takes (graph, layer). It returns the replacement of the layer's outputs (a tensor, several, or a mapping from old to new tensors, which may
include outputs of other layers), `Skip(reason)` when its pattern matches but must not be rewritten, or None when the pattern does not match. A rule
may add layers; it does not modify existing layers and keeps no state. The driver replaces tensors, removes dead layers, assigns names and sorts.
A whole-network pass takes the graph, modifies it, and returns a list of `Fired` and `Skip`.

Names: the new root layer is named after the layers that it replaces, joined as TensorRT joins them ("conv1 + relu1"). In phase CLEAN it keeps the
name of the replaced layer. New layers inherit the source nodes of the removed layers unless the rule set them. Tensors keep their names.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from whet.errors import BuildError
from whet.network import Layer, Tensor
from whet.rewrite.graph import Graph


class Phase(IntEnum):
    """When a pass runs. Passes of one phase repeat until none fires."""

    CLEAN = 1  # constant folding, dead code, common subexpressions
    RECOGNIZE = 2  # patterns become named operations: LayerNormalization, Gelu
    FOLD = 3  # batch norms and pads into weights and attributes
    FILL = 4  # channels padded to multiples that kernels support
    FUSE = 5  # root operations with their epilogues, attention
    FINAL = 6  # composites of fused layers, pointwise chains


@dataclass(frozen=True)
class Skip:
    """The pass matched its pattern and must not rewrite it: the reason, in words for a user."""

    reason: str
    layer: str = ""


@dataclass(frozen=True)
class Fired:
    """One change by a whole-network pass: a description and the layer that it concerns."""

    what: str
    layer: str = ""


Replacement = Tensor | Sequence[Tensor] | Mapping[Tensor, Tensor]
Rule = Callable[[Graph, Layer], "Replacement | Skip | None"]
NetworkPass = Callable[[Graph], "Sequence[Fired | Skip]"]


@dataclass(frozen=True)
class Pass:
    """A registered pass. `ops` are the operations whose layers a rule is given (("*",): all; None: a whole-network pass); `level` is
    the lowest builderOptimizationLevel that runs it; `composite` names the composite that the rule creates ("": none)."""

    name: str
    phase: Phase
    run: Any
    ops: tuple[str, ...] | None
    after: tuple[str, ...] = ()
    level: int = 0
    doc: str = ""
    composite: str = ""


PASSES: dict[str, Pass] = {}


def register(p: Pass) -> None:
    """Adds a pass. Raises BuildError when another one has its name."""
    if p.name in PASSES:
        raise BuildError(f"two passes are named {p.name}")
    PASSES[p.name] = p


def rule(*ops: str, phase: Phase, after: Sequence[str] = (), level: int = 1, composite: str = "") -> Callable[[Rule], Rule]:
    """Decorator: registers a rule for layers of these operations ("*": all, "Fused": fused layers) under the function's name."""

    def decorate(f: Rule) -> Rule:
        register(Pass(f.__name__, phase, f, ops, tuple(after), level, _get_summary(f), composite))
        return f

    return decorate


def network_pass(*, phase: Phase, after: Sequence[str] = (), level: int = 1) -> Callable[[NetworkPass], NetworkPass]:
    """Decorator: registers a whole-network pass under the function's name."""

    def decorate(f: NetworkPass) -> NetworkPass:
        register(Pass(f.__name__, phase, f, None, tuple(after), level, _get_summary(f)))
        return f

    return decorate


def _get_summary(f: Any) -> str:
    """The first line of a function's docstring, or of its module's."""
    doc = f.__doc__ or sys.modules[f.__module__].__doc__ or ""
    return doc.strip().splitlines()[0] if doc.strip() else ""


def order_passes() -> list[Pass]:
    """All passes in the order in which they run. Raises BuildError when `after` names an unknown pass or makes a cycle."""
    return list(_order(tuple(PASSES.values())))


@functools.lru_cache(maxsize=4)  # each lowering asks for the order, of passes that rarely change
def _order(passes: tuple[Pass, ...]) -> list[Pass]:
    done: list[Pass] = []
    known = {p.name for p in passes}
    for phase in Phase:
        waiting = sorted((p for p in passes if p.phase is phase), key=lambda p: p.name)
        names = {p.name for p in waiting}
        for p in waiting:
            for a in p.after:
                if a not in known:
                    raise BuildError(f"pass {p.name} is declared after {a}, which does not exist")
        while waiting:
            ready = [p for p in waiting if not any(a in names for a in p.after)]
            if not ready:
                raise BuildError(f"passes depend on each other in a cycle: {', '.join(p.name for p in waiting)}")
            done.append(ready[0])
            waiting.remove(ready[0])
            names.discard(ready[0].name)
    return done
