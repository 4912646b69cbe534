"""The ResNet-56 case: the recipes in the repository fit the network, differences are paired, comparisons use whet's fastest equally accurate model.
"""

import sys
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "resnet56"
NAMES = ("data", "judging", "measure", "model", "teachers", "telling", "tune", "variants")  # in the order of their imports


@pytest.fixture(scope="module")
def case():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        for name in NAMES:
            patch.delitem(sys.modules, name, raising=False)
        import model
        import telling
        import variants

        yield telling, model, variants
        for name in NAMES:
            sys.modules.pop(name, None)


def test_every_recipe_fits_the_network(case):
    """Widths and blocks of each variant: fewer FLOPs than the original, by the share in its name if that is a share of FLOPs."""
    from whet import network_from_onnx
    from whet.pruning import count_flops

    _, model, variants = case
    whole = network_from_onnx(model.resnet56(None))
    assert len(list(variants.RECIPES.glob("*.json"))) >= 5
    for path in variants.RECIPES.glob("*.json"):
        assert path.stem in variants.VARIANTS
        share = count_flops(variants.VARIANTS[path.stem].make(whole)) / count_flops(whole)
        assert share < 0.75
        if path.stem.startswith(("flops-", "stages-")):
            assert share == pytest.approx(int(path.stem.split("-")[1]) / 100, abs=0.01)


def test_the_cut_that_meets_the_published_mark_has_so_many_fewer_macs(case):
    from whet import network_from_onnx
    from whet.pruning import count_flops

    _, model, variants = case
    whole = network_from_onnx(model.resnet56(None))
    assert count_flops(whole) / count_flops(variants.VARIANTS["stages-39"].make(whole)) >= 2.57


def test_two_teachers_give_their_mean(case, tmp_path):
    import teachers

    import whet
    from whet.frontends import save_onnx
    from whet.ops import run_network

    _, model, variants = case
    whole = whet.network_from_onnx(model.resnet56(None))
    nets = dict(zip(teachers.TEACHERS, (whole, variants.shorter(whole, 14)), strict=True))
    for name, net in nets.items():
        save_onnx(net, tmp_path / f"{name}.tuned.onnx")
    with pytest.raises(SystemExit, match=f"{teachers.TEACHERS[0]}.tuned.onnx"):
        teachers.write(tmp_path / "elsewhere")
    teachers.write(tmp_path)
    x = np.random.default_rng(0).standard_normal((2, 3, 32, 32), np.float32)
    both = run_network(whet.network_from_onnx(tmp_path / teachers.FILE), {"x": x})["logits"]
    each = [run_network(n, {"x": x})["logits"] for n in nets.values()]
    np.testing.assert_allclose(both, sum(each) / 2, rtol=1e-5, atol=1e-5)


def test_differences_are_paired(case):
    from judging import paired, percent

    base = np.array([True] * 90 + [False] * 10)
    assert paired(base, base) == (0.0, 0.0, 0.0)
    worse = base.copy()
    worse[:4] = False
    worse[95:97] = True
    mean, low, high = paired(worse, base)
    assert mean == -2.0
    assert high - mean == pytest.approx(mean - low, abs=0.011)
    assert high - low == pytest.approx(200 * 1.96 * np.sqrt((0.06 - 0.0004) / 100), abs=0.02)  # six of a hundred predictions changed
    assert percent(worse) == 88.0


def row(network, points, ms, batch=1):
    return {"network": network, "precision": "FP16", "batches": str(batch), "batch": batch, "JPEG10k %": points, "FLOPs fewer": 2.0, "ms": ms}


def test_a_baseline_is_compared_with_the_fastest_equally_accurate_model(case):
    telling = case[0]
    rows = [row("original", 90.5, 2.0), row("depth", 90.2, 0.9), row("latency-45", 89.6, 0.5), row("gpu-50", 90.0, 0.8), row("depth", 90.2, 0.1, 8),
            row("tp-magnitude-50", 90.0, 1.2), row("flops-50", 90.4, 1.1)]  # fmt: skip
    torch_pruning, flops = telling.against(rows)
    assert (torch_pruning["whet"], torch_pruning["rival ms / whet ms"]) == ("gpu-50", 1.5)  # latency-45 is too inaccurate, batch 8 is another row
    assert flops["whet"] == "none is as accurate"  # depth is not selected by latency, gpu-50 is 0.4 points below


def test_the_short_table_has_one_line_per_network(case):
    telling = case[0]
    about = {"FLOPs fewer": 2.0, "parameters": 9, "speed": 2.0, "peak MiB": 1.0, "JPEG %": 90.0, "JPEG points": -0.5, "JPEG points low": -1.0,
             "JPEG points high": 0.0}  # fmt: skip
    rows = [about | r for r in (row("depth", 90.2, 0.9), row("depth", 90.2, 5.0, 8), row("tp-magnitude-50", 90.0, 1.2))]
    rows.append(rows[0] | {"precision": "INT8", "ms": 0.3})
    (line,) = telling.short(rows)
    assert (line["network"], line["FP16 ms"], line["INT8 ms"]) == (telling.STEPS["depth"], 0.9, 0.3)
    assert line["INT8 JPEG points"] == "-0.50 [-1.00, +0.00]"


def test_an_int8_build_that_kept_floating_point_is_listed_as_such(case):
    import measure

    kept = {"precision": "INT8", "kept": "floating point"}
    assert (measure.computed_in(kept, "cuda"), measure.computed_in(kept, "cpu")) == ("FP16", "FP32")
    assert measure.computed_in({"precision": "INT8", "kept": "int8"}, "cuda") == measure.computed_in({"precision": "INT8"}, "cpu") == "INT8"
