"""Passes on networks that differ in one place from a golden case: values are preserved, and what the pass makes of them stays as recorded: how often
it fires, how many layers it skips, then the layers in order and the number of elements of all tensors.

If a pass loses a condition it fires in the wrong places; with a condition too many it misses the right ones. After an intended change:
`WHET_UPDATE_GOLDEN=1 pytest tests/passes/test_pass_near_misses.py`, and review the diff.
"""

import zlib

import pytest
from near_misses import list_edits
from pass_golden import FOLDER, ROUNDS, read
from random_networks import describe, feeds, same

from support.recorded import compare_with_record
from whet.errors import NetworkError, WhetError
from whet.network import parse_network
from whet.ops import run_network
from whet.passes import PASSES

GOLDEN = FOLDER.parent / "near_misses"
SHARE = 4  # one in so many edits is run
#: These compute x / c as x * (1 / c) and the like in some near misses: the last bit may differ.
ROUND_TOO = {"recognize_swish"}


def networks(name, case):
    """The valid networks among the selected edits, each with a description of its edit."""
    for what, text in list_edits(case.before):
        if zlib.crc32(f"{name} {case.title} {what}".encode()) % SHARE == 0:
            try:
                yield what, parse_network("network case source\n" + text)
            except WhetError:  # the edit gives no network
                continue


def check_values(name, case, before, after):
    """Both networks give the same values, or the reference cannot run the one before."""
    arrays = feeds(before)
    try:
        want = run_network(before, arrays)
    except (NetworkError, TypeError):  # sizes that do not fit, a type that an op has no values for
        return
    got = run_network(after, arrays)
    assert list(want) == list(got)
    rounds = name in ROUNDS | ROUND_TOO or bool(ROUNDS & set(case.others))
    for key, a in want.items():
        same(a, got[key], 1e-5 if rounds else 0.0)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # an edit may divide by zero
@pytest.mark.parametrize("name", sorted(PASSES))
def test_near_misses(name):
    lines = []
    for case in read(FOLDER / f"{name}.txt"):
        fired: dict[tuple[int, str], list[str]] = {}
        for what, net in networks(name, case):
            after, log = case.run(name, net)
            count = log.counts()[name]
            skips = len({layer for owner, layer in log.skipped if owner == name})
            made = [f"skips {skips}"] * bool(skips) + [describe(after)] * bool(count)
            fired.setdefault((count, ", ".join(made)), []).append(what)
            if log.fired:
                try:
                    check_values(name, case, net, after)
                except AssertionError as e:
                    raise AssertionError(f"{case.title}: {what}: {e}") from e
        lines.append(f"## {case.title}")
        lines += [f"fires {n}{f', {made}' if made else ''}: {'; '.join(sorted(whats))}" for (n, made), whats in sorted(fired.items())]
    compare_with_record(GOLDEN / f"{name}.txt", lines)
