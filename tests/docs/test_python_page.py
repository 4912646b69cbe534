"""docs/python.md: its examples give the printed results, and it lists every public name of the packages for users."""

import doctest
import importlib.util
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "python.md"
PACKAGES = (
    "", ".builder", ".engine", ".frontends", ".inspector", ".ort", ".precision", ".pruning", ".report", ".runtime", ".search", ".sparsity",
    ".training", ".zoo",
)  # fmt: skip
NEEDS = {"": [], "torch": ["torch", "safetensors"], "search": ["optuna", "yaml"]}  # a block's second word -> its imports


def blocks() -> list[tuple[str, int, str]]:
    """(requirement, first line, text) of each Python block."""
    text = PAGE.read_text()
    found = re.finditer(r"^```python ?(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [(m[1], text[: m.start()].count("\n") + 1, m[2]) for m in found]


def here(modules: list[str]) -> bool:
    return all(importlib.util.find_spec(m) for m in modules)


def test_the_examples_give_the_printed_results(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    session: dict = {}
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for needs, line, text in blocks():
        if here(NEEDS[needs]):
            test = doctest.DocTestParser().get_doctest(text, session, PAGE.name, str(PAGE), line)
            runner.run(test, out=said.append, clear_globs=False)
            session = test.globs
    assert runner.tries > 40
    assert runner.failures == 0, "".join(said)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda p: f"whet{p}")
def test_every_public_name_is_listed_and_documented(package):
    module, page = importlib.import_module(f"whet{package}"), PAGE.read_text()
    for name in module.__all__:
        assert re.search(rf"\b{name}\b", page), f"whet{package}.{name} is not in {PAGE.name}"
    if package != ".training" or here(NEEDS["torch"]):
        for thing in (getattr(module, name) for name in module.__all__):
            if callable(thing):
                assert thing.__doc__, f"{thing.__name__} has no docstring"
                assert not thing.__doc__.startswith(f"{thing.__name__}("), f"{thing.__name__} has the docstring that a dataclass makes of its fields"
