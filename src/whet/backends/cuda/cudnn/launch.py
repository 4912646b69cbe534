"""A plan of cuDNN with its addresses, ready to go on a stream or into a graph's capture."""

from __future__ import annotations

from whet.backends.cuda.cudnn.convolution import Plan, pointers
from whet.backends.cuda.cudnn.library import check, handle, loaded
from whet.backends.cuda.launch import GpuWork
from whet.backends.cuda.stream import Stream


class CudnnLaunch(GpuWork):
    """One run of a plan; `addresses` are those of the tensors by their numbers, `workspace` has as many bytes as the plan says."""

    def __init__(self, plan: Plan, addresses: dict[int, int], workspace: int) -> None:
        self._plan, self._pack = plan, pointers(addresses, workspace)

    def run(self, stream: Stream) -> None:
        """Put it on the stream."""
        with handle(stream) as taken:
            check(loaded().cudnnBackendExecute(taken, self._plan.descriptor.handle, self._pack.handle), "running a plan")
