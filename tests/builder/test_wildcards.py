"""--layerPrecisions with wildcards binds the layers that can compute in the type; a note names the others. Planned, so any CPU will do."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "precision"))
from test_calibration import samples, small_network

import whet
from whet.builder.config import BuildConfig
from whet.builder.precision.int8 import Calibration, build_int8
from whet.errors import NoTacticError
from whet.network import Network, parse_type
from whet.tactics import is_quantized


def obeying(*demands):
    shape = {"x": (1, 3, 12, 12)}
    config = BuildConfig(
        backend="null", profiles=((shape,) * 3,), precisions=("int8",), timing_cache="", threads=1, optimization_level=0, verify=False,
        precision_constraints="obey", layer_precisions=demands,
    )  # fmt: skip
    return build_int8(small_network(), config, Calibration(samples=lambda: samples(4)))


def notes(plan):
    return [n for n in plan.report.notes if n.startswith("wildcards leave out")]


def test_a_wildcard_binds_what_can_compute_in_int8_and_names_the_rest():
    plan = obeying(("*", "int8"))
    assert {"conv", "d", "e"} <= {x.name for x in plan.network.layers if is_quantized(x)}
    (note,) = notes(plan)
    assert "8 bits are for convolutions and products with constant weights that have ranges" in note
    names = note.split("They are ")[1]
    assert "p (MaxPool)" in names
    assert "quantize" not in names, "layers that whet inserted are none of the user's"


def test_layers_of_one_kind_share_a_note():
    """Their reason was listed for the first of them and had its name, so the others got a note of their own."""
    rng, net = np.random.default_rng(2), Network("pools")
    x = net.add_input("x", parse_type("f32[N,3,12,12]"))
    for k in range(3):
        weights = net.constant(rng.standard_normal((3, 3, 1, 1)).astype(np.float32), f"w{k}")
        x = net.add("MaxPool", net.add("Conv", x, weights), kernel_shape=(3, 3), pads=(1,) * 4, name=f"p{k}")
    net.mark_output(x)
    shape = {"x": (1, 3, 12, 12)}
    config = BuildConfig(
        backend="null", profiles=((shape,) * 3,), precisions=("int8",), timing_cache="", threads=1, optimization_level=0, verify=False,
        precision_constraints="obey", layer_precisions=(("*", "int8"),),
    )  # fmt: skip
    (note,) = notes(build_int8(net, config, Calibration(samples=lambda: samples(4))))
    assert "cannot obey: --layerPrecisions demands i8: it is not quantized (8 bits" in note
    assert {"p0 (MaxPool)", "p1 (MaxPool)", "p2 (MaxPool)"} <= set(note.split("They are ")[1].split(", "))


def test_an_exact_name_still_binds():
    with pytest.raises(NoTacticError, match=r"demands i8 for 's'.*not quantized"):
        obeying(("*", "int8"), ("s", "int8"))
    with pytest.raises(NoTacticError, match=r"demands i8 for 'x\.quantize'"):
        obeying(("x.quantize", "int8"))


def test_no_note_where_all_can_obey():
    assert not notes(obeying(("d", "int8")))
    assert not notes(obeying(("[de]", "int8")))


@pytest.fixture
def no_vnni(monkeypatch):
    """oneDNN without VNNI instructions, which it needs for exact 8-bit products."""
    library = pytest.importorskip("whet.tactics.cpu.onednn._api.load_library")
    have = library.has_isa
    for module in [m for n, m in sys.modules.items() if n.startswith("whet.tactics.cpu.onednn") and vars(m).get("has_isa") is have]:
        monkeypatch.setattr(module, "has_isa", lambda name: "vnni" not in name and have(name))


def test_missing_8_bit_kernels_are_the_reason_of_a_wildcard(no_vnni):
    """Not the calibration, which was given, nor the layers, which are quantized."""
    plan = whet.build(
        small_network(), shapes={"x": (1, 3, 12, 12)}, int8=samples(4), optimization_level=0, timing_cache="", threads=1, verify=False,
        precision_constraints="obey", layer_precisions=(("*", "int8"),),
    ).plan  # fmt: skip
    named = {n.partition(": ")[2].partition(" (")[0]: n.split("They are ")[1] for n in notes(plan)}
    assert set(named["this machine has no exact 8-bit kernels"].split(", ")) >= {"conv", "d", "e"}
    assert "p (MaxPool)" in named["--layerPrecisions demands i8: it is not quantized"]


def test_missing_8_bit_kernels_are_the_reason_for_no_int8(no_vnni):
    net = Network("one")
    x = net.add_input("x", parse_type("f32[1,3,8,8]"))
    net.mark_output(net.add("Conv", x, net.constant(np.random.default_rng(0).standard_normal((4, 3, 3, 3)).astype("f4"))), "y")
    data = [{"x": np.random.default_rng(1).standard_normal((1, 3, 8, 8)).astype("f4")}]
    report = whet.build(net, int8=data, optimization_level=0, timing_cache="", threads=1, verify=False).plan.report
    assert report.precisions["int8"].layers == 0
    assert "this machine has no exact 8-bit kernels (oneDNN multiplies" in report.precisions["int8"].reason
