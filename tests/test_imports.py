"""Imports flow one way, heavy libraries are imported late, and importing is light: checked in the source."""

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

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
    "training": "network ops passes precision sparsity pruning",  # pruning is imported for the order of steps
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


def _imports(path: Path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for a in node.names:
                yield a.name
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module
            if node.module == "whet":
                for a in node.names:
                    yield f"whet.{a.name}"


FILES = sorted(ROOT.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_flow_one_way(path):
    parts = path.relative_to(ROOT).parts
    folder = "tactics" if parts[0] == "backends" and "tactics" in parts else parts[0]
    for name in _imports(path):
        top = name.split(".")[0]
        converts = path == ROOT / "frontends" / "_tensorflow_script.py"  # a program of its own, run in TensorFlow's environment
        assert top not in NEVER or converts, f"{path.name} imports {name}"
        if top in ("torch", "safetensors"):
            masks = (top, path) == ("safetensors", ROOT / "pruning" / "recipe.py")  # a recipe's masks, without torch
            allowed = masks or folder in TORCH_ALLOWED or path == ROOT / "frontends" / "torch.py"
            assert allowed, f"{path.name} imports {top}; only {sorted(TORCH_ALLOWED)} may"
        if top == "onnx":
            assert folder in ONNX_ALLOWED, f"{path.name} imports onnx; only {sorted(ONNX_ALLOWED)} may"
        if top == "whet" and "." in name and folder in MAY_IMPORT:
            target = name.split(".")[1]
            if (ROOT / target).is_dir():
                assert target == folder or target in MAY_IMPORT[folder].split(), f"{folder}/{path.name} imports whet.{target}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_name_of_another_module_is_private(path):
    """`from whet.x import _name` is for modules (`_name.py`) only."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "whet":
            folder = ROOT.parent / node.module.replace(".", "/")
            for a in node.names:
                module = (folder / f"{a.name}.py").exists() or (folder / a.name).is_dir()
                assert module or not a.name.startswith("_") or a.name.startswith("__"), f"line {node.lineno}: {node.module}.{a.name}"


def test_every_folder_has_a_row():
    folders = {p.name for p in ROOT.iterdir() if p.is_dir() and any(p.glob("*.py"))} - {"cli", "__pycache__"}
    assert folders <= set(MAY_IMPORT)


@pytest.mark.parametrize("module", ["whet", "whet.cli", "whet.network", "whet.ops", "whet.composites", "whet.passes", "whet.tactics", "whet.runtime"])
def test_importing_is_light(module):
    heavy = ["onnx", "torch", "onnxruntime", "openvino", "sklearn", "llvmlite", "cuda", "rich.table"]
    code = f"import sys, {module}; print([m for m in {heavy} if m in sys.modules])"
    got = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert got == "[]"


def test_no_two_files_of_tests_have_one_name():
    """pytest imports them by base name: of two, the second would not run."""
    names = sorted(p.name for p in Path(__file__).parent.rglob("test_*.py"))
    assert names == sorted(set(names))


def test_names_that_tests_and_benchmarks_import_exist():
    """Also inside functions and in files that need a GPU, which no test imports here: a renamed function is noticed without the machine."""
    missing = []
    for folder in ("tests", "benchmarks", "examples"):
        for path in sorted((REPOSITORY / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
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
