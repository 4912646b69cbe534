"""Builder: network definition + config -> serialized engine."""

from __future__ import annotations

from typing import Any

from whet.backends import get_backend
from whet.engine import EnginePlan, engine_bytes
from whet.errors import WhetError
from whet.trt.config import IBuilderConfig
from whet.trt.device import get_backend_name
from whet.trt.enums import ErrorCodeTRT
from whet.trt.handle import Handle
from whet.trt.interfaces import IStreamWriter, report_error
from whet.trt.logger import ILogger
from whet.trt.network import INetworkDefinition
from whet.trt.plugins import IPluginRegistry, get_plugin_registry
from whet.trt.profile import IOptimizationProfile
from whet.trt.runtime import ICudaEngine, IHostMemory, Runtime


class Builder(Handle):
    """Creates networks, configs and profiles, and builds engines. Build errors go to the logger, and the result is None."""

    num_DLA_cores = 0
    max_DLA_batch_size = 0

    def __init__(self, logger: ILogger):
        self.logger = logger
        self.error_recorder: Any = None
        self.max_threads = 1

    def _on_gpu(self) -> bool:
        return not get_backend(get_backend_name()).capabilities.host_memory

    @property
    def platform_has_fast_fp16(self) -> bool:
        """True on a GPU, and on a CPU that multiplies FP16 (AVX512-FP16)."""
        return "f16" not in get_backend(get_backend_name()).capabilities.unsupported_types

    @property
    def platform_has_fast_int8(self) -> bool:
        """True."""
        return True

    @property
    def platform_has_fast_sparsity(self) -> bool:
        """True on a GPU; no CPU kernel skips the zeros of 2:4 weights."""
        return self._on_gpu()

    @property
    def platform_has_tf32(self) -> bool:
        """True on a GPU."""
        return self._on_gpu()

    def create_network(self, flags: int = 0) -> INetworkDefinition:
        """An empty network. Batches are always explicit."""
        return INetworkDefinition(flags)

    def create_builder_config(self) -> IBuilderConfig:
        """A config with default options."""
        return IBuilderConfig()

    def create_optimization_profile(self) -> IOptimizationProfile:
        """A profile without shapes."""
        return IOptimizationProfile()

    def get_plugin_registry(self) -> IPluginRegistry:
        """The process's registry of plugins."""
        return get_plugin_registry()

    def reset(self) -> None:
        """Does nothing: a builder keeps no state."""

    def is_network_supported(self, network: INetworkDefinition, config: IBuilderConfig) -> bool:
        """True if all layers are valid; the log names the first one that is not."""
        try:
            network.check()
        except WhetError as e:
            report_error(self.logger, self.error_recorder, e, ErrorCodeTRT.INVALID_ARGUMENT)
            return False
        return True

    def build_serialized_network(self, network: INetworkDefinition, config: IBuilderConfig) -> IHostMemory | None:
        """The bytes of the engine; None if the build fails, with the reason in the log."""
        plan = self._build(network, config)
        return None if plan is None else IHostMemory(engine_bytes(plan))

    def build_serialized_network_to_stream(self, network: INetworkDefinition, config: IBuilderConfig, writer: IStreamWriter) -> bool:
        """Writes the bytes of the engine; False if the build fails or the writer takes less."""
        data = self.build_serialized_network(network, config)
        return data is not None and writer.write(bytes(data)) == len(data)

    def build_engine_with_config(self, network: INetworkDefinition, config: IBuilderConfig) -> ICudaEngine | None:
        """The loaded engine; None if the build fails."""
        data = self.build_serialized_network(network, config)
        return None if data is None else Runtime(self.logger).deserialize_cuda_engine(data)

    def _build(self, network: INetworkDefinition, config: IBuilderConfig) -> EnginePlan | None:
        try:
            network.check()
            return config.build(network, self.logger)
        except WhetError as e:
            report_error(self.logger, self.error_recorder or network.error_recorder, e, ErrorCodeTRT.INVALID_CONFIG)
            return None
