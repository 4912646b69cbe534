"""The public names: one sorted list, each of them there."""

import importlib

import pytest

import whet


def test_every_name_is_there():
    assert whet.__all__ == sorted(whet.__all__)
    for name in whet.__all__:
        assert getattr(whet, name) is not None


@pytest.mark.parametrize(
    ("package", "wrong", "meant"), [("whet", "biuld", "build"), ("whet.search", "serch", "search"), ("whet.training", "fintune", "finetune")]
)
def test_an_unknown_name_is_refused_with_the_nearest(package, wrong, meant):
    with pytest.raises(AttributeError, match=f"'{package}' has no attribute '{wrong}'. Did you mean '{meant}'"):
        getattr(importlib.import_module(package), wrong)
    assert meant in dir(importlib.import_module(package))
