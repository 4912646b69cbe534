"""Trials on Ray: the same search, its jobs in Ray's processes, files transferred as bytes. Skipped without Ray."""

from __future__ import annotations

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'whet[ray]'")

from support.search_case import recipe_with
from whet.search import search
from whet.search.jobs.job import read_result

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Ray emits warnings of its own


def test_a_search_on_a_cluster_of_this_machine(case, tmp_path):
    recipe = recipe_with(case, tmp_path / "work", search__trials=2, search__workers=2, survivor__count=1)
    found = search(recipe, ray="auto")
    assert len([t for t in found.trials if t.same_as is None]) == 2
    for t in found.trials:
        if t.same_as is None:
            assert read_result(tmp_path / "work" / "scouts" / f"{t.number:04d}")["state"] == "done"
    assert (found.folder.deploy / "model.engine").stat().st_size > 0
    assert "Verified: the lock" in (found.folder.deploy / "README.md").read_text()
