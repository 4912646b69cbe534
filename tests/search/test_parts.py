"""Parts of the search, each by itself: locks, labelled data, advice, the search space, and the study's storage."""

from __future__ import annotations

import dataclasses
import select
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from support.search_case import perceptron, recipe_with
from whet.backends.null import NullBackend
from whet.errors import CalibrationError, UsageError
from whet.search.jobs.device_locks import DeviceLock, find_physical_gpu
from whet.search.outcome.summary import describe_external_load
from whet.search.recipe.data import Labelled, load_labelled
from whet.search.recipe.metrics import top1
from whet.search.recipe.recipe import Space, recipe_from
from whet.search.recipe.space import Candidate, count_kept_channels, list_baseline_types, search_space
from whet.search.study.study import Study


def network(case):
    from whet.frontends import network_from_onnx

    return network_from_onnx(case / "model.onnx")


HOLD = r"""
import os, sys, time
from whet.search.jobs.device_locks import DeviceLock
lock = DeviceLock(sys.argv[2], sys.argv[1])
os.write(1, b"asking\n")
with getattr(lock, sys.argv[3])():
    os.write(1, b"held\n")
    time.sleep(600)
"""


def holder(folder: Path, how: str, device: str = "cpu") -> subprocess.Popen:
    p = subprocess.Popen([sys.executable, "-c", HOLD, str(folder), device, how], stdout=subprocess.PIPE, text=True)
    assert p.stdout.readline() == "asking\n"
    assert p.stdout.readline() == "held\n"
    return p


def taken(folder: Path, how: str, device: str = "cpu", within: float = 60.0) -> bool:
    """True if another process gets the lock in `within` seconds of requesting it."""
    p = subprocess.Popen([sys.executable, "-c", HOLD, str(folder), device, how], stdout=subprocess.PIPE, bufsize=0)
    try:
        assert p.stdout.read(len("asking\n")) == b"asking\n"
        ready, _, _ = select.select([p.stdout], [], [], within)
        return bool(ready)
    finally:
        p.kill()
        p.communicate()


def test_timing_is_exclusive_and_a_killed_holder_releases_the_lock(tmp_path):
    p = holder(tmp_path, "timing")
    assert not taken(tmp_path, "timing", within=0.5)
    assert not taken(tmp_path, "hold_for_work", within=0.5)
    assert taken(tmp_path, "timing", "cuda:1")
    p.kill()
    p.communicate()
    with DeviceLock("cpu", tmp_path).timing():
        pass
    p = holder(tmp_path, "hold_for_work")
    assert taken(tmp_path, "hold_for_work")
    assert not taken(tmp_path, "timing", within=0.5)
    p.kill()
    p.communicate()


def test_fine_tuning_is_exclusive_on_a_gpu_and_shared_on_a_cpu(tmp_path):
    p = holder(tmp_path, "training", "cuda:0")
    assert not taken(tmp_path, "timing", "cuda:0", within=0.5)
    assert taken(tmp_path, "hold_for_work", "cuda:0")
    p.kill()
    p.communicate()
    p = holder(tmp_path, "training")
    assert taken(tmp_path, "hold_for_work")
    assert not taken(tmp_path, "timing", within=0.5)
    p.kill()
    p.communicate()


def test_a_gpu_has_one_name_independent_of_the_environment(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert find_physical_gpu("cpu") is None
    assert find_physical_gpu("cuda:2") == "2"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-abc")
    assert [find_physical_gpu(d) for d in ("cuda", "cuda:1")] == ["3", "GPU-abc"]


def test_a_gpu_has_one_lock_for_its_index_and_its_uuid(monkeypatch, tmp_path):
    class NVMLError(Exception):
        pass

    def handle(name):
        if name not in (2, "GPU-abc"):
            raise NVMLError
        return "handle"

    nvml = SimpleNamespace(NVMLError=NVMLError, nvmlInit=lambda: None, nvmlDeviceGetHandleByIndex=handle, nvmlDeviceGetHandleByUUID=handle,
                           nvmlDeviceGetUUID=lambda h: "GPU-abc")  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    names = set()
    for visible in ("2", "GPU-abc"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        names.add(DeviceLock("cuda", tmp_path).name)
    assert names == {"cuda-GPU-abc"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    assert DeviceLock("cuda", tmp_path).name == "cuda-5"


def test_other_processes_on_the_gpu_are_reported_with_every_timing():
    from whet.search.stages.measure import time_engines

    class Gpu(NullBackend):
        def state(self):
            return {"other_processes": (4711,), "sm_clock": 1980, "power": 300.0, "temperature": 55, "used_memory": 1}

    rows, load = time_engines([lambda: time.sleep(1e-4)] * 2, 0.02, Gpu())
    assert load["gpu_processes"] == [4711]
    assert (load["sm_clock"], load["power"], load["temperature"]) == (1980, 300.0, 55)
    assert rows[0]["ratio"] == 1

    found = describe_external_load([load, {"gpu_processes": []}, {"gpu_processes": [4711, 12]}])
    assert found is not None
    assert "in 2 of 3 timings (process 12, 4711)" in found
    assert describe_external_load([{"gpu_processes": []}, {"other_cpus": 0.1}]) is None


def test_labelled_data(tmp_path):
    net, d = perceptron()
    np.savez(tmp_path / "a.npz", x=d["x"][:5], y=d["y"][:5])
    np.savez(tmp_path / "b.npz", anything=d["x"][5:9], labels=d["y"][5:9])
    both = load_labelled(str(tmp_path), net, "data.score")
    assert len(both) == 9
    np.testing.assert_array_equal(both.inputs["x"], d["x"][:9])
    np.savez(tmp_path / "c.npz", x=d["x"][:5])
    with pytest.raises(CalibrationError, match=r"data\.score: .*c\.npz has no array `labels`; it has x"):
        load_labelled(str(tmp_path / "c.npz"), net, "data.score")
    np.savez(tmp_path / "d.npz", x=d["x"][:5], labels=d["y"][:4])
    with pytest.raises(CalibrationError, match="has 4 labels for 5 samples"):
        load_labelled(str(tmp_path / "d.npz"), net, "data.score")
    np.savez(tmp_path / "e.npz", x=d["x"][:5], labels=np.ones(5, np.float32))
    with pytest.raises(CalibrationError, match="labels are a 1-D array of integers"):
        load_labelled(str(tmp_path / "e.npz"), net, "data.score")


@pytest.mark.parametrize(
    ("size", "share", "multiple", "kept"), [(64, 0, 8, 64), (64, 0.5, 8, 32), (64, 0.3, 8, 48), (64, 0.95, 8, 8), (12, 0.5, 1, 6)]
)
def test_kept_channels(size, share, multiple, kept):
    assert count_kept_channels(size, share, multiple) == kept


def test_the_space_reports_omissions_and_recognizes_equal_points(case, tmp_path):
    import whet

    net = whet.network_from_onnx(case / "model.onnx")
    space = search_space(net, recipe_with(case, tmp_path, space={"precision": ["fp32"], "width": {"step": 0.01}}))
    left = dict(space.left_out)
    assert "not searched by default" in left["2:4"]
    a, b = (space.candidate({"96 inner": share, "64 inner": 0.0}) for share in (0.5, 0.51))
    assert a != b
    assert space.kept(a) == {"w0": 48}
    assert space.key(a) == space.key(b)
    assert space.key(a) != space.key(space.candidate({"96 inner": 0.5, "64 inner": 0.5}))
    assert Candidate.from_plain(a.to_plain()) == a
    for point in space.seeds():
        assert point.keys() == {d.name for d in space.dimensions}


@pytest.mark.parametrize("name", ["bert_base", "vit_b_16"])
def test_heads_are_a_separate_dimension_with_steps_of_one(name, case, tmp_path):
    """Of separate projections (BERT) and of a fused projection (ViT)."""
    from whet import zoo
    from whet.frontends import network_from_onnx

    small = {"bert_base": {"sequence": 8}, "vit_b_16": {"image": 64}}[name]
    net = network_from_onnx(zoo.build(name, layers=2, hidden=192, heads=6, **small))
    space = search_space(net, recipe_with(case, tmp_path, space={"width": {"multiple": 8}, "precision": ["fp32"]}))
    members = space.classes["6 heads"]
    assert len(members) == 2, "one per layer"
    assert {space.steps[m] for m in members} == {1}
    cut = space.candidate({n: 0.3 if n == "6 heads" else 0.0 for n in space.classes})
    assert set(space.kept(cut).values()) == {4}  # 6 x 0.7, to the nearest whole head
    assert any(space.steps[m] == 8 for n, ms in space.classes.items() if "heads" not in n for m in ms)


def test_the_original_is_measured_in_every_type_of_the_device(case, tmp_path):
    on_gpu = recipe_with(case, tmp_path, device="cuda", baselines=["fp32", "fp16", "int8"], space__precision=["int8"])
    assert list_baseline_types(on_gpu, ("int8",)) == ("fp32", "fp16", "int8")
    here = recipe_with(case, tmp_path, space__precision=["fp32"])
    every = list_baseline_types(dataclasses.replace(here, baselines=()), ("fp32",))
    assert every[0] == "fp32"
    assert every[-1] == "int8"
    assert "fp16" not in every, "no CPU kernel computes in it"
    assert "no kernel of the backend" in dict(search_space(network(case), dataclasses.replace(here, space=Space())).left_out)["fp16"]


def test_the_search_process_holds_no_gpu(case, tmp_path, monkeypatch):
    """A context held by the searching process would disturb every trial; with Ray that process may have no GPU at all."""
    from whet.backends import cuda
    from whet.search import dry_run

    def opened(*_, **__):
        raise AssertionError("the GPU was opened")

    monkeypatch.setattr(cuda.CudaBackend, "__init__", opened)
    facts = dry_run(recipe_with(case, tmp_path, device="cuda", space={"precision": ["fp32", "int8", "fp8"]}, search__workers=1))
    assert facts["space"]["precision"] == ["fp32", "int8", "fp8"]


def test_a_missing_optuna_is_reported_before_the_first_build(case, tmp_path, monkeypatch):
    from whet.errors import WhetError
    from whet.search import dry_run, search

    monkeypatch.setitem(sys.modules, "optuna", None)
    for begin in (dry_run, search):
        with pytest.raises(WhetError, match=r"pip install 'whet\[search\]'"):
            begin(recipe_with(case, tmp_path / "w"))
    assert not (tmp_path / "w" / "baselines").exists()


def test_a_recipe_may_be_a_file(tmp_path):
    from whet.search import search

    with pytest.raises(UsageError, match=r"the recipe .*no.yaml cannot be read"):
        search(tmp_path / "no.yaml")


def test_a_quantized_original_is_refused_before_the_first_build(case, tmp_path):
    from whet.frontends import save_onnx
    from whet.pruning.order import note
    from whet.search import dry_run

    net = network(case)
    note(net, "calibrate")
    model = save_onnx(net, tmp_path / "q.onnx")
    with pytest.raises(UsageError, match=r"is already quantized.*space\.width: false"):
        dry_run(recipe_with(case, tmp_path / "w", model=str(model)))
    facts = dry_run(recipe_with(case, tmp_path / "w", model=str(model), space={"width": False, "depth": False, "precision": ["fp32"]}))
    assert facts["points"] == 1


def test_fp8_is_searched_on_request_and_its_lock_is_kept(standin_gpu, tmp_path):
    from whet.builder.lock.lock import plan_digest, save_lock
    from whet.frontends import save_onnx
    from whet.network import parse_network
    from whet.search.stages.build_engine import build_config, build_engine_plan, find_quantized_source, rebuild_plan

    layers = [f"%c{k + 1}: f32[N,64,32,32] = Conv(%{f'r{k}' if k else 'x'}, %w{k})\n%r{k + 1}: f32[N,64,32,32] = Relu(%c{k + 1})" for k in range(4)]
    constants = [f"const %w{k}: f32[64,64,1,1] = seed({k + 1})" for k in range(4)]
    net = parse_network("\n".join(["network n source", "in %x: f32[N,64,32,32]", *constants, *layers, "out %r4", ""]))
    save_onnx(net, tmp_path / "m.onnx")
    plain = {"model": "m.onnx", "device": "cuda", "metric": "python:a:b", "target": {"latency": "0.5x"}, "data": {"calibrate": "python:a:b"},
             "space": {"precision": ["fp16", "fp8"]}, "timing_cache": "t.sqlite"}  # fmt: skip
    recipe = recipe_from(plain, tmp_path)
    space = search_space(net, recipe)
    assert next(d.values for d in space.dimensions if d.name == "precision") == ("fp16", "fp8")
    config = dataclasses.replace(build_config(net, recipe, Candidate(precision="fp8"), 1), verify=False)
    assert config.precisions == ("fp16", "fp8"), "in command-line order, which a lock compares"
    data = {net.inputs[0].name: np.random.default_rng(0).standard_normal((4, 64, 32, 32)).astype(np.float32)}
    plan = build_engine_plan(net, config, data, tmp_path)
    assert [c.what for c in plan.report.precision_choice] == ["floating point", "fp8"], "both were built and timed"
    assert find_quantized_source(net, config, plan) is None
    save_lock(plan, tmp_path / "lock.json")
    assert plan_digest(rebuild_plan(net, dataclasses.replace(config, lock=str(tmp_path / "lock.json")))) == plan_digest(plan)


def test_on_a_gpu_int8_engines_use_16_bit_floats_for_the_rest(case, tmp_path):
    import whet
    from whet.search.stages.build_engine import build_config

    net = whet.network_from_onnx(case / "model.onnx")
    recipe = recipe_with(case, tmp_path, device="cuda", space__precision=["fp32", "fp16", "int8"])
    space = search_space(net, recipe)
    assert next(d.values for d in space.dimensions if d.name == "precision") == ("fp32", "fp16", "int8")
    permitted = [build_config(net, recipe, Candidate(precision=p), 2).precisions for p in ("fp32", "fp16", "int8")]
    assert permitted == [(), ("fp16",), ("fp16", "int8")]
    on_a_cpu = recipe_with(case, tmp_path, space__precision=["int8"])
    assert build_config(net, on_a_cpu, Candidate(precision="int8"), 2).precisions == ("int8",)


def test_a_budget_is_a_separate_branch_of_the_space(case, tmp_path):
    import whet

    net = whet.network_from_onnx(case / "model.onnx")
    space = search_space(net, recipe_with(case, tmp_path, space={"precision": ["fp32"], "budget": True}))
    by_class, by_budget = (space.candidate({"96 inner": 0.5, "64 inner": 0.5, "width by": way, "budget": 0.4}) for way in ("class", "budget"))
    assert by_class.budget is None
    assert by_budget.budget == 0.4
    assert by_budget.widths == {}
    assert by_budget.pruned
    assert space.key(by_budget) == space.key(space.candidate({"96 inner": 0.1, "64 inner": 0.2, "width by": "budget", "budget": 0.4}))
    assert {p["width by"] for p in space.seeds()} == {"class", "budget"}
    assert "latency budget 40 %" in by_budget.words()


def test_the_knapsack_distributes_a_budget(case, tmp_path, monkeypatch):
    import whet
    from whet.search.stages.build_engine import build_config
    from whet.search.stages.prepare import fit_latency_budget

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    recipe = recipe_with(case, tmp_path, device="null")  # times from a table, equal on all machines
    net = whet.network_from_onnx(case / "model.onnx")
    c = Candidate(budget=0.7)
    kept, made = fit_latency_budget(net, c, build_config(net, recipe, c, 1), recipe, {}, say=lambda what: None)
    assert kept
    assert all(0 < n < {"w0": 96, "w1": 64}[g] for g, n in kept.items())
    assert made.removed == ()
    seen = {"x": perceptron()[1]["x"][:32]}
    by_taylor = Candidate(budget=0.7, importance="taylor1")
    assert fit_latency_budget(net, by_taylor, build_config(net, recipe, c, 1), recipe, seen, say=lambda what: None)[0]
    assert list((tmp_path / "cache").rglob("latency-table-null.json"))


ASK_AND_DIE = """
import json, os, sys
from pathlib import Path
from types import SimpleNamespace
sys.path.insert(0, sys.argv[3])
from search.test_parts import study_of
import optuna.trial
drawn = []
inner = optuna.trial.Trial.suggest_float
def dies(self, name, *a, **k):
    if drawn:
        os._exit(9)
    drawn.append(inner(self, name, *a, **k))
    return drawn[0]
optuna.trial.Trial.suggest_float = dies
study_of(Path(sys.argv[1]), Path(sys.argv[2])).ask()
"""


def study_of(case: Path, out: Path, seed: int = 0) -> Study:
    import whet

    recipe = recipe_with(case, out)
    space = search_space(whet.network_from_onnx(recipe.model), recipe)
    return Study(out / "study.sqlite3", space, higher_is_better=True, sampler="tpe", seed=seed, startup=4)


@pytest.mark.parametrize("limit", [8, 1])
def test_every_class_is_described(case, tmp_path, limit):
    """By size and role; with fewer classes than roles by position."""
    space = search_space(network(case), recipe_with(case, tmp_path, space={"width": {"classes": limit}}))
    texts = [space.describe_class(name) for name in space.classes]
    assert texts == [
        ["96 channels inside a block, between two layers, in one group (w0); -50 % leaves 48 of 96",
         "64 channels inside a block, between two layers, in one group (w1); -50 % leaves 32 of 64"],
        ["channels of groups with 64, 96 of them, in network order, in each of 2 groups (w0, w1); -50 % leaves 48 of 96"],
    ][limit == 1]  # fmt: skip


def test_the_residual_width_is_a_dimension_on_request(case, tmp_path):
    """`space.hidden` adds the class of the stream through norms, and a trial cuts and recovers it."""
    from whet.network import parse_network
    from whet.pruning import count_params
    from whet.search.recipe.recipe import Effort
    from whet.search.stages.prepare import prepare_candidate

    net = parse_network("""network n source
in %x: f32[N,6]
const %w1: f32[6,16] = seed(1)
const %g: f32[16] = seed(2)
const %w2: f32[16,3] = seed(3)
%h: f32[N,16] = MatMul(%x, %w1)
%n: f32[N,16] = LayerNormalization(%h, %g)
%y: f32[N,3] = MatMul(%n, %w2)
out %y
""")
    without, space = (search_space(net, recipe_with(case, tmp_path, space={"precision": ["fp32"], "hidden": h})) for h in (False, True))
    assert without.classes == {}
    assert space.classes == {"16 residual": ("w1@hidden",)}
    c = space.candidate({"16 residual": 0.5})
    data = {"x": np.random.default_rng(0).standard_normal((64, 6)).astype(np.float32)}
    made = prepare_candidate(net, c, space.kept(c), data, Effort(), say=lambda what: None)
    assert count_params(made.network) == 0.5 * count_params(net)
    assert len(made.recipe.groups["w1@hidden"].kept) == 8
    with pytest.raises(UsageError, match=r"'space.skip': .*w1@hidden"):
        search_space(net, recipe_with(case, tmp_path, space={"skip": ["w1@hidden"], "hidden": False}))
    assert search_space(net, recipe_with(case, tmp_path, space={"skip": ["w1@hidden"], "hidden": True})).classes == {}


def test_a_trial_chooses_channels_in_several_steps(case):
    """Later steps score the recovered network; the sizes are those of one step."""
    from whet.pruning import apply_recipe
    from whet.search.recipe.recipe import Effort
    from whet.search.stages.prepare import prepare_candidate

    net, data = network(case), {"x": np.load(case / "calibrate.npz")["x"]}
    c, kept = Candidate({"96 inner": 0.7, "64 inner": 0.7}, importance="reconstruction"), {"w0": 24, "w1": 16}
    once, thrice = (prepare_candidate(net, c, kept, data, Effort(), say=lambda what: None, steps=n) for n in (1, 3))
    assert [{n: len(e.kept) for n, e in p.recipe.groups.items()} for p in (once, thrice)] == [kept, kept]
    assert once.recipe.groups != thrice.recipe.groups
    assert thrice.recipe.about["steps"] == 3
    assert "steps" not in once.recipe.about
    again = apply_recipe(net, thrice.recipe)
    assert {n: t.shape for n, t in again.constants.items()} == {n: t.shape for n, t in thrice.network.constants.items()}


def test_trials_of_a_budget_are_compared_by_their_outputs(case, tmp_path, monkeypatch):
    from whet.search.stages import prepare
    from whet.search.stages.build_engine import build_config

    monkeypatch.setattr(prepare, "user_cache_dir", lambda name: str(tmp_path))
    asked = []

    def watched(net, config, data, **rest):
        asked.append((config, data))
        return plain(net, config, data, **rest)

    plain = prepare.prune
    monkeypatch.setattr(prepare, "prune", watched)
    net, data = network(case), {"x": np.load(case / "calibrate.npz")["x"]}
    # times from a table, equal on all machines
    recipe = recipe_with(case, tmp_path, device="null", space={"precision": ["fp32"], "budget": True, "budget_trials": 2})
    kept, _ = prepare.fit_latency_budget(net, Candidate(budget=0.7), build_config(net, recipe, Candidate(), 1), recipe, data, say=lambda what: None)
    assert kept
    (config, given), = asked
    assert config.trials == 2
    assert config.recovery is not None
    assert given is data


def test_a_trial_that_died_during_sampling_is_completed(case, tmp_path):
    died = subprocess.run([sys.executable, "-c", ASK_AND_DIE, str(case), str(tmp_path), str(Path(__file__).parents[1])], check=False)
    assert died.returncode == 9
    study = study_of(case, tmp_path, seed=5)
    ((number, params),) = study.list_unfinished()
    assert number == 0
    assert params.keys() == {"96 inner", "64 inner"}
    kept = study.study.trials[0].params
    assert kept == params
    study.tell(number, (1.0, 99.0), {"misses": [0.0], "candidate": {}})
    study.tell(number, (2.0, 11.0), {"candidate": {}})
    assert study.study.trials[0].values == [1.0, 99.0]
    assert list(study.list_unfinished()) == []
    assert study.ask()[0] == 1


def test_enqueued_points_occur_once(case, tmp_path):
    study = study_of(case, tmp_path)
    points = study.space.seeds()
    study.enqueue(points)
    study.enqueue(points)
    drawn = [study.ask()[1] for _ in points]
    assert drawn == points


SLEEPY = """
import os, time

def metric(predict):
    open("pid", "w").write(str(os.getpid()))
    time.sleep(600)
"""


START_AND_WAIT = """
import sys, time
from pathlib import Path
from whet.search.jobs.workers import LocalWorkers

with LocalWorkers(1, 600.0) as workers:
    workers.start(Path(sys.argv[1]))
    time.sleep(600)
"""


def test_children_die_with_their_parent(case, tmp_path):
    """A killed search leaves no process that would continue timing."""
    from whet.search.jobs import job as j
    from whet.search.jobs.workers import LocalWorkers

    recipe = recipe_with(case, tmp_path, metric="python:sleepy:metric", folder=str(tmp_path), model=str(case / "model.onnx"),
                         data={"calibrate": str(case / "calibrate.npz")})  # fmt: skip
    (tmp_path / "sleepy.py").write_text(SLEEPY)
    folder = tmp_path / "job"
    j.Job("baseline", "b", recipe.to_plain(), Candidate().to_plain(), effort={"seconds": 0.05, "level": 0}).write(folder)
    parent = subprocess.Popen([sys.executable, "-c", START_AND_WAIT, str(folder)])
    pid = tmp_path / "pid"
    _until(lambda: pid.is_file() and pid.read_text())
    child = int(pid.read_text())
    parent.kill()
    parent.wait()
    _until(lambda: not _alive(child))
    assert not _alive(child)
    with LocalWorkers(1, 1.0) as workers:  # the same job again; it is ended at its time limit
        pid.unlink()
        workers.start(folder)
        found: list = []
        _until(lambda: found.extend(workers.collect_finished()) or found)
    assert found == [(folder, "exceeded search.trial_timeout (1 s) and was terminated")]


def _until(true, seconds: float = 120.0) -> None:
    """Waits for it; under load a process takes half a minute to start."""
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.1)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_one_search_at_a_time_in_a_folder(case, tmp_path):
    from whet.search.outcome.folder import WorkFolder

    recipe = recipe_with(case, tmp_path / "work")
    folder = WorkFolder(tmp_path / "work")
    with folder.open_locked(recipe) as resumed:
        assert not resumed
        with pytest.raises(UsageError, match="another search is running in"), WorkFolder(tmp_path / "work").open_locked(recipe):
            pass
    with folder.open_locked(recipe) as resumed:
        assert resumed
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    for fresh in (False, True):
        with pytest.raises(UsageError, match=r"thesis\.txt|contains no search"), WorkFolder(tmp_path / "full").open_locked(recipe, fresh):
            pass
    assert (tmp_path / "full" / "thesis.txt").read_text() == "mine"


def test_unmeasurable_targets_are_reported_before_the_first_build(case, tmp_path, monkeypatch):
    from whet.search import dry_run
    from whet.search.outcome import advice

    monkeypatch.setattr(advice, "explain_missing_torch", lambda: "PyTorch is not installed")
    monkeypatch.setattr(advice, "Meter", lambda gpu: SimpleNamespace(read=None, about="not measurable: no meter"))
    with np.load(case / "score.npz") as score:
        np.savez(tmp_path / "train.npz", x=score["x"][:9], labels=score["labels"][:9])
    wanted = {"target": {"net_energy": "0.5x", "accuracy_drop": 0.1}, "data__train": str(tmp_path / "train.npz"), "finetune": True}
    recipe = recipe_with(case, tmp_path / "w", **wanted)
    said = dry_run(recipe)["advice"]
    begin = ["the target asks for ener", "data.train is given, but", "data.score has 400 sampl"]
    assert [s.partition(":")[0][:24] for s in said] == begin
    assert "one sample is 0.25 points: a drop of 0.1 is below that resolution" in said[-1]
    assert advice.advise_before_search(recipe, here=False) == [], "a cluster's machines have meters and PyTorch of their own"
    assert advice.advise_before_search(dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, judge=None)), here=False)[0].startswith(
        "no data.judge"
    )
    assert advice.advise_on_original(recipe, {"metric": {"value": 9.8}})
    assert not advice.advise_on_original(recipe, {"metric": {"value": 93.0}})


def test_nan_and_labels_outside_the_classes_are_refused(case, tmp_path):
    from whet.search.recipe.data import load_unlabelled

    x = np.zeros((5, 64), np.float32)
    x[3, 7] = np.nan
    np.savez(tmp_path / "x.npz", x=x)
    np.savez(tmp_path / "xy.npz", x=x, labels=np.zeros(5, int))
    with pytest.raises(CalibrationError, match=r"x\.npz: sample 3 of 'x' has NaN or infinite values"):
        load_unlabelled(str(tmp_path / "x.npz"), network(case), 9)
    with pytest.raises(CalibrationError, match=r"data\.score: .*sample 3 of 'x' has NaN or infinite values"):
        load_labelled(str(tmp_path / "xy.npz"), network(case), "data.score")
    data = Labelled({"x": np.zeros((3, 64), np.float32)}, np.array([1, 2, 10]))
    with pytest.raises(CalibrationError, match="labels go from 1 to 10, but the model has 10 classes: labels start at 0"):
        top1(lambda feeds: {"y": np.zeros((3, 10), np.float32)}, data)


def test_an_unreadable_study_is_reported_in_one_line(case, tmp_path):
    from whet.errors import BuildError

    (tmp_path / "study.sqlite3").write_bytes(b"this is no database, and was long enough to look like one" * 40)
    space = search_space(network(case), recipe_with(case, tmp_path))
    with pytest.raises(BuildError, match=r"study\.sqlite3 cannot be read or written: .*not a database"):
        Study(tmp_path / "study.sqlite3", space, higher_is_better=True, sampler="random", seed=0, startup=4)


def test_a_metric_function_may_have_data_for_the_last_comparison():
    from whet.search.recipe.metrics import call_user_metric, knows_which

    def plain(predict, batch=32):
        return float(batch)

    def told(predict, which):
        return {"score": 1.0, "judge": 2.0}[which]

    def with_a_default(predict, which="score"):
        return which == "judge"

    assert [knows_which(f) for f in (plain, told, with_a_default, max)] == [False, True, True, False]
    assert [call_user_metric(f, lambda feeds: {}, "m", "judge").value for f in (plain, told, with_a_default)] == [32.0, 2.0, 1.0]


def test_the_last_comparison_names_its_data(case, tmp_path, monkeypatch):
    """A metric function without separate data for the last comparison is not evaluated on unseen data, even if the recipe names some."""
    from whet.search.jobs.environment import Worker
    from whet.search.jobs.job import Job

    (tmp_path / "mine_judged.py").write_text("def one(predict):\n    return 1.0\n\n\ndef two(predict, which):\n    return 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def last(**changes) -> str:
        return Worker(Job("final", "n", recipe_with(case, tmp_path, **changes).to_plain(), Candidate().to_plain()), tmp_path).last_data

    assert last() == "judge"
    assert last(data={"calibrate": "calibrate.npz", "score": "score.npz"}) == "score"
    assert last(metric="python:mine_judged:one") == "score"
    assert last(metric="python:mine_judged:two") == "judge"


def test_data_used_twice_are_reported(case, tmp_path):
    from whet.search.outcome import advice

    (tmp_path / "copy.npz").write_bytes((case / "score.npz").read_bytes())
    same = recipe_with(case, tmp_path, data__judge=str(tmp_path / "copy.npz"), data__train="score.npz", finetune=False, qat="never")
    said = advice.advise_before_search(same)
    pairs = [("judge", "score"), ("train", "judge"), ("train", "score")]
    assert [s.partition(":")[0] for s in said] == [f"data.{a} equals data.{b}" for a, b in pairs]
    said = advice.advise_before_search(recipe_with(case, tmp_path, metric="python:a:b"))
    assert len(said) == 1
    assert said[0].startswith("data.score and data.judge are not read")


def test_excluded_names_are_not_cut(case, tmp_path):
    """Groups by their names or a layer's, branches by theirs or a layer inside; unknown names are refused with the nearest one."""
    from whet import zoo
    from whet.frontends import network_from_onnx
    from whet.pruning import groups
    from whet.pruning.depth import branches
    from whet.search.recipe.recipe import Space
    from whet.search.recipe.space import list_groups_to_keep

    net = network_from_onnx(zoo.build("resnet18"))
    group, branch = groups(net)[3], branches(net)[2]
    layer = group.layers[0]
    assert group.name in list_groups_to_keep(net, Space(skip=(group.name,)))
    assert group.name in list_groups_to_keep(net, Space(skip=(layer,)))
    assert branch.name in list_groups_to_keep(net, Space(skip=(branch.layers[0],)))
    recipe = recipe_with(case, tmp_path, space={"precision": ["fp32"], "skip": [group.name, branch.name]})
    space = search_space(net, recipe, [b.name for b in branches(net)])
    assert group.name not in {g for members in space.classes.values() for g in members}
    assert branch.name not in space.branches
    assert len(space.branches) == len(branches(net)) - 1
    assert any("are not pruned" in why for _, why in space.left_out)
    with pytest.raises(UsageError, match=r"'space\.skip': no prunable group, branch or layer is called .*Did you mean"):
        search_space(net, recipe_with(case, tmp_path, space={"skip": layer + "x"}))


def test_int8_without_gain_is_reported():
    from whet.search.outcome.summary import _remark_on_unused_int8

    def words(asked: str, **layers: int) -> str:
        return _remark_on_unused_int8({"candidate": {"precision": asked}, "precision": layers})

    assert words("int8", f32=3) == " (computes in floating point: INT8 was not faster)"
    assert words("int8", f32=1, u8=2) == words("int8", i8=2) == words("fp8", f8e4m3=2) == words("fp32", f32=3) == ""
