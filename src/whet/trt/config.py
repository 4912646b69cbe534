"""IBuilderConfig: TensorRT's build options, translated to whet's BuildConfig."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

from whet.builder import BuildConfig
from whet.network import Network
from whet.trt.enums import BuilderFlag, DataType, DeviceType, MemoryPoolType, ProfilingVerbosity
from whet.trt.errors import NotServedError
from whet.trt.handle import Handle
from whet.trt.network import INetworkDefinition
from whet.trt.profile import IOptimizationProfile

_PRECISIONS = {BuilderFlag.FP16: "fp16", BuilderFlag.BF16: "bf16", BuilderFlag.INT8: "int8", BuilderFlag.FP8: "fp8"}
_REFUSED = {
    BuilderFlag.REFIT: "engines are not refitted in place yet; build the engine again, its tactics come from the timing cache",
    BuilderFlag.STRIP_PLAN: "an engine file contains its weights",
    BuilderFlag.WEIGHT_STREAMING: "weights stay in memory while an engine is open",
    BuilderFlag.GPU_FALLBACK: "there is no DLA backend",
    BuilderFlag.VERSION_COMPATIBLE: "engine files have a version of their own; see `whet retune`",
}
_VERBOSITIES = {
    ProfilingVerbosity.LAYER_NAMES_ONLY: "layer_names_only", ProfilingVerbosity.NONE: "none", ProfilingVerbosity.DETAILED: "detailed",
}  # fmt: skip


class ITimingCache:
    """Measurements of tactics, in memory; `serialize` returns them as bytes."""

    def __init__(self, data: bytes = b""):
        self.data = bytes(data)

    def serialize(self) -> memoryview:
        """The cache as bytes."""
        return memoryview(self.data)


class IBuilderConfig(Handle):
    """Options of a build. Flags that whet cannot serve raise NotServedError."""

    def __init__(self) -> None:
        self.flags = 1 << BuilderFlag.TF32
        self.profiling_verbosity = ProfilingVerbosity.LAYER_NAMES_ONLY
        self.builder_optimization_level = 3
        self.avg_timing_iterations = 8
        self.max_num_tactics = -1
        self.DLA_core = -1  # none: there is no DLA backend
        self._pools: dict[MemoryPoolType, int] = {}
        self._profiles: list[IOptimizationProfile] = []
        self._timing_cache: ITimingCache | None = None

    def set_flag(self, flag: BuilderFlag) -> None:
        """Sets a flag. Raises NotServedError with the reason for one that whet cannot serve."""
        if flag in _REFUSED:
            raise NotServedError(f"BuilderFlag.{BuilderFlag(flag).name}", _REFUSED[flag])
        self.flags |= 1 << flag

    def clear_flag(self, flag: BuilderFlag) -> None:
        """Clears a flag."""
        self.flags &= ~(1 << flag)

    def get_flag(self, flag: BuilderFlag) -> bool:
        """True if a flag is set."""
        return bool(self.flags & 1 << flag)

    @property
    def max_workspace_size(self) -> int:
        """Bytes of scratch memory that tactics may use; 0: no limit (TensorRT 8's name of the WORKSPACE pool)."""
        return self.get_memory_pool_limit(MemoryPoolType.WORKSPACE)

    @max_workspace_size.setter
    def max_workspace_size(self, nbytes: int) -> None:
        self.set_memory_pool_limit(MemoryPoolType.WORKSPACE, nbytes)

    @property
    def default_device_type(self) -> DeviceType:
        """GPU; setting DLA raises NotServedError."""
        return DeviceType.GPU

    @default_device_type.setter
    def default_device_type(self, device: DeviceType) -> None:
        if device == DeviceType.DLA:
            raise NotServedError("DeviceType.DLA", "there is no DLA backend")

    def set_memory_pool_limit(self, pool: MemoryPoolType, pool_size: int) -> None:
        """Limits a memory pool to `pool_size` bytes."""
        self._pools[pool] = pool_size

    def get_memory_pool_limit(self, pool: MemoryPoolType) -> int:
        """Bytes of a memory pool; 0: no limit."""
        return self._pools.get(pool, 0)

    def add_optimization_profile(self, profile: IOptimizationProfile) -> int:
        """Adds a profile and returns its index; -1 if it has no shapes."""
        if not profile:
            return -1
        self._profiles.append(profile)
        return len(self._profiles) - 1

    @property
    def num_optimization_profiles(self) -> int:
        """The number of profiles."""
        return len(self._profiles)

    @property
    def int8_calibrator(self) -> None:
        """None; setting a calibrator raises NotServedError."""
        return None

    @int8_calibrator.setter
    def int8_calibrator(self, calibrator: object) -> None:
        if calibrator is not None:
            raise NotServedError("IBuilderConfig.int8_calibrator", "calibrators are not connected yet; whet.builder.build_int8 calibrates")

    def create_timing_cache(self, serialized_timing_cache: bytes) -> ITimingCache:
        """A timing cache from the bytes of `ITimingCache.serialize`, or an empty one."""
        return ITimingCache(serialized_timing_cache)

    def set_timing_cache(self, cache: ITimingCache, ignore_mismatch: bool) -> bool:
        """Makes the build read and extend `cache`."""
        self._timing_cache = cache
        return True

    def get_timing_cache(self) -> ITimingCache | None:
        """The timing cache of the build."""
        return self._timing_cache

    def build(self, network: INetworkDefinition) -> Any:
        """Builds `network` with these options; the plan. Raises BuildError."""
        from whet.builder import build

        net = network.whet

        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "timing.cache"
            cache = "" if self.get_flag(BuilderFlag.DISABLE_TIMING_CACHE) else None
            if cache is None and self._timing_cache is not None:
                cache = str(file)
                if self._timing_cache.data:
                    file.write_bytes(self._timing_cache.data)
            plan = build(net, dataclasses.replace(self.to_whet(net, cache), **_layer_types(network)))
            if self._timing_cache is not None and file.exists():
                self._timing_cache.data = file.read_bytes()
        return plan

    def to_whet(self, net: Network, timing_cache: str | None = None) -> BuildConfig:
        """The BuildConfig for `net`; inputs of fixed shape are added to each profile."""
        fixed = {t.name: tuple(int(d) for d in t.shape) for t in net.inputs if t.type.static}
        profiles = []
        for p in self._profiles:
            low, opt, high = ({n: s[i] for n, s in p.shapes.items()} for i in range(3))
            profiles.append((fixed | low, fixed | opt, fixed | high))
        constraints = "none"
        if self.get_flag(BuilderFlag.PREFER_PRECISION_CONSTRAINTS):
            constraints = "prefer"
        if self.get_flag(BuilderFlag.OBEY_PRECISION_CONSTRAINTS):
            constraints = "obey"
        return BuildConfig(
            precisions=tuple(name for flag, name in _PRECISIONS.items() if self.get_flag(flag)),
            precision_constraints=constraints,
            sparsity="enable" if self.get_flag(BuilderFlag.SPARSE_WEIGHTS) else "disable",
            profiles=tuple(profiles),
            optimization_level=self.builder_optimization_level,
            avg_timing=self.avg_timing_iterations,
            max_tactics=self.max_num_tactics,
            timing_cache=timing_cache,
            error_on_cache_miss=self.get_flag(BuilderFlag.ERROR_ON_TIMING_CACHE_MISS),
            memory_limit={"workspace": self.max_workspace_size} if self.max_workspace_size else {},
            profiling_verbosity=_VERBOSITIES[self.profiling_verbosity],
        )


_LAYER_PRECISIONS = {DataType.FLOAT: "fp32", DataType.HALF: "fp16", DataType.BF16: "bf16", DataType.INT8: "int8", DataType.FP8: "fp8"}


def _layer_types(network: INetworkDefinition) -> dict[str, Any]:
    """The fields of BuildConfig for the precisions and output types that the layers have."""
    states = network.layer_states()
    precisions = tuple((s.name, _LAYER_PRECISIONS[s.precision]) for s in states if s.precision in _LAYER_PRECISIONS)
    outputs = tuple((s.name, _LAYER_PRECISIONS[t]) for s in states for t in s.output_types.values() if t in _LAYER_PRECISIONS)
    return {"layer_precisions": precisions, "layer_output_types": outputs}
