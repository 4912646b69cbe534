"""Calls of an engine with tensors in GPU memory, on a simulated GPU: shapes, kinds, the library's functions that are called."""

import sys
import types

import numpy as np
import pytest

import whet
from support.standin_gpu import StandInGpu
from whet.errors import ShapeError
from whet.network import parse_network
from whet.runtime.dlpack import DeviceArray

NET = "network two source\nin %a: f32[N,64]\nin %b: f32[N,64]\n%y = Add(%a, %b)\nout %y\n"
RANGE = ((1, 64), (2, 64), (4, 64))


@pytest.fixture
def engine(standin_gpu, monkeypatch):
    monkeypatch.setattr(StandInGpu, "after_default_stream", lambda self, executable: None, raising=False)
    return whet.build(parse_network(NET), shapes={"a": RANGE, "b": RANGE}, backend="cuda", verify=False, optimization_level=0, timing_cache="")


def tensor(engine, shape):
    buffer = engine.backend.allocate(4 * int(np.prod(shape)))
    return DeviceArray(buffer.address, shape, engine.dtype("a"), engine.backend.device_number, buffer)


def test_tensors_of_another_batch_than_the_last_one(engine):
    for batch in (4, 1, 3):
        y = engine(tensor(engine, (batch, 64)), tensor(engine, (batch, 64)))
        assert isinstance(y, DeviceArray)
        assert y.shape == (batch, 64)
    (context,) = engine._pool.idle
    assert context._users == {}, "a pooled context keeps no array of the user"


def test_a_host_array_beside_a_tensor(engine):
    assert engine(a=tensor(engine, (3, 64)), b=np.ones((3, 64), np.float32))["y"].shape == (3, 64)
    with pytest.raises(ShapeError, match="axis 1: 63"):
        engine(tensor(engine, (3, 64)), tensor(engine, (3, 63)))


class CudaTensor:
    """The attributes of a torch.Tensor in GPU memory that calls use."""

    def __init__(self, array):
        self.array, self.device = array, "cuda:0"

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def detach(self):
        return self

    contiguous = detach


def test_outputs_are_of_the_library_of_the_first_tensor(engine, monkeypatch):
    waited = []

    def current_stream(device):
        return types.SimpleNamespace(synchronize=lambda: waited.append(device))

    torch = types.SimpleNamespace(Tensor=CudaTensor, cuda=types.SimpleNamespace(current_stream=current_stream), from_dlpack=CudaTensor)
    monkeypatch.setitem(sys.modules, "torch", torch)
    y = engine(CudaTensor(tensor(engine, (2, 64))), CudaTensor(tensor(engine, (2, 64))))
    assert isinstance(y, CudaTensor)
    assert waited == ["cuda:0"], "work on the caller's stream is complete before the run reads its results"


class CupyArray:
    """The attributes of a cupy.ndarray that calls use: memory on a GPU by DLPack, of which row-major arrays alone can be exported."""

    def __init__(self, array, row_major=True):
        self.array, self.row_major = array, row_major

    @property
    def __cuda_array_interface__(self):
        return {"shape": self.array.shape, "typestr": "<f4", "data": (self.array.address, False), "version": 3}

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options):
        assert self.row_major, "whet reads row-major memory"
        return self.array.__dlpack__(**options)


@pytest.fixture
def cupy(engine, monkeypatch):
    """A module with CuPy's names; `copied` lists the arrays that were copied, `waited` the current streams that were waited for."""
    module = types.SimpleNamespace(ndarray=CupyArray, copied=[], waited=[])

    def ascontiguousarray(a):
        if a.row_major:
            return a
        module.copied.append(a)
        return CupyArray(tensor(engine, a.array.shape))

    def get_current_stream():
        return types.SimpleNamespace(synchronize=lambda: module.waited.append("current"))

    module.ascontiguousarray, module.cuda = ascontiguousarray, types.SimpleNamespace(get_current_stream=get_current_stream)
    module.from_dlpack = lambda a: CupyArray(a)
    monkeypatch.setitem(sys.modules, "cupy", module)
    return module


def test_cupy_arrays_give_cupy_arrays_in_the_engines_memory(engine, cupy):
    y = engine(CupyArray(tensor(engine, (3, 64))), CupyArray(tensor(engine, (3, 64))))
    assert isinstance(y, CupyArray)
    assert y.__cuda_array_interface__["shape"] == (3, 64)
    assert y.array.address != 0
    assert cupy.waited == ["current"], "work on CuPy's current stream is complete before the run reads its results"
    assert cupy.copied == [], "row-major arrays are used in place"


def test_a_cupy_array_in_another_order_is_copied(engine, cupy):
    turned = CupyArray(tensor(engine, (3, 64)), row_major=False)
    named = engine(a=turned, b=np.ones((3, 64), np.float32))
    assert isinstance(named["y"], CupyArray)
    assert cupy.copied == [turned]


def test_a_cupy_array_of_another_type_is_refused(engine, cupy):
    half = tensor(engine, (3, 64))
    half = DeviceArray(half.address, half.shape, whet.network.F16, half.device, half.owner)
    with pytest.raises(ShapeError, match=r"'a'.*f16.*f32"):
        engine(CupyArray(half), CupyArray(tensor(engine, (3, 64))))
