"""The options for converting a tensor between formats."""

from itertools import permutations

import pytest

from whet.backends import get_backend
from whet.builder.candidates.reformats import Reformats
from whet.network import FORMATS, Tensor, parse_type
from whet.network.types import DTYPES
from whet.tactics import Operand, list_tactics


@pytest.mark.parametrize("onednn", [True, False])
@pytest.mark.parametrize("shape", ["1,6,1,1", "1,16,1,1", "2,8,3,3"])
def test_every_conversion_can_leave_its_source_unchanged(shape, onednn):
    """A view in place is of no use where the source is read again; without oneDNN only the fallback copies."""
    tactics = [t for t in list_tactics("cpu") if onednn or t.name == "cpu/view" or "onednn" not in t.name]
    for view in (t for t in tactics if t.name == "cpu/view" and not onednn):
        tactics[tactics.index(view)] = _ViewWithoutCopies(view)
    reformats = Reformats(tactics, get_backend("cpu"), {}, None)
    copies, t = 0, Tensor("x", parse_type(f"f32[{shape}]"))
    for name in ("f32", "u8"):
        for source, target in permutations(FORMATS, 2):
            a, b = Operand(source, DTYPES[name]), Operand(target, DTYPES[name])
            if reformats.option(t, a, b) is None:
                continue
            copied = reformats.option(t, a, b, out_of_place=True)
            assert copied is not None, (source, target)
            assert not copied.signature.inplace
            copies += 1
    assert copies >= 6


class _ViewWithoutCopies:
    """cpu/view of a machine without oneDNN: only in place."""

    def __init__(self, view):
        self._view = view

    def __getattr__(self, name):
        return getattr(self._view, name)

    def signatures(self, layer, backend):
        return [s for s in self._view.signatures(layer, backend) if s.inplace]
