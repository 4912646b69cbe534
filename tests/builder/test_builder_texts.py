"""Reasons, notes and comparisons of the builder on small cases: exact texts and values."""

from types import SimpleNamespace

import numpy as np
import pytest

from whet.builder.explain import explain_rejection
from whet.builder.lock import rebuild
from whet.builder.precision import comparison, permitted
from whet.builder.precision.accuracy_budget import PlanRun
from whet.builder.precision.calibration import Calibration
from whet.builder.precision.comparison import find_slow_layers, list_identifying_names, sum_adjacent_ms
from whet.builder.precision.float16 import find_small_type
from whet.builder.precision.precision_search import PrecisionSearch
from whet.builder.select import unfused_time, whole_engine
from whet.builder.select.layer_timing import LayerTiming
from whet.builder.verify.differences import find_worst_error
from whet.builder.verify.error_bounds import FACTOR, FLOOR, Checked, Compared, Failure, NetworkJudge
from whet.builder.verify.overflows import Overflow
from whet.builder.verify.repeated import Verified
from whet.errors import ShapeError, VerificationError
from whet.network import parse_network


def option(ms, spread=0.0, cold=None, signature="a"):
    return SimpleNamespace(ms=ms, spread_ms=spread, cold_ms=cold, signature=signature)


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (option(None), "listed after the chosen one, and nothing was timed"),
        (option(1.5), "50 % slower"),
        (option(3.0), "200 % slower"),
        (option(1.5, cold=3.0), "50 % slower, +50 % with cold weights"),
        (option(1.5, spread=0.5), "not distinguishable from the chosen one by time"),
        (option(1.5, spread=0.75), "not distinguishable from the chosen one by time"),
        (option(1.5, spread=0.25), "50 % slower"),
        (option(0.5, cold=1.0), "not distinguishable from the chosen one by time, -50 % with cold weights"),
        (option(0.5, signature="b"), "as fast or faster alone, but its formats would cost reformats around it"),
        (option(0.5, cold=2.0, signature="b"), "as fast or faster alone, +0 % with cold weights, but its formats would cost reformats around it"),
    ],
)
def test_reasons_of_options_that_were_not_chosen(other, text):
    assert explain_rejection(other, option(1.0, cold=2.0)) == text


def test_reasons_relative_to_an_option_without_time_or_with_spread():
    assert explain_rejection(option(1.0), option(None)) == "listed after the chosen one, and nothing was timed"
    assert explain_rejection(option(0.002), option(0.0)) == "2 us slower"
    assert explain_rejection(option(1.5, cold=2.0), option(1.0)) == "50 % slower"
    assert explain_rejection(option(1.5), option(1.0, spread=0.5)) == "not distinguishable from the chosen one by time"


QUANTIZED = """
    network n source
    in %x: f32[1,2,4,4]
    const %s: f32[] = [0.5]
    const %z: i8[] = [0]
    %q = QuantizeLinear(%x, %s, %z)
    %d = DequantizeLinear(%q, %s, %z)
    %e = Relu(%d)
    %f = Neg(%d)
    %r = QuantizeLinear(%e, %s, %z)
    %t = Abs(%e)
    out %f
    out %r
    out %t
    """


def test_readers_share_the_time_of_the_movement_before_them():
    net = parse_network(QUANTIZED)
    relu = next(x for x in net.layers if x.op == "Relu")
    plan, times = SimpleNamespace(network=net), {"q": 100.0, "d": 3.0, "r": 5.0, "f": 100.0, "t": 100.0}
    assert sum_adjacent_ms(relu, plan, times) == 6.5
    assert sum_adjacent_ms(relu, plan, times, only="Reformat") == 0.0
    assert sum_adjacent_ms(relu, plan, times, only="DequantizeLinear") == 1.5
    assert sum_adjacent_ms(relu, plan, {}) == 0.0
    first = net.layers[0]
    assert sum_adjacent_ms(first, plan, times) == 3.0, "an input of the network has no maker"


def test_layers_that_are_not_faster_in_quantized_form(monkeypatch):
    times = {"equal": (1.0, 1.0), "faster": (1.0, 0.9), "unknown": (0.0, 1.0), "slower": (1.0, 2.0)}
    monkeypatch.setattr(comparison, "compare_layer_times", lambda *args: times)
    assert find_slow_layers(None, None, []) == {"equal", "slower"}


def test_names_that_identify_a_layer():
    assert list_identifying_names(SimpleNamespace(sources=("a", "b"), name="c")) == {"a", "b"}
    assert list_identifying_names(SimpleNamespace(sources=(), name="c + d")) == {"c", "d"}


@pytest.mark.parametrize(
    ("types", "expected"),
    [
        (["f32"], None),
        ([], None),
        (["f16", "bf16", "bf16"], "bf16"),
        (["bf16", "f16", "f16", "f32", "f32", "f32"], "fp16"),
        (["bf16", "f32", "f32"], "bf16"),
        (["i8", "f16"], "fp16"),
    ],
)
def test_the_small_type_of_most_outputs(types, expected):
    one = {str(i): SimpleNamespace(outputs=(("linear", t),)) for i, t in enumerate(types)}
    assert find_small_type(SimpleNamespace(choices=one)) == expected
    assert find_small_type(SimpleNamespace(choices={"all": SimpleNamespace(outputs=tuple(("linear", t) for t in types))})) == expected


@pytest.mark.parametrize(("dropped", "end"), [(1, "('0': w)."), (3, "('0': w; '1': w; '2': w)."), (5, "('0': w; '1': w; '2': w; and 2 more).")])
@pytest.mark.parametrize("holds", [True, False])
def test_sentences_about_an_accuracy_budget(dropped, end, holds):
    search = SimpleNamespace(layers=range(9), strategy=SimpleNamespace(title="INT8"), info=[], notes=[])
    fit = SimpleNamespace(verdict=SimpleNamespace(text="held"), dropped={str(i): "w" for i in range(dropped)}, holds=holds)
    PrecisionSearch.report_budget(search, SimpleNamespace(text="1 %"), fit)
    assert (search.info if holds else search.notes) == [f"Accuracy: 1 %; held with {dropped} of 9 layers kept out of INT8 {end}"]
    assert not (search.notes if holds else search.info)


def test_a_budget_that_costs_no_layer():
    search = SimpleNamespace(layers=range(9), strategy=SimpleNamespace(title="FP8"), info=[], notes=[])
    PrecisionSearch.report_budget(search, SimpleNamespace(text="1 %"), SimpleNamespace(verdict=None, dropped={}, holds=False))
    assert search.notes == ["Accuracy: 1 %; not judged: no layer has to leave FP8 for it."]


class Batched:
    """A context whose engine takes four samples and doubles them."""

    def run(self, feeds):
        self.feeds = feeds
        return {"y": feeds["x"] * 2} if "n" not in feeds else {"y": np.zeros(3)}


def make_run(batch):
    run = PlanRun.__new__(PlanRun)
    run.context, run.batch = Batched(), batch
    return run


def test_one_sample_is_repeated_for_an_engine_of_a_larger_batch():
    run, x = make_run(4), np.arange(3.0)[None]
    assert run({"x": x})["y"].tolist() == [[0, 2, 4]]
    assert run.context.feeds["x"].shape == (4, 3)
    assert run({"x": np.ones((4, 3))})["y"].shape == (4, 3)
    assert run({"x": np.ones((0, 3))})["y"].shape == (0, 3), "not one sample: as it is"
    assert run({"x": np.float64(1.0)})["y"] == 2.0
    with pytest.raises(ShapeError, match="takes 4 samples at once"):
        run({"x": x, "n": x})
    for batch in (0, 1):
        run = make_run(batch)
        run({"x": x})
        assert run.context.feeds["x"] is x


def test_kinds_of_layers_slower_than_the_engine_are_timed_again():
    timed, notes = [], []
    timer = SimpleNamespace(error_on_miss=False, time=lambda layer, text, options, remeasure: timed.append((text, len(options), remeasure)))
    timing = SimpleNamespace(timer=timer, log=SimpleNamespace(note=notes.append))
    kinds = [
        SimpleNamespace(text=t, layer=SimpleNamespace(name=t), options=[option(ms), option(None), option(1.0)])
        for t, ms in (("fast", 1.0), ("slow", 1000.0), ("unknown", None))
    ]
    again = LayerTiming.retime_contradictions(timing, [(k, k.options[0]) for k in (*kinds, kinds[1])], 2.0)
    assert again == ["slow"]
    assert timed == [("slow", 2, True)]
    assert notes == ["'slow' has a recorded time above that of the whole engine, and is timed again"]
    timer.error_on_miss = True
    assert LayerTiming.retime_contradictions(timing, [(kinds[1], kinds[1].options[0])], 2.0) == []
    timing.timer = None
    assert LayerTiming.retime_contradictions(timing, [(kinds[1], kinds[1].options[0])], 2.0) == []


def test_what_a_verification_reports_before_anything_was_compared():
    checked = Checked()
    report = checked.report()
    assert (report.layers, report.network_error, report.network_bound, report.emulation_error) == (0, 0.0, FLOOR, None)
    assert (report.failures, report.images, report.turned_error) == ([], None, 0.0)
    assert (checked.input_kinds, checked.shapes, checked.probe_outputs, checked.probe_rtol) == (0, (), {}, 1e-4)
    checked.network_bound = 1e-3
    assert checked.probe_rtol == 2e-3
    checked.take(Compared("a", ((1.0, 0.0), (0.5, 1.0))))
    checked.take(Compared("b", ((0.9, 2.0),), Failure("b", "t", 1.0, 2.0, "said")))
    assert checked.worst == ("a", 0.5, 1.0)
    assert checked.report().failures == ["said"]
    checked.take(Compared("c", ((1.2, 2.0),)))
    assert checked.worst == ("c", 1.2, 2.0)


def make_judge(*, plain, narrow=False, lowered=None, emulated=None, text="in %x: f32[4]\n%y = Relu(%x)\nout %y"):
    """A judge of `y = Relu(x)`, whose exact result is 1."""
    net = parse_network("network n source\n" + text)
    stored = "f16" if narrow else "f32"
    choice = SimpleNamespace(outputs=(("linear", stored),), tactic="cpu/some", config=(), inputs=())
    plan = SimpleNamespace(network=net, choices={} if not narrow else {"y": choice})
    judge = NetworkJudge.__new__(NetworkJudge)
    judge.plan, judge.source, judge.inputs, judge.images, judge.narrow, judge.overflows = plan, net, {"x": np.ones(4, "f4")}, None, narrow, []
    judge.truth, judge.plain = (lambda: [np.ones(4)]), (lambda: [np.full(4, plain)])
    if lowered is not None:
        judge.lowered, judge.emulated = (lambda: [np.full(4, lowered)]), (lambda: [np.full(4, emulated)])
    return judge


def worst(value, truth=1.0):
    return find_worst_error([np.full(4, value)], [np.full(4, truth)])


def judged(judge, value):
    checked = Checked()
    judge.judge({"y": np.full(4, value)}, checked)
    return checked


def test_a_network_may_be_off_by_four_times_its_error_in_float32():
    assert (FLOOR, FACTOR) == (1e-5, 4.0)
    good = judged(make_judge(plain=1.5), 1.0 + 1e-6)
    assert (good.emulation_error, good.network_bound, good.failures) == (None, FLOOR, [])
    near = judged(make_judge(plain=1.25), 1.5)
    assert near.emulation_error == worst(1.25)
    assert near.network_bound == 4 * worst(1.25)
    assert not near.failures
    exact = judged(make_judge(plain=1.0), 1.001)
    assert (exact.emulation_error, exact.network_bound) == (0.0, FLOOR)
    (failure,) = exact.failures
    assert failure.error == exact.network_error == worst(1.001)
    assert failure.bound == FLOOR
    assert str(failure).startswith("the network's output 'y' is off by ")
    assert judged(make_judge(plain=1.25), 2.5).failures
    checked = Checked(worst=("conv", 0.25, 0.75))
    make_judge(plain=1.0).judge({"y": np.full(4, 1.5)}, checked)
    assert str(checked.failures[0]).endswith("Nearest to its bound: 'conv' with 0.25 of 0.75.")


def test_smaller_types_may_be_off_by_four_times_their_emulation():
    good = judged(make_judge(plain=1.0, narrow=True, lowered=1.0, emulated=1.01), 1.03)
    assert good.network_bound == pytest.approx(4 * worst(1.01))
    assert good.emulation_error == worst(1.01)
    assert not good.failures
    bad = judged(make_judge(plain=1.0, narrow=True, lowered=1.0, emulated=1.01), 1.06)
    assert bad.failures
    assert bad.network_bound == pytest.approx(4 * worst(1.01))
    wrong = judged(make_judge(plain=1.0, narrow=True, lowered=1.03, emulated=1.03), 1.03)
    assert wrong.failures
    assert wrong.network_bound == FLOOR, "the lowered network itself computes something else"
    far = judged(make_judge(plain=1.0, narrow=True, lowered=1.03, emulated=1.3), 1.03)
    assert far.failures, "the emulation of another function excuses nothing"
    assert far.network_bound == FLOOR


def test_infinite_and_nan_outputs_are_refused_where_float32_is_finite():
    for value in (np.inf, -np.inf, np.nan):
        for emulated in (value, 1.01):
            checked = judged(make_judge(plain=1.0, narrow=True, lowered=1.0, emulated=emulated), value)
            (failure,) = checked.failures
            assert str(failure) == "4 of 4 values of the network's output 'y' are infinite or NaN where FP32 has finite ones"
    assert not judged(make_judge(plain=np.inf, narrow=True, lowered=1.0, emulated=1.0), np.inf).failures, "the model overflows in FP32"
    judge = make_judge(plain=1.0, narrow=True, lowered=1.0, emulated=1.0)
    judge.overflows = [Overflow(layer, t, "f16", top, 65504.0) for layer, t, top in (("conv", "a", 1e6), ("pool", "a", 1e6), ("sum", "b", 2e5))]
    checked = judged(judge, np.nan)
    assert checked.overflows == tuple(judge.overflows)
    assert str(checked.failures[0]).endswith("FP32 has finite ones: %a has values up to 1e+06, and f16 holds at most 65504 (1 more tensors overflow)")
    far = judged(judge, 3.0).failures
    assert str(far[0]).endswith(" %a has values up to 1e+06, and f16 holds at most 65504 (1 more tensors overflow).")


@pytest.mark.parametrize(("stored", "narrow"), [("f32", False), ("f16", True), ("bf16", True), ("i8", False)])
def test_only_smaller_types_are_emulated(stored, narrow):
    net = parse_network("network n source\nin %x: f32[4]\n%y = Relu(%x)\nout %y")
    choice = SimpleNamespace(outputs=(("linear", stored),), inputs=(("linear", stored),), tactic="cpu/some", config=(), implementation="")
    asked = []
    beside = SimpleNamespace(early=lambda f: asked.append(f) or f)
    judge = NetworkJudge(SimpleNamespace(network=net, choices={"y": choice}), net, {"x": np.array([-1, 0, 1, 2], "f4")}, None, beside)
    assert (judge.narrow, len(asked)) == (narrow, 4 if narrow else 2)
    assert judge.truth()[0].tolist() == judge.plain()[0].tolist() == [0, 0, 1, 2]
    assert judge.truth()[0].dtype == np.float64
    assert judge.plain()[0].dtype == np.float32


@pytest.fixture
def builds(monkeypatch):
    """The builds that `build_permitted` would do, by name."""
    done = []

    def fake(name):
        def run(*args, **options):
            done.append(name)
            return SimpleNamespace(report=SimpleNamespace(notes=[]))

        return run

    for name in ("build", "build_int8", "build_float8", "_build_floats"):
        monkeypatch.setattr(permitted, name, fake(name))
    for name, value in (("is_explicit", False), ("is_float8_lock", False), ("has_float8", True)):
        monkeypatch.setattr(permitted, name, lambda *args, value=value: value)
    monkeypatch.setattr(permitted, "get_capabilities", lambda backend: SimpleNamespace(executes=True))
    return done


def configured(*precisions, **more):
    one = {"layer_precisions": (), "layer_output_types": (), "precision_constraints": "none", "lock": None, "backend": "cpu"}
    return SimpleNamespace(precisions=precisions, **{**one, **more})


BUDGET = SimpleNamespace(kind="snr", metric=None)


@pytest.mark.parametrize(
    ("precisions", "samples", "budget", "expected"),
    [
        (("fp16",), None, None, ["build"]),
        (("fp16",), list, BUDGET, ["_build_floats"]),
        (("int8",), list, None, ["build_int8"]),
        (("int8",), list, BUDGET, ["build_int8"]),
        (("fp8",), list, None, ["build_float8"]),
        (("fp8",), list, BUDGET, ["build_float8"]),
        (("int8", "fp8"), list, None, ["build_int8", "build_float8"]),
        (("int8", "fp8"), list, BUDGET, ["build_int8", "build_float8"]),
        (("best",), None, None, ["build"]),
        (("best",), None, BUDGET, ["_build_floats"]),
        (("best",), list, None, ["build_int8", "build_float8"]),
        (("best", "int8"), None, None, ["build_int8"]),
    ],
)
def test_the_builds_of_permitted_precisions(builds, precisions, samples, budget, expected):
    plan = permitted.build_permitted(None, configured(*precisions), Calibration(samples=samples), budget=budget)
    assert builds == expected
    assert any("--best leaves INT8 out" in n for n in plan.report.notes) == (precisions == ("best",) and samples is None)


def test_builds_of_locks_explicit_networks_and_devices_without_float8(builds, monkeypatch):
    def names(*args, **more):
        builds.clear()
        permitted.build_permitted(None, configured(*args, **more), Calibration(samples=list), budget=BUDGET)
        return list(builds)

    assert names("int8", "fp8", lock="file") == ["build_int8"]
    monkeypatch.setattr(permitted, "get_capabilities", lambda backend: SimpleNamespace(executes=False))
    assert names("int8", "fp8") == ["build_int8"]
    monkeypatch.setattr(permitted, "get_capabilities", lambda backend: SimpleNamespace(executes=True))
    monkeypatch.setattr(permitted, "has_float8", lambda config: False)
    assert names("int8", "fp8") == ["build_int8"]
    monkeypatch.setattr(permitted, "is_float8_lock", lambda config: True)
    assert names("int8") == ["build_float8"]
    monkeypatch.setattr(permitted, "is_explicit", lambda net: True)
    assert names("int8") == ["build"]


def test_precisions_that_need_ranges():
    find = permitted.list_calibrated_precisions
    assert find(configured("best", "fp16", "fp8", "int8")) == ["int8", "fp8", "best"]
    assert find(configured("fp16", layer_precisions=(("*", "int8"),))) == []
    assert find(configured("fp16", layer_precisions=(("*", "int8"),), precision_constraints="obey")) == ["int8"]
    assert find(configured("fp16", layer_output_types=(("*", "int8"),), precision_constraints="prefer")) == ["int8"]
    assert find(configured("fp16", layer_precisions=(("*", "fp16"),), precision_constraints="obey")) == []
    assert find(configured("fp8", layer_precisions=(("*", "int8"),), precision_constraints="obey")) == ["fp8"]


@pytest.mark.parametrize(("count", "text"), [(1, "1 layer unfused"), (2, "2 layers unfused")])
def test_the_variant_with_unfused_layers_is_described(monkeypatch, count, text):
    net = SimpleNamespace(layers=[])
    monkeypatch.setattr(whole_engine, "unfuse_slower", lambda search: (net, ["reason"] * count))
    monkeypatch.setattr(whole_engine, "choose_formats", lambda net, options, cost: "assignment")
    variant = whole_engine.find_unfused_variant(SimpleNamespace(reformats=SimpleNamespace(cost=None)))
    assert variant.what == f"least sum of times, {text}"
    monkeypatch.setattr(whole_engine, "unfuse_slower", lambda search: None)
    assert whole_engine.find_unfused_variant(SimpleNamespace()) is None


@pytest.mark.parametrize(("parts", "outputs", "quantized", "start"), [
    (1, 1, False, "only layers of 2 to 4 parts"), (unfused_time.LONGEST_CHAIN + 1, 1, False, "only layers of 2 to 4 parts"),
    (2, 2, False, "only layers of 2 to 4 parts with one output"), (2, 1, True, "tensors between its parts would be floating point"),
])  # fmt: skip
def test_layers_that_are_not_timed_in_parts(monkeypatch, parts, outputs, quantized, start):
    monkeypatch.setattr(unfused_time, "is_quantized", lambda layer: quantized)
    layer = SimpleNamespace(regions={"body": SimpleNamespace(layers=range(parts))}, outputs=range(outputs))
    assert unfused_time.list_chains(layer, None, set(), [], None, None).reason.startswith(f"not unfused: {start}")


def test_the_first_failure_of_a_locked_engine_is_reported(monkeypatch):
    plan = SimpleNamespace(report=SimpleNamespace(), arenas=[SimpleNamespace(concurrent_samples=0)])
    monkeypatch.setattr(rebuild, "build_locked_plan", lambda *args: plan)
    checked = Checked()
    monkeypatch.setattr(rebuild, "verify_once", lambda *args: Verified(checked.report(), None if checked.failures else "probe", checked))
    backend = SimpleNamespace(capabilities=SimpleNamespace(executes=True))
    config = SimpleNamespace(verify=True, seed=0)
    arguments = ({"unfused": ["a"]}, None, None, [], backend, config, None, None)
    assert rebuild.rebuild_locked(*arguments) is plan
    assert (plan.probe, plan.report.unfused[0].reason if hasattr(plan.report.unfused[0], "reason") else "locked") == ("probe", "locked")
    checked.failures += [Failure("a", "t", 1.0, 0.5, text) for text in ("the first", "the second")]
    with pytest.raises(VerificationError, match=r"fails verification: the first\. Build without"):
        rebuild.rebuild_locked(*arguments)
    config.verify = False
    assert rebuild.rebuild_locked(*arguments) is plan
    backend.capabilities.executes, config.verify = False, True
    assert rebuild.rebuild_locked(*arguments) is plan


@pytest.mark.parametrize(("value", "fails"), [(1.5, False), (4.5, False), (6.0, True)])
def test_a_network_with_rounding_ties_may_be_off_by_four_times_what_a_tie_changes(value, fails):
    """1 / 2 is a tie between 0 and 1 step of 2: y is 0 or 2 where the exact result is 1."""
    text = "in %x: f32[4]\nconst %s: f32[] = [2.0]\nconst %z: i8[] = [0]\n%q = QuantizeLinear(%x, %s, %z)\n%y = DequantizeLinear(%q, %s, %z)\nout %y"
    checked = judged(make_judge(plain=1.0, text=text), value)
    assert checked.emulation_error == worst(2.0)
    assert checked.network_bound == FACTOR * worst(2.0)
    assert bool(checked.failures) is fails
