"""A cuDNN plan with its addresses, which can be enqueued on a stream or captured into a graph."""

from __future__ import annotations

from whet.backends.cuda.cudnn.convolution import Plan, make_variant_pack
from whet.backends.cuda.cudnn.library import check, handle, require_library
from whet.backends.cuda.launch import GpuWork
from whet.backends.cuda.stream import Stream


class CudnnLaunch(GpuWork):
    """One run of a plan; `addresses` are tensor addresses by tensor number, `workspace` is the address of the plan's workspace."""

    def __init__(self, plan: Plan, addresses: dict[int, int], workspace: int) -> None:
        self._plan, self._pack = plan, make_variant_pack(addresses, workspace)

    def run(self, stream: Stream) -> None:
        """Enqueues the plan on the stream."""
        with handle(stream) as library_handle:
            check(require_library().cudnnBackendExecute(library_handle, self._plan.descriptor.handle, self._pack.handle), "running a plan")
