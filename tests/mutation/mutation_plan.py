"""Draws mutants with Cosmic Ray's operators and writes them as data, so that a machine without Cosmic Ray can run them.

Operators that mostly cannot change behaviour are left out, see SKIPPED and SKIPPED_PAIRS: `X | None` in annotations, `==` of small integers to `is`.
So are mutants of one meaning with the original, see Meaning.
"""

from __future__ import annotations

import ast
import difflib
import functools
import hashlib
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

#: what a name of a package covers in src/whet, if not the folder of that name
PARTS = {
    "builder": ("builder/lock", "builder/memory", "builder/verify", "measure/timing_key.py", "measure/timing_cache.py"),
    "whole_builder": ("builder",),  # with the search and the precisions
}
SKIPPED = ("core/ReplaceBinaryOperator_BitOr_", "core/RemoveDecorator", "core/ZeroIterationForLoop")
SKIPPED_PAIRS = ("Eq_Is", "NotEq_IsNot", "Is_Eq", "IsNot_NotEq")


@dataclass(frozen=True)
class Mutant:
    """One changed place of one file. `edits` replace lines [start, end) of the original, whose digest is `original`; `line` counts from 1."""

    package: str
    module: str
    line: int
    operator: str
    original: str
    edits: tuple[tuple[int, int, tuple[str, ...]], ...]

    @property
    def name(self) -> str:
        """The same for the same change of the same file."""
        return hashlib.sha256(repr((self.module, self.original, self.edits)).encode()).hexdigest()[:16]

    def apply(self, source: str) -> str:
        """The mutated source. Raises ValueError if `source` is not the file of which the mutant was made."""
        if digest(source) != self.original:
            raise ValueError(f"{self.module} is not the file that the mutants were drawn from: draw them again")
        lines = source.splitlines(keepends=True)
        for start, end, new in reversed(self.edits):
            lines[start:end] = new
        return "".join(lines)

    def difference(self, source: str) -> str:
        """The removed and added lines."""
        lines = source.splitlines(keepends=True)
        removed = ["-" + x.rstrip("\n") for s, e, _ in self.edits for x in lines[s:e]]
        return "\n".join([*removed, *("+" + x.rstrip("\n") for _, _, new in self.edits for x in new)])


def digest(source: str) -> str:
    """Digest of a source file's text."""
    return hashlib.sha256(source.encode()).hexdigest()[:16]


def draw(root: Path, package: str, sample: int, seed: int) -> list[Mutant]:
    """`sample` mutants of one package below `root`/src/whet, the same for the same seed and source. Needs Cosmic Ray."""
    from cosmic_ray.ast import get_ast
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator, operator_names

    names = [n for n in sorted(operator_names()) if not n.startswith(SKIPPED) and not n.endswith(SKIPPED_PAIRS)]
    operators = {n: get_operator(n)() for n in names if not get_operator(n).arguments()}
    found: list[tuple[str, str, int, int]] = []
    sources = {}
    for path in _list_files(root / "src" / "whet", package):
        module = str(path.relative_to(root))
        sources[module] = path.read_text()
        tree = get_ast(sources[module])
        for name, operator in operators.items():
            found += [(module, name, i, row) for i, row in enumerate(_positions(tree, operator))]
    mutants: list[Mutant] = []
    for module, name, occurrence, row in random.Random(seed).sample(found, len(found)):
        try:
            changed = mutate_code(sources[module], operators[name], occurrence)
        except AttributeError:  # Cosmic Ray 8.7: ExceptionReplacer knows no dotted names
            continue
        if changed is not None and meaning_of(changed) != meaning_of(sources[module]) and _parameters(changed) == _parameters(sources[module]):
            mutants.append(make_mutant(package, module, row, name, sources[module], changed))
        if len(mutants) >= sample:
            break
    return sorted(mutants, key=lambda m: (m.module, m.line, m.name))


def _list_files(source: Path, package: str) -> list[Path]:
    parts = [source / p for p in PARTS.get(package, (package,))]
    return sorted(f for p in parts for f in (p.rglob("*.py") if p.is_dir() else [p]))


class Meaning(ast.NodeTransformer):
    """Gives code that cannot behave differently one form.

    NumPy's reshape takes any negative size for the one that it computes. `strict=` of zip asserts that the code itself passes equal lengths.
    """

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id if isinstance(node.func, ast.Name) else ""
        if name == "reshape":
            node.args = [ast.Constant(-1) if _is_negative(a) else a for a in node.args]
        if name == "zip":
            node.keywords = [k for k in node.keywords if k.arg != "strict"]
        return node


def _is_negative(node: ast.expr) -> bool:
    """True for -N and ~N with N written as a number: -0 is none."""
    if not (isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Constant) and isinstance(node.operand.value, int)):
        return False
    return isinstance(node.op, ast.Invert) or (isinstance(node.op, ast.USub) and node.operand.value > 0)


@functools.lru_cache(maxsize=512)
def meaning_of(source: str) -> str:
    """The same text for sources of one Meaning; of a text that is no Python, the text."""
    try:
        return ast.dump(Meaning().visit(ast.parse(source)))
    except SyntaxError:
        return source


def _parameters(source: str) -> list[tuple[int, int, int]] | None:
    """How many parameters of each kind the functions have; None if this is not Python.

    Cosmic Ray takes `*` between parameters for an operator. Its replacements are no Python, or allow more calls, which no test need notice.
    """
    try:
        functions = [x.args for x in ast.walk(ast.parse(source)) if isinstance(x, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)]
    except SyntaxError:
        return None
    return [(len(a.posonlyargs), len(a.args), len(a.kwonlyargs)) for a in functions]


def _positions(tree: object, operator: object) -> Iterator[int]:
    """The row of each place that an operator can change, in Cosmic Ray's order."""
    from cosmic_ray.ast import ast_nodes

    for node in ast_nodes(tree):
        for (row, _), _ in operator.mutation_positions(node):
            yield row


def make_mutant(package: str, module: str, row: int, operator: str, source: str, changed: str) -> Mutant:
    old, new = source.splitlines(keepends=True), changed.splitlines(keepends=True)
    edits = tuple(
        (i1, i2, tuple(new[j1:j2])) for tag, i1, i2, j1, j2 in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes() if tag != "equal"
    )
    return Mutant(package, module, row, operator, digest(source), edits)


def function_at(source: str, line: int) -> str:
    """The qualified name, as of code objects, of the innermost function that contains `line`; "" outside of functions and in their decorators."""
    return _find_function(ast.parse(source), "", line)


def _find_function(node: ast.AST, prefix: str, line: int) -> str:
    found = ""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            if child.lineno <= line <= (child.end_lineno or child.lineno):
                name = prefix + child.name
                found = _find_function(child, f"{name}.<locals>.", line) or name
        else:
            found = _find_function(child, f"{prefix}{child.name}." if isinstance(child, ast.ClassDef) else prefix, line) or found
    return found


def to_data(mutants: Iterable[Mutant]) -> list[dict]:
    """The mutants as JSON data."""
    return [{k: getattr(m, k) for k in Mutant.__dataclass_fields__} for m in mutants]


def from_data(data: Iterable[dict]) -> list[Mutant]:
    """Mutants of JSON data."""
    fields = Mutant.__dataclass_fields__
    return [Mutant(**{**{k: v for k, v in d.items() if k in fields}, "edits": tuple((s, e, tuple(new)) for s, e, new in d["edits"])}) for d in data]
