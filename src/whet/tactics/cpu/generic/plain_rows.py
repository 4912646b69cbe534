"""Concat and Split of all element types, also channels last. For coverage: CPUs without oneDNN."""

from __future__ import annotations

from whet.tactics._base import tactic
from whet.tactics.cpu.generic.rows import Rows


@tactic
class PlainRows(Rows):
    formats = ("linear", "nhwc")
    leaves_to_onednn = False
    opt_in, instead_of = True, "ONEDNN"
