"""--layerPrecisions with wildcards binds the layers that can compute in the type; a note names the others. Planned, so any CPU will do."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "precision"))
from test_calibration import samples, small_network

from whet.builder.config import BuildConfig
from whet.builder.precision.int8 import Calibration, build_int8
from whet.errors import NoTacticError
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


def test_an_exact_name_still_binds():
    with pytest.raises(NoTacticError, match=r"demands i8 for 's'.*not quantized"):
        obeying(("*", "int8"), ("s", "int8"))
    with pytest.raises(NoTacticError, match=r"demands i8 for 'x\.quantize'"):
        obeying(("x.quantize", "int8"))


def test_no_note_where_all_can_obey():
    assert not notes(obeying(("d", "int8")))
    assert not notes(obeying(("[de]", "int8")))
