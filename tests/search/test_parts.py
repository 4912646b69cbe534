"""Parts of a search, each by itself: originals, advice, the choice of a trial, and the storage of a study."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from support.search_case import perceptron, read_network, recipe_with
from whet.backends import get_backend
from whet.backends.null import NullBackend
from whet.errors import UsageError
from whet.search.outcome.summary import describe_external_load
from whet.search.recipe.recipe import Space, recipe_from
from whet.search.recipe.space import Candidate, list_baseline_types, search_space
from whet.search.study.study import Study


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


def test_the_original_is_measured_in_every_type_of_the_device(case, tmp_path):
    on_gpu = recipe_with(case, tmp_path, device="cuda", baselines=["fp32", "fp16", "int8"], space__precision=["int8"])
    assert list_baseline_types(on_gpu, ("int8",)) == ("fp32", "fp16", "int8")
    here = recipe_with(case, tmp_path, space__precision=["fp32"])
    every = list_baseline_types(dataclasses.replace(here, baselines=()), ("fp32",))
    assert every[0] == "fp32"
    assert every[-1] == "int8"
    left_out = dict(search_space(read_network(case), dataclasses.replace(here, space=Space())).left_out)
    assert "no kernel of the backend" in left_out["fp8"]
    has_fp16 = "f16" not in get_backend("cpu").capabilities.unsupported_types
    assert ("fp16" in every) is has_fp16, "only CPUs with AVX512-FP16 compute in it"
    assert left_out.get("fp16") == (None if has_fp16 else "this processor has no instructions for it")


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

    net = read_network(case)
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


def test_the_knapsack_distributes_a_budget(case, tmp_path, monkeypatch):
    import whet
    from whet.search.stages.build_engine import build_config
    from whet.search.stages.prepare import fit_latency_budget

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    recipe = recipe_with(case, tmp_path, device="null")  # times from a table, equal on all machines
    net = whet.network_from_onnx(case / "model.onnx")
    c = Candidate(budget=0.7)
    kept, made = fit_latency_budget(net, c, build_config(net, recipe, c, 1), recipe, {}, say=lambda stage: None)
    assert kept
    assert all(0 < n < {"w0": 96, "w1": 64}[g] for g, n in kept.items())
    assert made.removed == ()
    seen = {"x": perceptron()[1]["x"][:32]}
    by_taylor = Candidate(budget=0.7, importance="taylor1")
    assert fit_latency_budget(net, by_taylor, build_config(net, recipe, c, 1), recipe, seen, say=lambda stage: None)[0]
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


def test_a_trial_chooses_channels_in_several_steps(case):
    """Later steps score the recovered network; the sizes are those of one step."""
    from whet.pruning import apply_recipe
    from whet.search.recipe.recipe import Effort
    from whet.search.stages.prepare import prepare_candidate

    net, data = read_network(case), {"x": np.load(case / "calibrate.npz")["x"]}
    c, kept = Candidate({"96 inner": 0.7, "64 inner": 0.7}, importance="reconstruction"), {"w0": 24, "w1": 16}
    once, thrice = (prepare_candidate(net, c, kept, data, Effort(), say=lambda stage: None, steps=n) for n in (1, 3))
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

    def watched(net, config, data, **options):
        asked.append((config, data))
        return plain(net, config, data, **options)

    plain = prepare.prune
    monkeypatch.setattr(prepare, "prune", watched)
    net, data = read_network(case), {"x": np.load(case / "calibrate.npz")["x"]}
    # times from a table, equal on all machines
    recipe = recipe_with(case, tmp_path, device="null", space={"precision": ["fp32"], "budget": True, "budget_trials": 2})
    kept, _ = prepare.fit_latency_budget(net, Candidate(budget=0.7), build_config(net, recipe, Candidate(), 1), recipe, data, say=lambda stage: None)
    assert kept
    ((config, given),) = asked
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


def test_an_unreadable_study_is_reported_in_one_line(case, tmp_path):
    from whet.errors import BuildError

    (tmp_path / "study.sqlite3").write_bytes(b"this is no database, and was long enough to look like one" * 40)
    space = search_space(read_network(case), recipe_with(case, tmp_path))
    with pytest.raises(BuildError, match=r"study\.sqlite3 cannot be read or written: .*not a database"):
        Study(tmp_path / "study.sqlite3", space, higher_is_better=True, sampler="random", seed=0, startup=4)


def test_int8_without_gain_is_reported():
    from whet.search.outcome.summary import remark_on_unused_int8

    def words(precision: str, **layers: int) -> str:
        return remark_on_unused_int8({"candidate": {"precision": precision}, "precision": layers})

    assert words("int8", f32=3) == " (computes in floating point: INT8 was not faster)"
    assert words("int8", f32=1, u8=2) == words("int8", i8=2) == words("fp8", f8e4m3=2) == words("fp32", f32=3) == ""
