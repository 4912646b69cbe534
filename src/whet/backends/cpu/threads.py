"""The process's threads on CPUs: whet's own pool (pool.py), which oneDNN's default build and whet's own kernels both use, or libgomp's.

libgomp's functions are the interface of both. Its own threads run regions that the pool cannot run, and all of them if there is no pool
(`why_no_pool`). libgomp reads its environment once, when it is loaded, and by default a thread that waits at the end of a parallel region spins
for about 3 ms before it sleeps. If external load puts two of the pool's threads on one core, the spinning thread occupies the core that the
working thread needs, and every layer takes a scheduler time slice: ten times slower (measured: docs/design/threads.md). So this
module loads libgomp before oneDNN does, with GOMP_SPINCOUNT set, unless the user has set a wait policy.

The number of threads in libgomp is a setting of the *calling thread*: call `set_threads` in each thread that builds or runs. The pool of a build
of oneDNN for another run-time library is registered here (pools.py). macOS has no libgomp: without it a parallel region runs its parts one after
another there (Sequential).
"""

import atexit
import ctypes
import math
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from whet.backends.cpu._imports import replace_imports
from whet.backends.cpu.pool import PER_THREAD, SHORT_SPIN_S, ThreadPool, load_pool, why_no_pool
from whet.backends.cpu.pools import Pool
from whet.errors import BackendError, ContextError
from whet.forks import make_lock_held_during_fork

#: spins before a waiting thread sleeps: about 20 us here, longer than the gap between layers, much shorter than a scheduler time slice
SPIN_COUNT = 1000
LIBRARY = "libgomp.so.1" if sys.platform == "linux" else "libgomp.1.dylib"
_PAUSE_HARD = 2  # omp_pause_hard: release threads and their memory
_joined: list[Pool] = []
_starting = make_lock_held_during_fork()  # workers
_pool_ended = False  # the result of the last `_end_pool`
_lost = ""  # see why_lost_by_fork
_workers_before_fork = 0


class Sequential:
    """The functions of libgomp that whet calls, without threads: the parts of a parallel region run one after another in the calling thread."""

    def __init__(self) -> None:
        self._state = threading.local()
        region = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

        def parallel(function: int, context: int | None, count: int, flags: int) -> None:
            self._state.team = count or get_most()
            try:
                for part in range(self._state.team):
                    self._state.part = part
                    region(function)(context)
            finally:
                self._state.part, self._state.team = 0, 1

        def get_most() -> int:
            return getattr(self._state, "most", 1)

        def set_most(count: int) -> None:
            self._state.most = count

        number = ctypes.CFUNCTYPE(ctypes.c_int)
        self.GOMP_parallel = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)(parallel)
        self.omp_get_thread_num = number(lambda: getattr(self._state, "part", 0))
        self.omp_get_num_threads = number(lambda: getattr(self._state, "team", 1))
        self.omp_get_max_threads = number(get_most)
        self.omp_set_num_threads = ctypes.CFUNCTYPE(None, ctypes.c_int)(set_most)
        self.omp_pause_resource_all = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)(lambda kind: 0)


@cache
def load_gomp() -> ctypes.CDLL | Sequential:
    """libgomp, loaded with whet's settings if it is not loaded yet. Where Linux's packages do not provide it: `Sequential`.

    Raises BackendError if it is missing on Linux, naming the packages that provide it.
    """
    settings = _get_gomp_settings()
    added = {name: value for name, value in settings.items() if name not in os.environ}
    os.environ.update(added)  # also calls putenv(); libgomp's constructor reads that environment
    try:
        lib = ctypes.CDLL(LIBRARY, mode=os.RTLD_NOW)
    except OSError as error:
        if sys.platform != "linux":
            return Sequential()
        raise BackendError(
            f"{LIBRARY}, the OpenMP run-time library that the CPU backend needs, cannot be loaded ({error}). Install it: "
            "'apt-get install libgomp1' (Debian, Ubuntu), 'dnf install libgomp' (Fedora, RHEL), 'apk add libgomp' (Alpine)."
        ) from None
    finally:
        for name in added:  # child processes that import whet set their own
            del os.environ[name]
    lib.GOMP_parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    lib.GOMP_parallel.restype = None
    lib.omp_set_num_threads.argtypes = [ctypes.c_int]
    lib.omp_set_num_threads.restype = None
    lib.omp_pause_resource_all.argtypes = [ctypes.c_int]
    return lib


@cache
def _get_gomp_settings() -> dict[str, str]:
    """Environment variables to set while libgomp loads; {} if it is already loaded and would not read them."""
    if is_gomp_loaded() or "OMP_WAIT_POLICY" in os.environ or "GOMP_SPINCOUNT" in os.environ:
        return {}
    return {"GOMP_SPINCOUNT": str(SPIN_COUNT)}


@cache
def get_pool() -> ThreadPool | None:
    """whet's own pool; None if libgomp's threads run all regions."""
    gomp = load_gomp()
    return None if isinstance(gomp, Sequential) or why_no_pool() else load_pool(gomp)


def lend_pool(library: ctypes.CDLL) -> bool:
    """Makes a library that was compiled for libgomp use whet's pool. False if it imports functions that the pool does not have: it keeps libgomp's.
    """
    pool = get_pool()
    if pool is None:
        return False
    lent = replace_imports(library, pool.addresses, PER_THREAD)
    if not lent:
        pool.set_spin(SHORT_SPIN_S)
    return lent


def is_gomp_loaded() -> bool:
    """True if this process has loaded the system's libgomp (torch and scikit-learn ship copies with other names)."""
    try:
        ctypes.CDLL(LIBRARY, mode=os.RTLD_NOW | os.RTLD_NOLOAD)
    except OSError:
        return False
    return True


def wait_settings() -> dict[str, str]:
    """The current wait policy and its origin, for reports and for the key of the timing cache.

    Keys: `spin` (the current GOMP_SPINCOUNT, or 'OMP_WAIT_POLICY=...', or 'default', of libgomp's threads);
    `set_by` ('whet', 'user' or 'loaded before whet'); `pool` ('whet' or 'libgomp').
    """
    return _get_gomp_wait_settings() | {"pool": "libgomp" if get_pool() is None else "whet"}


def _get_gomp_wait_settings() -> dict[str, str]:
    ours = _get_gomp_settings()
    if isinstance(load_gomp(), Sequential):
        return {"spin": "no threads", "set_by": "whet"}
    if ours:
        return {"spin": ours["GOMP_SPINCOUNT"], "set_by": "whet"}
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        if name in os.environ:
            return {"spin": os.environ[name] if name == "GOMP_SPINCOUNT" else f"{name}={os.environ[name]}", "set_by": "user"}
    return {"spin": "default", "set_by": "loaded before whet"}


def count_usable_cpus() -> int:
    """Number of CPUs available to this process: its current affinity, limited by the cgroup's quota (rounded down, at least 1)."""
    return 1 if isinstance(load_gomp(), Sequential) else max(1, math.floor(min(count_affinity_cpus(), get_cgroup_cpus())))


def count_affinity_cpus() -> int:
    """Number of CPUs that this process may be scheduled on; all of them on systems without affinities."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def get_cgroup_cpus(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> float:
    """CPUs that the control groups allow, as a fraction (a quota of 150 ms in 100 ms is 1.5); infinity without a limit.

    Every group from the process's own up to the root may set a quota; the smallest applies. Both cgroup versions are read.
    """
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:
        return math.inf
    quotas = [math.inf]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = root if not controllers else root / "cpu"
        for group in (Path(path.lstrip("/")), *Path(path.lstrip("/")).parents):
            quotas.append(_read_quota(base / group))
    return min(quotas)


def _read_quota(group: Path) -> float:
    """Quota of one control group in CPUs; infinity if it has none or is not visible."""
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text(encoding="utf-8").split()
            return math.inf if quota == "max" else int(quota) / int(period)
        quota, period = (group / "cpu.cfs_quota_us").read_text(encoding="utf-8"), (group / "cpu.cfs_period_us").read_text(encoding="utf-8")
        return math.inf if int(quota) <= 0 else int(quota) / int(period)
    except (OSError, ValueError):
        return math.inf


def get_threads() -> int:
    """Number of threads of the calling thread's next parallel region."""
    return int(load_gomp().omp_get_max_threads())


def set_threads(count: int) -> None:
    """Sets the number of threads (at least 1) of the calling thread's parallel regions, including oneDNN's.

    Raises ContextError in a child made by fork() that cannot use its parent's pool.
    """
    if _lost:
        raise ContextError(_lost)
    if count < 1:
        raise BackendError(f"a thread pool has at least one thread, not {count}. Use 1 to run without workers.")
    load_gomp().omp_set_num_threads(count)
    own = get_pool()
    if own is not None and own.workers < count - 1:
        with _starting:
            own.start_workers(count - 1)
    for pool in _joined:
        pool.set(count)


@contextmanager
def limited_threads(count: int) -> Iterator[None]:
    """The calling thread's parallel regions have `count` threads inside the block, and as many as before after it."""
    before = get_threads()
    set_threads(count)
    try:
        yield
    finally:
        set_threads(before)


def register_pool(pool: Pool) -> None:
    """Registers a pool: `set_threads` and every run set its thread count too. Its initial count is the calling thread's."""
    pool.set(get_threads())
    _joined.append(pool)
    if (own := get_pool()) is not None:
        own.set_spin(SHORT_SPIN_S)


def list_setters() -> list[int]:
    """Addresses of the C functions void(int) that set the thread counts of all pools, for the calling thread."""
    return [get_gomp_address("omp_set_num_threads"), *(pool.address for pool in _joined)]


def run_parallel(function: int, context: int, count: int) -> None:
    """Runs `function(context)` (addresses; C type void(void*)) on `count` threads of the pool and wait for all of them.

    The function gets the index of its part from `omp_get_thread_num` (see `address`). A Python callback works, but takes the GIL.
    """
    _REGION(get_gomp_address("GOMP_parallel"))(function, context, count, 0)


def wake_workers() -> None:
    """Wakes the pool's threads, as a layer with several threads does."""
    pool = get_pool()
    if pool is None:
        run_parallel(get_gomp_address("omp_get_thread_num"), 0, get_threads())
    else:
        pool.wake()


def why_lost_by_fork() -> str:
    """The reason why this process, made by fork(), cannot use the pool of its parent; "" if it can."""
    return _lost


def _end_pool() -> None:
    """Ends the calling thread's pool before fork(): only the calling thread exists in the child, where a pool would wait forever for the others.

    Parent and child start new threads at their next parallel region (about 0.1 ms).
    """
    global _pool_ended, _workers_before_fork
    if get_pool.cache_info().currsize and (pool := get_pool()) is not None:
        with _starting:
            _workers_before_fork = pool.stop()
    if load_gomp.cache_info().currsize:
        _pool_ended = load_gomp().omp_pause_resource_all(_PAUSE_HARD) == 0


def _start_workers_again() -> None:
    if _workers_before_fork and (pool := get_pool()) is not None:
        with _starting:
            pool.start_workers(_workers_before_fork)


def _mark_lost_after_fork() -> None:
    global _lost
    if get_pool.cache_info().currsize and (pool := get_pool()) is not None:
        pool.forget_workers()
    if not load_gomp.cache_info().currsize:
        return
    kept = [pool.name for pool in _joined if not pool.survives_fork]
    if kept or not _pool_ended:
        _lost = f"fork() does not copy the threads of {kept[0] if kept else LIBRARY}, so this child process cannot run whet's kernels. "
        _lost += "Start processes with multiprocessing's 'spawn' or 'forkserver' and load the engine in the child."


def _stop_at_exit() -> None:
    """The workers' code is freed when the interpreter ends."""
    if get_pool.cache_info().currsize and (pool := get_pool()) is not None:
        with _starting:
            pool.stop()


os.register_at_fork(before=_end_pool, after_in_child=_mark_lost_after_fork, after_in_parent=_start_workers_again)
atexit.register(_stop_at_exit)
_REGION = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)


def get_gomp_address(name: str) -> int:
    """Address of a function with libgomp's interface, for kernels compiled at run time: GOMP_parallel, GOMP_barrier, omp_get_thread_num, ...

    The pool's function if there is a pool.
    """
    pool = get_pool()
    if pool is not None and name in pool.addresses:
        return pool.addresses[name]
    value = ctypes.cast(getattr(load_gomp(), name), ctypes.c_void_p).value
    if value is None:
        raise BackendError(f"{LIBRARY} has no function {name}; a libgomp of GCC 9 or newer is needed.")
    return value
