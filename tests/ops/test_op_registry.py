"""OPS imports the file of an op when it is looked up, and all files when all names are used."""

import subprocess
import sys
from importlib import import_module

import pytest

from whet.errors import NetworkError
from whet.ops import OPS
from whet.ops._base import OpRegistry

USES = {
    "len": len, "list": list, "keys": lambda r: list(r.keys()), "values": lambda r: list(r.values()), "items": lambda r: list(r.items()),
    "dict": dict, "in": lambda r: "no such op" in r, "another file's name": lambda r: r["Odd"],
}  # fmt: skip


@pytest.fixture
def registry(tmp_path, monkeypatch):
    """The registry of a package with the ops And, MatMul and Odd, which is not in a file of its name."""
    folder = tmp_path / "few_ops"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    for file, name in (("and_", "And"), ("mat_mul", "MatMul"), ("others", "Odd")):
        text = f"from types import SimpleNamespace\nfrom few_ops import ops\nops.register(SimpleNamespace(name='{name}'))\n"
        (folder / f"{file}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    for module in [m for m in sys.modules if m.split(".")[0] == "few_ops"]:
        monkeypatch.delitem(sys.modules, module)
    package = import_module("few_ops")
    package.ops = OpRegistry("few_ops", folder)
    yield package.ops
    for module in [m for m in sys.modules if m.split(".")[0] == "few_ops"]:
        del sys.modules[module]


def loaded():
    return {m.rpartition(".")[2] for m in sys.modules if m.startswith("few_ops.")}


def test_a_lookup_imports_one_file(registry):
    assert registry["MatMul"].name == "MatMul"
    assert "MatMul" in registry
    assert loaded() == {"mat_mul"}
    assert registry.get("And").name == "And"
    assert loaded() == {"mat_mul", "and_"}


@pytest.mark.parametrize("use", USES)
def test_a_use_of_all_names_imports_all_files(registry, use):
    USES[use](registry)
    assert loaded() == {"and_", "mat_mul", "others"}
    assert list(registry) == ["And", "MatMul", "Odd"]
    assert len(registry) == 3


def test_an_op_is_registered_once(registry):
    with pytest.raises(NetworkError, match="op And is registered twice"):
        registry.register(registry["And"])


def test_running_an_engine_imports_no_op():
    code = "import sys, whet.runtime\nprint([m for m in sys.modules if m.startswith('whet.ops.') and '._' not in m])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_names_that_no_op_has():
    for name in ("no such op", "", "_base", "../conv", "Conv.", 3, None):
        assert name not in OPS
        assert OPS.get(name) is None
        with pytest.raises(KeyError):
            OPS[name]
