"""DLPack without torch: round trips over memory that claims to be on a GPU, refusals, and the release of memory by capsules."""

import gc
import weakref
from dataclasses import replace
from math import prod

import numpy as np
import pytest

from whet.errors import ShapeError
from whet.network import BF16, F16, F32, I64
from whet.runtime import dlpack
from whet.runtime.dlpack import CUDA, DeviceArray, on_gpu, to_device_array


class Tensor:
    """The part of torch.Tensor that the import uses."""

    def __init__(self, array):
        self.array = array

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, *, stream=None):
        return self.array.__dlpack__(stream=stream)


class Owner:
    """An object that can be weakly referenced."""


@pytest.mark.parametrize("dtype", [F32, F16, BF16, I64])
def test_exported_tensors_can_be_imported(dtype):
    memory = np.arange(24, dtype=np.int64)
    given = DeviceArray(memory.ctypes.data, (2, 3, 4), dtype, 1, memory)
    got = to_device_array("x", Tensor(given))
    assert (got.address, got.shape, got.dtype, got.device) == (given.address, given.shape, given.dtype, 1)
    assert got.nbytes == 24 * dtype.bits // 8
    assert on_gpu(given)
    assert not on_gpu(memory)


@pytest.mark.slow
def test_memory_lives_exactly_as_long_as_its_tensor():
    owner = Owner()
    watched = weakref.ref(owner)
    before = len(dlpack.exported)
    got = to_device_array("x", Tensor(DeviceArray(4096, (2,), F32, 0, owner)))
    del owner
    gc.collect()
    assert watched() is not None
    assert len(dlpack.exported) == before + 1
    del got
    gc.collect()
    assert watched() is None
    assert len(dlpack.exported) == before


def test_a_tensor_that_is_not_row_major_is_refused():
    class Strided(DeviceArray):
        def __dlpack__(self, *, stream=None):
            capsule = DeviceArray.__dlpack__(self)
            at = dlpack.python_api.PyCapsule_GetPointer(capsule, b"dltensor")
            tensor = dlpack.ctypes.cast(at, dlpack.ctypes.POINTER(dlpack.ManagedTensor)).contents.tensor
            self.kept.append((dlpack.ctypes.c_int64 * 2)(*self.steps))
            tensor.strides = self.kept[-1]
            return capsule

    made = Strided(4096, (2, 3), F32)
    object.__setattr__(made, "kept", [])
    for steps, good in (((3, 1), True), ((1, 2), False)):
        object.__setattr__(made, "steps", steps)
        if good:
            assert to_device_array("x", Tensor(made)).shape == (2, 3)
        else:
            with pytest.raises(ShapeError, match=r"'x'.*strides \[1, 2\].*contiguous"):
                to_device_array("x", Tensor(made))


def test_unsupported_types_are_refused():
    odd = replace(DeviceArray(4096, (2,), F32), dtype=replace(F32, bits=128))
    with pytest.raises(ShapeError, match="no element type"):
        to_device_array("x", Tensor(odd))


def test_a_gpu_tensor_is_refused_by_a_cpu_engine():
    from nets_runtime import engine_of_relu

    engine = engine_of_relu()
    context = engine.create_context()
    shape = tuple(context.input_shapes()["x"])
    with pytest.raises(ShapeError, match=r"is on a GPU.*backend 'cpu'"):
        context.bind("x", Tensor(DeviceArray(4096, shape, F32)))
    context.bind("x", np.full(shape, -1, np.float32))
    started = context.enqueue()
    started.synchronize()
    assert started.done
    assert context.fetch()["y"].tolist() == np.zeros(shape).tolist()
    assert prod(shape) > 1
    assert CUDA == 2
