"""The thread pool: settings that libgomp reads, users' settings kept, thread counts from affinity and control groups."""

import ctypes
import math
import os
import subprocess
import sys

import pytest

from whet.backends.cpu import threads
from whet.errors import BackendError


def child(code, **environment):
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_", "WHET_THREAD_POOL"))}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env={**kept, **environment})
    return done.stdout + done.stderr


SHOW = "from whet.backends.cpu import threads; import os; print(threads.wait_settings(), os.environ.get('GOMP_SPINCOUNT'))"


def test_libgomp_reads_the_short_spin_and_children_do_not_inherit_it():
    text = child(SHOW, OMP_DISPLAY_ENV="verbose")
    assert "GOMP_SPINCOUNT = '1000'" in text, "what libgomp itself reports"
    assert "{'spin': '1000', 'set_by': 'whet', 'pool': 'whet'} None" in text


@pytest.mark.parametrize(("name", "value"), [("GOMP_SPINCOUNT", "77"), ("OMP_WAIT_POLICY", "passive")])
def test_a_users_setting_is_kept(name, value):
    text = child(SHOW, OMP_DISPLAY_ENV="verbose", **{name: value})
    assert "'set_by': 'user', 'pool': 'libgomp'" in text
    assert "GOMP_SPINCOUNT = '77'" in text or "OMP_WAIT_POLICY = 'PASSIVE'" in text


def test_a_libgomp_loaded_earlier_is_reported():
    text = child("import ctypes; ctypes.CDLL('libgomp.so.1')\n" + SHOW)
    assert "'set_by': 'loaded before whet'" in text


def test_parallel_runs_on_each_thread():
    seen = []
    number = ctypes.CFUNCTYPE(ctypes.c_int)(threads.get_gomp_address("omp_get_thread_num"))
    body = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: seen.append(number()))
    threads.run_parallel(ctypes.cast(body, ctypes.c_void_p).value, 0, 3)
    assert sorted(seen) == [0, 1, 2]


def test_thread_counts():
    before = threads.get_threads()
    threads.set_threads(3)
    assert threads.get_threads() == 3
    threads.set_threads(before)
    with pytest.raises(BackendError, match="at least one"):
        threads.set_threads(0)
    assert threads.get_gomp_address("GOMP_parallel") != threads.get_gomp_address("GOMP_barrier")


def test_usable_cpus_follow_affinity():
    assert 1 <= threads.count_usable_cpus() <= len(os.sched_getaffinity(0))
    pin = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
    pinned = child(pin + "from whet.backends.cpu import threads; print(threads.count_usable_cpus())")
    assert pinned.strip() == "1"


def group(tmp_path, membership, files):
    for name, text in files.items():
        path = tmp_path / "fs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "cgroup").write_text(membership)
    return threads.get_cgroup_cpus(tmp_path / "fs", tmp_path / "cgroup")


def test_cgroup_quotas(tmp_path):
    assert group(tmp_path / "a", "0::/pod/box\n", {"pod/cpu.max": "150000 100000\n", "pod/box/cpu.max": "max 100000\n"}) == 1.5
    assert group(tmp_path / "b", "0::/\n", {"cpu.max": "max 100000\n"}) == math.inf
    one = {"cpu/box/cpu.cfs_quota_us": "50000\n", "cpu/box/cpu.cfs_period_us": "100000\n"}
    assert group(tmp_path / "c", "4:cpu,cpuacct:/box\n3:memory:/box\n", one) == 0.5
    assert group(tmp_path / "d", "4:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}) == math.inf
