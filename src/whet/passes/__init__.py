"""Network -> network. Named passes, one file each, in groups by phase; `whet passes` lists them in execution order.

The passes that create fused layers are in `whet.composites`, which lowering imports.
"""

from whet.passes._lower import lower
from whet.registry import load_folder
from whet.rewrite import PASSES, Fired, Graph, Pass, PassLog, Phase, Skip, network_pass, order_passes, rule, run_passes, select

__all__ = ["PASSES", "Fired", "Graph", "Pass", "PassLog", "Phase", "Skip", "lower", "network_pass", "order_passes", "rule", "run_passes", "select"]

load_folder(__name__, __path__)
