"""Mutants as data: they apply to the file that they were made of, name its function, and run the tests that enter it."""

import importlib.util
import json

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
    return plan._mutant("p", "src/whet/p/a.py", line, "operator", SOURCE, changed)


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
    (tmp_path / "1.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    touched = run.read_touched(tmp_path)
    (tmp_path / "src/whet/p").mkdir(parents=True)
    (tmp_path / "src/whet/p/a.py").write_text(SOURCE)
    inner, outer = mutant(plan, SOURCE.replace("x * x", "x + x")), mutant(plan, SOURCE.replace("math.pi *", "math.pi /"))
    assert run.choose_tests(inner, tmp_path, touched) == [f"tests/p/test_{n}" for n in ("a.py::test_named", "b.py::test_quick", "b.py::test_slow")]
    assert run.choose_tests(outer, tmp_path, touched) == [f"tests/p/test_b.py::test_{n}" for n in ("other", "slow")]
    module_level = mutant(plan, SOURCE.replace("LIMIT = 3", "LIMIT = 4"))
    assert len(run.choose_tests(module_level, tmp_path, touched)) == 4


def test_a_mutant_is_applied_run_and_taken_back(plan, run, tmp_path):
    (tmp_path / "src/whet/p").mkdir(parents=True)
    (tmp_path / "src/whet/p/a.py").write_text("def double(x):\n    return x + x\n")
    test = "import sys\nsys.path.insert(0, 'src/whet/p')\nimport a\ndef test_a():\n    assert a.double({}) == 4\n"
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_weak.py").write_text(test.format(2))
    (tmp_path / "tests/test_strong.py").write_text(test.format(2) + "    assert a.double(3) == 6\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu\n    slow\n")
    source = (tmp_path / "src/whet/p/a.py").read_text()
    made = plan._mutant("p", "src/whet/p/a.py", 2, "operator", source, source.replace("x + x", "x * x"))
    outcomes = [run.run_mutant(made, tmp_path, tests, 60)["outcome"] for tests in (["tests/test_weak.py"], ["tests/test_strong.py"], [])]
    assert outcomes == ["survived", "killed", "no tests"]
    assert (tmp_path / "src/whet/p/a.py").read_text() == source
    same = {"module": "a", "line": 1, "operator": "x"}
    records = [{**same, "outcome": o, "difference": d} for o, d in (("killed", "1"), ("survived", "2"), ("no tests", "3"))]
    assert {k: v for k, v in run.summarize(records, {"3"}).items() if k != "survivors"} == {"killed": 1, "survived": 1, "equivalent": 1}
