"""--samples through the command line: built, timed, reported, explained, and compared value by value."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

from whet.cli.exec import command
from whet.cli.explain import command as explain
from whet.cli.run import command as compare
from whet.engine import read_engine
from whet.frontends.onnx_writer import save_onnx
from whet.network import Network, parse_type

pytest.importorskip("llvmlite")
QUICK = ["--verbose", "--noBuilderCache", "--avgTiming=1", "--duration=0", "--iterations=2", "--warmUp=0", "--numThreads=2"]
BATCH = ["--minShapes=x:1x3x12x12", "--optShapes=x:5x3x12x12", "--maxShapes=x:6x3x12x12"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A convolutional network with dynamic batch, and its per-sample engine."""
    rng, made = np.random.default_rng(1), tmp_path_factory.mktemp("samples")
    net = Network("small")

    def w(*shape):
        return net.constant((rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32))

    x = net.add_input("x", parse_type("f32[N,3,12,12]"))
    a = net.add("Relu", net.add("Conv", x, w(16, 3, 3, 3), pads=(1,) * 4))
    b = net.add("Conv", net.add("Concat", a, net.add("Relu", net.add("Conv", a, w(16, 16, 1, 1))), axis=1), w(8, 32, 3, 3))
    net.mark_output(net.add("Gemm", net.add("Flatten", net.add("GlobalAveragePool", b)), w(8, 10)), "y")
    save_onnx(net, made / "m.onnx")
    code, out = run(f"--onnx={made}/m.onnx", f"--saveEngine={made}/m.engine", "--samples=parallel", *BATCH)
    assert code == 0, out
    (made / "out.txt").write_text(out)
    return made


def run(*flags):
    got = CliRunner().invoke(command, [*flags, *QUICK])
    return got.exit_code, got.output


def test_the_build_reports_the_sample_mode(folder):
    out = (folder / "out.txt").read_text()
    assert "samples run in parallel on 2 thread(s): 5 samples take" in out
    assert "2 concurrent sample(s), each in" in out
    assert read_engine(folder / "m.engine").arenas[0].concurrent_samples == 2


def test_a_loaded_engine_runs_any_batch_and_profiles_one_sample(folder):
    path = folder / "profile.json"
    for batch in (1, 4, 5):
        flags = (f"--shapes=x:{batch}x3x12x12", "--dumpProfile", f"--exportProfile={path}")
        code, out = run(f"--loadEngine={folder}/m.engine", *flags)
        assert code == 0, out
        assert "times are those of one sample" in out
        assert len(json.loads(path.read_text())) == 1 + len(read_engine(folder / "m.engine").network.layers)


def test_explain_says_that_its_numbers_are_per_sample(folder):
    got = CliRunner().invoke(explain, [f"{folder}/m.engine"])
    assert got.exit_code == 0, got.output
    assert "Samples run in parallel, 2 at once" in " ".join(got.output.split())
    facts = json.loads(CliRunner().invoke(explain, [f"{folder}/m.engine", "--json"]).output)
    assert facts["lanes"] == [2]
    assert facts["samples"]["kept"] == "parallel"


def test_sequential_samples_are_reported_too(folder, tmp_path):
    """One sample after the other on all threads: the log, the memory, and the basis of explain's numbers."""
    old = "--samples=turns"  # scripts may still use it for --samples=sequential
    code, out = run(f"--onnx={folder}/m.onnx", f"--saveEngine={tmp_path}/t.engine", old, *BATCH)
    assert code == 0, out
    assert "samples run one at a time on all 2 thread(s): 5 samples take" in out
    assert "1 concurrent sample(s), each in" in out
    assert read_engine(tmp_path / "t.engine").report.samples.kept == "sequential"
    assert read_engine(tmp_path / "t.engine").arenas[0].concurrent_samples == 1
    got = CliRunner().invoke(explain, [f"{tmp_path}/t.engine"])
    said = "Samples run one after the other: layers, GFLOP and MB are those of one sample, ms on all threads"
    assert said in " ".join(got.output.split())


def test_every_value_of_the_engine_is_compared(folder):
    pytest.importorskip("onnxruntime")
    got = CliRunner().invoke(compare, [f"{folder}/m.engine", f"{folder}/m.onnx", "--shapes=x:5x3x12x12", "--against=onnxruntime", "--all"])
    assert got.exit_code == 0, got.output


def test_an_unknown_mode_is_refused(folder):
    code, out = run(f"--onnx={folder}/m.onnx", "--samples=alone", *BATCH)
    assert code != 0
    assert "auto, together, parallel, sequential" in out
