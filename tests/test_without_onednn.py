"""Where oneDNN cannot be loaded (ARM, macOS, a broken library), whet imports and builds with its own kernels and NumPy; on macOS also without
libgomp, processor affinities and /proc."""

import ctypes
import subprocess
import sys

import pytest

CODE = """
import ctypes

class WithoutOneDNN(ctypes.CDLL):
    def __init__(self, name, *rest, **named):
        if "dnnl" in str(name):
            raise OSError(f"{name}: cannot open shared object file")
        super().__init__(name, *rest, **named)

ctypes.CDLL = WithoutOneDNN
import sys
import numpy as np
import whet
from whet.builder import build
from whet.builder.candidates.tactic_sources import find_missing_libraries
from whet.network import parse_network
from whet.ops import run_network

x = np.random.default_rng(0).standard_normal((1, 8, 6, 6)).astype(np.float32)
net = parse_network('''network case source
in %x: f32[1,8,6,6]
in %q: f32[1,2,4,8]
%a = Relu(%x)
%b, %c = Split(%a, axis=1, num_outputs=2)
%d = Concat(%c, %b, axis=1)
%p = MaxPool(%d, kernel_shape=(2, 2), strides=(2, 2))
%s = Softmax(%p, axis=1)
%y = Flatten(%s)
%k = Transpose(%q, perm=(0, 1, 3, 2))
%m = MatMul(%q, %k)
%n = Softmax(%m, axis=-1)
%z = MatMul(%n, %q)
out %y
out %z
''')
feeds = {"x": x, "q": x[:, :2, :4, :4].repeat(2, 3)}
whet.zoo.save("lenet5", "lenet5.onnx", num_classes=10, batch=1)
lenet = whet.network_from_onnx("lenet5.onnx")
notes = set()
for n, f in ((lenet, {"input": np.ones((1, 1, 32, 32), np.float32)}), (net, feeds)):
    for level in map(int, sys.argv[1:]):
        plan = build(n, whet.BuildConfig(optimization_level=level, timing_cache="", avg_timing=1))
        whet.write_engine(plan, "net.engine")
        with whet.Runtime().load("net.engine").create_context() as context:
            got, want = context.run(f), run_network(n, f)
        assert all(np.allclose(got[k], want[k], rtol=1e-4, atol=1e-5) for k in want)
        assert not [c.tactic for c in plan.choices.values() if "onednn" in c.tactic]
        notes |= {t for t in plan.report.notes if "oneDNN" in t}
print(len(notes), *notes)
print(find_missing_libraries("cpu", ["-ONEDNN"]))
"""

#: As on macOS: no libgomp, no affinities, no /proc and /sys, no Linux requests for memory.
MACOS = """
import ctypes, mmap, os, platform, sys
from pathlib import Path

class WithoutGomp(ctypes.CDLL):
    def __init__(self, name, *rest, **named):
        if "gomp" in str(name):
            raise OSError(f"{name}: image not found")
        super().__init__(name, *rest, **named)

import llvmlite.binding, numpy, onnx, psutil  # they ask the real system
ctypes.CDLL = WithoutGomp
sys.platform = "darwin"
del os.sched_getaffinity, mmap.MADV_HUGEPAGE
from whet.backends.cpu import info, threads
info.CPUINFO = info.CACHES = Path("/nowhere")
threads.get_cgroup_cpus.__defaults__ = (Path("/nowhere"), Path("/nowhere"))
assert threads.count_usable_cpus() == 1
"""
#: As on a Graviton: no oneDNN, and the instruction sets of its /proc/cpuinfo.
ARM = """
from pathlib import Path
from whet.backends.cpu import info

fields = Path("cpuinfo")
fields.write_text("processor\\t: 0\\nFeatures\\t: fp asimd asimdhp asimddp bf16 i8mm sve\\nCPU implementer\\t: 0x41\\n\\n")
info.CPUINFO = fields
"""


@pytest.mark.parametrize("system", [MACOS, ARM], ids=["macos", "arm"])
def test_networks_build_and_run_on_other_systems(system, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    done = subprocess.run([sys.executable, "-c", system + CODE, "3"], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]


def test_parts_run_one_after_another_without_libgomp():
    from whet.backends.cpu.threads import Sequential

    pool, seen = Sequential(), []
    part = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda context: seen.append((context, pool.omp_get_thread_num(), pool.omp_get_num_threads())))
    address = ctypes.cast(part, ctypes.c_void_p).value
    pool.GOMP_parallel(address, 7, 3, 0)
    assert seen == [(7, 0, 3), (7, 1, 3), (7, 2, 3)]
    assert (pool.omp_get_thread_num(), pool.omp_get_num_threads()) == (0, 1)
    pool.omp_set_num_threads(2)
    seen.clear()
    pool.GOMP_parallel(address, None, 0, 0)
    assert [s[1:] for s in seen] == [(0, 2), (1, 2)]
    assert pool.omp_get_max_threads() == 2


def test_networks_build_and_run_and_the_report_says_why(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("WHET_ONEDNN", raising=False)
    done = subprocess.run([sys.executable, "-c", CODE, "1", "3"], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    *_, notes, silenced = done.stdout.splitlines()
    assert notes.startswith("1 No tactic of oneDNN is used: oneDNN cannot be loaded from")
    assert silenced == "[]", "who switches oneDNN off need not hear that it is missing"
