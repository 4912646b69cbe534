"""Builder: network definition + config -> serialized engine, on the CPU backend."""

from __future__ import annotations

from whet.engine import engine_bytes
from whet.errors import WhetError
from whet.trt.config import IBuilderConfig
from whet.trt.handle import Handle
from whet.trt.logger import ILogger
from whet.trt.network import INetworkDefinition
from whet.trt.profile import IOptimizationProfile
from whet.trt.runtime import ICudaEngine, IHostMemory, Runtime


class Builder(Handle):
    """Creates networks, configs and profiles, and builds engines. Build errors go to the logger, and the result is None."""

    platform_has_fast_fp16 = False  # the CPU backend computes in FP32, BF16 or INT8
    platform_has_fast_int8 = True
    platform_has_fast_sparsity = False  # no CPU kernel skips the zeros of 2:4 weights
    platform_has_tf32 = False
    num_DLA_cores = 0

    def __init__(self, logger: ILogger):
        self.logger = logger

    def create_network(self, flags: int = 0) -> INetworkDefinition:
        """An empty network. Batches are always explicit."""
        return INetworkDefinition(flags)

    def create_builder_config(self) -> IBuilderConfig:
        """A config with default options."""
        return IBuilderConfig()

    def create_optimization_profile(self) -> IOptimizationProfile:
        """A profile without shapes."""
        return IOptimizationProfile()

    def build_serialized_network(self, network: INetworkDefinition, config: IBuilderConfig) -> IHostMemory | None:
        """The bytes of the engine; None if the build fails, with the reason in the log."""
        try:
            network.check()
            return IHostMemory(engine_bytes(config.build(network)))
        except WhetError as e:
            self.logger.log(ILogger.ERROR, str(e))
            return None

    def build_engine_with_config(self, network: INetworkDefinition, config: IBuilderConfig) -> ICudaEngine | None:
        """The loaded engine; None if the build fails."""
        data = self.build_serialized_network(network, config)
        return None if data is None else Runtime(self.logger).deserialize_cuda_engine(data)
