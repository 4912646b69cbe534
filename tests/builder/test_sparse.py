"""BuildConfig.sparsity from Python: "force" writes 2:4 weights in every kind of build; the other modes do not modify weights."""

import dataclasses

import numpy as np
import pytest

from whet.builder import BuildConfig, Calibration, build, build_float8, build_int8, save_lock
from whet.builder.candidates.sparse_weights import apply_sparsity
from whet.errors import LockError
from whet.network import parse_network
from whet.ops import run_network
from whet.runtime import Runtime
from whet.sparsity import force_two_four, list_eligible_layers
from whet.sparsity.report import explain_dense_layers

TEXT = """network n source
in %x: f32[2,8,6,6]
const %w: f32[8,8,3,3] = seed(3)
const %narrow: f32[4,8,1,1] = seed(4)
%a = Conv(%x, %w, pads=(1, 1, 1, 1))
%r = Relu(%a)
%b = Conv(%r, %narrow)
out %b
"""
ONE_CANNOT = """network n source
in %x: f32[1,6,4,4]
const %w: f32[4,6,1,1] = seed(1)
const %v: f32[4,4,1,1] = seed(2)
%a = Conv(%x, %w)
%b = Conv(%a, %v)
out %b
"""
FORCE = BuildConfig(sparsity="force", optimization_level=0, timing_cache="")


@pytest.fixture
def net():
    return parse_network(TEXT)


@pytest.fixture
def x():
    return np.random.default_rng(0).standard_normal((2, 8, 6, 6)).astype(np.float32)


def list_sparse_notes(plan):
    return [n for n in plan.report.notes if "2:4" in n]


def test_force_changes_the_weights_of_the_engine(net, x):
    plan = build(net, FORCE)
    assert len(list_eligible_layers(plan.network)[0]) == 2
    got = Runtime().load(plan).create_context().run({"x": x})["b"]
    wanted = run_network(force_two_four(net)[0], {"x": x})["b"]
    assert np.abs(got - wanted).max() < 1e-4 * np.abs(wanted).max()
    assert not np.allclose(got, run_network(net, {"x": x})["b"], rtol=0.05)
    (note,) = list_sparse_notes(plan)
    assert "2 layers" in note
    assert list_eligible_layers(net)[0] == []  # the caller's network is unchanged


@pytest.mark.parametrize("mode", ["disable", "enable"])
def test_other_modes_do_not_modify_weights(net, mode):
    config = dataclasses.replace(FORCE, sparsity=mode)
    assert apply_sparsity(net, config) == (net, [])
    assert list_sparse_notes(build(net, config)) == []


def test_a_second_time_changes_nothing(net):
    once, said = apply_sparsity(net, FORCE)
    assert said
    assert apply_sparsity(once, FORCE) == (once, [])


@pytest.mark.parametrize("way", [build_int8, build_float8])
def test_calibrated_engines_have_sparse_weights_too(net, x, way):
    kind = "int8" if way is build_int8 else "fp8"
    config = dataclasses.replace(FORCE, backend="null", precisions=(kind,))
    plan = way(net, config, Calibration(samples=lambda: [{"x": x}]))
    assert len(list_sparse_notes(plan)) == 1
    assert len(list_eligible_layers(plan.network)[0]) == 2


def test_ineligible_layers_are_named():
    net = parse_network(ONE_CANNOT)
    _, (said,) = apply_sparsity(net, FORCE)
    assert "into 1 layers" in said
    assert "a: its reduction axis has 6 elements" in said


def test_a_lock_keeps_sparsity(net, tmp_path):
    plan = build(net, FORCE)
    save_lock(plan, tmp_path / "lock.json")
    locked = dataclasses.replace(FORCE, lock=str(tmp_path / "lock.json"))
    assert build(net, locked).model_digest == plan.model_digest
    with pytest.raises(LockError, match="sparsity"):
        build(net, dataclasses.replace(locked, sparsity="disable"))


def test_the_positional_rule_keeps_the_first_two_of_four(net, x):
    sparse, (said,) = apply_sparsity(net, dataclasses.replace(FORCE, sparsity="force:positional"))
    assert "sparsity=force:positional wrote 2:4 weights into 2 layers (the first two of every four" in said
    before, after = (n.layers[0].inputs[1].array() for n in (net, sparse))
    kept = np.arange(8) % 4 < 2
    np.testing.assert_array_equal(after[:, kept], before[:, kept])
    assert not after[:, ~kept].any()
    plan = build(net, dataclasses.replace(FORCE, sparsity="force:positional"))
    assert len(list_eligible_layers(plan.network)[0]) == 2


@pytest.mark.parametrize(("mode", "permitted"), [("disable", False), ("enable", True)])
def test_kernels_for_two_four_weights_need_permission(mode, permitted, standin_gpu):
    """A layer with 2:4 weights: "disable" refuses its sparse tactics with the flag that permits them."""
    sparse = force_two_four(parse_network("network n source\nin %x: f16[128,64]\nconst %w: f16[64,64] = seed(3)\n%y = MatMul(%x, %w)\nout %y\n"))[0]
    config = BuildConfig(backend="cuda", precisions=("fp16",), sparsity=mode, verify=False, timing_cache="", optimization_level=1, avg_timing=1)
    plan = build(sparse, config)
    (candidates,) = plan.report.candidates.values()
    found = [c for c in candidates if c.tactic == "cuda/sparse_gemm"]
    assert any(c.ms is not None for c in found) == permitted
    if not permitted:
        assert {c.reason for c in found} == {"kernels for 2:4 weights are off: --sparsity=enable permits them"}
        assert "--sparsity=enable permits them" in explain_dense_layers(plan)
