"""Kinds of fused layers, one file each: matcher, reasons for not fusing, samples, cost, decomposition and name for people."""

from whet.composites._base import COMPOSITES, Composite, decompose_layer, find_composite, register_composite, why_unfused
from whet.registry import load_folder

__all__ = ["COMPOSITES", "Composite", "decompose_layer", "find_composite", "register_composite", "why_unfused"]

load_folder(__name__, __path__)
