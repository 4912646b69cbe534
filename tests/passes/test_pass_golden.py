"""Each pass by text before and after: it fires, it must not fire (with its reason), a second run changes nothing, values are preserved.

A pass without a golden file fails here. After an intended change: `WHET_UPDATE_GOLDEN=1 pytest tests/passes/test_pass_golden.py`, and
review the diff.
"""

import os

import pytest
from pass_golden import FOLDER, NO_NAN, ROUNDS, after_text, read, write
from random_networks import feeds, same

from whet.ops import run_network
from whet.passes import PASSES, lower, order_passes, select

UPDATE = os.environ.get("WHET_UPDATE_GOLDEN") == "1"
FILES = {p.stem: read(p) for p in sorted(FOLDER.glob("*.txt"))}
CASES = [(name, i) for name, cases in FILES.items() for i in range(len(cases))]
IDS = [f"{name}-{FILES[name][i].title.partition(':')[0]}" for name, i in CASES]


def test_every_pass_has_a_golden_file():
    assert sorted(FILES) == sorted(PASSES)


@pytest.mark.parametrize("name", sorted(PASSES))
def test_a_file_shows_the_pass_firing_and_not_firing(name):
    logs = [case.run(name)[1] for case in FILES[name]]
    fired = [log.counts()[name] > 0 for log in logs]
    assert any(fired), "no case in which it fires"
    assert not all(fired) or any(k[0] == name for log in logs for k in log.skipped), "no case in which it must not fire"
    titles = [c.title.partition(":")[0] for c in FILES[name]]
    assert len(set(titles)) == len(titles)


@pytest.mark.parametrize(("name", "i"), CASES, ids=IDS)
def test_golden(name, i):
    case = FILES[name][i]
    net, log = case.run(name)
    got = after_text(case, name, net, log)
    if UPDATE:
        case.after = got
        write(FOLDER / f"{name}.txt", FILES[name])
    assert got == case.after


@pytest.mark.parametrize(("name", "i"), CASES, ids=IDS)
def test_a_second_run_changes_nothing(name, i):
    case = FILES[name][i]
    net, _ = case.run(name)
    net.stage = "source"
    again, log = case.run(name, net)
    assert log.fired == []
    assert str(again).split("\n")[1:] == str(net).split("\n")[1:]


@pytest.mark.parametrize(("name", "i"), CASES, ids=IDS)
def test_values_are_preserved(name, i):
    case = FILES[name][i]
    before = case.network()
    after, _ = case.run(name)
    exact = name not in ROUNDS and not ROUNDS & set(case.others)
    for k in range(2):
        arrays = feeds(before, seed=k, extreme=exact and k == 1 and name not in NO_NAN)
        want, got = run_network(before, arrays), run_network(after, arrays)
        assert list(want) == list(got)
        for key, a in want.items():
            same(a, got[key], 0.0 if exact else 1e-5)


def test_order_is_pinned():
    path = FOLDER.parent / "pass_order.txt"
    got = "".join(f"{p.phase.name:<10} {p.level} {p.name}\n" for p in order_passes())
    if UPDATE:
        path.write_text(got)
    assert got == path.read_text()


@pytest.mark.parametrize("name", sorted(PASSES))
def test_a_pass_fires_from_its_recorded_level_on(name):
    recorded = {n: int(level) for _, level, n in map(str.split, (FOLDER.parent / "pass_order.txt").read_text().splitlines())}
    level = recorded[name]
    case = next(c for c in FILES[name] if c.run(name)[1].counts()[name])
    for chosen in range(level, 4):
        assert name in {p.name for p in select(chosen)}
    assert level == 0 or name not in {p.name for p in select(level - 1)}
    others = [p.name for p in order_passes() if p.name != name and p.name not in case.others]
    switches = [*(f"-{o}" for o in others), *(f"+{o}" for o in case.others)]
    refuses = (lambda layer: None if layer.composite in case.takes else "no tactic takes it") if case.takes else None
    options = {"no_fuse": case.no_fuse, "refuses": refuses, "channel_alignment": case.channel_alignment}
    assert [lower(case.network(), level=x, switches=switches, **options)[1].counts().get(name, 0) > 0 for x in (level - 1, level)] == [False, True]


@pytest.mark.parametrize("name", sorted(PASSES))
def test_a_value_that_a_layer_without_inputs_produces(name):
    """Once its shape is known, a ConstantOfShape reads nothing; with symbols in the shape it stays a layer."""
    for case in FILES[name]:
        for i, t in enumerate(case.network().inputs):
            if t.dtype.bits >= 8 and t.dtype.name != "string":
                net = case.network()
                filled = net.add_layer("ConstantOfShape", (), {"value": 1, "dtype": t.dtype, "shape": t.shape}, at=0)
                net.replace(net.inputs[i], filled.output)
                case.run(name, net)
