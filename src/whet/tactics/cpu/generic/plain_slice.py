"""Slice of all element types. For coverage: CPUs without oneDNN."""

from __future__ import annotations

from whet.tactics._base import tactic
from whet.tactics.cpu.generic.mapped_copy import MappedCopy


@tactic
class PlainSlice(MappedCopy):
    ops = ("Slice",)
    leaves_to_onednn = False
    opt_in, instead_of = True, "ONEDNN"
