"""Polygraphy's documented examples with whet.trt as `tensorrt`, on the CPU: the commands of their READMEs, judged by Polygraphy's own test.

    python benchmarks/polygraphy_examples.py CHECKOUT [--examples run,inspect,...]

CHECKOUT is the folder tools/Polygraphy of a checkout of github.com/NVIDIA/TensorRT; nothing is fetched or installed. Needs whet[test,export],
pip install onnx-graphsurgeon pytest-console-scripts. Its tests/test_examples.py runs the commands of a README one after the other: each must succeed
(or fail, where the README says so) and write the files that it names, and examples of `inspect` and `check` must print the lines of the README.
`passed` is None for an example that the test itself skips. Commands that install packages are left out. Writes results/cpu/polygraphy_examples.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from _record import provenance
from polygraphy_tests import explain, make_shim

RESULT = Path(__file__).parent / "results" / "cpu" / "polygraphy_examples.json"
LISTS = (
    ("test_cli_examples", "CLI_EXAMPLES"),
    ("test_cli_inspect_check_examples", "CLI_INSPECT_CHECK_EXAMPLES"),
    ("test_api_examples", "API_EXAMPLES"),
)


def make_runner(environment: dict[str, str]) -> Callable[..., SimpleNamespace]:
    """The function that Polygraphy's test calls for each command of a README."""

    def run(command: list[str], cwd: str) -> SimpleNamespace:
        if "pip" in command:
            return SimpleNamespace(success=True, stdout="", stderr="")
        done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
        return SimpleNamespace(success=done.returncode == 0, stdout=done.stdout, stderr=done.stderr)

    return run


def judge_example(test: Callable, example: Any, run: Callable[..., SimpleNamespace]) -> dict[str, Any]:
    """The row of an example."""
    from _pytest.outcomes import Skipped

    begun, row = time.perf_counter(), {"example": str(example), "passed": True}
    try:
        test(example, run)
    except Skipped as e:
        row |= {"passed": None, "reason": str(e)}
    except (AssertionError, OSError) as e:
        first = e.__context__ or e  # the files that a README names are missing after a command that failed
        lines = [line for line in str(first).splitlines() if line.strip()]
        failed = explain({"test": str(example), "error": " | ".join(lines[-4:])[-400:]})
        row |= {"passed": False, "kind": failed["kind"], "reason": failed["reason"], "error": failed["error"]}
        example._remove_artifacts(must_exist=False)
    return row | {"seconds": round(time.perf_counter() - begun, 1)}


def main() -> None:
    """Runs the examples, and prints and writes their rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--examples", default="", help="only examples whose name contains one of these texts, separated by commas")
    o = parser.parse_args()
    checkout = o.checkout.resolve()
    import whet.trt

    whet.trt.install()
    sys.path.insert(0, str(checkout))
    import tests.test_examples as examples

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        environment = make_shim(Path(folder))
        environment["PYTHONPATH"] = f"{checkout}:{environment['PYTHONPATH']}"
        run = make_runner(environment)
        for test, name in LISTS:
            for item in getattr(examples, name):
                example = item.values[0] if hasattr(item, "values") else item
                if o.examples and not any(text in str(example) for text in o.examples.split(",")):
                    continue
                rows.append(judge_example(getattr(examples, test), example, run))
                print(json.dumps(rows[-1]), flush=True)
    data = provenance(["whet", "polygraphy", "onnx", "onnxruntime", "onnx_graphsurgeon", "torch", "numpy"])
    judged = [r for r in rows if r["passed"] is not None]
    if not o.examples:
        RESULT.write_text(json.dumps(data | {"passed": sum(r["passed"] for r in judged), "judged": len(judged), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
