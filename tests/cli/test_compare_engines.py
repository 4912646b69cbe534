"""`whet compare` of engines, levels and passes, and `whet diff`."""

import dataclasses
import json

import numpy as np
import pytest
from click.testing import CliRunner

import whet
from whet.cli import group
from whet.inspector.alignment import NO_NODE, align_layers, find_differing_settings
from whet.measure.engine_comparison import compute_output_difference
from whet.network import parse_network
from whet.report.comparison_page import describe_difference

NET = """network n source
in %x: f32[1,8,16,16]
const %w: f32[8,8,3,3] = seed(1)
%c = Conv(%x, %w, pads=(1,1,1,1))
%y = Relu(%c)
out %y
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("engines")
    model = whet.save_onnx(parse_network(NET), folder / "n.onnx")
    for name, changes in {"fused": {"optimization_level": 1}, "plain": {"optimization_level": 0, "passes": ("none",)}}.items():
        whet.build(model, timing_cache="", **changes).save(folder / f"{name}.engine")
    return folder


def call(*arguments):
    return CliRunner().invoke(group, list(map(str, arguments)), catch_exceptions=True)


def test_engines_are_timed_in_turns_and_aligned(files):
    done = call("compare", files / "fused.engine", files / "plain.engine", "--seconds=0.05", "--json")
    data = json.loads(done.output)
    first, second = data["engines"]
    assert (first["name"], first["change"], second["name"]) == ("fused", 0.0, "plain")
    assert second["snr_db"] is None or second["snr_db"] > 80
    for e in (first, second):
        assert e["interval_ms"][0] <= e["latency_ms"] <= e["interval_ms"][1], "the median is in its interval, also on a busy machine"
    low, high = second["change_interval"]
    assert low <= second["change"] <= high
    (conv,) = [g for g in data["layers"] if len(g["nodes"]) == 2]
    assert [len(e) for e in conv["engines"]] == [1, 2]
    assert not conv["same_fusion"]
    text = " ".join(call("compare", files / "fused.engine", files / "plain.engine", "--seconds=0.05").output.split())  # lines may be wrapped
    assert "(fused differently)" in text
    assert "plain: " in text
    assert "outputs differ by at most" in text


def test_layers_are_timed_in_turns_and_shown_with_their_kernels(files, monkeypatch):
    """Times come from this machine and this moment, not from the builds, which ran at different times and may have run elsewhere."""
    from whet.measure.engine_comparison import compare_layers
    from whet.runtime import Runtime

    plans = {n: whet.read_engine(files / f"{n}.engine") for n in ("fused", "plain")}
    for p in plans.values():
        p.report.layer_ms = dict.fromkeys(p.report.layer_ms, 1e6)
    timed = compare_layers({n: Runtime().load(p) for n, p in plans.items()})
    for name, t in timed.items():
        assert list(t.ms) == [x.name for x in plans[name].network.layers]
        assert all(0 <= ms < 1e5 for ms in t.ms.values())
        assert sum(t.ms.values()) > 0
    (group_, *_) = [g for g in align_layers([t.plan for t in timed.values()], [t.ms for t in timed.values()]) if len(g.nodes) == 2]
    assert group_.ms(1) == pytest.approx(sum(timed["plain"].ms[f.layer.name] for f in group_.layers[1]))
    text = call("compare", files / "fused.engine", files / "plain.engine", "--seconds=0.02").output
    conv = next(c for c in plans["fused"].choices.values() if c.implementation and "conv" in c.tactic)
    assert f"{conv.tactic} f32 {conv.implementation}" in text
    assert "2 layers:" in text, "the parts of what the other engine fused"


DEEP = NET.replace("out %y", "%c2 = Conv(%y, %w, pads=(1,1,1,1))\n%y2 = Relu(%c2)\n%c3 = Conv(%y2, %w, pads=(1,1,1,1))\n%y3 = Relu(%c3)\nout %y3")


def test_levels_and_ablation_of_a_model(files):
    deep = whet.save_onnx(parse_network(DEEP), files / "deep.onnx")  # fusion saves more launches than reformats may add
    done = call("compare", "--ablate", deep, "--seconds=0.02", "--json", "--timingCacheFile", files / "t.cache")
    names = [e["name"] for e in json.loads(done.output)["engines"]]
    assert names[0] == "all passes"
    assert any(n.startswith("-fuse") for n in names)
    done = call("compare", "--levels", deep, "--backend=null", "--seconds=0.02", "--json")  # times from a table: the same layers on any machine
    engines = {e["name"]: e for e in json.loads(done.output)["engines"]}
    assert list(engines) == ["level 3", "level 0", "level 1", "level 2", "level 4", "level 5", "passes=none"]
    assert engines["passes=none"]["layers"] > engines["level 3"]["layers"]
    assert all(e["build_seconds"] > 0 and e["mb_moved"] > 0 for e in engines.values())


def test_diff_runs_nothing_and_tells_by_its_exit_code(files):
    same = call("diff", files / "fused.engine", files / "fused.engine")
    assert (same.exit_code, same.output) == (0, "No differences.\n")
    done = call("diff", files / "fused.engine", files / "plain.engine")
    assert done.exit_code == 1
    assert "optimization_level: 1 -> 0" in done.output
    assert "(fused differently)" in done.output
    assert json.loads(call("diff", files / "fused.engine", files / "plain.engine", "--json").output)["options"]["optimization_level"] == [1, 0]


def test_diff_of_locks(files):
    for name in ("fused", "plain"):
        whet.builder.save_lock(whet.read_engine(files / f"{name}.engine"), files / f"{name}.json")
    assert call("diff", files / "fused.json", files / "fused.json").exit_code == 0
    rows = json.loads(call("diff", files / "fused.json", files / "plain.json", "--json").output)["layers"]
    assert any(r["first"] == "-" or r["second"] == "-" for r in rows)
    assert "one is an engine" in str(call("diff", files / "fused.json", files / "plain.engine").exception)
    assert "n.onnx is a model; give two engines or two locks" in str(call("diff", files / "n.onnx", files / "n.onnx").exception)


def test_mistakes(files):
    for arguments, message in (
        (("--levels", files / "fused.engine"), "takes one model"),
        (("--levels", "--ablate", files / "n.onnx"), "takes one model"),
        ((files / "fused.engine", files / "plain.engine", "--noEngines"), "--noEngines counts models only"),
    ):
        assert message in str(call("compare", *arguments).exception)


def test_settings_that_differ(files):
    a, b = (whet.read_engine(files / f"{n}.engine") for n in ("fused", "plain"))
    assert find_differing_settings([a, a]) == {}
    b.machine["libraries"] = {**a.machine["libraries"], "cpu/other": "another 1.0"}
    b.machine["model"] = "another CPU"
    found = find_differing_settings([a, b])
    assert found["optimization_level"] == [1, 0]
    assert found["machine.model"] == [a.machine["model"], "another CPU"]
    assert set(found) == {"optimization_level", "passes", "machine.model"}, "a library that one engine does not use is no difference"
    text = call("compare", files / "fused.engine", files / "plain.engine", "--seconds=0.02").output
    assert "optimization_level: fused 1; plain 0" in text
    a.options["no_fuse"], b.options["no_fuse"] = [["x", "y"]], (("x", "y"),)  # a loaded engine, and one that was just built
    assert "no_fuse" not in find_differing_settings([a, b])


def test_alignment_keeps_every_layer_once(files):
    plans = [whet.read_engine(files / f"{n}.engine") for n in ("fused", "plain")]
    groups = align_layers(plans)
    for k, plan in enumerate(plans):
        assert sorted(f.layer.name for g in groups for f in g.layers[k]) == sorted(x.name for x in plan.network.layers)
    assert [g.name for g in groups if not g.nodes] in ([], [NO_NODE])


def test_layers_that_differ_in_formats_alone_name_them(files):
    first, second = (whet.read_engine(files / "fused.engine") for _ in range(2))
    (name, choice), *_ = ((n, c) for n, c in second.choices.items() if c.outputs[0] is not None)
    other = next(fmt for fmt in ("nhwc", "linear") if fmt not in {o[0] for o in (*choice.inputs, *choice.outputs) if o is not None})
    second.choices[name] = dataclasses.replace(choice, outputs=((other, choice.outputs[0][1]), *choice.outputs[1:]))
    (group_,) = [g for g in align_layers([first, second]) if not g.same_choices]
    assert group_.differ_in_formats
    a, b = group_.description(0), group_.description(1)
    assert a != b
    assert b.endswith(f"{other})")
    layers = [g.to_dict() for g in align_layers([first, second])]
    assert [describe_difference(g) for g in layers if not g["same_choices"]] == ["formats"]


def test_output_differences():
    a = np.array([3.0, 4.0])
    assert compute_output_difference({"y": a}, {"y": a}) == (float("inf"), 0.0)
    snr, worst = compute_output_difference({"y": a}, {"y": a + 0.5})
    assert (round(snr, 3), worst) == (16.99, 0.5)
    assert compute_output_difference({"y": a}, {"z": a}) == (None, None)
