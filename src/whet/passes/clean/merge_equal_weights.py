"""Constants of equal type and bytes become one; its origin records what it was assumed to be equal to."""

from __future__ import annotations

from whet.network import Tensor
from whet.rewrite.constants import assume_equal, fingerprint
from whet.rewrite.graph import Graph
from whet.rewrite.rules import Fired, Phase, network_pass


@network_pass(phase=Phase.CLEAN, after=["fold_constants", "fold_shapes"])
def merge_equal_weights(g: Graph) -> list[Fired]:
    alike: dict[object, list[Tensor]] = {}
    done = []
    for t in list(g.net.constants.values()):
        if g.is_output(t):
            continue
        known = alike.setdefault(fingerprint(t), [])
        first = next((k for k in known if k.weight is not None and t.weight is not None and k.weight.digest == t.weight.digest), None)
        if first is None:
            known.append(t)
            continue
        assume_equal(first, t)
        g.replace(t, first, 0)
        g.net.constants.pop(t.name, None)
        done.append(Fired(f"%{t.name} equals %{first.name}"))
    return done
