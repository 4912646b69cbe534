"""JIT compilation of LLVM IR for this CPU: the launch loop, workers and whet's own kernels.

Nothing is stored: compilation takes milliseconds, less than checking and loading a stored object. Requires llvmlite.
"""

from __future__ import annotations

import platform
import re
from functools import cache
from importlib import import_module
from typing import Any

_kept: list[Any] = []  # compiled modules: their code lives as long as the process


@cache
def no_compiler() -> str | None:
    """Reason why this process cannot compile; None if it can."""
    if platform.machine().lower() not in ("x86_64", "amd64", "aarch64", "arm64"):
        return f"whet's own kernels are not written for {platform.machine()}"
    try:
        import_module("llvmlite.binding")
    except ImportError:
        return "llvmlite, the compiler of whet's own kernels, is not installed: pip install 'whet[jit]'"
    return None


@cache
def address(ir: str, name: str) -> int:
    """Address of function `name` of a module given as IR text (typed pointers, as LLVM before 17 requires). Requires `no_compiler()` to be None."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_default_triple()
    machine = target.create_target_machine(cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3)
    module = llvm.parse_assembly(ir if llvm.llvm_version_info[0] < 17 else _opaque(ir))
    module.verify()
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    _kept.append((engine, machine))
    return int(engine.get_function_address(name))


def _opaque(ir: str) -> str:
    """Converts typed pointers to LLVM 17's opaque pointers."""
    return re.sub(r"(<\d+ x (i\d+|float|half)>|(i\d+|void) \([^()]*\)|i\d+|float|half)\*", "ptr", re.sub(r"\.p0v\d+f32\b", ".p0", ir))
