"""Backends: memory, launch lists, clocks and capabilities of a device. One folder each."""

from whet.backends._base import (
    BACKENDS,
    Backend,
    Buffer,
    Call,
    Capabilities,
    Completion,
    Difference,
    Executable,
    Load,
    Recorder,
    backend,
    get_backend,
    get_backend_class,
    get_capabilities,
)
from whet.registry import load_folder

__all__ = [
    "BACKENDS",
    "Backend",
    "Buffer",
    "Call",
    "Capabilities",
    "Completion",
    "Difference",
    "Executable",
    "Load",
    "Recorder",
    "backend",
    "get_backend",
    "get_backend_class",
    "get_capabilities",
]  # fmt: skip

load_folder(__name__, __path__, deep=False)  # a folder's tactics are loaded when a build or an engine needs them
