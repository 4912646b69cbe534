"""What the figures of a result are made of: the files whose change makes a row stale, and those that may only make a build select otherwise.

A time of an engine comes from the kernels of its layers, the code that runs them, and the benchmark. A row that lists its tactics (`tactics`), or
whose network is in selected_tactics.json, names its kernels; another row may have used every tactic of its backend. Passes, composites, the
builder and the calibration decide which kernels an engine has. What a row measured stays true when they change, a new build may be another one.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RUN = tuple(f"runtime/{name}.py" for name in ("arrays", "calls", "context", "engine", "kernels", "profiles", "sample_parallel", "steps", "values"))
SELECTION = ("passes", "composites", "builder", "precision", "measure")
BACKENDS = {"cpu": "cpu", "h100": "cuda", "h200": "cuda"}  # folder of results -> backend
#: keys of a row that name its network
NETWORKS = ("case", "network", "model")
#: modules beside the benchmarks that store and show results
STORING = ("benchmarks/_record.py", "benchmarks/_outcomes.py", "benchmarks/tables.py", "benchmarks/references.py")
MUTATED = ("pruning", "precision", "passes", "builder", "engine")


@dataclass(frozen=True)
class Measured:
    """`figure` and `selection`: paths in src/whet; `kernels`: also the tactics of the backend; `others`: paths in the repository."""

    figure: tuple[str, ...] = RUN
    selection: tuple[str, ...] = SELECTION
    kernels: bool = True
    others: tuple[str, ...] = ()


TIMES = Measured()
BUILDS = Measured((*RUN, *SELECTION), ())
PRUNED_TIMES = Measured((*RUN, "pruning", "sparsity"))
READING = Measured(("frontends", "passes", "rewrite", "ops"), (), False)
PRUNING = Measured(("pruning", "ops"), (), False)
WHOLE = Measured(("",), (), False)
#: script -> what it measures; others: TIMES
SCRIPTS = {
    "accuracy_precision": Measured(("passes", "precision", "ops"), ("builder",), False),
    "accuracy_real": Measured(("frontends", "passes", "precision", "ops"), (), False),
    "auto_digits": Measured((*RUN, "pruning", "search", "sparsity")),
    "claims": PRUNED_TIMES,
    "demo": PRUNED_TIMES,
    "fuzz_engine": Measured(("engine", "runtime", "network", "ops", "files.py", "array_files.py"), (), False, ("tests/engine",)),
    "fuzz_files": WHOLE,
    "gpu_build_time": BUILDS,
    "gpu_tests": Measured(("",), (), True, ("tests",)),
    "new_user": WHOLE,
    "polygraphy_examples": Measured(("trt", "frontends", "ops", "cli"), (), False),
    "polygraphy_tests": Measured(("trt", "frontends", "ops"), (), False),
    "pruned_architectures": Measured(("pruning", "frontends", "ops"), (), False),
    "pruned_detectors": PRUNED_TIMES,
    "pruning_defaults": PRUNING,
    "pruning_finetuned": Measured(("pruning", "training", "ops"), (), False),
    "pruning_tools": PRUNING,
    "qat": Measured((*RUN, "pruning", "training", "precision")),
    "recognition": READING,
    "run": PRUNED_TIMES,  # examples/resnet56 and examples/yolov5s
    "search_samplers": Measured(("search", "pruning"), (), False),
    "selected_tactics": Measured(("tactics",), ("builder", "measure")),
    "soak": WHOLE,
    "start_time": Measured((*RUN, "engine"), SELECTION),
    "tensorrt_samples": Measured(("trt", "frontends", "ops"), (), False),
    "torch_networks": Measured(("frontends", "passes", "torch_compile", "ops"), (), False),
    "two_four_accuracy": Measured(("sparsity", "pruning", "training", "precision")),
}


@dataclass(frozen=True)
class Footprint:
    """Paths in the repository, files or folders. `kernels_known`: False if the row does not say which tactics it used."""

    figure: tuple[str, ...]
    selection: tuple[str, ...]
    kernels_known: bool = True


def find_footprint(record: dict[str, Any], device: str, root: Path = ROOT) -> Footprint:
    """The files that a record of a result measured; `device` is the folder of the result."""
    script = next(iter(re.findall(r"\S+\.py\b", str(record.get("command", "")))), "")
    own = (*([script] if script else []), *(f for f in list_imported(root, script, ("benchmarks",)) if f not in STORING))
    if script == "tests/mutation/run.py":
        return Footprint((*own, *(f"src/whet/{p}" for p in MUTATED), "tests"), ())
    measured = SCRIPTS.get(Path(script).stem, TIMES)
    figure = tuple(f"src/whet/{p}".rstrip("/") for p in measured.figure) + measured.others + own
    selection = tuple(f"src/whet/{p}" for p in measured.selection)
    backend = BACKENDS.get(device)
    if not measured.kernels or backend is None:
        return Footprint(figure, selection)
    tactics = list_tactics(record, device, root)
    files = [f for t in tactics for f in find_kernel_files(root, backend, t)]
    if not files:
        return Footprint((*figure, f"src/whet/tactics/{backend}", f"src/whet/backends/{backend}"), selection, kernels_known=False)
    return Footprint((*figure, *dict.fromkeys(files)), selection)


def list_tactics(record: dict[str, Any], device: str, root: Path = ROOT) -> tuple[str, ...]:
    """The tactics that the row lists, or that its network selected on this backend with this precision; () if neither is known."""
    if record.get("tactics"):
        return tuple(record["tactics"])
    network, precision = next((str(record[k]) for k in NETWORKS if record.get(k)), ""), str(record.get("precision") or "")
    known = _read_selected(root, "cpu" if device == "cpu" else "h200")
    names = {t for key, found in known.items() if key.startswith(f"{network}:") and precision in ("", key.split(":")[2]) for t in found}
    return tuple(sorted(names)) if network else ()


@cache
def _read_selected(root: Path, folder: str) -> dict[str, tuple[str, ...]]:
    path = root / "benchmarks" / "results" / folder / "selected_tactics.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else {}
    return {key: tuple(row.get("tactics", ())) for key, row in rows.items()}


@cache
def find_kernel_files(root: Path, backend: str, tactic: str) -> tuple[str, ...]:
    """The module of a tactic, the modules of tactics and backends that it imports, and the kernel sources beside them."""
    stem = tactic.rpartition("/")[2]
    modules = [str(p.relative_to(root)) for p in (root / "src/whet/tactics" / backend).rglob(f"{stem}.py")]
    files = [f for m in modules for f in (m, *list_imported(root, m, ("src/whet/tactics", "src/whet/backends")))]
    kernels = {str(k.relative_to(root)) for f in files for k in (root / f).parent.glob("*.cu*")}
    return (*dict.fromkeys(files), *sorted(kernels))


@cache
def list_imported(root: Path, path: str, folders: tuple[str, ...]) -> tuple[str, ...]:
    """The files below `folders` that a file imports, directly or indirectly."""
    found: dict[str, None] = {}
    waiting = [path]
    while waiting:
        current = root / waiting.pop()
        for name in _list_imports(current) if current.is_file() and current.suffix == ".py" else ():
            for candidate in _find_files(root, current, name):
                if candidate not in found and candidate != path and candidate.startswith(folders):
                    found[candidate] = None
                    waiting.append(candidate)
    return tuple(found)


@cache
def _list_imports(path: Path) -> tuple[str, ...]:
    """Dotted names of the modules, and of names in them, that a file imports outside `if TYPE_CHECKING`."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names += [node.module, *(f"{node.module}.{a.name}" for a in node.names)]
    return tuple(dict.fromkeys(names))


def _find_files(root: Path, importer: Path, name: str) -> Iterable[str]:
    """The file of a module of the package, or of one beside a benchmark that imports it."""
    parts = name.split(".")
    base = root / "src" if parts[0] == "whet" else importer.parent
    for path in (base.joinpath(*parts).with_suffix(".py"), base.joinpath(*parts, "__init__.py")):
        if path.is_file():
            yield str(path.relative_to(root))
