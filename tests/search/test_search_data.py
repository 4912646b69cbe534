"""Data of a recipe: labelled samples, metrics of a user, and the data of the last comparison."""

from __future__ import annotations

import numpy as np
import pytest

from support.search_case import perceptron, read_network, recipe_with
from whet.errors import CalibrationError
from whet.search.recipe.data import Labelled, load_labelled
from whet.search.recipe.metrics import top1
from whet.search.recipe.space import Candidate


def test_labelled_data(tmp_path):
    net, d = perceptron()
    np.savez(tmp_path / "a.npz", x=d["x"][:5], y=d["y"][:5])
    np.savez(tmp_path / "b.npz", anything=d["x"][5:9], labels=d["y"][5:9])
    both = load_labelled(str(tmp_path), net, "data.score")
    assert len(both) == 9
    np.testing.assert_array_equal(both.inputs["x"], d["x"][:9])
    np.savez(tmp_path / "c.npz", x=d["x"][:5])
    with pytest.raises(CalibrationError, match=r"data\.score: .*c\.npz has no array `labels`; it has x"):
        load_labelled(str(tmp_path / "c.npz"), net, "data.score")
    np.savez(tmp_path / "d.npz", x=d["x"][:5], labels=d["y"][:4])
    with pytest.raises(CalibrationError, match="has 4 labels for 5 samples"):
        load_labelled(str(tmp_path / "d.npz"), net, "data.score")
    np.savez(tmp_path / "e.npz", x=d["x"][:5], labels=np.ones(5, np.float32))
    with pytest.raises(CalibrationError, match="labels are a 1-D array of integers"):
        load_labelled(str(tmp_path / "e.npz"), net, "data.score")


def test_nan_and_labels_outside_the_classes_are_refused(case, tmp_path):
    from whet.search.recipe.data import load_unlabelled

    x = np.zeros((5, 64), np.float32)
    x[3, 7] = np.nan
    np.savez(tmp_path / "x.npz", x=x)
    np.savez(tmp_path / "xy.npz", x=x, labels=np.zeros(5, int))
    with pytest.raises(CalibrationError, match=r"x\.npz: sample 3 of 'x' has NaN or infinite values"):
        load_unlabelled(str(tmp_path / "x.npz"), read_network(case), 9)
    with pytest.raises(CalibrationError, match=r"data\.score: .*sample 3 of 'x' has NaN or infinite values"):
        load_labelled(str(tmp_path / "xy.npz"), read_network(case), "data.score")
    data = Labelled({"x": np.zeros((3, 64), np.float32)}, np.array([1, 2, 10]))
    with pytest.raises(CalibrationError, match="labels go from 1 to 10, but the model has 10 classes: labels start at 0"):
        top1(lambda feeds: {"y": np.zeros((3, 10), np.float32)}, data)


def test_a_metric_function_may_have_data_for_the_last_comparison():
    from whet.search.recipe.metrics import call_user_metric, knows_which

    def plain(predict, batch=32):
        return float(batch)

    def told(predict, which):
        return {"score": 1.0, "judge": 2.0}[which]

    def with_a_default(predict, which="score"):
        return which == "judge"

    assert [knows_which(f) for f in (plain, told, with_a_default, max)] == [False, True, True, False]
    assert [call_user_metric(f, lambda feeds: {}, "m", "judge").value for f in (plain, told, with_a_default)] == [32.0, 2.0, 1.0]


def test_the_last_comparison_names_its_data(case, tmp_path, monkeypatch):
    """A metric function without separate data for the last comparison is not evaluated on unseen data, even if the recipe names some."""
    from whet.search.jobs.environment import Worker
    from whet.search.jobs.job import Job

    (tmp_path / "mine_judged.py").write_text("def one(predict):\n    return 1.0\n\n\ndef two(predict, which):\n    return 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def last(**changes) -> str:
        return Worker(Job("final", "n", recipe_with(case, tmp_path, **changes).to_plain(), Candidate().to_plain()), tmp_path).last_data

    assert last() == "judge"
    assert last(data={"calibrate": "calibrate.npz", "score": "score.npz"}) == "score"
    assert last(metric="python:mine_judged:one") == "score"
    assert last(metric="python:mine_judged:two") == "judge"


def test_data_used_twice_are_reported(case, tmp_path):
    from whet.search.outcome import advice

    (tmp_path / "copy.npz").write_bytes((case / "score.npz").read_bytes())
    same = recipe_with(case, tmp_path, data__judge=str(tmp_path / "copy.npz"), data__train="score.npz", finetune=False, qat="never")
    said = advice.advise_before_search(same)
    pairs = [("judge", "score"), ("train", "judge"), ("train", "score")]
    assert [s.partition(":")[0] for s in said] == [f"data.{a} equals data.{b}" for a, b in pairs]
    said = advice.advise_before_search(recipe_with(case, tmp_path, metric="python:a:b"))
    assert len(said) == 1
    assert said[0].startswith("data.score and data.judge are not read")
