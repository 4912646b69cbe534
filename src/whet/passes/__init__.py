"""Network -> network. Named passes, one file each; `whet passes` lists them in running order."""

from whet.rewrite.rules import PASSES, Did, Pass, Phase, Skip, ordered, rule, whole
from whet.rewrite.driver import PassLog, run_passes, select
from whet.rewrite.graph import Graph
from whet.passes._lower import in_pieces, lower
from whet.registry import load_folder

__all__ = ["PASSES", "Did", "Graph", "Pass", "PassLog", "Phase", "Skip", "in_pieces", "lower", "ordered", "rule", "run_passes", "select", "whole"]

load_folder(__name__, __path__)
