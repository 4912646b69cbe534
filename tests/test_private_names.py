"""Tests replace public names only, so that a module can be rewritten without them."""

import re
from pathlib import Path

TARGET = re.compile(r"\b(?:set|del)attr\(\s*(\"[\w.]*\"|[\w.()\[\]]+)(?:,\s*(?:f?\"(\w+)\"))?", re.S)
ASSIGNED = re.compile(r"^\s*(?!self\b|cls\b)[a-zA-Z][\w.]*\.(_[a-z]\w*) = ", re.M)


def find_replaced_private_names(text: str) -> list[str]:
    """Private names that a test sets in an object of another module. Modules may be private: `_cublaslt.library` is a public function of one."""
    owners_and_names = [(owner.strip('"').split("."), name) for owner, name in TARGET.findall(text)]
    replaced = [name or owner[-1] for owner, name in owners_and_names]
    classes = [part for owner, name in owners_and_names for part in (owner if name else owner[:-1]) if re.match(r"_[A-Z]", part)]
    return [n for n in (*replaced, *classes, *ASSIGNED.findall(text)) if n.startswith("_") and not n.startswith("__")]


def test_replaced_names_are_found():
    assert find_replaced_private_names('monkeypatch.setattr(module, "_rows", 1)') == ["_rows"]
    assert find_replaced_private_names('m.setattr(\n    a.b, "_Rows", 1)\nm.setattr("whet.a._run", 1)') == ["_Rows", "_run"]
    assert find_replaced_private_names('m.setattr(a._Distribution, "in_registers", 1)\n    engine._pool = None') == ["_Distribution", "_pool"]
    assert not find_replaced_private_names('m.setattr(_cublaslt, "library", 1)\nm.setattr("whet.cli._model.read", 1)')
    assert not find_replaced_private_names('m.setattr(A, "__init__", 1)\n    self._a = 1')


def test_tests_replace_public_names_only():
    root = Path(__file__).parent
    replaced = {str(p.relative_to(root)): names for p in root.rglob("*.py") if (names := find_replaced_private_names(p.read_text()))}
    del replaced[Path(__file__).name]
    assert not replaced
