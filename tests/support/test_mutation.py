"""Mutants as data: they apply to the file that they were made of, name its function, and run the tests that enter it."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

SOURCE = """import math

LIMIT = 3


@cached
def area(r):
    def inner(x):
        return x * x
    return math.pi * inner(r)
"""


@pytest.fixture
def plan(monkeypatch, pytestconfig):
    monkeypatch.syspath_prepend(str(pytestconfig.rootpath / "tests" / "mutation"))
    import mutation_plan

    return mutation_plan


@pytest.fixture
def run(plan, pytestconfig):
    path = pytestconfig.rootpath / "tests" / "mutation" / "run.py"
    spec = importlib.util.spec_from_file_location("mutation_run", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def mutant(plan, changed, line=10):
    return plan.make_mutant("p", "src/whet/p/a.py", line, "operator", SOURCE, changed)


def test_a_mutant_changes_one_place_and_survives_json(plan):
    changed = SOURCE.replace("x * x", "x + x")
    made = mutant(plan, changed)
    (again,) = plan.from_data(json.loads(json.dumps(plan.to_data([made]))))
    assert again == made
    assert again.apply(SOURCE) == changed
    assert made.difference(SOURCE) == "-        return x * x\n+        return x + x"
    assert made.name != mutant(plan, SOURCE.replace("x * x", "x - x")).name
    with pytest.raises(ValueError, match="draw them again"):
        made.apply(SOURCE + "\n")


@pytest.mark.parametrize(
    ("text", "changed", "alike"),
    [
        ("a.reshape(2, -1)", "a.reshape(2, ~1)", True),
        ("a.reshape(2, -1)", "a.reshape(2, - 2)", True),
        ("a.reshape(2, -1)", "a.reshape(2, -0)", False),
        ("a.reshape(2, -1)", "a.reshape(2, +1)", False),
        ("a.reshape(2, -1)", "a.reshape(3, -1)", False),
        ("a.sum(-1)", "a.sum(-2)", False),
        ("zip(a, b, strict=True)", "zip(a, b, strict=False)", True),
        ("sorted(a, reverse=True)", "sorted(a, reverse=False)", False),
        ("a  # text", "a", True),
        ("f(*, a)", "f(/, a)", False),
    ],
)
def test_mutants_of_one_meaning_are_not_drawn(plan, text, changed, alike):
    assert (plan.meaning_of(text) == plan.meaning_of(changed)) == alike


def test_numpy_takes_every_negative_size_for_the_one_to_be_computed():
    assert {np.zeros(6).reshape(2, n).shape for n in (-1, -2, -3)} == {(2, 3)}


def test_the_function_of_a_line_has_the_name_of_its_code_object(plan):
    assert [plan.function_at(SOURCE, n) for n in (3, 6, 7, 9, 10)] == ["", "", "area", "area.<locals>.inner", "area"]
    made = "class A:\n    limit = 3\n    def f(self):\n        if self:\n            return [\n                x for x in self]\n"
    made += "        match self:\n            case 1:\n                def g(): pass\n"
    made += "        try:\n            pass\n        except E:\n            x = 1\n"
    assert [plan.function_at(made, n) for n in (2, 3, 4, 6, 8, 9, 13)] == ["", "A.f", "A.f", "A.f", "A.f", "A.f.<locals>.g", "A.f"]
    scope = {}
    exec(SOURCE.replace("@cached\n", ""), scope)
    assert scope["area"].__code__.co_qualname == "area"
    assert [c.co_qualname for c in scope["area"].__code__.co_consts if hasattr(c, "co_qualname")] == ["area.<locals>.inner"]


def test_a_mutant_runs_the_tests_that_enter_its_function(plan, run, tmp_path):
    lines = [
        {"test": "tests/p/test_b.py::test_slow", "seconds": 5.0, "entered": ["src/whet/p/a.py:area.<locals>.inner", "src/whet/p/a.py:area"]},
        {"test": "tests/p/test_b.py::test_quick", "seconds": 0.1, "entered": ["src/whet/p/a.py:area.<locals>.inner"]},
        {"test": "tests/p/test_a.py::test_named", "seconds": 9.0, "entered": ["src/whet/p/a.py:area.<locals>.inner"]},
        {"test": "tests/p/test_b.py::test_other", "seconds": 0.1, "entered": ["src/whet/p/a.py:area"]},
    ]
    (tmp_path / "touched.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    touched = run.read_touched(tmp_path / "touched.jsonl")
    (tmp_path / "src/whet/p").mkdir(parents=True)
    (tmp_path / "src/whet/p/a.py").write_text(SOURCE)
    inner, outer = mutant(plan, SOURCE.replace("x * x", "x + x")), mutant(plan, SOURCE.replace("math.pi *", "math.pi /"))
    wanted = [f"tests/p/test_{n}" for n in ("a.py::test_named", "b.py::test_quick", "b.py::test_slow")]
    assert run.choose_tests(inner, tmp_path, touched, 60) == wanted
    assert run.choose_tests(inner, tmp_path, touched, 9.05) == wanted[:2]
    assert run.choose_tests(outer, tmp_path, touched, 60) == [f"tests/p/test_b.py::test_{n}" for n in ("other", "slow")]
    module_level = mutant(plan, SOURCE.replace("LIMIT = 3", "LIMIT = 4"))
    assert len(run.choose_tests(module_level, tmp_path, touched, 60)) == 4


def test_without_a_record_tests_go_by_names_and_imports(plan, run, tmp_path):
    (tmp_path / "src/whet/p").mkdir(parents=True)
    (tmp_path / "src/whet/p/a.py").write_text(SOURCE)
    imports = {"test_other": "from whet.p import circle", "test_by_name": "from whet.p import area"}
    imports |= {"test_deep": "from whet.p.a import LIMIT", "test_a": ""}
    (tmp_path / "tests").mkdir()
    for name, text in imports.items():
        (tmp_path / f"tests/{name}.py").write_text(text)
    tests = [f"tests/{name}.py::test_{k}" for name in imports for k in (1, 2)]
    seconds = {t: 1.0 + (t[-1] == "1") for t in tests}
    made = mutant(plan, SOURCE.replace("x * x", "x + x"))
    files = [t.split("/")[1].replace(".py::test_", " ") for t in run.order_tests(made, tmp_path, tests, seconds, 60)]
    direct = ["test_by_name 2", "test_deep 2", "test_by_name 1", "test_deep 1"]
    assert files == ["test_a 2", "test_a 1", *direct, "test_other 2", "test_other 1"]
    assert len(run.order_tests(made, tmp_path, tests, seconds, 3.5)) == 3
    assert len(run.order_tests(made, tmp_path, tests, {tests[0]: 1.0}, 60)) == 1
    assert len(run.order_tests(made, tmp_path, tests, {}, 60)) == 8


def test_code_of_existing_functions_is_replaced(plan, monkeypatch, tmp_path):
    import mutated

    module = "src/whet/p/a.py"
    source = "def cached(f):\n    return lambda *a: f(*a)\n\n\n@cached\ndef double(x, y=2):\n    return [x + x for _ in range(y)]\n\n\nLIMIT = 3\n"
    source += "class A:\n    size = 4\n    def grow(self):\n        return self.size + 1\n"
    (tmp_path / "src/whet/p").mkdir(parents=True)
    (tmp_path / module).write_text(source)
    monkeypatch.setattr(mutated, "ROOT", tmp_path)
    scope = {"__name__": "a"}
    exec(compile(source, str(tmp_path / module), "exec"), scope)

    def put(old, new):
        made = plan.make_mutant("p", module, 1, "operator", source, source.replace(old, new))
        return mutated.replace_code(made, mutated.existing_functions())

    assert put("x + x", "x * x")  # in a comprehension of a decorated function
    assert scope["double"](3) == [9, 9]
    assert put("size + 1", "size - 1")
    assert scope["A"]().grow() == 3
    assert [put(a, b) for a, b in (("LIMIT = 3", "LIMIT = 4"), ("size = 4", "size = 5"), ("y=2", "y=3"))] == [False] * 3  # these run at import
    assert scope["A"]().grow() == 3


SMALL_TESTS = """import sys
sys.path.insert(0, "src")
import {package}.a as a

def test_weak():
    assert a.double(2) == 4

def test_strong():
    assert a.double(3) == 6
    assert a.LIMIT == 3

def test_broken():
    assert a.double(1) == 5

def test_endless():
    assert a.count(2) == 2
"""


def test_a_run_of_mutants(plan, run, monkeypatch, tmp_path):
    """In a small project: killed by a value, by an endless loop, at import; a survivor; a function that no passing test enters."""
    root = tmp_path / "project"
    here = Path(run.__file__).parent
    (root / "src/whet_small").mkdir(parents=True)
    for name in ("run.py", "warm.py", "mutated.py", "mutation_plan.py", "equivalent.txt"):
        text = (here / name).read_text().replace("src/whet/", "src/whet_small/")
        target = root / "tests/mutation" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    source = "LIMIT = 3\n\n\ndef double(x):\n    return x + x\n\n\ndef count(n):\n    i = 0\n    while i < n:\n        i += 1\n    return i\n"
    source += "\n\ndef unused():\n    return 1\n"
    module = "src/whet_small/a.py"
    (root / module).write_text(source)
    (root / "src/whet_small/__init__.py").write_text("")
    for path in run.TESTS["pruning"]:
        folder = root / path if not path.endswith(".py") else (root / path).parent
        folder.mkdir(parents=True, exist_ok=True)
        if path.endswith(".py"):
            (root / path).write_text("")
    (root / "tests/pruning/test_a.py").write_text(SMALL_TESTS.format(package="whet_small"))
    (root / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu\n    slow\n")
    changes = (("x + x", "x * x"), ("i += 1", "i -= 1"), ("LIMIT = 3", "LIMIT = 4"), ("return 1", "return 2"), ("i < n", "i != n"))
    made = [plan.make_mutant("pruning", module, 5, "operator", source, source.replace(a, b)) for a, b in changes]
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "plan.json").write_text(json.dumps(plan.to_data(made)))
    command = [sys.executable, str(root / "tests/mutation/run.py"), "--resume", str(folder), "--packages", "pruning", "--timeout", "2"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    rows = [json.loads(x) for x in (folder / "outcomes.jsonl").read_text().splitlines()]
    assert {r["name"]: r["outcome"] for r in rows} == dict(
        zip([m.name for m in made], ["killed", "timeout", "killed", "no tests", "survived"], strict=True)
    ), done.stdout + done.stderr
    assert done.returncode == 1
    assert "3 killed, 2 survived" in done.stdout
    assert (root / module).read_text() == source
    (folder / "outcomes.jsonl").write_text(json.dumps(rows[0]) + "\n")  # as of a run that is still going on
    report = subprocess.run([*command, "--report"], cwd=root, capture_output=True, text=True, check=False)
    assert report.stdout.startswith("pruning    1 killed, 0 survived"), report.stdout + report.stderr
    assert len((folder / "outcomes.jsonl").read_text().splitlines()) == 1  # nothing ran


def test_counts_and_interval(run):
    same = {"module": "a", "line": 1, "operator": "x"}
    records = [{**same, "outcome": o, "difference": d} for o, d in (("killed", "1"), ("survived", "2"), ("no tests", "3"))]
    counts = run.summarize(records, {"3"})
    assert {k: v for k, v in counts.items() if k != "survivors"} == {"killed": 1, "survived": 1, "equivalent": 1}
    low, high = run.interval(36, 40)
    assert (round(low, 1), round(high, 1)) == (76.9, 96.0)  # Wilson's interval of 0.9 at n = 40, by hand
    assert run.to_row("p", {"killed": 36, "survived": 4, "equivalent": 2})["95 % interval"] == "77 to 96"
