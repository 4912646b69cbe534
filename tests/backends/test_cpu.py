"""The CPU backend: memory, launch lists in the compiled loop and without it, time, load, keys."""

import ctypes
import os
import platform
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from whet.backends import BACKENDS, Call, get_backend
from whet.backends.cpu import info, load, loop, machine_code, threads
from whet.errors import BackendError

CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int64, ctypes.c_int64, ctypes.c_int32, ctypes.c_int64)


class Native(Call):
    """A native call that records its words; `status` is its return value."""

    def __init__(self, log, words=(1, 2, 3, 4), status=0, returns_status=True):
        def function(a, b, c, d):
            log.append((a, b, c, d))
            return status

        self.callback = CALLBACK(function)
        self.native = (ctypes.cast(self.callback, ctypes.c_void_p).value, *words)
        self.returns_status = returns_status

    def run(self):
        raise AssertionError("native calls are run by the loop")


class Python(Call):
    def __init__(self, log, event):
        self.log, self.what = log, event

    def run(self):
        self.log.append(self.what)


LOOPS = [loop.get_loop, loop.get_interpreted_loop]


@pytest.fixture(params=LOOPS, ids=["compiled", "interpreted"])
def finish(request):
    backend = get_backend("cpu")

    def make(*calls):
        stream = backend.stream()
        for c in calls:
            stream.record(c)
        return stream.finish(request.param())

    return make


def test_the_loop_is_compiled_if_llvmlite_is_installed():
    pytest.importorskip("llvmlite")
    assert loop.get_loop_kind() == "compiled"


def test_native_and_python_calls_run_in_order_with_their_words(finish):
    log = []
    words = (-(2**63), 2**63 - 1, -7, 2**62)
    run = finish(Native(log, words), Native(log), Python(log, "py"), Native(log), Python(log, "end"))
    run.run()
    assert log == [words, (1, 2, 3, 4), "py", (1, 2, 3, 4), "end"]
    run.run()
    assert len(log) == 10


def test_addresses_above_2_to_the_63_survive(finish):
    log = []
    finish(Native(log, (2**64 - 5, 2**63, 0, 0))).run()
    assert log == [(-5, -(2**63), 0, 0)]


def test_a_status_stops_the_run_and_names_the_call(finish):
    log = []
    bad = Native(log, status=5)
    with pytest.raises(BackendError, match="Native"):
        finish(Native(log), bad, Native(log)).run()
    assert len(log) == 2


def test_a_function_without_a_status_may_return_anything(finish):
    log = []
    finish(Native(log, status=-1, returns_status=False), Native(log)).run()
    assert len(log) == 2


def test_an_empty_list_runs(finish):
    finish().run()
    assert finish().run_timed() == []


def test_run_timed_gives_a_time_for_each_call(finish):
    log = []
    run = finish(Native(log), Python(log, "py"), Native(log))
    assert len(run.run_timed()) == 3
    assert all(t >= 0 for t in run.run_timed())
    assert len(log) == 6


def test_each_run_sets_the_calling_threads_own_thread_count():
    backend, seen = get_backend("cpu", threads=1), []

    class Ask(Call):
        def run(self):
            seen.append(threads.get_threads())

    stream = backend.stream()
    stream.record(Ask())
    run = stream.finish()
    threads.set_threads(2)
    run.run()
    other = threading.Thread(target=run.run)
    other.start()
    other.join()
    assert seen == [1, 1]
    get_backend("cpu")


@pytest.mark.parametrize("nbytes", [0, 1, 63, 4096, 1 << 20, (1 << 20) + 1, 5 << 20])
@pytest.mark.parametrize("alignment", [1, 64, 4096])
def test_memory_is_aligned_zeroed_and_writable(nbytes, alignment):
    b = get_backend("cpu").allocate(nbytes, alignment)
    assert b.nbytes == nbytes
    assert b.array.nbytes == nbytes
    if nbytes:
        assert b.address % alignment == 0
        assert b.array.ctypes.data == b.address
        assert not b.array.any()
        b.array[:] = 255
        assert b.array.min() == 255


def test_large_memory_may_use_huge_pages_and_is_not_inherited():
    b = get_backend("cpu").allocate(5 << 20)
    assert b.address % (2 << 20) == 0
    with open("/proc/self/maps") as maps:
        ranges = [(*(int(n, 16) for n in line.split()[0].split("-")), line.split()[1]) for line in maps]
    assert next(how for first, end, how in ranges if first <= b.address < end) == "rw-p"  # private


def test_more_memory_than_available_is_refused():
    with pytest.raises(BackendError, match=r"MiB are needed in one block.*memory_limit="):
        get_backend("cpu").allocate(info.get_total_memory() * 2)
    for wrong in ((-1, 64), (10, 3), (10, 8192)):
        with pytest.raises(BackendError, match="cannot allocate"):
            get_backend("cpu").allocate(*wrong)


def test_memory_is_freed_with_its_last_reference():
    before = _resident()
    for _ in range(20):
        get_backend("cpu").allocate(64 << 20)
    assert _resident() - before < 256 << 20


def _resident() -> int:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_external_load_is_total_load_minus_own_load(monkeypatch):
    def times(system: float, steal: float):
        return SimpleNamespace(user=10.0, nice=10.0, system=20.0 + system, idle=9999.0, iowait=55.0, irq=3.0, softirq=4.0, steal=steal, guest=9.0)

    def watched(before, after):
        readings, own = iter([before, after]), iter([7.0, 8.0])
        monkeypatch.setattr("psutil.cpu_times", lambda: next(readings))
        monkeypatch.setattr(load, "process_seconds", lambda: next(own))
        monkeypatch.setattr(load, "perf_counter", iter([0.0, 4.0]).__next__)
        with load.watch() as found:
            pass
        return found

    quiet = watched(times(0, 7), times(3, 7))
    assert (quiet.others, quiet.stolen, quiet.who) == (pytest.approx((3.0 - 1.0) / 4.0), 0.0, "other processes")
    assert quiet.disturbed
    guest = watched(times(0, 7), times(1, 8))
    assert (guest.others, guest.stolen) == (pytest.approx(1.0 / 4.0), pytest.approx(1.0 / 4.0))
    assert guest.who == "other guests of this machine's host"
    assert guest.disturbed
    both = watched(times(0, 7), times(2, 8))
    assert (both.others, both.stolen) == (pytest.approx(0.5), pytest.approx(0.25))
    assert both.who == "other processes and other guests of this machine's host"
    old = watched(SimpleNamespace(user=0.0, system=0.0, idle=0.0), SimpleNamespace(user=3.0, system=0.0, idle=0.0))  # macOS has no steal time
    assert (old.others, old.stolen) == (pytest.approx(0.5), 0.0)


def test_external_load_is_detected():
    burner = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        with load.watch() as busy:
            threading.Event().wait(0.5)
    finally:
        burner.kill()
        burner.wait()
    assert busy.others > 0.2
    assert busy.disturbed
    assert not load.Load(None, 1.0).disturbed
    assert not load.Load(5.0, 0.01).disturbed  # too short to distinguish from counting noise


def test_the_key_contains_everything_that_can_change_a_time():
    one, two = get_backend("cpu", threads=1), get_backend("cpu", threads=2)
    assert one.key() != two.key()
    assert info.get_cpu_model() in one.key()
    assert "spin=" in one.key()
    assert one.describe()["threads"] == 1
    get_backend("cpu")


def test_wrong_options_are_refused():
    with pytest.raises(BackendError, match="at least 1"):
        get_backend("cpu", threads=-1)
    with pytest.raises(BackendError, match="no backend 'gpu'"):
        get_backend("gpu")
    assert {"cpu", "null"} <= set(BACKENDS)


def test_cpuinfo_of_another_machine(monkeypatch, tmp_path):
    lines = ["processor: 0", "model name\t: Some CPU", "cpu family: 6", "model\t\t: 1", "stepping: 2", "flags\t: fpu avx2 avx512f zzz"]
    (tmp_path / "cpuinfo").write_text("\n".join([*lines, "", "processor: 1", ""]))
    monkeypatch.setattr(info, "CPUINFO", tmp_path / "cpuinfo")
    info.read_cpuinfo.cache_clear()
    try:
        assert info.get_cpu_model() == "Some CPU (6-1-2)"
        assert info.list_cpu_features() == {"avx2", "avx512f"}
        arm = ["Features\t: fp asimd asimddp", "CPU implementer\t: 0x41", "CPU variant\t: 0x3", "CPU part\t: 0xd0c", "CPU revision\t: 1"]
        (tmp_path / "cpuinfo").write_text("\n".join([*arm, ""]))
        info.read_cpuinfo.cache_clear()
        assert info.get_cpu_model().endswith(" (0x41-0xd0c-0x3-1)"), "Linux on ARM names no model: two CPUs would share timings"
        assert info.list_cpu_features() == {"asimd", "asimddp"}
        monkeypatch.setattr(info, "CPUINFO", tmp_path / "none")
        info.read_cpuinfo.cache_clear()
        assert info.list_cpu_features() == frozenset()
        assert info.get_cpu_model()
    finally:
        info.read_cpuinfo.cache_clear()


def test_a_limit_hides_newer_instruction_sets(monkeypatch, tmp_path):
    """WHET_MAX_CPU_ISA, on a machine that has AVX-512 and AMX: no feature, key or kernel uses an instruction set above the limit."""
    (tmp_path / "cpuinfo").write_text("flags: avx avx2 fma avx_vnni avx512f avx512cd avx512bw avx512dq avx512vl avx512_vnni avx512_bf16 amx_int8\n")
    monkeypatch.setattr(info, "CPUINFO", tmp_path / "cpuinfo")
    info.read_cpuinfo.cache_clear()
    core = {"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"}
    try:
        monkeypatch.delenv(info.VARIABLE, raising=False)
        assert info.list_cpu_features() == {"avx", "avx2", "fma", "avx_vnni", *core, "avx512_vnni", "avx512_bf16", "amx_int8"}
        monkeypatch.setenv(info.VARIABLE, "avx512_core")
        assert info.list_cpu_features() == {"avx", "avx2", "fma", *core}
        monkeypatch.setenv(info.VARIABLE, "AVX2")
        assert info.list_cpu_features() == {"avx", "avx2", "fma"}
        assert "avx512" not in get_backend("cpu").key()
        assert {"bf16", "f16"} <= get_backend("cpu").capabilities.unsupported_types
        monkeypatch.setenv(info.VARIABLE, "avx1024")
        with pytest.raises(BackendError, match=r"avx1024 is no limit .* avx2 or avx512_core"):
            info.list_cpu_features()
    finally:
        info.read_cpuinfo.cache_clear()


@pytest.mark.skipif(machine_code.why_no_compiler() is not None, reason="there is no compiler")
@pytest.mark.skipif(platform.machine().lower() not in ("x86_64", "amd64"), reason="instruction sets of x86")
@pytest.mark.parametrize("limit", ["", "avx512_core", "avx2"])
def test_a_limit_reaches_the_compiler(limit, monkeypatch):
    """Sixteen numbers at once, compiled for a CPU with AVX-512: registers of 512 bits only if the limit permits them."""
    import llvmlite.binding as llvm

    names = ("avx", "avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd", "avx512vnni")
    monkeypatch.setattr(llvm, "get_host_cpu_name", lambda: "znver4")
    monkeypatch.setattr(llvm, "get_host_cpu_features", lambda: llvm.FeatureMap(dict.fromkeys(names, True)))
    monkeypatch.setenv(info.VARIABLE, limit)
    machine, text = machine_code.get_target.__wrapped__()
    ir = """
        define void @add(<16 x float>* %a, <16 x float>* %b) {
          %x = load <16 x float>, <16 x float>* %a
          %y = load <16 x float>, <16 x float>* %b
          %z = fadd <16 x float> %x, %y
          store <16 x float> %z, <16 x float>* %a
          ret void
        }"""
    module = llvm.parse_assembly(machine_code.use_opaque_pointers(ir) if llvm.llvm_version_info[0] >= 17 else ir)
    assembly = machine.emit_assembly(module)
    assert ("zmm" in assembly) == (limit != "avx2")
    assert ("ymm" in assembly) == (limit == "avx2")
    assert ("+avx512vnni" in text) == (not limit)  # part of the key of compiled objects


def test_unshared_caches_are_summed(monkeypatch, tmp_path):
    for cpu in (0, 1):
        for index, (level, kind, size, shared) in enumerate([(1, "Data", "32K", cpu), (1, "Instruction", "32K", cpu), (3, "Unified", "8M", "0-1")]):
            d = tmp_path / f"cpu{cpu}" / "cache" / f"index{index}"
            d.mkdir(parents=True)
            for name, value in (("level", level), ("type", kind), ("size", size), ("shared_cpu_list", shared)):
                (d / name).write_text(f"{value}\n")
    monkeypatch.setattr(info, "CACHES", tmp_path)
    info.cache_bytes.cache_clear()
    try:
        assert info.cache_bytes() == {1: 65536, 3: 8 << 20}
    finally:
        info.cache_bytes.cache_clear()


def test_a_build_without_a_compiler_names_the_missing_package(monkeypatch):
    import whet.backends.cpu as cpu
    from whet.builder import BuildConfig, build
    from whet.network import Network, parse_type

    net = Network("n")
    net.mark_output(net.add("Relu", net.add_input("x", parse_type("f32[2,3]"))))
    quick = BuildConfig(optimization_level=0, timing_cache="", threads=1)
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "llvmlite.binding", None)  # as if it were not installed
        machine_code.why_no_compiler.cache_clear()
        (said,) = [n for n in build(net, quick).report.notes if "llvmlite" in n]
    machine_code.why_no_compiler.cache_clear()
    assert "pip install 'whet[jit]'" in said
    assert "attention" in said
    with monkeypatch.context() as there:
        there.setattr(cpu, "why_no_compiler", lambda: None)
        assert not build(net, quick).report.notes
