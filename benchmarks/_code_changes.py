"""Finds commits that change the behaviour of code: comments, docstrings, layout, types, imports, texts of errors and listed renames do not count."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

#: subjects of commits that rename, one per line; commits of several branches may share a subject
SAME_BEHAVIOUR = Path(__file__).parent / "same_behaviour.txt"
#: before a subject: the commit's changes of benchmarks change what they store, not how they measure
KEEPS_FIGURES = "benchmarks: "
ABSENT = "0" * 40
C_COMMENT = re.compile(r'("(?:\\.|[^"\\\n])*")|//[^\n]*|/\*.*?\*/', re.DOTALL)


@dataclass(frozen=True)
class FileChange:
    """One file of a commit; the blob of a file that was added or removed is ABSENT on that side."""

    old_blob: str
    new_blob: str
    old_path: str
    new_path: str


@dataclass(frozen=True)
class Commit:
    id: str
    subject: str
    changes: list[FileChange] = field(default_factory=list)


class History:
    """The commits of a repository's HEAD with the files that they change; merges count as nothing, since their parents do."""

    def __init__(self, repository: Path, same_behaviour: Iterable[str] = (), store: Path | None = None) -> None:
        """`same_behaviour`: subjects of commits of which name changes do not count; `store`: a file that keeps digests for the next time."""
        self.repository = repository
        self.same_behaviour = tuple(same_behaviour)
        self.store = store
        self._digests: dict[str, Any] = {}
        if store and store.exists():
            self._digests = json.loads(store.read_text()).get(_own_digest(), {})

    @cached_property
    def commits(self) -> list[Commit]:
        """All commits without merges, newest first."""
        return self.read_commits("HEAD")

    def read_commits(self, *revisions: str) -> list[Commit]:
        log = run_git(self.repository, "log", "--raw", "-M", "--no-abbrev", "--no-merges", "--format=commit %H %s", *revisions)
        commits: list[Commit] = []
        for line in (log or "").splitlines():
            if line.startswith("commit "):
                _, commit, subject = line.split(" ", 2)
                commits.append(Commit(commit, subject))
            elif line.startswith(":"):
                commits[-1].changes.append(read_change(line))
        return commits

    @cached_property
    def commits_of(self) -> dict[str, list[tuple[Commit, FileChange]]]:
        """Path after a commit -> the commits that changed it, newest first."""
        found: dict[str, list[tuple[Commit, FileChange]]] = {}
        for commit in self.commits:
            for change in commit.changes:
                found.setdefault(change.new_path, []).append((commit, change))
        return found

    @cache  # noqa: B019 (one History lives as long as the process)
    def list_changes(self, since: str, paths: tuple[str, ...]) -> dict[str, Commit] | None:
        """File under `paths` whose code has changed since -> the last commit that changed it; None if the history has no commit `since`."""
        later, changes = self._compare(since)
        if later is None:
            return None
        found, places = {}, frozenset(paths)
        for change in changes:
            if (is_below(change.new_path, places) or is_below(change.old_path, places)) and self._changes_code(change):
                last = next(self._list_commits(change.new_path, later), None)
                if last is not None:
                    found[change.new_path] = last
        return found

    @cache  # noqa: B019 (one History lives as long as the process)
    def list_changed_definitions(self, since: str, paths: tuple[str, ...]) -> dict[str, list[str]] | None:
        """File under `paths` -> its functions, methods and module statements of commit `since` that HEAD has no longer, or otherwise.

        New ones do not count, nor do files that `list_changes` leaves out: what was measured did not have them. None without that commit.
        """
        later, changes = self._compare(since)
        if later is None:
            return None
        found, places = {}, frozenset(paths)
        for change in changes:
            if change.old_blob != ABSENT and (is_below(change.new_path, places) or is_below(change.old_path, places)):
                names = self._list_lost_definitions(change)
                if names and not self._keeps_figures(change.new_path, later):
                    found[change.new_path] = names
        return found

    def _keeps_figures(self, path: str, later: set[str]) -> bool:
        """True if all changes of a file's code by the `later` commits are listed: as renames, or for a benchmark as changes that keep its figures."""
        listed = {*self.same_behaviour, *(s.removeprefix(KEEPS_FIGURES) for s in self.same_behaviour)}
        if not any(commit.id in later and commit.subject in listed for commit, _ in self.commits_of.get(path, [])):
            return False
        own = path.startswith("benchmarks/")
        return all(own and KEEPS_FIGURES + commit.subject in self.same_behaviour for commit in self._list_commits(path, later))

    def _list_lost_definitions(self, change: FileChange) -> list[str]:
        if not change.new_path.endswith(".py") or not change.old_path.endswith(".py"):
            return ["code"] if self._changes_code(change) else []
        return list_lost_definitions(self._collect(change.old_blob), self._collect(change.new_blob))

    def _collect(self, blob: str) -> dict[str, list[str]]:
        key = f"{blob} definitions"
        if key not in self._digests:
            self._digests[key] = collect_definitions(self.read_blob(blob)) if blob != ABSENT else {}
        found: dict[str, list[str]] = self._digests[key]
        return found

    @cache  # noqa: B019 (one History lives as long as the process)
    def _compare(self, since: str) -> tuple[set[str] | None, list[FileChange]]:
        """The commits after `since`, and the files that differ from HEAD."""
        listed = run_git(self.repository, "rev-list", "--no-merges", f"{since}..HEAD")
        if listed is None:
            return None, []
        differences = run_git(self.repository, "diff", "--raw", "-M", "--no-abbrev", since, "HEAD") or ""
        return set(listed.split()), [read_change(line) for line in differences.splitlines()]

    def _list_commits(self, path: str, later: set[str]) -> Iterator[Commit]:
        """The commits of `later` that changed the code of a file, newest first, also under its earlier names."""
        for commit, change in self.commits_of.get(path, []):
            if commit.id not in later:
                continue
            listed = commit.subject in self.same_behaviour
            if self._changes_code(change) and not (listed and self.has_only_renames(change)):
                yield commit
            if change.old_path != path:
                yield from self._list_commits(change.old_path, later)
                return

    def list_renames(self, last: int) -> Iterator[str]:
        """Lines for the list: the last commits in which more than half of the files change names only."""
        for commit in self.commits[:last]:
            changes = self.list_code_changes(commit)
            if commit.subject not in self.same_behaviour and sum(map(self.has_only_renames, changes)) > len(changes) / 2:
                yield commit.subject

    def list_code_changes(self, commit: Commit) -> list[FileChange]:
        """The files of the package with code changes in a commit."""
        return [c for c in commit.changes if is_inside(c.new_path, "src") and self._changes_code(c)]

    def has_only_renames(self, change: FileChange) -> bool:
        if ABSENT in (change.old_blob, change.new_blob) or not change.new_path.endswith(".py"):
            return False
        key = change.old_blob + change.new_blob
        if key not in self._digests:
            self._digests[key] = describe_difference(self.read_blob(change.old_blob), self.read_blob(change.new_blob))
        return not self._digests[key]

    def _changes_code(self, change: FileChange) -> bool:
        return self._digest(change.old_blob, change.old_path) != self._digest(change.new_blob, change.new_path)

    def _digest(self, blob: str, path: str) -> str:
        if blob == ABSENT:
            return ""
        key = blob + Path(path).suffix
        if key not in self._digests:
            self._digests[key] = digest_code(self.read_blob(blob), path)
        return self._digests[key]

    def read_blob(self, blob: str) -> str:
        git = self._reader
        assert git.stdin
        assert git.stdout
        git.stdin.write(f"{blob}\n".encode())
        git.stdin.flush()
        _, _, size = git.stdout.readline().split()
        return git.stdout.read(int(size) + 1)[:-1].decode(errors="replace")

    @cached_property
    def _reader(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["git", "cat-file", "--batch"], cwd=self.repository, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def close(self) -> None:
        if "_reader" in self.__dict__:
            self._reader.communicate()
        if self.store:
            self.store.parent.mkdir(parents=True, exist_ok=True)
            partial = self.store.with_name(f"{self.store.name}.{os.getpid()}")
            partial.write_text(json.dumps({_own_digest(): self._digests}))
            partial.replace(self.store)


def _own_digest() -> str:
    """Stored digests of another version of this file, or of Python, are no longer used."""
    return hashlib.sha256(Path(__file__).read_bytes() + sys.version.encode()).hexdigest()


def read_change(line: str) -> FileChange:
    """A line of `git log --raw` or `git diff --raw`."""
    modes, *paths = line.split("\t")
    _, _, old_blob, new_blob, _ = modes.split()
    return FileChange(old_blob, new_blob, paths[0], paths[-1])


def run_git(repository: Path, *words: str) -> str | None:
    """The output of a git command, or None if it fails."""
    done = subprocess.run(["git", *words], cwd=repository, capture_output=True, text=True, errors="replace", check=False)
    return None if done.returncode else done.stdout


def read_same_behaviour(path: Path = SAME_BEHAVIOUR) -> list[str]:
    """The subjects of commits that rename."""
    return [line.strip() for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]


def is_inside(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")


def is_below(path: str, places: frozenset[str]) -> bool:
    """True if a path, or a folder that it is in, is one of these places."""
    parts = path.split("/")
    return any("/".join(parts[:n]) in places for n in range(1, len(parts) + 1))


def digest_code(text: str, path: str) -> str:
    """A digest of a file's code: without comments and layout, in Python also without the parts removed by `strip_prose`."""
    if path.endswith(".py"):
        try:
            text = ast.dump(strip_prose(ast.parse(text)))
        except SyntaxError:
            pass
    elif path.endswith((".cu", ".cuh", ".h", ".cpp", ".c")):
        text = " ".join(C_COMMENT.sub(r"\1 ", text).split())
    elif path.endswith((".md", ".txt")):
        text = ""
    return hashlib.sha256(text.encode()).hexdigest()


def strip_prose(tree: ast.Module) -> ast.Module:
    """The tree without docstrings, types of values, imports, `__all__`, and arguments of raised errors.

    An import says where a name comes from: code that moves to another module computes the same. The price: code that begins to use another
    module's object of the same name is not noticed.
    """
    return ast.fix_missing_locations(ProseStripper().visit(tree))


class ProseStripper(ast.NodeTransformer):
    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        return None if isinstance(node.value, ast.Constant) else self.generic_visit(node)

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> None:
        return None

    visit_ImportFrom = visit_Import

    def visit_Assign(self, node: ast.Assign) -> ast.AST | None:
        return None if [ast.unparse(t) for t in node.targets] == ["__all__"] else self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = ast.Constant(None)
        return self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_If(self, node: ast.If) -> ast.AST | None:
        return None if ast.unparse(node.test) == "TYPE_CHECKING" else self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        if isinstance(node.exc, ast.Call):
            node.exc, node.cause = node.exc.func, None
        return node


def list_lost_definitions(before: dict[str, list[str]], after: dict[str, list[str]]) -> list[str]:
    """The functions, methods, classes and `module` (its other statements) of one `collect_definitions` that another has no longer, or otherwise."""
    return [name for name, code in before.items() if not set(code) <= set(after.get(name, ()))]


def collect_definitions(text: str) -> dict[str, list[str]]:
    """Function, Class.method, Class (its other statements) and `module` (all other statements) of a Python text -> digests of their code."""
    found: dict[str, list[str]] = {}

    def add(name: str, node: ast.AST) -> None:
        found.setdefault(name, []).append(hashlib.sha256(ast.dump(node).encode()).hexdigest()[:16])

    try:
        body = strip_prose(ast.parse(text)).body
    except SyntaxError:
        return {"module": [digest_code(text, "")]}
    for node in body:
        if isinstance(node, ast.ClassDef):
            for part in node.body:
                add(f"{node.name}.{part.name}" if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) else node.name, part)
            node.body = []
            add(node.name, node)
        else:
            add(node.name if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else "module", node)
    return found


def describe_difference(old: str, new: str) -> str:
    """Why two Python texts do not compute the same up to the names of things, or "" if they do.

    The trees must be alike, and within each function or class of the module an old name may become one new name or stay, and no two old names
    may become the same one. (It stays in some places where a function and an argument had the same name.) Texts may differ where they hold a
    name that was changed.
    """
    before, after = (strip_prose(ast.parse(text)) for text in (old, new))
    if len(before.body) != len(after.body):
        return f"{len(before.body)} statements became {len(after.body)}"
    pairs = [_Names(x, y) for x, y in zip(before.body, after.body, strict=True)]
    renamed = {a: b for names in pairs for a, b in names.renamed.items()}
    for names in pairs:
        if said := names.said or names.describe_texts(renamed):
            return said
    return ""


class _Names:
    """The names of one statement of a module and of its successor, in pairs."""

    def __init__(self, before: ast.AST, after: ast.AST) -> None:
        self.renamed: dict[str, str] = {}  # old -> new
        self.origins: dict[str, str] = {}  # new -> old
        self.texts: list[tuple[str, str]] = []
        self.said = self._compare(before, after)

    def describe_texts(self, renamed: dict[str, str]) -> str:
        for a, b in self.texts:
            if a != b and re.sub(r"\w+", lambda word: renamed.get(word[0], word[0]), a) != b:
                return f"the text {a!r} became {b!r}"
        return ""

    def _compare(self, before: object, after: object) -> str:
        if type(before) is not type(after):
            return f"{_name(before)} became {_name(after)}"
        if isinstance(before, list) and isinstance(after, list):
            if len(before) != len(after):
                return f"a list of {len(before)} became one of {len(after)}"
            return next((said for x, y in zip(before, after, strict=True) if (said := self._compare(x, y))), "")
        if isinstance(before, ast.Constant) and isinstance(after, ast.Constant):
            if isinstance(before.value, str) and isinstance(after.value, str):
                self.texts.append((before.value, after.value))
                return ""
            return "" if repr(before.value) == repr(after.value) else f"{before.value!r} became {after.value!r}"
        if isinstance(before, ast.AST):
            return next((said for f in before._fields if (said := self._compare(getattr(before, f), getattr(after, f)))), "")
        if isinstance(before, str) and isinstance(after, str):  # an identifier
            if before != after and self.renamed.setdefault(before, after) != after:
                return f"{before} became {after}, elsewhere {self.renamed[before]}"
            if self.origins.setdefault(after, before) != before:
                return f"{before} became {after}, as {self.origins[after]} did"
            return ""
        return "" if before == after else f"{before!r} became {after!r}"


def _name(value: object) -> str:
    return ast.unparse(value)[:80] if isinstance(value, ast.AST) else repr(value)
