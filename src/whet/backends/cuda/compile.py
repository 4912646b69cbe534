"""CUDA C++ to machine code with NVRTC, kept in a per-user cache. Needs no GPU and no host compiler."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.backends import _code_cache
from whet.errors import BackendError
from whet.forks import make_lock

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

_lock = make_lock()
_ahead: dict[str, Future[bytes]] = {}  # cache key -> compilation started by compile_ahead
_pool: ThreadPoolExecutor | None = None
FLAGS = ("--std=c++17", "-default-device", "--prec-div=false", "--prec-sqrt=false", "--extra-device-vectorization")


@functools.cache
def load_nvrtc() -> Any:
    """NVRTC's binding module. BackendError without the package or the library."""
    try:
        from cuda.bindings import nvrtc as module

        module.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        raise BackendError(f"NVRTC cannot be loaded ({error}). Install the extra with `pip install whet[cuda]`, or use --backend=cpu.") from error
    return module


@functools.cache
def get_nvrtc_version() -> str:
    """The version of the kernel compiler, as "13.0"."""
    _, major, minor = load_nvrtc().nvrtcVersion()
    return f"{major}.{minor}"


def cache_folder() -> Path:
    """Folder of compiled kernels: $WHET_CUDA_CACHE, else the user's cache folder. Raises BackendError if another user can write to it."""
    return _code_cache.cache_folder("WHET_CUDA_CACHE", "cubins")


def cache_key(source: str, arch: str, flags: tuple[str, ...] = FLAGS) -> str:
    """Hash of everything that can change the machine code: source, target, flags and compiler version."""
    text = "\0".join((source, arch, get_nvrtc_version(), *flags))
    return hashlib.sha256(text.encode()).hexdigest()


def compile_cubin(source: str, *, name: str = "kernel.cu", arch: str = "sm_90a", flags: tuple[str, ...] = FLAGS, cached: bool = True) -> bytes:
    """Machine code of `source` for `arch`. Raises BackendError with the compiler's log if it does not compile."""
    if not cached:
        return _compile(source, name, arch, flags)
    key = cache_key(source, arch, flags)
    running = _ahead.get(key)
    if running is not None:
        return running.result()
    return _read_or_compile(key, source, name, arch, flags)


def compile_ahead(sources: Iterable[str], arch: str = "sm_90a") -> None:
    """Starts background compilation of kernels that will be needed soon; compile_cubin waits for it. The compiler releases the GIL.

    Cached kernels are not loaded: most of them are never needed if the times of the candidates are known.
    """
    global _pool
    from concurrent.futures import ThreadPoolExecutor

    folder = cache_folder()
    with _lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0))), thread_name_prefix="nvrtc")
        for source in sources:
            key = cache_key(source, arch, FLAGS)
            if key not in _ahead and not (folder / f"{key}.cubin").exists():
                _ahead[key] = _pool.submit(_read_or_compile, key, source, "kernel.cu", arch, FLAGS)


def _forget_compilations() -> None:
    """In a child made by fork(): the parent's compiler threads do not exist there."""
    global _pool
    _pool = None
    _ahead.clear()


os.register_at_fork(after_in_child=_forget_compilations)


def _read_or_compile(key: str, source: str, name: str, arch: str, flags: tuple[str, ...]) -> bytes:
    return _code_cache.get_cached_code(cache_folder() / f"{key}.cubin", lambda: _compile(source, name, arch, flags))


def _compile(source: str, name: str, arch: str, flags: tuple[str, ...]) -> bytes:
    rtc = load_nvrtc()
    good = rtc.nvrtcResult.NVRTC_SUCCESS
    status, program = rtc.nvrtcCreateProgram(source.encode(), name.encode(), 0, [], [])
    if status != good:
        raise BackendError(f"NVRTC did not accept the kernel {name} ({status.name}).")
    try:
        options = [f"--gpu-architecture={arch}".encode(), *(flag.encode() for flag in flags)]
        (status,) = rtc.nvrtcCompileProgram(program, len(options), options)
        if status != good:
            raise BackendError(f"The kernel {name} does not compile for {arch} with NVRTC {get_nvrtc_version()}:\n{_log(rtc, program)}")
        _, size = rtc.nvrtcGetCUBINSize(program)
        code = b" " * size
        (status,) = rtc.nvrtcGetCUBIN(program, code)
        if status != good:
            raise BackendError(f"NVRTC gave no machine code for {name} ({status.name}).")
        return code
    finally:
        rtc.nvrtcDestroyProgram(program)


def _log(rtc: Any, program: Any) -> str:
    _, size = rtc.nvrtcGetProgramLogSize(program)
    log = b" " * size
    rtc.nvrtcGetProgramLog(program, log)
    return log.rstrip(b"\0 ").decode(errors="replace")
