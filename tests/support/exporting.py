"""Quick exports from PyTorch: its exporter collects the ONNX functions of all its ops anew for each export, a second or more of CPU time."""

from collections.abc import Iterator
from contextlib import suppress
from functools import cache

import pytest


@pytest.fixture(scope="session")
def shared_registry() -> Iterator[None]:
    """Exports to the same opset share the functions, which whet does not change. Without effect with a PyTorch that keeps them elsewhere."""
    with pytest.MonkeyPatch.context() as patch:
        with suppress(ImportError, AttributeError):
            from torch.onnx._internal.exporter._registration import ONNXRegistry

            patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(cache(ONNXRegistry.from_torchlib)))
        yield
