"""Engines of several profiles: each profile tuned for its own shapes, in one file, selected by the input shapes."""

import dataclasses
import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
from nets import Stages, inputs, residual

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from mutants import assemble, sections_of

from whet.builder import BuildConfig, build, plan_digest, save_lock
from whet.builder.batching.per_profile import join_plans
from whet.builder.retune import retune
from whet.builder.select import verified_search
from whet.builder.verify import verify_selected
from whet.engine import engine_bytes, engine_digest, read_engine
from whet.engine.json_data import from_json, to_json
from whet.errors import EngineError, LockError, ShapeError, UsageError
from whet.inspector import engine_information
from whet.network import format_network
from whet.ops import run_network
from whet.runtime import Runtime

build_module = importlib.import_module("whet.builder.build")  # whet.builder.build is the function
NET = residual("N")
CONV = "cpu/onednn_conv"


def at(n):
    return {"x": (n, 3, 10, 10)}


PROFILES = ((at(1), at(1), at(1)), (at(2), at(4), at(8)))
# : without the kernel that may be faster than oneDNN's convolutions, or be selected by estimates at one batch and not at another
QUICK = BuildConfig(
    timing_cache="", avg_timing=1, whole_engines=1, optimization_level=1, profiles=PROFILES, threads=1, tactic_sources=("-DIRECT", "-WINOGRAD")
)


@pytest.fixture(scope="module")
def plan():
    """The second profile may not use oneDNN's convolutions, as if others had been faster for it."""
    made, real = [], build_module.list_enabled_tactics

    def fewer(machine, sources):
        made.append(machine)
        return real(machine, (*sources, f"-{CONV}") if len(made) == 2 else sources)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_module, "list_enabled_tactics", fewer)
        plan = build(NET, QUICK)
    assert len(made) == 2
    return plan


def tactics(plan):
    return {c.tactic for c in plan.choices.values()}


def test_each_profile_has_its_own_choices_and_probe(plan):
    (other,) = plan.others
    assert CONV in tactics(plan) - tactics(other)
    assert [p.probe["shapes"]["x"][0] for p in plan.by_profile()] == [1, 4]
    assert [a.sizes["x"] for a in plan.arenas] == [4 * 300, 8 * 4 * 300]
    assert plan.part(1) == (other, 0)
    names = engine_information(plan)["Layers"]
    assert len(names) == len(plan.network.layers) + len(other.network.layers)
    assert {n["TacticName"] for n in names if n["Name"].endswith("[profile 1]")} == {c.implementation for c in other.choices.values()}


@pytest.mark.parametrize("source", ["plan", "file"])
def test_the_shapes_choose_the_profile(plan, source):
    engine = Runtime().load(plan if source == "plan" else engine_bytes(plan))
    with engine.create_context() as context:
        for n, profile in ((1, 0), (3, 1), (8, 1), (1, 0)):
            feed = inputs(NET, N=n)
            got = context.run(feed)["y"]
            assert context.profile_index == profile
            np.testing.assert_allclose(got, run_network(NET, feed)["y"], rtol=1e-4, atol=1e-5)
            ran = {s.tactic for s in context.launches().shaped.steps}
            assert (CONV in ran) == (profile == 0)
        assert [r.name.endswith("[profile 1]") for r in context.profile(inputs(NET, N=2), 2)] == [True] * len(plan.others[0].network.layers)
        with pytest.raises(ShapeError, match=r"9x3x10x10, which no profile accepts. Profiles: 0: x 1x3x10x10 to 1x.*; 1: x 2x3x10x10 to 8x"):
            context.run(inputs(NET, N=9))
    with pytest.raises(ShapeError, match="Profile 1 takes it"):
        engine.create_context(0).run(inputs(NET, N=2))


def test_the_file_stores_every_profile_and_each_weight_once(plan):
    data = engine_bytes(plan, packed_weights=Runtime().load(plan).packed_weights())
    again = read_engine(data)
    assert engine_digest(again) == engine_digest(plan, packed_weights=again.packed)
    assert plan_digest(again) == plan_digest(plan)
    assert [(p.choices, format_network(p.network), p.report.latency_ms) for p in again.by_profile()] == [
        (p.choices, format_network(p.network), p.report.latency_ms) for p in plan.by_profile()
    ]
    weights = [len(sections_of(engine_bytes(p))["weights"]) for p in (plan, plan.by_profile()[0])]
    assert weights[0] < 1.1 * weights[1]


def row(change):
    return lambda t: change(t[0])


@pytest.mark.parametrize(
    ("section", "change", "text"),
    [
        ("further", row(lambda r: r["choices"].popitem()), "a layer but no choice"),
        ("further", row(lambda r: r.update(constants=r["constants"] - 1)), "constants"),
        ("further", row(lambda r: r.update(constants=10**6)), "more constants than the"),
        ("further", row(lambda r: r.update(network=r["network"].replace("out ", "out %x as z\nout ", 1))), "profile 1: the network"),
        ("further", row(lambda r: r["probe"]["shapes"].update(x=[1, 3, 10, 10])), "not the opt shape of its profile"),
        ("further", lambda t: t.append(t[0]), "were not given"),
        ("further", lambda t: t.clear(), "7 constants, the index 14"),
        ("arenas", lambda t: t[1]["offsets"].update(x=0, y=0), "overlap in the arena|profile 1"),
        ("header", lambda t: t["profiles"].pop(), "1 profiles|a list of"),
        ("info", lambda t: t.pop("further"), "info should be an object"),
        ("info", lambda t: t["further"].append({}), "2 further reports"),
    ],
)
def test_damaged_further_profiles_are_refused(plan, section, change, text):
    parts = dict(sections_of(engine_bytes(plan)))
    tree = from_json(memoryview(parts[section]), section)
    change(tree)
    with pytest.raises(EngineError, match=text):
        read_engine(assemble({**parts, section: to_json(tree)}))


def test_plans_that_do_not_belong_together_are_refused(plan):
    first, second = plan.by_profile()
    one_more = residual("N", channels=8)
    for other, text in (
        (dataclasses.replace(second, threads=2), "another machine or number of threads"),
        (dataclasses.replace(second, profiles=first.profiles), "other shapes or arenas"),
        (build(one_more, dataclasses.replace(QUICK, profiles=PROFILES[1:], verify=False)), None),
    ):
        made = dataclasses.replace(plan, others=[other])
        if text is None:  # another network with the same inputs and outputs cannot be recognized
            other.network.outputs[0].name = "other"
            made, text = dataclasses.replace(made, profiles=[*first.profiles, *other.profiles], arenas=[*first.arenas, *other.arenas]), "other inputs"
        with pytest.raises(EngineError, match=text):
            engine_bytes(made)


def test_a_lock_covers_every_profile(plan, tmp_path):
    path = tmp_path / "lock.json"
    save_lock(plan, path)
    locked = dataclasses.replace(QUICK, lock=str(path))
    assert engine_digest(build(NET, locked)) == engine_digest(plan)
    with pytest.raises(LockError, match="the lock has 2 profiles, the build 1"):
        build(NET, dataclasses.replace(locked, profiles=PROFILES[:1]))
    with pytest.raises(LockError, match="the profiles are others"):
        build(NET, dataclasses.replace(locked, profiles=(PROFILES[0], (at(2), at(5), at(8)))))
    path.write_text(path.read_text().replace('"further": [', '"further": [3, '))
    with pytest.raises(LockError, match="is damaged"):
        build(NET, locked)


def test_retuning_tunes_each_profile(plan):
    again = retune(plan, timing_cache="")
    assert again.profiles == plan.profiles
    feed = inputs(NET, N=6)
    np.testing.assert_allclose(Runtime().load(again).create_context().run(feed)["y"], run_network(NET, feed)["y"], rtol=1e-4, atol=1e-5)


def test_equal_choices_are_shared():
    plan = build(NET, dataclasses.replace(QUICK, optimization_level=0))
    assert not plan.others
    assert len(plan.profiles) == len(plan.arenas) == 2
    assert "further" not in sections_of(engine_bytes(plan))
    assert join_plans([plan]).profiles == plan.profiles
    with Runtime().load(plan).create_context() as context:
        assert context.run(inputs(NET, N=7))["y"].shape == (7, 10)
        assert context.profile_index == 1


def test_an_error_in_a_later_profile_is_raised_before_the_first_is_built():
    stages = Stages()
    with pytest.raises(UsageError, match="min <= opt <= max"):
        build(NET, dataclasses.replace(QUICK, profiles=(PROFILES[0], (at(4), at(2), at(8)))), progress=stages)
    assert stages.names == []


def test_verification_data_are_used_by_the_profiles_they_fit(monkeypatch):
    seen, real = [], verified_search.verify_once

    def noted(plan, net, machine, inputs, *arguments):
        seen.append(None if inputs is None else inputs["x"].shape[0])
        return real(plan, net, machine, inputs, *arguments)

    monkeypatch.setattr(verified_search, "verify_once", noted)
    build(NET, dataclasses.replace(QUICK, optimization_level=0), inputs=inputs(NET, N=2))
    assert seen == [None, 2]


def test_a_selected_engine_is_verified_part_by_part_each_at_its_own_profile(plan, monkeypatch):
    """Without a profile, the layers of the second part would be checked at the shapes of no profile."""
    seen = []

    def record(part, source, backend, given, config, log):
        seen.append((part.profiles, config.profiles, given))
        return real(part, source, backend, given, config, log)

    real = verify_selected.verify_once
    monkeypatch.setattr(verify_selected, "verify_once", record)
    verify_selected.build_verified(lambda config: plan, lambda plan: NET, QUICK, None, inputs(NET, N=4))
    assert [config for _, config, _ in seen] == [PROFILES[:1], PROFILES[1:]]
    assert [given is not None for _, _, given in seen] == [False, True]  # four samples fit the second profile only
