"""Shapes recorded at run time, and retunes for the frequent ones."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from click.testing import CliRunner

import whet
from whet.builder import BuildConfig, build
from whet.builder.retune import split_by_trace
from whet.cli.retune import command
from whet.engine import read_engine, write_engine
from whet.errors import EngineError
from whet.network import parse_network
from whet.runtime import Runtime, read_trace

NET = """network n source
in %x: f32[N,8,H,6]
const %w: f32[8,8,3,3] = seed(1)
%a = Conv(%x, %w, pads=(1, 1, 1, 1)) from "conv"
%y = Relu(%a) from "relu"
out %y
"""
LOW, HIGH = {"x": (1, 8, 4, 6)}, {"x": (8, 8, 32, 6)}


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    profiles = ((LOW, {"x": (1, 8, 8, 6)}, HIGH),)
    plan = build(parse_network(NET), BuildConfig(profiles=profiles, timing_cache="", optimization_level=0, threads=1))
    path = tmp_path_factory.mktemp("engines") / "n.engine"
    write_engine(plan, path)
    return path


def run(engine, *shapes):
    for shape in shapes:
        engine.run({"x": np.ones(shape, np.float32)})


def test_runs_are_counted_and_added_to_the_file(engine, tmp_path):
    file = tmp_path / "shapes.json"
    for _ in range(2):
        with whet.load(engine, record_shapes=file) as loaded:
            run(loaded, (1, 8, 4, 6), (4, 8, 16, 6), (4, 8, 16, 6))
            context = loaded.create_context()
            context.bind("x", np.ones((4, 8, 16, 6), np.float32))
            context.execute()
    assert read_trace(file) == [({"x": (4, 8, 16, 6)}, 6), ({"x": (1, 8, 4, 6)}, 2)]
    with whet.load(engine) as loaded:
        assert loaded.shape_trace is None


def test_an_unchanged_program_is_recorded_up_to_its_end(engine, tmp_path):
    file = tmp_path / "shapes.json"
    code = f"import numpy as np, whet; whet.load({str(engine)!r}).run({{'x': np.ones((2, 8, 4, 6), np.float32)}})"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"WHET_RECORD_SHAPES": str(file)})
    assert read_trace(file) == [({"x": (2, 8, 4, 6)}, 1)]


def test_a_retune_has_a_profile_for_each_frequent_shape_and_takes_all_that_it_took(engine, tmp_path):
    trace = [({"x": (8, 8, 32, 6)}, 90), ({"x": (2, 8, 4, 6)}, 9), ({"x": (1, 8, 5, 6)}, 1)]
    plans = split_by_trace(read_engine(engine), trace, 2)
    assert [p.profiles[0].shapes["x"] for p in plans] == [((1, 8, 4, 6), s, (8, 8, 32, 6)) for s in ((8, 8, 32, 6), (2, 8, 4, 6))]
    file = tmp_path / "shapes.json"
    file.write_text(json.dumps({"runs": [{"shapes": s, "runs": n} for s, n in trace]}))
    out = tmp_path / "tuned.engine"
    done = CliRunner().invoke(command, [str(engine), "-o", str(out), f"--from-trace={file}", "--profiles=2", "--numThreads=1"])
    assert done.exit_code == 0, done.output
    assert "profile 0 tuned for x: 8x8x32x6\nprofile 1 tuned for x: 2x8x4x6\n" in done.output
    old, new = (Runtime().load(p) for p in (engine, out))
    for shape, profile in (((8, 8, 32, 6), 0), ((7, 8, 32, 6), 0), ((2, 8, 4, 6), 1), ((1, 8, 4, 6), 1)):
        context = new.create_context()
        context.set_input_shape("x", shape)
        assert context.profile_index == profile
        x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        np.testing.assert_allclose(new(x), old(x), rtol=1e-5, atol=1e-5)


def test_a_profile_without_runs_stays(engine):
    plan = read_engine(engine)
    small, large = ((LOW, {"x": (1, 8, 4, 6)}, {"x": (2, 8, 8, 6)}), ({"x": (3, 8, 4, 6)}, {"x": (4, 8, 8, 6)}, HIGH))
    plan = build(parse_network(NET), BuildConfig(profiles=(small, large), timing_cache="", optimization_level=0, threads=1))
    plans = split_by_trace(plan, [({"x": (5, 8, 8, 6)}, 3)], 4)
    assert [p.profiles[0].shapes["x"][1] for p in plans] == [(5, 8, 8, 6), (1, 8, 4, 6)]


def test_what_cannot_be_used_is_refused(engine, tmp_path):
    plan, file = read_engine(engine), tmp_path / "shapes.json"
    with pytest.raises(EngineError, match="does not take the recorded shapes x: 9x8x4x6"):
        split_by_trace(plan, [({"x": (9, 8, 4, 6)}, 1)], 4)
    with pytest.raises(EngineError, match="does not take the recorded shapes y: 1"):
        split_by_trace(plan, [({"y": (1,)}, 1)], 4)
    for text in ("[]", "{", '{"runs": [{"shapes": {"x": [1, -1]}, "runs": 2}]}', '{"runs": [{"shapes": {"x": "1"}, "runs": 2}]}'):
        file.write_text(text)
        with pytest.raises(EngineError, match="no record of shapes"):
            read_trace(file)
    with pytest.raises(EngineError, match="cannot read"):
        read_trace(tmp_path / "nothing.json")
    file.write_text('{"runs": []}')
    for options, said in ((["--profiles=2"], "give that, too"), ([f"--from-trace={file}"], "holds no runs")):
        done = CliRunner().invoke(command, [str(engine), *options])
        assert done.exit_code != 0
        assert said in done.output + str(done.exception)
