"""Options of sessions and runs, with ONNX Runtime's names. Those without a counterpart are stored and have no effect."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from whet.errors import UsageError, WhetWarning


class GraphOptimizationLevel(IntEnum):
    """The effort of a build: no passes and no timing, optimization level 1, 2, or 3 (whet's default)."""

    ORT_DISABLE_ALL = 0
    ORT_ENABLE_BASIC = 1
    ORT_ENABLE_EXTENDED = 2
    ORT_ENABLE_LAYOUT = 3
    ORT_ENABLE_ALL = 99


class ExecutionMode(IntEnum):
    """Without effect: whet runs layers in order, each on all threads."""

    ORT_SEQUENTIAL = 0
    ORT_PARALLEL = 1


@dataclass
class SessionOptions:
    """Options of a session. `graph_optimization_level`, `intra_op_num_threads`, `use_deterministic_compute`, `optimized_model_filepath` (here the
    engine file, which `whet.load` opens) and the overrides of free dimensions have an effect; the others are accepted."""

    graph_optimization_level: GraphOptimizationLevel = GraphOptimizationLevel.ORT_ENABLE_ALL
    intra_op_num_threads: int = 0
    inter_op_num_threads: int = 0
    execution_mode: ExecutionMode = ExecutionMode.ORT_SEQUENTIAL
    use_deterministic_compute: bool = False
    optimized_model_filepath: str = ""
    log_severity_level: int = -1
    log_verbosity_level: int = 0
    logid: str = ""
    enable_cpu_mem_arena: bool = True
    enable_mem_pattern: bool = True
    enable_mem_reuse: bool = True
    enable_profiling: bool = False
    profile_file_prefix: str = "onnxruntime_profile_"
    use_per_session_threads: bool = True
    _entries: dict[str, str] = field(default_factory=dict, repr=False)
    _dimensions: dict[str, int] = field(default_factory=dict, repr=False)

    def add_session_config_entry(self, key: str, value: str) -> None:
        """Stores an entry."""
        self._entries[str(key)] = str(value)

    def get_session_config_entry(self, key: str) -> str:
        """The value of an entry. Raises UsageError if it was not added."""
        if key not in self._entries:
            raise UsageError(f"key: no session config entry {key!r} was added")
        return self._entries[key]

    def add_free_dimension_override_by_name(self, name: str, value: int) -> None:
        """Fixes the dynamic dimension `name` of the model."""
        self._dimensions[str(name)] = int(value)

    def register_custom_ops_library(self, path: str) -> None:
        """Raises UsageError: whet cannot load ONNX Runtime's operator libraries."""
        raise UsageError(f"path: {path} holds operators for ONNX Runtime; whet takes ops in Python (docs/adding.md)")

    def build_options(self) -> dict[str, Any]:
        """The parameters of `whet.build` that correspond to these options."""
        level = int(self.graph_optimization_level)
        options: dict[str, Any] = {"threads": int(self.intra_op_num_threads), "deterministic": bool(self.use_deterministic_compute)}
        if level == GraphOptimizationLevel.ORT_DISABLE_ALL:
            options |= {"optimization_level": 0, "passes": ("none",)}
        elif level in (GraphOptimizationLevel.ORT_ENABLE_BASIC, GraphOptimizationLevel.ORT_ENABLE_EXTENDED):
            options["optimization_level"] = level
        if self.enable_profiling:
            warnings.warn("enable_profiling has no effect: `whet exec --dumpProfile` and Context.profile measure layers", WhetWarning, stacklevel=4)
        return options


@dataclass
class RunOptions:
    """Options of a run; accepted without effect."""

    log_severity_level: int = 2
    log_verbosity_level: int = 0
    logid: str = ""
    only_execute_path_to_fetches: bool = False
    terminate: bool = False

    def add_run_config_entry(self, key: str, value: str) -> None:
        """Accepted without effect."""
