"""Engine + inputs -> outputs. Imports neither builder nor passes, so it ships alone."""

from whet.runtime.context import Context
from whet.runtime.engine import Engine, EngineWarning, Memory, Runtime, machine_differences
from whet.runtime.memory import WeightStore, aligned_empty
from whet.runtime.sample_parallel import SampleParallelEngine, arena_bytes, bind
from whet.runtime.shape_trace import read_trace
from whet.runtime.shaped import ShapedPlan, max_shapes, opt_shapes, storage
from whet.runtime.steps import BoundEngine

__all__ = [
    "BoundEngine", "Context", "Engine", "EngineWarning", "Memory", "Runtime", "SampleParallelEngine", "ShapedPlan", "WeightStore",
    "aligned_empty", "arena_bytes", "bind", "machine_differences", "max_shapes", "opt_shapes", "read_trace", "storage",
]  # fmt: skip
