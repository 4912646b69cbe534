"""The smallest engine there is."""

from whet.builder import BuildConfig, build
from whet.network import Network, parse_type
from whet.runtime import Runtime


def engine_of_relu():
    """y = max(x, 0) for x f32[2,3]."""
    net = Network("relu")
    x = net.add_input("x", parse_type("f32[2,3]"))
    net.mark_output(net.add("Relu", x), "y")
    return Runtime().load(build(net, BuildConfig(timing_cache="", optimization_level=0)))
