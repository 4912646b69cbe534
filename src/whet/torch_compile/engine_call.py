"""An engine as a function of torch tensors: on the CPU through aligned host buffers, on a GPU on the tensors' memory and stream."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from whet.engine.plan import EnginePlan
from whet.errors import ShapeError
from whet.forks import new_lock
from whet.runtime import Runtime
from whet.runtime.context import Context

_MAX_IDLE = 8  # bound contexts that are kept for later calls, over all shapes
_MAX_ACCEPTED = 1024  # shapes that were checked against the profiles


class EngineCall:
    """Runs an engine on torch tensors, in the order of its inputs; returns new tensors. Thread-safe: each call uses a context of its own.

    Differentiation ends here: the outputs require no gradients.
    """

    def __init__(self, plan: EnginePlan):
        self.engine = Runtime(threads=plan.threads).load(plan)
        self.inputs, self.outputs = list(self.engine.inputs), list(self.engine.outputs)
        self._dtypes = [torch_dtype(self.engine.dtype(n).numpy) for n in self.inputs]
        self._output_dtypes = [torch_dtype(self.engine.dtype(n).numpy) for n in self.outputs]
        self.device = torch.device("cuda", self.engine.backend.device_number) if plan.backend == "cuda" else torch.device("cpu")
        self._check = self.engine.create_context()
        self._lock = new_lock()
        self._accepted: OrderedDict[tuple[Any, ...], str] = OrderedDict()
        self._idle: OrderedDict[tuple[Any, ...], list[_Slot]] = OrderedDict()

    def why_unfit(self, tensors: Sequence[Any]) -> str:
        """Why the engine cannot take these tensors (type, device, shape outside every profile); "" if it can."""
        key = tuple([(t.shape, t.dtype, t.device) for t in tensors])
        found = self._accepted.get(key)
        if found is None:
            with self._lock:
                found = self._accepted[key] = self._compare(tensors)
                if len(self._accepted) > _MAX_ACCEPTED:
                    self._accepted.popitem(last=False)
        return found

    def _compare(self, tensors: Sequence[Any]) -> str:
        if len(tensors) != len(self.inputs):
            return f"it takes {len(self.inputs)} tensors, not {len(tensors)}"
        for name, dtype, t in zip(self.inputs, self._dtypes, tensors, strict=True):
            if t.dtype != dtype:
                return f"input '{name}' is {t.dtype}, the engine takes {dtype}"
            if t.device != self.device:
                return f"input '{name}' is on {t.device}, the engine runs on {self.device}"
        try:
            self._check.input_shapes({n: tuple(t.shape) for n, t in zip(self.inputs, tensors, strict=True)})
            _ = self._check.profile_index
        except ShapeError as e:
            return str(e)
        return ""

    def __call__(self, tensors: Sequence[Any]) -> list[Any]:
        """The outputs for tensors that fit (`why_unfit`). On a GPU the work is enqueued on torch's current stream."""
        return self._on_gpu(tensors) if self.device.type == "cuda" else self._on_cpu(tensors)

    def _on_cpu(self, tensors: Sequence[Any]) -> list[Any]:
        key = tuple([t.shape for t in tensors])
        slot = self._take(key)
        if slot is None:
            with torch.inference_mode(False):  # a buffer made in inference mode could not be written outside of it
                slot = self._bound(tensors)
        for buffer, t in zip(slot.inputs, tensors, strict=True):
            buffer.copy_(t.detach() if t.requires_grad else t)
        slot.context.execute()
        results = [buffer.clone() for buffer in slot.outputs]
        self._give(key, slot)
        return results

    def _bound(self, tensors: Sequence[Any]) -> _Slot:
        """A context whose inputs and outputs are bound to aligned buffers for these shapes."""
        slot = _Slot(self.engine.create_context())
        slot.context.input_shapes({n: tuple(t.shape) for n, t in zip(self.inputs, tensors, strict=True)})
        for names, make, buffers in ((self.inputs, slot.context.input_array, slot.inputs), (self.outputs, slot.context.output_array, slot.outputs)):
            for n in names:
                array = make(n)
                slot.context.bind(n, array)
                buffers.append(tensor_over(array))
        return slot

    def _on_gpu(self, tensors: Sequence[Any]) -> list[Any]:
        stream = torch.cuda.current_stream(self.device)
        key = (stream.cuda_stream, *[t.shape for t in tensors])  # runs on one stream are ordered, so that they may share a context
        slot = self._take(key) or _Slot(self.engine.create_context())
        context = slot.context
        slot.inputs = [t.detach().contiguous() for t in tensors]
        for n, t in zip(self.inputs, slot.inputs, strict=True):
            context.bind(n, t)
        shapes = context.output_shapes()
        results = [torch.empty(shapes[n], dtype=d, device=self.device) for n, d in zip(self.outputs, self._output_dtypes, strict=True)]
        copies = [why for n, t in zip(self.outputs, results, strict=True) if (why := context.bind(n, t))]
        if copies:
            stream.synchronize()
            context.execute()
        else:
            slot.pending = context.enqueue(stream)
        self._give(key, slot)
        return results

    def _take(self, key: tuple[Any, ...]) -> _Slot | None:
        with self._lock:
            slots = self._idle.get(key)
            return slots.pop() if slots else None

    def _give(self, key: tuple[Any, ...], slot: _Slot) -> None:
        with self._lock:
            self._idle.setdefault(key, []).append(slot)
            self._idle.move_to_end(key)
            while sum(map(len, self._idle.values())) > _MAX_IDLE or len(self._idle) > _MAX_IDLE:
                self._idle.popitem(last=False)


class _Slot:
    """A context with the tensors bound to it."""

    def __init__(self, context: Context):
        self.context = context
        self.inputs: list[Any] = []
        self.outputs: list[Any] = []
        self.pending: Any = None


def torch_dtype(dtype: np.dtype) -> Any:
    """The torch type of a NumPy (or ml_dtypes) type. Raises ShapeError if torch has none."""
    found = getattr(torch, dtype.name, None)
    if not isinstance(found, torch.dtype):
        raise ShapeError(f"torch has no element type {dtype.name}")
    return found


def tensor_over(array: np.ndarray) -> Any:
    """A tensor that shares the memory of a row-major array, also of a type that only torch and ml_dtypes know (bfloat16, float8)."""
    if not array.size or not array.ndim:
        return torch.from_numpy(array.reshape(-1).view(np.uint8)).view(torch_dtype(array.dtype)).reshape(array.shape)
    return torch.from_numpy(array.view(np.uint8)).view(torch_dtype(array.dtype))


def array_of(tensor: Any) -> np.ndarray:
    """A NumPy array with a tensor's values."""
    t = tensor.detach().cpu().contiguous()
    if t.dtype in (torch.bfloat16, torch.float8_e4m3fn):
        import ml_dtypes

        return t.view(torch.uint8).numpy().view(getattr(ml_dtypes, str(t.dtype).removeprefix("torch."))).reshape(tuple(t.shape))
    return t.numpy()
