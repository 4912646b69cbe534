"""Calls of an engine from any thread: pooled contexts; NumPy, torch and CuPy arrays in, and the same kind out."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from whet.errors import ShapeError
from whet.forks import make_lock
from whet.registry import suggest_name
from whet.runtime.dlpack import DeviceArray, on_gpu, to_device_array

if TYPE_CHECKING:
    from whet.network import TensorType
    from whet.runtime.context import Context
    from whet.runtime.engine import Engine

_MAX_IDLE = 16  # contexts kept for later calls; each has its own arena

_NUMPY = {np.ndarray}

# torch's types that NumPy lacks: name -> (torch's type of the same size, NumPy's type from ml_dtypes)
_EXTENSION_TYPES: dict[str, tuple[str, Any]] = {
    "bfloat16": ("int16", ml_dtypes.bfloat16),
    "float8_e4m3fn": ("uint8", ml_dtypes.float8_e4m3fn),
    "float8_e5m2": ("uint8", ml_dtypes.float8_e5m2),
}


class ContextPool:
    """Idle contexts of an engine. Concurrent calls get different contexts; a call reuses the context of the latest finished one."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self.idle: list[Context] = []
        self._lock = make_lock()
        self._open = True

    def lend(self) -> Context:
        """A context for the calling thread, which calls `take_back` with it after a successful call, and closes it after a failed one. Raises
        ContextError for a closed engine, BackendError without memory for a new context."""
        with self._lock:
            if self.idle:
                return self.idle.pop()
        return self._engine.create_context()

    def take_back(self, context: Context) -> None:
        """Keeps a context for later calls, or closes it."""
        with self._lock:
            keep = self._open and len(self.idle) < _MAX_IDLE
            if keep:
                self.idle.append(context)
        if not keep:
            context.close()

    def close(self) -> None:
        """Closes the idle contexts, and the lent ones when they come back."""
        with self._lock:
            idle, self.idle, self._open = self.idle, [], False
        for context in idle:
            context.close()


def call_engine(engine: Engine, pool: ContextPool, inputs: Any) -> Any:
    """Implements `Engine.run`."""
    named = name_inputs(engine, inputs)
    is_numpy = set(map(type, named.values())) <= _NUMPY  # the common case, without conversions
    device = None if is_numpy else next((a for a in named.values() if on_gpu(a)), None)
    if device is not None and engine.plan.tail is not None:
        raise ShapeError("inputs: the sizes of this engine's outputs depend on the data, so that it gives arrays in host memory; give such arrays")
    context = pool.lend()
    try:
        if is_numpy:
            outputs = context.run(named)
        elif device is None:
            kind = next(iter(named.values()), None)
            arrays = {n: _to_host_array(a, engine.input_types[n]) for n, a in named.items()}
            outputs = {n: _convert_like(a, kind) for n, a in context.run(arrays).items()}
        else:
            outputs = _run_on_device(context, named, device)
    except BaseException:
        context.close()
        raise
    pool.take_back(context)
    if type(inputs) is dict or isinstance(inputs, Mapping):
        return outputs
    values = list(outputs.values())
    return values if isinstance(inputs, list | tuple) and (len(engine.input_types) > 1 or _is_list_of_arrays(inputs)) else _unwrap_single(values)


def call_with(engine: Engine, arrays: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
    """Implements `engine(*arrays, **named)`. Raises ShapeError for both kinds at once."""
    if arrays and named:
        raise ShapeError(f"inputs: {len(arrays)} by position and {', '.join(named)} by name; give all by position or all by name")
    if named or not arrays:
        return engine.run(dict(named))
    if len(arrays) == 1:
        return engine.run(arrays[0])
    return _unwrap_single(engine.run(list(arrays)))


def _unwrap_single(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else tuple(values)


def _is_list_of_arrays(inputs: Any) -> bool:
    """True for a list of inputs; False for one input that is given as (nested) lists of numbers."""
    return isinstance(inputs, list | tuple) and all(hasattr(a, "__array__") or hasattr(a, "__dlpack__") for a in inputs)


def name_inputs(engine: Engine, inputs: Any) -> dict[str, Any]:
    """The inputs of a call by name: from a mapping, a list in the engine's order, or the array of the only input. Raises ShapeError."""
    names = engine.input_types
    if type(inputs) is dict and inputs.keys() == names.keys():
        return inputs
    if type(inputs) is np.ndarray and len(names) == 1:
        return dict.fromkeys(names, inputs)
    if isinstance(inputs, Mapping):
        for name in inputs:
            if name not in names:
                raise ShapeError(f"inputs: the engine has no input {name!r}.{suggest_name(str(name), list(names))} It takes {_describe(names)}.")
        given = dict(inputs)
    elif _is_list_of_arrays(inputs) or (isinstance(inputs, list | tuple) and len(names) != 1):
        if len(inputs) != len(names):
            raise ShapeError(f"inputs: the list holds {len(inputs)} arrays, the engine takes {len(names)}: {_describe(names)}")
        given = dict(zip(names, inputs, strict=True))
    elif len(names) == 1:
        given = dict.fromkeys(names, inputs)
    else:
        raise ShapeError(f"inputs: one {type(inputs).__name__} for {len(names)} inputs; give a list or a dict of {_describe(names)}")
    if missing := [n for n in names if n not in given]:
        raise ShapeError(f"inputs: '{missing[0]}' is missing; the engine takes {_describe(names)}")
    return given


def _describe(types: Mapping[str, TensorType]) -> str:
    return ", ".join(f"{n}: {t}" for n, t in types.items())


def _find_library(value: Any) -> tuple[str, Any]:
    """("torch" or "cupy", the imported module) of an array of that library, else ("", None). The caller has imported the library already."""
    for name, kind in (("torch", "Tensor"), ("cupy", "ndarray")):
        module = sys.modules.get(name)
        if module is not None and isinstance(value, getattr(module, kind, ())):
            return name, module
    return "", None


def _to_host_array(value: Any, type_: TensorType) -> Any:
    """A torch tensor in host memory as a NumPy array over the same memory, without its gradient; lists and numbers as arrays of the input's
    type; other values unchanged."""
    name, torch = _find_library(value)
    if name != "torch":
        is_plain = isinstance(value, list | tuple | int | float)
        return np.asarray(value, type_.dtype.numpy) if is_plain else value
    value = value.detach()
    if (known := _EXTENSION_TYPES.get(str(value.dtype).removeprefix("torch."))) is None:
        return value.numpy()
    same_size, numpy_type = known
    return value.contiguous().view(getattr(torch, same_size)).numpy().view(numpy_type)


def _convert_like(array: np.ndarray, like: Any) -> Any:
    """A host array as a torch tensor if `like` is one."""
    name, torch = _find_library(like)
    if name != "torch":
        return array
    for torch_type, (same_size, numpy_type) in _EXTENSION_TYPES.items():
        if array.dtype == numpy_type:
            return torch.from_numpy(array.view(same_size)).view(getattr(torch, torch_type))
    return torch.from_numpy(array)


def _to_row_major(value: Any) -> Any:
    """A torch or CuPy array with row-major strides, without its gradient; copied if necessary."""
    name, module = _find_library(value)
    if name == "torch":
        return value.detach().contiguous()
    return module.ascontiguousarray(value) if name == "cupy" else value


def _run_on_device(context: Context, named: Mapping[str, Any], like: Any) -> dict[str, Any]:
    """Runs on tensors in GPU memory; the outputs are new tensors there, of the library of `like` (DeviceArray for libraries other than those)."""
    name, module = _find_library(like)
    if name == "torch":
        module.cuda.current_stream(like.device).synchronize()  # the run is ordered by the default stream only
    elif name == "cupy":
        module.cuda.get_current_stream().synchronize()
    inputs = context.engine.input_types
    given = {n: to_device_array(n, _to_row_major(a)) if on_gpu(a) else np.asarray(_to_host_array(a, inputs[n])) for n, a in named.items()}
    for n, a in given.items():  # all shapes before the first bind, which checks them together
        context.set_input_shape(n, a.shape)
    for n, a in given.items():
        context.bind(n, a)
    outputs: dict[str, DeviceArray] = {n: context.device_array(n) for n in context.output_names}
    for n, a in outputs.items():
        context.bind(n, a)
    context.execute()
    context.unbind()
    if module is None:
        return dict(outputs)
    return {n: module.from_dlpack(a) for n, a in outputs.items()}
