"""Engine + inputs -> outputs. Imports neither builder nor passes, so it ships alone."""

from whet.runtime.memory import WeightStore, aligned_empty
from whet.runtime.steps import Bound, Shaped, bind, max_shapes, opt_shapes, storage

__all__ = ["Bound", "Shaped", "WeightStore", "aligned_empty", "bind", "max_shapes", "opt_shapes", "storage"]
