"""Other builds of oneDNN than the default: those listed in WHET_TEST_ONEDNN (paths separated by ':') run, obey the thread count, and build.

`pip download onednn-cpu-tbb==2023.2.0 onednn-cpu-iomp==2023.2.0 intel-cmplr-lib-rt==2023.2.0`, unpack them, put their lib folders on
LD_LIBRARY_PATH and the two libdnnl.so.3 into WHET_TEST_ONEDNN. Each runs in its own process, since a process loads one oneDNN.
"""

import ctypes
import os
import subprocess
import sys

import pytest

from whet.backends.cpu import launch, pools, threads
from whet.errors import BackendError

LIBRARIES = [p for p in os.environ.get("WHET_TEST_ONEDNN", "").split(":") if p]
NAMED = pytest.mark.skipif(not LIBRARIES, reason="WHET_TEST_ONEDNN names no other libdnnl.so.3 (the docstring says where to get some)")


def run(library, *command):
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False, env={**os.environ, "WHET_ONEDNN": library})
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


OBEYS = """
import time
from whet.backends.cpu import CpuBackend
from whet.tactics.cpu.onednn import _api as dnn
src = dnn.describe((1, 64, 56, 56), "f32", "nhwc")
def busy(count):
    cpu = CpuBackend(count)
    first = dnn.convolution(src, dnn.describe((64, 64, 3, 3), "f32", "any"), None, src, (1, 1), (1, 1), ((1, 1), (1, 1)))
    arrays = {n: dnn.allocate_aligned(m.nbytes) for n, m in first.primitive().operands.items()}
    call = first.primitive().call({n: a.ctypes.data for n, a in arrays.items()})
    class Recorded:
        native = call.step
    stream = cpu.stream()
    stream.record(Recorded())
    executable = stream.finish()
    executable.run()
    time.sleep(0.5)  # threads of the count before have stopped spinning
    own, all_of_them = time.thread_time(), time.process_time()
    for _ in range(200):
        executable.run()
    return (time.process_time() - all_of_them) / (time.thread_time() - own)
print(busy(1), busy(2), busy(1))
"""


@NAMED
@pytest.mark.parametrize("library", LIBRARIES)
def test_one_thread_is_one_thread(library):
    """Ratio of the process's CPU time to that of the calling thread; external load does not change it."""
    first, _, last = map(float, run(library, "-c", OBEYS).split())
    assert first < 1.1
    assert last < 1.1, "again after two"


@NAMED
@pytest.mark.parametrize("library", LIBRARIES)
def test_the_contract_tests_pass(library):
    here = os.path.dirname(__file__)
    files = [os.path.join(here, f"test_onednn_{n}.py") for n in ("tactics", "extremes", "quantized")]
    run(library, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files)


BUILD = """
import sys, numpy as np, onnxruntime, whet.zoo
from whet import Runtime
from whet.builder import BuildConfig, build
from whet.frontends import network_from_onnx
path = sys.argv[1]
whet.zoo.save("resnet18", path, batch=1)
x = np.random.default_rng(0).standard_normal((1, 3, 224, 224)).astype(np.float32)
net = network_from_onnx(path)
name = net.inputs[0].name
plan = build(net, BuildConfig(threads=2, timing_cache="", optimization_level=1))
got = next(iter(Runtime(threads=2).load(plan).create_context().run({name: x}).values()))
want = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, {name: x})[0]
print(np.abs(got - want).max() / np.abs(want).max())
"""


@NAMED
@pytest.mark.parametrize("library", LIBRARIES)
def test_resnet18_builds_and_is_right(library, tmp_path):
    assert float(run(library, "-c", BUILD, str(tmp_path / "resnet18.onnx"))) < 1e-5


class Counted:
    """A pool that records its settings, from Python and from a compiled loop."""

    name = "counted"
    survives_fork = True

    def __init__(self):
        self.seen = []
        self._callback = ctypes.CFUNCTYPE(None, ctypes.c_int)(self.set)
        self.address = ctypes.cast(self._callback, ctypes.c_void_p).value

    def set(self, count):
        self.seen.append(count)


def test_every_run_sets_the_joined_pools():
    before, pool = threads.get_threads(), Counted()
    threads.register_pool(pool)
    threads.set_threads(2)
    executable = launch.LaunchList(1).finish()
    executable.run()
    executable.run_timed()
    threads.set_threads(before)
    assert pool.seen == [before, 2, 1, 1, before]


def test_an_old_tbb_is_refused():
    with pytest.raises(BackendError, match="oneTBB 2021 or newer"):
        pools.Tbb(ctypes.CDLL(None))


def test_a_sequential_build_has_no_pool():
    assert pools.pool_of_library(ctypes.CDLL(None), "seq", threads.load_gomp()) is None
