"""The contract of backends: they are discovered in the folder `whet/backends`; those without their device are skipped."""

import numpy as np
import pytest

import whet
from whet.backends import BACKENDS, Backend, Buffer, Call, Capabilities, get_backend, get_capabilities
from whet.errors import BackendError

NET = """network chain source
in %x: f32[4,6]
%a = Relu(%x)
%y = Add(%a, %x)
out %y
"""


@pytest.fixture(params=sorted(BACKENDS))
def backend(request) -> Backend:
    try:
        return get_backend(request.param)
    except BackendError as e:
        pytest.skip(str(e))


@pytest.fixture
def plan(backend):
    config = whet.BuildConfig(backend=backend.name, timing_cache="", verify=backend.capabilities.executes)
    return whet.builder.build(whet.network.parse_network(NET), config)


@pytest.mark.parametrize("missing", ["allocate", "stream", "seconds", "key", "describe"])
def test_a_backend_without_a_required_method_is_refused_at_once(missing):
    others = {"allocate", "stream", "seconds", "key", "describe"} - {missing}
    Short = type("Short", (Backend,), {name: lambda self: None for name in others})
    with pytest.raises(TypeError, match=f"abstract method '?{missing}"):
        Short()


def test_it_describes_itself(backend):
    assert isinstance(backend, BACKENDS[backend.name])
    assert isinstance(backend.capabilities, Capabilities)
    assert backend.threads >= 1
    assert backend.key() == get_backend(backend.name).key() != ""
    assert {"backend", "model"} <= set(backend.describe())
    assert isinstance(backend.caution, str)
    assert backend.lost == ""


def test_class_capabilities_hold_for_the_open_device(backend):
    """Capabilities read before a device is open agree with those of the device."""
    known, here = vars(get_capabilities(backend.name)), vars(backend.capabilities)
    open_device = {"features", "multiprocessors", "shared_memory", "cache_bytes"}
    assert {k for k in known if here[k] != known[k]} <= open_device | {"unsupported_types"}
    assert known["unsupported_types"] <= here["unsupported_types"]


@pytest.mark.parametrize("alignment", [1, 64, 256])
def test_memory_is_aligned_zeroed_and_keeps_its_contents(backend, alignment):
    backend.activate()
    buffer = backend.allocate(1000, alignment)
    assert isinstance(buffer, Buffer)
    assert (buffer.address % alignment, buffer.nbytes) == (0, 1000)
    assert (buffer.array is not None) == backend.capabilities.host_memory
    from whet.runtime.memory import read_bytes, write_bytes

    assert not read_bytes(backend, buffer, 0, 1000).any()
    write_bytes(backend, buffer, 10, np.arange(20, dtype=np.uint8))
    if backend.capabilities.executes:
        assert read_bytes(backend, buffer, 9, 22).tolist() == [0, *range(20), 0]


def test_too_much_memory_is_refused_with_its_size(backend):
    if backend.capabilities.executes:
        with pytest.raises(BackendError, match="MiB"):
            backend.allocate(1 << 50)


def test_a_built_engine_runs_and_is_timed_launch_by_launch(backend, plan):
    from whet.runtime import bind

    bound = bind(plan, backend)
    x = np.linspace(-2, 2, 24, dtype=np.float32).reshape(4, 6)
    bound.feed({"x": x})
    bound.run()
    if backend.capabilities.executes:
        np.testing.assert_allclose(bound.fetch()["y"], np.maximum(x, 0) + x, rtol=1e-6)
    launches = [call for calls in bound.step_calls for call in calls]
    assert launches
    assert all(isinstance(call, Call) and call.label for call in launches)
    assert len(bound.executable.run_timed()) == len(launches)
    assert len(bound.run_timed()) == len(plan.network.layers)
    assert len(bound.seconds(3)) == 3
    assert len(bound.seconds_in_row(3)) == 3
    assert all(t >= 0 for t in (*bound.seconds(2), *bound.seconds_in_row(2)))


def test_launch_lists_run_in_parallel_if_the_capabilities_permit(backend):
    if not backend.capabilities.workers:
        assert backend.why_not_parallel([])
        with pytest.raises(BackendError):
            backend.parallel_launch([[], []])


def test_external_load_is_a_load(backend):
    with backend.watch() as load:
        pass
    assert not load.disturbed
    assert (load.others is None) <= (not backend.capabilities.measures_load) or load.seconds < 0.1


def test_peaks_and_state_are_plain_data(backend):
    assert all(isinstance(v, float) for v in backend.peaks().values())
    assert isinstance(backend.capabilities.energy_seconds, float)


def test_an_unknown_backend_is_refused_with_the_nearest():
    with pytest.raises(BackendError, match=r"there is no backend 'cpuu'.*Did you mean 'cpu'"):
        get_backend("cpuu")
