"""Without a terminal every long command prints a line on standard error at a fixed interval, also while it has no steps of its own."""

import io
import re
import signal
import sys
import threading
import time

import numpy as np
import pytest
from click.testing import CliRunner

import whet
from whet.builder import Silent
from whet.cli import group
from whet.cli._console import Bar
from whet.network import Network, parse_type
from whet.progress_lines import SECONDS, ProgressLines, Steps, get_interval
from whet.report.search_live import SearchLive

TAYLOR = ["--calibData=@inputs.npz", "--importance=taylor1", "--labels=@labels.npy"]
LINE = re.compile(r"^\d+ s: (.*)$", re.MULTILINE)


@pytest.fixture(autouse=True)
def often(monkeypatch):
    monkeypatch.setenv("WHET_PROGRESS_SECONDS", "0.001")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("progress")
    whet.zoo.save("lenet5", folder / "m.onnx")
    whet.build(folder / "m.onnx", optimization_level=0, progress=Silent()).save(folder / "m.engine")
    net = Network("deep")
    value = net.add_input("x", parse_type("f32[4]"))
    for _ in range(500):
        value = net.add("Relu", value)
    net.mark_output(value)
    whet.save_onnx(net, folder / "deep.onnx")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 1, 32, 32), np.float32)
    np.savez(folder / "data.npz", input=x, labels=rng.integers(0, 10, 64))
    np.savez(folder / "inputs.npz", input=x)
    np.save(folder / "labels.npy", np.arange(64) % 10)
    (folder / "n.onnx").write_bytes((folder / "m.onnx").read_bytes())
    return folder


def lines_of(folder, *arguments: str) -> set[str]:
    called = CliRunner().invoke(group, [a.replace("@", f"{folder}/") for a in arguments], catch_exceptions=False)
    assert called.exit_code == 0, called.output
    assert not LINE.findall(called.stdout), "progress belongs to standard error"
    found = set(LINE.findall(called.stderr))
    assert all(text == text.strip() for text in found), "each line names an activity, also while the command is imported"
    return found


@pytest.mark.parametrize(
    ("arguments", "activity"),
    [
        (["check", "@deep.onnx"], "whet check"),
        (["exec", "--onnx=@m.onnx", "--builderOptimizationLevel=0", "--iterations=1", "--duration=0", "--noBuilderCache"], "whet exec, candidates"),
        (["exec", "--loadEngine=@m.engine", "--iterations=1", "--duration=0", "--warmUp=0"], "whet exec"),
        (["prune", "@m.onnx", "-o", "@p.onnx", *TAYLOR], "whet prune, pruning.*importance"),
        (["prune", "@m.onnx", "-o", "@q.onnx", "--latency=0.9x", "--backend=null", "--noEngines"], "whet prune, .*(timing|pruning)"),
        (["retune", "@m.engine", "-o", "@r.engine", "--timingCacheFile=@cache"], "whet retune, "),
        (["latency-table", "@m.onnx", "--most=2"], "whet latency-table, timing"),
        (["compare", "@m.onnx", "@n.onnx", "--seconds=0.05"], "whet compare, building"),
        (["run", "@m.onnx", "--against=reference"], "whet run"),
    ],
    ids=lambda v: v[0] if isinstance(v, list) else None,
)
def test_a_command_without_a_terminal_names_its_activity(folder, arguments, activity):
    lines = lines_of(folder, *arguments)
    assert any(re.search(activity, line) for line in lines), lines


def test_training_prints_lines(folder):
    pytest.importorskip("torch")
    lines = lines_of(folder, "finetune", "@m.onnx", "--data=@data.npz", "--epochs=1", "--batch=32", "-o", "@t.onnx")
    assert any(line.startswith("whet finetune, training") for line in lines), lines


def test_a_build_from_python_prints_lines_unless_it_has_its_own_progress(folder, capsys):
    whet.build(folder / "m.onnx", optimization_level=0)
    assert "building, candidates" in capsys.readouterr().err
    whet.build(folder / "m.onnx", optimization_level=0, progress=Silent())
    assert capsys.readouterr().err == ""


def test_a_search_names_its_phase_and_running_jobs(folder, tmp_path, monkeypatch):
    pytest.importorskip("yaml")
    recipe = folder / "recipe.yaml"
    recipe.write_text("model: m.onnx\ndata: {calibrate: inputs.npz, score: data.npz}\ntarget: {latency: 0.5x}\n")
    job = tmp_path / "scouts" / "7"
    job.mkdir(parents=True)
    (job / "stage.txt").write_text("recovering")

    def search(recipe, *, watcher, **_):
        watcher.phase("scouts", 9)
        watcher.start_job(job, "half of the channels")
        end = time.monotonic() + 60
        while b"recovering" not in sys.stderr.buffer.getvalue() and time.monotonic() < end:
            time.sleep(0.01)
        raise whet.errors.BuildError("this search ends here")

    monkeypatch.setattr("whet.search.search", search)
    called = CliRunner().invoke(group, ["auto", str(recipe)])
    assert any(re.fullmatch(r"whet auto, scouts 0 of 9: 7 recovering \(\d+ s\)", line) for line in LINE.findall(called.stderr)), called.stderr


def test_lines_come_at_the_interval_and_end_with_the_work():
    out, steps = io.StringIO(), Steps("pruning")
    before, began = threading.active_count(), time.monotonic()
    with ProgressLines("whet prune", out, seconds=0.05), ProgressLines(steps, out, seconds=0.05):
        steps.update(3, 8, "layer.1")
        while "layer.1" not in out.getvalue() and time.monotonic() < began + 20:
            time.sleep(0.01)
    lines = LINE.findall(out.getvalue())
    assert 1 <= len(lines) <= (time.monotonic() - began) / 0.05
    assert lines[-1] == "whet prune, pruning 3 of 8: layer.1", "one set of lines names both activities"
    assert threading.active_count() == before
    time.sleep(0.12)
    assert LINE.findall(out.getvalue()) == lines


@pytest.mark.parametrize(("value", "seconds"), [("0", 0.0), ("-1", 0.0), ("2.5", 2.5), ("often", SECONDS), (None, SECONDS)])
def test_the_interval_is_a_variable_of_the_environment(monkeypatch, value, seconds):
    monkeypatch.delenv("WHET_PROGRESS_SECONDS") if value is None else monkeypatch.setenv("WHET_PROGRESS_SECONDS", value)
    assert get_interval() == seconds
    if seconds == 0:
        before = threading.active_count()
        with Bar("pruning", enabled=False) as bar:
            bar.update(1, 2, "nothing is printed")
            assert threading.active_count() == before


def test_a_closed_stream_does_not_end_the_work():
    out = io.StringIO()
    with ProgressLines("building", out, seconds=0.01):
        out.close()
        time.sleep(0.05)


def test_an_interrupt_ends_the_lines():
    before, handler = threading.active_count(), signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), ProgressLines("building", io.StringIO(), seconds=0.01):
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert threading.active_count() == before


def test_the_summary_of_a_search_has_the_time_left(tmp_path):
    live = SearchLive(live=False)
    assert live.summary() == "starting 0 of 1"
    live.phase("survivors", 4)
    live.seconds = [30.0]
    assert live.summary() == "survivors 0 of 4, about 2 min left"
