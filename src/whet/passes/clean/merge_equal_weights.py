"""Constants of equal type and bytes become one; its origin records the assumption that they are equal."""

from __future__ import annotations

from whet.network import Tensor
from whet.rewrite.constants import assume_equal, compute_fingerprint
from whet.rewrite.graph import Graph
from whet.rewrite.rules import Fired, Phase, network_pass


@network_pass(phase=Phase.CLEAN, after=["fold_constants", "fold_shapes"])
def merge_equal_weights(g: Graph) -> list[Fired]:
    by_fingerprint: dict[object, list[Tensor]] = {}
    fired = []
    for t in list(g.net.constants.values()):
        if g.is_output(t):
            continue
        known = by_fingerprint.setdefault(compute_fingerprint(t), [])
        first = next((k for k in known if k.weight is not None and t.weight is not None and k.weight.digest == t.weight.digest), None)
        if first is None:
            known.append(t)
            continue
        assume_equal(first, t)
        g.replace(t, first, 0)
        g.net.constants.pop(t.name, None)
        fired.append(Fired(f"%{t.name} equals %{first.name}"))
    return fired
