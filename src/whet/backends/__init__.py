"""Machines: memory, streams, executors, clocks. One file or folder a backend."""

from whet.backends._base import BACKENDS, Backend, Buffer, Executable, Laned, backend, get_backend, in_row
from whet.registry import load_folder

__all__ = ["BACKENDS", "Backend", "Buffer", "Executable", "Laned", "backend", "get_backend", "in_row"]

load_folder(__name__, __path__)
