"""The thread pool: every part runs once, nobody waits for absent threads, and it survives forks, exits, stops and changes of its size."""

import ctypes
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from whet.backends.cpu import _imports, _pool_ir, machine_code, pool, threads
from whet.errors import BackendError

BEGIN = f"""
import ctypes, os, signal, sys, threading, time
sys.path.insert(0, {str(Path(__file__).parents[2] / "src")!r})
from whet.backends.cpu import _pool_ir as ir, threads
REGION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

def c_function(name, result=ctypes.c_int, *arguments):
    return ctypes.CFUNCTYPE(result, *arguments)(threads.get_gomp_address(name))

number, count, inside = (c_function(n) for n in ("omp_get_thread_num", "omp_get_num_threads", "omp_in_parallel"))
barrier = c_function("GOMP_barrier", None)

def run(function, parts):
    body = REGION(lambda _: function())
    threads.run_parallel(ctypes.cast(body, ctypes.c_void_p).value, 0, parts)

def spin(seconds):
    nothing, end = threads.get_gomp_address("omp_get_thread_num"), time.monotonic() + seconds
    while time.monotonic() < end:
        threads.run_parallel(nothing, 0, 2)

pool = threads.get_pool()
"""
GUARD = 100  # seconds after which a script that hangs fails its test


def run_script(text, returncode=0, prefix=(), **environment):
    """The output of a script that begins with BEGIN, in a process of its own without settings of OpenMP."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_", "WHET_THREAD_POOL"))}
    command = [*prefix, sys.executable, "-c", BEGIN + textwrap.dedent(text)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=GUARD, env=kept | environment, check=False)
    assert ended.returncode == returncode, ended.stdout + ended.stderr
    return ended.stdout.split()


needs_pool = pytest.mark.skipif(sys.platform != "linux" or bool(machine_code.why_no_compiler()), reason="whet's own pool needs Linux and llvmlite")
pytestmark = needs_pool


def test_every_part_runs_once_with_its_number_and_its_team():
    text = """
    threads.set_threads(4)
    for parts in (2, 3, 4) * 50:
        seen = []
        run(lambda: seen.append((number(), count(), inside())), parts)
        assert sorted(seen) == [(k, parts, 1) for k in range(parts)], seen
    print(number(), count(), inside(), pool.workers)
    """
    assert run_script(text) == ["0", "1", "0", "3"]


def test_nobody_waits_for_threads_that_do_not_come():
    """Parts of absent workers are run by the threads that are there; libgomp waits for all of its threads."""
    text = """
    threads.set_threads(2)
    pool.words[ir.WORDS["workers"]] = 7
    seen = []
    run(lambda: seen.append(number()), 8)
    print(sorted(seen) == list(range(8)))
    """
    assert run_script(text) == ["True"]


def test_parts_may_wait_for_each_other():
    text = """
    threads.set_threads(4)
    for _ in range(200):
        before, after = [], []
        def part():
            before.append(number())
            barrier()
            after.append(len(before))
            barrier()
        run(part, 4)
        assert after == [4] * 4, after
    time.sleep(0.01)  # the workers sleep
    run(part, 4)
    print("passed")
    """
    assert run_script(text) == ["passed"]


@pytest.mark.parametrize(("loop", "chunk"), [((0, 10, 1), 0), ((0, 10, 1), 3), ((10, 0, -2), 0), ((10, -1, -2), 2), ((0, 1, 1), 0), ((5, 5, 1), 0)])
def test_static_loops_are_shared(loop, chunk):
    """All iterations are in one part each, in adjacent shares or in chunks that go round, as libgomp shares them."""
    text = f"""
    long, address = ctypes.c_long, ctypes.POINTER(ctypes.c_long)
    begin = c_function("GOMP_loop_static_start", ctypes.c_bool, long, long, long, long, address, address)
    following, end = c_function("GOMP_loop_static_next", ctypes.c_bool, address, address), c_function("GOMP_loop_end_nowait", None)
    first, last, step = {loop}
    def collect(parts):
        shares = {{}}
        def part():
            a, b, ranges = long(), long(), []
            more = begin(first, last, step, {chunk}, a, b)
            while more:
                ranges.append((a.value, b.value))
                more = following(a, b)
            end()
            shares[number()] = ranges
        run(part, parts)
        return shares
    threads.set_threads(3)
    own = collect(3)
    ranges = [r for part in own.values() for r in part]
    covered = [i for a, b in ranges for i in range(a, b, step)]
    print(pool is None, sorted(covered) == sorted(range(first, last, step)), sorted(own.items()))
    """
    own, gomp = run_script(text), run_script(text, WHET_THREAD_POOL="gomp")
    assert own[:2] == ["False", "True"]
    assert gomp[0] == "True"
    assert own[1:] == gomp[1:]


def test_a_region_inside_a_region_has_one_thread():
    text = """
    threads.set_threads(2)
    seen = []
    def inner(me):
        seen.append(("inner", number(), count()))
        run(lambda: seen.append(("innermost", number(), count())), 2)
        seen.append(("back", number(), count()))
    def outer():
        me = number()
        run(lambda: inner(me), 2)
        seen.append(("outer", number() == me, count()))
    run(outer, 2)
    print(sorted(set(seen)) == [("back", 0, 1), ("inner", 0, 1), ("innermost", 0, 1), ("outer", True, 2)], len(seen))
    """
    assert run_script(text) == ["True", "8"]


def test_a_thread_count_that_a_part_sets_ends_with_the_region():
    text = """
    threads.set_threads(2)
    seen = []
    def part():
        seen.append(threads.get_threads())
        threads.load_gomp().omp_set_num_threads(1)
    for _ in range(20):
        run(part, 2)
    print(set(seen), threads.get_threads())
    """
    assert run_script(text) == ["{2}", "2"]


def test_a_region_of_another_thread_runs_in_libgomp_while_the_pool_is_used():
    text = """
    threads.set_threads(2)
    seen, entered, leave = [], threading.Event(), threading.Event()
    def hold():
        entered.set()
        leave.wait()
    first = threading.Thread(target=lambda: (threads.set_threads(2), run(hold, 2)))
    first.start()
    entered.wait()
    run(lambda: seen.append((number(), count())), 2)
    leave.set()
    first.join()
    run(lambda: seen.append((number(), count())), 2)
    print(sorted(seen) == [(0, 2), (0, 2), (1, 2), (1, 2)])
    """
    assert run_script(text) == ["True"]


def test_many_threads_run_regions_of_their_own():
    text = """
    wrong, end = [], time.monotonic() + 3
    def work(k):
        threads.set_threads(2)
        while time.monotonic() < end:
            seen = []
            run(lambda: seen.append((number(), count())), 2)
            if sorted(seen) != [(0, 2), (1, 2)]:
                wrong.append(seen)
            if k % 4 == 0:
                time.sleep(0.001)
    workers = [threading.Thread(target=work, args=(k,)) for k in range(24)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    print(wrong)
    """
    assert run_script(text) == ["[]"]


def test_the_number_of_threads_may_change_between_regions():
    text = """
    for n in (2, 4, 1, 3, 6, 2):
        threads.set_threads(n)
        seen = []
        run(lambda: seen.append(number()), n)
        assert sorted(seen) == list(range(n)), (n, seen)
    print(pool.workers)
    """
    assert run_script(text) == ["5"]


@pytest.mark.parametrize("pause", [0, 0.0001, 0.01])
def test_the_interpreter_ends_with_workers_that_spin_or_sleep(pause):
    for _ in range(5):
        assert run_script(f"threads.set_threads(3)\nspin(0.01)\ntime.sleep({pause})\nprint('end')") == ["end"]


def test_the_interpreter_ends_while_another_thread_runs_regions():
    text = """
    threads.set_threads(2)
    threading.Thread(target=lambda: (threads.set_threads(2), spin(1000)), daemon=True).start()
    spin(0.05)
    print("end")
    """
    assert run_script(text) == ["end"]


def test_forks_before_and_after_regions_and_while_others_run():
    text = """
    def child_runs():
        child = os.fork()
        if child == 0:
            seen = []
            run(lambda: seen.append(number()), 2)  # in libgomp: no worker was started
            threads.set_threads(2)
            run(lambda: seen.append(number()), 2)
            os._exit(0 if sorted(seen) == [0, 0, 1, 1] and pool.workers == 1 else 1)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    codes = [child_runs()]
    threads.set_threads(2)
    codes.append(child_runs())
    spin(0.01)
    codes.append(child_runs())
    stop = []
    def other():
        threads.set_threads(2)
        while not stop:
            spin(0.005)
    thread = threading.Thread(target=other)
    thread.start()
    codes += [child_runs() for _ in range(20)]
    stop.append(1)
    thread.join()
    seen = []
    run(lambda: seen.append(number()), 2)
    print(set(codes), sorted(seen), pool.workers)
    """
    assert run_script(text) == ["{0}", "[0,", "1]", "1"]


def test_a_process_that_was_stopped_goes_on():
    text = BEGIN + "threads.set_threads(2)\nprint('begin', flush=True)\nspin(0.5)\nprint('end')"
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_", "WHET_THREAD_POOL"))}
    with subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begin\n"
        for _ in range(5):
            process.send_signal(signal.SIGSTOP)
            time.sleep(0.02)
            process.send_signal(signal.SIGCONT)
            time.sleep(0.02)
        assert process.communicate(timeout=GUARD)[0] == "end\n"
        assert process.returncode == 0


ONE_CPU = """
seen = []
for _ in range(200):
    run(lambda: seen.append(number()), 2)
spin(0.05)
print(sorted(set(seen)), len(seen))
"""


def test_one_cpu_for_two_threads():
    one = "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
    assert run_script(one + "threads.set_threads(2)" + ONE_CPU) == ["[0,", "1]", "400"]
    later = """
    threads.set_threads(2)
    spin(0.01)
    for task in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(task), {min(os.sched_getaffinity(0))})
    """
    later = textwrap.dedent(later)
    assert run_script(later + ONE_CPU) == ["[0,", "1]", "400"]


@pytest.fixture
def quota_group():
    """A control group of half a CPU, in either version of the hierarchy; skips where this process may not make one."""
    name = f"whet_test_{os.getpid()}"
    for base, files in (
        (Path("/sys/fs/cgroup/cpu"), {"cpu.cfs_period_us": "20000", "cpu.cfs_quota_us": "10000"}),
        (Path("/sys/fs/cgroup"), {"cpu.max": "10000 20000"}),
    ):
        group = base / name
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if all((group / file).exists() for file in files):
                for file, text in files.items():
                    (group / file).write_text(text)
                yield group
                return
        except OSError:
            pass
        finally:
            group.rmdir()
    pytest.skip("this process may not make control groups with a quota")


def test_half_a_cpu_for_four_threads(quota_group):
    """Fewer CPUs than threads by a quota: one thread is usable, more threads work nevertheless, also across a barrier and in a child."""
    text = """
    def compute():
        for parts in (2, 3, 4) * 20:
            seen = []
            def work():
                barrier()
                seen.append((number(), count()))
            run(work, parts)
            assert sorted(seen) == [(k, parts) for k in range(parts)], seen
    print(threads.get_cgroup_cpus(), threads.count_usable_cpus())
    threads.set_threads(4)
    compute()
    child = os.fork()
    if not child:
        threads.set_threads(4)
        compute()
        os._exit(7)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    enter = f"open({str(quota_group / 'cgroup.procs')!r}, 'w').write('0')\n"
    assert run_script(enter + textwrap.dedent(text)) == ["0.5", "1", "7"]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2 if hasattr(os, "sched_getaffinity") else True, reason="needs two CPUs")
def test_a_worker_leaves_the_cpu_of_the_calling_thread():
    text = """
    known = set(os.listdir("/proc/self/task"))
    threads.set_threads(2)
    worker = int(next(iter(set(os.listdir("/proc/self/task")) - known)))
    here = min(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {here})  # the calling thread
    os.sched_setaffinity(worker, {here})
    end = time.monotonic() + 60
    while here in os.sched_getaffinity(worker) and time.monotonic() < end:
        spin(0.005)
    print(here in os.sched_getaffinity(worker))
    """
    assert run_script(text) == ["False"]


def test_an_exception_in_a_part_does_not_end_the_region():
    text = """
    threads.set_threads(2)
    seen = []
    def part():
        seen.append(number())
        raise ValueError("not the caller's")
    sys.unraisablehook = lambda _: None
    run(part, 2)
    run(lambda: seen.append(number()), 2)
    print(sorted(seen))
    """
    assert run_script(text) == ["[0,", "0,", "1,", "1]"]


def test_workers_take_no_signals():
    text = """
    threads.set_threads(2)
    caught = []
    signal.signal(signal.SIGUSR1, lambda *_: caught.append(threading.get_native_id()))
    for _ in range(20):
        os.kill(os.getpid(), signal.SIGUSR1)
        spin(0.001)
    masks = [open(f"/proc/self/task/{t}/status").read() for t in os.listdir("/proc/self/task") if int(t) != os.getpid()]
    blocked = [int(line.split()[1], 16) for text in masks for line in text.splitlines() if line.startswith("SigBlk")]
    print(set(caught) == {os.getpid()}, all(b >> (signal.SIGUSR1 - 1) & 1 for b in blocked), len(blocked) >= 1)
    """
    assert run_script(text) == ["True", "True", "True"]


def test_users_choose_the_pool():
    show = "print(pool is None, threads.wait_settings()['pool'])"
    assert run_script(show) == ["False", "whet"]
    assert run_script(show, WHET_THREAD_POOL="whet") == ["False", "whet"]
    assert run_script(show, WHET_THREAD_POOL="gomp") == ["True", "libgomp"]
    assert run_script(show, GOMP_SPINCOUNT="77") == ["True", "libgomp"]
    assert run_script(show, OMP_WAIT_POLICY="passive") == ["True", "libgomp"]


def test_a_wrong_choice_is_refused(monkeypatch):
    monkeypatch.setenv("WHET_THREAD_POOL", "tbb")
    with pytest.raises(BackendError, match="neither 'whet'"):
        pool.why_no_pool()


def test_onednn_calls_the_pool():
    pytest.importorskip("llvmlite")
    text = """
    from whet.tactics.cpu.onednn._api import library
    from whet.backends.cpu import _imports
    if library.load_error() or library.load_library().runtime != "omp":
        print("skipped")
    else:
        slots = _imports.list_import_slots(library.load_library().lib)
        ours = {n: ctypes.c_uint64.from_address(a).value for n, a in slots.items() if n in pool.addresses}
        print(len(ours) > 3 and ours == {n: pool.addresses[n] for n in ours})
    """
    printed = run_script(text)
    if printed == ["skipped"]:
        pytest.skip("no oneDNN for libgomp")
    assert printed == ["True"]


def test_a_library_keeps_its_imports_if_one_has_no_replacement():
    library = ctypes.CDLL(threads.LIBRARY)
    before = {name: ctypes.c_uint64.from_address(at).value for name, at in _imports.list_import_slots(library).items()}
    some = next(name for name in before if name.startswith("pthread_"))
    assert not _imports.replace_imports(library, {some: 1}, ())
    assert {name: ctypes.c_uint64.from_address(at).value for name, at in _imports.list_import_slots(library).items()} == before


@pytest.mark.parametrize(("machine", "triple"), [("x86_64", "x86_64-unknown-linux-gnu"), ("aarch64", "aarch64-unknown-linux-gnu")])
def test_shared_words_are_read_and_written_by_atomic_instructions(machine, triple):
    """On AArch64 plain loads and stores may be reordered: each access is an acquire, a release, or part of a read-modify-write."""
    llvm = pytest.importorskip("llvmlite.binding")
    text = _pool_ir.emit_pool_ir(machine)
    table = re.findall(r"^.*(?:load|store) (?!atomic).*$", text, re.MULTILINE)
    allowed = ("@pool", "%time", "%s", "%ns", "%first", "%last", "%to", "%p", "%n.p", "%mask")  # the table's address and the thread's own memory
    assert all(any(f"i64* {name}" in line for name in allowed) for line in table), table
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    target = llvm.Target.from_triple(triple).create_target_machine(opt=3)
    module = llvm.parse_assembly(text if llvm.llvm_version_info[0] < 17 else machine_code.use_opaque_pointers(text))
    module.triple = triple
    assembly = target.emit_assembly(module)
    assert ("ldar" in assembly and "stlr" in assembly) if machine == "aarch64" else "lock" in assembly
