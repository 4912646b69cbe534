"""Networks of the zoo for tests that read their layers and not their results: weights are cut from one table, not drawn one by one."""

from math import prod

import numpy as np
import pytest

from whet import zoo
from whet.frontends import network_from_onnx
from whet.network import Network

TABLE = np.random.default_rng(0).standard_normal(1 << 16, np.float32)


class TableGenerator:
    """In place of numpy.random.default_rng(seed): a table of normal values from a place that the seed determines."""

    def __init__(self, seed: list[int] | int):
        self.table = np.roll(TABLE, int(np.sum(seed)) % len(TABLE))

    def standard_normal(self, shape: tuple[int, ...], dtype: type) -> np.ndarray:
        return np.resize(self.table, prod(shape)).astype(dtype).reshape(shape)


def read_zoo_structure(name: str, **options: object) -> Network:
    """`network_from_onnx(zoo.build(name, **options))` with other weights."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np.random, "default_rng", TableGenerator)
        model = zoo.build(name, **options)
    return network_from_onnx(model)
