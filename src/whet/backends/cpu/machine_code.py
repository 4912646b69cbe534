"""JIT compilation of LLVM IR for this CPU: the launch loop, workers and whet's own kernels.

Compiled objects are kept in $WHET_CPU_CACHE, else in the user's cache folder: a convolution takes up to 0.3 s to compile, and 2 ms to load. Requires
llvmlite.
"""

from __future__ import annotations

import hashlib
import platform
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

from whet.backends import _code_cache
from whet.backends.cpu.info import select_above_limit
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
    try:
        import_module("llvmlite.binding")
    except ImportError:
        return "llvmlite, the compiler of whet's own kernels, is not installed: pip install 'whet[jit]'"
    return None


def load_function(ir: str | Generated, name: str) -> int:
    """Address of function `name` of a module given as IR text (typed pointers, as LLVM before 17 requires).

    Requires `why_no_compiler()` to be None.
    """
    with _in_llvm:
        return int(_load(ir).get_function_address(name))


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
def _load(ir: str | Generated) -> Any:
    """The module's code in memory."""
    import llvmlite.binding as llvm

    machine, target = get_target()
    folder = _find_folder()
    if folder is None:
        code = _compile(str(ir))
    else:
        key = hashlib.sha256("\0".join((target, ir if isinstance(ir, str) else ir.key)).encode()).hexdigest()
        path = folder / f"{key}.o"
        is_new = not path.exists()
        stored = _code_cache.get_cached_code(path, lambda: _with_digest(_compile(str(ir))))
        code = stored[_DIGEST:]
        if _with_digest(code) != stored:  # a damaged file
            path.unlink(missing_ok=True)
            code = _compile(str(ir))
        if is_new and next(_added) % _CHECK_EVERY == 0:
            _code_cache.limit_files(folder, _MOST_FILES)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _kept.append(engine)
    return engine


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
    return re.sub(r"(<\d+ x (i\d+|float|half)>|(i\d+|void) \([^()]*\)|i\d+|float|half)\*", "ptr", re.sub(r"\.p0v\d+(f32|i16)\b", ".p0", ir))
