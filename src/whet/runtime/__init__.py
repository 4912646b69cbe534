"""Engine + inputs -> outputs. Imports neither builder nor passes, so it ships alone."""

from whet.runtime.context import Context
from whet.runtime.engine import Engine, EngineWarning, Memory, Runtime, list_machine_differences
from whet.runtime.memory import WeightStore, allocate_aligned_array
from whet.runtime.sample_parallel import SampleParallelEngine, bind, count_arena_bytes
from whet.runtime.shape_trace import read_trace
from whet.runtime.shaped import ShapedPlan, get_max_shapes, get_opt_shapes, map_storage
from whet.runtime.steps import BoundEngine

__all__ = [
    "BoundEngine",
    "Context",
    "Engine",
    "EngineWarning",
    "Memory",
    "Runtime",
    "SampleParallelEngine",
    "ShapedPlan",
    "WeightStore",
    "allocate_aligned_array",
    "bind",
    "count_arena_bytes",
    "get_max_shapes",
    "get_opt_shapes",
    "list_machine_differences",
    "map_storage",
    "read_trace",
]  # fmt: skip
