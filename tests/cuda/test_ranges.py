"""Profiler ranges: NVTX loads a listener in place of Nsight Systems, through the environment variable that names the profiler's library."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("nvtx", reason="the package nvtx is not installed (extra cuda)")
pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
from whet.backends.cuda import driver

COMPILER = shutil.which("gcc")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no gcc to make the listener with")
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def hears(tmp_path_factory):
    """Runs a program under the listener and returns the recorded lines."""
    folder = tmp_path_factory.mktemp("listener")
    library, heard = folder / "listener.so", folder / "heard.txt"
    subprocess.run([COMPILER, "-Wall", "-Werror", "-shared", "-fPIC", "-o", str(library), str(HERE / "nvtx_listener.c")], check=True)

    def run(program, **environment):
        more = {"NVTX_INJECTION64_PATH": str(library), "NVTX_HEARD": str(heard), **environment}
        heard.write_text("")
        got = subprocess.run([sys.executable, "-c", program], env={**os.environ, **more}, capture_output=True, text=True, check=False, timeout=120)
        assert got.returncode == 0, got.stderr[-2000:]
        return heard.read_text().splitlines()

    return run


def test_a_profiler_gets_the_names_in_a_domain_of_their_own(hears):
    program = """
from whet.backends.cuda.nvtx import range_of
with range_of("/layer1/conv1/Conv, /layer1/relu/Relu"):
    with range_of(""):
        pass
try:
    with range_of("a layer that fails"):
        raise ValueError
except ValueError:
    pass
"""
    assert hears(program) == [
        "push whet /layer1/conv1/Conv, /layer1/relu/Relu", "push whet layer", "pop whet", "pop whet", "push whet a layer that fails", "pop whet",
    ]  # fmt: skip


RUN = """
import ctypes, os, sys
import numpy as np
from whet import zoo
from whet.backends.cuda.launch import Launch
from whet.builder import BuildConfig, build
from whet.frontends.onnx import network_from_onnx
from whet.runtime import Runtime
model = zoo.build("lenet5", batch=1)
config = BuildConfig(backend="cuda", precisions=("fp16",), timing_cache="", avg_timing=2, whole_engines=1)
context = Runtime("cuda").load(build(network_from_onnx(model), config)).create_context()
image = {"input": np.random.default_rng(0).standard_normal((1, 1, 32, 32)).astype(np.float32)}
plain = context.run(image)  # by the graph, without ranges
listener, run = ctypes.CDLL(os.environ["NVTX_INJECTION64_PATH"]), Launch.run
def told(launch, stream):
    listener.note(b"kernel")
    run(launch, stream)
Launch.run = told
os.environ["WHET_NVTX"] = "1"
shown = context.run(image)
assert all(np.array_equal(shown[k], plain[k]) for k in plain)
for node in model.graph.node:
    listener.note(("node " + node.name).encode())
"""


@pytest.mark.gpu
@pytest.mark.skipif(driver.why_unavailable() is not None, reason=str(driver.why_unavailable()))
def test_every_kernel_is_launched_in_the_range_of_its_nodes(hears):
    said = hears(RUN)
    shown, inside, kernels = [], None, 0
    for line in said:
        if line.startswith("push whet "):
            assert inside is None, "ranges of layers do not overlap"
            inside = line.removeprefix("push whet ").split(", ")
            shown += inside
        elif line == "pop whet":
            inside = None
        elif line == "kernel":
            assert inside is not None, "no kernel outside of a range"
            kernels += 1
    nodes = [line.removeprefix("node ") for line in said if line.startswith("node ")]
    named = list(dict.fromkeys(n for n in shown if n in nodes))
    assert len(nodes) == 12
    assert set(nodes) - set(named) <= {"/Flatten"}, "all layers except pure views"
    assert named == [n for n in nodes if n in named], "in their order"
    assert kernels >= 5
