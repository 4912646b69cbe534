"""Training for INT8 ends with two engines; the one that the verdict names is kept, the other's file goes."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from support.search_case import perceptron
from whet.builder import BuildConfig
from whet.search.recipe.metrics import Score
from whet.search.stages.candidate_engines import ScoredEngine, keep_better_engine
from whet.search.stages.prepare import Prepared


@pytest.mark.parametrize("verdict", ["calibrated", "trained"])
def test_the_verdict_decides_which_engine_is_kept(tmp_path, verdict):
    net = perceptron()[0]
    first = ScoredEngine(tmp_path / "engine", net, BuildConfig(), None, 1.0, Score(98.0), times={"median_ms": 2.0})
    trained = replace(first, path=tmp_path / "trained", score=Score(97.0), times={"median_ms": 1.0})
    first.path.write_bytes(b"calibrated")
    trained.path.write_bytes(b"trained")
    prepared, qat = Prepared(net), {"kept": verdict, "seconds": 3.0}
    kept = keep_better_engine(SimpleNamespace(), first, trained, qat, prepared)
    assert kept.path == tmp_path / "engine"
    assert kept.path.read_bytes() == verdict.encode()
    assert kept.score.value == {"calibrated": 98.0, "trained": 97.0}[verdict]
    assert [p.name for p in tmp_path.iterdir()] == ["engine"]
    assert ("not used" in prepared.steps[1]["step"]) == (verdict == "calibrated")
