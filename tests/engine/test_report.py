"""`EnginePlan.report`: typed records that an engine file stores without loss; damaged or hostile records are refused."""

import dataclasses
import json
import math

import pytest

from handmade import conv_net, make_plan
from whet.engine import BuildReport, Candidate, engine_bytes, read_engine
from whet.engine import report as r
from whet.engine.json_data import Reader
from whet.engine.report import decode_recipe, report_from_data, report_to_data
from whet.errors import EngineError

WON = Candidate("cpu/a", "(f32:linear)->(f32:linear)", (("block", 8), ("impl", "jit")), "jit:avx2", 0.5, 0.01)
LOST = Candidate("cpu/b", "(f32:linear)->(f32:linear)", (), reason="20 % slower")


def full_report():
    """A report in which every field differs from its default."""
    return BuildReport(
        built="2026-11-23T18:00:00+00:00",
        build_seconds=1.5,
        phase_seconds={"passes": 0.5, "timing": 1.0},
        latency_ms=2.5,
        layer_ms={"conv": 2.0, "relu": 0.25},
        candidates={"conv": [WON, LOST], "relu": [WON]},
        cold_ms={"conv": [0.75, None]},
        choice=r.SelectionRecord("beam", 2.25, "least sum of times", "by an earlier build", 7, {"beam": 2.25, "fixed": 2.5}),
        choice_core=["conv"],
        engines=[r.EngineTime("least sum of times", 2.5, 0.1)],
        timing=r.TimingRecord(
            3, 5, 6, 0, "level 0", "hot", 4, 0.2, [0.98], r.GpuState(1980, 3201, 154.0, 38, 2**30, [12, 345], "not read")
        ),
        threads=[r.ThreadCountTime(2, 2.5, 0.1)],
        samples=r.SampleModes("parallel", "faster", 4, 2, 0.1, 3.0, 0.2, 2.5, 0.1, 2.75, 0.3),
        passes=r.PassRecord(["fold"], [r.PassFired("fold", "bn", "folded")], [r.PassSkipped("fuse", "relu", "is an output")]),
        unfused=[r.Unfused("conv + relu", "its parts are faster")],
        banned=[r.Banned("conv", "cpu/c kernel {}", "NaN")],
        verification=r.VerificationRecord(2, r.WorstLayer("conv", 1e-6, 1e-5), 1e-7, 1e-5, 2e-7, ["conv: wrong"], [0, 3], 1e-8),
        precisions={"fp16": r.PermissionUse(0, 2, "no tactic")},
        precision_choice=[r.PrecisionCandidate("int8", 1.0, 0.1, True, False, ["conv"], 30.5, 12.5)],
        calibration_steps=[r.CalibrationStep("bias", "outputs", True, 0.2, 0.1, 31.0)],
        accuracy=r.AccuracyRecord("output SNR at least 30 dB", "engine", 3, 30.5, 99.0, True, {"conv": "harmful"}, {"conv": 12.0, "relu": None}),
        quantized=r.QuantizationRecipe(True, ["conv"], {"x": (-1.0, 2.0)}, {"x": [1.5]}, {"conv": [0.25]}, ["add"], "fp8", {"conv": "eJw="}, True),
        fp8=r.Float8Record({"conv": "too small"}, ["add"]),
        asked=r.RequestedPrecisions(["int8"], "obey", [("conv", "int8")], [("relu", "fp32")]),
        retuned_from="another machine",
        notes=["a warning"],
        info=["a finding"],
    )


def written(report):
    """The JSON data as stored in a file."""
    return json.loads(json.dumps(report_to_data(report), allow_nan=False))


def read(data):
    return report_from_data(Reader(data, "info.report"))


def test_the_example_sets_every_field():
    """Otherwise the round trip below would not detect a lost field."""

    def unset(value):
        for f in dataclasses.fields(value):
            default = f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
            v = getattr(value, f.name)
            if v == default:
                yield f"{type(value).__name__}.{f.name}"
            for part in v if isinstance(v, list) else [v]:
                if dataclasses.is_dataclass(part):
                    yield from unset(part)

    assert list(unset(full_report())) == []


def test_round_trip_through_an_engine_file():
    plan = make_plan(conv_net())
    plan.report = full_report()
    assert read_engine(engine_bytes(plan)).report == full_report()
    assert read(written(full_report())) == full_report()


def test_absent_records_are_not_written():
    assert report_to_data(BuildReport()) == {}
    assert read({}) == BuildReport()
    zero = BuildReport(latency_ms=0.0, choice=r.SelectionRecord("lock"))
    assert written(zero) == {"latency_ms": 0.0, "choice": {"method": "lock"}}
    assert read(written(zero)) == zero


def test_equal_candidates_are_stored_once():
    table = written(full_report())["candidates"]
    assert len(table["rows"]) == 2
    assert table["layers"] == {"conv": [0, 1], "relu": [0]}


def test_nonfinite_values_become_none_if_permitted():
    report = full_report()
    report.accuracy.alone_db["relu"] = math.inf
    assert read(written(report)) == full_report()
    report.layer_ms["conv"] = math.nan
    with pytest.raises(EngineError, match=r"info\.report\.layer_ms\.conv should be a number"):
        read(written(report))


def _paths(data, path=()):
    """Paths to all values in JSON data."""
    yield path
    for k, v in data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ():
        yield from _paths(v, (*path, k))


def _with(data, path, value):
    """A copy of JSON data with one replaced value."""
    if not path:
        return value
    made = dict(data) if isinstance(data, dict) else list(data)
    made[path[0]] = _with(data[path[0]], path[1:], value)
    return made


@pytest.mark.parametrize("value", [{"x": {"x": []}}, [[["x"]]], "text", -3, 1.5, True, None, 1 << 70, 1e308], ids=repr)
def test_changed_data_are_read_as_a_report_or_refused(value):
    """A value of another type at every position: an EngineError that names the position, or a report that is written again without loss."""
    data = written(full_report())
    refused = []
    for path in _paths(data):
        try:
            report = read(_with(data, path, value))
        except EngineError as e:
            refused.append(str(e))
        else:
            assert read(written(report)) == report
    assert len(refused) > 40
    assert all(text.startswith("info.report") for text in refused)


def test_unknown_and_missing_keys_are_named():
    data = written(full_report())
    with pytest.raises(EngineError, match=r"info\.report should be an object without the unknown key 'surprise'"):
        read({**data, "surprise": 1})
    with pytest.raises(EngineError, match=r"info\.report\.timing should be .* unknown key 'mood'"):
        read(_with(data, ("timing",), {**data["timing"], "mood": "good"}))
    with pytest.raises(EngineError, match=r"info\.report\.engines\[0\] should be an object with the key 'ms'"):
        read(_with(data, ("engines",), [{"what": "kept", "spread_ms": 0.1}]))


@pytest.mark.parametrize("index", [-1, 2, 1 << 40, True, "0"])
def test_candidate_indices_stay_within_the_table(index):
    data = written(full_report())
    with pytest.raises(EngineError, match=r"info\.report\.candidates\.layers"):
        read(_with(data, ("candidates", "layers", "conv"), [index]))


def test_a_recipe_in_another_file_is_checked_too():
    data = written(full_report())["quantized"]
    assert decode_recipe(data, "roundings") == full_report().quantized
    for wrong in (None, [], {}, {**data, "ranges": {"x": [1.0]}}, {**data, "tables": 1}):
        with pytest.raises(EngineError, match=r"^roundings"):
            decode_recipe(wrong, "roundings")
