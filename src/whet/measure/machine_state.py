"""What a GPU was doing when its kernels had just been timed: clocks, power, temperature, and who else was on it."""

from __future__ import annotations

from typing import Any

from whet.backends import Backend
from whet.builder.progress import Noting
from whet.errors import BackendError


def machine_state(backend: Backend, tell: Noting) -> dict[str, Any]:
    """The machine's `state()` as the key "gpu" of the timing report, nothing where it has none (a CPU, a GPU without NVML).

    Other processes on the GPU get a note: two that compute at once slow each other, and times taken meanwhile may be off.
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
        tell.note(f"other processes were on this GPU while kernels were timed ({who}): choices may be off. Build again when it is free.")
    return {"gpu": {**state, "other_processes": list(others)}}
