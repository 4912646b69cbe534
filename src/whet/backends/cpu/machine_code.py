"""JIT compilation of LLVM IR for this CPU: the launch loop, workers and whet's own kernels.

Compiled objects are kept in $WHET_CPU_CACHE, else in the user's cache folder: a convolution takes up to 0.3 s to compile, and 0.5 ms to load.
Requires llvmlite, whose library is loaded when something is compiled: kept objects do without it on x86-64 (object_file.py).
"""

from __future__ import annotations

import hashlib
import importlib.util
import platform
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

from whet.backends import _code_cache
from whet.backends.cpu import object_file
from whet.backends.cpu.info import get_cpu_model, list_cpu_flags, read_cpuinfo, select_above_limit
from whet.errors import BackendError
from whet.forks import make_lock_held_during_fork

_MOST_FILES = 4096  # about 100 MB
_CHECK_EVERY = 32  # files that a process adds; listing a full folder takes milliseconds
_DIGEST = 32  # bytes of the digest before an object
_added = count()  # files
_kept: list[Any] = []  # compiled modules: their code lives as long as the process
_in_llvm = make_lock_held_during_fork()


@cache
def why_no_compiler() -> str | None:
    """Reason why this process cannot compile; None if it can."""
    if platform.machine().lower() not in ("x86_64", "amd64", "aarch64", "arm64"):
        return f"whet's own kernels are not written for {platform.machine()}"
    missing = sys.modules.get("llvmlite.binding", importlib.util.find_spec("llvmlite")) is None
    return "llvmlite, the compiler of whet's own kernels, is not installed: pip install 'whet[jit]'" if missing else None


def load_function(ir: str | Generated, name: str) -> int:
    """Address of function `name` of a module given as IR text (typed pointers, as LLVM before 17 requires).

    Requires `why_no_compiler()` to be None.
    """
    with _in_llvm:
        return load_object(ir)(name)


@dataclass(frozen=True)
class Generated:
    """IR that is generated only if no object of it is kept: `make(*arguments)`. The arguments' `repr` says all, and `sources` is a digest of
    all code that determines the text."""

    make: Callable[..., str]
    arguments: tuple[Any, ...]
    sources: str

    @property
    def key(self) -> str:
        return f"{self.make.__module__}.{self.make.__qualname__}{self.arguments!r} {self.sources}"

    def __str__(self) -> str:
        return self.make(*self.arguments)


@cache
def load_object(ir: str | Generated) -> Callable[[str], int]:
    """The module's code in memory, as the addresses of its functions by name."""
    folder = _find_folder()
    if folder is None:
        code = _compile(str(ir))
    else:
        key = hashlib.sha256("\0".join((_describe_compiler(), ir if isinstance(ir, str) else ir.key)).encode()).hexdigest()
        path = folder / f"{key}.o"
        is_new = not path.exists()
        stored = _code_cache.get_cached_code(path, lambda: _with_digest(_compile(str(ir))))
        code = stored[_DIGEST:]
        if _with_digest(code) != stored:  # a damaged file
            path.unlink(missing_ok=True)
            code = _compile(str(ir))
        if is_new and next(_added) % _CHECK_EVERY == 0:
            _code_cache.limit_files(folder, _MOST_FILES)
    try:
        return object_file.load_object(code).__getitem__
    except object_file.UnsupportedObject:
        return load_by_llvm(code)


def load_by_llvm(code: bytes) -> Callable[[str], int]:
    """The addresses of an object's functions by name, loaded by LLVM's linker."""
    import llvmlite.binding as llvm

    machine, _ = get_target()
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _kept.append(engine)
    return lambda name: int(engine.get_function_address(name))


@cache
def _describe_compiler() -> str:
    """Everything besides the IR that determines the code, if possible without loading LLVM: its library, and Linux's description of the CPU, from
    which LLVM's follows."""
    library = _find_library()
    if library is None or not read_cpuinfo():
        return get_target()[1]
    facts = library.stat()
    flags = " ".join(sorted(list_cpu_flags()))
    return f"{library} {facts.st_size} {facts.st_mtime_ns} {platform.machine()} {get_cpu_model()} {flags}"


def _find_library() -> Path | None:
    """llvmlite's shared library; None if it is not in llvmlite's folder."""
    spec = importlib.util.find_spec("llvmlite")
    if spec is None or spec.origin is None:
        return None
    return next(iter(sorted(Path(spec.origin).parent.glob("binding/libllvmlite.*"))), None)


@cache
def get_compiler_version() -> str:
    """LLVM's version. It is kept beside the objects, so that LLVM is not loaded for it again."""
    folder = _find_folder()
    if folder is None:
        return _read_llvm_version()
    path = folder / f"{hashlib.sha256(_describe_compiler().encode()).hexdigest()}.version"
    stored = _code_cache.get_cached_code(path, lambda: _with_digest(_read_llvm_version().encode()))
    text = stored[_DIGEST:]
    return text.decode() if _with_digest(text) == stored else _read_llvm_version()


def _read_llvm_version() -> str:
    import llvmlite.binding as llvm

    return "LLVM " + ".".join(map(str, llvm.llvm_version_info))


def _with_digest(code: bytes) -> bytes:
    return hashlib.sha256(code).digest() + code


def _compile(ir: str) -> bytes:
    """The object file of a module."""
    import llvmlite.binding as llvm

    machine, _ = get_target()
    module = llvm.parse_assembly(ir if llvm.llvm_version_info[0] < 17 else use_opaque_pointers(ir))
    module.verify()
    return bytes(machine.emit_object(module))


@cache
def get_target() -> tuple[Any, str]:
    """LLVM's description of this CPU, and everything besides the IR that determines the code, as text."""
    import llvmlite
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_default_triple()
    cpu, found = llvm.get_host_cpu_name(), llvm.get_host_cpu_features()
    found.update(dict.fromkeys(select_above_limit(found), False))
    features = found.flatten()
    machine = target.create_target_machine(cpu=cpu, features=features, opt=3, jit=True)
    version = ".".join(map(str, llvm.llvm_version_info))
    return machine, f"{target.triple} {cpu} {features} LLVM {version} llvmlite {llvmlite.__version__}"


def _find_folder() -> Path | None:
    """The folder of compiled objects; None if there is none that only this user can write."""
    try:
        return _code_cache.cache_folder("WHET_CPU_CACHE", "objects")
    except (OSError, BackendError):
        return None


def use_opaque_pointers(ir: str) -> str:
    """Converts typed pointers to LLVM 17's opaque pointers."""
    return re.sub(r"(<\d+ x (i\d+|float|half)>|(i\d+|void) \([^()]*\)|i\d+|float|half)\*", "ptr", re.sub(r"\.p0v\d+(f32|i8|i16)\b", ".p0", ir))
