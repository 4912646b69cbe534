"""The public names: one sorted list, and each of them exists."""

import ast
import importlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from pkgutil import iter_modules

import pytest

import whet

ROOT = Path(__file__).parents[1]


def test_every_name_exists():
    assert whet.__all__ == sorted(whet.__all__)
    for name in whet.__all__:
        assert getattr(whet, name) is not None


@pytest.mark.parametrize(
    ("package", "wrong", "meant"), [("whet", "biuld", "build"), ("whet.search", "serch", "search"), ("whet.training", "fintune", "finetune")]
)
def test_an_unknown_name_is_refused_with_the_nearest(package, wrong, meant):
    with pytest.raises(AttributeError, match=f"'{package}' has no attribute '{wrong}'. Did you mean '{meant}'"):
        getattr(importlib.import_module(package), wrong)
    assert meant in dir(importlib.import_module(package))


def _homes(package: str) -> tuple[dict[str, str], dict[str, str]]:
    """Names and their modules, as the package loads them and as type checkers see them."""
    module = importlib.import_module(package)
    tree = ast.parse(Path(module.__file__).read_text())
    checked = next(n for n in tree.body if isinstance(n, ast.If) and isinstance(n.test, ast.Name) and n.test.id == "TYPE_CHECKING")
    shown = {a.asname: n.module for n in checked.body if isinstance(n, ast.ImportFrom) for a in n.names}
    return module._HOME, shown


@pytest.mark.parametrize("package", ["whet", "whet.search", "whet.training"])
def test_type_checkers_see_every_name(package):
    homes, shown = _homes(package)
    assert {n: m for n, m in shown.items() if m != "whet"} == {n: m for n, m in homes.items() if m != f"{package}.{n}"}


def test_type_checkers_see_every_sub_package():
    _, shown = _homes("whet")
    assert {n for n, m in shown.items() if m == "whet"} == {m.name for m in iter_modules(whet.__path__)} - {"__main__"}


def _documented() -> list[str]:
    """Dotted names (`whet.builder.build_int8`) in the code of the README and the docs."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    code = "\n".join(c for p in pages for c in re.findall(r"```python\n(.*?)```|`([^`\n]+)`", p.read_text(), re.DOTALL) for c in c)
    statements = re.sub(r"^\s*(from|import) .*$|python:\S+|python -m \S+|whet\.history", "", code, flags=re.MULTILINE)
    return sorted(set(re.findall(r"(?<![\w./-])whet(?:\.[A-Za-z_]\w*)+(?![\w/]*\.(?:md|py|json|engine))", statements)))


def test_documented_names_exist_after_a_bare_import():
    names = _documented()
    assert "whet.build" in names
    assert "whet.builder.build_int8" in names
    torch = importlib.util.find_spec("torch") is not None
    wanted = [n for n in names if torch or not n.startswith(("whet.training", "whet.from_torch", "whet.compile", "whet.torch_compile"))]
    code = "import whet\nfor name in " + repr(wanted) + ":\n    try:\n        eval(name)\n    except AttributeError as e:\n        print(name, e)\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == ""


USER = """
import whet

reveal_type(whet.build)
reveal_type(whet.Runtime().load("a.engine").create_context().run({}))
reveal_type(whet.builder.build_int8)
reveal_type(whet.BuildConfig(precisions=("bf16",)).precisions)
reveal_type(whet.search.load_recipe)
whet.BuildConfig(threads="two")
whet.biuld
"""


@pytest.mark.slow
def test_a_users_editor_knows_the_signatures(tmp_path, monkeypatch):
    """mypy on a user's script, with the package's sources as installed (py.typed)."""
    api = pytest.importorskip("mypy.api")
    assert (ROOT / "src" / "whet" / "py.typed").is_file()
    script = tmp_path / "script.py"
    script.write_text(USER)
    monkeypatch.setenv("MYPYPATH", str(ROOT / "src"))
    cache = ["--cache-dir", str(ROOT / ".mypy_cache")]
    out, _, _ = api.run([str(script), "--config-file", str(ROOT / "pyproject.toml"), "--follow-imports=silent", *cache])
    lines = [line.partition("script.py:")[2] for line in out.splitlines() if "script.py:" in line]
    build, ran, int8, precisions, recipe, threads, wrong = lines
    assert build.startswith('4: note: Revealed type is "def (model: ')
    assert "-> whet.runtime.engine.Engine" in build
    assert 'dict[' in ran
    assert "ndarray" in ran
    assert "def (" in int8
    assert "EnginePlan" in int8
    assert "tuple[" in precisions
    assert "AutoRecipe" in recipe
    assert 'expected "int"' in threads
    assert 'has no attribute "biuld"' in wrong
