"""IBuilderConfig: TensorRT's build options, translated to whet's BuildConfig."""

from __future__ import annotations

import dataclasses
import tempfile
import warnings
from pathlib import Path
from typing import Any

from whet.builder import BuildConfig, Calibration, build, build_int8
from whet.builder.candidates.tactic_sources import has_family
from whet.builder.precision.calibration import is_explicit
from whet.errors import BuildError, BuildWarning
from whet.network import Network
from whet.precision.cache import write_cache
from whet.precision.ranges import Range, Ranges
from whet.trt.calibrator import get_calibration_method, read_calibrator_samples
from whet.trt.device import get_backend_name, read_array
from whet.trt.enums import (
    BuilderFlag,
    DataType,
    DeviceType,
    EngineCapability,
    HardwareCompatibilityLevel,
    MemoryPoolType,
    PreviewFeature,
    ProfilingVerbosity,
    QuantizationFlag,
    RuntimePlatform,
    TacticSource,
    TilingOptimizationLevel,
)
from whet.trt.errors import NotServedError
from whet.trt.handle import Handle
from whet.trt.interfaces import IProgressMonitor
from whet.trt.logger import ILogger
from whet.trt.network import INetworkDefinition
from whet.trt.profile import IOptimizationProfile
from whet.trt.progress import MonitoredProgress
from whet.trt.refused import REFUSED
from whet.trt.timing_cache import ITimingCache

_PRECISIONS = {BuilderFlag.FP16: "fp16", BuilderFlag.BF16: "bf16", BuilderFlag.INT8: "int8", BuilderFlag.FP8: "fp8"}
_DEFAULT_SOURCES = 1 << TacticSource.EDGE_MASK_CONVOLUTIONS | 1 << TacticSource.JIT_CONVOLUTIONS  # TensorRT 10's default
_DEFAULT_POOLS = {  # TensorRT 10's; scripts print them
    MemoryPoolType.DLA_LOCAL_DRAM: 1 << 30, MemoryPoolType.DLA_GLOBAL_DRAM: 1 << 29, MemoryPoolType.TACTIC_SHARED_MEMORY: 1 << 30,
}  # fmt: skip
_LAYER_PRECISIONS = {DataType.FLOAT: "fp32", DataType.HALF: "fp16", DataType.BF16: "bf16", DataType.INT8: "int8", DataType.FP8: "fp8"}


class IBuilderConfig(Handle):
    """Options of a build. Flags that whet cannot serve raise NotServedError."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Sets all options to their defaults."""
        self.flags = 1 << BuilderFlag.TF32
        self.quantization_flags = 0
        self.profiling_verbosity = ProfilingVerbosity.LAYER_NAMES_ONLY
        self.builder_optimization_level = 3
        self.avg_timing_iterations = 8
        self.max_num_tactics = -1
        self.max_aux_streams = 0
        self.l2_limit_for_tiling = -1
        self.DLA_core = -1  # none: there is no DLA backend
        self.profile_stream = 0
        self.plugins_to_serialize: list[str] = []
        self.tiling_optimization_level = TilingOptimizationLevel.NONE
        self.hardware_compatibility_level = HardwareCompatibilityLevel.NONE
        self.progress_monitor: IProgressMonitor | None = None
        self.int8_calibrator: Any = None
        self._pools: dict[MemoryPoolType, int] = dict(_DEFAULT_POOLS)
        self._profiles: list[IOptimizationProfile] = []
        self._calibration_profile: IOptimizationProfile | None = None
        self._timing_cache: ITimingCache | None = None
        self._tactic_sources = -1
        self._features = {PreviewFeature.PROFILE_SHARING_0806}  # TensorRT 10's default

    # flags

    def set_flag(self, flag: BuilderFlag) -> None:
        """Sets a flag. Raises NotServedError with the reason for one that whet cannot serve."""
        if why := REFUSED.get(name := str(BuilderFlag(flag))):
            raise NotServedError(name, why)
        self.flags |= 1 << flag

    def clear_flag(self, flag: BuilderFlag) -> None:
        """Clears a flag."""
        self.flags &= ~(1 << flag)

    def get_flag(self, flag: BuilderFlag) -> bool:
        """True if a flag is set."""
        return bool(self.flags & 1 << flag)

    def set_quantization_flag(self, flag: QuantizationFlag) -> None:
        """Sets a flag of calibration; whet calibrates before fusion with and without it."""
        self.quantization_flags |= 1 << flag

    def clear_quantization_flag(self, flag: QuantizationFlag) -> None:
        """Clears a flag of calibration."""
        self.quantization_flags &= ~(1 << flag)

    def get_quantization_flag(self, flag: QuantizationFlag) -> bool:
        """True if a flag of calibration is set."""
        return bool(self.quantization_flags & 1 << flag)

    def set_preview_feature(self, feature: PreviewFeature, enable: bool) -> None:
        """Switches a preview feature; they change nothing here."""
        (self._features.add if enable else self._features.discard)(feature)

    def get_preview_feature(self, feature: PreviewFeature) -> bool:
        """True if a preview feature is on."""
        return feature in self._features

    def set_tactic_sources(self, tactic_sources: int) -> bool:
        """Sets the bits of TacticSource. CUDNN adds cuDNN's kernels on a GPU; the other sources do not exist here."""
        self._tactic_sources = tactic_sources
        return True

    def get_tactic_sources(self) -> int:
        """The bits of TacticSource."""
        return _DEFAULT_SOURCES if self._tactic_sources < 0 else self._tactic_sources

    # devices

    @property
    def engine_capability(self) -> EngineCapability:
        """STANDARD; setting another raises NotServedError."""
        return EngineCapability.STANDARD

    @engine_capability.setter
    def engine_capability(self, capability: EngineCapability) -> None:
        if capability != EngineCapability.STANDARD:
            raise NotServedError(str(EngineCapability(capability)), "there is no safety runtime and no DLA")

    @property
    def runtime_platform(self) -> RuntimePlatform:
        """SAME_AS_BUILD; setting another raises NotServedError."""
        return RuntimePlatform.SAME_AS_BUILD

    @runtime_platform.setter
    def runtime_platform(self, platform: RuntimePlatform) -> None:
        if platform != RuntimePlatform.SAME_AS_BUILD:
            raise NotServedError(str(RuntimePlatform(platform)), "whet runs on Linux only")

    @property
    def default_device_type(self) -> DeviceType:
        """GPU; setting DLA raises NotServedError."""
        return DeviceType.GPU

    @default_device_type.setter
    def default_device_type(self, device: DeviceType) -> None:
        if device == DeviceType.DLA:
            raise NotServedError("DeviceType.DLA", "there is no DLA backend")

    def set_device_type(self, layer: Any, device_type: DeviceType) -> None:
        """Raises NotServedError for DLA."""
        self.default_device_type = device_type

    def get_device_type(self, layer: Any) -> DeviceType:
        """GPU."""
        return DeviceType.GPU

    def is_device_type_set(self, layer: Any) -> bool:
        """False."""
        return False

    def reset_device_type(self, layer: Any) -> None:
        """Does nothing."""

    def can_run_on_DLA(self, layer: Any) -> bool:
        """False."""
        return False

    # memory

    @property
    def max_workspace_size(self) -> int:
        """Bytes of scratch memory that tactics may use; 0: no limit (TensorRT 8's name of the WORKSPACE pool)."""
        return self.get_memory_pool_limit(MemoryPoolType.WORKSPACE)

    @max_workspace_size.setter
    def max_workspace_size(self, nbytes: int) -> None:
        self.set_memory_pool_limit(MemoryPoolType.WORKSPACE, nbytes)

    def set_memory_pool_limit(self, pool: MemoryPoolType, pool_size: int) -> None:
        """Limits a memory pool to `pool_size` bytes; the builder reads WORKSPACE."""
        self._pools[pool] = pool_size

    def get_memory_pool_limit(self, pool: MemoryPoolType) -> int:
        """Bytes of a memory pool; 0: no limit."""
        return self._pools.get(pool, 0)

    # profiles and the timing cache

    def add_optimization_profile(self, profile: IOptimizationProfile) -> int:
        """Adds a profile and returns its index. A network without dynamic inputs takes one without shapes."""
        self._profiles.append(profile)
        return len(self._profiles) - 1

    @property
    def num_optimization_profiles(self) -> int:
        """The number of profiles."""
        return len(self._profiles)

    def set_calibration_profile(self, profile: IOptimizationProfile) -> bool:
        """Sets the profile whose opt shapes calibration batches have."""
        self._calibration_profile = profile
        return True

    def get_calibration_profile(self) -> IOptimizationProfile | None:
        """The profile of calibration: the one that was set, else the first."""
        return self._calibration_profile or next(iter(self._profiles), None)

    def create_timing_cache(self, serialized_timing_cache: Any) -> ITimingCache:
        """A timing cache from the bytes of `ITimingCache.serialize`, or an empty one."""
        return ITimingCache(serialized_timing_cache)

    def set_timing_cache(self, cache: ITimingCache, ignore_mismatch: bool) -> bool:
        """Makes the build read and extend `cache`. Times of other machines are not used, so there is no mismatch."""
        self._timing_cache = cache
        return True

    def get_timing_cache(self) -> ITimingCache | None:
        """The timing cache of the build."""
        return self._timing_cache

    # building

    def build(self, network: INetworkDefinition, logger: ILogger) -> Any:
        """Builds `network` with these options; the plan. Notes go to the logger as warnings. Raises WhetError."""
        net = network.network_to_build()
        with (
            tempfile.TemporaryDirectory() as folder,
            MonitoredProgress(self.progress_monitor, logger) as progress,
            warnings.catch_warnings(action="ignore", category=BuildWarning),  # the logger has them
        ):
            file = Path(folder) / "timing.cache"
            cache = "" if self.get_flag(BuilderFlag.DISABLE_TIMING_CACHE) else None
            if cache is None and self._timing_cache is not None:
                cache = str(file)
                if self._timing_cache.data:
                    file.write_bytes(self._timing_cache.data)
            config = dataclasses.replace(self.to_whet(net, cache), **_collect_layer_types(network))
            calibration = self._calibration(network, net, Path(folder))
            if calibration is None:
                plan = build(net, config, progress=progress)
            else:
                others = tuple(p for p in config.precisions if p != "int8")
                plan = build_int8(net, dataclasses.replace(config, precisions=others), calibration, progress=progress)
            if calibration is not None and self.int8_calibrator is not None and calibration.samples is not None and calibration.cache:
                written = Path(calibration.cache)
                if not written.exists():  # the network has no layer that 8 bits could compute, so the cache has no scales
                    write_cache(written, Ranges())
                self.int8_calibrator.write_calibration_cache(memoryview(written.read_bytes()))
            if self._timing_cache is not None and file.exists():
                self._timing_cache.data = file.read_bytes()
        return plan

    def _calibration(self, network: INetworkDefinition, net: Network, folder: Path) -> Calibration | None:
        """The source of INT8 ranges: the calibrator's cache or batches, or the tensors' dynamic ranges; None without INT8, or with Q/DQ nodes."""
        cache = folder / "calibration.cache"
        if not self.get_flag(BuilderFlag.INT8) or is_explicit(net):
            return None
        calibrator = self.int8_calibrator
        if calibrator is None:
            if not network.dynamic_ranges:
                return None
            limits = {t.name: max(-low, high) for t, (low, high) in network.dynamic_ranges.items()}
            write_cache(cache, Ranges({name: Range(-limit, limit, "given") for name, limit in limits.items()}))
            return Calibration(cache=str(cache))
        if known := calibrator.read_calibration_cache():
            cache.write_bytes(bytes(known))
            return Calibration(cache=str(cache))
        samples = read_calibrator_samples(calibrator, net, self._calibration_shapes(net), read_array)
        if not samples:
            raise BuildError("the calibrator has neither a cache nor a batch")
        return Calibration(samples=lambda: samples, cache=str(cache), method=get_calibration_method(calibrator), zero_points=False)

    def _calibration_shapes(self, net: Network) -> dict[str, tuple[int, ...]]:
        """The shapes of calibration batches: static ones, or the opt shapes of the calibration profile."""
        shapes = {t.name: tuple(t.shape) for t in net.inputs if t.type.static}
        profile = self.get_calibration_profile()
        if profile is not None:
            shapes |= {name: s[1] for name, s in profile.shapes.items()}
        for t in net.inputs:
            if t.name not in shapes:
                raise BuildError(f"calibration needs shapes for the dynamic input '{t.name}': IBuilderConfig.set_calibration_profile")
        return shapes

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
        asks_for_cudnn = self._tactic_sources >= 0 and self._tactic_sources & 1 << TacticSource.CUDNN
        return BuildConfig(
            backend=get_backend_name(),
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
            profiling_verbosity=ProfilingVerbosity(self.profiling_verbosity).name.lower(),
            tactic_sources=("+CUDNN",) if asks_for_cudnn and has_family(get_backend_name(), "CUDNN") else (),
        )


def _collect_layer_types(network: INetworkDefinition) -> dict[str, Any]:
    """The fields of BuildConfig for the precisions and output types that the layers have."""
    states = network.layer_states()
    precisions = tuple((s.name, _LAYER_PRECISIONS[s.precision]) for s in states if s.precision in _LAYER_PRECISIONS)
    outputs = tuple((s.name, _LAYER_PRECISIONS[t]) for s in states for t in s.output_types.values() if t in _LAYER_PRECISIONS)
    return {"layer_precisions": precisions, "layer_output_types": outputs}
