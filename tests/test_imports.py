"""Imports flow one way, heavy libraries are imported late, and importing is light: checked in the source."""

import ast
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
ROOT = REPOSITORY / "src" / "whet"

# folder -> whet folders that it may import (itself, errors and registry always), in the order of the data flow
MAY_IMPORT = {
    "network": "ops training",  # only inside functions: type inference of a layer, to_torch()
    "ops": "network",
    "frontends": "network ops",
    "rewrite": "network ops",
    "composites": "network ops rewrite",
    "passes": "network ops rewrite composites sparsity",  # 2:4 weights, which a pass keeps
    "precision": "network ops",
    "sparsity": "network ops",
    "backends": "",
    "tactics": "network ops backends",
    "engine": "network ops backends tactics",
    "runtime": "network ops engine backends tactics measure inspector",  # the last two only inside functions: Engine.benchmark and explain
    "measure": "network ops backends tactics engine runtime",
    "builder": "network ops passes composites precision sparsity backends tactics engine runtime measure",
    "inspector": "network ops composites sparsity engine tactics",
    "pruning": "network ops sparsity measure builder backends engine runtime",  # latencies are measured by the builder's timer and on built engines
    "training": "network ops passes precision sparsity pruning",  # pruning: the order of steps and gradual pruning
    "plugins": "network ops backends tactics builder runtime",
    "search": "network ops passes precision sparsity backends engine runtime measure builder inspector pruning frontends training report",
    "report": "inspector engine",
    "torch_compile": "network frontends precision engine builder runtime",
    "trt": "network ops plugins precision frontends backends measure builder engine runtime inspector",
    "ort": "network frontends backends engine runtime",
    "zoo": "",
}
ONNX_ALLOWED = {"frontends", "zoo"}
TORCH_ALLOWED = {"training", "torch_compile"}  # and frontends/torch.py; the extras `train` and `export`
NEVER = {"tensorflow", "pickle", "onnxruntime", "openvino"}


@cache
def _import_statements(path: Path) -> tuple[ast.Import | ast.ImportFrom, ...]:
    """All import statements of a file, also those inside functions. Only statements are visited: expressions contain no import."""
    pending: list[ast.AST] = [ast.parse(path.read_text())]
    found = []
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.append(node)
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            pending += value if isinstance(value := getattr(node, field, ()), list) else []
    return tuple(sorted(found, key=lambda node: node.lineno))


def _imports(path: Path):
    for node in _import_statements(path):
        if isinstance(node, ast.Import):
            for a in node.names:
                yield a.name
        elif node.module and node.level == 0:
            yield node.module
            if node.module == "whet":
                for a in node.names:
                    yield f"whet.{a.name}"


FILES = sorted(ROOT.rglob("*.py"))


def test_imports_inside_of_every_statement_are_found(tmp_path):
    lines = """
import a0
def f():
    from b1 import x
class C:
    async def g(self):
        import c2
try:
    import d3
except E:
    import e4
else:
    import f5
finally:
    import g6
if a:
    import h7
elif b:
    import i8
else:
    import j9
while a:
    import k10
else:
    import l11
for a in b:
    import m12
with a:
    import n13
match a:
    case 1:
        import o14
"""
    (tmp_path / "m.py").write_text(lines)
    assert [int(name[1:]) for name in _imports(tmp_path / "m.py")] == list(range(15))


def test_imports_flow_one_way():
    assert [f"{path.relative_to(ROOT)}: {error}" for path in FILES for error in _list_forbidden_imports(path)] == []


def _list_forbidden_imports(path: Path) -> Iterator[str]:
    parts = path.relative_to(ROOT).parts
    folder = "tactics" if parts[0] == "backends" and "tactics" in parts else parts[0]
    for name in _imports(path):
        top = name.split(".")[0]
        converts = path == ROOT / "frontends" / "_tensorflow_script.py"  # a program of its own, run in TensorFlow's environment
        if top in NEVER and not converts:
            yield f"imports {name}"
        if top in ("torch", "safetensors"):
            masks = (top, path) == ("safetensors", ROOT / "pruning" / "recipe.py")  # a recipe's masks, without torch
            if not (masks or folder in TORCH_ALLOWED or path == ROOT / "frontends" / "torch.py"):
                yield f"imports {top}; only {sorted(TORCH_ALLOWED)} may"
        if top == "onnx" and folder not in ONNX_ALLOWED:
            yield f"imports onnx; only {sorted(ONNX_ALLOWED)} may"
        if top == "whet" and "." in name and folder in MAY_IMPORT:
            target = name.split(".")[1]
            if (ROOT / target).is_dir() and target != folder and target not in MAY_IMPORT[folder].split():
                yield f"imports whet.{target}"


def test_no_name_of_another_module_is_private():
    """`from whet.x import _name` is for modules (`_name.py`) only."""
    private = []
    for path in FILES:
        for node in _import_statements(path):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "whet":
                folder = ROOT.parent / node.module.replace(".", "/")
                for a in node.names:
                    module = (folder / f"{a.name}.py").exists() or (folder / a.name).is_dir()
                    if a.name.startswith("_") and not a.name.startswith("__") and not module:
                        private.append(f"{path.relative_to(ROOT)}:{node.lineno}: {node.module}.{a.name}")
    assert private == []


def test_every_folder_has_a_row():
    folders = {p.name for p in ROOT.iterdir() if p.is_dir() and any(p.glob("*.py"))} - {"cli", "__pycache__"}
    assert folders <= set(MAY_IMPORT)


def test_importing_is_light():
    """One fresh process imports the packages one after the other: if none is heavy after all of them, none is after one."""
    heavy = ["onnx", "torch", "onnxruntime", "openvino", "sklearn", "llvmlite", "cuda", "rich.table"]
    packages = ["whet", "whet.cli", "whet.network", "whet.ops", "whet.composites", "whet.passes", "whet.tactics", "whet.runtime"]
    code = f"import importlib, sys\nfor p in {packages}:\n    importlib.import_module(p)\n    print(p, [m for m in {heavy} if m in sys.modules])"
    got = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    assert got == [f"{package} []" for package in packages]


def test_no_two_files_of_tests_have_one_name():
    """pytest imports them by base name: of two, the second would not run."""
    names = sorted(p.name for p in Path(__file__).parent.rglob("test_*.py"))
    assert names == sorted(set(names))


def test_names_that_tests_and_benchmarks_import_exist():
    """Also inside functions and in files that need a GPU, which no test imports here: a renamed function is noticed without the machine."""
    missing = []
    for folder in ("tests", "benchmarks", "examples"):
        for path in sorted((REPOSITORY / folder).rglob("*.py")):
            for node in _import_statements(path):
                if not isinstance(node, ast.ImportFrom) or node.level or (node.module or "").split(".")[0] != "whet":
                    continue
                try:
                    module = importlib.import_module(node.module)
                except ModuleNotFoundError as e:
                    if (e.name or "").startswith("whet"):
                        missing.append(f"{path.relative_to(REPOSITORY)}:{node.lineno} {node.module}")
                    continue
                for name in (a.name for a in node.names if a.name != "*"):
                    submodule = hasattr(module, "__path__") and importlib.util.find_spec(f"{node.module}.{name}") is not None
                    if name not in dir(module) and not submodule:  # dir() names what is imported on demand without importing torch
                        missing.append(f"{path.relative_to(REPOSITORY)}:{node.lineno} {node.module}.{name}")
    assert missing == []


def test_each_type_ignore_has_a_code_and_a_reason():
    unexplained = re.compile(r"# type:\s*ignore(?!\[[\w, -]+\]  # \w)")
    found = [
        f"{path.relative_to(REPOSITORY)}:{n}"
        for path in sorted(p for part in ("src", "tests", "benchmarks", "examples") for p in (REPOSITORY / part).rglob("*.py"))
        for n, line in enumerate(path.read_text().splitlines(), 1)
        if unexplained.search(line) and path != Path(__file__)
    ]
    assert not found, f"# type: ignore[code] needs a second comment that gives the reason: {found}"


BINARY = ("archive.open", "Image.open", "os.open")  # open no text


def test_text_files_are_opened_with_an_encoding():
    """Without one they are read in the user's locale: ASCII under LC_ALL=C, another page of 256 characters on other systems."""
    found = []
    for path, tree in ((p, ast.parse(p.read_text(encoding="utf-8"))) for p in sorted(ROOT.rglob("*.py"))):
        for call in (n for n in ast.walk(tree) if isinstance(n, ast.Call)):
            name = ast.unparse(call.func)
            arguments = {k.arg: k.value for k in call.keywords}
            method = name.rpartition(".")[2]
            if "encoding" in arguments or name in BINARY or method not in ("open", "fdopen", "read_text", "write_text"):
                continue
            if method == "read_text" and call.args:  # of an engine, not Path.read_text
                continue
            modes = [a for a in [*call.args[:2], arguments.get("mode")] if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            is_text = method.endswith("_text") or not any("b" in m.value for m in modes)
            if is_text and not name.startswith("self.") and not (method == "open" and call.args and ast.unparse(call.args[0]) == "os.devnull"):
                found.append(f"{path.relative_to(REPOSITORY)}:{call.lineno} {name}")
    assert found == []
