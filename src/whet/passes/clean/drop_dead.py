"""Removes layers and constants that no output depends on."""

from whet.rewrite.graph import Graph
from whet.rewrite.rules import Fired, Phase, network_pass


@network_pass(phase=Phase.CLEAN, level=0)
def drop_dead(g: Graph) -> list[Fired]:
    needed = set(g.net.outputs)
    dead = []
    for layer in reversed(g.layers):
        if any(t in needed for t in layer.outputs):
            needed.update(g.reads(layer))
        else:
            dead.append(layer)
    g.remove(dead)
    unread = [t for t in g.net.constants.values() if not g.readers(t) and not g.is_output(t)]
    for t in unread:
        del g.net.constants[t.name]
    fired = [Fired(f"no output depends on this {layer.op}", layer.name) for layer in reversed(dead)]
    return fired + ([Fired(f"{len(unread)} unused constants")] if unread else [])
