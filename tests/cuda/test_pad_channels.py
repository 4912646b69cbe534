"""Networks pruned without regard to the device: with padded channels every compute layer has a fast kernel."""

import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
from test_coverage import covered

from support.zoo_structure import read_zoo_structure
from whet.network.types import F16
from whet.pruning import PruneConfig, prune

NETWORKS = ("resnet18", "mobilenet_v2", "squeezenet1_1", "densenet121", "yolov5s")


def slow(net, *passes):
    """The layers that only slow kernels accept."""
    return [layer for layer, found in covered(net, F16, *passes) if all(t.fallback for t in found)]


@pytest.mark.parametrize("name", NETWORKS)
def test_odd_widths_have_kernels(name):
    """Residual sums, depthwise convolutions, Concats of all earlier outputs, Splits and heads."""
    options = {"blocks": (3, 4, 3, 2)} if name == "densenet121" else {}
    net = prune(read_zoo_structure(name, batch=1, **options), PruneConfig(ratio=0.3, scope="group", multiple=1)).network
    assert len(slow(net, "-pad_channels")) > 15
    assert slow(net) == []
