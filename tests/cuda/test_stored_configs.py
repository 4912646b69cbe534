"""Configs of an engine file reach kernel sources: every CUDA tactic's are admitted only if the tactic lists them, with values of the same types."""

import dataclasses

import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
from test_kernels_compile import OURS, first_case
from test_tactics import HOPPER

from whet.engine import Choice
from whet.runtime.kernels import explain_config_refusal


def altered(config):
    """Configs that differ in one value, of the same type and of others, and configs with and without a pair."""
    hostile = "1\n__device__ void injected() {}\n#include </etc/passwd>"
    for i, (name, value) in enumerate(config):
        for other in (hostile, -1, 10**9, str(value), True if value == 1 else 0.5):
            if type(other) is not type(value) or other != value:
                yield (*config[:i], (name, other), *config[i + 1 :])
        yield config[:i] + config[i + 1 :] + (("x", hostile),)
    yield (*config, ("bulk", hostile))
    yield (*config, ("x", 1))


@pytest.mark.parametrize("tactic", OURS, ids=lambda t: t.name)
def test_only_listed_configs_are_admitted(tactic):
    case = first_case(tactic)
    if case is None:
        pytest.skip("test_kernels_compile.py says which have no sample")
    layer, signature, config, _ = case
    stored = tuple(None if o is None else (o.format, o.dtype.name) for o in signature.inputs)
    outputs = tuple((o.format, o.dtype.name) for o in signature.outputs)
    choice = Choice(tactic.name, config, stored, outputs, signature.inplace)
    assert explain_config_refusal(layer, choice, HOPPER) is None
    for other in altered(config):
        assert "does not list the stored config" in explain_config_refusal(layer, dataclasses.replace(choice, config=other), HOPPER), other
