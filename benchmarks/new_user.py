"""The clock of a new user: from `git clone` to the verified engine of a model of their own, command by command, in a clean folder.

    python benchmarks/new_user.py                       clone this repository; print the times and write results/cpu/new_user.json
    python benchmarks/new_user.py --source URL --keep   clone another address; keep the folder

The caches of pip and of packages are those of the machine (warm); whet's own caches are new. The bars are 180 s in five commands, and 0.3 s for
`whet --help` (median of seven, after one that compiles the package). Exit code 1: a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _record import provenance

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks" / "results" / "cpu" / "new_user.json"
SECONDS, HELP_SECONDS = 180.0, 0.3
MODEL = """
import numpy as np, onnx
from onnx import TensorProto, helper, numpy_helper
rng = np.random.default_rng(0)
def weight(name, *shape):
    return numpy_helper.from_array((rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32), name)
nodes = [helper.make_node("Conv", ["image", "w1"], ["a"], pads=[1] * 4), helper.make_node("Relu", ["a"], ["b"]),
         helper.make_node("MaxPool", ["b"], ["c"], kernel_shape=[2, 2], strides=[2, 2]),
         helper.make_node("Conv", ["c", "w2"], ["d"], pads=[1] * 4), helper.make_node("Relu", ["d"], ["e"]),
         helper.make_node("GlobalAveragePool", ["e"], ["f"]), helper.make_node("Flatten", ["f"], ["g"]),
         helper.make_node("Gemm", ["g", "w3"], ["scores"], transB=1)]
graph = helper.make_graph(nodes, "mine", [helper.make_tensor_value_info("image", TensorProto.FLOAT, [1, 3, 64, 64])],
                          [helper.make_tensor_value_info("scores", TensorProto.FLOAT, [1, 10])],
                          [weight("w1", 32, 3, 3, 3), weight("w2", 64, 32, 3, 3), weight("w3", 10, 64)])
onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), "mine.onnx")
"""


def commands(source: str) -> list[str]:
    """The five commands that a new user types."""
    return [
        f"git clone --quiet {source} whet",
        f"{sys.executable} -m venv env",
        "env/bin/pip install --quiet --disable-pip-version-check './whet[jit]'",
        "env/bin/whet check mine.onnx",
        "env/bin/whet exec --onnx=mine.onnx --saveEngine=mine.engine",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default=str(ROOT), help="repository to clone (default: this one)")
    parser.add_argument("--keep", action="store_true", help="keep the folder")
    parser.add_argument("--dry", action="store_true", help="write no result file")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="new_user_"))
    subprocess.run([sys.executable, "-c", MODEL], cwd=folder, check=True)  # the user's own model exists before
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")}
    env["XDG_CACHE_HOME"] = str(folder / "cache")
    env["PIP_CACHE_DIR"] = os.environ.get("PIP_CACHE_DIR") or str(Path.home() / ".cache" / "pip")
    rows: list[dict[str, Any]] = []
    for line in commands(args.source):
        start = time.perf_counter()
        done = subprocess.run(line, shell=True, cwd=folder, env=env, capture_output=True, text=True, check=False)
        shown = line.replace(sys.executable, "python3").replace(args.source, "URL")
        rows.append({"command": shown, "seconds": round(time.perf_counter() - start, 2)})
        print(f"{rows[-1]['seconds']:7.1f} s  {rows[-1]['command']}", flush=True)
        if done.returncode:
            print(done.stdout[-2000:], done.stderr[-2000:])
            return 1
    verified = "agree with the reference" in done.stdout and (folder / "mine.engine").exists()
    times = []
    for _ in range(8):
        start = time.perf_counter()
        subprocess.run(["env/bin/whet", "--help"], cwd=folder, env=env, capture_output=True, check=True)
        times.append(time.perf_counter() - start)
    total, help_s = sum(r["seconds"] for r in rows), statistics.median(times[1:])
    print(f"{total:7.1f} s  in {len(rows)} commands (at most {SECONDS:.0f}); verified: {verified}")
    print(f"{help_s:7.3f} s  whet --help (at most {HELP_SECONDS})")
    met = verified and total <= SECONDS and help_s <= HELP_SECONDS
    if not args.dry:
        result = {"what": "new user's clock", **provenance(["numpy", "onnx", "llvmlite"]), "bars": {"seconds": SECONDS, "help_seconds": HELP_SECONDS},
                  "total_seconds": round(total, 1), "help_seconds": round(help_s, 3), "verified": verified, "met": met, "rows": rows}  # fmt: skip
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
    if args.keep:
        print(folder)
    else:
        shutil.rmtree(folder)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
