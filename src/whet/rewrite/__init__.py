"""Graph rewriting: the building blocks of passes and composites.

`rule` and `network_pass` register a pass, `Graph` is the network that it sees, `run_passes` applies passes in order.
The registry `PASSES` is complete once `whet.passes` has been imported.
"""

from whet.rewrite.driver import PassLog, run_passes, select
from whet.rewrite.fusing import fuse_flat, fuse_nested
from whet.rewrite.graph import Graph
from whet.rewrite.rules import PASSES, Fired, Pass, Phase, Skip, network_pass, order_passes, rule

__all__ = [
    "PASSES", "Fired", "Graph", "Pass", "PassLog", "Phase", "Skip", "fuse_flat", "fuse_nested", "network_pass", "order_passes", "rule", "run_passes",
    "select",
]  # fmt: skip
