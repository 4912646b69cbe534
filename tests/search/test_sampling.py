"""A killed and resumed search samples the same points as an uninterrupted one, given the same results."""

from __future__ import annotations

import pytest

from support.search_case import recipe_with
from whet.search.recipe.space import search_space
from whet.search.study.study import Study

TRIALS = 12


def opened(case, out, sampler: str, seed: int = 0) -> Study:
    from whet.frontends import network_from_onnx

    recipe = recipe_with(case, out, space={"precision": ["fp32", "int8"], "width": {"step": 0.05}})
    space = search_space(network_from_onnx(recipe.model), recipe)
    return Study(out / "study.sqlite3", space, higher_is_better=True, sampler=sampler, seed=seed, startup=4)


def report_result(study: Study, number: int, params: dict) -> None:
    """A result that depends only on the point."""
    a, b = params["96 inner"], params["64 inner"]
    faster = 2.0 if params["precision"] == "int8" else 1.0
    study.tell(number, ((2 - a - b) / faster, 99 - 30 * a * b - faster), {"misses": [max(0.0, a * b - 0.2)], "candidate": {}})


def drawn(case, out, sampler: str, kills: frozenset[int] = frozenset(), seed: int = 0, trials: int = TRIALS) -> list[dict]:
    """The points of a search whose process ends after the trials `kills` were sampled and before their results were reported."""
    out.mkdir()
    study, found = opened(case, out, sampler, seed), []
    study.enqueue(study.space.seeds()[:2])
    while len(found) < trials:
        number, params = study.ask()
        if number in kills:
            study = opened(case, out, sampler, seed)
            study.enqueue(study.space.seeds()[:2])
            ((again, params),) = study.list_unfinished()
            assert again == number
        report_result(study, number, params)
        found.append(params)
    return found


@pytest.mark.parametrize("sampler", ["gp", *(pytest.param(s, marks=pytest.mark.slow) for s in ("tpe", "nsga2", "random"))])
def test_a_resumed_search_samples_the_same_points(case, tmp_path, sampler):
    unbroken = drawn(case, tmp_path / "a", sampler)
    assert drawn(case, tmp_path / "b", sampler, frozenset({1, 3, 6, 9})) == unbroken
    assert len({tuple(sorted(p.items())) for p in unbroken}) > TRIALS // 2
    assert any(p["96 inner"] != p["64 inner"] for p in unbroken[2:]), "dimensions with equal ranges are sampled independently"
    assert drawn(case, tmp_path / "c", sampler, seed=1, trials=6)[2:] != unbroken[2:6]
