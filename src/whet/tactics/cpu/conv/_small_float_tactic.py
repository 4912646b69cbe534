"""Base class of the compiled tactics that read and write bf16 or f16, with constant weights."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from whet.backends import Backend
from whet.network import BF16, F32, DType, Layer
from whet.tactics._base import Config, Kernel, Operand, PlanRefused, Signature
from whet.tactics._fused import get_source_index
from whet.tactics.cpu._llvm.epilogue import Chain, match_chain
from whet.tactics.cpu._llvm.kernel import CompiledTactic
from whet.tactics.cpu._llvm.packing import list_small_floats, why_no_small_float
from whet.tactics.cpu.onednn._kernel import is_static, list_runtime_tensors


class SmallFloatTactic(CompiledTactic):
    """A tactic for CPUs with AVX512-BF16, or AVX512-FP16 if `stored` is f16."""

    format = "nhwc"
    stored: ClassVar[DType] = BF16

    @abstractmethod
    def why_not_layer(self, layer: Layer) -> str | None:
        """The reason against a layer other than its types and epilogue, or None."""

    @abstractmethod
    def plan_kernel(self, layer: Layer, signature: Signature, chain: Chain, threads: int) -> Kernel:
        """The kernel of a layer that `why_not` accepts, with its epilogue as `chain`."""

    def unavailable(self) -> str | None:
        return super().unavailable() or why_no_small_float(self.stored)

    def why_not(self, layer: Layer) -> str | None:
        if reason := super().why_not(layer) or self.why_not_layer(layer):
            return reason
        if any(t.dtype not in (F32, self.stored) for t in list_runtime_tensors(layer)):
            return f"computes in {self.stored}"
        chain = self.find_chain(layer)
        return chain if isinstance(chain, str) else None

    def find_chain(self, layer: Layer) -> Chain | str:
        """The epilogue, or why the kernels cannot compute it."""
        return match_chain(layer)

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        chain = self.find_chain(layer)
        if self.unavailable() or self.why_not(layer) or not is_static(layer) or isinstance(chain, str):
            return []
        if self.stored not in list_small_floats(backend.capabilities.features):
            return []
        operand, read = Operand(self.format, self.stored), (get_source_index(layer), chain.residual)
        return [Signature(tuple(operand if i in read else None for i in range(len(layer.inputs))), (operand,))]

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        return self.unavailable()

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> Kernel:
        if reason := self.unavailable() or self.why_not(layer):
            raise PlanRefused(reason)
        chain = self.find_chain(layer)
        assert isinstance(chain, Chain), "why_not refuses other layers"
        return self.plan_kernel(layer, signature, chain, backend.threads)
