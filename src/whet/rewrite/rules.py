"""What a pass is: a named rule for one layer, or a small function over the whole network. Order is data: phase, `after`, name.

A rule gets (graph, layer) and returns what to use instead of the layer's output(s) (a mapping from old to new, where outputs of
layers behind it go too), `Skip(reason)` when the layer is its business but it must not fire, or None when it is not. It may add
layers; it changes none and keeps nothing: the driver replaces, removes what is dead, names, and sorts. A whole-network pass gets
the graph, changes it, and returns a list of `Did`/`Skip`.

Names and sources: the new layer that makes the replaced value is called after the layers that went into it, joined as TensorRT
joins them ("conv1 + relu1"); in phase CLEAN it keeps the name of the layer it replaces. Sources of what died go to what was added,
unless the rule gave it its own. Values keep their names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from whet.errors import BuildError
from whet.network import Layer, Tensor
from whet.rewrite.graph import Graph


class Phase(IntEnum):
    """When a pass runs. Passes of one phase repeat until none fires."""

    CLEAN = 1  # fold constants, drop what does nothing, merge equals
    RECOGNIZE = 2  # patterns become named ops: LayerNorm, GELU, attention
    FOLD = 3  # batch norms and pads into weights and attributes
    FILL = 4  # channels come in multiples that kernels take
    FUSE = 5  # layers and their epilogues become Fused layers
    FINAL = 6  # what was left over: pointwise chains


@dataclass(frozen=True)
class Skip:
    """The pass saw its pattern and must not fire there: the reason, in words for a user."""

    reason: str
    layer: str = ""


@dataclass(frozen=True)
class Did:
    """A whole-network pass did this."""

    what: str
    layer: str = ""


Rule = Callable[[Graph, Layer], "Tensor | Sequence[Tensor] | Mapping[Tensor, Tensor] | Skip | None"]
Whole = Callable[[Graph], "Sequence[Did | Skip]"]


@dataclass(frozen=True)
class Pass:
    """A registered pass. `ops` are the ops whose layers a rule is shown (("*",): all; None: a whole-network pass); `level` is the
    lowest builderOptimizationLevel that runs it."""

    name: str
    phase: Phase
    run: Any
    ops: tuple[str, ...] | None
    after: tuple[str, ...] = ()
    level: int = 0
    doc: str = ""


PASSES: dict[str, Pass] = {}


def _register(p: Pass) -> None:
    if p.name in PASSES:
        raise BuildError(f"pass {p.name} has two owners")
    PASSES[p.name] = p


def rule(*ops: str, phase: Phase, after: Sequence[str] = (), level: int = 1):
    """Decorator: registers a rule for layers of these ops ("*": all; Fused layers only so) under the file's name."""

    def wrap(f: Rule) -> Rule:
        _register(Pass(f.__module__.rsplit(".", 1)[-1], phase, f, ops, tuple(after), level, _first_line(f)))
        return f

    return wrap


def whole(*, phase: Phase, after: Sequence[str] = (), level: int = 1):
    """Decorator: registers a whole-network pass under the file's name."""

    def wrap(f: Whole) -> Whole:
        _register(Pass(f.__module__.rsplit(".", 1)[-1], phase, f, None, tuple(after), level, _first_line(f)))
        return f

    return wrap


def _first_line(f: Any) -> str:
    import sys

    doc = f.__doc__ or sys.modules[f.__module__].__doc__ or ""
    return doc.strip().splitlines()[0] if doc.strip() else ""


def ordered() -> list[Pass]:
    """All passes in the order in which they run. Raises BuildError when `after` names an unknown pass or makes a cycle."""
    done: list[Pass] = []
    for phase in Phase:
        waiting = sorted((p for p in PASSES.values() if p.phase is phase), key=lambda p: p.name)
        names = {p.name for p in waiting}
        for p in waiting:
            for a in p.after:
                if a not in PASSES:
                    raise BuildError(f"pass {p.name} runs after {a}, which there is not")
        while waiting:
            ready = [p for p in waiting if not any(a in names for a in p.after)]
            if not ready:
                raise BuildError(f"passes wait for each other: {', '.join(p.name for p in waiting)}")
            done.append(ready[0])
            waiting.remove(ready[0])
            names.discard(ready[0].name)
    return done
