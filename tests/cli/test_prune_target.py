"""`whet prune --latency` and `whet latency-table`: the table is created, used and extended; recipe and report are written."""

import json
import re

import pytest
from click.testing import CliRunner

from whet import zoo
from whet.cli import group
from whet.cli.latency_table import command as latency_table
from whet.cli.prune import command as prune
from whet.errors import CacheError, UsageError
from whet.frontends import network_from_onnx, save_onnx
from whet.pruning.order import note, read_history


@pytest.fixture
def model(tmp_path):
    return zoo.save("lenet5", tmp_path / "m.onnx")


def run(command, *args):
    done = CliRunner().invoke(command, [str(a) for a in args], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_a_table_then_a_target(model, tmp_path):
    table = tmp_path / "t.json"
    (tmp_path / "r.json").write_text('{"format": "else"}')
    null = ("--backend=null", "--timingCacheFile", tmp_path / "c.sqlite")
    out = run(latency_table, model, f"--export={table}", *null)
    assert re.search(r"t.json: (\d+) rows, \1 of them new", out)
    assert "fc1.weight (120): 8:" in out
    rows = len(json.loads(table.read_text())["rows"])
    again = run(latency_table, model, f"--export={table}", *null)
    assert f"{rows} rows, 0 of them new, {rows} known before" in again
    shared = run(latency_table, model, f"--export={tmp_path / 'mine.json'}", f"--add={table}", *null)
    assert f"{rows} rows that" in shared
    assert "0 of them new" in shared
    assert json.loads((tmp_path / "mine.json").read_text()) == json.loads(table.read_text())
    with pytest.raises(CacheError, match="is not a latency table"):
        CliRunner().invoke(latency_table, [str(model), f"--add={tmp_path / 'r.json'}", *map(str, null)], catch_exceptions=False)
    out = run(prune, model, "--latency=0.7x", f"--latencyTable={table}", "--recipe", tmp_path / "r.json", *null)
    assert re.search(r"FLOPs -\d+ %, parameters -\d+ %, predicted -3\d %", out)
    small = network_from_onnx(tmp_path / "m.pruned.onnx")
    assert read_history(small)[0]["target"] == {"kind": "latency", "ratio": 0.7}
    assert len(json.loads(table.read_text())["rows"]) >= rows
    run(prune, model, "-o", tmp_path / "again.onnx", "--applyRecipe", tmp_path / "r.json")
    assert str(network_from_onnx(tmp_path / "again.onnx")).splitlines()[1:] == str(small).splitlines()[1:]


def test_on_this_machine_the_engine_is_timed_for_comparison(model, tmp_path):
    out = run(prune, model, "--latency=0.95x", "--timingCacheFile", tmp_path / "c.sqlite", "--threads=1")
    assert re.search(r"latency [+-]\d+ % \([\d.]+ -> [\d.]+ ms\), predicted -\d+ %", out)


def test_an_int8_engine_has_its_own_steps_of_width(model, tmp_path):
    null = ("--backend=null", "--timingCacheFile", tmp_path / "c.sqlite", f"--export={tmp_path / 't.json'}")
    first = int(re.search(r"(\d+) rows", run(latency_table, model, *null))[1])
    assert re.search(rf"{first} known before", run(latency_table, model, *null, "--int8"))
    rows = json.loads((tmp_path / "t.json").read_text())["rows"].values()
    assert {r["precisions"] for r in rows} == {"fp32", "int8"}
    assert any("i8[" in r["layer"] for r in rows)
    out = run(prune, model, "--int8", "--latency=0.9x", *null[:3], f"--latencyTable={tmp_path / 't.json'}", "-o", tmp_path / "s.onnx")
    assert re.search(r"predicted -1\d %", out)


@pytest.mark.parametrize(("command", "flags", "message"), [
    (prune, ["--recipe=/no/folder/r.json"], r"--recipe=/no/folder/r.json cannot be written: there is no folder /no/folder"),
    (prune, ["-o", "/no/folder/m.onnx"], r"--output=/no/folder/m.onnx cannot be written"),
    (prune, ["--latency=0.5x", "--latencyTable=/no/folder/t.json"], r"--latencyTable=/no/folder/t.json cannot be written"),
    (latency_table, ["--export=/no/folder/t.json"], r"--export=/no/folder/t.json cannot be written"),
])  # fmt: skip
def test_unwritable_files_are_reported_before_the_work(command, flags, message, model):
    with pytest.raises(UsageError, match=message):
        CliRunner().invoke(command, [str(model), *flags], catch_exceptions=False)


def test_two_targets_and_a_quantized_model(model, tmp_path):
    with pytest.raises(UsageError, match="one target at a time: --latency and --flops"):
        CliRunner().invoke(prune, [str(model), "--latency=0.5x", "--flops=0.5x"], catch_exceptions=False)
    net = network_from_onnx(model)
    note(net, "calibrate")
    save_onnx(net, tmp_path / "q.onnx")
    with pytest.raises(Exception, match="--insist overrides this"):
        CliRunner().invoke(prune, [str(tmp_path / "q.onnx")], catch_exceptions=False)
    run(prune, tmp_path / "q.onnx", "--insist", "-o", tmp_path / "p.onnx")


def test_calibration_of_a_pruned_model_without_recovery_is_refused(model, tmp_path):
    import numpy as np

    from whet.cli._calibration import build_from
    from whet.errors import PruneError

    run(prune, model, "-o", tmp_path / "p.onnx", "--ratio=0.3")
    net = network_from_onnx(tmp_path / "p.onnx")
    np.save(tmp_path / "x.npy", np.random.default_rng(0).standard_normal((4, 1, 32, 32)).astype(np.float32))
    from whet.builder import BuildConfig

    config = BuildConfig(precisions=("int8",), timing_cache="", optimization_level=0)
    o = {"calibData": str(tmp_path / "x.npy"), "calibSteps": "none"}
    with pytest.raises(PruneError, match="neither recovered nor fine-tuned since"):
        build_from(o, net, config, None)
    assert build_from({**o, "insist": ""}, net, config, None) is not None


def test_names_with_a_dash():
    assert "latency-table" in group.list_commands(None)
    assert group.get_command(None, "latency-table") is latency_table
