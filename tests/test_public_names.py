"""The public names: one sorted list, each of them there."""

import pytest

import whet


def test_every_name_is_there():
    assert whet.__all__ == sorted(whet.__all__)
    for name in whet.__all__:
        assert getattr(whet, name) is not None


def test_an_unknown_name_is_refused():
    with pytest.raises(AttributeError, match="network_from_onnx"):
        getattr(whet, "nothing")  # noqa: B009
