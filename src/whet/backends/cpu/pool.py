"""whet's own thread pool, for its kernels and for oneDNN. libgomp's threads wait for each other at the end of every parallel region; here nobody
waits for a thread that does not run.

A region of `n` parts is one function that is called n times. The calling thread and the workers take the parts one by one, so that the calling
thread computes all of them if no worker is awake or the system runs other programs on the workers' CPUs. Parts may wait for each other (`barrier`):
there are at least as many threads as parts. A worker spins for SPIN_S after its last part, and yields to all other threads meanwhile; then it sleeps.
It leaves the CPU of the calling thread: a virtual machine's scheduler often wakes a thread on the CPU of the one that wakes it, where both would
take turns.

A region that begins while another thread's region uses the pool, or with more parts than threads, runs in libgomp.
"""

from __future__ import annotations

import ctypes as C
import os
import platform
import signal
import sys
from functools import cache

from whet.backends.cpu import _pool_ir as ir
from whet.backends.cpu.machine_code import load_function, why_no_compiler
from whet.errors import BackendError

VARIABLE = "WHET_THREAD_POOL"  # "gomp": libgomp's threads run all regions
SPIN_S = 2e-4  # longer than most sequences of small layers that run on one thread
SHORT_SPIN_S = 2e-5  # beside another pool, whose threads need the CPUs as soon as a region ends here
WAIT_S = 1e-4  # of the calling thread for the last part before it sleeps
_LIBC = {
    "get_record": "pthread_getspecific", "set_record": "pthread_setspecific", "system_call": "syscall", "get_cpu": "sched_getcpu",
    "get_time": "clock_gettime", "yield": "sched_yield",
}  # fmt: skip
_GOMP = {
    "gomp_start": "GOMP_parallel_start", "gomp_end": "GOMP_parallel_end", "gomp_thread": "omp_get_thread_num", "gomp_threads": "omp_get_num_threads",
    "gomp_nested": "omp_in_parallel", "gomp_barrier": "GOMP_barrier", "gomp_most": "omp_get_max_threads", "gomp_set_most": "omp_set_num_threads",
    "gomp_loop": "GOMP_loop_static_start", "gomp_next": "GOMP_loop_static_next", "gomp_loop_end": "GOMP_loop_end_nowait",
}  # fmt: skip
REPLACED = {
    "GOMP_parallel": "whet_parallel", "GOMP_parallel_start": "whet_parallel_start", "GOMP_parallel_end": "whet_parallel_end",
    "omp_get_thread_num": "whet_thread_num", "omp_get_num_threads": "whet_num_threads", "omp_in_parallel": "whet_in_parallel",
    "GOMP_barrier": "whet_barrier", "GOMP_loop_static_start": "whet_loop_start", "GOMP_loop_static_next": "whet_loop_next",
    "GOMP_loop_end_nowait": "whet_loop_end",
}  # fmt: skip
"""libgomp's functions that the pool has instead."""
PER_THREAD = ("omp_get_max_threads", "omp_set_num_threads")
"""libgomp's functions that remain: settings of the calling thread."""


def why_no_pool() -> str | None:
    """The reason why libgomp's pool is used; None if whet has its own."""
    if sys.platform != "linux":
        return "only Linux has the system calls of whet's own pool"
    chosen = os.environ.get(VARIABLE, "whet")
    if chosen not in ("whet", "gomp"):
        raise BackendError(f"{VARIABLE}={chosen} is neither 'whet' (the default) nor 'gomp'.")
    if chosen == "gomp":
        return f"{VARIABLE}=gomp"
    if named := next((n for n in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT") if n in os.environ), None):
        return f"{named} is set, which describes libgomp's threads"
    return why_no_compiler()


class ThreadPool:
    """The process's workers. `addresses` are the C functions that replace libgomp's, by libgomp's names; `words` is the table of _pool_ir.py."""

    def __init__(self, gomp: C.CDLL) -> None:
        self._libc = C.CDLL(None)
        machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine().lower())
        text = ir.emit_pool_ir(machine)
        self.words = _allocate_words(self._libc, ir.SIZE)
        names = ("whet_pool_set", "whet_pool_wake", "whet_pool_lock", "whet_pool_stop", "whet_pool_unlock", "whet_worker_thread")
        self._functions = {name: load_function(text, name) for name in (*names, *REPLACED.values())}
        self.addresses = {name: self._functions[own] for name, own in REPLACED.items()}
        self._threads: list[C.c_ulong] = []
        for table, library in ((_LIBC, self._libc), (_GOMP, gomp)):
            for name, function in table.items():
                self.words[ir.EXTERNAL[name]] = C.cast(getattr(library, function), C.c_void_p).value or 0
        key = C.c_uint()
        self._libc.pthread_key_create(C.byref(key), None)
        self.words[ir.WORDS["key"]] = key.value
        self.words[ir.WORDS["wait_ns"]] = int(1e9 * WAIT_S)
        self.set_spin(SPIN_S)
        C.CFUNCTYPE(None, C.c_void_p)(self._functions["whet_pool_set"])(C.addressof(self.words))

    @property
    def workers(self) -> int:
        """Number of threads besides the calling one."""
        return len(self._threads)

    def start_workers(self, count: int) -> None:
        """Starts workers until there are `count`; the threads have no signals and the process's CPUs."""
        count = min(count, ir.CAPACITY)
        if count <= self.workers:
            return
        mask = sum(1 << cpu for cpu in os.sched_getaffinity(0))
        for k in range(ir.AFFINITY_WORDS):
            self.words[ir.AFFINITY + k] = _to_signed(mask >> (64 * k) & (1 << 64) - 1)
        self.words[ir.WORDS["affinity_bytes"]] = 8 * ir.AFFINITY_WORDS
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            while self.workers < count and self._start_worker(self.workers + 1):
                pass
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def _start_worker(self, index: int) -> bool:
        """False if the system starts no more threads; regions with more parts than threads run in libgomp then."""
        at = ir.RECORDS + index * ir.RECORD
        self.words[at : at + ir.RECORD] = [0] * ir.RECORD
        self.words[at + ir.CPU], self.words[at + ir.INDEX] = -1, index
        thread = C.c_ulong()
        function, record = C.c_void_p(self._functions["whet_worker_thread"]), C.c_void_p(C.addressof(self.words) + 8 * at)
        if self._libc.pthread_create(C.byref(thread), None, function, record):
            return False
        self._threads.append(thread)
        self.words[ir.WORDS["workers"]] = index
        return True

    def set_spin(self, seconds: float) -> None:
        """How long a worker without work waits before it sleeps."""
        self.words[ir.WORDS["spin_ns"]] = int(1e9 * seconds)

    def wake(self) -> None:
        """Wakes the workers and waits until they run, for 1 ms at most."""
        self._call("whet_pool_wake")

    def stop(self) -> int:
        """Ends the workers when the current region has ended, and returns how many there were. Later regions run in libgomp."""
        count = self.workers
        if count:
            self._call("whet_pool_lock")
            self._call("whet_pool_stop")
            for thread in self._threads:
                self._libc.pthread_join(thread, None)
            self._threads = []
            self._call("whet_pool_unlock")
        return count

    def forget_workers(self) -> None:
        """In a child made by fork(), which has none: the pool is free and has no workers."""
        self._threads = []
        for name in ("workers", "busy", "sleeping", "stop"):
            self.words[ir.WORDS[name]] = 0

    def _call(self, name: str) -> None:
        C.CFUNCTYPE(None)(self._functions[name])()


def _allocate_words(libc: C.CDLL, count: int) -> C.Array:
    """Zeroed words that are never freed: a thread may read them until the process ends."""
    libc.aligned_alloc.argtypes, libc.aligned_alloc.restype = [C.c_size_t, C.c_size_t], C.c_void_p
    address = libc.aligned_alloc(64, -(-8 * count // 64) * 64)
    if not address:
        raise MemoryError("no memory for the thread pool")
    C.memset(address, 0, 8 * count)
    return (C.c_int64 * count).from_address(address)


def _to_signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


@cache
def load_pool(gomp: C.CDLL) -> ThreadPool:
    """The process's pool, without workers yet."""
    return ThreadPool(gomp)
