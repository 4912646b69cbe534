"""2:4 sparsity per layer: the table of `--sparsity`, the layer JSON, and `explain`, for an engine with sparse, dense and ineligible layers."""

import dataclasses
from types import SimpleNamespace

import pytest

from whet.builder import BuildConfig, build
from whet.cli.exec import log_sparse_layers
from whet.inspector import engine_information, explain, sparsity_lines, sparsity_rows
from whet.inspector.summary import make_explanation
from whet.network import parse_network

TEXT = """network n source
in %x: f32[8,3,16,16]
const %w: f32[64,3,3,3] = seed(3)
const %v: f32[64,64,3,3] = seed(5)
%a = Conv(%x, %w, pads=(1, 1, 1, 1))
%r = Relu(%a)
%c = Conv(%r, %v, pads=(1, 1, 1, 1))
out %c
"""
NARROW = "its reduction axis has 3 elements, no multiple of 4"
CONFIG = BuildConfig(backend="cuda", precisions=("fp16",), sparsity="force", verify=False, timing_cache="", optimization_level=2, avg_timing=1)


@pytest.fixture
def plan(standin_gpu):
    return build(parse_network(TEXT), CONFIG)


def test_each_layer_has_both_times_or_the_reason(plan):
    rows = sparsity_rows(plan)
    assert [(x.eligible, x.runs_sparse) for x in rows] == [(False, False), (True, True)]
    narrow, wide = rows
    assert wide.sparse.ms < wide.dense.ms  # the simulated GPU counts bytes, and 2:4 weights have fewer
    assert wide.saved_ms == wide.dense.ms - wide.sparse.ms
    assert wide.reason == ""
    assert narrow.reason == NARROW
    lines = sparsity_lines(rows)
    assert lines[0].split() == ["dense", "ms", "sparse", "ms", "runs", "layer"]
    assert lines[1].split()[:3] == [f"{wide.dense.ms:.4f}", f"{wide.sparse.ms:.4f}", "sparse"]
    assert lines[2].startswith("1 of 1 eligible layers run sparse and save ")
    assert lines[3].startswith(f"not eligible (1), {NARROW}: ")


def test_a_layer_that_runs_dense_has_its_reason(plan):
    name = next(n for n, c in plan.choices.items() if "sparse" in c.tactic)
    candidates = plan.report.candidates[name]
    dense = next(c for c in candidates if c.ms is not None and "sparse" not in c.tactic)
    slower = [dataclasses.replace(c, ms=2 * dense.ms) if "sparse" in c.tactic and c.ms is not None else c for c in candidates]
    plan.choices[name] = dataclasses.replace(plan.choices[name], tactic=dense.tactic, config=dense.config)
    for known, reason in (
        ([dense, *(c for c in slower if "sparse" in c.tactic)], "the sparse tactic takes 2.00x of the dense time"),
        (
            [dense, dataclasses.replace(dense, tactic="cuda/sparse_conv", ms=None, reason="3 input channels")],
            "cuda/sparse_conv refuses: 3 input channels",
        ),
        ([dense], "no tactic of the backend computes this layer with 2:4 weights"),
        ([], "the engine keeps no candidates: it was locked, or built without timing"),
    ):
        plan.report.candidates[name] = known
        found = sparsity_rows(plan)[1]
        assert (found.eligible, found.runs_sparse, found.reason, found.saved_ms) == (True, False, reason, None)
    assert sparsity_lines(sparsity_rows(plan))[1].split()[:3] == ["-", "-", "dense"]


def test_weights_that_are_not_two_four_are_not_eligible(standin_gpu):
    plan = build(parse_network(TEXT), dataclasses.replace(CONFIG, sparsity="enable"))
    lines = sparsity_lines(sparsity_rows(plan))
    assert [line.partition(":")[0] for line in lines] == [
        f"not eligible (1), {NARROW}",
        "not eligible (1), its weights are not 2",
    ]


def test_the_layer_json_and_explain_have_it(plan):
    layers = engine_information(plan)["Layers"]
    found = [x["Sparsity"] for x in layers if x["Sparsity"] is not None]
    assert [(x["Eligible"], x["RunsSparse"]) for x in found] == [(False, False), (True, True)]
    assert found[1]["BestSparseTactic"] == "cuda/sparse_conv"
    assert found[1]["BestSparseMs"] < found[1]["BestDenseMs"]
    narrow, wide = (x.name for x in sparsity_rows(plan))
    assert explain(plan, wide)["sparsity"]["RunsSparse"]
    assert f"2:4: runs sparse; best dense {found[1]['BestDenseMs']:.4f} ms" in " ".join(make_explanation(plan, wide).split())
    assert f"2:4: not eligible, {NARROW}" in " ".join(make_explanation(plan, narrow).split())


def test_the_log_has_tensorrts_lines_before_the_table(plan):
    log = SimpleNamespace(lines=[])
    log.info = log.result = log.lines.append
    log_sparse_layers(log, plan)
    first, second, *table = log.lines
    names = [n for n in plan.choices if "sparse" in plan.choices[n].tactic]
    assert len(names) == 1
    assert first == f"(Sparsity) Layers eligible for sparse math: {', '.join(names)}"
    assert second == f"(Sparsity) TRT inference plan picked sparse implementation for layers: {', '.join(names)}"
    assert table == sparsity_lines(sparsity_rows(plan))
