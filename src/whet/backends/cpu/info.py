"""Properties of this CPU: model, instruction sets, caches, memory. Missing facts are omitted, never guessed.

The environment variable WHET_MAX_CPU_ISA hides newer instruction sets from whet's own kernels, oneDNN, timing keys and descriptions of the machine:
`avx2` (no AVX-512, no AMX) or `avx512_core` (AVX-512 F, CD, BW, DQ and VL), oneDNN's names.

Model, instruction sets and caches are read from /proc and /sys: py-cpuinfo starts processes for them, 1.8 s at each start instead of 0.2 ms, and
archspec (0.1 s) knows neither the model's name and stepping nor the caches.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from whet.errors import BackendError

CPUINFO = Path("/proc/cpuinfo")
CACHES = Path("/sys/devices/system/cpu")

#: Linux's names of the instruction sets that decide which kernels can run
_KEPT = frozenset(
    "sse4_1 sse4_2 avx avx2 fma f16c avx_vnni avx512f avx512dq avx512bw avx512vl avx512cd avx512_vnni avx512_bf16 avx512_fp16 "
    "amx_tile amx_int8 amx_bf16 amx_fp16 asimd asimdhp asimddp bf16 i8mm sve sve2".split()
)

#: Linux's names of what identifies an ARM core
_ARM_NUMBERS = ("CPU implementer", "CPU part", "CPU variant", "CPU revision")

VARIABLE = "WHET_MAX_CPU_ISA"
#: instruction sets above a limit, by the names of Linux and of LLVM
_ABOVE_AVX2 = re.compile(r"avx512|avx10|evex512|amx|avx[_-]?(vnni|ifma|ne)")
_ABOVE = {"avx2": _ABOVE_AVX2, "avx512_core": re.compile(rf"(?!avx512(f|cd|bw|dq|vl)$|evex512$)({_ABOVE_AVX2.pattern})")}


@cache
def read_cpuinfo() -> dict[str, str]:
    """The first processor's fields; {} without /proc/cpuinfo."""
    try:
        text = CPUINFO.read_text(encoding="utf-8")
    except OSError:
        return {}
    fields: dict[str, str] = {}
    for line in text.split("\n\n")[0].splitlines():
        name, _, value = line.partition(":")
        fields[name.strip()] = value.strip()
    return fields


def get_cpu_model() -> str:
    """Vendor's name with family, model and stepping, as two CPUs of one name may differ. Linux on ARM reports numbers, but no name of its own."""
    f = read_cpuinfo()
    name = f.get("model name") or f.get("Model") or platform.processor() or platform.machine()
    numbers = "-".join(f[k] for k in ("cpu family", "model", "stepping", *_ARM_NUMBERS) if k in f)
    return f"{name} ({numbers})" if numbers else name


def get_isa_limit() -> str:
    """The value of WHET_MAX_CPU_ISA; "" without a limit. Raises BackendError for a name that is none of the limits."""
    name = os.environ.get(VARIABLE, "").lower()
    if name and name not in _ABOVE:
        raise BackendError(f"{VARIABLE}={name} is no limit of the instruction sets: use {' or '.join(_ABOVE)}, or unset it.")
    return name


def select_above_limit(names: Iterable[str]) -> set[str]:
    """Those of `names` (instruction sets, by Linux's or LLVM's names) that WHET_MAX_CPU_ISA hides."""
    limit = get_isa_limit()
    return {n for n in names if _ABOVE[limit].match(n)} if limit else set()


def list_cpu_flags() -> frozenset[str]:
    """All properties that Linux reports of the CPU, without those that WHET_MAX_CPU_ISA hides."""
    f = read_cpuinfo()
    found = frozenset((f.get("flags") or f.get("Features") or "").split())
    return found - select_above_limit(found)


def list_cpu_features() -> frozenset[str]:
    """Instruction sets that kernels may require, by Linux's names."""
    return list_cpu_flags() & _KEPT


def format_features(features: frozenset[str]) -> str:
    """The instruction sets as one sorted word list."""
    return " ".join(sorted(features))


@cache
def cache_bytes() -> dict[int, int]:
    """Bytes of data cache per level, summed over the caches of all visible CPUs; {} if /sys does not report them."""
    seen: dict[tuple[int, str], int] = {}
    for index in CACHES.glob("cpu[0-9]*/cache/index[0-9]*"):
        try:
            kind = (index / "type").read_text(encoding="utf-8").strip()
            level = int((index / "level").read_text(encoding="utf-8"))
            size = (index / "size").read_text(encoding="utf-8").strip()
            shared = (index / "shared_cpu_list").read_text(encoding="utf-8").strip()
        except (OSError, ValueError):
            continue
        if kind == "Instruction" or not size:
            continue
        scale = {"K": 1024, "M": 1024**2, "G": 1024**3}.get(size[-1], 1)
        seen[level, shared] = int(size.rstrip("KMG")) * scale
    total: dict[int, int] = {}
    for (level, _), size_ in seen.items():
        total[level] = total.get(level, 0) + size_
    return total


def get_total_memory() -> int:
    """Bytes of memory of the machine."""
    import psutil

    return int(psutil.virtual_memory().total)


def get_available_memory() -> int:
    """Bytes that can be allocated without swapping, limited by the control group."""
    limit, free = _find_cgroup_available(), _read_available()
    if free is None:
        import psutil

        free = int(psutil.virtual_memory().available)
    return free if limit is None else min(free, limit)


def _read_available(path: Path = Path("/proc/meminfo")) -> int | None:
    """Linux's estimate of the memory that can be allocated without swapping; None on other systems. Importing psutil for it takes 15 ms."""
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB$", path.read_text(encoding="utf-8"), re.MULTILINE)
    except (OSError, ValueError):
        return None
    return None if found is None else 1024 * int(found[1])


def _find_cgroup_available(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes left under this process's memory limit (cgroup version 2, as seen from inside a container)."""
    try:
        limit, used = (root / "memory.max").read_text(encoding="utf-8").strip(), int((root / "memory.current").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return None if limit == "max" else max(0, int(limit) - used)
