"""The state of a GPU right after its kernels were timed: clocks, power, temperature, other processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from whet.backends import Backend
from whet.errors import BackendError


def read_machine_state(backend: Backend, note: Callable[[str], None]) -> dict[str, Any]:
    """The backend's `state()` as the key "gpu" of the timing report; empty if it has none (a CPU, a GPU without NVML).

    Other processes on the GPU are reported to `note`: they may have slowed the measured kernels.
    """
    try:
        state = backend.state()
        if not state:
            return {}
    except BackendError as error:
        return {"gpu": {"unknown": str(error)}}
    others = state.get("other_processes") or ()
    if others:
        who = ", ".join(map(str, others))
        note(f"other processes were on this GPU while kernels were timed ({who}): choices may be off. Build again when it is free.")
    return {"gpu": {**state, "other_processes": list(others)}}
