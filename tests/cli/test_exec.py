"""`whet exec` as typed by users of trtexec: exit codes, wording, exported files, errors with a remedy."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.commands import run_command
from whet import zoo
from whet.backends import get_backend

WHET = [sys.executable, "-m", "whet.cli"]


def whet(*args: str, cwd: Path, code: int = 0, process: bool = False) -> str:
    """The output of a command, run in this process or in its own. Without --duration, `exec` measures for a moment instead of three seconds."""
    if args[0] == "exec" and "--skipInference" not in args and not any(a.startswith(("--duration", "--iterations")) for a in args):
        args = (*args, "--duration=0.1", "--warmUp=10")
    if process:
        done = subprocess.run([*WHET, *args], cwd=cwd, capture_output=True, text=True, timeout=500, check=False, env=environment(cwd))
        got, said = done.returncode, done.stdout + done.stderr
    else:
        got, said = run_command(*args, cwd=cwd, environment={"XDG_CACHE_HOME": str(cwd / "cache")})
    assert got == code, said[-6000:]
    return said


def environment(cwd: Path) -> dict[str, str]:
    return {**os.environ, "XDG_CACHE_HOME": str(cwd / "cache")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("exec")
    zoo.save("lenet5", made / "lenet.onnx")
    return made


def test_a_trtexec_command_line(tmp_path):
    zoo.save("resnet18", tmp_path / "resnet18-v1-7.onnx", image=64, width=16)
    command = (
        "--onnx=resnet18-v1-7.onnx --fp16 --int8 --sparsity=force --saveEngine=r.engine --exportProfile=p.txt --exportLayerInfo=l.json "
        "--profilingVerbosity=detailed --builderOptimizationLevel=1 --verbose"
    )
    said = whet("exec", *command.split(), cwd=tmp_path, process=True)
    assert "&&&& PASSED" in said
    # an engine may have a sparse layer, by its speed on this CPU; the tactics' times decide which reason is named first
    assert re.search(r"(20|19 of 20) eligible layers run dense", said)
    assert re.search(r"(cpu/sparse_q?linear refuses|the sparse tactics refused): takes 1", said)
    for line in ("=== Performance summary ===", "Throughput: ", "Latency: min = ", "Engine built in", "Seconds by phase: ", "images/s"):
        assert line in said
    info = json.loads((tmp_path / "l.json").read_text())
    convolutions = [x for x in info["Layers"] if x["LayerType"] == "CaskConvolution"]
    assert len(convolutions) == 20
    assert sum(x["HasSparseWeights"] for x in convolutions) == 19  # the first has 3 input channels
    stored = {t["Format/Datatype"] for x in info["Layers"] for t in (*x["Inputs"], *x["Outputs"])}
    if "avx512_fp16" not in get_backend("cpu").capabilities.features:
        assert "--fp16 is permitted but used by 0 of" in said
        assert not [t for t in stored if "FP16" in t or "Half" in t]  # types show the actual execution: no FP16 here, INT8 if it is faster
    profile = json.loads((tmp_path / "p.txt").read_text())
    assert list(profile[0]) == ["count"]
    assert [r["name"] for r in profile[1:]] == [x["Name"] for x in info["Layers"]]


def test_save_load_and_export(folder):
    build = "--onnx=lenet.onnx --shapes=input:2x1x32x32 --saveEngine=a.engine --skipInference --builderOptimizationLevel=1"
    whet("exec", *build.split(), cwd=folder, process=True)  # the engine is loaded by another process than its builder
    run = "--loadEngine=a.engine --duration=0.1 --exportTimes=t.json --exportOutput=o.json --dumpProfile --exportLayerInfo=n.json"
    said = whet("exec", *run.split(), cwd=folder)
    times = json.loads((folder / "t.json").read_text())
    assert len(times) >= 10
    assert set(times[0]) == {
        "startEnqMs", "endEnqMs", "startH2dMs", "endH2dMs", "startComputeMs", "endComputeMs", "startD2hMs", "endD2hMs",
        "h2dMs", "computeMs", "d2hMs", "latencyMs",
    }  # fmt: skip
    output = json.loads((folder / "o.json").read_text())
    assert output[0]["dimensions"] == "2x10"
    assert len(output[0]["values"]) == 20
    names = json.loads((folder / "n.json").read_text())
    assert all(isinstance(x, str) for x in names["Layers"])
    assert "--profilingVerbosity=detailed" in said  # the option for more detail is named
    assert "Total" in said
    assert "--coldL2 flushes a GPU's cache" in whet("exec", "--loadEngine=a.engine", "--coldL2", cwd=folder, code=2)


def test_dynamic_batch_through_profiles(folder):
    shapes = [f"--{k}Shapes=input:{n}x1x32x32" for k, n in (("min", 1), ("opt", 2), ("max", 4))]
    whet("exec", "--onnx=lenet.onnx", *shapes, "--saveEngine=d.engine", "--skipInference", "--builderOptimizationLevel=0", cwd=folder)
    for n in (1, 3, 4):
        assert f"(batch {n})" in whet("exec", "--loadEngine=d.engine", f"--shapes=input:{n}x1x32x32", "--duration=0.05", cwd=folder)
    assert "profile 0 takes 1 to 4" in whet("exec", "--loadEngine=d.engine", "--shapes=input:5x1x32x32", cwd=folder, code=1)
    said = whet("exec", "--loadEngine=d.engine", "--fp16", "--noVerify", "--timeDeserialize", cwd=folder)
    assert "--fp16, --noVerify: build options" in said


@pytest.mark.slow
def test_two_profiles_are_tuned_separately_and_selected_by_the_shapes(folder):
    def shapes(number, low, high):
        return [f"--profile={number}", f"--minShapes=input:{low}x1x32x32", f"--optShapes=input:{high}x1x32x32", f"--maxShapes=input:{high}x1x32x32"]

    build = ["--onnx=lenet.onnx", *shapes(0, 1, 1), *shapes(1, 2, 8), "--saveEngine=two.engine", "--saveLock=two.lock"]
    whet("exec", *build, "--skipInference", "--builderOptimizationLevel=1", "--dumpOptimizationProfile", "--timingCacheFile=two.cache", cwd=folder)
    run = ["exec", "--loadEngine=two.engine", "--duration=0.05"]
    assert "Optimization profile 0, by the shapes." in whet(*run, cwd=folder)
    said = whet(*run, "--shapes=input:5x1x32x32", "--dumpProfile", "--dumpLayerInfo", cwd=folder)
    assert "Optimization profile 1, by the shapes." in said
    assert "(batch 5)" in said
    assert "[profile 1]" in said
    assert "Optimization profile 1." in whet(*run, "--useProfile=1", cwd=folder)
    assert "profile 0 takes 1 to 1" in whet(*run, "--useProfile=0", "--shapes=input:5x1x32x32", cwd=folder, code=1)
    assert "no profile accepts. Profiles: 0: input 1x1x32x32 to 1x1x32x32; 1:" in whet(*run, "--shapes=input:9x1x32x32", cwd=folder, code=1)
    for k in (0, 1):
        said = whet("explain", "two.engine", f"--profile={k}", cwd=folder)
        assert "1: input 2x1x32x32 to 8x1x32x32, tuned for 8x1x32x32" in " ".join(said.split())
    assert "has 2 profile(s)" in whet("explain", "two.engine", "--profile=2", cwd=folder, code=2)


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        (["--onnx=nope.onnx"], 1, "cannot read nope.onnx"),
        (["--onnx=lenet.onnx", "--memPoolSize=arena:1K"], 1, "the arena needs"),
        (["--onnx=lenet.onnx", "--strict", "--fp8"], 1, "--fp8 cannot be used"),
        (["--onnx=lenet.onnx", "--strict", "--useManagedMemory"], 2, "known but not available"),
        (["--onnx=lenet.onnx", "--passes=-fuse_cnv"], 2, "Did you mean"),
        (["--onnx=lenet.onnx", "--noFuse=/foo"], 2, "has no such node"),
        (["--onnx=lenet.onnx", "--layerPrecisions=x:fp16", "--precisionConstraints=obey"], 2, "no layer or node"),
        (["--onnx=lenet.onnx", "--saveEngine=no/where/x.engine"], 2, "there is no folder"),
        (["--onnx=lenet.onnx", "--lock=nolock"], 1, "LockError"),
        (["--loadEngine=lenet.onnx"], 1, "not an engine of whet"),
        (["--onnx=lenet.onnx", "--loadEngine=x"], 2, "give one of --onnx"),
        (["--savEngine=x"], 2, "Did you mean '--saveEngine'"),
    ],
)
def test_errors_give_reason_and_remedy(folder, args, code, text):
    assert text in whet("exec", *args, cwd=folder, code=code)


def test_lock_gives_the_same_engine_bytes(folder):
    build = ["exec", "--onnx=lenet.onnx", "--builderOptimizationLevel=1", "--skipInference"]
    whet(*build, "--saveLock=l.lock", cwd=folder)
    from whet.builder import plan_digest
    from whet.engine import read_engine

    for name, process in (("one", False), ("two", True)):
        whet(*build, "--lock=l.lock", f"--saveEngine={name}.engine", cwd=folder, process=process)
    assert plan_digest(read_engine(folder / "one.engine")) == plan_digest(read_engine(folder / "two.engine"))


@pytest.mark.parametrize(("number", "code", "event"), [(signal.SIGINT, 130, "Interrupted"), (signal.SIGTERM, 143, "Terminated")])
def test_interrupt_keeps_recorded_times(tmp_path, number, code, event):
    zoo.save("squeezenet1_1", tmp_path / "s.onnx", batch=1)
    command = [*WHET, "exec", "--onnx=s.onnx", "--timingCacheFile=t.cache", "--skipInference", "--avgTiming=64"]
    child = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(tmp_path),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # background processes of a shell ignore SIGINT
    )  # fmt: skip
    limit = time.monotonic() + 120
    while time.monotonic() < limit and not _entries(tmp_path / "t.cache"):
        time.sleep(0.1)
    child.send_signal(number)
    said, _ = child.communicate(timeout=120)
    assert child.returncode == code, said
    assert f"{event}. Finished timings are kept" in said
    assert _entries(tmp_path / "t.cache") > 0


def _entries(path: Path) -> int:
    import sqlite3

    if not path.exists():
        return 0
    try:
        with sqlite3.connect(path) as db:
            first = "select name from sqlite_master where type = 'table' and name not like 'sqlite%' limit 1"
            (table,) = db.execute(first).fetchone() or ("",)
            return db.execute(f"select count(*) from {table}").fetchone()[0] if table else 0
    except sqlite3.OperationalError:
        return 0


def test_the_default_output_is_a_summary_above_trtexecs_and_quiet_is_the_summary_alone(folder):
    zoo.save("lenet5", folder / "s.onnx", batch=1)
    whet("exec", "--onnx=s.onnx", "--saveEngine=s.engine", "--skipInference", "--builderOptimizationLevel=1", cwd=folder)
    run = ["exec", "--loadEngine=s.engine", "--duration=0.05", "--warmUp=0"]

    def lines(*more: str) -> list[str]:
        return [x for x in whet(*run, *more, cwd=folder).splitlines() if "[W]" not in x]

    words = ["engine", "latency", "rate", "slowest", "checked", "memory"]
    quiet, default, verbose = lines("--quiet"), lines(), lines("--verbose")
    assert [x.split()[0] for x in quiet] == words
    assert [x.split()[0] for x in default[1:7]] == words
    assert "=== Performance summary ===" in default[8]
    for text in ("=== Trace details ===", "=== Model Options ===", "Peak memory: "):
        assert not any(text in x for x in default)
        assert any(text in x for x in verbose)
    assert not any("GPU" in x for x in verbose), "nothing runs on a GPU"
    assert any(" - Latency: " in x for x in verbose)
    assert any("=== Profile" in x for x in lines("--quiet", "--dumpProfile")), "what a flag asks for is printed"
    assert "; 1 queries" not in quiet[1]
    assert "agree with the reference" in quiet[4]


def test_a_shape_with_zero_is_refused(folder):
    zoo.save("lenet5", folder / "z.onnx")
    said = whet("exec", "--onnx=z.onnx", "--shapes=input:0x1x32x32", cwd=folder, code=2)
    assert "--shapes: 'input' has a dimension of 0 in 0x1x32x32" in said


def test_the_profile_splits_fusions(folder):
    zoo.save("lenet5", folder / "f.onnx", batch=1)
    whet("exec", "--onnx=f.onnx", "--saveEngine=f.engine", "--skipInference", "--builderOptimizationLevel=2", cwd=folder)
    said = whet("exec", "--loadEngine=f.engine", "--splitFusions", "--duration=0.05", "--json", cwd=folder)
    rows = json.loads(said[: said.rindex("\n}\n") + 2])["fusions"]
    assert rows
    for r in rows:
        assert len(r["parts"]) > 1
        assert r["aloneMs"] == pytest.approx(sum(p["ms"] for p in r["parts"]))
        assert r["savedMs"] == pytest.approx(r["aloneMs"] - r["fusedMs"])
    assert {"Conv", "Relu"} <= {p["op"] for r in rows for p in r["parts"]}


def test_debug_tensors_are_written(folder):
    import numpy as np
    import onnx.reference

    zoo.save("lenet5", folder / "d.onnx", batch=1)
    name = next(n.output[0] for n in onnx.load(folder / "d.onnx").graph.node if n.op_type == "Relu")
    np.save(folder / "x.npy", np.random.default_rng(0).standard_normal((1, 1, 32, 32)).astype(np.float32))
    run = ["--builderOptimizationLevel=1", "--duration=0", "--warmUp=0", "--loadInputs=input:x.npy", "--saveEngine=d.engine"]
    said = whet("exec", "--onnx=d.onnx", f"--markDebug={name}", "--saveAllDebugTensors=summary,numpy,string", *run, cwd=folder)
    assert f"{name}: 1x6x28x28 float32, min 0," in said
    safe = name.replace("/", "_")
    saved = np.load(folder / f"{safe}.npy")
    model = onnx.load(folder / "d.onnx")
    model.graph.output.append(onnx.helper.make_empty_tensor_value_info(name))
    wanted = onnx.reference.ReferenceEvaluator(model).run([name], {"input": np.load(folder / "x.npy")})[0]
    np.testing.assert_allclose(saved, wanted, rtol=1e-4, atol=1e-5)
    assert np.array((folder / f"{safe}.txt").read_text().split(), float).shape == (saved.size,)
    whet("exec", "--loadEngine=d.engine", f"--saveDebugTensors={name}:t.raw", "--duration=0", "--warmUp=0", "--loadInputs=input:x.npy", cwd=folder)
    np.testing.assert_array_equal(np.fromfile(folder / "t.raw", np.float32).reshape(saved.shape), saved)
    assert "no value 'Relu9'" in whet("exec", "--onnx=d.onnx", "--markDebug=Relu9", cwd=folder, code=2)
    assert "writes the tensors of --markDebug" in whet("exec", "--loadEngine=d.engine", "--saveAllDebugTensors=numpy", cwd=folder, code=2)
    assert "--markDebug=other adds it" in whet("exec", "--loadEngine=d.engine", "--duration=0", "--saveDebugTensors=other:o.npy", cwd=folder, code=2)
