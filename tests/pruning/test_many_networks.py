"""Groups, scores, branches and cuts of the networks of all golden cases of passes, and of networks that differ from them in one place.

The other tests of this folder check a few networks by definition; these results must stay the same for many networks. After an intended change:
`WHET_UPDATE_GOLDEN=1 pytest tests/pruning/test_many_networks.py`, and review the diff.
"""

import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "passes"))
from near_misses import list_edits
from pass_golden import FOLDER, read
from random_networks import feeds

from support.recorded import compare_with_record, rounded
from whet.errors import NetworkError, PruneError, WhetError
from whet.network import parse_network, verify
from whet.ops import run_network
from whet.passes import PASSES
from whet.pruning import branches, count_flops, cut, groups, importance

GOLDEN = FOLDER.parent / "groups"
SHARE = 25  # one in so many edits is taken
NAMES = sorted(n for n in PASSES if "quantize" not in n)


def networks(name):
    for case in read(FOLDER / f"{name}.txt"):
        texts = [("as it is", case.before)]
        texts += [(what, text) for what, text in list_edits(case.before) if zlib.crc32(f"{name} {case.title} {what} groups".encode()) % SHARE == 0]
        for what, text in texts:
            try:
                yield f"{case.title}: {what}", parse_network("network case source\n" + text)
            except WhetError:  # the edit gives no network
                continue


def describe(net):
    """Lines about the groups and branches of a network, their scores, and its outputs after half of each group is cut."""
    found = groups(net)
    blocks = branches(net)
    scores = importance(found, "l1", net=net, blocks=blocks)
    for g in found:
        places = sorted(f"{t.name}[{axis}]x{at.shape[1]}" for (t, axis), at in g.members.items())
        at = sum(int((k * np.arange(1, k.size + 1).reshape(k.shape)).sum()) for k in g.members.values())
        score = rounded(scores[g.name] @ np.arange(1, g.size + 1))
        yield f"  {g.name}: {g.size} of {', '.join(places)}; {len(g.layers)} layers, indices {at}, score {score}"
    for b in blocks:
        yield f"  branch {b.name}: {', '.join(b.layers)}; score {rounded(scores[b.name].sum())}"
    if not found:
        return
    kept = {g.name: np.sort(np.argsort(-scores[g.name], kind="stable")[: (g.size + 1) // 2]) for g in found}
    try:
        small = cut(net, kept, found)
    except PruneError as e:
        yield f"  refused: {str(e).splitlines()[0][:120]}"
        return
    verify(small)
    yield f"  half: {count_flops(small)} of {count_flops(net)} FLOPs"
    arrays = feeds(small)
    try:
        values = run_network(small, arrays, widen=True)
    except (NetworkError, TypeError):  # sizes that do not fit
        return
    for t in small.outputs:
        a = values[t.name].astype(np.float64)
        yield f"  %{t.name}: {rounded(np.abs(a[np.isfinite(a)]).sum())}"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # an edit may divide by zero
@pytest.mark.parametrize("name", NAMES)
def test_what_can_be_cut(name):
    lines = [line for title, net in networks(name) for line in (title, *describe(net))]
    compare_with_record(GOLDEN / f"{name}.txt", lines)
