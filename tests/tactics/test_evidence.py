"""Every tactic is selected by a network of benchmarks/selected_tactics.py, or its module states why it exists."""

import importlib
import json
import re
from pathlib import Path

import pytest

from whet.tactics import Tactic, list_tactics

REPOSITORY = Path(__file__).parents[2]
RESULTS = {"cpu": "cpu", "cuda": "h200"}  # backend -> folder of results
REASON = re.compile(r"^(For coverage|Measured|Not measured yet): (.+)", re.MULTILINE)


def selected(backend: str) -> set[str]:
    rows = json.loads((REPOSITORY / "benchmarks" / "results" / RESULTS[backend] / "selected_tactics.json").read_text())["rows"]
    return {name for row in rows.values() for name in row.get("tactics", ())}


def reasons(tactic: Tactic) -> list[tuple[str, str]]:
    """(kind, text) of the reasons in the docstrings of a tactic's module and of its package."""
    module = importlib.import_module(type(tactic).__module__)
    package = importlib.import_module(module.__package__)
    found = REASON.findall(module.__doc__ or "")
    return found or ([("For coverage", package.__doc__)] if "for coverage" in (package.__doc__ or "") else [])


@pytest.mark.parametrize("backend", RESULTS)
def test_tactics_that_nothing_selects_state_why_they_exist(backend):
    """Otherwise: select them in benchmarks/selected_tactics.py, write `For coverage: ...` or `Measured: FILE` into the module, or delete them."""
    known = selected(backend)
    own = [t for t in list_tactics(backend) if type(t).__module__.startswith("whet.tactics.")]  # other tests may have registered plugins
    assert len(own) > 40
    assert [t.name for t in own if not t.opt_in and t.name not in known and not reasons(t)] == []


@pytest.mark.parametrize("backend", RESULTS)
def test_files_of_measurements_exist(backend):
    for tactic in (t for t in list_tactics(backend) if type(t).__module__.startswith("whet.tactics.")):
        for kind, text in reasons(tactic):
            file = re.match(r"[\w/.-]+?\.(?:md|json)", text)
            assert kind != "Measured" or (file is not None and (REPOSITORY / file[0]).is_file()), f"{tactic.name}: {text}"
