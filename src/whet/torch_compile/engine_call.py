"""An engine as a function of torch tensors, on the tensors' memory: on the CPU, and on a GPU on torch's current stream."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from whet.engine.plan import EnginePlan
from whet.errors import ShapeError
from whet.forks import make_lock
from whet.runtime import Runtime
from whet.runtime.memory import ALIGNMENT

_MAX_IDLE = 8  # contexts that are kept for later calls, over all shapes
_MAX_ACCEPTED = 1024  # signatures of arguments that were checked against the profiles
_GPU_ALIGNMENT = 16  # bytes; required by vector accesses and bulk copies of GPU kernels


_describe = attrgetter("shape", "dtype", "device", "layout")  # faster than the same in Python
_address = torch.Tensor.data_ptr
torch_guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)  # of torch's own compiler; private, so that it may be missing


class EngineCall:
    """An engine for torch tensors in the order of its inputs. Thread-safe: each call uses a context of its own.

    call.signature(tensors).run(tensors)        signature.why_unfit says why the engine cannot take such tensors; "" if it can

    `latest` is the signature of the previous call: most calls have the same one, and `latest.matches(*tensors)` is faster than `signature`.
    """

    def __init__(self, plan: EnginePlan):
        self.engine = Runtime(threads=plan.threads).load(plan)
        self.inputs, self.outputs = list(self.engine.inputs), list(self.engine.outputs)
        self._dtypes = [get_torch_dtype(self.engine.dtype(n).numpy) for n in self.inputs]
        self.output_dtypes = [get_torch_dtype(self.engine.dtype(n).numpy) for n in self.outputs]
        self.device = torch.device("cpu") if self.engine.backend.capabilities.host_memory else torch.device("cuda", self.engine.backend.device_number)
        self._check = self.engine.create_context()
        self._lock = make_lock()
        self.signatures: OrderedDict[tuple[Any, ...], Signature] = OrderedDict()
        self.latest = Signature(self, (), "no tensors were given")
        self.contexts = 0  # those of all signatures

    def signature(self, tensors: Sequence[Any]) -> Signature:
        """The shapes, types and device of these tensors. Raises AttributeError if one is no tensor."""
        latest = self.latest
        if len(tensors) == len(self.inputs) and latest.matches(*tensors):
            return latest
        key = tuple(map(_describe, tensors))
        found = self.signatures.get(key) or self._add(key, tensors)
        found.used = next(_clock)
        if not found.why_unfit and not found.retired:
            if not found.matches(*tensors):
                found.matches = make_guard(tensors)
            self.latest = found
        return found

    def _add(self, key: tuple[Any, ...], tensors: Sequence[Any]) -> Signature:
        with self._lock:
            found = self.signatures.get(key)  # another thread may have added it
            if found is None:
                found = self.signatures[key] = Signature(self, [t.shape for t in tensors], self._why_unfit(tensors))
            if len(self.signatures) > _MAX_ACCEPTED:
                _, old = self.signatures.popitem(last=False)
                old.retired, old.matches = True, match_none
                self.contexts -= old.drop_idle()
        return found

    def _why_unfit(self, tensors: Sequence[Any]) -> str:
        """Why the engine cannot take these tensors (type, device, shape outside every profile); "" if it can."""
        if len(tensors) != len(self.inputs):
            return f"it takes {len(self.inputs)} tensors, not {len(tensors)}"
        for name, dtype, t in zip(self.inputs, self._dtypes, tensors, strict=True):
            if t.dtype != dtype:
                return f"input '{name}' is {t.dtype}, the engine takes {dtype}"
            if t.device != self.device:
                return f"input '{name}' is on {t.device}, the engine runs on {self.device}"
            if t.layout is not torch.strided:
                return f"input '{name}' is {t.layout}, the engine takes dense tensors"
        try:
            self._check.input_shapes({n: tuple(t.shape) for n, t in zip(self.inputs, tensors, strict=True)})
            _ = self._check.profile_index
        except ShapeError as e:
            return str(e)
        return ""

    def new_slot(self, signature: Signature) -> _Slot:
        """Another context, counted; the least recently used signatures lose their idle ones beyond _MAX_IDLE."""
        slot = (_GpuSlot if self.device.type == "cuda" else _CpuSlot)(self, signature)
        with self._lock:
            self.contexts += 1
            for other in sorted(self.signatures.values(), key=lambda s: s.used):
                if self.contexts <= _MAX_IDLE:
                    break
                if other is not signature:
                    self.contexts -= other.drop_idle()
        return slot

    def discard_context(self) -> None:
        """Counts a context that is not kept."""
        with self._lock:
            self.contexts -= 1


_clock = count()


class Signature:
    """Tensors of certain shapes and types: contexts that are ready to run on them, or the reason why the engine cannot."""

    def __init__(self, call: EngineCall, shapes: Sequence[Any], why_unfit: str):
        self.call, self.shapes, self.why_unfit = call, shapes, why_unfit
        self.used, self.retired = 0, False
        #: True only for tensors of this signature that are row-major and need no resolution of lazy operations; a function of the tensors
        self.matches: Callable[..., bool] = match_none
        self._on_gpu = call.device.type == "cuda"
        self._current_stream = make_stream_getter(call.device) if self._on_gpu else int
        self._idle_on_cpu: list[_Slot] = []
        # by CUDA stream: runs on one stream are ordered, so they may share a context. torch's default stream is 0: on a GPU that is a list of its own
        self.idle: dict[int, list[_Slot]] = {} if self._on_gpu else {0: self._idle_on_cpu}

    def run(self, tensors: Sequence[Any]) -> list[Any]:
        """New tensors with the outputs, which require no gradients. On a GPU the work is enqueued on torch's current stream."""
        stream, idle = 0, self._idle_on_cpu
        if self._on_gpu:
            stream = self._current_stream()
            idle = self.idle.get(stream) or self.idle.setdefault(stream, [])
        try:
            slot = idle.pop()  # atomic, as append is
        except IndexError:
            slot = self.call.new_slot(self)
        try:
            results = slot.run(tensors, stream)
        except BaseException:
            self.call.discard_context()
            raise
        if self.call.contexts > _MAX_IDLE or self.retired:
            self.call.discard_context()
        else:
            idle.append(slot)
        return results

    def run_matching(self, tensors: Sequence[Any]) -> list[Any]:
        """`run` for tensors of which `matches` is True. On the CPU it has no function calls that it can do without: they are most of the time of a
        small network."""
        try:
            slot = self._idle_on_cpu.pop()
        except IndexError:
            return self.run(tensors)
        addresses, results = [*map(_address, tensors)], []
        for made in slot.made:
            result = _empty_on_cpu(*made)
            results.append(result)
            addresses.append(_address(result))
        for a in addresses:
            if a % ALIGNMENT:
                break
        else:
            if slot.all_direct:
                try:
                    slot.addressed.run(addresses)
                except BaseException:
                    self.call.discard_context()
                    raise
                self._idle_on_cpu.append(slot)
                return results
        self._idle_on_cpu.append(slot)
        return self.run(tensors)

    def drop_idle(self) -> int:
        """Releases the idle contexts; returns their number."""
        dropped = 0
        for idle in self.idle.values():
            while idle:
                try:
                    idle.pop()
                except IndexError:  # another thread took it
                    break
                dropped += 1
        return dropped


class _Slot(ABC):
    """A context for tensors of one signature. Kernels use the tensors' memory where they can; other tensors are copied through buffers."""

    def __init__(self, call: EngineCall, signature: Signature):
        self.context = call.engine.create_context()
        shapes = self.context.input_shapes({n: tuple(s) for n, s in zip(call.inputs, signature.shapes, strict=True)})
        made = self.context.output_shapes()
        self.device = call.device
        self.made = [(made[n], _compute_strides(made[n]), dtype) for n, dtype in zip(call.outputs, call.output_dtypes, strict=True)]
        with torch.inference_mode(False):  # a buffer made in inference mode could not be written outside of it
            self.sources = [self._buffer(n, shapes[n]) for n in call.inputs]
            self.targets = [self._buffer(n, made[n]) for n in call.outputs]
        self.addressed = self.context.addressed_run()
        direct = self.addressed.direct  # in the order of binding
        self.sources_direct, self.targets_direct = [n in direct for n in call.inputs], [n in direct for n in call.outputs]
        self.all_direct = all((*self.sources_direct, *self.targets_direct))

    @abstractmethod
    def _buffer(self, name: str, shape: tuple[int, ...]) -> Any:
        """A tensor that is bound to an input or output."""

    @abstractmethod
    def run(self, tensors: Sequence[Any], stream: int) -> list[Any]:
        """New tensors with the outputs for tensors of the signature."""


class _CpuSlot(_Slot):
    def __init__(self, call: EngineCall, signature: Signature):
        super().__init__(call, signature)
        addresses = [t.data_ptr() for t in (*self.sources, *self.targets)]
        n = len(self.sources)
        self._inputs = list(zip(self.sources, addresses[:n], self.sources_direct, strict=True))
        self._outputs = list(zip(self.targets, addresses[n:], self.targets_direct, strict=True))

    def _buffer(self, name: str, shape: tuple[int, ...]) -> Any:
        array = self.context.input_array(name) if name in self.context.engine.inputs else self.context.output_array(name)
        self.context.bind(name, array)
        return wrap_array(array)

    def run(self, tensors: Sequence[Any], stream: int) -> list[Any]:
        addresses, results, copied = [], [], []
        for t, (buffer, address, direct) in zip(tensors, self._inputs, strict=True):
            if direct and not (given := t.data_ptr()) % ALIGNMENT and _is_dense(t):
                addresses.append(given)
                continue
            buffer.copy_(t.detach())
            if direct:
                addresses.append(address)
        for (buffer, address, direct), made in zip(self._outputs, self.made, strict=True):
            result = _empty_on_cpu(*made)
            results.append(result)
            if direct and not (given := result.data_ptr()) % ALIGNMENT:
                addresses.append(given)
                continue
            copied.append((result, buffer))
            if direct:
                addresses.append(address)
        self.addressed.run(addresses)
        for result, buffer in copied:
            result.copy_(buffer)
        return results


class _GpuSlot(_Slot):
    def __init__(self, call: EngineCall, signature: Signature):
        super().__init__(call, signature)
        if self.all_direct:  # every run replaces all addresses, so that the buffers are not needed
            self.context.unbind()
            self.sources, self.targets = [], []

    def _buffer(self, name: str, shape: tuple[int, ...]) -> Any:
        made = torch.zeros(shape, dtype=get_torch_dtype(self.context.engine.dtype(name).numpy), device=self.device)
        self.context.bind(name, made)
        return made

    def run(self, tensors: Sequence[Any], stream: int) -> list[Any]:
        if not self.all_direct:
            return self._run_on_buffers(tensors)
        addresses, held = [], []
        for t in tensors:
            if t.data_ptr() % _GPU_ALIGNMENT or not _is_dense(t):
                t = t.detach().resolve_neg().clone(memory_format=torch.contiguous_format)
                held.append(t)
            addresses.append(t.data_ptr())
        results = [torch.empty_strided(shape, strides, dtype=dtype, device=self.device) for shape, strides, dtype in self.made]
        addresses += [r.data_ptr() for r in results]
        self.addressed.start(addresses, stream)
        return results

    def _run_on_buffers(self, tensors: Sequence[Any]) -> list[Any]:
        for buffer, t in zip(self.sources, tensors, strict=True):
            buffer.copy_(t.detach())
        torch.cuda.current_stream(self.device).synchronize()
        self.context.execute()
        return [buffer.clone() for buffer in self.targets]


def make_stream_getter(device: Any) -> Callable[[], int]:
    """A function that gives the address of torch's current stream on a GPU; the one of Triton's launcher, if torch has it: it takes 0.2 us, not 6."""
    raw, number = getattr(torch._C, "_cuda_getCurrentRawStream", None), device.index
    if raw is None:
        return lambda: torch.cuda.current_stream(device).cuda_stream
    return partial(raw, number)


def _is_dense(tensor: Any) -> bool:
    """True if the tensor's memory holds its values in row-major order."""
    return bool(tensor.is_contiguous() and not tensor.is_neg())


def match_none(*tensors: Any) -> bool:
    """The guard of a signature without one."""
    return False


def make_guard(tensors: Sequence[Any]) -> Callable[..., bool]:
    """A function that is True only for tensors of the same types, devices, shapes and strides as these; one that is never True if one of these is not
    dense. It is torch's own check of arguments, in a fifth of the time of the same in Python. It takes as many tensors as these."""
    if torch_guards is None or not all(map(_is_dense, tensors)):
        return match_none
    try:
        check = torch_guards.TensorGuards(
            *tensors, dynamic_dims_sizes=[list(t.shape) for t in tensors], dynamic_dims_strides=[list(t.stride()) for t in tensors]
        ).check
        return check if check(*tensors) is True else match_none
    except (AttributeError, TypeError, RuntimeError, ValueError):  # another version of torch
        return match_none


def _allocate_empty(shape: Sequence[int], strides: Sequence[int], dtype: Any) -> Any:
    return torch.empty_strided(shape, strides, dtype=dtype)


#: half the time of torch.empty_strided
_empty_on_cpu: Callable[[Sequence[int], Sequence[int], Any], Any] = getattr(torch_guards, "_empty_strided_cpu", _allocate_empty)


def _compute_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a row-major tensor, in elements."""
    strides, each = [], 1
    for d in reversed(shape):
        strides.append(each)
        each *= max(d, 1)
    return tuple(reversed(strides))


def get_torch_dtype(dtype: np.dtype) -> Any:
    """The torch type of a NumPy (or ml_dtypes) type. Raises ShapeError if torch has none."""
    found = getattr(torch, dtype.name, None)
    if not isinstance(found, torch.dtype):
        raise ShapeError(f"torch has no element type {dtype.name}")
    return found


def wrap_array(array: np.ndarray) -> Any:
    """A tensor that shares the memory of a row-major array, also of a type that only torch and ml_dtypes know (bfloat16, float8)."""
    if not array.size or not array.ndim:
        return torch.from_numpy(array.reshape(-1).view(np.uint8)).view(get_torch_dtype(array.dtype)).reshape(array.shape)
    return torch.from_numpy(array.view(np.uint8)).view(get_torch_dtype(array.dtype))


def convert_to_array(tensor: Any) -> np.ndarray:
    """A NumPy array with a tensor's values."""
    t = tensor.detach().cpu().contiguous()
    if t.dtype in (torch.bfloat16, torch.float8_e4m3fn):
        import ml_dtypes

        return t.view(torch.uint8).numpy().view(getattr(ml_dtypes, str(t.dtype).removeprefix("torch."))).reshape(tuple(t.shape))
    return t.numpy()
