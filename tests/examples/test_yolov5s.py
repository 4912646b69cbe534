"""YOLOv5s' example: its cut, the exclusions of its timing, and its refusals."""

import importlib.util
import sys
from pathlib import Path

import pytest

import whet
from whet.network import parse_network
from whet.zoo import save

FOLDER = Path(__file__).parents[2] / "examples" / "yolov5s"


def loaded(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # run.py imports timing by its name, and dataclasses look up their module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def timing():
    yield loaded("timing")
    sys.modules.pop("timing", None)


@pytest.fixture(scope="module")
def run(timing):
    yield loaded("run")
    sys.modules.pop("run", None)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return whet.network_from_onnx(save("yolov5s", tmp_path_factory.mktemp("yolov5s") / "yolov5s.onnx"))


def test_the_cut_for_cpus_removes_its_share_and_keeps_whole_blocks(run, original):
    made = run.cut_to(original, run.WIDTHS)
    kept = {name: len(entry.kept) for name, entry in made.recipe.groups.items()}
    assert 0.4 <= made.share < 0.42
    assert len(kept) == 50, "every group of backbone and neck is cut"
    assert all(n % (16 if n == 16 else 32) == 0 for n in kept.values())
    assert (kept["model.3.conv.weight"], kept["model.6.cv1.conv.weight"], kept["model.7.conv.weight"]) == (64, 96, 320), "by stride and size"
    assert [t.shape for t in made.network.outputs] == [t.shape for t in original.outputs]


def test_groups_without_a_given_width_are_not_cut(run, original):
    made = run.cut_to(original, "8:128=64")
    assert sorted(made.recipe.groups) == ["model.17.cv3.conv.weight", "model.3.conv.weight", "model.4.cv3.conv.weight"]


@pytest.mark.parametrize(("words", "message"), [
    (["--widths", "128=64"], "'128=64' is not a width; write STRIDE:CHANNELS=WIDTH"),
    (["--widths", "8:128=64", "--multiple", "16"], "--widths and --ratio/--multiple exclude each other"),
    (["--batches", "1,two"], "'two' is not a batch size"),
])  # fmt: skip
def test_refusals(words, message, run, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["run.py", *words])
    with pytest.raises(SystemExit):
        run.main()
    assert message in capsys.readouterr().err


def test_rounds_with_a_slow_probe_are_omitted(timing):
    times = timing.Times(ms={1: [10.0, 20.0, 11.0, 12.0], 8: [70.0, 71.0, 72.0]}, probe={1: [0.44, 0.8, 0.43, 0.5], 8: [0.6, 0.9, 0.51]})
    times.keep_quiet()
    assert times.ms == {1: [10.0, 11.0], 8: [70.0, 72.0]}


def test_a_round_waits_until_the_probe_is_fast(timing, monkeypatch):
    net = parse_network("network n source\nin %images: f32[N,3,640,640]\n%y: f32[N,3,640,640] = Relu(%images)\nout %y\n")
    low, high = ({"images": (b, 3, 640, 640)} for b in (1, 2))
    engine = whet.Runtime(backend="cpu").load(whet.builder.build(net, whet.BuildConfig(profiles=((low, high, high),), optimization_level=0)))
    looks = iter([1.0, 1.3, 2.0, 2.0, 1.05, 1.2, *[1.0] * 100])  # fast, slower after it; slow, slow, fast again, slower after it

    def ms(self):
        taken = next(looks)
        self.best = min(self.best, taken)
        return taken

    monkeypatch.setattr(timing.Probe, "ms", ms)
    (times,) = timing.measure([engine], [1], "cpu", seconds=0.001, probed=engine)
    assert times.probe[1] == [1.3, 1.2, *[1.0] * (timing.TRIES * timing.ROUNDS - 2)], "the slower of both probes, after the wait"
    assert len(times.ms[1]) == len(times.probe[1])
    monkeypatch.undo()
    (plain,) = timing.measure([engine], [1, 2], "cpu", seconds=0.001)
    assert {b: len(rounds) for b, rounds in plain.ms.items()} == {1: timing.ROUNDS, 2: timing.ROUNDS}
