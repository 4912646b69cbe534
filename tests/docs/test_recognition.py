"""benchmarks/recognition.py: what counts as recognized, as a view and as left over; how rows are kept."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import recognition

from whet.network import parse_network
from whet.passes import lower

NETWORK = """network case source
in %q: f32[2,2,5,4]
in %k: f32[2,2,4,5]
in %v: f32[2,2,5,4]
in %x: f32[2,3,4,5]
const %half: f32[] = [0.5]
%s = MatMul(%q, %k)
%m = Mul(%s, %half)
%p = Softmax(%m, axis=-1)
%y = MatMul(%p, %v)
%rows = Transpose(%x, perm=(0,2,3,1))
%swapped = Transpose(%x, perm=(0,2,1,3))
%gate = Sigmoid(%swapped)
%silu = Mul(%swapped, %gate)
%alone = Softmax(%rows, axis=-1)
out %y
out %silu
out %alone
"""


def test_attention_is_found_and_a_softmax_outside_of_it_stays():
    lowered, _ = lower(parse_network(NETWORK), refuses=lambda layer: None)
    assert recognition.recognized(lowered) == {"attention": 1, "softmax": 1, "silu": 1}
    left = recognition.left_over(lowered)
    assert left["Transpose"] == 1, "a Transpose to rows of pixels is a view, one of other axes is a kernel"
    assert left["Softmax"] == 1


def test_without_the_pass_attention_is_not_found():
    lowered, _ = lower(parse_network(NETWORK), refuses=lambda layer: None, switches=["-recognize_attention"])
    assert recognition.recognized(lowered)["softmax"] == 2
    assert recognition.left_over(lowered)["Softmax"] == 2


@pytest.mark.parametrize("wrong", [np.array([1.0, np.nan]), np.array([1.0, np.inf]), np.array([1.0])])
def test_values_that_are_not_finite_or_of_another_shape_are_wrong(wrong):
    assert recognition.deviation({"y": wrong}, {"y": np.array([1.0, 2.0])}) == np.inf
    assert recognition.deviation({"y": np.array([1.0, 2.2])}, {"y": np.array([1.0, 2.0])}) == pytest.approx(0.1)


def test_a_model_keeps_its_latest_row(tmp_path):
    path = tmp_path / "rows.json"
    row = {"network": "b", "exporter": "dynamo", "opset": 18, "stage": "done", "expected": {"softmax": 1}, "error_passes": 1e-7}
    for change in ({"network": "a"}, {}, {"recognized": {"attention": 1}}):
        recognition.add_row(path, row | change, ["a", "b"])
    data = json.loads(path.read_text())
    assert [(r["network"], recognition.is_recognized(r)) for r in data["rows"]] == [("a", False), ("b", True)]
    assert data["summary"]["recognized"] == 1
