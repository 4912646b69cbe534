"""Tests replace, import and use public names only, so that a module can be rewritten without them."""

import ast
import re
from pathlib import Path

import whet

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


#: Private names that tests read, with the reason why no public name shows the same.
EXCEPTIONS = {
    "_arena": "a freed context frees its arena, which only it refers to",
    "_bounds": "how many shapes a context keeps is seen in its memory alone",
    "_pool": "the idle contexts of an engine, which users cannot reach",
    "_shaped": "how many shapes an engine keeps is seen in its memory alone",
    "_store": "packed weights are freed with the engine, so they are counted after it",
    "_users": "a pooled context keeps no array of the user",
    "_HOME": "the table that a package loads its names by; the test compares it with what type checkers read",
    "_obj": "ctypes: the object of a reference",
    "_run": "onnx.reference: the method that each of its ops defines",
}


MENTIONED = re.compile(r"(?<!self)(?<!cls)\._[a-zA-Z]|^ *(?:from|import) .*\b_[a-zA-Z]|^ +_\w+,", re.M)  # a file without any is not parsed


def is_whet_module(name: str) -> bool:
    path = Path(whet.__file__).parent.joinpath(*name.split(".")[1:])
    return path.is_dir() or path.with_suffix(".py").is_file()


def find_used_private_names(text: str) -> set[str]:
    """Private names that a test imports from whet's modules, and private attributes of objects other than `self`. Modules may be private, and
    attributes of other packages' modules are not judged."""
    if not MENTIONED.search(text):
        return set()
    nodes, used, imported = list(ast.walk(ast.parse(text))), set(), {}
    for node in nodes:
        if isinstance(node, ast.Import):
            imported.update({(a.asname or a.name).split(".")[0]: a.name for a in node.names})
        elif isinstance(node, ast.ImportFrom):
            imported.update({a.asname or a.name: f"{node.module}.{a.name}" for a in node.names})
            of_whet = node.module is not None and node.module.split(".")[0] == "whet"
            used.update(a.name for a in node.names if of_whet and is_private(a.name) and not is_whet_module(f"{node.module}.{a.name}"))
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "pytest.importorskip":
            imported.update({ast.unparse(t): node.value.args[0].value for t in node.targets})
    for node in nodes:
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            owner = ast.unparse(node.value)
            root, _, rest = owner.partition(".")
            module = imported.get(root, "whet" if root not in ("self", "cls") else "")
            if module.split(".")[0] in ("whet", "support") and not is_whet_module(".".join(filter(None, (module, rest, node.attr)))):
                used.add(node.attr)
    return used


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_used_private_names_are_found():
    assert find_used_private_names("from whet.runtime.calls import _cast\nfrom whet.cli import _infer") == {"_cast"}
    assert find_used_private_names("import whet.runtime as r\nr._cast(1)\nengine._make().x\nf(1)._state[0] = 2") == {"_cast", "_make", "_state"}
    assert not find_used_private_names("torch = pytest.importorskip('torch')\ntorch._dynamo.reset()")
    assert not find_used_private_names("import os, whet\nos._exit(1)\nself._a = 1\nwhet.cli._infer.read(x)\nx.__dict__")


def test_tests_use_public_names_only():
    root = Path(__file__).parent
    used = {str(p.relative_to(root)): find_used_private_names(p.read_text()) for p in sorted(root.rglob("*.py"))}
    assert not {path: names - set(EXCEPTIONS) for path, names in used.items() if names - set(EXCEPTIONS)}
    assert set(EXCEPTIONS) == set().union(*used.values()) & set(EXCEPTIONS), "an exception that no test needs any more"
