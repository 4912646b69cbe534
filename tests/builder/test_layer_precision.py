"""--layerPrecisions and --layerOutputTypes bind, INT8 included: in calibrated networks and in networks with their own Q/DQ."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "passes"))
sys.path.insert(0, str(Path(__file__).parents[1] / "precision"))
from test_calibration import samples, small_network
from test_pass_quantize import residual_network

from whet.builder import build
from whet.builder.config import BuildConfig
from whet.builder.precision.int8 import Calibration, build_int8
from whet.errors import BuildError, NoTacticError, UsageError
from whet.tactics import is_quantized, load_tactics
from whet.tactics.cpu.onednn import _api as dnn

QUICK = {"timing_cache": "", "threads": 1, "avg_timing": 1, "optimization_level": 1, "whole_engines": 1, "verify": False}
pytestmark = pytest.mark.skipif(not dnn.has_isa("avx512_core_vnni"), reason="this CPU has no VNNI: quantized layers are refused")
load_tactics("cpu")


def config(h=12, n=1, **more):
    shape = {"x": (n, 3, h, h)}
    return BuildConfig(profiles=((shape, shape, shape),), **{**QUICK, **more})


def calibrated(**more):
    return build_int8(small_network(), config(precisions=("int8",), **more), Calibration(samples=lambda: samples(4)))


def quantized(plan):
    """Parts of the names of the layers that compute in integers."""
    return {part for x in plan.network.layers if is_quantized(x) for part in x.name.split(" + ")}


def test_int8_binds_even_if_slower():
    plan = calibrated(precision_constraints="obey", layer_precisions=(("c", "int8"), ("d", "int8")))
    assert {"c", "d"} <= quantized(plan)
    assert all("c" not in e.float_layers and "d" not in e.float_layers for e in plan.report.precision_choice)
    assert "where it is demanded" in plan.report.precision_choice[0].what


def test_fp32_binds_next_to_int8():
    plan = calibrated(optimization_level=0, precision_constraints="obey", layer_precisions=(("d", "fp32"),))
    names = quantized(plan)
    assert "d" not in names
    assert "e" in names


def test_without_constraints_nothing_binds():
    assert "d" in quantized(calibrated(optimization_level=0, layer_precisions=(("d", "fp32"),)))


def test_int8_for_a_layer_without_quantized_form():
    with pytest.raises(NoTacticError, match=r"demands i8 for 's.*not quantized"):
        calibrated(optimization_level=0, precision_constraints="obey", layer_precisions=(("s", "int8"),))
    plan = calibrated(optimization_level=0, precision_constraints="prefer", layer_precisions=(("s", "int8"),))
    assert any("no tactic computes it in the precision" in n for n in plan.report.notes)


def test_a_layer_that_cannot_be_quantized_is_refused_before_the_build():
    net = small_network()
    conv = next(x for x in net.layers if x.name == "d")
    scale = net.add("Mul", conv.inputs[1], net.add("ReduceMean", net.inputs[0], keepdims=0, at=0), at=1)
    conv.inputs = (conv.inputs[0], scale, *conv.inputs[2:])
    net.sort()
    wanted = config(precisions=("int8",), precision_constraints="obey", layer_precisions=(("d", "int8"),))
    with pytest.raises(BuildError, match="demands int8 for 'd'"):
        build_int8(net, wanted, Calibration(samples=lambda: samples(2)))


def test_an_explicit_network_obeys_too():
    """Its own Q/DQ say INT8; the user's FP32 for one layer takes precedence, and an output type keeps the integer layers inside."""
    net = residual_network()
    target = next(x.name for x in net.layers if x.op == "Conv")
    free = build(net, config(16, 2))
    assert target in quantized(free)
    held = build(net, config(16, 2, precision_constraints="obey", layer_precisions=((target, "fp32"),)))
    assert target not in quantized(held)
    assert len(quantized(held)) >= 3
    skips = [reason for name, _, reason in held.report.passes.skipped if name.startswith("fuse_")]
    assert any(f"--layerPrecisions keeps '{target} + batchnormalization' in f32" in r for r in skips)
    stored = build(net, config(16, 2, precision_constraints="obey", layer_output_types=((target, "fp32"),)))
    (layer,) = [x for x in stored.network.layers if target in x.name.split(" + ")]
    assert is_quantized(layer)
    assert layer.output.dtype.is_float


def test_an_unknown_precision_is_refused():
    with pytest.raises(UsageError, match="fp32, fp16, bf16, int8, fp8, not 'int5'"):
        build(small_network(), config(precision_constraints="obey", layer_precisions=(("c", "int5"),)))
