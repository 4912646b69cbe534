"""fork() after an engine was loaded: the CPU's threads are started again in the child, and a GPU refuses with the reason."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import whet
from whet.backends.cpu import pools, threads
from whet.backends.cuda import driver
from whet.errors import ContextError
from whet.network import Network, parse_type

FOLDERS = [Path(__file__).parents[1] / "builder", Path(__file__).parents[2] / "src"]


def run_script(text: str, engine: Path | str = "") -> str:
    """Standard output of a Python script that forks; a child that hangs ends the test after two minutes."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, FOLDERS)), "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(text), str(engine)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


NET = """
from nets import inputs, residual
from whet.builder import BuildConfig

net = residual(batch=4, channels=32, size=16)
config = BuildConfig(timing_cache="", avg_timing=1, whole_engines=1, threads=2, samples="together", optimization_level=1)
"""
FORK = """
import os, threading

def in_a_child(work):
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException as e:
            print(type(e).__name__, e, flush=True)
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
"""
BEGIN = f"""
import multiprocessing, sys
import numpy as np
import whet
{NET}{FORK}
engine = whet.Runtime(threads=2).load(sys.argv[1])
context = engine.create_context()
feed = inputs(net)
want = context.run(feed)["y"]
fork = multiprocessing.get_context("fork")
"""


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """The engine file that the scripts load."""
    file = tmp_path_factory.mktemp("fork") / "e.engine"
    run_script(f"import sys, whet\n{NET}\nwhet.write_engine(whet.builder.build(net, config), sys.argv[1])", file)
    return file


def test_a_pool_of_forked_processes_runs_the_parent_s_engine_and_the_parent_goes_on(engine):
    text = """
    def run(k):
        with engine.create_context() as own:
            return np.array_equal(own.run(feed)["y"], want) and np.array_equal(context.run(feed)["y"], want)

    with fork.Pool(3) as pool:
        print(pool.map(run, range(12)) == [True] * 12, np.array_equal(context.run(feed)["y"], want))
    """
    assert run_script(BEGIN + textwrap.dedent(text), engine).split() == ["True", "True"]


def test_a_child_builds_loads_and_forks_again(engine):
    text = """
    def grandchild():
        assert np.array_equal(context.run(feed)["y"], want)

    def child():
        other = whet.Runtime(threads=2).load(whet.builder.build(net, config)).create_context()
        assert np.allclose(other.run(feed)["y"], want, atol=1e-4)
        assert in_a_child(grandchild) == 0

    print(in_a_child(child))
    """
    assert run_script(BEGIN + textwrap.dedent(text), engine).split() == ["0"]


def test_a_lock_held_by_another_thread_at_the_fork_is_free_in_the_child(engine):
    text = """
    held, done = threading.Event(), threading.Event()

    def hold():
        with engine._lock, context._lock:
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()

    def child():
        assert np.array_equal(context.run(feed)["y"], want)
        engine.create_context()

    print(in_a_child(child))
    done.set()
    thread.join()
    """
    assert run_script(BEGIN + textwrap.dedent(text), engine).split() == ["0"]


def test_threads_that_run_while_another_one_forks_are_not_disturbed(engine):
    text = """
    stop, wrong = threading.Event(), []

    def work():
        own = engine.create_context()
        while not stop.is_set():
            if not np.array_equal(own.run(feed)["y"], want):
                wrong.append(1)

    workers = [threading.Thread(target=work) for _ in range(3)]
    for w in workers:
        w.start()

    def child():
        assert np.array_equal(engine.create_context().run(feed)["y"], want)

    codes = [in_a_child(child) for _ in range(10)]
    stop.set()
    for w in workers:
        w.join()
    print(codes == [0] * 10, wrong == [])
    """
    assert run_script(BEGIN + textwrap.dedent(text), engine).split() == ["True", "True"]


def test_a_fork_waits_until_other_threads_have_left_a_native_library(engine):
    """LLVM's and oneDNN's own locks cannot be renewed in the child: a thread inside at the fork would lock them there for ever."""
    text = """
    import time
    from whet.backends.cpu import machine_code
    from whet.tactics.cpu.onednn._api.library import _creating
    inside, left = threading.Event(), []

    def compile_slowly():
        with machine_code._in_llvm, _creating:
            inside.set()
            time.sleep(0.3)
            left.append(1)

    thread = threading.Thread(target=compile_slowly)
    thread.start()
    inside.wait()

    def child():
        assert left == [1]
        for _ in range(2):
            assert np.array_equal(engine.create_context().run(feed)["y"], want)

    print(in_a_child(child))
    thread.join()
    with machine_code._in_llvm, _creating:
        print(in_a_child(child))
    """
    assert run_script(BEGIN + textwrap.dedent(text), engine).split() == ["0", "0"]


def test_a_cached_property_that_another_thread_computes_at_the_fork_is_free_in_the_child():
    text = """
    from whet.forks import cached_property
    inside, done = threading.Event(), threading.Event()

    class Slow:
        def __init__(self, waits):
            self.waits = waits

        @cached_property
        def value(self):
            if self.waits:
                inside.set()
                done.wait()
            return 3

    thread = threading.Thread(target=lambda: Slow(True).value)
    thread.start()
    inside.wait()

    def child():
        assert Slow(False).value == 3

    print(in_a_child(child))
    done.set()
    thread.join()
    """
    assert run_script(FORK + textwrap.dedent(text)).split() == ["0"]


def test_where_the_pool_cannot_be_ended_the_child_raises_instead_of_hanging(engine):
    text = """
    from whet.backends.cpu import threads

    class Oldest:
        name, address, survives_fork = "tbb", threads.get_gomp_address("omp_set_num_threads"), False

        def set(self, count):
            pass

    threads.register_pool(Oldest())

    def child():
        context.run(feed)

    def loads():
        whet.Runtime().load(engine.plan)

    print(in_a_child(child), in_a_child(loads), np.array_equal(context.run(feed)["y"], want))
    """
    lines = run_script(BEGIN + textwrap.dedent(text), engine).splitlines()
    assert lines[-1] == "1 1 True"
    assert all(line.startswith("ContextError fork() does not copy the threads of tbb") and "'spawn'" in line for line in lines[:2])


def test_a_gpu_opened_by_the_parent_raises_in_the_child(monkeypatch):
    class Opened:
        """A driver module that the parent has loaded."""

        @staticmethod
        def cache_info():
            return type("Info", (), {"currsize": 1})

    monkeypatch.setattr(driver, "load_driver", Opened)
    device = driver.Device.__new__(driver.Device)
    device.lost = ""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        said = []
        for use in (driver.open_device, device.make_current, lambda: driver.release(device, lambda handle: said.append("released"), 1)):
            try:
                use()
            except ContextError as e:
                said.append(str(e))
        os.write(write, "\n".join(said).encode())
        os._exit(0)
    os.waitpid(child, 0)
    said = os.read(read, 10000).decode().splitlines()
    assert len(said) == 2
    assert all("a CUDA context does not survive fork()" in s and "load the engine in the child" in s for s in said)
    assert driver.why_lost_by_fork() == ""


def test_an_engine_whose_device_is_lost_by_the_fork_raises(monkeypatch):
    net = Network("twice")
    x = net.add_input("x", parse_type("f32[4]"))
    net.mark_output(net.add("Add", x, x), "y")
    engine, feed = whet.Runtime().load(whet.builder.build(net, whet.BuildConfig(timing_cache="", optimization_level=0))), {"x": np.ones(4, "f4")}
    context = engine.create_context()
    monkeypatch.setattr(type(engine.backend), "unusable_after_fork", property(lambda self: "load the engine in the child or use spawn"))
    context.run(feed)  # no child: nothing is asked
    monkeypatch.setattr("whet.forks.generation", -1)  # as in a child
    for use in (lambda: context.run(feed), engine.create_context):
        with pytest.raises(ContextError, match="load the engine in the child"):
            use()


def test_pools_say_if_they_survive_a_fork():
    assert not pools.Tbb.survives_fork
    assert threads.why_lost_by_fork() == ""
