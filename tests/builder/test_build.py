"""build(): from a source network to an engine with the reference's outputs."""

import dataclasses
import sqlite3

import numpy as np
import pytest
from nets import Stages, inputs, residual

from whet.backends import get_backend
from whet.builder import BuildConfig, Silent, build
from whet.builder.build import build as build_stages
from whet.builder.select.search import Search
from whet.engine.check import check_plan
from whet.errors import BuildError, MemoryLimitError, NoTacticError, ShapeError, UsageError
from whet.network import Network, parse_network, parse_type
from whet.ops import run_network
from whet.runtime import bind

QUICK = BuildConfig(timing_cache="", avg_timing=2, whole_engines=2)


def run(plan, feed):
    bound = bind(plan, get_backend(plan.backend), {k: v.shape for k, v in feed.items()})
    bound.feed(feed)
    bound.run()
    assert not bound.shaped.fell_back
    return bound.fetch()


def close(got, want, rtol=1e-5):
    for name, ref in want.items():
        assert np.abs(got[name] - ref).max() <= rtol * np.abs(ref).max()


@pytest.mark.parametrize("level", [0, 1, 3, 5])
def test_a_residual_network_at_every_level(level):
    net = residual()
    plan = build(net, dataclasses.replace(QUICK, optimization_level=level))
    check_plan(plan)
    feed = inputs(net)
    close(run(plan, feed), run_network(net, feed, widen=True))
    assert plan.report.verification.layers == len(plan.network.layers)
    assert plan.probe["outputs"]["y"]["shape"] == [2, 10]


def test_kernels_win_over_the_reference_and_the_report_says_why():
    plan = build(residual(), QUICK)
    assert not any(c.tactic == "cpu/numpy_reference" for c in plan.choices.values())
    conv = next(n for n in plan.choices if n.startswith("conv"))
    rows = plan.report.candidates[conv]
    assert rows[0].ms is not None
    assert rows[0].reason == ""
    assert all(r.reason for r in rows[1:])
    assert any("NumPy" in r.reason for r in rows)


def test_a_level_0_build_times_nothing_and_opens_no_cache(tmp_path):
    plan = build(residual(), dataclasses.replace(QUICK, optimization_level=0, timing_cache=str(tmp_path / "t.sqlite")))
    assert not (tmp_path / "t.sqlite").exists()
    assert plan.report.timing.timed == 0
    assert all(c.ms is None for rows in plan.report.candidates.values() for c in rows)


def test_dynamic_batch_is_tuned_at_opt_and_sized_at_max():
    net = residual("N")
    shapes = tuple({"x": (n, 3, 10, 10)} for n in (1, 2, 4))
    plan = build(net, dataclasses.replace(QUICK, profiles=(shapes,), samples="together"))
    check_plan(plan)
    assert plan.arenas[0].sizes["x"] == 4 * 3 * 100 * 4
    for n in (1, 2, 3, 4):
        feed = inputs(net, N=n)
        close(run(plan, feed), run_network(net, feed, widen=True))


def test_a_dynamic_network_without_a_profile_is_built_for_batch_1_with_a_note():
    plan = build(residual("N"), dataclasses.replace(QUICK, optimization_level=0))
    assert plan.profiles[0].shapes["x"][1] == (1, 3, 10, 10)
    assert any("--optShapes" in n for n in plan.report.notes)


def test_profiles_that_do_not_fit_are_refused():
    net = residual("N")
    with pytest.raises(UsageError, match="min <= opt <= max"):
        build(net, BuildConfig(profiles=(({"x": (4, 3, 10, 10)}, {"x": (2, 3, 10, 10)}, {"x": (4, 3, 10, 10)}),)))
    with pytest.raises(UsageError, match=r"an input 'z'.*Inputs: x"):
        build(net, BuildConfig(profiles=(({"z": (1,)}, {"z": (1,)}, {"z": (1,)}),)))
    with pytest.raises(ShapeError, match="axis 1"):
        build(net, BuildConfig(profiles=(({"x": (1, 4, 10, 10)},) * 3,)))


def test_times_are_stored_and_read_from_the_cache(tmp_path):
    path = tmp_path / "t.sqlite"
    config = dataclasses.replace(QUICK, timing_cache=str(path))
    first = build(residual(), config)
    assert first.report.timing.misses > 0
    for _ in range(4):
        again = build(residual(seed=1), config)  # other weights: nothing is timed again
        implausible = [note for note in again.report.notes if note.endswith("and is timed again")]
        if not implausible:
            break  # a busy machine's times may be repeated, and then select kernels that need times of their own
    assert again.report.timing.misses == 0
    assert again.report.timing.hits > 0
    build(residual(), dataclasses.replace(config, error_on_cache_miss=True))
    with pytest.raises(BuildError, match="error_on_cache_miss=True"):
        build(residual(channels=32), dataclasses.replace(config, error_on_cache_miss=True))


def test_ctrl_c_keeps_recorded_times(tmp_path):
    path = tmp_path / "t.sqlite"

    class Interrupt(Stages):
        """Ctrl-C during the third layer that is timed."""

        layers = 0

        def step(self, name, done=1):
            self.layers += self.names[-1] == "timing"
            if self.layers == 3:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(residual(), dataclasses.replace(QUICK, timing_cache=str(path)), progress=Interrupt())
    rows = sqlite3.connect(path).execute("SELECT count(*) FROM timings").fetchone()[0]
    assert rows >= 2


@pytest.mark.parametrize("compared_again", [False, True], ids=["engines compared once", "compared again"])
def test_progress_reports_stages_and_steps(compared_again, monkeypatch):
    class Watch(Silent):
        def __init__(self):
            super().__init__()
            self.stages, self.counts = [], []

        def stage(self, name, total):
            self.stages.append((name, total))
            self.counts.append(0)

        def step(self, name, done=1):
            self.counts[-1] += done

    watch = Watch()
    monkeypatch.setattr(Search, "retime_contradictions", lambda *_: ["conv"] if compared_again else [])  # as on a machine under load
    build(residual(), QUICK, progress=watch)
    assert [n for n, _ in watch.stages].count("whole engines") == 1 + compared_again
    # the parts of a fused layer that is slower than they are are timed in a stage of their own
    names = list(dict.fromkeys(n for n, _ in watch.stages))
    assert names == ["passes", "candidates", "timing", "fused or unfused", "choice", "whole engines", "verification"]
    assert all(count <= total for (_, total), count in zip(watch.stages, watch.counts, strict=True))


def test_memory_limits():
    with pytest.raises(MemoryLimitError, match=r"memory_limit\['arena'\]"):
        build(residual(), dataclasses.replace(QUICK, optimization_level=0, memory_limit={"arena": 1000}))
    plan = build(residual(), dataclasses.replace(QUICK, memory_limit={"workspace": 0}))
    assert plan.arenas[0].scratch_bytes == 0


def test_tactic_sources():
    left_out = ("-ONEDNN", "-INDIRECT", "-LINEAR", "-STRIDED", "-LAYER", "-DIRECT", "-WINOGRAD", "-ELEMENTWISE", "-VIEW", "-REDUCE")
    plan = build(residual(), dataclasses.replace(QUICK, tactic_sources=left_out))
    assert {c.tactic for c in plan.choices.values()} == {"cpu/numpy_reference"}
    plan = build(residual(), dataclasses.replace(QUICK, tactic_sources=(*left_out, "+cpu/onednn_conv")))
    assert {"cpu/onednn_conv", "cpu/numpy_reference"} <= {c.tactic for c in plan.choices.values()}
    with pytest.raises(UsageError, match="CUDNN"):
        build(residual(), dataclasses.replace(QUICK, tactic_sources=("-CUDNN",)))


def test_a_layer_without_a_tactic_is_refused_with_the_reasons_of_its_ops_tactics():
    sources = ("-NUMPY", "-ONEDNN", "-INDIRECT", "-LINEAR", "-STRIDED", "-LAYER", "-DIRECT", "-WINOGRAD", "-ELEMENTWISE", "+cpu/onednn_eltwise")
    with pytest.raises(NoTacticError, match=r"(?s)computes Conv '.*depthwise_conv: takes depthwise convolutions.*\d tactics are for other ops") as e:
        build(residual(), dataclasses.replace(QUICK, tactic_sources=sources))
    assert ", not Conv" not in str(e.value)


def test_outputs_that_are_inputs_constants_or_given_twice():
    net = Network("odd")
    x = net.add_input("x", parse_type("f32[4]"))
    r = net.add("Relu", x)
    net.mark_output(r, "y")
    net.outputs.append(x)
    net.outputs.append(net.constant(np.arange(3, dtype="f4"), "c"))
    plan = build(net, dataclasses.replace(QUICK, optimization_level=0))
    check_plan(plan)
    got = run(plan, {"x": np.array([-1, 2, -3, 4], "f4")})
    assert [a.tolist() for a in got.values()] == [[0, 2, 0, 4], [-1, 2, -3, 4], [0, 1, 2]]


def test_a_fused_layer_without_a_kernel_is_unfused():
    # A sum with another shape in the middle of the chain: oneDNN's convolution accepts no such body as its epilogue.
    net = parse_network(
        """network odd source
        in %x: f32[1,8,6,6]
        const %w: f32[8,8,3,3] = seed(1)
        %c = Conv(%x, %w, pads=(1, 1, 1, 1))
        %r = Erf(%c)
        out %r
        """
    )
    plan = build(net, QUICK)
    assert {"cpu/onednn_conv", "cpu/direct_conv", "cpu/winograd_conv"} & {c.tactic for c in plan.choices.values()}


def test_bf16_is_a_permission():
    net = residual(channels=32, size=16)
    plain = build(net, QUICK)
    assert not any(d == "bf16" for c in plain.choices.values() for _, d in c.outputs)
    allowed = build(net, dataclasses.replace(QUICK, precisions=("bf16",)))
    if "avx512_bf16" in get_backend("cpu").capabilities.features:
        assert any("--bf16" in c.reason for rows in plain.report.candidates.values() for c in rows)
        assert any(c.ms is not None and "bf16" in c.signature for rows in allowed.report.candidates.values() for c in rows)
    assert allowed.report.verification.network_error <= allowed.report.verification.network_bound


def test_an_unused_permission_is_reported_once_and_refused_under_strict():
    plan = build_stages(residual(), dataclasses.replace(QUICK, precisions=("int8",)))
    assert [n for n in plan.report.notes if n.startswith("--int8")]
    with pytest.raises(BuildError, match=r"precisions=\('int8',\) cannot be used"):
        build_stages(residual(), dataclasses.replace(QUICK, precisions=("int8",), strict=True))


def test_layer_precisions_bind_when_obeyed():
    if "avx512_bf16" not in get_backend("cpu").capabilities.features:
        pytest.skip("no BF16 kernels here")
    net = residual(channels=32, size=16)
    config = dataclasses.replace(QUICK, precision_constraints="obey", layer_precisions=(("conv2", "bf16"),))
    plan = build(net, config)
    layer = next(x for x in plan.network.layers if "conv2" in x.sources)
    assert plan.choices[layer.name].inputs[0][1] == "bf16"
    others = [c for n, c in plan.choices.items() if n != layer.name and "reformat" not in c.tactic and "view" not in c.tactic]
    assert all(d == "f32" for c in others for _, d in c.outputs)


@pytest.mark.parametrize("constraints", ["none", "prefer", "obey"])
def test_output_types_and_preferences(constraints):
    if "avx512_bf16" not in get_backend("cpu").capabilities.features:
        pytest.skip("no BF16 kernels here")
    net = residual(channels=32, size=16)
    config = dataclasses.replace(QUICK, precision_constraints=constraints, layer_output_types=(("relu2", "bf16"), ("flatten", "fp16")))
    if constraints == "obey":
        with pytest.raises(NoTacticError, match="layer_output_types= demands f16 of 'flatten'"):
            build(net, config)
        config = dataclasses.replace(config, layer_output_types=(("relu2", "bf16"),))
    plan = build(net, config)
    layer = next(x for x in plan.network.layers if "conv2" in x.sources)
    assert (plan.choices[layer.name].outputs[0][1] == "bf16") == (constraints != "none")
    assert any("'flatten'" in n and "prefers" in n for n in plan.report.notes) == (constraints == "prefer")
