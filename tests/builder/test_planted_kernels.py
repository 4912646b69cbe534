"""Fifty wrong kernels, of ten kinds in five operations: verification finds every one of them, and none in the correct kernels.

The planted tactics compute by the reference and change its result. The network begins with a Relu, so the actual inputs of the operation are
never negative. tests/cuda/test_planted_cuda_kernels.py does the same with CUDA kernels.

Probability for intermittent kernels: a kernel that is wrong in a share p of its runs escapes only if none of its runs is wrong. With r runs in
verification that is (1 - p)^r; the runs are counted here, at least 11 in these networks (comparison, repetition, one per kind of inputs, two at
each other batch), and at least two for every layer of any network: 75 % of the kernels that are wrong in half of their runs are found by the
repetition alone, 99.95 % here.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from planted_networks import MAX, MIN, OPERATIONS, OPT, network

from whet.backends import get_backend
from whet.builder import BuildConfig, build
from whet.builder.progress import ProgressLog
from whet.builder.verify import verification
from whet.builder.verify.verification import verify_engine
from whet.ops import run_layer
from whet.tactics import TACTICS, load_tactics, tactic
from whet.tactics.cpu.reference.numpy_reference import NumpyCall, NumpyKernel, NumpyReference


class Planted:
    """Registers a tactic whose results are changed by `change(call, out)`; `runs` counts its runs."""

    def __init__(self, change, ops):
        outer, self.runs = self, 0

        class Call(NumpyCall):
            def run(self):
                outer.runs += 1
                self.before = self.writes[0].copy()
                super().run()
                change(self, self.writes[0])

        class Kernel(NumpyKernel):
            implementation = "planted"

            def enqueue(self, args, stream):
                stream.record(Call(self, args))

        class Tactic(NumpyReference):
            fallback = False

            def plan(self, layer, signature, config, machine):
                return Kernel(layer, signature, rtol=1e-5)

        Tactic.ops, Tactic.__module__ = ops, "whet.tactics.cpu.planted"
        tactic(Tactic)


@pytest.fixture
def registry():
    load_tactics("cpu")
    before = dict(TACTICS)
    yield
    TACTICS.clear()
    TACTICS.update(before)


def again(call, **inputs):
    """The layer's result with other inputs: x, or the bias."""
    layer, arrays = call.kernel.layer, list(call.reads)
    for name, a in inputs.items():
        arrays[{"x": 0, "bias": 2}[name]] = a
    return run_layer(layer, arrays)[0]


def tail(call, out):
    out.reshape(-1)[-1] = 0


def last_channel(call, out):
    out[:, -1] *= 1.01


def not_positive(call, out):
    x = call.reads[0]
    out[...] = again(call, x=np.where(x <= 0, x * np.float32(0.9), x))


def at_batch(n):
    def change(call, out):
        if len(out) == n:
            out[0, 0] *= 1.01

    return change


def stale(call, out):
    state = call.__dict__.setdefault("accumulator", np.zeros_like(out))
    out += np.float32(0.01) * state
    state[...] = out


def toward_zero(call, out):
    x, s = call.reads[0], call.reads[1]
    out[...] = np.clip(np.trunc(x / s), -128, 127)


def swapped(call, out):
    out[:, [0, 1]] = out[:, [1, 0]]


def no_bias(call, out):
    out[...] = again(call, bias=np.zeros_like(call.reads[2]))


def intermittent():
    rng = np.random.default_rng(11)

    def change(call, out):
        if rng.random() < 0.5:
            out.reshape(-1)[len(out)] += 0.01 * np.abs(out).max()

    return change


KINDS = {
    "off-by-one tail": lambda: tail,
    "wrong at the last channel": lambda: last_channel,
    "wrong for x <= 0": lambda: not_positive,
    "wrong at batch 1": lambda: at_batch(MIN),
    "wrong at the largest batch": lambda: at_batch(MAX),
    "stale accumulator": lambda: stale,
    "rounds toward zero": lambda: toward_zero,
    "swapped channels": lambda: swapped,
    "ignores the bias": lambda: no_bias,
    "intermittent": intermittent,
}
CONFIG = BuildConfig(
    timing_cache="", avg_timing=1, whole_engines=1, optimization_level=0, samples="together", passes=("none",), verify=False,
    tactic_sources=("-ONEDNN", "-INDIRECT", "-LINEAR", "-STRIDED", "-LAYER", "-DIRECT", "-WINOGRAD", "-POINTWISE", "-ELEMENTWISE", "-VIEW"),
)  # fmt: skip


def verified(operation, integers=False):
    """(the result of verification, the tactics of the engine) for batches of 1 to 8."""
    net = network(operation, integers)
    profile = tuple({"x": (n, 8) if operation == "gemm" else (n, 8, 6, 6)} for n in (MIN, OPT, MAX))
    config = dataclasses.replace(CONFIG, profiles=(profile,))
    plan = build(net, config)
    return verify_engine(plan, net, get_backend("cpu"), None, config, ProgressLog(None)), {c.tactic for c in plan.choices.values()}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_planted_kernel_is_found(kind, operation, registry):
    integers = kind == "rounds toward zero"
    planted = Planted(KINDS[kind](), ("QuantizeLinear",) if integers else ("Conv", "Gemm", "ConvTranspose"))
    checked, tactics = verified(operation, integers)
    assert "cpu/planted" in tactics
    assert planted.runs
    assert checked.failures
    assert all(f.tactic == "cpu/planted" for f in checked.failures)
    expected = verification.NOT_REPEATABLE if kind == "intermittent" else verification.REPEATABLE
    if kind in ("off-by-one tail", "wrong for x <= 0", "ignores the bias"):
        assert f"({expected})" in str(checked.failures[0])


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("integers", [False, True])
def test_a_correct_kernel_passes_and_runs_often(operation, integers, registry):
    planted = Planted(lambda call, out: None, ("Conv", "Gemm", "ConvTranspose"))
    checked, tactics = verified(operation, integers)
    assert "cpu/planted" in tactics
    assert checked.failures == []
    assert [next(iter(s.values()))[0] for s in checked.shapes] == [MIN, MAX]
    assert planted.runs >= 11  # see the probability above
    assert checked.input_kinds >= 6


@pytest.mark.parametrize(("relative", "passes"), [(1e-7, True), (1e-6, True), (1e-3, False)])
@pytest.mark.parametrize("batch", [MIN, MAX])
@pytest.mark.parametrize("operation", ["gemm", "conv3x3"])
def test_rounding_may_differ_between_batches(operation, batch, relative, passes, registry):
    """The kernels are allowed 1e-5: another order of additions at another batch is no error."""

    def change(call, out):
        if len(out) == batch:
            out[...] = out * np.float32(1 + relative)

    Planted(change, ("Conv", "Gemm"))
    checked, tactics = verified(operation)
    assert "cpu/planted" in tactics
    assert (checked.failures == []) == passes


def test_a_failed_verification_is_saved_and_can_be_repeated(registry, tmp_path, monkeypatch):
    from whet.engine import read_engine

    monkeypatch.setenv("WHET_FAILED_VERIFICATIONS", str(tmp_path))
    Planted(last_channel, ("Conv",))
    checked, _ = verified("conv3x3")
    (folder,) = tmp_path.iterdir()
    assert f"saved in {folder}" in str(checked.failures[0])
    layer = np.load(folder / "layer0.npz")
    assert np.allclose(layer["output0"][:, -1], layer["expected0"][:, -1] * 1.01, rtol=1e-5)
    assert np.load(folder / "inputs.npz")["x"].shape == (OPT, 8, 6, 6)
    assert any(c.tactic == "cpu/planted" for c in read_engine(folder / "engine").choices.values())
    assert "by cpu/planted" in (folder / "failures.txt").read_text()


def test_only_the_newest_failures_are_kept_and_a_folder_that_cannot_be_written_is_no_error(registry, tmp_path, monkeypatch):
    from whet.builder.verify.failure_folder import KEPT

    root = tmp_path / "failures"
    for n in range(KEPT + 2):
        (root / f"20200101-000000-{n:02d}").mkdir(parents=True)
    monkeypatch.setenv("WHET_FAILED_VERIFICATIONS", str(root))
    Planted(last_channel, ("Conv",))
    verified("conv3x3")
    assert len(list(root.iterdir())) == KEPT
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("WHET_FAILED_VERIFICATIONS", str(tmp_path / "file"))
    checked, _ = verified("conv3x3")
    assert "could not be saved" in str(checked.failures[0])


@pytest.mark.parametrize("value", [0.0, -3.4028235e38])  # the bytes of the first are smaller, those of the second larger than before
def test_a_kernel_that_is_wrong_in_its_second_run_only_is_found_by_the_repetition(value, registry):
    def change(call, out):
        if planted.runs == 2:
            out[...] = np.float32(value)

    planted = Planted(change, ("Conv",))
    checked, tactics = verified("conv3x3")
    assert "cpu/planted" in tactics
    assert "results differ between runs on the same inputs" in str(checked.failures[0])
    assert "a race, or memory that the kernel does not initialize" in str(checked.failures[0])


def run_with_seed(seed, log=None):
    """The inputs of the planted kernel in all its runs, with given inputs of the network."""
    seen = []
    TACTICS.pop("cpu/planted", None)
    Planted(lambda call, out: seen.append(call.reads[0].copy()), ("Gemm",))
    net, profile = network("gemm"), tuple({"x": (n, 8)} for n in (MIN, OPT, MAX))
    config = dataclasses.replace(CONFIG, profiles=(profile,), seed=seed)
    data = {"x": np.random.default_rng(1).standard_normal((OPT, 8)).astype("f4")}
    verify_engine(build(net, config), net, get_backend("cpu"), data, config, log or ProgressLog(None))
    return seen


def test_the_seed_chooses_the_inputs_of_other_kinds(registry):
    runs = {seed: run_with_seed(seed) for seed in (5, 7, 2**32 - 1)}

    def equal(a, b):
        return len(runs[a]) == len(runs[b]) and all(np.array_equal(x, y, equal_nan=True) for x, y in zip(runs[a], runs[b], strict=True))

    assert not equal(5, 7)
    assert not equal(5, 2**32 - 1)
    assert np.array_equal(runs[5][0], runs[7][0]), "the given inputs"


def test_verification_announces_a_step_for_each_layer_and_two_more(registry):
    stages = []

    class Log(ProgressLog):
        def stage(self, name, total):
            stages.append((name, total))
            super().stage(name, total)

    run_with_seed(0, Log(None))
    layers = len(network("gemm").layers)
    assert stages[0][0] == "verification"
    assert stages[0][1] >= layers + 2, "Reformats may be added"


def test_results_count_as_small_relative_to_those_of_the_first_comparison(registry, monkeypatch):
    """1024 times as large for inputs that are."""
    seen = []
    compare = verification.compare_layer

    def noting(layer, choice, ins, outs, images=None, axes=None, context="", largest=None, **more):
        if layer.op == "Gemm":
            seen.append((context, largest, float(np.abs(outs[0]).max())))
        return compare(layer, choice, ins, outs, images, axes, context, largest, **more)

    monkeypatch.setattr(verification, "compare_layer", noting)
    run_with_seed(3)
    assert [largest for _, largest, _ in seen].count(None) == 1
    first = seen[0][2]
    for context, largest, _ in seen[1:]:
        assert largest == [pytest.approx(first * (1024 if "'large'" in context else 1))]
    assert "'large'" in "".join(context for context, _, _ in seen)
