"""Fixtures of several test files of the builder."""

import pytest

from whet.tactics import TACTICS, load_tactics, tactic
from whet.tactics.cpu.reference.numpy_reference import NumpyCall, NumpyKernel, NumpyReference


@pytest.fixture
def plant():
    """Registers tactics for one test: plant(change, ops) creates one whose results are modified by `change`."""
    load_tactics("cpu")
    before = dict(TACTICS)

    def make(change, ops=("Conv",), name="planted"):
        class Call(NumpyCall):
            def run(self):
                super().run()
                change(self)

        class Kernel(NumpyKernel):
            implementation = "planted"

            def enqueue(self, args, stream):
                stream.record(Call(self, args))

        class Planted(NumpyReference):
            fallback = False

            def plan(self, layer, signature, config, machine):
                return Kernel(layer, signature, rtol=1e-5)

        Planted.ops = ops
        Planted.__module__ = f"whet.tactics.cpu.{name}"
        monkey = type(name.title(), (Planted,), {"__module__": f"whet.tactics.cpu.{name}"})
        return tactic(monkey)

    yield make
    TACTICS.clear()
    TACTICS.update(before)
