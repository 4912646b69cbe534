"""The flags of `whet exec`: parsed as trtexec parses them, refused with the nearest name."""

import pytest

from whet.cli._exec_flags import FLAGS, help_text, parse
from whet.cli._exec_values import percentiles, profiles, shapes, size, split_names
from whet.cli._measure import percentile
from whet.errors import UsageError


def test_values_with_equals_or_space():
    assert parse(["--onnx=m.onnx", "--fp16", "--iterations", "20"]) == ([("onnx", "m.onnx"), ("fp16", ""), ("iterations", "20")], [])


def test_known_but_missing_is_named():
    got, missing = parse(["--onnx=m.onnx", "--useManagedMemory", "--calibProfile=x"])
    assert missing == ["useManagedMemory", "calibProfile"]
    assert got == [("onnx", "m.onnx")]
    assert all(FLAGS[m].missing for m in missing)


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--onx=m"], "Did you mean 'onnx'"),
        (["model.onnx"], "--onnx=FILE"),
        (["--onnx"], "needs a value"),
        (["--fp16=1"], "takes no value"),
        (["--onnx=a", "--onnx=b"], "given twice"),
    ],
)
def test_wrong_usage_teaches(argv, text):
    with pytest.raises(UsageError, match=text):
        parse(argv)


def test_names_split_at_the_last_colon():
    assert split_names("'Input:0':1x3,b:2") == [("Input:0", "1x3"), ("b", "2")]
    assert shapes("a:1x3x224x224,s:scalar", "shapes") == {"a": (1, 3, 224, 224), "s": ()}
    with pytest.raises(UsageError, match="no shape"):
        shapes("a:1x-3", "shapes")


def test_sizes_are_base_two_and_mebibytes_by_default():
    assert [size(t, "memPoolSize") for t in ("1", "64M", "1G", "512K", "7B")] == [2**20, 64 * 2**20, 2**30, 2**19, 7]
    with pytest.raises(UsageError):
        size("big", "memPoolSize")


def test_missing_profile_shapes_are_broadcast():
    made, warnings = profiles([("optShapes", "x:8x3"), ("maxShapes", "x:16x3")])
    assert made == [({"x": (8, 3)}, {"x": (8, 3)}, {"x": (16, 3)})]
    assert "optShapes is being broadcasted to minShapes for tensor x" in warnings
    made, _ = profiles([("minShapes", "x:1x3"), ("maxShapes", "x:16x3")])
    assert made == [({"x": (1, 3)}, {"x": (16, 3)}, {"x": (16, 3)})]


def test_two_profiles_by_order():
    flags = [("profile", "0"), ("optShapes", "x:1x3"), ("profile", "1"), ("optShapes", "x:8x3")]
    assert [p[1]["x"] for p in profiles(flags)[0]] == [(1, 3), (8, 3)]
    with pytest.raises(UsageError, match="without gaps"):
        profiles([("profile", "2"), ("optShapes", "x:1x3")])
    with pytest.raises(UsageError, match="given twice"):
        profiles([("optShapes", "x:1x3"), ("optShapes", "x:8x3")])
    with pytest.raises(UsageError, match="not in order"):
        profiles([("minShapes", "x:4x3"), ("maxShapes", "x:2x3")])


def test_percentile_is_trtexecs():
    values = [float(v) for v in range(1, 101)]
    assert percentile(values, 99) == 99.0
    assert percentile(values, 90) == 90.0
    assert percentile([5.0], 99) == 5.0
    assert percentiles("90,99.9") == [90.0, 99.9]


def test_help_names_every_flag():
    text = help_text()
    assert [f for f in FLAGS if f"--{f}" not in text] == []
