"""Layers and constants that no output needs go."""

from whet.passes._base import Did, Phase, whole
from whet.passes._graph import Graph


@whole(phase=Phase.CLEAN, level=0)
def drop_dead(g: Graph) -> list[Did]:
    needed = set(g.net.outputs)
    dead = []
    for layer in reversed(g.layers):
        if any(t in needed for t in layer.outputs):
            needed.update(g.reads(layer))
        else:
            dead.append(layer)
    g.bury(dead)
    unread = [t for t in g.net.constants.values() if not g.readers(t) and not g.is_output(t)]
    for t in unread:
        del g.net.constants[t.name]
    done = [Did(f"{layer.op} is needed by no output", layer.name) for layer in reversed(dead)]
    return done + ([Did(f"{len(unread)} unused constants")] if unread else [])
