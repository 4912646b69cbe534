"""Engine + inputs -> outputs. Imports neither builder nor passes, so it ships alone."""

from whet.runtime.context import Context
from whet.runtime.dealing import Deal, bind, dealt_bytes
from whet.runtime.engine import Engine, EngineWarning, Memory, Runtime, machine_differences
from whet.runtime.memory import WeightStore, aligned_empty
from whet.runtime.shaped import Shaped, max_shapes, opt_shapes, storage
from whet.runtime.steps import Bound

__all__ = [
    "Bound", "Context", "Deal", "Engine", "EngineWarning", "Memory", "Runtime", "Shaped", "WeightStore", "aligned_empty", "bind",
    "dealt_bytes", "machine_differences", "max_shapes", "opt_shapes", "storage",
]  # fmt: skip
