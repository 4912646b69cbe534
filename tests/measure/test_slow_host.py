"""Timing on a simulated GPU with a host that starts launches slowly: formats are chosen by the times of the kernels alone.

Short kernels are shorter than the host needs to start them, and a view launches nothing. If the host's time counted, a Reshape in 32 bits between
two reformats could look faster than one that costs nothing.
"""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from support.slow_host import HostQueue
from whet.backends import Capabilities
from whet.builder.select.formats import choose_formats
from whet.errors import BuildError
from whet.measure.option import Option
from whet.measure.timing import Conditions, Timer
from whet.measure.timing_cache import Timed, TimingCache
from whet.network import F16, F32, Network, parse_type
from whet.tactics import Operand, Signature, Tactic, ViewKernel

NARROW, WIDE = Operand("linear", F16), Operand("linear", F32)
HOSTS = [5.0, 10.0, 26.0]  # microseconds to start a launch and record an event


class Kernel:
    """Takes the given microseconds on the GPU."""

    inputs, outputs, packed, scratch = (64,), (64,), (), 0
    rtol, deterministic = 0.0, True

    def __init__(self, name: str, us: float):
        self.implementation, self.us = name, us

    def enqueue(self, args, stream):
        stream.record(self.us)


class Alias(Kernel, ViewKernel):
    """Launches nothing."""

    shifts = (0,)

    def enqueue(self, args, stream):
        assert args.inputs[0] == args.outputs[0]


class Named(Tactic):
    """A tactic of which the test plans the kernels."""

    version = 1

    def __init__(self, name: str):
        self.name = name

    def signatures(self, layer, backend):
        pytest.fail("the options of these tests are made by hand")

    def plan(self, layer, signature, config, backend):
        pytest.fail("the options of these tests are made by hand")

    def library_version(self):
        return ""


class SlowHost(HostQueue):
    """A GPU with the clock of `HostQueue`."""

    name, threads, capabilities = "slow host", 1, Capabilities()

    def key(self):
        return "slow host"

    def allocate(self, nbytes, alignment=64):
        array = np.zeros(nbytes, np.uint8)
        return SimpleNamespace(address=array.ctypes.data, nbytes=nbytes, array=array)

    def stream(self):
        calls = []
        return SimpleNamespace(calls=calls, record=calls.append, finish=lambda: calls)

    def watch(self):
        return nullcontext(SimpleNamespace(disturbed=False, others=0.0))


def make_option(rank: int, kernel: Kernel, source: Operand, target: Operand) -> Option:
    inplace = ((0, 0),) if isinstance(kernel, Alias) else ()
    return Option(Named(kernel.implementation), Signature((source,), (target,), inplace), (), kernel, rank)


def make_network() -> Network:
    """A product, a Reshape of its result and another product, as after attention."""
    net = Network("net", "lowered")
    x = net.add("Relu", net.add_input("x", parse_type("f32[4,4]")), name="maker")
    net.mark_output(net.add("Sigmoid", net.add("Reshape", x, shape=(2, 8), name="reshape"), name="reader"), "y")
    return net


def make_reshapes() -> list[Option]:
    kernels = [
        (Alias("view of f16", 0.0), NARROW),
        (Kernel("copy of f16", 6.0), NARROW),
        (Alias("view of f32", 0.0), WIDE),
        (Kernel("copy of f32", 11.0), WIDE),
    ]
    return [make_option(rank, kernel, o, o) for rank, (kernel, o) in enumerate(kernels)]


def make_timer(us: float, seed: int, **options) -> Timer:
    return Timer(SlowHost(us, seed), TimingCache(""), Conditions("hot", 0), **options)


@pytest.mark.parametrize("us", HOSTS)
@pytest.mark.parametrize("seed", range(4))
def test_a_reshape_between_layers_of_16_bits_stays_a_view_of_16_bits(us, seed):
    net, timer = make_network(), make_timer(us, seed)
    reshapes = make_reshapes()
    timer.time(net.layers[1], "reshape", reshapes)
    reformats = {(a, b): make_option(0, Kernel(f"convert to {b}", cost), a, b) for a, b, cost in ((NARROW, WIDE, 8.0), (WIDE, NARROW, 5.0))}
    for o in reformats.values():
        timer.time(net.layers[1], o.kernel.implementation, [o])
    products = {name: [make_option(0, Kernel(name, 20.0), a, b)] for name, a, b in (("maker", WIDE, NARROW), ("reader", NARROW, WIDE))}
    picked = choose_formats(net, {**products, "reshape": reshapes}, lambda t, a, b: reformats[a, b].cost).picked
    assert picked["reshape"].kernel.implementation == "view of f16"


def test_recorded_times_of_views_are_not_read_and_none_is_missing():
    """Earlier versions recorded what the host took."""
    options = make_reshapes()
    timer = make_timer(10.0, 0, error_on_miss=True)
    for o in options:
        timer.cache.put(timer.key(o, "reshape"), Timed(0.5, 0.0, 3), {})
    assert timer.is_cached(options, "reshape")
    assert [o.ms for o in options] == [0.0, 0.5, 0.0, 0.5]
    views = [o for o in make_reshapes() if o.is_view]
    timer.time(make_network().layers[1], "another", views)
    assert [o.ms for o in views] == [0.0, 0.0]
    with pytest.raises(BuildError, match="not in the timing cache"):
        timer.time(make_network().layers[1], "another", make_reshapes())
